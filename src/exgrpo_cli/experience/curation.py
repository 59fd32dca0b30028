"""What the tables of a run were derived from, and whether a step is curated already."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exgrpo_cli import tables
from exgrpo_cli.errors import InputError
from exgrpo_cli.experience.history import StepFiles
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import CurateSettings, Recipe
from exgrpo_cli.recipe.rules import mentions
from exgrpo_cli.rundir import RunDir

# Tables of another version are derived anew: 2 has rewards, 3 rules and digests of the tables.
_VERSION = 3


def on_policy(recipe: Recipe) -> bool:
    """Whether the recipe never replays: plain GRPO, which stores nothing and retires nothing."""
    return recipe.curate.replay_ratio == 0


def table_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings from which ``experience`` and ``questions`` follow, given the history."""
    names = {
        "store", "retire", "drop", "count_replayed", "start_success", "store_before_start",
        "revive_after",
    }  # fmt: skip
    curate = recipe.curate
    chosen = curate.model_dump(mode="json", include=names)
    several = curate.replayed if curate.replayed > 1 else None
    found = chosen | {"on_policy": True if on_policy(recipe) else None, "replayed": several}
    return found | {key: _named(recipe)[key] for key in _seen_by_rules(curate)}


def _named(recipe: Recipe) -> dict[str, int]:
    """Settings that rules see as columns."""
    curate = recipe.curate
    return {"samples": recipe.rollout.samples, "questions": curate.questions, "seed": recipe.seed}


def _seen_by_rules(curate: CurateSettings) -> set[str]:
    """Those of :func:`_named` that the tables depend on: by the rules that a step is taken in by.

    Beside ``samples`` itself, drop sees ``k`` on the scale of K, and store imports of questions
    without a success as 0 of K (of which the default makes nothing).
    """
    rules = (curate.store, curate.retire, curate.drop)
    by_column = {"samples": "samples", "questions": "batch", "seed": "luck"}
    found = {key for key, column in by_column.items() if any(mentions(r, column) for r in rules)}
    of_imports = curate.store != type(curate).model_fields["store"].default
    if mentions(curate.drop, "k") or (of_imports and mentions(curate.store, "n", "fresh_n")):
        found.add("samples")
    return found


def all_settings(recipe: Recipe) -> dict[str, Any]:
    """All settings that a step's curation depends on."""
    return recipe.curate.model_dump(mode="json") | table_settings(recipe) | _named(recipe)


@dataclass(frozen=True)
class Curation:
    """``curation.json``: how far the tables on disk go, and what they were derived from."""

    last_step: int
    """The last step taken in."""
    replay_from: int | None
    """The first step with replay, where it has come to that."""
    settings: Mapping[str, Any]
    """See :func:`all_settings`."""
    digests: Mapping[str, str]
    """Of the history's steps, as they were taken in (in the file: ``log``)."""

    @classmethod
    def read(cls, run: RunDir, log: Log = quiet) -> Curation | None:
        """None where that is not known, or a table is missing or not the one that was written."""
        try:
            found = json.loads(run.curation.read_text(encoding="utf-8"))
            if found["version"] != _VERSION:
                return None
            for name, path in _tables(run).items():
                if not path.exists():
                    return None
                if _file_digest(path) != found["tables"][name]:
                    log(f"{path}: not as curation left it; the experience is derived anew")
                    return None
            last_step, replay_from = int(found["last_step"]), found["replay_from"]
            return cls(last_step, replay_from, dict(found["settings"]), dict(found["log"]))
        except (ValueError, OSError, LookupError, TypeError):
            return None

    def write(self, run: RunDir) -> None:
        """Written last of all, and gone while the tables change (:meth:`remove`)."""
        values = {
            "version": _VERSION,
            "last_step": self.last_step,
            "replay_from": self.replay_from,
            "settings": self.settings,
            "log": _before(self.digests, self.last_step),
            "tables": {name: _file_digest(path) for name, path in _tables(run).items()},
        }
        tables.write_json(run.curation, values)

    @staticmethod
    def remove(run: RunDir) -> None:
        """So that tables that do not belong together are never taken for good ones."""
        if run.curation.exists():
            run.curation.unlink()
            tables.fsync(run.root)

    def fits(self, settings: Mapping[str, Any], digests: Mapping[str, str], upto: int) -> bool:
        """Whether the tables were derived under these settings from this history up to a step.

        A setting that was not known then was null.
        """
        same = all(self.settings.get(key) == value for key, value in settings.items())
        return same and _before(self.digests, upto) == _before(digests, upto)

    def covers(self, files: StepFiles, recipe: Recipe, digests: Mapping[str, str]) -> bool:
        """Whether the step is curated, under these settings and from this history."""
        run, step = files.run, files.step
        curated = run.curated(step)
        if not (
            self.last_step >= step
            and self.fits(all_settings(recipe), digests, step)
            and curated.exists()
            and run.plan(step + 1).exists()
            and recorded_metrics(run, step) is not None
        ):
            return False
        # Scores of the candidates that came only after the choice was made may change it.
        chosen_at = curated.stat().st_mtime_ns
        return all(path.stat().st_mtime_ns <= chosen_at for path in files.replay_scores)


def _tables(run: RunDir) -> dict[str, Path]:
    return {"experience": run.experience, "questions": run.questions}


def _file_digest(path: Path) -> str:
    """SHA-256 of what a file holds: processors have instructions for it (0.1 s for 100 MB)."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def refuse_changed_tables(run: RunDir) -> None:
    """Refuse tables that are not those that curation wrote, where that is known."""
    changed: list[str] = []
    Curation.read(run, changed.append)
    if changed:
        raise InputError(f"{changed[0].partition(';')[0]}; run: exgrpo curate {run.root} --rebuild")


def _before(digests: Mapping[str, str], upto: int) -> dict[str, str]:
    return {step: digest for step, digest in digests.items() if int(step) <= upto}


def recorded_metrics(run: RunDir, step: int) -> dict[str, Any] | None:
    """The metrics of a step's curation; None where it has left none."""
    path = run.stage_metrics(step, "curate")
    if not path.exists():
        return None
    return tables.read_json(path, "remove it, and curate makes it anew")
