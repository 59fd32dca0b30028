"""What travels through the stages: a step's files and names, and what a stage made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from exgrpo_cli.errors import InputError
from exgrpo_cli.rundir import RunDir, step_name

_OPTIONS = {
    "problems": "--problems",
    "rollouts": "--rollouts",
    "verdicts": "--verdicts",
    "scores": "--scores",
    "evaluation": "--out",
    "next_policy": "--out",
}


@dataclass(frozen=True)
class Step:
    """One step t of training: where its files lie, and which policy samples it.

    Made from a run directory (:meth:`of`), from loose files, or from both, where those that are
    given stand in for the run's own. Only names: nothing is read or checked here but whether a path
    is known.
    """

    number: int = 0
    """t, from 0."""
    run: RunDir | None = None
    """The run that it belongs to; None for loose files alone."""
    model: str | None = None
    """The policy that samples it (a folder, an adapter, a hub name), where it is not the run's."""
    lag: int = 0
    """How many steps before t the policy was made that is meant; see :meth:`lagged`."""
    given: Mapping[str, Path] = field(default_factory=dict)
    """Paths by name (``rollouts``, ``verdicts``, ...) that stand in for the run's own."""

    @classmethod
    def of(
        cls,
        run: RunDir | str | Path | None,
        number: int = 0,
        *,
        policy: str | None = None,
        **given: str | Path | None,
    ) -> Step:
        """A step of a run directory; what is given by name (``rollouts=...``) lies elsewhere.

        Args:
            run: the run directory; None for loose files alone.
            number: t.
            policy: what samples; default the run's policy of the step.
            **given: ``problems``, ``plan``, ``rollouts``, ``verdicts``, ``scores``, ``curated``,
                ``trainer``, ``next_policy``, ``next_trainer``; None for the run's own.
        """
        place = RunDir(Path(run)) if isinstance(run, str | Path) else run
        paths = {kind: Path(path) for kind, path in given.items() if path is not None}
        return cls(number, place, policy, given=paths)

    def at(self, **given: Path) -> Step:
        """The same step with other paths."""
        return replace(self, given={**self.given, **given})

    def lagged(self, lag: int) -> Step:
        """The step as what samples and scores sees it: its policy is t - lag, but none before the
        one that the run begins with. Without a lag that is the policy t, which the step trains."""
        first = 0 if self.run is None else self.run.first_step()
        return replace(self, lag=max(min(lag, self.number - first), 0))

    @property
    def name(self) -> str:
        """``step-00007``: how the run calls the step, and the policy that it trains."""
        return step_name(self.number)

    def find(self, kind: str) -> Path | None:
        """Where something of the step lies: as given, else in the run; None where neither."""
        if kind in self.given:
            return self.given[kind]
        if self.run is None:
            return None
        if kind == "problems":
            return self.run.problems
        if kind in ("next_policy", "next_trainer"):
            place = getattr(self.run, kind.removeprefix("next_"))
            return Path(place(self.number + 1))
        if kind == "evaluation" or (kind == "trainer" and self.number == 0):
            return None
        return Path(getattr(self.run, kind)(self.number))

    def _need(self, kind: str) -> Path:
        path = self.find(kind)
        if path is None:
            option = _OPTIONS.get(kind, f"--{kind}")
            raise InputError(f"give a run directory, or {option}")
        return path

    @property
    def problems(self) -> Path:
        """The ``problems`` table."""
        return self._need("problems")

    @property
    def rollouts(self) -> Path:
        """Folder of the ``rollouts`` parts, or one file."""
        return self._need("rollouts")

    @property
    def verdicts(self) -> Path:
        """Folder of the ``verdicts`` parts, or one file."""
        return self._need("verdicts")

    @property
    def scores(self) -> Path:
        """Folder of the ``scores`` parts: ``part-*`` of rollouts, ``replay-*`` of candidates."""
        return self._need("scores")

    def imports(self, kind: str) -> list[tuple[Path, Path]]:
        """The files of trajectories of others that the step takes in, each with the file for its
        ``verdicts`` or ``scores``; none where loose files are given."""
        if self.run is None or {"rollouts", kind} & self.given.keys():
            return []
        folder = self.run.imported(kind, self.number)
        return [(file, folder / file.name) for file in self.run.imports(self.number)]

    @property
    def evaluation(self) -> Path:
        """The folder of an evaluation; a run has several, so it is always given."""
        return self._need("evaluation")

    @property
    def next_policy(self) -> Path:
        """The folder of the policy that the step trains."""
        return self._need("next_policy")

    @property
    def next_trainer(self) -> Path:
        """The optimizer's state that belongs to :attr:`next_policy`."""
        path = self.find("next_trainer")
        out = self.next_policy
        return path or out.parent / f"{out.name}-trainer"

    def policy(self, initial: str) -> str:
        """The policy of the step (see :meth:`lagged`): as given, else the run's; policy 0 is the
        initial one.

        Args:
            initial: the recipe's ``model.path``.

        Raises:
            InputError: it was not trained yet, or there is neither run nor policy.
        """
        if self.model is not None:
            return self.model
        if self.run is None:
            raise InputError("give a run directory, or --policy")
        return self.run.policy_path(self.number - self.lag, initial)

    @property
    def policy_name(self) -> str:
        """Its name in tables: a given one by its plain path, a run's own by its step."""
        if self.model is None:
            return step_name(self.number - self.lag)
        return str(Path(self.model)) if Path(self.model).is_dir() else self.model


@dataclass(frozen=True)
class Result:
    """What a stage did."""

    done: int = 0
    """Units of work (parts, updates of tables, policies) that were made now."""
    skipped: int = 0
    """Units that were there already."""
    finished: bool = False
    """Every question is retired: there is nothing left to do."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Numbers by name; those of ``curate`` and ``train`` stand in metrics.jsonl too."""
    notes: tuple[str, ...] = ()
    """Lines that somebody should read, each whole in itself."""
    compute_seconds: float | None = None
    """Of the stage's time, what went into the work itself; None where it was not measured."""

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``: the metrics, and what else there is to say."""
        found = {"done": self.done, "skipped": self.skipped, **self.metrics}
        if self.finished:
            found["finished"] = True
        if self.compute_seconds is not None:
            found["compute_seconds"] = self.compute_seconds
        return found
