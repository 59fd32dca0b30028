"""Trackers and provenance: a run that is taken up again is the same run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from exgrpo_cli.errors import InputError
from exgrpo_cli.recipe import Recipe, parse_recipe
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.runs.loop import run as loop
from exgrpo_cli.runs.provenance import read_provenance, record_provenance
from exgrpo_cli.runs.tracking import _markdown, open_tracker

TRACKER = """
import json
from pathlib import Path
FILE = Path({file!r})
def _add(**values):
    with FILE.open("a") as handle:
        handle.write(json.dumps(values) + "\\n")
def init(**values):
    if values["config"].get("fail"):
        raise RuntimeError("no API key\\nsee there")
    _add(**values)
def log(values, step):
    _add(values=values, step=step)
class Table(dict):
    def __init__(self, **values):
        super().__init__(values)
"""


@pytest.fixture(params=["wandb", "trackio"])
def tracker(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Path]:
    """A module in the tracker's place, which writes down what it is called with."""
    modules, calls = tmp_path / "modules", tmp_path / "calls"
    modules.mkdir()
    (modules / f"{request.param}.py").write_text(TRACKER.format(file=str(calls)))
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.delitem(sys.modules, request.param, raising=False)
    return request.param, calls


def test_a_run_taken_up_again_is_the_same_run_there(
    tracker: tuple[str, Path], tmp_path: Path
) -> None:
    kind, calls = tracker

    def opened(name: str, step: int) -> dict:
        root = tmp_path / name
        root.mkdir(exist_ok=True)
        track = open_tracker(kind, RunDir(root), {"seed": 1})
        assert step or not list(root.iterdir())
        track(step, {"step": step, "train/loss": 0.5, "note": "x", "on": True})
        start, sent = (json.loads(line) for line in calls.read_text().splitlines()[-2:])
        assert sent == {"values": {"train/loss": 0.5}, "step": step}
        assert (start["project"], start["resume"]) == ("exgrpo", "allow")
        return {key: start.get(key) for key in ("name", "id")}

    first = opened("a", 0)
    assert opened("a", 1) == first
    (tmp_path / "other").mkdir()
    assert opened("other/a", 0) != first  # of the same name, but another run
    assert first["name"].startswith("a")
    (tmp_path / "a" / "tracking.json").write_text("{")
    with pytest.raises(InputError, match=r"tracking\.json: damaged"):
        opened("a", 2)


def test_a_table_of_rollouts_in_the_trackers_own_kind(
    tracker: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, calls = tracker
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))  # as trackio brings
    rows = [{"question": "1+1", "age": 0}, {"question": "2|2\n*", "age": 3}]
    open_tracker(kind, RunDir(tmp_path), {})(7, {"train/loss": 0.5, "rollouts": rows})
    sent = json.loads(calls.read_text().splitlines()[-1])["values"]
    table = {"columns": ["question", "age"], "data": [["1+1", 0], ["2|2\n*", 3]]}
    assert sent == {
        "train/loss": 0.5, "rollouts": table if kind == "wandb" else {"dataframe": rows}
    }  # fmt: skip
    assert _markdown(rows).splitlines()[3] == r"| 2\|2<br>\* | 3 |"


def test_a_tracker_that_does_not_start_is_one_line_and_stays_out_of_the_recipe(
    tracker: tuple[str, Path], tmp_path: Path
) -> None:
    kind, _ = tracker
    with pytest.raises(InputError, match=rf"^--track {kind}: no API key$"):
        open_tracker(kind, RunDir(tmp_path), {"fail": True})
    with pytest.raises(InputError, match="is not installed"):
        open_tracker("no_such_tracker", RunDir(tmp_path), {})
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    sys.modules[kind] = None  # type: ignore[assignment]
    recipe = parse_recipe({"loop": {"track": kind}}, "the test")
    try:
        with pytest.raises((InputError, ValueError)):
            loop(run, recipe)
    finally:
        del sys.modules[kind]
    assert list(run.root.iterdir()) == []


def test_provenance_counts_starts_and_keeps_what_differed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert read_provenance(run) == []
    record_provenance(run, Recipe())
    record_provenance(run, Recipe())
    (one,) = read_provenance(run)
    assert one["starts"] == 2
    assert {"exgrpo", "commit", "torch", "transformers", "duckdb", "host", "python"} <= one.keys()
    assert one["first"] <= one["last"]
    record_provenance(run, Recipe(seed=3))
    assert [entry["seed"] for entry in read_provenance(run)] == [Recipe().seed, 3]
    (tmp_path / "provenance.json").write_text("[")
    record_provenance(run, Recipe())  # damage stops no run
    assert len(read_provenance(run)) == 1
