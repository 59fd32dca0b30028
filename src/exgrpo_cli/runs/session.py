"""A run at work: what stays open from step to step."""

from __future__ import annotations

from exgrpo_cli.engines.warm import WarmEngine
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.stages.verify import open_pool


class Session:
    """A run, its settings, and its warm engine and verify workers; closed as a context manager."""

    def __init__(self, run: RunDir, recipe: Recipe, log: Log = quiet) -> None:
        self.run = run
        self.recipe = recipe
        self.log = log
        self.engine = WarmEngine(recipe, log)
        self.pool = open_pool(recipe)
        self.iterations: list[float] = []
        """Seconds of those done so far."""

    def seconds_left(self, number: int) -> float | None:
        """What the run takes from this step on; None before the first was done. Where there are
        others, the first is not counted: it opens the engine."""
        counted = self.iterations[1:] or self.iterations
        if not counted:
            return None
        return sum(counted) / len(counted) * (self.recipe.loop.steps - number)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.pool.close()
