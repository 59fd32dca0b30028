"""Exit codes and one clear line for every mistake, through the real command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from exgrpo_cli import tables

ROOT = Path(__file__).parents[1]
Exgrpo = Callable[..., Any]


def jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_problems(path: Path, *ids: str) -> Path:
    rows = [
        {
            "problem_id": i, "prompt": [{"role": "user", "content": "1+1="}], "answer": "2",
            "verifier": "math", "source": "s",
        }
        for i in ids
    ]  # fmt: skip
    tables.write_table("problems", tables.frame("problems", rows), path)
    return path


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The complaint: the last line of stderr, and no traceback."""
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("exgrpo: ")]
    assert len(lines) == 1, done.stderr
    assert done.stdout == ""
    return lines[0]


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A folder that is a policy by its files' names, for commands that must fail before it."""
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_nothing_given_names_what_is_needed(exgrpo: Exgrpo) -> None:
    for command, words in {
        "rollout": ["--problems", "--policy", "--out"],
        "verify": ["--rollouts", "--problems", "--out"],
        "score": ["--rollouts", "--policy", "--out"],
        "train": ["--policy", "--rollouts", "--verdicts", "--out"],
        "evaluate": ["--policy", "--problems", "--out"],
    }.items():
        line = one_line(exgrpo(command, code=2))
        assert all(word in line for word in words), line


def test_no_such_run(exgrpo: Exgrpo, tmp_path: Path) -> None:
    for command in ("rollout", "verify", "score", "curate", "train", "evaluate", "report"):
        line = one_line(exgrpo(command, tmp_path / "none", code=2))
        assert "no such run directory" in line
        assert "exgrpo run" in line


def test_an_empty_run_says_what_comes_first(exgrpo: Exgrpo, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for command, mend in {
        "verify": "exgrpo rollout",
        "score": "exgrpo rollout",
        "curate": "exgrpo rollout",
        "train": "exgrpo curate",
    }.items():
        assert mend in one_line(exgrpo(command, run, code=2))


def test_unknown_options_keys_and_values(exgrpo: Exgrpo, tmp_path: Path) -> None:
    assert "--shard" in exgrpo("rollout", "--shards", "0/2", code=2).stderr
    line = one_line(exgrpo("init", tmp_path / "r", "-s", "rollout.sample=2", code=2))
    assert "did you mean rollout.samples?" in line
    line = one_line(exgrpo("init", tmp_path / "r", "-s", "train.learning_rate=0", code=2))
    assert "train.learning_rate" in line
    line = one_line(exgrpo("init", tmp_path / "r", "-r", tmp_path / "x.toml", code=2))
    assert "x.toml: no such recipe" in line
    line = one_line(exgrpo("run", tmp_path / "r", "--engine", "vlm", code=2))
    assert "rollout.engine = 'vlm'" in line
    assert not (tmp_path / "r").exists()


def test_bad_shards(exgrpo: Exgrpo, tmp_path: Path, policy: Path) -> None:
    problems = write_problems(tmp_path / "p.parquet", "a")
    line = one_line(
        exgrpo(
            "rollout",
            "--problems",
            problems,
            "--policy",
            policy,
            "--out",
            tmp_path / "o",
            "--shard",
            "4/4",
            code=2,
        )
    )
    assert "--shard: '4/4' is not I/N" in line


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-20]), "truncated or damaged"),
        (lambda p: p.write_bytes(b""), "the file is empty"),
        (lambda p: pl.read_parquet(p).drop("answer").write_parquet(p), "column answer is missing"),
        (
            lambda p: pl.read_parquet(p).with_columns(answer=pl.lit(3)).write_parquet(p),
            "column answer is Int32",
        ),
        (lambda p: p.unlink(), "no such file"),
    ],
)
def test_damaged_problems(
    exgrpo: Exgrpo, tmp_path: Path, damage: Callable[[Path], Any], words: str
) -> None:
    """Every stage that reads a table checks it in the same way; verify stands for them."""
    problems = write_problems(tmp_path / "problems.parquet", "a")
    rollouts = tmp_path / "rollouts.parquet"
    tables.write_table("rollouts", tables.frame("rollouts", []), rollouts)
    damage(problems)
    line = one_line(
        exgrpo(
            "verify",
            "--rollouts",
            rollouts,
            "--problems",
            problems,
            "--out",
            tmp_path / "out",
            code=2,
        )
    )
    assert "problems.parquet" in line
    assert words in line
    assert not (tmp_path / "out").exists()


def test_a_policy_without_weights(exgrpo: Exgrpo, tmp_path: Path, policy: Path) -> None:
    problems = write_problems(tmp_path / "p.parquet", "a")
    adapter, removed = tmp_path / "adapter", tmp_path / "copied"
    for folder, name in ((adapter, "adapter_config.json"), (removed, "REMOVED")):
        folder.mkdir()
        (folder / name).write_text("{")
    (adapter / "adapter_model.safetensors").touch()
    for where, words in (
        (policy, "no weights (*.safetensors)"),
        (adapter, "adapter_config.json: damaged"),
        (removed, "copied: {"),
        (tmp_path / "nowhere", "no such policy folder"),
        (tmp_path, "config.json is missing"),
    ):
        line = one_line(
            exgrpo(
                "rollout",
                "--problems",
                problems,
                "--policy",
                where,
                "--out",
                tmp_path / "o",
                "--engine",
                "transformers",
                code=2,
            )
        )
        assert words in line
    assert not (tmp_path / "o").exists()


def test_training_a_policy_without_tokenizer_is_refused_at_once(
    exgrpo: Exgrpo, tmp_path: Path, policy: Path
) -> None:
    (policy / "model.safetensors").touch()
    words = ("--policy", policy, "--rollouts", tmp_path, "--verdicts", tmp_path)
    line = one_line(exgrpo("train", *words, "--out", tmp_path / "o", code=2))
    assert f"{policy}: no tokenizer in this policy folder" in line


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("seed = 1\n")
    for words in (["show", tmp_path], ["status", tmp_path], ["run", tmp_path, "--dry-run"], ["-h"]):
        read, write = os.pipe()
        os.close(read)
        command = [sys.executable, "-m", "exgrpo_cli", *map(str, words)]
        done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, check=False)
        os.close(write)
        assert (done.returncode, done.stderr) == (0, b""), words


def test_a_plan_for_another_problem_set(exgrpo: Exgrpo, tmp_path: Path, policy: Path) -> None:
    run = tmp_path / "run"
    write_problems(run / "problems.parquet", "a", "b")
    rows = [{"step": 0, "problem_id": "z", "role": "fresh", "samples": 4}]
    tables.write_table("plan", tables.frame("plan", rows), run / "plan/step-00000.parquet")
    line = one_line(exgrpo("rollout", run, "--policy", policy, "--engine", "transformers", code=2))
    assert "question z is not in" in line
    assert "another problem set" in line


def test_problems_that_are_wrong(exgrpo: Exgrpo, tmp_path: Path) -> None:
    out = tmp_path / "problems.parquet"
    for name, rows, words in (
        (
            "noquestion",
            [{"prompt": "1+1=", "answer": "2"}, {"prompt": "", "answer": "4"}],
            "line 2",
        ),
        ("columns", [{"frage": "1+1=", "antwort": "2"}], "frage"),
        ("empty", [], "empty"),
    ):
        source = jsonl(tmp_path / f"{name}.jsonl", *rows)
        line = one_line(exgrpo("problems", source, "--out", out, code=2))
        assert str(source) in line
        assert words in line
        assert not out.exists()
    source = tmp_path / "broken.jsonl"
    source.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+\n')
    assert "2" in one_line(exgrpo("problems", source, "--out", out, code=2))


def test_training_refuses_a_truncating_top_p(exgrpo: Exgrpo, tmp_path: Path, policy: Path) -> None:
    problems = write_problems(tmp_path / "p.parquet", "a")
    line = one_line(
        exgrpo(
            "rollout",
            "--problems",
            problems,
            "--policy",
            policy,
            "--out",
            tmp_path / "o",
            "--set",
            "rollout.top_p=0.9",
            code=2,
        )
    )
    assert "top_p" in line


def test_a_stage_cannot_sample_otherwise_than_its_run(exgrpo: Exgrpo, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("[rollout]\ntemperature = 0.8\n")
    for flags, key in (
        (("--temperature", 0.9), "rollout.temperature = 0.9"),
        (("--samples", 4), "rollout.samples = 4"),
        (("--set", "seed=3"), "seed = 3"),
    ):
        line = one_line(exgrpo("rollout", tmp_path, *flags, code=2))
        assert key in line
        assert "exgrpo init" in line
    line = one_line(exgrpo("rollout", tmp_path, "--temperature", 0.8, code=2))
    assert "problems" in line  # the same value is none of these


def test_scores_never_replace_rollouts(exgrpo: Exgrpo, tmp_path: Path, policy: Path) -> None:
    rollouts = tmp_path / "rollouts"
    tables.write_table(
        "rollouts", tables.frame("rollouts", []), rollouts / "part-00000-of-00001.parquet"
    )
    line = one_line(
        exgrpo(
            "score",
            "--rollouts",
            rollouts,
            "--policy",
            policy,
            "--out",
            rollouts,
            "--force",
            code=2,
        )
    )
    assert "holds the rollouts" in line
    assert tables.read_table("rollouts", rollouts).is_empty()


def test_debug_shows_the_traceback_wherever_it_stands(exgrpo: Exgrpo, tmp_path: Path) -> None:
    for arguments in (("--debug", "show", tmp_path / "x"), ("show", tmp_path / "x", "--debug")):
        assert "Traceback" in exgrpo(*arguments, code=1).stderr


def test_a_trainer_state_that_is_named_must_be_there(exgrpo: Exgrpo, tmp_path: Path) -> None:
    done = exgrpo("train", tmp_path, "--step", 0, "--trainer", tmp_path / "no", code=2)
    assert "no such trainer state" in done.stderr
