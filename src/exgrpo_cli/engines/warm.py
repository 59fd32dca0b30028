"""An engine that stays open from step to step."""

from __future__ import annotations

import gc

from exgrpo_cli.engines import Engine, engine_count, open_engines, resolve_engine
from exgrpo_cli.progress import Log
from exgrpo_cli.recipe import Recipe


def return_memory() -> None:
    """Give the GPU memory back that torch holds after scoring and training; vLLM needs it."""
    import torch

    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


class WarmEngine:
    """One engine for the whole loop: opened when first needed, then given each new policy."""

    def __init__(self, recipe: Recipe, log: Log) -> None:
        self._recipe = recipe
        self._log = log
        self._engine: Engine | None = None
        self._policy = ""

    def at(self, policy: str) -> Engine:
        """The engine, with this policy loaded."""
        if self._engine is None or policy != self._policy:
            return_memory()
        if self._engine is None:
            count = engine_count(self._recipe)
            side_by_side = f", {count} side by side" if count > 1 else ""
            self._log(
                f"opening {policy} in {resolve_engine(self._recipe.rollout.engine)}{side_by_side}"
            )
            self._engine = open_engines(self._recipe, policy)
        elif policy != self._policy:
            self._engine.load(policy)
        self._policy = policy
        return self._engine

    def make_room(self) -> None:
        """Before training on a GPU that vLLM has filled, let it sleep, or end it where it cannot.

        It stays awake where ``rollout.gpu_memory_utilization`` leaves training half of the GPU.
        """
        import torch

        if (
            self._engine is not None
            and self._engine.name == "vllm"
            and torch.cuda.is_available()
            and self._recipe.rollout.gpu_memory_utilization > 0.5
        ):
            if self._engine.sleep():
                self._policy = ""  # none is loaded
            else:
                self.close()

    def close(self) -> None:
        """End the engine; it is opened again when it is next needed."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
