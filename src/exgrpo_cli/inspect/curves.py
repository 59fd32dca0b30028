"""The report's charts: which metrics are drawn, and what they are called."""

from __future__ import annotations

import math
from typing import Any

from exgrpo_cli.inspect.charts import line_chart, percent, seconds, stack_chart, timeline_chart
from exgrpo_cli.metrics import (
    STAGES,
    Metrics,
    band,
    busy,
    evaluation_names,
    replay_start,
    series,
    spans,
)

_TIMELINE_STEPS = 20

_FROM_ZERO = (0.0, None)
_SHARE: dict[str, Any] = {"bounds": _FROM_ZERO, "text": percent}
_LEVEL: dict[str, Any] = {"bounds": _FROM_ZERO}

# Title, what is drawn, label and metric (or two, for a share) of each line, and how.
_Chart = tuple[str, str, dict[str, str | tuple[str, str]], dict[str, Any]]

BUCKETS = ("hard", "medium", "easy")

LEARNING: list[_Chart] = [
    ("Success rate of the rollouts", "share of right samples",
     {"fresh questions": "reward/fresh_mean", "replay questions": "reward/replay_mean"},
     {**_SHARE, "marked": True}),
    ("Entropy", "mean over tokens, nats",
     {"policy, training batch": "train/entropy", "chosen trajectories": "replay/mean_entropy"},
     _LEVEL),
    ("Response length", "mean tokens of a rollout", {"tokens": "rollout/tokens_mean"}, _LEVEL),
]  # fmt: skip

EXPERIENCE: list[_Chart] = [
    ("Pool", "what is stored, and what is mastered",
     {"stored trajectories": "pool/trajectories", "their questions": "pool/questions",
      "retired questions": "pool/retired"}, _LEVEL),
    ("Age of experience", "steps since a trajectory was collected",
     {"replayed": "replay/age_mean", "pool": "pool/age_mean"}, _LEVEL),
    ("Questions without a gradient", "share of the sampled ones; their advantages are all zero",
     {"all wrong": "solve/none", "all right": "solve/all",
      "with replayed rows": ("train/zero_advantage_groups", "train/groups")}, _SHARE),
]  # fmt: skip

TRAINING: list[_Chart] = [
    ("Gradient norm", "before clipping", {"gradient norm": "train/grad_norm"}, _LEVEL),
    ("Loss", "mean over fresh tokens, and over replayed tokens",
     {"fresh": "train/on_policy_loss", "replayed": "train/off_policy_loss"}, {}),
    ("Importance ratios", "fresh: π over π old; replayed: after policy shaping",
     {"fresh": "train/ratio_mean", "replayed, shaped": "train/shaped_ratio_mean"}, {}),
    ("Off the policy", "fresh tokens: the share that is clipped, and the ratios' deviation from 1",
     {"clipped": "train/clip_fraction", "deviation": "train/ratio_std"}, _SHARE),
    ("Engine against trainer", "difference of a sampled token's log-probability, mean, nats",
     {"difference": "train/sampling_logp_difference_mean"}, _LEVEL),
    ("Failed responses", "share of the rollouts",
     {"cut off": "rollout/truncated_share", "no answer found": "rollout/no_answer_share"}, _SHARE),
]  # fmt: skip


def charts(metrics: Metrics) -> dict[str, list[str]]:
    """Section titles to their figures (HTML); a chart without a point is left out."""
    start = replay_start(metrics)
    mark = None if start is None else (float(start), f"replay starts at step {start}")

    def drawn(chart: _Chart) -> str:
        title, note, lines, how = chart
        options = dict(how)
        if options.pop("marked", False):
            options["mark"] = mark
        return line_chart(
            title, note, [(label, series(metrics, key)) for label, key in lines.items()], **options
        )

    buckets = stack_chart(
        "Buckets",
        "questions by their latest successes: hard up to 1/4, easy from 3/4",
        [
            *(
                (f"r{i}", name, series(metrics, f"pool/bucket_{name}"))
                for i, name in enumerate(BUCKETS)
            ),
            ("muted", "retired", series(metrics, "pool/retired")),
        ],
    )
    times = stack_chart(
        "Time",
        "seconds of each stage",
        [(f"c{i}", stage, series(metrics, f"time/{stage}")) for i, stage in enumerate(STAGES)],
        text=seconds,
    )
    sections = {
        "Learning": [*_accuracy(metrics, mark), *map(drawn, LEARNING)],
        "Experience": [buckets, *map(drawn, EXPERIENCE)],
        "Training": [*map(drawn, TRAINING), times, _timeline(metrics)],
    }
    return {title: [figure for figure in made if figure] for title, made in sections.items()}


def _timeline(metrics: Metrics) -> str:
    """Who waited for whom, in the last steps."""
    found = spans(metrics)
    if not found:
        return ""
    steps = sorted({span.step for span in found})[-_TIMELINE_STEPS:]
    shown = [span for span in found if span.step >= steps[0]]
    lanes: dict[str, list[tuple[float, float, str]]] = {}
    for stage in (*STAGES, "evaluate"):
        lanes[stage] = [
            (s.began, s.ended, f"{stage}, step {s.step}: {seconds(s.ended - s.began)}")
            for s in shown
            if s.stage == stage
        ]
    whole = max(s.ended for s in shown) - shown[0].began

    def share(stages: tuple[str, ...]) -> str:
        at_work = busy(s for s in shown if s.stage in stages)(math.inf)
        return f"{at_work / max(whole, 1e-9):.0%}"

    return timeline_chart(
        "Timeline",
        f"when each stage was at work, steps {steps[0]} to {steps[-1]}: sampling"
        f" {share(STAGES[:-1])} of the time, training {share(STAGES[-1:])}",
        [(stage, bars) for stage, bars in lanes.items() if bars],
    )


def _accuracy(metrics: Metrics, mark: tuple[float, str] | None) -> list[str]:
    """A chart of all sets, and one of each set's sources."""
    names, sources = evaluation_names(metrics), evaluation_names(metrics, by_source=True)
    groups = {"Held-out accuracy": names}
    for name in names:
        own = [source for source in sources if source.startswith(f"{name}/")]
        if own:
            groups[f"{name} by source"] = own
    figures = []
    for title, chosen in groups.items():
        shown = chosen[:6]  # more lines cannot be told apart; the table has all of them
        alone = f"{shown[0]}: " if len(shown) == 1 else ""
        keys = [f"eval/{name}/pass@1" for name in shown]
        figures.append(
            line_chart(
                title,
                f"{alone}pass@1 with 95% intervals over problems",
                [(name, series(metrics, key)) for name, key in zip(shown, keys, strict=True)],
                bands=[band(metrics, key) for key in keys],
                mark=mark,
                wide=True,
                **_SHARE,
            )
        )
    return figures
