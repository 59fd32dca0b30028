"""Files and settings that cannot be trained on."""

import os
from pathlib import Path

import polars as pl
import pytest

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from train_files import (
    make_step,
    run,
    tiny,
)

pytestmark = pytest.mark.usefixtures("one_thread")


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
    def change(t):
        return t.with_columns(pl.lit(float("nan"), dtype=pl.Float32).alias("reward"))

    rewrite("verdicts", a["verdicts"], change)


def drop_score(a):
    rewrite("scores", a["scores"] / tables.part_name(0, 1), lambda t: t.tail(-1))


def other_policys_scores(a):
    def change(t):
        return t.with_columns(pl.lit("step-00005").alias("policy"))

    rewrite("scores", a["scores"] / tables.part_name(0, 1), change)


def short_score(a):
    def change(t):
        return t.with_columns(pl.col("logprobs").list.head(1), pl.col("entropies").list.head(1))

    rewrite("scores", a["scores"] / tables.part_name(0, 1), change)


def curated_of_another_step(a):
    def change(t):
        return t.with_columns(pl.lit(7, dtype=pl.Int32).alias("step"))

    rewrite("curated", a["curated"], change)


def curated_of_another_plan(a):
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
        (
            lambda a: a.update(step=4),
            r"part-00000.*: rollout s00000/.* is of step 0, not of step 4",
        ),
        (
            lambda a: a.update(step=4, trainer=a["rollouts"].parent / "none"),
            r"none: no such trainer state",
        ),
        (lambda a: a.update(policy="/no/model"), r"/no/model: no such policy folder"),
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
    assert run(arguments, model_folder, trainer=None)["train/updates"] == 1


def test_without_curated_rows_a_replay_question_is_a_fresh_group(tmp_path, model_folder):
    arguments = make_step(tmp_path, tiny())
    metrics = run(arguments, model_folder, curated=None)
    assert metrics["train/replayed_rows"] == 0
    assert metrics["train/groups"] == 5
    assert metrics["train/off_policy_loss"] is None
