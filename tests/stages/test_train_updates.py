"""What one update does: micro-batches, work that is left out, trouble on the way."""

import json
import math
from dataclasses import replace

import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from exgrpo_cli import tables
from exgrpo_cli.models import load_model
from exgrpo_cli.training import update
from exgrpo_cli.training.batch import Batch, Row
from exgrpo_cli.training.head import open_head
from exgrpo_cli.training.objective import Clip
from train_files import (
    LONGEST,
    VOCABULARY,
    make_step,
    recipe,
    run,
    same,
    tiny,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def gpt2_batch(count=9):
    """A float64 model (GPT-2 has no part that runs in float32) and a mixed mini-batch."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    rows = []
    for index in range(count):
        length = 1 + (5 * index) % 11
        rows.append(
            Row(
                rollout_id=str(index),
                prompt_ids=torch.randint(0, VOCABULARY, (1 + index % 4,)).tolist(),
                token_ids=torch.randint(0, VOCABULARY, (length,)).tolist(),
                advantage=[0.75, -0.25, 0.0][index % 3],
                replayed=index % 4 == 0,
                old=-4 + torch.randn(length) if index % 4 == 0 else None,
                reference=-4 + torch.randn(length),
            )
        )
    return model, rows


@pytest.mark.parametrize("aggregate", ["fixed_length", "token_mean", "sequence_mean"])
@pytest.mark.parametrize("bonus", [0.0, 0.01])
def test_gradient_does_not_depend_on_micro_batches(aggregate, bonus):
    model, rows = gpt2_batch()
    settings = recipe(objective={"aggregate": aggregate, "entropy_bonus": bonus, "kl": bonus})
    terms = update.Terms(settings.objective, Clip(0.2, 0.2), LONGEST, 0.9)

    def gradient(tokens):
        model.zero_grad()
        result = update.accumulate_gradient(open_head(model), rows, terms, tokens, False)
        return result.sums, {n: p.grad.clone() for n, p in model.named_parameters()}

    sums, whole = gradient(10_000)
    for tokens in (1, 20, 50):
        cut_sums, cut = gradient(tokens)
        assert cut_sums == pytest.approx(sums, rel=1e-10)
        for name in whole:
            torch.testing.assert_close(cut[name], whole[name], rtol=1e-10, atol=1e-14)
    assert max(float(g.abs().max()) for g in whole.values()) > 1e-3


def test_float32_gradient_does_not_depend_on_micro_batches(tmp_path, model_folder):
    moments = []
    for tokens in (1, 60, 10_000):
        arguments = make_step(tmp_path / str(tokens), tiny())
        given = recipe(train={"tokens_per_microbatch": tokens}, objective={"entropy_bonus": 0.001})
        run(arguments, model_folder, given)
        moments.append(load_file(arguments["out_trainer"] / "optimizer.safetensors"))
    for name, value in moments[0].items():
        if "k_proj.bias" in name:  # shifts all scores of a query alike: 0 but for rounding
            continue
        for other in moments[1:]:
            assert (other[name] - value).norm() <= 1e-5 * value.norm(), name


def test_rows_without_advantage_are_not_run_and_nothing_changes(monkeypatch):
    model, rows = gpt2_batch()
    settings = recipe().objective
    seen = []
    real = update.token_statistics
    monkeypatch.setattr(
        update, "token_statistics", lambda head, p, r, *a: seen.extend(r) or real(head, p, r, *a)
    )

    def gradient(given):
        model.zero_grad()
        terms = update.Terms(given, None, LONGEST, 1.0)
        update.accumulate_gradient(open_head(model), rows, terms, 100, False)
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    lean = gradient(settings)
    assert len(seen) == sum(row.advantage != 0 for row in rows) < len(rows)
    full = gradient(settings.model_copy(update={"entropy_bonus": 1e-30}))
    for name in lean:
        torch.testing.assert_close(lean[name], full[name], rtol=1e-10, atol=1e-15)


def test_a_batch_without_any_advantage_is_an_update_with_no_gradient(tmp_path, model_folder):
    arguments = make_step(tmp_path, tiny(), replay=False)
    table = tables.read_table("verdicts", arguments["verdicts"])
    table = table.with_columns(pl.lit(0.0, dtype=pl.Float32).alias("reward"))
    tables.write_table("verdicts", table, arguments["verdicts"])
    metrics = run(arguments, model_folder)
    assert metrics["train/zero_advantage_groups"] == metrics["train/groups"] == 3
    assert metrics["train/grad_norm"] == 0
    assert metrics["train/updates"] == 1
    assert metrics["train/ratio_mean"] is None
    before = weights(model_folder)
    assert same(weights(arguments["out_policy"]), before)


# --- trouble on the way -------------------------------------------------------------------------


def test_an_update_above_the_norm_bound_is_skipped_and_said(tmp_path, model_folder):
    arguments = make_step(tmp_path, tiny())
    lines: list[str] = []
    given = recipe(train={"skip_grad_norm": 1e-6})
    metrics = run(arguments, model_folder, given, log=lines.append)
    assert (metrics["train/updates"], metrics["train/skipped_updates"]) == (0, 1)
    assert any("SKIPPED" in line and "above skip_grad_norm" in line for line in lines)
    assert same(weights(arguments["out_policy"]), weights(model_folder))
    file = arguments["out_trainer"] / "skipped.jsonl"
    assert any(str(file) in line for line in lines)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(row["reason"] == "gradient above skip_grad_norm = 1e-06" for row in rows)
    assert all(row["norm"] == pytest.approx(metrics["train/grad_norm"]) for row in rows)
    assert sum(row["loss"] for row in rows) == pytest.approx(metrics["train/loss"], rel=1e-4)
    assert {row["rollout_id"] for row in rows if row["replayed"]} == {"s00000/past/01"}


def test_a_loss_that_is_not_finite_names_its_rollouts_and_the_others_go_on(
    tmp_path, model_folder, monkeypatch
):
    arguments = make_step(tmp_path, tiny())
    bad = "s00000/q1-fresh/02"
    groups = Batch.groups

    def overflow(self, recipe):  # no table may hold such a value
        return [
            [replace(r, old=r.old * math.nan) if r.rollout_id == bad else r for r in group]
            for group in groups(self, recipe)
        ]

    monkeypatch.setattr(Batch, "groups", overflow)
    lines: list[str] = []
    given = recipe(train={"minibatch_questions": 2})
    metrics = run(arguments, model_folder, given, log=lines.append)
    assert (metrics["train/updates"], metrics["train/skipped_updates"]) == (2, 1)
    assert any("not finite" in line and bad in line for line in lines)
    assert sum("s00000/" in line for line in lines) == 1
    rows = (arguments["out_trainer"] / "skipped.jsonl").read_text().splitlines()
    assert [r["rollout_id"] for r in map(json.loads, rows) if not r["finite"]] == [bad]
    assert any(r["rollout_id"] != bad and r["loss"] is not None for r in map(json.loads, rows))
    assert metrics["train/ratio_mean"] is None
    assert metrics["train/grad_norm"] is not None
    after = weights(arguments["out_policy"])
    assert all(value.isfinite().all() for value in after.values())
    assert not same(after, weights(model_folder))


def test_warm_up_counts_the_updates_that_were_made(tmp_path, model_folder):
    given = recipe(train={"warmup_steps": 4, "learning_rate": 0.004, "minibatch_questions": 2})
    first = make_step(tmp_path / "a", tiny())
    assert run(first, model_folder, given)["train/learning_rate"] == pytest.approx(0.003)
    policy = load_model(str(first["out_policy"]), given.model, torch.device("cpu"), torch.float32)
    second = make_step(tmp_path / "b", policy, step=1)
    metrics = run(second, first["out_policy"], given, trainer=first["out_trainer"])
    assert metrics["train/learning_rate"] == pytest.approx(0.004)
