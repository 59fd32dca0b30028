"""Where each file of a run lies, and the metrics that stages leave there."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exgrpo_cli.errors import InputError
from exgrpo_cli.machine import is_first_process
from exgrpo_cli.tables import finite_or_none, read_json, write_json, write_text


def step_name(step: int) -> str:
    """``step-00007``: the name of a step's folder, and of the policy that step samples from."""
    return f"step-{step:05d}"


def step_number(name: str) -> int | None:
    """The step of :func:`step_name`; None for any other name."""
    match = re.fullmatch(r"step-(\d{5,})", name)
    return int(match[1]) if match else None


REMOVED = "REMOVED"
"""The file that is left in the folder of a policy that was removed; it says why."""

LOCK_VARIABLE = "EXGRPO_LOCKED_RUN"
"""Environment variable with the run whose lock a parent process holds."""

_LOCKS = {"curate": ".lock", "train": ".lock.train"}


@dataclass(frozen=True)
class RunDir:
    """The layout of a run directory. Only names: nothing is created or checked here."""

    root: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root))  # a string will do

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.toml"

    @property
    def problems(self) -> Path:
        return self.root / "problems.parquet"

    @property
    def experience(self) -> Path:
        return self.root / "experience.parquet"

    @property
    def questions(self) -> Path:
        return self.root / "questions.parquet"

    @property
    def curation(self) -> Path:
        """What the experience tables were derived from (JSON); absent while they change."""
        return self.root / "curation.json"

    @property
    def origin_file(self) -> Path:
        """Of a run that goes on from another one: which, and from which step (JSON)."""
        return self.root / "origin.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def plan(self, step: int) -> Path:
        return self.root / "plan" / f"{step_name(step)}.parquet"

    def rollouts(self, step: int) -> Path:
        return self.root / "rollouts" / step_name(step)

    def verdicts(self, step: int) -> Path:
        return self.root / "verdicts" / step_name(step)

    def scores(self, step: int) -> Path:
        """Parts ``part-*`` score the step's rollouts, ``replay-*`` the replay candidates."""
        return self.root / "scores" / step_name(step)

    def imported(self, kind: str, step: int) -> Path:
        """Trajectories of others that a step takes in beside its own ``rollouts``; their
        ``verdicts`` and ``scores``."""
        return self.root / kind / f"{step_name(step)}-import"

    def imports(self, step: int) -> list[Path]:
        """The files of :meth:`imported` rollouts; each is whole."""
        return sorted(self.imported("rollouts", step).glob("[!.]*.parquet"))

    def curated(self, step: int) -> Path:
        return self.root / "curated" / f"{step_name(step)}.parquet"

    def policy(self, step: int) -> Path:
        return self.root / "policy" / step_name(step)

    def trainer(self, step: int) -> Path:
        return self.root / "trainer" / step_name(step)

    def evaluation(self, step: int, name: str) -> Path:
        return self.root / "evaluations" / step_name(step) / name

    def stage_metrics(self, step: int, stage: str) -> Path:
        """What a stage left of its numbers for a step (JSON); metrics.jsonl has them merged."""
        return self.root / "metrics" / step_name(step) / f"{stage}.json"

    def origin(self) -> dict[str, Any] | None:
        """``run``, ``step`` and ``fresh_optimizer`` of where the run goes on from; None of others.

        Raises:
            InputError: the file is damaged.
        """
        if not self.origin_file.exists():
            return None
        return read_json(self.origin_file, "remove it; it only tells where the run comes from")

    def first_step(self) -> int:
        """The step that the run begins with: 0, or the one that it goes on from."""
        origin = self.origin()
        return int(origin["step"]) if origin else 0

    def is_evaluated(self, step: int, name: str) -> bool:
        """Whether the policy of a step was evaluated on a set, and the metrics tell."""
        done = self.evaluation(step, name) / "summary.json"
        return done.exists() and self.stage_metrics(step, f"evaluate-{name}").exists()

    def steps(self, kind: str) -> list[int]:
        """The steps that have something under ``kind`` (``rollouts``, ``plan``, ...), sorted."""
        folder = self.root / kind
        files = folder.iterdir() if folder.is_dir() else ()
        names = (path.name.removesuffix(".parquet") for path in files)
        return sorted({n for n in map(step_number, names) if n is not None})

    def is_removed(self, step: int) -> bool:
        """Whether a policy was trained and then removed; its folder stands for the step."""
        return (self.policy(step) / REMOVED).is_file()

    def restarts(self, upto: int) -> list[int]:
        """The steps up to one that can be trained again: 0, and those whose policy and optimizer
        state are there."""
        kept = [n for n in self.steps("trainer") if 0 < n <= upto and self.policy(n).is_dir()]
        return [0, *(n for n in kept if not self.is_removed(n))]

    def training_again(self, step: int) -> tuple[str, str]:
        """The command that begins to make a policy anew, from the nearest before it that is whole,
        and words about the steps that follow."""
        first = self.restarts(step - 1)[-1]
        command = f"exgrpo train {shlex.quote(str(self.root))} --step {first} --force"
        return command, f", then {first + 1} to {step - 1}" if first + 1 < step else ""

    def policy_path(self, step: int, initial: str) -> str:
        """The policy that step samples from: ``policy/step-…``, or for step 0 the initial model.

        Args:
            initial: the recipe's ``model.path`` (a folder or a hub name).

        Raises:
            InputError: the step before was not trained yet, or the policy was removed.
        """
        path = self.policy(step)
        if path.is_dir():
            refuse_removed(path)
            return str(path)
        if step == 0:
            return initial
        raise InputError(
            f"{path}: step {step} has no policy yet;"
            f" run: exgrpo train {self.root} --step {step - 1}"
        )

    def own_recipe(self, *, needed: bool = True) -> Path | None:
        """The recipe that lies in the run; None before there is one.

        Args:
            needed: whether nothing can stand in for it.

        Raises:
            InputError: the run has begun, and its recipe is gone or empty: the defaults would train
                another way.
        """
        if self.recipe.is_file() and self.recipe.stat().st_size > 0:
            return self.recipe
        if needed and any(self.steps(kind) for kind in ("rollouts", "policy")):
            raise InputError(
                f"{self.recipe}: missing or empty, though the run has begun; restore it, or put the"
                f" recipe there that it was begun with: exgrpo init {self.root} --recipe FILE"
            )
        return None

    def record(
        self, step: int, stage: str, metrics: dict[str, Any], *, widen: bool = False
    ) -> None:
        """Leave a stage's metrics for a step and renew ``metrics.jsonl``.

        Each stage writes its own ``metrics/step-…/STAGE.json``; ``metrics.jsonl`` is those merged,
        a line a step, so a stage that is run again replaces its own numbers and no line is lost or
        doubled when a job is killed, or when several stages record at the same time.

        Args:
            stage: the file's name.
            metrics: slash-grouped names (``reward/mean``) to numbers; what is not finite is null.
            widen: a time that others recorded as ``..._began`` stays where it is earlier, and one
                as ``..._ended`` where it is later.
        """
        finite = {name: finite_or_none(value) for name, value in metrics.items()}
        file = self.stage_metrics(step, stage)
        file.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(self.root / "metrics" / ".lock"):
            if widen and file.exists():
                for name, value in read_json(file, "remove it").items():
                    first = min if name.endswith("_began") else max
                    if name.endswith(("_began", "_ended")):
                        finite[name] = first(value, finite.get(name, value))
            write_json(file, finite)
            # Lines of earlier steps stand; this step's, the one before (a kill may have come
            # between its two files) and any that are missing are made anew from the stages' files.
            self._renew_metrics(step - 1)

    def renew_metrics(self) -> None:
        """Make all lines of ``metrics.jsonl`` anew from the stages' files.

        Raises:
            InputError: a file is damaged.
        """
        if (self.root / "metrics").is_dir():
            with _exclusive(self.root / "metrics" / ".lock"):
                self._renew_metrics(0)

    def _renew_metrics(self, first: int) -> None:
        """Those from a step on, and missing ones."""
        try:
            lines = {line["step"]: line for line in self.read_metrics()} if first > 0 else {}
        except InputError:
            lines = {}
        for number in self.steps("metrics"):
            if number in lines and number < first:
                continue
            merged: dict[str, Any] = {"step": number}
            for file in sorted((self.root / "metrics" / step_name(number)).glob("*.json")):
                merged |= read_json(file, f"remove it (its numbers of step {number} are lost)")
            lines[number] = merged
        if lines:
            text = "".join(json.dumps(lines[number]) + "\n" for number in sorted(lines))
            write_text(self.metrics, text)

    @contextmanager
    def locked(self, *sides: str) -> Iterator[None]:
        """Keep other processes from changing this run's state at the same time.

        Held by what has one writer, not by stages that share their parts among tasks. There are two
        sides, ``curate`` and ``train``, since with a lag step t + 1 is curated while step t is
        trained. A lock ends with its process, however that ends. Of the processes of one
        ``torchrun`` the first holds it; a stage that ``run`` starts as processes of its own works
        under the lock of ``run``, and keeps it (by ``close_fds=False``) when ``run`` is killed.

        Args:
            *sides: default both, as ``run`` does.

        Raises:
            InputError: another process holds it.
        """
        if not is_first_process() or os.environ.get(LOCK_VARIABLE) == str(self.root.resolve()):
            yield
            return
        with ExitStack() as held:
            for side in sides or _LOCKS:
                held.enter_context(self._held(self.root / _LOCKS[side]))
            yield

    @contextmanager
    def _held(self, lock: Path) -> Iterator[None]:
        import fcntl

        with lock.open("w") as handle:
            os.set_inheritable(handle.fileno(), True)
            try:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:  # perhaps somebody only looked: see is_locked
                    time.sleep(0.1)
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"{self.root}: another exgrpo run, curate or train is at work in this run;"
                    " wait for it, or stop it"
                ) from None
            except OSError:  # a file system without locks
                yield
                return
            if os.fstat(handle.fileno()).st_nlink > 0:
                yield
                return
        # Its holder began a new run, failed, and took the run and this file back meanwhile.
        self.root.mkdir(parents=True, exist_ok=True)
        with self._held(lock):
            yield

    def is_locked(self) -> bool:
        """Whether another process holds :meth:`locked` now; False where that cannot be told."""
        return any(_is_held(self.root / name) for name in _LOCKS.values())

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``, in step order; empty before the first step.

        Raises:
            InputError: a line is not JSON with a step.
        """
        if not self.metrics.exists():
            return []
        lines = []
        text = self.metrics.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                value = json.loads(line)
                int(value["step"])
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                raise InputError(
                    f"{self.metrics}: line {number} is damaged; remove the file, and the next stage"
                    " makes it anew"
                ) from error
            lines.append(value)
        return lines


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """Wait for a file's lock, and hold it; without one where the file system has none."""
    import fcntl

    with lock.open("w") as handle:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _is_held(lock: Path) -> bool:
    import fcntl

    try:
        with lock.open("r") as handle:
            # Shared, and given back at once: lookers do not hinder each other.
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # never locked, not ours to open, or a file system without locks
        return False
    return False


def why_removed(policy: Path) -> str | None:
    """Why a folder is only the place of a policy; None of a policy itself."""
    try:
        return (policy / REMOVED).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def refuse_removed(policy: Path) -> None:
    """Refuse what is only the place of a policy."""
    why = why_removed(policy)
    if why is None:
        return
    step = step_number(policy.name)
    if step is None or why.startswith("lies in"):
        raise InputError(f"{policy}: {why}")
    command, later = RunDir(policy.parent.parent).training_again(step)
    raise InputError(f"{policy}: {why}; to make it again, run: {command}{later}")
