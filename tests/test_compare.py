"""exgrpo compare: arms, their figures, and the pages and files that it writes."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exgrpo_cli.inspect.arms import ALIKE, arms
from exgrpo_cli.recipe import known_keys, parse_recipe, to_toml
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.tables import frame, write_json, write_table, write_text
from making import problem_row
from page import Page

Exgrpo = Callable[..., Any]


def make(
    root: Path, seed: int, accuracy: list[float], *, tokens: float = 100.0, **recipe: Any
) -> RunDir:
    """A run of two steps between evaluations, of 10 rollouts and ``10 * tokens`` tokens each."""
    run = RunDir(root)
    write_text(run.recipe, to_toml(parse_recipe({"seed": seed, **recipe}, "the test")))
    last = 2 * len(accuracy) - 2
    lines: list[dict[str, Any]] = [{"step": step} for step in range(last + 1)]
    for i, value in enumerate(accuracy):
        lines[2 * i] |= {"eval/held/pass@1": value}
    for line in lines[:last]:
        line |= {"rollout/tokens_mean": tokens, "plan/fresh": 4, "train/updates": 1}
        line |= {"train/rows": 12, "train/replayed_rows": 2, "train/groups": 8}
        line |= {"train/zero_advantage_groups": 2, "time/rollout": 2.0, "time/train": 3.0}
    write_text(run.metrics, "\n".join(map(json.dumps, lines)))
    return run


GRPO = {"curate": {"replay_ratio": 0.0}}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three seeds each of two arms; the second one takes half, and a run is unfinished."""
    folder = tmp_path / "runs"
    for seed, more in ((1, 0.0), (2, 0.02), (3, 0.1)):
        make(folder / f"a-{seed}", seed, [0.1, 0.2 + more, 0.3 + more], loop={"steps": 7}, **GRPO)
    make(folder / "b-1", 1, [0.1, 0.3, 0.5], tokens=50, rollout={"device": "cpu"})
    make(folder / "b-2", 2, [0.1, 0.4, 0.6], tokens=50)
    make(folder / "b-4", 4, [0.1, 0.5], tokens=50)
    (folder / "notes").mkdir()
    return folder


def figures(exgrpo: Exgrpo, *arguments: object) -> tuple[dict[str, Any], dict[Any, Any]]:
    """The result, and its figures by place and arm."""
    found = json.loads(exgrpo("compare", *arguments, "--json").stdout)
    return found, {(row["at"], row["arm"]): row for row in found["figures"]}


def test_seeds_are_repeats_of_an_arm(exgrpo: Exgrpo, runs: Path) -> None:
    found, _ = figures(exgrpo, runs)
    assert [(arm["name"], arm["seeds"], arm["steps"]) for arm in found["arms"]] == [
        ("a", [1, 2, 3], [4, 4, 4]),
        ("b", [1, 2, 4], [4, 4, 2]),
    ]  # other lengths, devices and seeds are no other arm
    assert found["differing"] == {"curate.replay_ratio": [[0.0], [0.5]]}


def test_figures_at_each_place(exgrpo: Exgrpo, runs: Path) -> None:
    _, rows = figures(exgrpo, runs)
    a, b = rows["step", "a"], rows["step", "b"]  # b-4 has no more than step 2
    assert (a["step"], b["step"]) == ([2, 2], [2, 2])
    assert a["pass@1"] == pytest.approx(0.24)
    assert a["pass@1_half"] == pytest.approx(4.30265 * 0.0529150 / 3**0.5, rel=1e-4)
    assert (a["tokens"], a["questions"], a["updates"], a["seconds"]) == (2000, 12, 2, 10)
    assert b["difference"] == pytest.approx(0.14)  # of seeds 1 and 2: .10 and .18
    assert b["difference_half"] == pytest.approx(12.7062 * 0.04, rel=1e-4)
    assert (b["pairs"], a["difference"]) == (2, None)

    a, b = rows["tokens", "a"], rows["tokens", "b"]  # b-4 has 1000: a has them at step 1
    assert (a["tokens"], b["tokens"]) == (1000, 1000)
    assert (a["step"], b["step"]) == ([1, 1], [2, 2])
    assert a["pass@1"] == pytest.approx(0.17)
    assert b["difference"] == pytest.approx((0.3 - 0.15 + 0.4 - 0.16) / 2)

    a, b = rows["last", "a"], rows["last", "b"]
    assert (a["step"], b["step"]) == ([4, 4], [2, 4])
    assert b["pass@1"] == pytest.approx(1.6 / 3)

    a, b = rows["best", "a"], rows["best", "b"]  # .34, of all of a's runs, at step 4
    assert (a["tokens"], a["step"]) == (4000, [4, 4])
    step = 2 * (0.34 - 0.1) / (0.4 - 0.1)
    assert (b["step"][0], b["tokens"]) == pytest.approx((step, step * 500))

    _, rows = figures(exgrpo, runs, "--baseline", "b")
    assert rows["step", "a"]["difference"] == pytest.approx(-0.14)
    assert rows["best", "a"]["pass@1"] is None  # b's .4 is never reached


def test_a_lone_run_has_figures_and_no_interval(exgrpo: Exgrpo, runs: Path) -> None:
    found, rows = figures(exgrpo, runs / "b-1")
    assert [arm["name"] for arm in found["arms"]] == ["b"]
    assert list(rows) == [("step", "b")]
    assert (rows["step", "b"]["pass@1"], rows["step", "b"]["pass@1_half"]) == (0.5, None)
    shown = exgrpo("compare", runs / "b-1").stdout
    assert "50.0%" in shown
    assert "Differences" not in shown


def test_tables_say_what_differs(exgrpo: Exgrpo, runs: Path) -> None:
    shown = exgrpo("compare", runs).stdout
    assert "curate.replay_ratio = 0.5" in shown
    assert "24.0% ± 13.1" in shown
    assert "+14.0 ± 50.8 (2)" in shown
    assert "not reached" not in shown
    alone = exgrpo("compare", runs / "a-1", runs / "b-1", runs / "a-2").stdout
    assert "+20.0 (1)" in alone  # b has all of its seeds in the pair, and a has not
    made = exgrpo("compare", runs, "--markdown", "--baseline", "b").stdout
    assert "| a | curate.replay_ratio = 0.0 |" in " ".join(made.split())
    assert "not reached" in made


def test_runs_are_found_in_folders_and_others_left_out(exgrpo: Exgrpo, runs: Path) -> None:
    make(runs / "deep" / "seed-5" / "a", 5, [0.1, 0.2], **GRPO)
    RunDir(runs / "new").root.mkdir()
    (runs / "new" / "recipe.toml").write_text("seed = 9\n")
    (runs / "notes" / "x.txt").write_text("no run")
    done = exgrpo("compare", *sorted(runs.iterdir()), runs / "a-1", "--json")
    found = json.loads(done.stdout)
    assert [arm["seeds"] for arm in found["arms"]] == [[1, 2, 3, 5], [1, 2, 4]]
    assert done.stderr.splitlines() == [
        f"{runs}/new: no metrics yet; left out",
        f"{runs}/notes: not a run directory, nor are there any in it; left out",
    ]
    assert found["arms"][0]["name"] == "replay_ratio = 0.0"  # a, and deep/a
    assert "no run with metrics" in exgrpo("compare", runs / "notes", code=2).stderr
    assert "no such run" in exgrpo("compare", runs / "a-9", code=2).stderr
    assert "there are: a; b" in exgrpo("compare", runs / "a-1", runs / "b-1", "--baseline", "c",
                                       code=2).stderr  # fmt: skip


def test_arms_can_be_named(exgrpo: Exgrpo, runs: Path) -> None:
    found, _ = figures(exgrpo, f"old={runs / 'a-1'}", f"old={runs / 'b-2'}", f"new={runs}")
    assert [(arm["name"], arm["seeds"]) for arm in found["arms"]] == [
        ("old", [1, 2]),
        ("new", [1, 2, 3, 4]),
    ]
    assert found["differing"]["curate.replay_ratio"] == [[0.0, 0.5], [0.5, 0.0]]
    done = exgrpo("compare", f"old={runs / 'a-1'}", f"new={runs / 'a-1'}")
    assert done.stderr == f"new={runs / 'a-1'}: given already as old; left out\n"
    assert (
        "another arm has this name"
        in exgrpo("compare", f"b={runs / 'a-1'}", runs / "b-1", code=2).stderr
    )


def test_settings_that_matter_make_arms(tmp_path: Path) -> None:
    assert set(known_keys()) >= ALIKE
    for name, recipe in {
        "s1": {"loop": {"steps": 5}},
        "s2": {"loop": {"steps": 6}, "evaluate": {"every": 3, "problems": {"held": "x"}}},
        "s3": {"train": {"learning_rate": 1e-5}},
        "s4": {"train": {"schedule": "cosine"}, "loop": {"steps": 5}},
        "s5": {"train": {"schedule": "cosine"}, "loop": {"steps": 6}},
    }.items():
        make(tmp_path / name, int(name[1]), [0.1, 0.2], **recipe)
    said: list[str] = []
    found = arms([str(tmp_path)], said.append)
    assert [arm.seeds for arm in found] == [[1, 2], [3], [4], [5]]
    assert [arm.name for arm in found[1:]] == [
        "learning_rate = 1e-05", "schedule = cosine", "schedule = cosine, steps = 6",
    ]  # fmt: skip
    many = {f"max_{of}_tokens": 9 for of in ("new", "prompt")} | {"samples": 2, "temperature": 2}
    for name in ("x", "y"):
        make(tmp_path / name, 6, [0.1], rollout=many, curate={"questions": 3})
    assert arms([str(tmp_path)], said.append)[-1].name == "x"


def test_a_narrow_terminal_shows_the_figures_whole(exgrpo: Exgrpo, runs: Path) -> None:
    given = [f"a-long-name={runs / 'a-1'}", f"another={runs / 'b-1'}"]
    shown = exgrpo("compare", *given, COLUMNS="60", FORCE_COLOR="1", NO_COLOR="1").stdout
    lines = [line.split() for line in re.sub("\x1b[^m]*m", "", shown).splitlines()]
    assert ["another", "1", "4", "50.0%", "+20.0", "2,000", "20", "4", "20", "s"] in lines
    assert any(line[:3] == ["a-long-name", "1", "4"] for line in lines)


def test_what_recipes_do_not_tell_makes_arms(exgrpo: Exgrpo, tmp_path: Path) -> None:
    for seed in (1, 2):
        make(tmp_path / f"plain-{seed}", seed, [0.1, 0.2])
        make(tmp_path / f"old-{seed}", seed, [0.1, 0.2], **GRPO)
        fork = make(tmp_path / f"on-{seed}", seed, [0.1, 0.3])
        origin = {"run": str(tmp_path / f"old-{seed}"), "step": 2, "fresh_optimizer": False}
        write_json(fork.origin_file, origin)
        write_json(make(tmp_path / f"two-{seed}", seed, [0.1, 0.3]).origin_file,
                   origin | {"run": str(tmp_path / "old-1"), "fresh_optimizer": True})  # fmt: skip
        taught = make(tmp_path / f"taught-{seed}", seed, [0.1, 0.4])
        write_text(taught.imported("verdicts", 0) / "import-ab.parquet", "")
    found, _ = figures(exgrpo, tmp_path, "--baseline", "plain")
    assert [(arm["name"], arm["seeds"]) for arm in found["arms"]] == [
        (name, [1, 2]) for name in ("old", "on", "plain", "taught", "two")
    ]
    nothing = [None]
    assert found["differing"] == {
        "curate.replay_ratio": [[0.0], [0.5], [0.5], [0.5], [0.5]],
        "from": [nothing, [f"step 2 of {tmp_path}/old"], nothing, nothing,
                 [f"step 2 of {tmp_path}/old, fresh optimizer"]],
        "imports": [nothing, nothing, nothing, ["step-00000-import/import-ab"], nothing],
    }  # fmt: skip


def test_repeated_seeds_and_other_problems_are_said(exgrpo: Exgrpo, runs: Path) -> None:
    make(runs / "more" / "b-1", 1, [0.1, 0.5, 0.7], tokens=50)
    asked = {"a-1": "1+1=", "b-1": "1+2="}
    for name, question in asked.items():
        table = frame("problems", [problem_row("p", question)])
        write_table("problems", table, runs / name / "evaluations" / "held.parquet")
    found, rows = figures(exgrpo, f"a={runs / 'a-1'}", f"b={runs / 'b-1'}", f"b={runs / 'more'}")
    assert found["warnings"] == [
        "b: 2 runs of seed 1 count as their mean",
        "held: not the same problems in all runs; accuracies cannot be compared",
    ]
    assert rows["step", "b"]["difference"] == pytest.approx(0.6 - 0.3)
    assert rows["step", "b"]["pairs"] == 1

    table.write_parquet(runs / "a-1" / "evaluations" / "held.parquet", compression="gzip")
    assert not figures(exgrpo, runs / "a-1", runs / "b-1")[0]["warnings"]  # other bytes alone


def test_a_baseline_without_evaluations_is_said(exgrpo: Exgrpo, runs: Path) -> None:
    other = make(runs / "c-1", 1, [0.1, 0.2], rollout={"samples": 4})
    other.metrics.write_text(other.metrics.read_text().replace("held", "other"))
    found, rows = figures(exgrpo, runs, "--baseline", "c")
    assert found["warnings"] == ["c: never evaluated on held; there are no differences to it"]
    assert rows["step", "a"]["difference"] is None


def test_the_page_has_the_tables_and_a_line_an_arm(exgrpo: Exgrpo, runs: Path) -> None:
    exgrpo("compare", runs, "--out", runs / "page.html")
    page = Page((runs / "page.html").read_text(encoding="utf-8"))
    assert {"24.0% ± 13.1", "+14.0 ± 50.8 (2)", "curate.replay_ratio = 0.5"} <= set(
        page.texts["td"]
    )
    labels = page.labels()
    assert (
        "held against generated tokens. a: 10% at 0 tokens, 34% at 4,000 tokens;"
        " b: 10% at 0 tokens, 55% at 2,000 tokens" in labels
    )
    assert any(text.startswith("held against steps. a: 10% at step 0, 34%") for text in labels)
    assert any("with replayed rows. a: 25% at step 0, 25% at step 3" in text for text in labels)
    assert "script" not in page.texts


def test_a_lone_point_among_long_lines_is_drawn(exgrpo: Exgrpo, tmp_path: Path) -> None:
    make(tmp_path / "long-1", 1, [0.1] * 50)
    make(tmp_path / "new-1", 1, [0.1], **GRPO)
    exgrpo("compare", tmp_path, "--out", tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    dots = [attrs for tag, attrs in page.tags if tag == "path" and attrs["class"] == "dot c1"]
    assert len(dots) == 4  # a chart an axis
    assert "new, step 0: 10%" in page.texts["title"]


def test_names_are_text_wherever_they_stand(exgrpo: Exgrpo, runs: Path) -> None:
    names = ["<script>alert(1)</script>", r"$\frac{$", "_a", "a|b", "[red]x", "\x1b[31m"]
    given = [f"{name}={path}" for name, path in zip(names, sorted(runs.glob("?-?")), strict=True)]
    done = exgrpo("compare", *given, "--out", runs / "x.html", "--png", runs / "x.svg",
                  "--markdown")  # fmt: skip
    assert {r"a\|b", "[red]x", r"\x1b[31m"} <= {
        line.split(" | ")[0].strip("| ") for line in done.stdout.splitlines()
    }
    page = Page((runs / "x.html").read_text(encoding="utf-8"))
    assert "script" not in page.texts
    assert set(names) <= set(page.texts["td"])
    drawn = (runs / "x.svg").read_text(encoding="utf-8")
    assert all(f"<!-- {name} -->" in drawn for name in (r"$\frac{$", "_a", "a|b", r"\x1b[31m"))


def test_arms_keep_their_look_in_the_picture(exgrpo: Exgrpo, runs: Path) -> None:
    for i in range(9):
        make(runs / f"c{i}-1", 1, [0.1, 0.2], rollout={"samples": 10 + i})
    first = runs / "a-1" / "metrics.jsonl"
    first.write_text(first.read_text().replace("held", "other"))
    exgrpo("compare", runs / "a-1", runs / "b-1", *sorted(runs.glob("c*")), "--png", runs / "x.svg")
    drawn = (runs / "x.svg").read_text(encoding="utf-8")
    assert all(f"<!-- {name} -->" in drawn for name in ("a", "b", "c0", "c8"))
    lines = re.findall(r'<path d="M[^"]*" clip-path="[^"]*" style="([^"]*)"', drawn)
    looks = {line for line in lines if "stroke-width: 1.5" in line}
    assert len(looks) == 11
    strokes = [re.search("#[0-9a-f]{6}", look)[0] for look in looks]  # type: ignore[index]
    assert len(set(strokes)) == 10  # the eleventh arm has the first one's, dashed


def test_picture_and_numbers(exgrpo: Exgrpo, runs: Path) -> None:
    exgrpo("compare", runs, "--png", runs / "x.png", "--csv", runs / "x.csv")
    assert (runs / "x.png").read_bytes().startswith(b"\x89PNG")
    with (runs / "x.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 * 5 + 3
    last = next(row for row in rows if (row["run"], row["step"]) == (f"{runs}/b-2", "4"))
    assert (last["arm"], last["seed"], last["eval/held/pass@1"]) == ("b", "2", "0.6")
    assert float(last["spent/tokens"]) == 2000
    exgrpo("compare", runs, "--csv", runs / "x.parquet")
    assert (runs / "x.parquet").read_bytes().startswith(b"PAR1")
    no_format = exgrpo("compare", runs, "--png", runs / "x.nothing", code=2).stderr
    assert "x.nothing" in no_format
