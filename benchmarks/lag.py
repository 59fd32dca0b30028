"""The demo with a lag against the demo without: wall time, who waited, accuracy at equal steps.

    python benchmarks/lag.py [--lags 0 1] [--seeds 0 1 2] [--steps 50] [--out build/lag]

Runs come one after the other, each with the machine to itself: without a lag one process has all
cores, with one each side has half of them (two cores: one each), unless OMP_NUM_THREADS says how
many threads. Needs the demo's model: make build/demo-model. A run that is there already is read
and not made again; each has its timeline in report.html.

Seconds are from the first rollout's beginning to the end of the last training, without starts, and
without the evaluations that come after.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from exgrpo_cli.metrics import Metrics, Span, busy, evaluation_names, series, spans
from exgrpo_cli.rundir import RunDir

ROOT = Path(__file__).parents[1]


def at_work(found: list[Span], *stages: str) -> float:
    """Seconds in which one of some stages was at work."""
    return busy(span for span in found if span.stage in stages)(float("inf"))


def measures(metrics: Metrics) -> dict[str, float]:
    """A run's numbers by what the table calls them."""
    found = spans(metrics)
    end = max(span.ended for span in found if span.stage == "train")
    seconds = end - found[0].began
    names = evaluation_names(metrics)
    return {
        "seconds": seconds,
        "sampling %": 100 * at_work(found, "rollout", "verify", "score", "curate") / seconds,
        "training %": 100 * at_work(found, "train") / seconds,
        "ratio std": max(value for _, value in series(metrics, "train/ratio_std")),
        **{name: series(metrics, f"eval/{name}/pass@1")[-1][1] for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lags", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--model", default="build/demo-model")
    parser.add_argument("--out", type=Path, default=Path("build/lag"))
    given = parser.parse_args()
    base = 0.0
    for lag in given.lags:
        rows = []
        for seed in given.seeds:
            run = given.out / f"lag-{lag}-seed-{seed}"
            command = [sys.executable, "-m", "exgrpo_cli", "run", str(run.absolute())]
            command += ["--recipe", "recipes/demo.toml", "--model", given.model]
            command += ["--steps", str(given.steps), "--seed", str(seed)]
            if not (run / "report.html").exists():
                command += ["--set", f"loop.lag={lag}"]
                subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            rows.append(measures(RunDir(run).read_metrics()))
        cells = []
        for name in rows[0]:
            values = [row[name] for row in rows]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{name} {statistics.mean(values):.3f} ± {spread:.3f}")
        seconds = statistics.mean(row["seconds"] for row in rows)
        base = base or seconds
        print(f"lag {lag}: {base / seconds:.2f} times as fast; {'; '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
