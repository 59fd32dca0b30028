"""What a run has come to, in numbers: its problems, buckets, pool, last step, learning curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from exgrpo_cli.metrics import evaluation_names, learning_curve, series
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.tables.duck import literal, query

# Shown of the last step where they are there, in this order.
LAST = {
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
ALARMS = {
    "train/warning_entropy": "the policy's entropy is collapsing",
    "train/warning_ratio": "a token's probability rose more than tenfold since it was sampled",
    "train/warning_groups": "nearly all groups have equal rewards",
    "train/skipped_updates": "an update was skipped",
}


def overview(run: RunDir, step: int) -> dict[str, Any]:
    """Numbers of a run, from its tables and metrics.

    Args:
        step: of the newest policy; ages count from it.

    Returns:
        ``problems``, ``questions`` and ``pool`` (None without their table); ``accuracy``: of each
        evaluation ``name``, ``step``, ``pass@1``, ``low`` and ``high``; ``last_step`` and
        ``last_metrics``: of the last step that has metrics of its stages; ``learning_curve``, text.
    """
    metrics = run.read_metrics()
    stages = [line for line in metrics if "success_rate" in line or "train/loss" in line]
    last = (stages or metrics or [{}])[-1]
    return {
        "problems": _problems(run),
        "questions": _questions(run),
        "pool": _pool(run, step),
        "accuracy": [
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
        "last_metrics": {name: value for name, value in last.items() if name != "step"},
        "learning_curve": learning_curve(metrics),
    }


def overview_lines(found: dict[str, Any]) -> list[str]:
    """The numbers as lines of text, without the learning curve."""
    facts: list[tuple[str, str]] = []
    if found["problems"]:
        by_source = found["problems"]["by_source"]
        named = ", ".join(f"{n:,} {source}" for source, n in list(by_source.items())[:4])
        more = f" and {len(by_source) - 4} sources more" if len(by_source) > 4 else ""
        facts.append(("problems", f"{found['problems']['count']:,} ({named}{more})"))
    if found["questions"]:
        kinds = ("easy", "medium", "hard", "retired")
        counts = ", ".join(f"{found['questions'][kind]:,} {kind}" for kind in kinds)
        facts.append(("questions", f"{found['questions']['seen']:,} seen: {counts}"))
    if found["pool"]:
        pool = found["pool"]
        words = f"{pool['trajectories']:,} trajectories of {pool['questions']:,} questions"
        if pool["trajectories"]:
            words += f"; age {pool['age_mean']:.1f} steps in the mean, {pool['age_max']} at most"
        facts.append(("pool", words))
        for name, value, form in (("entropy", "mean_entropy", ".3f"), ("age", "age_mean", ".1f")):
            held = [f"{bucket} {row[value]:{form}}" for bucket, row in pool["by_bucket"].items()]
            if held:
                facts.append(("", f"{name}: {', '.join(held)}"))
    metrics = found["last_metrics"]
    shown = [
        f"{name} {metrics[key]:.4g}" for key, name in LAST.items() if metrics.get(key) is not None
    ]
    if found["last_step"] is not None:
        for start in range(0, len(shown), 4):
            label = "" if start else f"step {found['last_step']}"
            facts.append((label, "; ".join(shown[start : start + 4])))
    alarms = [words for key, words in ALARMS.items() if metrics.get(key)]
    if alarms:
        facts.append(("warning:", "; ".join(alarms)))
    return [f"{name:<10} {words}" for name, words in facts]


def _only(sql: str, file: Path, **more: Any) -> list[dict[str, Any]]:
    return query(sql, {"f": literal([file]), **more}, file)


def _problems(run: RunDir) -> dict[str, Any] | None:
    if not run.problems.exists():
        return None
    rows = _only(
        "SELECT source, count(*) AS n FROM read_parquet($f) GROUP BY source ORDER BY source",
        run.problems,
    )
    by_source = {row["source"]: row["n"] for row in rows}
    return {"count": sum(by_source.values()), "by_source": by_source}


def _questions(run: RunDir) -> dict[str, Any] | None:
    if not run.questions.exists():
        return None
    return _only(
        """
        SELECT count(*) AS seen,
               count(*) FILTER (bucket = 'easy' AND retired_step IS NULL) AS easy,
               count(*) FILTER (bucket = 'medium' AND retired_step IS NULL) AS medium,
               count(*) FILTER (bucket = 'hard' AND retired_step IS NULL) AS hard,
               count(retired_step) AS retired
        FROM read_parquet($f)
        """,
        run.questions,
    )[0]


def _pool(run: RunDir, step: int) -> dict[str, Any] | None:
    if not run.experience.exists():
        return None
    found = _only(
        """
        SELECT count(*) AS trajectories, count(DISTINCT problem_id) AS questions,
               avg($step - step) AS age_mean, max($step - step) AS age_max,
               avg(mean_entropy) AS mean_entropy
        FROM read_parquet($f)
        """,
        run.experience,
        step=step,
    )[0]
    return found | {"by_bucket": _pool_by_bucket(run, step)}


def _pool_by_bucket(run: RunDir, step: int) -> dict[str, dict[str, Any]]:
    """The stored trajectories by their question's bucket: how many, how old, how certain."""
    if not run.questions.exists():
        return {}
    rows = _only(
        """
        SELECT bucket, count(*) AS trajectories, avg($step - step) AS age_mean,
               avg(mean_entropy) AS mean_entropy
        FROM read_parquet($f)
        JOIN (SELECT problem_id, bucket FROM read_parquet($questions)) USING (problem_id)
        WHERE bucket IS NOT NULL
        GROUP BY bucket
        ORDER BY list_position(['easy', 'medium', 'hard'], bucket)
        """,
        run.experience,
        questions=literal([run.questions]),
        step=step,
    )
    return {row.pop("bucket"): row for row in rows}
