"""What another recipe would have replayed: two recipes over the same history, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe, differences
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.terminal import aligned

if TYPE_CHECKING:
    from exgrpo_cli.experience.whatif import Choice

BUCKETS = ("easy", "medium", "hard")
SIDES = ("recorded", "other")


def diff(run: RunDir, recorded: Recipe, other: Recipe, log: Log = quiet) -> dict[str, Any]:
    """How two recipes differ in what they plan and replay, step by step over one history.

    Both recipes' experience is derived in memory from the recorded rollouts, verdicts and scores;
    no file is written. The rollouts are the recorded ones: questions that only the other recipe
    would have sampled have none, and the policy is the one that the recorded choice trained. So
    each step answers "given what was sampled so far, what would be replayed now".

    Args:
        other: the recipe that it is compared with; only ``curate``, ``rollout.samples`` and
            ``seed`` matter.

    Returns:
        ``settings`` (dotted key to both values), ``plans_as_recorded`` (of the steps that have a
        plan, how many the run's recipe reproduces, and how many there are), ``total`` and
        ``steps``. The latter hold ``recorded``, ``other`` and ``common``: numbers of questions and
        trajectories, by bucket, with mean ages (steps) and entropies (nats; None where there is
        nothing to average). The last of ``steps`` is the one that was not sampled yet.
    """
    from exgrpo_cli.experience.whatif import choices

    if not run.steps("rollouts"):
        raise InputError(f"{run.root}: no rollouts yet; run: exgrpo rollout {run.root}")
    sides = {
        "recorded": list(choices(run, recorded, log)),
        "other": list(choices(run, other)),  # the same history, so nothing new to say
    }
    pairs = list(zip(sides["recorded"], sides["other"], strict=True))
    plans = [_as_recorded(run, a) for a, _ in pairs if run.plan(a.step).exists()]
    settings = {
        key: list(values)
        for key, values in differences(recorded, other).items()
        if key.startswith("curate.") or key in ("rollout.samples", "seed")
    }
    return {
        "settings": settings,
        "plans_as_recorded": [sum(plans), len(plans)],
        "total": {
            **{side: _totals(sides[side]) for side in SIDES},
            "common": _common_totals(pairs),
        },
        "steps": [
            {"step": a.step, "recorded": _numbers(a), "other": _numbers(b), "common": _common(a, b)}
            for a, b in pairs
        ],
    }


def _as_recorded(run: RunDir, choice: Choice) -> bool:
    """Whether the step was planned as the recipe plans it."""
    plan = tables.read_table("plan", run.plan(choice.step), ["problem_id", "role"])
    rows = set(plan.rows())
    return rows == {(q, "fresh") for q in choice.fresh} | {(q, "replay") for q in choice.replay}


def _mean(values: Iterable[float]) -> float | None:
    held = list(values)
    return sum(held) / len(held) if held else None


def _chosen_numbers(steps: Sequence[Choice]) -> dict[str, Any]:
    """The trajectories chosen in some steps: how many, of which buckets, how old, how certain."""
    rows = [(choice.step, row) for choice in steps for row in choice.chosen]
    buckets = Counter(row["bucket"] for _, row in rows)
    return {
        "replayed": len(rows),
        **{f"replayed_{bucket}": buckets[bucket] for bucket in BUCKETS},
        "age_mean": _mean(step - row["collected_step"] for step, row in rows),
        "age_max": max((step - row["collected_step"] for step, row in rows), default=None),
        "entropy_mean": _mean(row["mean_entropy"] for _, row in rows),
        "stale_entropies": sum(row["stale"] for _, row in rows),
    }


def _numbers(choice: Choice) -> dict[str, Any]:
    return {
        "fresh": len(choice.fresh),
        "replay": len(choice.replay),
        **_chosen_numbers([choice]),
        **{f"pool_{name}": value for name, value in choice.pool.items()},
    }


def _totals(steps: Sequence[Choice]) -> dict[str, Any]:
    return {
        "replay_from": next((choice.step for choice in steps if choice.replaying), None),
        "fresh": sum(len(choice.fresh) for choice in steps),
        "replay": sum(len(choice.replay) for choice in steps),
        **_chosen_numbers(steps),
        "questions_replayed": len(_distinct(steps, "problem_id")),
        "trajectories_replayed": len(_distinct(steps, "rollout_id")),
        **{f"pool_{name}": value for name, value in steps[-1].pool.items()},
    }


def _distinct(steps: Sequence[Choice], key: str) -> set[str]:
    return {row[key] for choice in steps for row in choice.chosen}


def _common(a: Choice, b: Choice) -> dict[str, int]:
    """What both plan and choose in a step."""
    first, second = (
        {(row["problem_id"], row["rollout_id"]) for row in choice.chosen} for choice in (a, b)
    )
    questions = {problem for problem, _ in first}
    return {
        "planned": len({*a.fresh, *a.replay} & {*b.fresh, *b.replay}),
        "fresh": len(set(a.fresh) & set(b.fresh)),
        "replay": len(set(a.replay) & set(b.replay)),
        "replayed": len(first & second),
        "other_trajectory": sum(problem in questions for problem, _ in second - first),
    }


def _common_totals(pairs: Sequence[tuple[Choice, Choice]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for a, b in pairs:
        sums.update(_common(a, b))
    first, second = ([pair[i] for pair in pairs] for i in (0, 1))
    keys = ("planned", "fresh", "replay", "replayed", "other_trajectory")
    return {key: sums[key] for key in keys} | {
        "questions_replayed": len(_distinct(first, "problem_id") & _distinct(second, "problem_id")),
        "trajectories_replayed": len(
            _distinct(first, "rollout_id") & _distinct(second, "rollout_id")
        ),
    }


# Of the totals: what is shown, in this order.
_ROWS = {
    "replay_from": "replay is on from step",
    "fresh": "fresh questions planned",
    "replay": "replay questions planned",
    "replayed": "trajectories replayed",
    "questions_replayed": "different questions replayed",
    "trajectories_replayed": "different trajectories replayed",
    "replayed_easy": "replayed from easy",
    "replayed_medium": "replayed from medium",
    "replayed_hard": "replayed from hard",
    "age_mean": "age when replayed, steps",
    "age_max": "highest age",
    "entropy_mean": "entropy when chosen, nats",
    "stale_entropies": "of these not under the step's policy",
    "pool_trajectories": "pool in the end, trajectories",
    "pool_questions": "pool in the end, questions",
    "pool_easy": "easy",
    "pool_medium": "medium",
    "pool_hard": "hard",
    "pool_retired": "retired questions",
    "pool_age_mean": "age of the pool, steps",
}

_STEPS_SHOWN = 20


def format_diff(found: Mapping[str, Any]) -> str:
    """The result of :func:`diff` as text: settings, totals, and some steps, evenly spaced."""
    settings = [
        f"{key}: {_cell(old)} -> {_cell(new)}" for key, (old, new) in found["settings"].items()
    ]
    agree, plans = found["plans_as_recorded"]
    note = f"The run's recipe gives the recorded plan in {agree} of {plans} steps."
    if agree < plans:
        note += " (The others were planned under other settings, or the log has changed.)"
    total = found["total"]
    totals = [
        [
            label,
            *(_cell(total[side][key]) for side in SIDES),
            _cell(total["common"][key]) if key in total["common"] else "",
        ]
        for key, label in _ROWS.items()
    ]
    steps = found["steps"]
    shown = steps[::-1][:: -(-len(steps) // _STEPS_SHOWN)][::-1]
    return "\n".join(
        [
            *(settings or ["no setting that curation depends on differs"]),
            "",
            *aligned([["", "run", "other", "common"], *totals]),
            "",
            note,
            "",
            *aligned([_STEP_NAMES, *map(_step_cells, shown)]),
        ]
    )


_STEP_NAMES = ["step", "replayed", "both", "easy/medium/hard", "age", "entropy", "pool"]


def _step_cells(row: Mapping[str, Any]) -> list[str]:
    """A step's cells, ``run | other``."""

    def pair(key: str) -> str:
        return " | ".join(_cell(row[side][key]) for side in SIDES)

    buckets = (
        "/".join(_cell(row[side][f"replayed_{bucket}"]) for bucket in BUCKETS) for side in SIDES
    )
    return [
        str(row["step"]),
        pair("replayed"),
        str(row["common"]["replayed"]),
        " | ".join(buckets),
        *(pair(key) for key in ("age_mean", "entropy_mean", "pool_trajectories")),
    ]


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else f"{value}"
