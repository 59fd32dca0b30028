"""ExGRPO in offline stages: rollout, verify, score, curate and train, speaking through files.

The method is *ExGRPO: Learning to Reason from Experience* (arXiv 2510.02245). A stage is a function
``stage(step, recipe, *, force=False, log=quiet) -> Result`` over a :class:`Step`, the files of one
step of a run directory (or loose ones); the command ``exgrpo`` is a thin layer over them::

    from exgrpo_cli import Recipe, RunDir, curate, prepare, rollout, score, train, verify

Names are imported when they are first used, so importing this package is instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exgrpo_cli.recipe import Recipe as Recipe
    from exgrpo_cli.recipe import load_recipe as load_recipe
    from exgrpo_cli.rundir import RunDir as RunDir
    from exgrpo_cli.runs.loop import run as run
    from exgrpo_cli.runs.prepare import prepare as prepare
    from exgrpo_cli.stages.curate import curate as curate
    from exgrpo_cli.stages.evaluate import evaluate as evaluate
    from exgrpo_cli.stages.rollout import rollout as rollout
    from exgrpo_cli.stages.score import score as score
    from exgrpo_cli.stages.train import train as train
    from exgrpo_cli.stages.verify import verify as verify
    from exgrpo_cli.step import Result as Result
    from exgrpo_cli.step import Step as Step

_HOMES = {
    "Recipe": "recipe",
    "Result": "step",
    "RunDir": "rundir",
    "Step": "step",
    "curate": "stages.curate",
    "evaluate": "stages.evaluate",
    "load_recipe": "recipe",
    "prepare": "runs.prepare",
    "rollout": "stages.rollout",
    "run": "runs.loop",
    "score": "stages.score",
    "train": "stages.train",
    "verify": "stages.verify",
}

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("exgrpo-cli")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0.0.0"
