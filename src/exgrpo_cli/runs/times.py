"""When each stage of a step was at work."""

from __future__ import annotations

import time
from collections.abc import Callable

from exgrpo_cli.machine import is_first_process
from exgrpo_cli.step import Result, Step
from exgrpo_cli.tables import WHOLE, Shard


def timed(step: Step, stage: str, call: Callable[[], Result], shard: Shard = WHOLE) -> Result:
    """Call a stage and record when it began and ended, its seconds, and those of them that went
    into the work itself.

    A stage that found its files done keeps the time it took when it made them. Where a kill came
    before that was recorded, it is the time that the stage itself has left, if it has. Shards of a
    stage are recorded as one, from the first beginning to the last end.

    Args:
        step: of a run whose own files the stage makes; of others nothing is recorded.
    """
    began, started = time.time(), time.monotonic()
    result = call()
    if step.run is None or step.given or not is_first_process():
        return result
    name = f"time-{stage}"
    left = result.metrics.get(f"{stage}/seconds")
    if result.done:
        seconds = time.monotonic() - started
        times = {f"time/{stage}_began": began, f"time/{stage}_ended": began + seconds}
        if shard == WHOLE:
            times[f"time/{stage}"] = seconds
            if result.compute_seconds is not None:
                times[f"time/{stage}_compute"] = result.compute_seconds
        step.run.record(step.number, name, times, widen=shard != WHOLE)
    elif left is not None and not step.run.stage_metrics(step.number, name).exists():
        step.run.record(step.number, name, {f"time/{stage}": left})
    return result
