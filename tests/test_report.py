"""The HTML report and the text curve."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.inspect import charts
from exgrpo_cli.inspect.groups import example_groups
from exgrpo_cli.inspect.report import _columns, write_report
from exgrpo_cli.metrics import evaluation_names, learning_curve, replay_start, series, spent
from exgrpo_cli.recipe import Recipe, parse_recipe, to_toml
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.runs.provenance import record_provenance
from made_run import (
    HOSTILE,
    make_evaluation,
    make_metrics,
    make_run,
    make_tables,
    rollout_rows,
    verdict_rows,
    write,
)
from page import Page


def _page(run: RunDir) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


def test_report_of_a_run_has_every_chart_and_says_its_numbers(tmp_path: Path) -> None:
    page = _page(make_run(tmp_path / "run", 12))
    titles = page.texts["h3"]
    for title in (
        "Held-out accuracy",
        "Success rate of the rollouts",
        "Buckets",
        "Pool",
        "Entropy",
        "Response length",
        "Gradient norm",
        "Age of experience",
        "Time",
    ):
        assert title in titles
    assert (
        "Held-out accuracy. heldout: 24% at step 0, 64% at step 12" in page.labels()
    )  # for those who do not see the curve
    assert any("dashed: replay starts at step 3" in text for text in page.texts["p"])
    assert "60.0% [56.0%, 65.0%]" in page.texts["td"]
    assert {"sums", "others"} <= set(page.texts["td"])
    assert "train.learning_rate" in page.texts["td"]  # changed from its default


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    root = tmp_path / "<script>alert(0)<"
    run = make_run(root, 2, HOSTILE)
    html = write_report(run).read_text(encoding="utf-8")
    page = Page(html)
    assert not {"img", "iframe", "object", "link"} & {tag for tag, _ in page.tags}
    (script,) = page.texts["script"]  # its own, which the policy knows by its hash
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert any(HOSTILE in text for text in page.texts["pre"])
    assert root.name in page.texts["h1"][0]
    policy = next(a["content"] for _, a in page.tags if "http-equiv" in a)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )
    assert not re.search(
        r"(src|href)\s*=|url\(|@import",
        re.sub(r"<pre>.*?</pre>|<summary>.*?</summary>", "", html, flags=re.S),
    )
    assert not re.search(r"fetch|http|import|eval|innerHTML", script)


def test_hostile_metric_and_evaluation_names_stay_text(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    name = '"><script>x</script>'
    run.record(0, "evaluate", {f"eval/{name}/pass@1": 0.5})
    page = _page(run)
    assert len(page.texts["script"]) == 1
    assert name in page.texts["td"]


def test_report_of_a_single_step(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    make_metrics(run, 1)
    (tmp_path / "metrics" / "step-00001" / "evaluate-heldout.json").unlink()
    run.record(0, "train", {"train/grad_norm": 0.5})
    page = _page(run)
    assert "Held-out accuracy. heldout: 24% at step 0" in page.labels()
    assert "Gradient norm. gradient norm: 0.5 at step 0" in page.labels()
    assert "nan" not in " ".join(attrs.get("d") or "" for _, attrs in page.tags).lower()


def test_report_of_an_empty_directory(tmp_path: Path) -> None:
    page = _page(RunDir(tmp_path / "new"))
    assert "no metrics yet" in page.texts["small"]
    assert "svg" not in page.texts


def test_the_timeline_says_who_waited(tmp_path: Path) -> None:
    """Step 1 is sampled while step 0 is trained, and its training waits for that."""
    run = RunDir(tmp_path)
    for step, stage, began, ended in (
        (0, "rollout", 0, 20), (0, "train", 20, 30), (1, "rollout", 20, 45), (1, "train", 45, 60),
        (1, "evaluate/held", 46, 50), (1, "evaluate/ood", 50, 58),
    ):  # fmt: skip
        at = {f"time/{stage}_began": 1e9 + began, f"time/{stage}_ended": 1e9 + ended}
        spent_here = {f"time/{stage}": ended - began, "train/lag": float(step)}
        run.record(step, f"time-{stage.replace('/', '-')}", at | spent_here)
    page = _page(run)
    words = "when each stage was at work, steps 0 to 1: sampling 75% of the time, training 42%"
    assert words in page.texts["p"]
    bars = [title for title in page.texts["title"] if ", step 1: " in title]
    assert bars == [
        "rollout, step 1: 25 s", "train, step 1: 15 s",
        "evaluate, step 1: 4 s", "evaluate, step 1: 8 s",
    ]  # fmt: skip
    assert spent(run.read_metrics())["seconds"] == [(0.0, 0.0), (1.0, 30.0), (2.0, 60.0)]


@pytest.mark.parametrize(
    "kept", ["time/rollout", "pool/bucket_hard", "train/entropy", "eval/heldout/pass@1"]
)
def test_missing_metrics_leave_their_charts_out(tmp_path: Path, kept: str) -> None:
    run = RunDir(tmp_path)
    for step in range(3):
        run.record(step, "stage", {kept: 0.25 * (step + 1), "train/grad_norm": None})
    assert len(_page(run).labels()) == 1


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    values = [0.5, float("nan"), float("inf"), None, "high", 0.75]
    lines = [json.dumps({"step": i, "train/grad_norm": v}) for i, v in enumerate(values)]
    tables.write_text(run.metrics, "\n".join(lines))
    assert series(run.read_metrics(), "train/grad_norm") == [(0, 0.5), (5, 0.75)]
    assert "Gradient norm. gradient norm: 0.5 at step 0, 0.75 at step 5" in _page(run).labels()


def test_whole_groups_with_rewards_and_advantages(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    make_tables(run, 4)
    tables.write_text(run.recipe, "seed = 0\n")
    page = _page(run)
    found = [" ".join(text.split()) for text in page.texts["p"] if "· advantage" in text]
    assert len(found) == 6  # two questions, all of their samples
    assert re.search(r"reward 1 · advantage \+0\.667 · \d+ tokens · found 12", found[0] + found[3])
    assert sum("reward 0 · advantage -0.333" in text for text in found) == 4
    verdicts = page.texts["b"]
    assert sorted(verdicts) == [
        "1/3", "1/3", "cut off", "no answer", "right", "right", "wrong", "wrong"
    ]  # fmt: skip
    assert "7+5=12; \\boxed{12}" in page.texts["pre"]
    assert "12" in page.texts["dd"]
    assert not [text for text in verdicts if text == "replayed"]  # they were fresh groups


def test_a_replayed_trajectory_is_the_first_of_its_group(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    make_tables(run, 2)
    texts = {"add<1>": ["", "7+5=13; \\boxed{13}", "7+5=12; \\boxed{12}"]}
    rows = [{**row, "role": "replay"} for row in rollout_rows(3, texts) if row["sample"]]
    write("rollouts", run.rollouts(3) / tables.part_name(0, 1), rows)
    write(
        "verdicts", run.verdicts(3) / tables.part_name(0, 1), verdict_rows(rows, {"add<1>": "12"})
    )
    chosen = tables.read_table("curated", run.curated(2)).to_dicts()
    write("curated", run.curated(3), [{**row, "step": 3} for row in chosen])
    recipe = parse_recipe({"objective": {"divide_by_std": True}}, "the test")
    tables.write_text(run.recipe, to_toml(recipe))
    (group,) = example_groups(run, recipe)
    assert (group["role"], group["right"], group["count"]) == ("replay", 2, 3)
    assert [row["verdict"] for row in group["rows"]] == ["replayed", "wrong", "right"]
    assert [row["advantage"] for row in group["rows"]] == pytest.approx(
        [0.57735, -1.1547, 0.57735], abs=1e-4
    )  # (reward - 2/3) / the deviation of 1, 0, 1
    assert "collected in step 2, best of 2" in group["rows"][0]["detail"]
    assert "collected in step 2, best of 2" in " ".join(_page(run).texts["p"])
    shutil.rmtree(run.rollouts(2))  # old rollouts may have been removed
    assert [row["verdict"] for row in example_groups(run, recipe)[0]["rows"]] == ["wrong", "right"]


def test_groups_are_of_the_last_step_and_the_last_evaluated_ones(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in range(7):
        make_tables(run, step)
        if step % 2 == 0:
            make_evaluation(run, step)
    assert list(dict.fromkeys(g["step"] for g in example_groups(run, Recipe()))) == [6, 4, 2]
    many = {f"q{i}": ["\\boxed{1}", "no"] for i in range(40)}
    rows = rollout_rows(7, many)
    write("rollouts", run.rollouts(7) / tables.part_name(0, 1), rows)
    verdicts = verdict_rows(rows, dict.fromkeys(many, "1"))
    write("verdicts", run.verdicts(7) / tables.part_name(0, 1), verdicts)
    steps = [group["step"] for group in example_groups(run, Recipe())]
    assert steps.count(7) == 3  # bounded, however many there are
    assert set(steps) == {7, 6, 4}


def test_the_search_field_hides_what_does_not_match(tmp_path: Path) -> None:
    page = _page(make_run(tmp_path / "run", 3))
    assert [a["id"] for tag, a in page.tags if tag == "input"] == ["find"]
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    stub = """
const listeners = [], found = {};
const field = {value: "", addEventListener: (_, f) => listeners.push(f)};
const groups = ["Seven plus five", "two times four"].map((textContent) => ({textContent}));
const document = {getElementById: (id) => (id === "find" ? field : found),
                  querySelectorAll: () => groups};
"""
    check = """
field.value = "FIVE seven"; listeners[0]();
console.log(groups.map((g) => g.hidden).join(), found.textContent);
"""
    code = stub + "{" + page.texts["script"][0] + "}" + check
    done = subprocess.run([node, "-e", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "false,true 1 of 2 groups"


@pytest.mark.parametrize("count", range(1, 9))
def test_no_tile_is_left_alone_in_the_last_row(count: int) -> None:
    for most in (4, 6):
        columns = _columns(count, most)
        assert columns <= most
        assert count == 1 or count % columns != 1 or columns == 1


def test_smoothing_is_of_all_series_of_a_chart_or_none_and_said() -> None:
    short, long = [(i, 0.5) for i in range(40)], [(i, 0.5) for i in range(41)]
    for lines in ([("a", short), ("b", short)], [("a", short), ("b", long)]):
        html = charts.line_chart("t", "n", lines)
        smooth = len(lines[1][1]) > 40
        assert html.count('class="line raw') == 2 * smooth
        assert ("moving mean" in html) == smooth


def test_provenance_is_a_table(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    assert "Provenance" not in _page(run).texts["h2"]
    record_provenance(run, Recipe())
    record_provenance(run, Recipe(seed=7))
    page = _page(run)
    assert "Provenance" in page.texts["h2"]
    assert {"host", "torch", "duckdb", "commit", "first", "7"} <= set(page.texts["td"])
    assert "start 2" in page.texts["th"]


def test_examples_without_their_problems_and_with_a_long_response(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    make_tables(run, 0)
    tables.write_text(run.recipe, "seed = 0\n")
    run.problems.unlink()
    file = run.rollouts(0) / tables.part_name(0, 2)
    rows = tables.read_table("rollouts", file).to_dicts()
    rows[0]["text"] = "a" * 50_000 + "the end \\boxed{12}"
    write("rollouts", file, rows)
    html = write_report(run).read_text(encoding="utf-8")
    assert "characters left out" in html
    assert "the end \\boxed{12}" in html  # where the answer is
    assert len(html) < 60_000


def test_evaluations_fall_back_to_the_metrics(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    make_metrics(run, 6)
    assert "64.0% [60.0%, 69.0%]" in _page(run).texts["td"]
    make_evaluation(run, 6)
    assert "60.0% [56.0%, 65.0%]" in _page(run).texts["td"]


def test_a_recipe_of_another_version_is_still_shown(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    tables.write_text(run.recipe, "no_longer_known = 3\n")
    assert "no_longer_known = 3\n" in _page(run).texts["pre"]


def test_damaged_files_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    part = run.rollouts(1) / tables.part_name(1, 2)
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="rollouts"):
        write_report(run)
    part.write_bytes(whole)
    run.metrics.write_text('{"step": 0}\n{"step"')
    with pytest.raises(InputError, match=r"metrics\.jsonl"):
        write_report(run)
    run.metrics.unlink()
    (run.evaluation(2, "heldout") / "summary.json").write_text("{}")
    with pytest.raises(InputError, match=r"summary\.json"):
        write_report(run)
    assert not run.report.exists()


def test_long_runs_stay_small(tmp_path: Path) -> None:
    lines = [{"step": i, "train/entropy": i % 7, "time/train": 1.0} for i in range(20_000)]
    run = RunDir(tmp_path)
    tables.write_text(run.metrics, "\n".join(json.dumps(line) for line in lines))
    assert write_report(run).stat().st_size < 100_000


def test_sources_of_a_set_get_a_chart_of_their_own(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    metrics = {
        "eval/test/pass@1": 0.5,
        "eval/test/aime/24/pass@1": 0.3,
        "eval/test/math/pass@1": 0.7,
    }
    run.record(0, "evaluate", metrics)
    assert evaluation_names(run.read_metrics()) == ["test"]
    assert "test by source. test/aime/24: 30% at step 0; test/math: 70% at step 0" in (
        _page(run).labels()
    )


def test_replay_start() -> None:
    assert replay_start([{"step": 0, "replay/started": 0}, {"step": 1, "replay/started": 1}]) == 1
    assert replay_start([{"step": 0, "replay/started": 0}, {"step": 1}]) is None


# --- the curve as text ----------------------------------------------------------------------------


def test_learning_curve_in_text() -> None:
    metrics = [
        {"step": 0, "eval/h/pass@1": 0.25, "eval/h/pass@1_low": 0.2, "eval/h/pass@1_high": 0.3},
        {"step": 1, "success_rate": 0.3},
        {"step": 10, "eval/h/pass@1": 1.0, "eval/h/pass@1_low": 1.0, "eval/h/pass@1_high": 1.0},
    ]
    head, first, last = learning_curve(metrics, width=20).splitlines()
    assert head.startswith("h pass@1")
    assert first == "step     0  0.250 [0.200, 0.300]  ████▓░"
    assert last == "step    10  1.000 [1.000, 1.000]  " + "█" * 20


def test_learning_curve_without_evaluations_shows_the_success_rate() -> None:
    metrics = [{"step": i, "success_rate": i / 100} for i in range(100)]
    lines = learning_curve(metrics).splitlines()
    assert len(lines) == 31
    assert lines[1].startswith("step     0  0.000")
    assert lines[-1].startswith("step    99  0.990")
    assert learning_curve([]) == ""


# --- charts ---------------------------------------------------------------------------------------

_values = st.floats(-1e6, 1e6).map(lambda v: round(v, 6))


@given(st.lists(_values, min_size=1, max_size=60))
def test_lines_stay_inside_their_plot(values: list[float]) -> None:
    html = charts.line_chart("t", "n", [("a", list(enumerate(values)))])
    Page(html)
    for path in re.findall(r'class="(?:line|dot)[^"]*" d="M([^"]*)"', html):
        for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path):
            assert -0.1 <= float(x) <= 1000.1
            assert -0.1 <= float(y) <= 400.1


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=250).filter(any))
def test_stacks_fill_what_they_count(values: list[float]) -> None:
    layers = [("c0", "a", list(enumerate(values))), ("c1", "b", list(enumerate(values)))]
    html = charts.stack_chart("t", "n", layers)
    Page(html)
    lower, upper = re.findall(r'class="area c\d" d="([^"]*)"', html)
    columns = [
        [(float(a), float(b)) for a, b in re.findall(r"M[\d.]+ ([\d.]+)V([\d.]+)", path)]
        for path in (lower, upper)
    ]
    assert len(columns[0]) == min(len(values), -(-len(values) // -(-len(values) // 100)))
    for (floor, middle), (second, top) in zip(*columns, strict=True):
        assert floor == pytest.approx(400, abs=0.1)
        assert second == middle
        assert floor - middle == pytest.approx(middle - top, abs=0.2)  # equal layers, equal heights


@given(_values, _values)
def test_ticks_are_few_and_cover(one: float, other: float) -> None:
    low, high = sorted((one, other))
    ticks = charts._ticks(low, high)
    span = high - low or 1.0
    assert ticks[0] <= low + 1e-6 * span
    assert ticks[-1] >= high - 1e-6 * span
    assert 2 <= len(ticks) <= 7


def test_a_moving_mean_does_not_bend_a_straight_line() -> None:
    line = [(float(i), 2.0 * i) for i in range(50)]
    assert dict(charts._moving_mean(line, 9)) == pytest.approx(dict(line))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.25, "0.25"), (3.0, "3"), (0.30000000000000004, "0.3"), (1234, "1,234"), (2.5e6, "2.5M"),
     (123456, "123k"), (999_900, "1M"), (1.5e9, "1.5B"), (0.00025, "0.00025"), (-12.5, "-12.5"),
     (0, "0")],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str) -> None:
    assert charts.number(value) == text


@pytest.mark.parametrize(
    ("last", "axis", "labels"),
    [
        (100_000, "tokens", ["0", "20k", "40k", "60k", "80k", "100k"]),
        (1_000_000, "tokens", ["0", "0.2M", "0.4M", "0.6M", "0.8M", "1M"]),
        (10_000, "tokens", ["0", "2,000", "4,000", "6,000", "8,000", "10,000"]),
        (2_000, "step", ["0", "500", "1000", "1500", "2000"]),
    ],
)
def test_the_numbers_of_an_axis_are_all_of_one_unit(
    last: float, axis: str, labels: list[str]
) -> None:
    assert [label for _, label in charts.x_ticks(0.0, last, axis)] == labels
