"""The log is the truth: curated twice, late, killed; and the views of it."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import duckdb
import pytest

from exgrpo_cli import tables
from exgrpo_cli.experience import database
from exgrpo_cli.experience.database import sql_text
from exgrpo_cli.recipe import to_toml
from exgrpo_cli.rundir import RunDir
from making import (
    curate,
    experience,
    fill_pool,
    group,
    make_recipe,
    pool,
    prepare_choice,
    questions,
    sample_by_plan,
    settings,
    small_run,
    start_replay,
    write_problems,
    write_scores,
    write_step,
    write_verdicts,
)


def table_bytes(run: RunDir) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (run.experience, run.questions, run.curation)}


def test_curating_twice_changes_nothing(run: RunDir) -> None:
    recipe = make_recipe()
    fill_pool(run, recipe, {"a": "1100", "b": "1000"})
    before = table_bytes(run) | {"plan": run.plan(2).read_bytes()}
    lines: list[str] = []
    again = curate(run, 1, recipe, log=lines.append)
    assert again["skipped"] is True
    assert again["pool/trajectories"] == 3
    assert lines == ["step 1 is curated already"]
    assert table_bytes(run) | {"plan": run.plan(2).read_bytes()} == before
    forced = curate(run, 1, recipe, force=True)
    assert forced["skipped"] is False
    assert table_bytes(run) | {"plan": run.plan(2).read_bytes()} == before
    kept = {k: v for k, v in again.items() if "/" in k and k != "curate/seconds"}
    assert {k: forced[k] for k in kept} == kept
    (line,) = [m for m in run.read_metrics() if m["step"] == 1]
    assert line["pool/trajectories"] == 3


def test_other_settings_or_another_log_derive_anew(run: RunDir) -> None:
    recipe = make_recipe()
    fill_pool(run, recipe, {"a": "1100", "b": "1000"})
    write_step(run, 2, group(2, "b", "0000"))
    assert curate(run, 2, recipe)["rebuilt"] is False
    write_step(run, 3, group(3, "b", "0000"))
    assert curate(run, 3, make_recipe(lower=1))["rebuilt"] is True
    assert set(pool(run)) == {"a"}
    # A re-run verification that judges otherwise, in a file of the same size or not.
    write_verdicts(run, 1, group(1, "a", "1110") + group(1, "b", "0000"))
    write_step(run, 4, group(4, "b", "0000"))
    assert curate(run, 4, make_recipe(lower=1))["rebuilt"] is True
    assert len(pool(run)["a"]) == 3
    run.experience.write_bytes(run.experience.read_bytes()[:-20])
    write_step(run, 5, group(5, "b", "0000"))
    assert curate(run, 5, make_recipe(lower=1))["rebuilt"] is True
    assert len(pool(run)["a"]) == 3
    run.questions.unlink()
    write_step(run, 6, group(6, "b", "0000"))
    assert curate(run, 6, make_recipe(lower=1))["rebuilt"] is True
    assert len(pool(run)["a"]) == 3


@pytest.mark.parametrize(
    ("rule", "changed", "before", "after"),
    [
        ("store=correct AND k < samples / 2", "rollout.samples=8", "b", "abc"),
        ("retire=fresh_k >= samples / 2", "rollout.samples=8", "b", "abc"),
        ("drop=k > 2", "rollout.samples=8", "ab", "b"),
        ("store=correct AND k < batch / 4", "curate.questions=16", "b", "abc"),
        ("store=correct AND k < n", "rollout.samples=8", "ab", "abc"),
    ],
)
def test_a_setting_that_a_rule_names_counts_for_the_whole_log(
    exgrpo: Any, guesser: Path, tmp_path: Path, rule: str, changed: str, before: str, after: str
) -> None:
    run = RunDir(tmp_path / "run")
    write_problems(run, ["a", "b", "c"])
    exgrpo("init", run.root, *small_run(guesser), *settings(f"curate.{rule}"))
    write_step(run, 0, group(0, "a", "1100") + group(0, "b", "1000"))
    exgrpo("curate", run.root, "--step", 0)
    assert set(pool(run)) == set(before)
    exgrpo("init", run.root, *settings(changed))
    write_step(run, 1, group(1, "c", "11100000"))
    said = exgrpo("curate", run.root, "--step", 1).stderr
    assert set(pool(run)) == set(after)
    assert ("deriving the experience anew" in said) == ("k < n" not in rule)
    tables_before = table_bytes(run)
    exgrpo("curate", run.root, "--step", 1, "--rebuild", "--force")
    assert table_bytes(run) == tables_before


def test_scores_of_candidates_that_come_late_change_the_choice(run: RunDir) -> None:
    recipe = make_recipe()
    rows = prepare_choice(run, recipe, scored=False)
    curate(run, 3, recipe)
    now = {"s00001/a/00": 0.1, "s00001/a/01": 0.3, "s00002/a/01": 0.2}
    write_scores(run, 3, rows, now, prefix="replay")
    assert curate(run, 3, recipe)["skipped"] is False
    assert tables.read_table("curated", run.curated(3))["rollout_id"].to_list() == ["s00001/a/00"]
    assert curate(run, 3, recipe)["skipped"] is True


def test_settings_of_planning_need_no_rebuilding_but_are_not_skipped(run: RunDir) -> None:
    fill_pool(run, make_recipe(), {"a": "1100", "b": "1000"})
    assert curate(run, 1, make_recipe())["skipped"] is True
    assert curate(run, 1, make_recipe(questions=2))["skipped"] is False
    assert tables.read_table("plan", run.plan(2)).height == 2
    write_step(run, 2, group(2, "b", "0000"))
    assert curate(run, 2, make_recipe(selection="newest"))["rebuilt"] is False


def test_what_was_used_is_left_as_it_is(run: RunDir) -> None:
    recipe = make_recipe()
    prepare_choice(run, recipe, scored=False)
    curate(run, 3, recipe)
    sample_by_plan(run, 4)
    run.policy(4).mkdir(parents=True)
    used = {p: p.read_bytes() for p in (run.curated(3), run.plan(4))}
    lines: list[str] = []
    other = make_recipe(selection="newest", questions=2)
    again = curate(run, 3, other, log=lines.append)
    assert {p: p.read_bytes() for p in used} == used
    assert (again["replay/age_mean"], again["plan/fresh"]) == (2, 3)  # of what is there
    assert sum("is left as it is" in line for line in lines) == 2
    curate(run, 3, other, force=True)
    assert tables.read_table("curated", run.curated(3))["rollout_id"].to_list() == ["s00002/a/01"]
    assert tables.read_table("plan", run.plan(4)).height == 2


def test_a_step_that_was_passed_over_is_taken_in_later(run: RunDir) -> None:
    recipe = make_recipe()
    start_replay(run, recipe)
    write_step(run, 1, group(1, "a", "1100"))
    write_step(run, 2, group(2, "b", "1100"))
    curate(run, 2, recipe)  # step 1 was never curated, but is in the log
    assert set(pool(run)) == {"a", "b"}
    curate(run, 1, recipe)
    assert json.loads(run.curation.read_text())["last_step"] == 2  # done out of order, nothing lost


# Dies when the n-th file is about to be put in its place.
DIES = """
import os, signal
from pathlib import Path

left, real = {n}, Path.replace

def replace(self, target):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, target)

Path.replace = replace
"""


def test_killed_between_any_two_files_it_ends_right(
    run: RunDir, tmp_path: Path, exgrpo: Any
) -> None:
    recipe = make_recipe()
    fill_pool(run, recipe, {"a": "1100", "b": "1000", "c": "1110"})
    write_step(run, 2, group(2, "a", "010", "replay") + group(2, "d", "1100"))
    tables.write_text(run.recipe, to_toml(recipe))
    whole = RunDir(tmp_path / "whole")
    copy_run(run, whole)
    curate(whole, 2, recipe)
    kills, quiet = 0, os.open(os.devnull, os.O_WRONLY)
    for n in range(1, 20):
        broken = RunDir(tmp_path / f"killed-{n}")
        copy_run(run, broken)
        words = ("curate", broken.root, "--step", 2)
        code = exgrpo.start(*words, before=DIES.format(n=n), stdout=quiet, stderr=quiet).wait()
        if code == 0:
            break
        assert code == -signal.SIGKILL
        kills += 1
        assert broken.plan(3).exists() == (n > 7)  # the plan comes last, but for the times
        result = curate(broken, 2, recipe)
        assert result["pool/trajectories"] == 9
        assert experience(broken).equals(experience(whole))
        assert questions(broken) == questions(whole)
        assert broken.plan(3).read_bytes() == whole.plan(3).read_bytes()
        assert broken.curated(2).read_bytes() == whole.curated(2).read_bytes()
    # curated, two tables, curation.json, two files of metrics, plan; two files of times
    assert kills == 9


def copy_run(source: RunDir, target: RunDir) -> None:
    """A copy with its files' times, so that its log counts as unchanged."""
    shutil.copytree(source.root, target.root)
    for path in source.root.rglob("*.parquet"):
        status = path.stat()
        copied = target.root / path.relative_to(source.root)
        os.utime(copied, ns=(status.st_atime_ns, status.st_mtime_ns))


# --- views --------------------------------------------------------------------------------------


def test_views_have_the_tables_columns_with_and_without_files(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def columns(con: duckdb.DuckDBPyConnection, name: str) -> dict[str, str]:
        return {r[0]: r[1].replace('"', "") for r in con.execute(f"DESCRIBE {name}").fetchall()}

    def check(place: Path, counts: dict[str, int]) -> None:
        monkeypatch.chdir(place)
        with duckdb.connect() as con:
            con.execute(sql_text("views")).fetchall()
            for name, count in counts.items():
                expected = {c: kind for c, (kind, _, _) in tables.SCHEMAS[name].items()}
                found = columns(con, name)
                found.pop("file", None)
                assert found == expected, name
                assert con.execute(f"SELECT count(*) FROM {name}").fetchall() == [(count,)], name

    empty = tmp_path / "empty"
    empty.mkdir()
    check(empty, dict.fromkeys(tables.SCHEMAS, 0))
    recipe = make_recipe()
    rows = prepare_choice(run, recipe, scored=True)
    curate(run, 3, recipe)
    counts = {"problems": 9, "rollouts": 19, "verdicts": 19, "scores": 4, "curated": 1}
    counts |= {"experience": 3, "questions": 3}
    check(run.root, counts)
    assert len(rows) == 8


def test_views_load_in_the_duckdb_program(run: RunDir) -> None:
    program = shutil.which("duckdb")
    if program is None:
        pytest.skip("the duckdb program is not installed")
    fill_pool(run, make_recipe(), {"a": "1100"})
    views = Path(database.__file__).parent / "sql" / "views.sql"
    done = subprocess.run(
        [program, "-init", str(views), "-csv", "-c", "SELECT count(*) AS n FROM experience"],
        cwd=run.root,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["n", "2"], done.stderr
