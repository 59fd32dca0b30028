"""What each rule saw and said of one question."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.explain import explain, format_explanation
from exgrpo_cli.recipe import to_toml
from exgrpo_cli.rundir import RunDir
from making import curate, group, make_recipe, plan, row, write_plan, write_problems, write_step

RECIPE = make_recipe(
    questions=3, drop="newness > 2", store="correct AND k < n AND tokens < 20 AND mean_logprob < 0"
)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    write_problems(made, ["a", "b", "zz"])
    tables.write_text(made.recipe, to_toml(RECIPE))
    write_step(made, 0, group(0, "zz", "1110"))
    curate(made, 0, RECIPE)
    first = [row(1, "a", i, i < 2, f"a{i}", entropy=0.5 - 0.1 * i) for i in range(4)]
    write_step(made, 1, [*first, *group(1, "b", "1111")])
    curate(made, 1, RECIPE)
    later = [row(2, "a", i, i < 3, "long" * 5 * i, "replay") for i in range(1, 4)]
    write_step(made, 2, later)
    curate(made, 2, RECIPE)
    return made


def test_a_question_of_a_step(run: RunDir) -> None:
    before = {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()}
    found = explain(run, RECIPE, 2, "a")
    assert {path: path.read_bytes() for path in before} == before
    assert (found["planned"], found["chosen"]) == ("replay", ["s00001/a/01"])
    assert (found["planned_next"] == "replay") is ("a" in plan(run, 3)["replay"])
    rules = found["rules"]
    choose = {r["row"]: (r["mean_entropy"], r["value"]) for r in rules["choose"]["rows"]}
    assert choose["s00001/a/01"] == (pytest.approx(0.4), pytest.approx(0.4))
    assert choose["s00001/a/00"][1] == pytest.approx(0.5)
    store = {r["row"]: (r["tokens"], r["value"]) for r in rules["store"]["rows"]}
    assert store["s00002/a/01r"] == (21, False)
    assert all(r["k"] == 3 and r["n"] == 4 for r in rules["store"]["rows"])
    assert [(r["row"], r["fresh_k"], r["value"]) for r in rules["retire"]["rows"]] == [
        ("replay", 2, False)
    ]
    assert {r["row"]: r["value"] for r in rules["drop"]["rows"]} == {
        "s00001/a/00": False,
        "s00001/a/01": False,
    }
    assert [r["value"] for r in rules["bucket"]["rows"]] == [3]
    gone = explain(run, RECIPE, 1, "b")
    assert [(r["fresh_k"], r["value"]) for r in gone["rules"]["retire"]["rows"]] == [(4, True)]
    assert gone["rules"]["store"]["rows"] == []  # retired questions leave nothing
    words = format_explanation(found)
    assert words.startswith("a in step 2: replay; replays s00001/a/01; in step 3: ")
    assert "\nchoose = mean_entropy\n" in words
    rules["store"]["rows"] = [{"row": "s", "metadata": "\x1b[2J\n", "value": True}]
    assert "  \\x1b[2J\\x0a   true\n" in format_explanation(found)
    with pytest.raises(InputError, match="no problem nosuch"):
        explain(run, RECIPE, 2, "nosuch")


def test_what_was_not_sampled_is_not_asked_to_retire(run: RunDir) -> None:
    write_plan(run, 2, [row(2, "zz", 0, True, "")])
    recipe = make_recipe(retire="fresh_k / fresh_n = 1")
    assert explain(run, recipe, 2, "zz")["rules"]["retire"]["rows"] == []


def test_the_command(run: RunDir, exgrpo: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    found = json.loads(exgrpo("curate", run.root, "--explain", "a", "--json").stdout)
    assert (found["step"], found["chosen"]) == (2, ["s00001/a/01"])
