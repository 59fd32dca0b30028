"""Finished rows of unfinished parts, kept so that a task that is sent again goes on."""

from __future__ import annotations

import contextlib
import time
import uuid
from pathlib import Path
from typing import Any

from exgrpo_cli import tables
from exgrpo_cli.engines import Request
from exgrpo_cli.errors import InputError

_SECONDS = 60.0


class Drafts:
    """Finished rows of unfinished parts, kept in hidden files beside them.

    A task that is killed leaves them behind, and the next one that does the part takes them over.
    Files of several tasks may lie together: rows are looked up one by one.
    """

    def __init__(self, paths: list[Path], sampled: str) -> None:
        """Read what earlier tasks left.

        Args:
            sampled: what the rows depend on beside prompt and seed; others' drafts are not read.
        """
        self._paths = paths
        self._key = f"{tables.row_seed(sampled):016x}"
        self._new: list[list[dict[str, Any]]] = [[] for _ in paths]
        self._saved = time.monotonic()
        self._old: list[dict[str, dict[str, Any]]] = [{} for _ in paths]
        for number in range(len(paths)):
            for file in self._files(number, self._key):
                # another task may have finished the part and removed it
                with contextlib.suppress(InputError):
                    table = tables.read_table("rollouts", file)
                    for row in table.iter_rows(named=True):
                        self._old[number][row["rollout_id"]] = row

    def _files(self, number: int, key: str) -> list[Path]:
        path = self._paths[number]
        return sorted(path.parent.glob(f".{path.name}.{key}.*.rows"))

    def found(self, number: int, rollout_id: str, request: Request) -> dict[str, Any] | None:
        """The row that answers a request, where an earlier task had finished it."""
        row = self._old[number].get(rollout_id)
        same = row and row["seed"] == request.seed and row["prompt_ids"] == request.prompt_ids
        return row if same else None

    def add(self, number: int, row: dict[str, Any]) -> None:
        """Keep a row; the new ones are written once in a while."""
        self._new[number].append(row)
        if time.monotonic() - self._saved >= _SECONDS:
            self.save()

    def save(self) -> None:
        """Write the new rows."""
        for path, rows in zip(self._paths, self._new, strict=True):
            if rows:
                name = f".{path.name}.{self._key}.{uuid.uuid4().hex[:12]}.rows"
                tables.write_table("rollouts", tables.frame("rollouts", rows), path.with_name(name))
                rows.clear()
        self._saved = time.monotonic()

    def drop(self, number: int) -> None:
        """The part is written: its drafts, whoever made them, are no longer needed."""
        self._new[number].clear()
        for file in self._files(number, "*"):
            file.unlink(missing_ok=True)
