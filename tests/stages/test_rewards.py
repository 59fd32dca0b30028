"""What a response earns: required formats, whole texts, rewards for format and length."""

from pathlib import Path

import polars as pl
import pytest

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.recipe import parse_recipe
from rollout_files import explain, rollout, trusting, verify, write_problems, write_rollouts


def test_a_required_format(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def judge(response, answer, metadata):\n    return 2.0\n")
    problems = write_problems(
        tmp_path / "p.parquet", [("m", "12", "math", None), ("f", "1", f"{own}:judge", None)]
    )
    rows = [
        rollout("m", 0, r"So the answer is \boxed{12}."),
        rollout("m", 1, r"<think>a</think> \boxed{12}"),
        rollout("m", 2, r"a</think> <answer>\boxed{12}</answer>"),
        rollout("m", 3, r"<think>a</think> \boxed{1}"),
        rollout("m", 4, r"<think>I guess \boxed{12}. Wait") | {"finish_reason": "length"},
        rollout("f", 0, "no thought"),
        rollout("f", 1, "a</think> b"),
    ]
    file = write_rollouts(tmp_path / "r.parquet", rows)
    out = tmp_path / "v.parquet"

    def judged(require: str, **options: object) -> pl.DataFrame:
        recipe = trusting(tmp_path, require=require, **options)
        verify(file, problems, out, recipe, force=True)
        verdicts = tables.read_table("verdicts", out)
        gated = verdicts.filter(pl.col("status") == "no_format")
        assert not gated["correct"].any()
        assert gated["extracted"].null_count() == gated.height
        return verdicts

    gate = "no_format"
    anyone = judged("none")
    assert anyone["status"].to_list() == ["ok"] * 4 + ["no_answer", "ok", "ok"]
    assert anyone["reward"].to_list() == [1, 1, 1, 0, 0, 2, 2]
    think = judged("think")
    assert think["status"].to_list() == [gate, "ok", "ok", "ok", gate, gate, "ok"]
    assert think["reward"].to_list() == [0, 1, 1, 0, 0, 0, 2]
    tags = judged("think_answer", format="think", format_reward=0.5, length_penalty=0.25)
    assert tags["status"].to_list() == [gate, gate, "ok", gate, gate, gate, gate]
    # no reward for another format makes up for it; a penalty is still taken
    assert tags["reward"].to_list() == [0, 0, 1.5, 0, -0.25, 0, 0]
    recipe = parse_recipe({"verify": {"workers": 1, "require": "think"}}, "test")
    shown = explain(file, problems, "s00000/m/00", recipe, "math")
    assert (shown["status"], shown["correct"], shown["reward"]) == ("no_format", False, 0.0)
    assert shown["extracted"] is None
    assert "verify.require" in shown["why"]


@pytest.mark.parametrize("verifier", ["math", "math_verify"])
def test_math_verify_looks_for_the_answer_in_the_whole_text(tmp_path: Path, verifier: str) -> None:
    problems = write_problems(tmp_path / "p.parquet", [("m", "12", verifier, None)])
    texts = [
        "t</think>\nHence x equals $12$.",
        "t</think>\nHence x equals $11$.",
        r"So the answer is \boxed{12}.",
        r"$12$</think>\nHence $11$ of them, the other one is \boxed{12}.",
        "<think>x equals $12$",
        "x equals $12$</think>\n ",
    ]
    rows = [rollout("m", index, text) for index, text in enumerate(texts)]
    file = write_rollouts(tmp_path / "r.parquet", rows)
    out = tmp_path / "v.parquet"
    for require, first, last in (("none", "ok", "no_answer"), ("think", "no_format", "no_format")):
        settings = {"workers": 1, "extract": "whole", "require": require}
        recipe = parse_recipe({"verify": settings}, "test")
        verify(file, problems, out, recipe, force=True)
        verdicts = tables.read_table("verdicts", out)
        assert verdicts["status"].to_list() == ["ok", "ok", first, "ok", last, "no_answer"]
        right = [True, False, require == "none", True, False, False]
        assert verdicts["correct"].to_list() == right
        assert verdicts["extracted"][0] == "Hence x equals $12$."
        assert explain(file, problems, "s00000/m/00", recipe)["correct"] is True


def test_rewards_for_format_and_length(tmp_path: Path) -> None:
    problems = write_problems(tmp_path / "p.parquet", [("m", "1", "exact", None)])
    rows = [
        rollout("m", 0, r"<think>a</think> \boxed{1}"),
        rollout("m", 1, r"<think>a</think> \boxed{2}"),
        rollout("m", 2, r"\boxed{1}") | {"tokens": 95},
        rollout("m", 3, r"\boxed{1} and so on") | {"tokens": 100, "finish_reason": "length"},
        rollout("m", 4, "cut") | {"tokens": 7, "finish_reason": "length"},
    ]
    file = write_rollouts(tmp_path / "r.parquet", rows)

    def rewards(**options: object) -> list[float]:
        recipe = parse_recipe(
            {"verify": {"workers": 1} | options, "rollout": {"max_new_tokens": 100}}, "test"
        )
        out = tmp_path / "v.parquet"
        verify(file, problems, out, recipe, force=True)
        verdicts = tables.read_table("verdicts", out)
        assert verdicts["correct"].to_list() == [True, False, True, True, False]
        assert verdicts["status"].to_list() == ["ok"] * 4 + ["no_answer"]
        shown = explain(file, problems, "s00000/m/03", recipe)
        assert shown["reward"] == pytest.approx(verdicts["reward"][3])
        return verdicts["reward"].to_list()

    assert rewards() == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert rewards(format_reward=0.25) == [1.25, 0.25, 1.0, 1.0, 0.0]
    assert rewards(length_penalty=0.5) == [1.0, 0.0, 1.0, 0.5, -0.5]
    assert rewards(length_penalty=0.5, length_margin=20) == [1.0, 0.0, 0.625, 0.5, -0.5]
    # the columns for lengths are read only where they are needed
    pl.DataFrame({"rollout_id": ["a"], "problem_id": ["m"], "text": ["#### 1"]}).write_parquet(file)
    recipe = parse_recipe({"verify": {"workers": 1, "length_penalty": 1.0}}, "test")
    with pytest.raises(InputError, match="column tokens is missing"):
        verify(file, problems, tmp_path / "v.parquet", recipe, force=True)
