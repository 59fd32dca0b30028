"""One screen about a run, an evaluation or a table."""

import json
import shutil
from io import StringIO
from pathlib import Path

import polars as pl
import pytest
from rich.console import Console

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.inspect.show import describe, match_table, show
from exgrpo_cli.inspect.status import format_status
from exgrpo_cli.rundir import RunDir
from made_run import make_metrics, make_run, make_tables, write


def _screen(path: Path, width: int = 100) -> str:
    out = StringIO()
    show(path, Console(file=out, width=width))
    return out.getvalue()


def test_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 6)
    tables.write_json(run.curation, {"replay_from": 3})
    found = describe(run.root)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["kind"] == "run"
    assert (found["steps"], found["steps_planned"]) == (6, 8)
    assert found["policy"] == str(run.policy(6))
    assert found["problems"] == {"count": 3, "by_source": {"others": 2, "sums": 1}}
    assert found["questions"] == {"seen": 3, "easy": 0, "medium": 1, "hard": 1, "retired": 1}
    assert found["pool"]["trajectories"] == 2
    assert found["pool"]["age_mean"] == 1.0  # collected in step 5, the policy is of step 6
    assert set(found["pool"]["by_bucket"]) == {"medium", "hard"}
    for row in found["pool"]["by_bucket"].values():
        assert row == {"trajectories": 1, "age_mean": 1.0, "mean_entropy": 0.25}
    assert found["replay_started_step"] == 3
    assert found["last_step"] == 5
    assert found["accuracy"][-1] == {
        "name": "heldout",
        "step": 6,
        "pass@1": pytest.approx(0.64),
        "low": pytest.approx(0.60),
        "high": pytest.approx(0.69),
    }
    screen = _screen(run.root)
    assert len(screen.splitlines()) <= 24
    assert screen.splitlines() == format_status(found).splitlines()  # as status shows it
    for words in (
        "6 of 8",
        "since step 3",
        "2 trajectories of 2",
        "medium 0.250, hard 0.250",
        "medium 1.0, hard 1.0",
        "1 retired",
        "step     6  0.640",
    ):
        assert words in screen


@pytest.mark.parametrize("flag", ["warning_entropy", "warning_groups", "skipped_updates"])
def test_early_warnings_are_shown(tmp_path: Path, flag: str) -> None:
    run = RunDir(tmp_path / "run")
    make_metrics(run, 4)
    assert "warning: " not in _screen(run.root)
    run.record(3, "train", {"train/loss": 0.1, f"train/{flag}": 1.0})
    assert "warning: " in _screen(run.root)


def test_a_run_that_has_only_its_recipe(tmp_path: Path) -> None:
    tables.write_text(tmp_path / "recipe.toml", '[model]\npath = "models/tiny"\n')
    found = describe(tmp_path)
    assert found["steps"] == 0
    assert found["policy"] == "models/tiny"
    assert found["next"]["command"] == f"exgrpo init {tmp_path} --problems FILE"
    assert "there are no problems yet" in _screen(tmp_path)


def test_next_stage_follows_the_files(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a run")
    make_tables(run, 0)
    tables.write_text(run.recipe, "seed = 0\n")
    make_metrics(run, 1)

    def following() -> str:
        found = describe(run.root)["next"]
        if found["stage"] not in ("done", "finished"):
            assert (
                found["command"] == f"exgrpo {found['stage']} '{run.root}' --step {found['step']}"
            )
        return f"{found['stage']} {found['step']}"

    scores = run.scores(0)
    assert following() == "score 0"
    shutil.copytree(run.rollouts(0), scores)
    assert following() == "curate 0"
    shutil.copy(run.plan(0), run.plan(1))
    assert following() == "train 0"
    (run.verdicts(0) / tables.part_name(1, 2)).unlink()
    assert following() == "verify 0"
    (run.rollouts(0) / tables.part_name(0, 2)).unlink()
    assert following() == "rollout 0"
    run.policy(1).mkdir(parents=True)
    assert following() == "rollout 1"
    write("plan", run.plan(1), [])
    assert following() == "finished 1"
    tables.write_text(run.recipe, "[loop]\nsteps = 1\n")
    assert following() == "done 1"


def test_score_may_be_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, 1)
    shutil.rmtree(run.policy(1))
    assert describe(run.root)["next"]["stage"] == "score"
    tables.write_text(run.recipe, "[score]\nenabled = false\n")
    assert describe(run.root)["next"]["stage"] == "curate"


@pytest.mark.parametrize(
    ("where", "table", "rows"),
    [
        ("problems.parquet", "problems", 3),
        ("plan", "plan", 2),
        ("rollouts", "rollouts", 6),
        ("rollouts/step-00002", "rollouts", 6),
        ("rollouts/step-00002/part-00001-of-00002.parquet", "rollouts", 3),
        ("verdicts", "verdicts", 6),
        ("experience.parquet", "experience", 2),
        ("questions.parquet", "questions", 3),
        ("curated/step-00002.parquet", "curated", 1),
    ],
)
def test_tables_are_known_by_their_columns(
    tmp_path: Path, where: str, table: str, rows: int
) -> None:
    run = make_run(tmp_path, 3)
    found = describe(run.root / where)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["kind"], found["table"], found["rows"]) == ("table", table, rows)
    assert [c["name"] for c in found["columns"]] == list(tables.SCHEMAS[table])
    assert all(c["meaning"] for c in found["columns"])
    assert all(found["numbers"].values())
    screen = _screen(run.root / where)
    assert f"table {table}: {rows:,} rows" in screen


def test_scores(tmp_path: Path) -> None:
    row = {"rollout_id": "a", "policy": "step-00001", "step": 1, "logprobs": [-0.5]}
    row |= {"entropies": [0.25], "mean_entropy": 0.25, "mean_logprob": -0.5}
    write("scores", tmp_path / "scores.parquet", [row])
    found = describe(tmp_path / "scores.parquet")
    assert found["table"] == "scores"
    assert found["numbers"]["by policy"][0]["entropy"] == 0.25


def test_numbers_of_verdicts_and_rollouts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    make_tables(run, 2)
    verdicts = describe(run.verdicts(2))["numbers"]["by status and reward"]
    assert {(v["status"], v["reward"]): v["rollouts"] for v in verdicts} == {
        ("no_answer", 0.0): 2,
        ("ok", 0.0): 2,
        ("ok", 1.0): 2,
    }
    rollouts = describe(run.rollouts(2))
    (numbers,) = rollouts["numbers"]["by role"]
    assert (numbers["rollouts"], numbers["questions"]) == (6, 2)
    assert numbers["cut_off"] == pytest.approx(1 / 6)
    assert len(rollouts["examples"]) == 3


def test_terminal_escapes_and_markup_in_rollouts_are_harmless(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    make_tables(run, 0)
    file = run.rollouts(0) / tables.part_name(0, 2)
    row = tables.read_table("rollouts", file).to_dicts()[0] | {
        "text": "\x1b]0;x\x07[red]a[/red]\nb"
    }
    write("rollouts", file, [row])
    screen = _screen(file)
    assert "\x1b" not in screen
    assert "\\x1b]0;x\\x07[red]a[/red]" in screen


def test_an_evaluation(tmp_path: Path) -> None:
    run = make_run(tmp_path, 2)
    folder = run.evaluation(2, "heldout")
    assert describe(folder)["kind"] == "evaluation"
    assert "70.0% [66.0%, 75.0%]" in _screen(folder)
    (folder / "summary.json").write_text('{"overall": 3}')
    with pytest.raises(InputError, match="not an evaluation's summary"):
        describe(folder)


def test_another_parquet_file_names_the_nearest_table(tmp_path: Path) -> None:
    file = tmp_path / "almost.parquet"
    pl.DataFrame({"rollout_id": ["a"], "reward": [1.0], "correct": [True], "x": [1]}).write_parquet(
        file
    )
    found = describe(file)
    assert (found["table"], found["nearest"]) == (None, "verdicts")
    assert found["missing"] == ["extracted", "status", "verifier", "seconds"]
    assert "nearest: verdicts, but without extracted, status" in _screen(file)


def test_further_columns_do_not_hide_a_table() -> None:
    columns = dict.fromkeys([*tables.SCHEMAS["curated"], "note"], "VARCHAR")
    assert match_table(columns) == ("curated", [])


def test_bad_paths_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(run.problems.read_bytes()[:-20])
    empty = tmp_path / "empty.parquet"
    empty.touch()
    (tmp_path / "nothing").mkdir()
    mixed = tmp_path / "mixed"
    shutil.copytree(run.root / "plan", mixed)
    shutil.copy(run.problems, mixed)
    for path, words in (
        (tmp_path / "absent", "no such file"),
        (run.recipe, "show takes"),
        (tmp_path / "nothing", "neither a run directory"),
        (damaged, "cannot be read"),
        (empty, "the file is empty"),
        (mixed, "holds different tables"),
    ):
        with pytest.raises(InputError, match=words) as caught:
            describe(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_glob_characters_in_a_path_are_literal(tmp_path: Path) -> None:
    run = make_run(tmp_path / "lr[1e-6]*", 1)
    assert describe(run.root)["problems"]["count"] == 3
    assert describe(run.rollouts(0))["rows"] == 6
