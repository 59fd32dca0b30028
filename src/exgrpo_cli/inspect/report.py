"""The HTML report of a run, and its learning curve as plain text.

One file that needs nothing else: no script, no network; a content security policy forbids both,
whatever a rollout may contain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from exgrpo_cli.errors import InputError
from exgrpo_cli.evaluation import interval_of, pass_ks
from exgrpo_cli.inspect.charts import line_chart, number, percent, seconds, stack_chart
from exgrpo_cli.metrics import (
    Metrics,
    band,
    evaluation_names,
    read_evaluations,
    replay_start,
    series,
)
from exgrpo_cli.recipe import Recipe, differences, load_recipe
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.tables import write_text
from exgrpo_cli.tables.duck import literal, query

STAGES = ("rollout", "verify", "score", "curate", "train")


def write_report(run: RunDir) -> Path:
    """Write ``report.html`` from whatever the run has so far.

    Args:
        run: its metrics, recipe, evaluations, and the last step's rollouts and verdicts; each may
            be missing.

    Returns:
        The report's path.

    Raises:
        InputError: ``metrics.jsonl`` is not JSON lines, a table is damaged, or the recipe of a run
            that has begun is gone.
    """
    run.own_recipe()
    metrics = run.read_metrics()
    style = files("exgrpo_cli.inspect").joinpath("report.css").read_text(encoding="utf-8")
    parts = [
        _header(run, metrics),
        _section("Learning", _charts(metrics, _learning_charts)),
        _section("Evaluations", _evaluation_tables(run, metrics)),
        _section("Experience", _charts(metrics, _experience_charts)),
        _section("Training", _charts(metrics, _training_charts)),
        _section("Rollouts of the last step", _examples(run)),
        _section("Recipe", _recipe(run)),
    ]
    name = escape(run.root.resolve().name)
    write_text(
        run.report,
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy"'
        " content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{name} · ExGRPO</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n",
    )
    return run.report


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{body}</section>" if body else ""


def _charts(metrics: Metrics, make: Callable[[Metrics], list[str]]) -> str:
    charts = [chart for chart in make(metrics) if chart]
    return f'<div class="charts">{"".join(charts)}</div>' if charts else ""


def _replay_mark(metrics: Metrics) -> tuple[float, str] | None:
    start = replay_start(metrics)
    return None if start is None else (float(start), f"replay starts at step {start}")


def _marked(note: str, mark: tuple[float, str] | None) -> str:
    return note if mark is None else f"{note}; dashed: {mark[1]}"


def _learning_charts(metrics: Metrics) -> list[str]:
    mark = _replay_mark(metrics)
    names, sources = evaluation_names(metrics), evaluation_names(metrics, by_source=True)

    def accuracy(title: str, chosen: list[str], wide: bool) -> str:
        keys = [f"eval/{name}/pass@1" for name in chosen]
        alone = f"{chosen[0]}: " if len(chosen) == 1 else ""
        return line_chart(
            title,
            _marked(f"{alone}pass@1 with 95% intervals over problems", mark),
            [(name, series(metrics, key)) for name, key in zip(chosen, keys, strict=True)],
            bands=[band(metrics, key) for key in keys],
            bounds=(0.0, None),
            text=percent,
            mark=mark,
            wide=wide,
        )

    charts = [accuracy("Held-out accuracy", names[:6], True)]
    for name in names:
        own = [source for source in sources if source.startswith(f"{name}/")]
        # More than six lines cannot be told apart; the table has all of them.
        charts.append(accuracy(f"{name} by source", own[:6], True) if own else "")
    charts += [
        line_chart(
            "Success rate of the rollouts",
            _marked("share of right samples", mark),
            [
                ("fresh questions", series(metrics, "reward/fresh_mean")),
                ("replay questions", series(metrics, "reward/replay_mean")),
            ],
            bounds=(0.0, None),
            text=percent,
            mark=mark,
        ),
        line_chart(
            "Entropy",
            "mean over tokens, nats",
            [
                ("policy, training batch", series(metrics, "train/entropy")),
                ("chosen trajectories", series(metrics, "replay/mean_entropy")),
            ],
            bounds=(0.0, None),
        ),
        line_chart(
            "Response length",
            "mean tokens of a rollout",
            [("tokens", series(metrics, "rollout/tokens_mean"))],
            bounds=(0.0, None),
        ),
    ]
    return charts


def _experience_charts(metrics: Metrics) -> list[str]:
    return [
        stack_chart(
            "Buckets",
            "questions by their latest successes: hard up to 1/4, easy from 3/4",
            [
                ("r0", "hard", series(metrics, "pool/bucket_hard")),
                ("r1", "medium", series(metrics, "pool/bucket_medium")),
                ("r2", "easy", series(metrics, "pool/bucket_easy")),
                ("muted", "retired", series(metrics, "pool/retired")),
            ],
            wide=True,
        ),
        line_chart(
            "Pool",
            "what is stored, and what is mastered",
            [
                ("stored trajectories", series(metrics, "pool/trajectories")),
                ("their questions", series(metrics, "pool/questions")),
                ("retired questions", series(metrics, "pool/retired")),
            ],
            bounds=(0.0, None),
        ),
        line_chart(
            "Age of experience",
            "steps since a trajectory was collected",
            [
                ("replayed", series(metrics, "replay/age_mean")),
                ("pool", series(metrics, "pool/age_mean")),
            ],
            bounds=(0.0, None),
        ),
        line_chart(
            "Questions without a gradient",
            "share of the sampled ones; their advantages are all zero",
            [
                ("all wrong", series(metrics, "solve/none")),
                ("all right", series(metrics, "solve/all")),
            ],
            bounds=(0.0, None),
            text=percent,
        ),
    ]


def _training_charts(metrics: Metrics) -> list[str]:
    return [
        line_chart(
            "Gradient norm",
            "before clipping",
            [("gradient norm", series(metrics, "train/grad_norm"))],
            bounds=(0.0, None),
        ),
        line_chart(
            "Loss",
            "mean over fresh tokens, and over replayed tokens",
            [
                ("fresh", series(metrics, "train/on_policy_loss")),
                ("replayed", series(metrics, "train/off_policy_loss")),
            ],
        ),
        line_chart(
            "Importance ratios",
            "fresh: π over π old; replayed: after policy shaping",
            [
                ("fresh", series(metrics, "train/ratio_mean")),
                ("replayed, shaped", series(metrics, "train/shaped_ratio_mean")),
            ],
        ),
        line_chart(
            "Clipped tokens",
            "share of the fresh tokens",
            [("clipped", series(metrics, "train/clip_fraction"))],
            bounds=(0.0, None),
            text=percent,
        ),
        line_chart(
            "Engine against trainer",
            "difference of a sampled token's log-probability, mean, nats",
            [("difference", series(metrics, "train/sampling_logp_difference_mean"))],
            bounds=(0.0, None),
        ),
        line_chart(
            "Failed responses",
            "share of the rollouts",
            [
                ("cut off", series(metrics, "rollout/truncated_share")),
                ("no answer found", series(metrics, "rollout/no_answer_share")),
            ],
            bounds=(0.0, None),
            text=percent,
        ),
        stack_chart(
            "Time",
            "seconds of each stage",
            [(f"c{i}", stage, series(metrics, f"time/{stage}")) for i, stage in enumerate(STAGES)],
            text=seconds,
            wide=True,
        ),
    ]


def _header(run: RunDir, metrics: Metrics) -> str:
    """The title and a row of the numbers that one looks for first."""
    tiles: list[tuple[str, str, str]] = []  # label, value, detail
    trained = [step for step in run.steps("policy") if step > 0]
    done = trained[-1] if trained else 0
    tiles.append(("steps", str(done), "" if metrics else "no metrics yet"))
    for name in evaluation_names(metrics)[:2]:
        key = f"eval/{name}/pass@1"
        points = series(metrics, key)
        if points:
            detail = f"{points[0][1]:.1%} at step {points[0][0]:.0f}"
            interval = [(low, high) for s, low, high in band(metrics, key) if s == points[-1][0]]
            if len(points) == 1 and interval:
                detail = f"{interval[0][0]:.1%} to {interval[0][1]:.1%}"
            elif len(points) > 1:
                detail = "from " + detail
            tiles.append((f"{name} pass@1", f"{points[-1][1]:.1%}", detail))
    for label, key, text in (
        ("success rate", "success_rate", lambda v: f"{v:.1%}"),
        ("retired questions", "pool/retired", number),
        ("stored trajectories", "pool/trajectories", number),
    ):
        points = series(metrics, key)
        if points:
            detail = f"from {text(points[0][1])}" if len(points) > 1 else ""
            tiles.append((label, text(points[-1][1]), detail))
    spent = sum(v for stage in STAGES for _, v in series(metrics, f"time/{stage}"))
    if spent:
        tiles.append(("time in stages", _duration(spent), ""))
    items = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(detail)}</small></dd></div>"
        for label, value, detail in tiles
    )
    name = escape(run.root.resolve().name)
    recipe = _load_recipe(run)
    about = ""
    if recipe is not None:
        about = (
            f"{recipe.model.path or 'no model set'} · {recipe.curate.questions} questions ×"
            f" {recipe.rollout.samples} samples a step · replay share"
            f" {recipe.curate.replay_ratio:g} · learning rate {recipe.train.learning_rate:g}"
        )
    start = replay_start(metrics)
    if metrics:
        about += " · " if about else ""
        about += "replay has not started" if start is None else f"replay from step {start}"
    return f'<header><h1>{name}</h1><p>{escape(about)}</p><dl class="tiles">{items}</dl></header>'


def _duration(value: float) -> str:
    if value < 60:
        return f"{value:.0f} s"
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """A table whose first ``words`` columns are text and whose others are right-aligned numbers."""

    def mark(column: int) -> str:
        return ' class="num"' if column >= words else ""

    top = "".join(f'<th scope="col"{mark(i)}>{escape(cell)}</th>' for i, cell in enumerate(head))
    body = "".join(
        "<tr>"
        + "".join(f"<td{mark(i)}>{escape(cell)}</td>" for i, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _accuracy_cells(row: Mapping[str, Any], ks: Sequence[int]) -> list[str]:
    """pass@1 with its interval, and the plain pass@k."""
    low, high = interval_of(row, 1)
    return [
        f"{row['pass@1']:.1%} [{low:.1%}, {high:.1%}]",
        *(f"{row[f'pass@{k}']:.1%}" if f"pass@{k}" in row else "–" for k in ks if k > 1),
        f"{row['truncated']:.1%}",
        f"{row['tokens']:.0f}",
    ]


def _evaluation_tables(run: RunDir, metrics: Metrics) -> str:
    found = read_evaluations(run)
    if not found:
        return _evaluations_from_metrics(metrics)
    rows = [row for _, summary in found for row in (summary["overall"], *summary["rows"])]
    ks = sorted({k for row in rows for k in pass_ks(row)})
    head = ["pass@1 [95% interval]", *(f"pass@{k}" for k in ks if k > 1)]
    head += ["truncated", "tokens", "problems", "samples"]

    def line(label: str, summary: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
        count = [str(row["problems"]), f"{row['samples'] / row['problems']:.3g}"]
        return [label, f"step {summary['step']}", *_accuracy_cells(row, ks), *count]

    tables = html_table(
        ["set", "policy", *head],
        [line(name, summary, summary["overall"]) for name, summary in found],
        words=2,
    )
    last = {name: summary for name, summary in found if len(summary["rows"]) > 1}
    for name, summary in last.items():
        tables += f"<h3>{escape(name)} by source, step {summary['step']}</h3>" + html_table(
            ["source", "policy", *head],
            [line(row["source"], summary, row) for row in summary["rows"]],
            words=2,
        )
    return tables


def _evaluations_from_metrics(metrics: Metrics) -> str:
    """What the metrics know, where the evaluations' own files are gone."""
    rows = []
    for name in evaluation_names(metrics):
        key = f"eval/{name}/pass@1"
        bounds = {step: f" [{low:.1%}, {high:.1%}]" for step, low, high in band(metrics, key)}
        for step, value in series(metrics, key):
            rows.append([name, f"step {step:.0f}", f"{value:.1%}{bounds.get(step, '')}"])
    return html_table(["set", "policy", "pass@1 [95% interval]"], rows, words=2) if rows else ""


# What a reader wants to see, at most two of each: a success, a wrong answer, a response that gave
# none or was cut off.
_EXAMPLES_SQL = """
WITH judged AS (
    SELECT r.rollout_id, r.problem_id, r.role, r.text, r.tokens, r.finish_reason, r.mean_entropy,
           v.reward, v.correct, v.extracted, v.status,
           CASE WHEN v.correct THEN 0
                WHEN v.status = 'ok' AND r.finish_reason = 'stop' THEN 1
                ELSE 2 END AS kind
    FROM read_parquet($rollouts) r JOIN read_parquet($verdicts) v USING (rollout_id)
)
SELECT rollout_id, problem_id, role, text, tokens, finish_reason, mean_entropy, reward, correct,
       extracted, status
FROM judged
QUALIFY row_number() OVER (PARTITION BY kind ORDER BY hash(rollout_id), rollout_id) <= 2
ORDER BY kind, rollout_id
"""


def last_judged_step(run: RunDir) -> int | None:
    """The last step that has both rollouts and verdicts."""
    both = set(run.steps("rollouts")) & set(run.steps("verdicts"))
    judged = [step for step in both if _files(run.rollouts(step)) and _files(run.verdicts(step))]
    return max(judged, default=None)


def _files(folder: Path) -> list[str]:
    return literal(folder.glob("[!.]*.parquet"))


def example_rollouts(run: RunDir) -> list[dict[str, Any]]:
    """A few judged rollouts of the last step, with their problem's chat and gold answer.

    Returns:
        At most two successes, two wrong answers, and two responses without an answer.
    """
    step = last_judged_step(run)
    if step is None:
        return []
    parts = {"rollouts": _files(run.rollouts(step)), "verdicts": _files(run.verdicts(step))}
    rows = query(_EXAMPLES_SQL, parts, run.rollouts(step))
    return _with_problems(run, rows)


def replayed_examples(run: RunDir) -> tuple[int, list[dict[str, Any]]]:
    """The last step that replayed something, and up to two of its trajectories, as above."""
    for step in reversed(run.steps("curated")):
        chosen = query(
            "SELECT rollout_id, collected_step, mean_entropy, bucket, candidates"
            " FROM read_parquet($curated) ORDER BY hash(rollout_id), rollout_id LIMIT 2",
            {"curated": literal([run.curated(step)])},
            run.curated(step),
        )
        rows = []
        for choice in chosen:
            folder = run.rollouts(choice["collected_step"])
            if not _files(folder):  # rollouts of old steps may have been removed
                continue
            rows += query(
                "SELECT rollout_id, problem_id, text, tokens, finish_reason"
                " FROM read_parquet($rollouts) WHERE rollout_id = $id",
                {"rollouts": _files(folder), "id": choice["rollout_id"]},
                folder,
            )
            if rows and rows[-1]["rollout_id"] == choice["rollout_id"]:
                rows[-1] |= choice
        if rows:
            return step, _with_problems(run, rows)
    return -1, []


def _with_problems(run: RunDir, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not rows or not run.problems.exists():
        return rows
    known = query(
        "SELECT problem_id, prompt, answer FROM read_parquet($problems)"
        " WHERE list_contains($ids, problem_id)",
        {"problems": literal([run.problems]), "ids": [row["problem_id"] for row in rows]},
        run.problems,
    )
    by_id = {problem["problem_id"]: problem for problem in known}
    return [row | by_id.get(row["problem_id"], {}) for row in rows]


def _examples(run: RunDir) -> str:
    judged = example_rollouts(run)
    step, replayed = replayed_examples(run)
    blocks = []
    for row in judged:
        verdict = "right" if row["correct"] else _verdict(row)
        blocks.append(_example(row, verdict, "good" if row["correct"] else "bad", row["role"]))
    for row in replayed:
        detail = (
            f"replayed in step {step}, collected in step {row['collected_step']}, best of"
            f" {row['candidates']} by mean entropy {row['mean_entropy']:.3f} nats"
        )
        blocks.append(_example(row, "replayed", "again", detail))
    return "".join(blocks)


def _verdict(row: Mapping[str, Any]) -> str:
    if row["finish_reason"] == "length":
        return "cut off"
    words = {"no_answer": "no answer", "ok": "wrong"}
    return words.get(row["status"]) or str(row["status"])


def _example(row: Mapping[str, Any], verdict: str, css: str, detail: str) -> str:
    prompt = row.get("prompt") or []
    question = next((m["content"] for m in reversed(prompt) if m["role"] == "user"), "")
    facts = [("gold", row.get("answer")), ("found", row.get("extracted"))]
    said = "".join(
        f"<div><dt>{name}</dt><dd>{escape(_clip(str(value), 300))}</dd></div>"
        for name, value in facts
        if value is not None
    )
    return (
        f'<details class="example"{" open" if len(row["text"]) < 400 else ""}><summary>'
        f'<b class="{css}">{escape(verdict)}</b> {escape(_clip(" ".join(question.split()), 90))}'
        f" <small>{row['tokens']} tokens · {escape(detail)}</small></summary>"
        f'<p class="id">{escape(row["rollout_id"])}</p>'
        f"<h4>Problem</h4><pre>{escape(_clip(question, 4000))}</pre>"
        f"<h4>Response</h4><pre>{escape(_clip(row['text'], 12000))}</pre>"
        f'<dl class="facts">{said}</dl></details>'
    )


def _clip(text: str, length: int) -> str:
    """The text, its middle left out where it is longer: a response's end holds its answer."""
    if len(text) <= length:
        return text
    if length <= 300:
        return text[: length - 1] + "…"
    half = length // 2
    return f"{text[:half]}\n[… {len(text) - length:,} characters left out …]\n{text[-half:]}"


def _load_recipe(run: RunDir) -> Recipe | None:
    try:
        return load_recipe(run.recipe) if run.recipe.exists() else None
    except InputError:  # of another version; its text is still shown
        return None


def _recipe(run: RunDir) -> str:
    if not run.recipe.exists():
        return ""
    recipe = _load_recipe(run)
    changed = ""
    if recipe is not None:
        rows = [
            [key, _plain(new), _plain(old)]
            for key, (old, new) in differences(Recipe(), recipe).items()
        ]
        changed = html_table(["changed from the defaults", "here", "default"], rows, 3)
    text = run.recipe.read_text(encoding="utf-8", errors="replace")
    whole = f"<details><summary>recipe.toml</summary><pre>{escape(text)}</pre></details>"
    return (changed if recipe is not None and rows else "") + whole


def _plain(value: Any) -> str:
    return "not set" if value in (None, "", {}) else str(value)
