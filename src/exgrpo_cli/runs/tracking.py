"""Metrics to an experiment tracker, beside metrics.jsonl."""

from __future__ import annotations

import hashlib
import html
import importlib
import json
import re
import socket
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from exgrpo_cli.errors import InputError, first_line
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.tables import write_json

Track = Callable[[int, dict[str, Any]], None]
"""Takes a step and its metrics; rows of :func:`example_rollouts` may stand under ``rollouts``."""


def open_tracker(kind: str, run: RunDir, config: dict[str, Any]) -> Track:
    """A function that sends one step's metrics to a tracker, where the project is ``exgrpo``.

    A run that is taken up again is the same run there: its id is kept in ``RUN/tracking.json``
    from the first metrics on; tensorboard's event files lie in ``RUN/tensorboard``.

    Args:
        run: the run directory; nothing is written there before the first metrics.
        config: the recipe, for trackers that keep one.
    """
    if kind == "none":
        return lambda step, metrics: None
    if find_spec(kind) is None:
        raise InputError(
            f"{kind} is not installed; install it with: pip install {kind}, or leave --track out"
        )
    if kind == "tensorboard":
        return _tensorboard(run.root / "tensorboard")
    name, number = run.root.resolve().name, _run_id(run)
    tracker: Any = importlib.import_module(kind)
    # trackio's interface is wandb's, but it knows a run by its name.
    who = {"name": name, "id": number} if kind == "wandb" else {"name": f"{name}-{number}"}
    try:
        tracker.init(project="exgrpo", config=config, resume="allow", **who)
    except Exception as error:  # each tracker has kinds of its own
        raise InputError(f"--track {kind}: {first_line(error)}") from error

    def log(step: int, metrics: dict[str, Any]) -> None:
        if not _id_file(run).exists():
            write_json(_id_file(run), {"id": number})
        values: dict[str, Any] = {**_numbers(metrics)}
        if rows := metrics.get("rollouts"):
            values["rollouts"] = _table(kind, tracker, rows)
        tracker.log(values, step=step)

    return log


def example_rollouts(run: RunDir, recipe: Recipe, step: int) -> list[dict[str, Any]]:
    """A few rollouts of a step: of a group of each kind the first of each verdict.

    Returns:
        ``question``, ``response``, ``verdict``, ``role`` (``fresh``; of a replay question's group
        ``replay``, and ``replayed`` for the trajectory itself) and ``age``, in steps; none where
        the step has no rollouts and verdicts.
    """
    from exgrpo_cli.inspect.groups import example_groups

    found = []
    if run.rollouts(step).is_dir() and run.verdicts(step).is_dir():
        for group in example_groups(run, recipe, [step], each=1):
            first = {row["verdict"]: row for row in reversed(group["rows"])}
            for verdict, row in first.items():
                past = verdict == "replayed"
                found.append(
                    {
                        "question": group["question"],
                        "response": row["text"],
                        "verdict": "right" if past else verdict,
                        "role": "replayed" if past else group["role"],
                        "age": row["age"],
                    }
                )
    return found


def _table(kind: str, tracker: Any, rows: list[dict[str, Any]]) -> Any:
    """Rows as a tracker's own table."""
    if kind == "wandb":
        return tracker.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
    pandas: Any = importlib.import_module("pandas")  # which trackio brings

    return tracker.Table(dataframe=pandas.DataFrame(rows))


def _markdown(rows: list[dict[str, Any]]) -> str:
    """Rows as a table in Markdown, in which nothing of the text is taken for Markdown or HTML."""

    def cell(value: Any) -> str:
        text = re.sub(r"([\\`*_{}\[\]()#+.!|$~-])", r"\\\1", html.escape(str(value), quote=False))
        return text.replace("\n", "<br>")

    head = [list(rows[0]), ["---"] * len(rows[0])]
    body = [[cell(value) for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [*head, *body])


def _tensorboard(folder: Path) -> Track:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = None

    def log(step: int, metrics: dict[str, Any]) -> None:
        nonlocal writer
        writer = writer or SummaryWriter(log_dir=str(folder))
        for key, value in _numbers(metrics).items():
            writer.add_scalar(key, value, step)
        if rows := metrics.get("rollouts"):
            writer.add_text("rollouts", _markdown(rows), step)
        writer.flush()

    return log


def _id_file(run: RunDir) -> Path:
    return run.root / "tracking.json"


def _run_id(run: RunDir) -> str:
    """The run's id at trackers: as kept, else a new one that no other run has."""
    try:
        return str(json.loads(_id_file(run).read_text(encoding="utf-8"))["id"])
    except FileNotFoundError:
        parts = f"{socket.gethostname()} {run.root.resolve()} {time.time_ns()}"
        return hashlib.blake2b(parts.encode(), digest_size=4).hexdigest()
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{_id_file(run)}: damaged; remove it to begin a new tracked run"
        ) from error


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {
        key: value
        for key, value in metrics.items()
        if not (key == "step" or key.endswith(("_began", "_ended")))
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }
