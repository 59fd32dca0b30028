"""``exgrpo show``: one screen about a run directory, an evaluation, or a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.evaluation import format_table
from exgrpo_cli.metrics import evaluation_names, learning_curve, replay_start, series
from exgrpo_cli.recipe import load_recipe
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.runs.state import next_stage
from exgrpo_cli.tables.duck import literal, query

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def describe(path: Path) -> dict[str, Any]:
    """What ``show`` says, as plain data.

    Args:
        path: a run directory, an evaluation's folder, a table file, or a folder of its parts.

    Returns:
        ``kind`` is ``run``, ``evaluation`` or ``table``; the rest depends on it.

    Raises:
        InputError: nothing is there that can be shown, or a file of it is damaged.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if _is_run(path):
        return _describe_run(RunDir(path))
    if (path / "summary.json").is_file():
        return {"kind": "evaluation", "path": str(path)} | _read_summary(path / "summary.json")
    return _describe_table(path)


def show(path: Path, console: Console) -> None:
    """Print one screen about a path; see :func:`describe`.

    Args:
        path: as for :func:`describe`.
        console: where to.
    """
    found = describe(path)
    if found["kind"] == "run":
        _show_run(found, console)
    elif found["kind"] == "evaluation":
        console.print(format_table(found))
    else:
        _show_table(found, console)


def _is_run(path: Path) -> bool:
    names = ("recipe.toml", "metrics.jsonl", "problems.parquet")
    folders = ("rollouts", "policy", "plan", "metrics")
    return path.is_dir() and (
        any((path / name).is_file() for name in names[:2])
        or ((path / names[2]).is_file() and any((path / name).is_dir() for name in folders))
        or sum((path / name).is_dir() for name in folders) > 1
    )


def _describe_run(run: RunDir) -> dict[str, Any]:
    own = run.own_recipe()
    recipe = load_recipe(own) if own else None
    metrics = run.read_metrics()
    trained = run.steps("policy")
    step = max(trained, default=0)
    last = {k: v for k, v in (metrics[-1] if metrics else {}).items() if k != "step"}
    stages = [line for line in metrics if "success_rate" in line or "train/loss" in line]
    return {
        "kind": "run",
        "path": str(run.root),
        "steps": step,
        "steps_planned": recipe.loop.steps if recipe else None,
        "policy": str(run.policy(step)) if trained else (recipe.model.path if recipe else ""),
        "problems": _run_problems(run),
        "questions": _run_questions(run),
        "pool": _run_pool(run, step),
        "replay_started_step": replay_start(metrics),
        "evaluations": [
            {
                "name": name,
                "step": int(at),
                "pass@1": value,
                **{
                    key: dict(series(metrics, f"eval/{name}/pass@1_{key}")).get(at)
                    for key in ("low", "high")
                },
            }
            for name in evaluation_names(metrics)
            for at, value in series(metrics, f"eval/{name}/pass@1")
        ],
        "last_step": stages[-1]["step"] if stages else None,
        "last_metrics": {k: v for k, v in stages[-1].items() if k != "step"} if stages else last,
        "learning_curve": learning_curve(metrics),
        "next": next_stage(run, recipe),
    }


def _run_problems(run: RunDir) -> dict[str, Any] | None:
    if not run.problems.exists():
        return None
    rows = query(
        "SELECT source, count(*) AS n FROM read_parquet($f) GROUP BY source ORDER BY source",
        {"f": literal([run.problems])},
        run.problems,
    )
    by_source = {row["source"]: row["n"] for row in rows}
    return {"count": sum(by_source.values()), "by_source": by_source}


def _run_questions(run: RunDir) -> dict[str, Any] | None:
    if not run.questions.exists():
        return None
    return query(
        """
        SELECT count(*) AS seen,
               count(*) FILTER (bucket = 'easy' AND retired_step IS NULL) AS easy,
               count(*) FILTER (bucket = 'medium' AND retired_step IS NULL) AS medium,
               count(*) FILTER (bucket = 'hard' AND retired_step IS NULL) AS hard,
               count(retired_step) AS retired
        FROM read_parquet($f)
        """,
        {"f": literal([run.questions])},
        run.questions,
    )[0]


def _run_pool(run: RunDir, step: int) -> dict[str, Any] | None:
    if not run.experience.exists():
        return None
    return query(
        """
        SELECT count(*) AS trajectories, count(DISTINCT problem_id) AS questions,
               avg($step - step) AS age_mean, max($step - step) AS age_max,
               avg(mean_entropy) AS mean_entropy
        FROM read_parquet($f)
        """,
        {"f": literal([run.experience]), "step": step},
        run.experience,
    )[0] | {"by_bucket": _pool_by_bucket(run, step)}


def _pool_by_bucket(run: RunDir, step: int) -> dict[str, dict[str, Any]]:
    """The stored trajectories by their question's bucket: how many, how old, how certain."""
    if not run.questions.exists():
        return {}
    rows = query(
        """
        SELECT bucket, count(*) AS trajectories, avg($step - step) AS age_mean,
               avg(mean_entropy) AS mean_entropy
        FROM read_parquet($experience)
        JOIN (SELECT problem_id, bucket FROM read_parquet($questions)) USING (problem_id)
        WHERE bucket IS NOT NULL
        GROUP BY bucket
        ORDER BY list_position(['easy', 'medium', 'hard'], bucket)
        """,
        {
            "experience": literal([run.experience]),
            "questions": literal([run.questions]),
            "step": step,
        },
        run.experience,
    )
    return {row.pop("bucket"): row for row in rows}


# Shown of the last step where they are there, in this order.
_LAST = {
    "success_rate": "success rate",
    "reward/fresh_mean": "reward, fresh",
    "reward/replay_mean": "reward, replay",
    "rollout/tokens_mean": "tokens",
    "rollout/truncated_share": "cut off",
    "train/entropy": "entropy, nats",
    "train/grad_norm": "gradient norm",
    "replay/age_mean": "replay age, steps",
    "time/rollout": "rollout, s",
    "time/train": "train, s",
}


# What the train stage warns of; see docs/training.md.
_ALARMS = {
    "train/warning_entropy": "the policy's entropy is collapsing",
    "train/warning_ratio": "a token's probability rose more than tenfold in one step",
    "train/warning_groups": "nearly all groups have equal rewards",
    "train/skipped_updates": "an update was skipped",
}


def _show_run(found: Mapping[str, Any], console: Console) -> None:
    from rich.columns import Columns
    from rich.rule import Rule
    from rich.text import Text

    planned = found["steps_planned"]
    facts = {
        "steps trained": f"{found['steps']}" + (f" of {planned}" if planned else ""),
        "policy": found["policy"] or "not set",
    }
    if found["problems"]:
        by_source = found["problems"]["by_source"]
        named = ", ".join(f"{n:,} {source}" for source, n in list(by_source.items())[:4])
        more = f" and {len(by_source) - 4} sources more" if len(by_source) > 4 else ""
        facts["problems"] = f"{found['problems']['count']:,} ({named}{more})"
    start = found["replay_started_step"]
    facts["replay"] = "not started" if start is None else f"since step {start}"
    if found["questions"]:
        q = found["questions"]
        facts["questions"] = (
            f"{q['seen']:,} seen: {q['easy']:,} easy, {q['medium']:,} medium, {q['hard']:,} hard,"
            f" {q['retired']:,} retired"
        )
    if found["pool"]:
        pool = found["pool"]
        facts["pool"] = f"{pool['trajectories']:,} trajectories of {pool['questions']:,} questions"
        if pool["trajectories"]:
            facts["pool"] += (
                f"; age {pool['age_mean']:.1f} steps in the mean, {pool['age_max']} at most"
            )
        for name, value, form in (("entropy", "mean_entropy", ".3f"), ("age", "age_mean", ".1f")):
            held = [f"{bucket} {row[value]:{form}}" for bucket, row in pool["by_bucket"].items()]
            if held:
                facts[f"pool {name}"] = ", ".join(held)
    following = found["next"]
    words = {
        "done": "all steps are trained",
        "finished": "every question is retired",
        "init": "there are no problems yet",
    }
    what = words.get(following["stage"]) or f"{following['stage']} of step {following['step']}"
    facts["next"] = f"{what}: {following['command']}"
    console.print(Rule(Text(found["path"]), align="left"))
    console.print(_pairs(facts))
    metrics = found["last_metrics"]
    shown = {name: metrics[key] for key, name in _LAST.items() if metrics.get(key) is not None}
    if shown and found["last_step"] is not None:
        console.print(Rule(f"step {found['last_step']}", align="left"))
        console.print(Columns([Text(f"{k} {v:.4g}") for k, v in shown.items()], padding=(0, 3)))
    alarms = [words for key, words in _ALARMS.items() if metrics.get(key)]
    if alarms:
        console.print(Text(f"warning: {'; '.join(alarms)}", style="bold yellow"))
    if found["learning_curve"]:
        console.print(Rule("learning curve", align="left"))
        console.print(Text(found["learning_curve"]))


def _pairs(facts: Mapping[str, str]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        grid.add_row(Text(name, style="dim"), Text(value))
    return grid


def _read_summary(file: Path) -> dict[str, Any]:
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        format_table(summary)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file}: not an evaluation's summary") from error
    return dict(summary)


# Queries over `t`: basic numbers of each table. Only the columns that they name are read.
_NUMBERS: dict[str, dict[str, str]] = {
    "problems": {
        "by source": "SELECT source, count(*) AS problems FROM t GROUP BY ALL ORDER BY ALL",
        "by verifier": "SELECT verifier, count(*) AS problems FROM t GROUP BY ALL ORDER BY ALL",
    },
    "plan": {
        "by role": "SELECT step, role, count(*) AS questions, sum(samples)::BIGINT AS rollouts"
        " FROM t GROUP BY ALL ORDER BY step DESC, role LIMIT 12",
    },
    "rollouts": {
        "by role": "SELECT role, count(*) AS rollouts, count(DISTINCT problem_id) AS questions,"
        " avg(tokens) AS tokens, quantile_disc(tokens, 0.95) AS p95,"
        " avg((finish_reason = 'length')::INT) AS cut_off, avg(mean_entropy) AS entropy,"
        " avg(mean_logprob) AS logprob FROM t GROUP BY ALL ORDER BY ALL",
        "by step": "SELECT step, policy, entropy_source, count(*) AS rollouts FROM t GROUP BY ALL"
        " ORDER BY step DESC, policy LIMIT 10",
    },
    "verdicts": {
        "by status and reward": "SELECT status, reward, count(*) AS rollouts, avg(seconds) AS"
        " seconds_mean, max(seconds) AS seconds_max FROM t GROUP BY ALL ORDER BY ALL",
        "by verifier": "SELECT verifier, count(*) AS rollouts, avg(correct::INT) AS correct FROM t"
        " GROUP BY ALL ORDER BY ALL",
    },
    "scores": {
        "by policy": "SELECT policy, step, count(*) AS trajectories, avg(mean_entropy) AS"
        " entropy, avg(mean_logprob) AS logprob FROM t GROUP BY ALL ORDER BY step DESC, policy"
        " LIMIT 10",
    },
    "experience": {
        "all": "SELECT count(*) AS trajectories, count(DISTINCT problem_id) AS questions,"
        " min(step) AS first_step, max(step) AS last_step, avg(tokens) AS tokens,"
        " avg(mean_entropy) AS entropy FROM t",
        "by entropy_source": "SELECT entropy_source, count(*) AS trajectories FROM t GROUP BY ALL"
        " ORDER BY ALL",
    },
    "questions": {
        "by bucket": "SELECT CASE WHEN retired_step IS NOT NULL THEN 'retired'"
        " ELSE coalesce(bucket, 'none yet') END AS bucket, count(*) AS questions,"
        " avg(times_replayed) AS times_replayed, max(last_step) AS last_step FROM t"
        " GROUP BY 1 ORDER BY 1",
        "by successes": "SELECT successes, attempts, count(*) AS questions FROM t"
        " WHERE retired_step IS NULL GROUP BY ALL ORDER BY ALL LIMIT 20",
    },
    "curated": {
        "by bucket": "SELECT step, bucket, count(*) AS questions, avg(step - collected_step) AS"
        " age, avg(mean_entropy) AS entropy, avg(candidates) AS candidates FROM t"
        " GROUP BY ALL ORDER BY step DESC, bucket LIMIT 12",
    },
}


_EXAMPLES: dict[str, str] = {
    "problems": "SELECT problem_id, prompt[-1].content[:400] AS question, answer FROM t"
    " ORDER BY hash(problem_id), problem_id LIMIT 3",
    "rollouts": "SELECT rollout_id, tokens, finish_reason, text[:400] AS text FROM t"
    " ORDER BY hash(rollout_id), rollout_id LIMIT 3",
}


def _describe_table(path: Path) -> dict[str, Any]:
    files = _table_files(path)
    columns = _columns(files[0])
    table, missing = match_table(columns)
    sources = {"f": literal(files)}
    found: dict[str, Any] = {
        "kind": "table",
        "path": str(path),
        "table": None if missing else table,
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "rows": query("SELECT count(*) AS n FROM read_parquet($f)", sources, path)[0]["n"],
        "columns": [
            {
                "name": name,
                "type": kind,
                "meaning": tables.SCHEMAS[table][name][2] if name in tables.SCHEMAS[table] else "",
            }
            for name, kind in columns.items()
        ],
    }
    if missing:
        found |= {"nearest": table, "missing": missing, "numbers": {}, "examples": []}
        return found
    view = "WITH t AS (FROM read_parquet($f)) "
    found["numbers"] = {
        name: query(view + sql, sources, path) for name, sql in _NUMBERS[table].items()
    }
    found["examples"] = query(view + _EXAMPLES[table], sources, path) if table in _EXAMPLES else []
    return found


def _table_files(path: Path) -> list[Path]:
    """The table's files: one, a folder's parts, or those of a folder of steps."""
    if path.is_file() and path.suffix != ".parquet":
        raise InputError(f"{path}: show takes a run directory, a .parquet file or a folder of them")
    files = [path] if path.is_file() else sorted(path.rglob("[!.]*.parquet"))
    if not files:
        raise InputError(f"{path}: neither a run directory nor a folder with .parquet files")
    first = _columns(files[0])
    for file in files[1:]:
        if list(_columns(file)) != list(first):
            raise InputError(
                f"{path}: holds different tables ({files[0].name} and {file.relative_to(path)});"
                " show one of them"
            )
    return files


def _columns(file: Path) -> dict[str, str]:
    """Column names to types, in DuckDB's words, from the footer."""
    if file.stat().st_size == 0:
        raise InputError(f"{file}: the file is empty; expected a Parquet table")
    rows = query("DESCRIBE SELECT * FROM read_parquet($f)", {"f": literal([file])}, file)
    return {row["column_name"]: row["column_type"] for row in rows}


def match_table(columns: Mapping[str, str]) -> tuple[str, list[str]]:
    """Which of the tables has these columns.

    Args:
        columns: names to types.

    Returns:
        Its name and the columns that are missing for it: none for a match, where the table with
        the most columns wins; else the nearest table.
    """

    def missing(table: str) -> list[str]:
        return [name for name in tables.SCHEMAS[table] if name not in columns]

    whole = [table for table in tables.SCHEMAS if not missing(table)]
    if whole:
        return max(whole, key=lambda table: len(tables.SCHEMAS[table])), []
    nearest = max(
        tables.SCHEMAS,
        key=lambda t: (
            len(columns.keys() & tables.SCHEMAS[t].keys())
            / len(columns.keys() | tables.SCHEMAS[t].keys())
        ),
    )
    return nearest, missing(nearest)


def _show_table(found: Mapping[str, Any], console: Console) -> None:
    from rich.rule import Rule
    from rich.table import Table
    from rich.text import Text

    console.print(Rule(Text(found["path"]), align="left"))
    parts = f"{found['files']} files" if found["files"] > 1 else "1 file"
    name = f"table {found['table']}" if found["table"] else "none of a run's tables"
    console.print(f"{name}: {found['rows']:,} rows, {parts}, {_size(found['bytes'])}")
    if not found["table"]:
        console.print(
            f"nearest: {found['nearest']}, but without {', '.join(found['missing'])}", markup=False
        )
    columns = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("column", "type", "meaning"):
        columns.add_column(head, header_style="dim")
    for column in found["columns"]:
        columns.add_row(*(Text(column[key]) for key in ("name", "type", "meaning")))
    console.print(columns)
    for title, rows in found["numbers"].items():
        if not rows:
            continue
        console.print(Rule(title, align="left"))
        numbers = Table(box=None, padding=(0, 2, 0, 0))
        for head, value in rows[0].items():
            right = isinstance(value, int | float)
            numbers.add_column(
                head.replace("_", " "), header_style="dim", justify="right" if right else "left"
            )
        for row in rows:
            numbers.add_row(*(Text(_cell(value)) for value in row.values()))
        console.print(numbers)
    for row in found["examples"]:
        head, *rest = row.items()
        console.print(Rule(Text(str(head[1])), align="left"))
        console.print(_pairs({key: _cell(value) for key, value in rest}))


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    # A model may write terminal escapes.
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in str(value)
    )


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
