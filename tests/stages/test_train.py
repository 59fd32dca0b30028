"""The train stage, from files to the next policy."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.models import load_model
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.stages import train as stage
from exgrpo_cli.stages.train import train
from exgrpo_cli.training import update
from exgrpo_cli.training.head import open_head
from exgrpo_cli.training.objective import Clip
from train_files import LONGEST, SAMPLES, VOCABULARY, make_step, recipe, same, tiny, weights


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny().save_pretrained(folder)
    return folder


def run(arguments, model, given_recipe=None, **changes):
    options = {"policy": str(model), "recipe": given_recipe or recipe()} | arguments | changes
    return train(**options)


def plain_loss(model, arguments, given: Recipe, old=None):
    """The published objective written down row by row, from the tables, with plain logits."""
    rollouts = tables.read_table("rollouts", arguments["rollouts"])
    verdicts = tables.read_table("verdicts", arguments["verdicts"])
    reward = dict(verdicts.select("rollout_id", "reward").iter_rows())
    scored = {}
    if arguments["scores"] is not None:
        scores = tables.read_table("scores", arguments["scores"] / tables.part_name(0, 1))
        scored = dict(scores.select("rollout_id", "logprobs").iter_rows())
    groups: dict = {}
    for row in rollouts.to_dicts():
        key = (row["problem_id"], row["role"])
        groups.setdefault(key, []).append((row, reward[row["rollout_id"]], False))
    for row in tables.read_table("curated", arguments["curated"]).to_dicts():
        groups[row["problem_id"], "replay"].append((row, 1.0, True))
    total, count = 0.0, 0
    for group in groups.values():
        mean = sum(r for _, r, _ in group) / len(group)
        for row, r, is_past in group:
            count += 1
            ids = torch.tensor([row["prompt_ids"] + row["token_ids"]])
            logprobs = model(ids).logits[0].log_softmax(-1)[len(row["prompt_ids"]) - 1 : -1]
            logprobs = logprobs.gather(-1, torch.tensor(row["token_ids"])[:, None])[:, 0]
            before = row["logprobs"] if is_past else scored.get(row["rollout_id"])
            before = logprobs.detach() if before is None else torch.tensor(before)
            ratio = (logprobs - before).exp()
            surrogate = ratio / (ratio + given.objective.beta) if is_past else ratio
            total = total - ((r - mean) * surrogate).sum() / LONGEST
    return total / count


# --- the objective, from files ------------------------------------------------------------------


@pytest.mark.parametrize("scores", [True, False])
def test_first_update_follows_the_plain_objective(tmp_path, model_folder, scores):
    model = tiny()
    arguments = make_step(tmp_path, model, scores=scores)
    given = recipe(train={"max_grad_norm": 1e9})
    metrics = run(arguments, model_folder, given)

    loss = plain_loss(model, arguments, given)
    loss.backward()
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-4)
    # The first moment of AdamW's first update is (1 - beta_1) times the gradient.
    state = load_file(arguments["out_trainer"] / "optimizer.safetensors")
    squares = 0.0
    for name, parameter in model.named_parameters():
        got = state[f"{name}/exp_avg"] / (1 - given.train.betas[0])
        torch.testing.assert_close(got, parameter.grad, rtol=1e-3, atol=1e-6)
        squares += float(parameter.grad.square().sum())
    assert metrics["train/grad_norm"] == pytest.approx(squares**0.5, rel=1e-4)
    assert metrics["train/rows"] == 3 * SAMPLES + 2 * (SAMPLES - 1) + 1
    assert metrics["train/replayed_rows"] == 1
    assert metrics["train/groups"] == 5
    assert metrics["train/updates"] == 1
    assert metrics["train/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert metrics["train/clip_fraction"] == 0
    assert "skipped" not in metrics
    json.dumps(metrics, allow_nan=False)


def test_truncated_responses_can_be_left_without_advantage(tmp_path):
    arguments = make_step(tmp_path, tiny())
    part = arguments["rollouts"] / tables.part_name(0, 2)
    rows = tables.read_table("rollouts", part).to_dicts()
    cut = {row["rollout_id"] for row in rows[::2]}
    for row in rows[::2]:
        row["finish_reason"] = "length"
    tables.write_table("rollouts", tables.frame("rollouts", rows), part)

    def advantages(truncated):
        groups = stage._read_groups(
            arguments["rollouts"], arguments["verdicts"], None, arguments["curated"], 0,
            recipe(objective={"entropy_bonus": 0.0, "truncated": truncated}),
        )  # fmt: skip
        return [(row.rollout_id, row.replayed, row.advantage) for group in groups for row in group]

    kept, silent = advantages("keep"), advantages("zero_advantage")
    assert any(value and name in cut for name, _, value in kept)
    # The others' advantages still come from the whole group's mean.
    assert silent == [(n, past, 0.0 if n in cut and not past else v) for n, past, v in kept]


def test_the_first_update_moves_every_weight_by_the_learning_rate(tmp_path, model_folder):
    arguments = make_step(tmp_path, tiny())
    run(arguments, model_folder)
    before, after = weights(model_folder), weights(arguments["out_policy"])
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert moved == pytest.approx(0.01, rel=1e-2)


def test_learning_raises_the_chance_of_what_was_rewarded(tmp_path, model_folder):
    model = tiny()
    arguments = make_step(tmp_path, model, replay=False)
    given = recipe(train={"learning_rate": 0.002})
    run(arguments, model_folder, given)
    with torch.no_grad():
        after = tiny()
        after.load_state_dict(weights(arguments["out_policy"]), strict=False)
        assert plain_loss(after, arguments, given) < plain_loss(model, arguments, given) - 0.01


def test_old_logprobs_come_from_scores_else_from_one_pass_before_the_first_update(
    tmp_path, model_folder
):
    given = recipe(train={"minibatch_questions": 2})
    results = {}
    for scores in (True, False):
        arguments = make_step(tmp_path / str(scores), tiny(), scores=scores)
        results[scores] = run(arguments, model_folder, given)
        results[scores]["exact"] = weights(arguments["out_policy"])
    assert results[True]["train/updates"] == results[False]["train/updates"] == 3
    for name in ("train/loss", "train/ratio_max", "train/grad_norm", "train/kl_old"):
        assert results[True][name] == pytest.approx(results[False][name], rel=1e-3, abs=1e-6)
    assert results[True]["train/ratio_max"] > 1.001  # the later updates are off by an update
    for name, value in results[True]["exact"].items():
        difference = (value - results[False]["exact"][name]).abs()
        assert difference.median() < 1e-5, name


@pytest.mark.parametrize(
    ("setting", "started", "clipped"),
    [("auto", False, True), ("auto", True, False), ("on", True, True), ("off", False, False)],
)
def test_clipping_is_on_until_replay_has_started(tmp_path, model_folder, setting, started, clipped):
    arguments = make_step(tmp_path, tiny(), replay=False)
    given = recipe(
        objective={"clip": setting, "clip_low": 0.001, "clip_high": 0.001},
        train={"minibatch_questions": 1},
    )
    metrics = run(arguments, model_folder, given, replay_started=started)
    assert (metrics["train/clip_fraction"] > 0) == clipped


def test_parts_and_their_order_do_not_matter(tmp_path, model_folder):
    arguments = make_step(tmp_path, tiny())
    run(arguments, model_folder)
    files = sorted(arguments["rollouts"].iterdir())
    other = {"out_policy": tmp_path / "p2", "out_trainer": tmp_path / "t2"}
    run(arguments, model_folder, rollouts=files[::-1], **other)
    assert same(weights(arguments["out_policy"]), weights(tmp_path / "p2"))


def test_sampler_mismatch_is_measured(tmp_path, model_folder):
    exact = make_step(tmp_path / "a", tiny(), noise=0.0)
    off = make_step(tmp_path / "b", tiny(), noise=0.1)
    at, away = run(exact, model_folder), run(off, model_folder)
    assert at["train/sampling_logp_difference_max"] < 1e-5
    assert away["train/sampling_logp_difference_mean"] == pytest.approx(0.08, abs=0.03)
    assert away["train/sampling_logp_difference_max"] > 0.15
    assert at["train/sampling_ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert at["train/sampling_ratio_std"] < 1e-3
    assert away["train/sampling_ratio_std"] == pytest.approx(0.1, abs=0.04)
    assert away["train/sampling_ratio_max"] > 1.15
    # The engine's own numbers are a metric only: the step is the same.
    assert same(weights(exact["out_policy"]), weights(off["out_policy"]))


@pytest.mark.parametrize("cap", [1.2, 1.0])
def test_truncated_importance_correction_weighs_fresh_tokens(tmp_path, model_folder, cap):
    files = make_step(tmp_path, tiny(), noise=0.4)
    rows = {r["rollout_id"]: r for r in tables.read_table("rollouts", files["rollouts"]).to_dicts()}
    scores = tables.read_table("scores", files["scores"] / tables.part_name(0, 1)).to_dicts()
    exact = {row["rollout_id"]: row["logprobs"] for row in scores}
    given = recipe(objective={"sampler_cap": cap}, train={"max_grad_norm": 1e9})
    metrics = run(files, model_folder, given)
    reward = dict(
        tables.read_table("verdicts", files["verdicts"]).select("rollout_id", "reward").iter_rows()
    )
    # At the first update every ratio is 1, so a token's loss is minus its advantage and its weight.
    total, count, capped, tokens = 0.0, 0, 0, 0
    for group in stage._read_groups(
        files["rollouts"], files["verdicts"], files["scores"], files["curated"], 0, given
    ):
        rewards = [1.0 if row.replayed else reward[row.rollout_id] for row in group]
        mean = sum(rewards) / len(rewards)
        for row, r in zip(group, rewards, strict=True):
            count += 1
            if row.replayed:
                logprobs = tiny()(torch.tensor([row.prompt_ids + row.token_ids])).logits[0]
                logprobs = logprobs.log_softmax(-1)[len(row.prompt_ids) - 1 : -1]
                logprobs = logprobs.gather(-1, torch.tensor(row.token_ids)[:, None])[:, 0]
                ratio = (logprobs - row.old).exp()
                total -= (r - mean) * (ratio / (ratio + 0.1)).sum().item() / LONGEST
                continue
            engine = torch.tensor(rows[row.rollout_id]["logprobs"])
            ratio = (torch.tensor(exact[row.rollout_id]) - engine).exp()
            weight = ratio.clamp(max=cap)
            total -= (r - mean) * float(weight.sum()) / LONGEST
            if r != mean or any(r != rewards[0] for r in rewards):
                capped += int((ratio > cap).sum())
                tokens += len(weight)
    assert metrics["train/loss"] == pytest.approx(total / count, rel=1e-4)
    assert metrics["train/sampling_capped_share"] == pytest.approx(capped / tokens)
    assert 0 < capped < tokens


def test_a_replayed_success_has_the_reward_that_it_was_collected_with(tmp_path):
    import polars as pl

    files = make_step(tmp_path, tiny())
    file = files["curated"]
    past = tables.read_table("curated", file).with_columns(reward=pl.lit(1.5, dtype=pl.Float32))
    tables.write_table("curated", past, file)
    reward = dict(
        tables.read_table("verdicts", files["verdicts"]).select("rollout_id", "reward").iter_rows()
    )
    group = next(
        group
        for group in stage._read_groups(
            files["rollouts"], files["verdicts"], None, file, 0, recipe()
        )
        if group[0].replayed
    )
    others = [reward[row.rollout_id] for row in group[1:]]
    assert group[0].advantage == pytest.approx(1.5 - (1.5 + sum(others)) / SAMPLES)


def test_what_the_batch_was_like_is_in_the_metrics(tmp_path, model_folder):
    import polars as pl

    files = make_step(tmp_path, tiny(), step=3)
    part = files["rollouts"] / tables.part_name(0, 2)
    cut = tables.read_table("rollouts", part).with_columns(finish_reason=pl.lit("length"))
    tables.write_table("rollouts", cut, part)
    metrics = run(files, model_folder, trainer=None, recipe=recipe(), step=3)
    rows = tables.read_table("rollouts", files["rollouts"])
    rows = rows.join(tables.read_table("verdicts", files["verdicts"]), on="rollout_id")
    fresh, again = (rows.filter(role=role)["reward"].mean() for role in ("fresh", "replay"))
    assert metrics["train/reward_fresh"] == pytest.approx(fresh)
    assert metrics["train/reward_replay"] == pytest.approx(again)
    hard = rows.filter(role="replay", problem_id="q0")["reward"].mean()
    assert metrics["train/reward_replay_hard"] == pytest.approx(hard)
    assert metrics["train/replay_age_mean"] == metrics["train/replay_age_max"] == 3
    assert metrics["train/truncated_share"] == pytest.approx(cut.height / rows.height)


# --- early warnings ---------------------------------------------------------------------------


HEALTHY = {
    "train/entropy": 0.5, "train/ratio_max": 1.3, "train/groups": 10,
    "train/zero_advantage_groups": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "flag", "words"),
    [
        ({}, "", ""),
        ({"train/entropy": 0.19}, "entropy", "entropy is 19% of the first step's"),
        ({"train/ratio_max": 11.0}, "ratio", "rose 11 times"),
        ({"train/zero_advantage_groups": 10}, "groups", "100% of the groups have equal rewards"),
        ({"train/entropy": None, "train/ratio_max": None}, "", ""),
    ],
)
def test_early_warnings(change, flag, words):
    lines: list[str] = []
    found = stage.warnings_of(HEALTHY | change, 1.0, lines.append)
    flags = {name: value for name, value in found.items() if "warning" in name}
    assert len(flags) == 3
    assert {n.removeprefix("train/warning_") for n, v in flags.items() if v} == ({flag} - {""})
    assert len(lines) == bool(flag)
    assert all(line.startswith("warning: ") and words in line for line in lines)


def test_entropy_is_compared_with_the_first_step_across_steps(tmp_path, model_folder):
    files = three_steps(tmp_path, model_folder, recipe())
    entropies, shares = [], []
    for step in files:
        metrics = json.loads((step["out_trainer"] / "trainer.json").read_text())["metrics"]
        entropies.append(metrics["train/entropy"])
        shares.append(metrics["train/entropy_of_start"])
    assert shares == pytest.approx([entropy / entropies[0] for entropy in entropies])


# --- the learning rate ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [8.0, 8.0, 8.0, 8.0]),
        ("linear", [8.0, 6.5, 5.0, 2.0]),
        ("cosine", [8.0, 2 + 6 * (1 + 0.5**0.5) / 2, 5.0, 2.0]),
    ],
)
def test_schedules(schedule, rates):
    settings = recipe(
        train={"learning_rate": 8.0, "min_learning_rate": 2.0, "schedule": schedule}
    ).train
    found = [update.learning_rate(settings, 9, share) for share in (0.0, 0.25, 0.5, 1.0)]
    assert found == pytest.approx(rates)
    warm = settings.model_copy(update={"warmup_steps": 4})
    assert update.learning_rate(warm, 0, 0.0) == 2.0


def test_the_schedule_runs_over_the_steps_of_the_loop(tmp_path, model_folder):
    given = recipe(
        train={"schedule": "linear", "learning_rate": 0.01, "minibatch_questions": 3},
        loop={"steps": 4},
    )
    files = make_step(tmp_path, tiny(), step=2, scores=False)
    metrics = run(files, model_folder, given)
    # The second of two updates of the third of four steps: 2.5 / 4 is done.
    assert metrics["train/learning_rate"] == pytest.approx(0.01 * (1 - 2.5 / 4))


def test_kl_to_the_initial_policy(tmp_path, model_folder):
    moved = tiny()
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    moved.save_pretrained(tmp_path / "moved")
    arguments = make_step(tmp_path, moved)
    free = run(arguments, tmp_path / "moved")
    held = recipe(objective={"kl": 0.5, "reference": str(model_folder)})
    other = {"out_policy": tmp_path / "p2", "out_trainer": tmp_path / "t2"}
    metrics = run(arguments, tmp_path / "moved", held, **other)
    assert "train/kl_reference" not in free
    assert metrics["train/kl_reference"] > 0.001
    assert metrics["train/loss"] > free["train/loss"]
    same_policy = recipe(objective={"kl": 0.5}, model={"path": str(tmp_path / "moved")})
    other = {"out_policy": tmp_path / "p3", "out_trainer": tmp_path / "t3"}
    assert run(arguments, tmp_path / "moved", same_policy, **other)[
        "train/kl_reference"
    ] == pytest.approx(0, abs=1e-9)


# --- micro-batches and skipped work -----------------------------------------------------------


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
            update.Row(
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
    import polars as pl

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


def test_a_loss_that_is_not_finite_names_its_rollouts_and_the_others_go_on(tmp_path, model_folder):
    import polars as pl

    arguments = make_step(tmp_path, tiny())
    bad = "s00000/q1-fresh/02"
    file = arguments["scores"] / tables.part_name(0, 1)
    scores = tables.read_table("scores", file)
    broken = pl.when(pl.col("rollout_id") == bad).then(
        pl.col("logprobs").list.eval(pl.element() * float("nan"))
    )
    scores = scores.with_columns(broken.otherwise(pl.col("logprobs")).alias("logprobs"))
    tables.write_table("scores", scores, file)
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


# --- resuming -----------------------------------------------------------------------------------


def three_steps(root: Path, model_folder, given, scores=True):
    """Three steps of the stage, each from files."""
    policy, trainer = str(model_folder), None
    arguments = []
    for step in range(3):
        model = load_model(policy, given.model, torch.device("cpu"), torch.float32)
        files = make_step(root / str(step), model, step=step, scores=scores)
        arguments.append(files | {"policy": policy, "trainer": trainer})
        train(**arguments[-1], recipe=given)
        policy, trainer = str(files["out_policy"]), files["out_trainer"]
    return arguments


def test_steps_from_files_equal_steps_in_memory_bit_for_bit(tmp_path, model_folder):
    given = recipe(
        train={"minibatch_questions": 2, "weight_decay": 0.1, "warmup_steps": 3},
        objective={"entropy_bonus": 0.01},
    )
    arguments = three_steps(tmp_path, model_folder, given, scores=False)
    model = load_model(str(model_folder), given.model, torch.device("cpu"), torch.float32)
    optimizer = update.make_optimizer(model, given.train)
    done = 0
    for step, files in enumerate(arguments):
        groups = stage._read_groups(
            files["rollouts"], files["verdicts"], None, files["curated"], step, given
        )
        result = update.run_updates(
            open_head(model), groups, stage._terms(given, True), optimizer, given.train,
            seed=tables.row_seed(given.seed, "train", step), done=done,
        )  # fmt: skip
        done = result.total_updates
    assert done == 9
    last = arguments[-1]
    saved = weights(last["out_policy"])
    state = load_file(last["out_trainer"] / "optimizer.safetensors")
    for index, (name, parameter) in enumerate(model.named_parameters()):
        assert torch.equal(saved[name], parameter.detach()), name
        for key, value in optimizer.state_dict()["state"][index].items():
            assert torch.equal(state[f"{name}/{key}"], value), (name, key)


def test_bfloat16_policies_keep_float32_masters(tmp_path, model_folder):
    """A tiny learning rate would be lost in bfloat16; it is not, since the masters go on."""
    given = recipe(train={"save_dtype": "bfloat16", "learning_rate": 1e-5})
    arguments = three_steps(tmp_path, model_folder, given)
    last = arguments[-1]
    saved, masters = (
        weights(last["out_policy"]),
        load_file(last["out_trainer"] / "masters.safetensors"),
    )
    start = weights(model_folder)
    for name, master in masters.items():
        assert master.dtype == torch.float32
        assert saved[name].dtype == torch.bfloat16
        assert torch.equal(saved[name], master.bfloat16())
        moved = (master - start[name]).abs().max()
        assert 0 < moved < 4e-5, name  # three small updates from the float32 start, not rounded
    config = json.loads((last["out_policy"] / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    # auto: as the policy that was trained
    other = {"out_policy": tmp_path / "auto", "out_trainer": tmp_path / "auto-trainer"}
    train(**last | other, recipe=recipe(train={"learning_rate": 1e-5}))
    assert same(weights(tmp_path / "auto"), saved)


KILLED = textwrap.dedent("""
    import json, os, signal, sys
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM
    from exgrpo_cli.training import trainer_state as checkpoint
    from exgrpo_cli.recipe import parse_recipe
    from exgrpo_cli.stages.train import train
    arguments = json.loads(sys.argv[1])
    recipe = parse_recipe(arguments.pop("recipe"), "test")

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def run(point):
        values = {k: Path(v) if k in sys.argv[2].split(",") and v else v
                  for k, v in arguments.items()}
        for name in ("out_policy", "out_trainer"):
            values[name] = values[name].parent / point / values[name].name
        log = None
        if point == "update":
            log = lambda line: "update 2/3" in line and die()
        if point == "trainer":
            checkpoint.save_file = die
        if point == "between":
            checkpoint.save_policy = die
        if point == "policy":
            checkpoint._save_tokenizer = die
        train(**values, recipe=recipe, log=log)

    for point in ("update", "trainer", "between", "policy"):
        child = os.fork()
        if child == 0:
            run(point)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, point
""")


@pytest.mark.slow
def test_a_killed_step_is_done_again_to_the_same_bits(tmp_path, model_folder):
    given = recipe(train={"minibatch_questions": 2})
    arguments = three_steps(tmp_path, model_folder, given)[1]  # has a trainer state before it
    paths = [key for key, value in arguments.items() if isinstance(value, Path)]
    values = {k: str(v) if isinstance(v, Path) else v for k, v in arguments.items()}
    values["recipe"] = given.model_dump(mode="json")
    subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps(values), ",".join(paths)],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    policy, trainer = arguments["out_policy"], arguments["out_trainer"]
    for point in ("update", "trainer", "between", "policy"):
        other = {
            "out_policy": policy.parent / point / policy.name,
            "out_trainer": trainer.parent / point / trainer.name,
        }
        assert not other["out_policy"].exists(), point
        assert other["out_trainer"].exists() == (point in ("between", "policy"))
        metrics = train(**arguments | other, recipe=given)
        assert "skipped" not in metrics
        assert same(weights(other["out_policy"]), weights(policy)), point
        state = load_file(other["out_trainer"] / "optimizer.safetensors")
        assert same(state, load_file(trainer / "optimizer.safetensors")), point
        # Nothing of the killed attempt is left.
        assert [p.name for p in other["out_policy"].parent.iterdir()] == [policy.name]
        assert [p.name for p in other["out_trainer"].parent.iterdir()] == [trainer.name]


def test_a_step_that_is_done_is_not_done_again(tmp_path, model_folder):
    arguments = make_step(tmp_path, tiny())
    metrics = run(arguments, model_folder)
    before = (arguments["out_policy"] / "model.safetensors").stat().st_mtime_ns
    again = run(arguments, "/no/such/policy")
    assert again == {"skipped": True, "policy": str(arguments["out_policy"])} | metrics
    assert (arguments["out_policy"] / "model.safetensors").stat().st_mtime_ns == before


def test_the_callers_random_numbers_are_left_alone(tmp_path, model_folder):
    arguments = make_step(tmp_path, tiny())
    torch.manual_seed(7)
    want = torch.rand(3)
    torch.manual_seed(7)
    run(arguments, model_folder)
    assert torch.equal(torch.rand(3), want)


def test_dropout_is_seeded_by_the_step(tmp_path):
    tiny(dropout=0.3).save_pretrained(tmp_path / "model")
    results = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        arguments = make_step(tmp_path / name, tiny())
        torch.manual_seed(hash(name) % 1000)
        run(arguments, tmp_path / "model", replace_seed(recipe(), seed))
        results.append(weights(arguments["out_policy"]))
    assert same(results[0], results[1])
    assert not same(results[0], results[2])


def replace_seed(given: Recipe, seed: int) -> Recipe:
    return given.model_copy(update={"seed": seed})


def test_old_trainer_states_are_removed_when_asked(tmp_path, model_folder):
    arguments = make_step(tmp_path, tiny())
    old = arguments["out_trainer"].parent / "step-00000"
    old.mkdir(parents=True)
    (old / "trainer.json").write_text("{}")
    run(arguments, model_folder, recipe(train={"keep": 1}))
    assert [p.name for p in old.parent.iterdir()] == ["step-00001"]


def test_gradient_checkpointing_changes_memory_not_results(tmp_path, model_folder):
    results = []
    for on in (False, True):
        arguments = make_step(tmp_path / str(on), tiny())
        run(arguments, model_folder, recipe(train={"gradient_checkpointing": on}))
        results.append(load_file(arguments["out_trainer"] / "optimizer.safetensors"))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-8)


# --- LoRA -----------------------------------------------------------------------------------------


def test_lora_trains_an_adapter_over_two_steps_that_opens_in_peft_and_generates(
    tmp_path, model_folder
):
    from peft import AutoPeftModelForCausalLM

    given = recipe(lora={"enabled": True, "rank": 4, "alpha": 8})
    first = make_step(tmp_path / "0", tiny())
    run(first, model_folder, given)
    names = {p.name for p in first["out_policy"].iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert "model.safetensors" not in names
    one = load_file(first["out_policy"] / "adapter_model.safetensors")
    assert any(value.abs().sum() > 0 for name, value in one.items() if "lora_B" in name)

    device, dtype = torch.device("cpu"), torch.float32
    model = load_model(str(first["out_policy"]), given.model, device, dtype)
    second = make_step(tmp_path / "1", model, step=1)
    metrics = run(second, first["out_policy"], given, trainer=first["out_trainer"])
    assert metrics["train/sampling_logp_difference_max"] < 1e-5  # the adapter was in the policy
    two = load_file(second["out_policy"] / "adapter_model.safetensors")
    assert two.keys() == one.keys()
    assert all(not torch.equal(one[name], two[name]) for name in one)
    state = load_file(second["out_trainer"] / "optimizer.safetensors")
    assert {name.rpartition("/")[0].rpartition(".")[2] for name in state} == {"weight"}
    assert all("lora_" in name for name in state)
    assert {int(v) for name, v in state.items() if name.endswith("/step")} == {2}

    opened = AutoPeftModelForCausalLM.from_pretrained(second["out_policy"])
    ids = torch.tensor([[5, 6, 7]])
    generated = opened.generate(input_ids=ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert generated.shape[1] > 3
    base = tiny()
    assert (opened(ids).logits - base(ids).logits).abs().max() > 1e-3


def test_an_adapter_is_not_trained_as_a_whole_model(tmp_path, model_folder):
    arguments = make_step(tmp_path, tiny())
    run(arguments, model_folder, recipe(lora={"enabled": True}))
    other = {"out_policy": tmp_path / "p2", "out_trainer": tmp_path / "t2"}
    with pytest.raises(InputError, match=r"lora\.enabled is false"):
        run(arguments, arguments["out_policy"], **other)


def test_unknown_lora_targets_are_refused(tmp_path, model_folder):
    arguments = make_step(tmp_path, tiny())
    with pytest.raises(InputError, match=r"lora\.targets = \['nothing'\]"):
        run(arguments, model_folder, recipe(lora={"enabled": True, "targets": ["nothing"]}))


# --- bad input ------------------------------------------------------------------------------------


def rewrite(table: str, file: Path, change):
    tables.write_table(table, change(tables.read_table(table, file)), file)


def drop_verdict(a):
    rewrite("verdicts", a["verdicts"], lambda t: t.tail(-1))


def double_verdict(a):
    rewrite("verdicts", a["verdicts"], lambda t: t.vstack(t.head(1)))


def foreign_verdict(a):
    extra = {"rollout_id": "s00009/x/01", "reward": 1.0, "correct": True, "status": "ok",
             "verifier": "math", "seconds": 0.0}  # fmt: skip
    rewrite("verdicts", a["verdicts"], lambda t: t.vstack(tables.frame("verdicts", [extra])))


def nan_reward(a):
    import polars as pl

    def change(t):
        return t.with_columns(pl.lit(float("nan"), dtype=pl.Float32).alias("reward"))

    rewrite("verdicts", a["verdicts"], change)


def drop_score(a):
    rewrite("scores", a["scores"] / tables.part_name(0, 1), lambda t: t.tail(-1))


def other_policys_scores(a):
    import polars as pl

    def change(t):
        return t.with_columns(pl.lit("step-00005").alias("policy"))

    rewrite("scores", a["scores"] / tables.part_name(0, 1), change)


def short_score(a):
    import polars as pl

    def change(t):
        return t.with_columns(pl.col("logprobs").list.head(1), pl.col("entropies").list.head(1))

    rewrite("scores", a["scores"] / tables.part_name(0, 1), change)


def curated_of_another_step(a):
    import polars as pl

    def change(t):
        return t.with_columns(pl.lit(7, dtype=pl.Int32).alias("step"))

    rewrite("curated", a["curated"], change)


def curated_of_another_plan(a):
    import polars as pl

    def change(t):
        return t.with_columns(pl.lit("q9").alias("problem_id"))

    rewrite("curated", a["curated"], change)


def curated_twice(a):
    rewrite("curated", a["curated"], lambda t: t.vstack(t))


def repeated_part(a):
    first = a["rollouts"] / tables.part_name(0, 2)
    (a["rollouts"] / tables.part_name(0, 3)).write_bytes(first.read_bytes())


def no_rollouts(a):
    for file in a["rollouts"].iterdir():
        rewrite("rollouts", file, lambda t: t.head(0))


def truncated_part(a):
    os.truncate(a["rollouts"] / tables.part_name(0, 2), 300)


def foreign_tokens(a):
    import polars as pl

    def change(t):
        return t.with_columns(pl.col("token_ids").list.eval(pl.element() + 1000))

    rewrite("rollouts", a["rollouts"] / tables.part_name(0, 2), change)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop_verdict, r"verdicts\.parquet: no verdict on rollout s00000/.*; run verify"),
        (double_verdict, r"verdicts\.parquet: rollout_id s00000/.* more than once"),
        (foreign_verdict, r"verdicts\.parquet: a verdict on rollout s00009/x/01, which is not in"),
        (nan_reward, r"verdicts\.parquet: column reward is nan in row 1"),
        (drop_score, r"scores: no score of rollout s00000/q0-fresh/00 under its policy step-00000"),
        (other_policys_scores, r"scores: no score of rollout s00000/.* under its policy"),
        (short_score, r"rollout s00000/.* has 1 logprobs, but \d+ tokens in .*; run score again"),
        (curated_of_another_step, r"curated\.parquet: rollout s00000/past/01 is of step 7, not"),
        (curated_of_another_plan, r"curated\.parquet: question q9 .* no replay rollouts"),
        (curated_twice, r"curated\.parquet: problem_id q0 is there more than once"),
        (repeated_part, r"rollouts: rollout_id s00000/.* more than once; are parts of two"),
        (no_rollouts, r"rollouts: no rollouts; there is nothing to train on"),
        (truncated_part, r"part-00000-of-00002\.parquet: not a readable Parquet file"),
        (foreign_tokens, r"rollout s00000/.* holds token id 10\d\d, outside .* vocabulary of 48"),
        (lambda a: a.update(step=4), r"part-0.*: rollout s00000/.* is of step 0, not of step 4"),
        (
            lambda a: a.update(step=4, trainer=a["rollouts"].parent / "none"),
            r"none: no trainer state for step 4; train step 3 first, or give no trainer state",
        ),
        (lambda a: a.update(policy="/no/model"), r"/no/model: no such policy folder"),
        (
            lambda a: a.update(recipe=recipe(rollout={"top_p": 0.9})),
            r"rollout\.top_p is 0\.9; it must be 1 in training",
        ),
        (
            lambda a: a.update(recipe=recipe(rollout={"temperature": 0.0})),
            r"rollout\.temperature is 0",
        ),
    ],
    ids=lambda x: getattr(x, "__name__", "")[:30],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, model_folder, spoil, message):
    arguments = make_step(tmp_path, tiny())
    spoil(arguments)
    with pytest.raises(InputError, match=message) as error:
        run(arguments, arguments.pop("policy", model_folder), arguments.pop("recipe", None))
    assert "\n" not in str(error.value)
    assert not arguments["out_policy"].parent.exists()
    assert not arguments["out_trainer"].parent.exists()


def test_a_fresh_optimizer_is_allowed_when_asked_for(tmp_path, model_folder):
    arguments = make_step(tmp_path, tiny(), step=3)
    assert run(arguments, model_folder)["train/updates"] == 1


def test_step_zero_needs_no_trainer_state(tmp_path, model_folder):
    arguments = make_step(tmp_path, tiny())
    assert run(arguments, model_folder, trainer=tmp_path / "none")["train/updates"] == 1


def test_without_curated_rows_a_replay_question_is_a_fresh_group(tmp_path, model_folder):
    arguments = make_step(tmp_path, tiny())
    metrics = run(arguments, model_folder, curated=None)
    assert metrics["train/replayed_rows"] == 0
    assert metrics["train/groups"] == 5
    assert metrics["train/off_policy_loss"] is None
