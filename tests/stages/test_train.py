"""The train stage, from files to the next policy."""

import json

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from exgrpo_cli import tables
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.training import update
from exgrpo_cli.training.metrics import warnings_of
from train_files import (
    LONGEST,
    SAMPLES,
    make_step,
    read_groups,
    recipe,
    run,
    same,
    three_steps,
    tiny,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")


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
        given = recipe(objective={"entropy_bonus": 0.0, "truncated": truncated})
        groups = read_groups(arguments, given, scores=None)
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
    for group in read_groups(files, given):
        rewards = [1.0 if row.replayed else reward[row.rollout_id] for row in group]
        mean = sum(rewards) / len(rewards)
        for row, r in zip(group, rewards, strict=True):
            count += 1
            if row.replayed:
                ids = torch.cat([row.prompt_ids, row.token_ids]).long()
                logprobs = tiny()(ids[None]).logits[0]
                logprobs = logprobs.log_softmax(-1)[len(row.prompt_ids) - 1 : -1]
                logprobs = logprobs.gather(-1, row.token_ids.long()[:, None])[:, 0]
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
    files = make_step(tmp_path, tiny())
    file = files["curated"]
    past = tables.read_table("curated", file).with_columns(reward=pl.lit(1.5, dtype=pl.Float32))
    tables.write_table("curated", past, file)
    reward = dict(
        tables.read_table("verdicts", files["verdicts"]).select("rollout_id", "reward").iter_rows()
    )
    group = next(group for group in read_groups(files, recipe(), scores=None) if group[0].replayed)
    others = [reward[row.rollout_id] for row in group[1:]]
    assert group[0].advantage == pytest.approx(1.5 - (1.5 + sum(others)) / SAMPLES)


def test_what_the_batch_was_like_is_in_the_metrics(tmp_path, model_folder):
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
    found, lines = warnings_of(HEALTHY | change, 1.0)
    flags = {name: value for name, value in found.items() if "warning" in name}
    assert len(flags) == 3
    assert {n.removeprefix("train/warning_") for n, v in flags.items() if v} == ({flag} - {""})
    assert len(lines) == bool(flag)
    assert all(words in line for line in lines)


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
