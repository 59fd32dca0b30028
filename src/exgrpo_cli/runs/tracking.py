"""Metrics to an experiment tracker, beside metrics.jsonl."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from exgrpo_cli.errors import InputError

Track = Callable[[int, dict[str, Any]], None]
"""Takes a step and its metrics."""


def open_tracker(kind: str, name: str, folder: Path, config: dict[str, Any]) -> Track:
    """A function that sends one step's metrics to a tracker.

    Args:
        kind: ``none``, ``trackio``, ``wandb`` or ``tensorboard``.
        name: the run's name there; the project is ``exgrpo``.
        folder: where tensorboard's event files go.
        config: the recipe, for trackers that keep one.

    Raises:
        InputError: the tracker is not installed.
    """
    if kind == "none":
        return lambda step, metrics: None
    if find_spec(kind) is None:
        raise InputError(
            f"{kind} is not installed; install it with: pip install {kind}, or leave --track out"
        )
    if kind == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter(log_dir=str(folder))

        def scalars(step: int, metrics: dict[str, Any]) -> None:
            for key, value in _numbers(metrics).items():
                writer.add_scalar(key, value, step)
            writer.flush()

        return scalars
    import importlib

    tracker: Any = importlib.import_module(kind)  # trackio's interface is wandb's
    tracker.init(project="exgrpo", name=name, config=config)
    return lambda step, metrics: tracker.log(_numbers(metrics), step=step)


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {
        key: value
        for key, value in metrics.items()
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
