"""Problems that reasoning-gym makes, from the command to verdicts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from exgrpo_cli.problems.generated import generate
from exgrpo_cli.verifiers.pool import Job, Pool
from rollout_files import rollout, write_rollouts

SMALL = ("--set", "max_terms=3", "--set", "max_digits=2")


def value(question: str) -> str:
    """What a sum of whole numbers comes to, by Python."""
    return str(eval(re.findall(r"[-+\d ]+(?= =)", question)[-1]))


def test_problems_are_judged_by_their_own_scorer(exgrpo: Callable, tmp_path: Path) -> None:
    out = tmp_path / "p.parquet"
    source = "reasoning_gym:chain_sum,gcd"
    said = exgrpo(
        "problems", source, "--count", 30, "--seed", 4, "--set", "chain_sum.max_terms=2",
        "--out", out, "--json",
    )  # fmt: skip
    report = json.loads(said.stdout)
    assert report["sources"] == {"chain_sum": 30, "gcd": 30}
    assert report["gold_faults"] == []
    rows = pl.read_parquet(out)
    assert rows["verifier"].unique().to_list() == ["reasoning_gym"]
    sums = rows.filter(source="chain_sum")
    questions = [prompt[0]["content"] for prompt in sums["prompt"]]
    assert all(len(re.findall(r" [-+] ", question)) == 1 for question in questions)
    assert [value(question) for question in questions] == sums["answer"].to_list()

    gold, name = sums["answer"][0], sums["problem_id"][0]
    boxed = rf"It is \boxed{{{gold}.0}}."
    texts = [boxed, f"I get <answer>{gold}</answer>", rf"\boxed{{{gold}1}}", gold]
    rollouts = [rollout(name, number, text) for number, text in enumerate(texts)]
    write_rollouts(tmp_path / "rollouts.parquet", rollouts)
    verdicts = tmp_path / "verdicts.parquet"
    exgrpo(
        "verify", "--rollouts", tmp_path / "rollouts.parquet", "--problems", out, "--out", verdicts
    )
    judged = pl.read_parquet(verdicts)
    assert judged["reward"].to_list() == [1, 1, 0, 0]  # 1 more digit is worth a part to the scorer
    assert judged["status"].to_list() == ["ok", "ok", "ok", "no_answer"]


def test_a_seed_makes_the_same_problems_and_its_neighbour_others() -> None:
    def questions(seed: int) -> list[str]:
        made = generate("reasoning_gym:chain_sum", 200, seed, {"min_digits": 3})
        return [problem.prompt[0]["content"] for problem in made]

    first = questions(1)
    assert len(set(first)) == 200
    assert questions(1) == first
    assert len(set(first) & set(questions(2))) < 5


def test_questions_of_another_set_are_left_out(exgrpo: Callable, tmp_path: Path) -> None:
    train, other = tmp_path / "train.parquet", tmp_path / "heldout.parquet"
    exgrpo("problems", "reasoning_gym:chain_sum", "--count", 300, *SMALL, "--out", train)
    said = exgrpo(
        "problems", "reasoning_gym:chain_sum", "--count", 300, *SMALL, "--seed", 1,
        "--without", train, "--out", other, "--json",
    )  # fmt: skip
    report = json.loads(said.stdout)
    there = {prompt[0]["content"] for prompt in pl.read_parquet(train)["prompt"]}
    kept = {prompt[0]["content"] for prompt in pl.read_parquet(other)["prompt"]}
    assert not there & kept
    assert report["elsewhere"] == 300 - len(kept) > 0
    again = ("problems", train, "--without", train)
    assert f"all its questions are in {train}" in exgrpo(*again, code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["reasoning_gym:chain_sums"], "no kind 'chain_sums'; did you mean chain_sum?"),
        (["reasoning_gym:chain_sum", "--set", "max_term=3"], "did you mean max_terms?"),
        (
            ["reasoning_gym:gcd,lcm", "--set", "chain_sum.max_terms=3"],
            "chain_sum has no such option",
        ),
        (
            ["reasoning_gym:chain_sum", "--set", "max_terms=1"],
            "chain_sum refuses max_terms=1: max_",
        ),
        (["reasoning_gym:gcd", "--format", "verl"], "--columns and --skip-bad are for files"),
        (["data/arithmetic/ood.jsonl", "--count", "3"], "--seed are for reasoning_gym:KIND"),
    ],
)
def test_what_reasoning_gym_does_not_have(
    exgrpo: Callable, arguments: list[str], said: str
) -> None:
    line = exgrpo("problems", *arguments, code=2).stderr
    assert said in line
    assert line.count("\n") == 1


def test_a_kind_with_few_questions_gives_what_it_has() -> None:
    lines: list[str] = []
    options = {"max_numbers": 2, "max_value": 4}
    made = generate("reasoning_gym:gcd", 50, 0, options, log=lines.append)
    assert 0 < len(made) <= 16
    assert lines == [f"reasoning_gym:gcd: gcd has only {len(made)} questions"]


def test_every_kind_gives_its_own_answers_the_full_score() -> None:
    from reasoning_gym.factory import DATASETS

    slow = {"composite", "knight_swap", "sokoban", "rubiks_cube", "puzzle24"}
    kinds = ",".join(sorted(set(DATASETS) - slow))
    made = generate(f"reasoning_gym:{kinds}", 1, 3, {})
    golds = [Job(p.verifier, p.golds[0], None, metadata=json.loads(p.metadata or "")) for p in made]
    with Pool(2, timeout=60) as pool:
        faults = pool.check_golds(golds)
    wrong = [f"{p.source}: {fault}" for p, fault in zip(made, faults, strict=True) if fault]
    assert wrong == []
    assert len(made) > 95
