"""Trajectories of other models or persons, taken into a run's log."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.engines import Completion, Request
from exgrpo_cli.errors import InputError
from exgrpo_cli.problems.prompts import render_prompt
from exgrpo_cli.problems.readers import RowError, set_name
from exgrpo_cli.problems.trajectories import Answered, last_question, read_answered
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir, step_number
from exgrpo_cli.stages.sampling import Asked, completion_row
from exgrpo_cli.step import Result, Step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS = 512  # in a file, which verify and score do at a time
_OPENS = "<think>"
_NO_NAME = "no name for trajectories of others"


def import_trajectories(
    run: RunDir,
    source: Path,
    recipe: Recipe,
    *,
    name: str | None = None,
    columns: Mapping[str, str] | None = None,
    skip_bad: bool = False,
    log: Log = quiet,
) -> Result:
    """Take responses of another model or person into the log, for the next step to take in.

    They are tokenised once, as the run's policy would have said them: after the run's own prompt,
    with an end token. The next step that is not sampled yet has them judged by ``verify`` and
    scored by ``score`` under its policy (these log-probabilities are their pi_past), and its
    ``curate`` stores those that the rule ``store`` says. Without scores pi_past is 1. What is in
    the log already is not taken again, so that the same file changes nothing, and an import that
    was killed goes on.

    Args:
        run: with its problems; rows of other problems are left out.
        source: a file or folder: see :mod:`exgrpo_cli.problems.trajectories`.
        recipe: ``model``, and ``rollout``'s longest prompt and response.
        name: whose they are: their ``policy``; default the file's name.
        columns: the file's columns for ``response``, ``question``, ``id`` or ``source`` (a name in
            each row).
        skip_bad: leave out rows that cannot be read, and count them.

    Returns:
        Files written; metrics ``step`` (which takes them in), ``rows`` read, ``trajectories`` and
        ``questions`` imported, ``there_already`` (also twice in the file), and those left out:
        ``other_problems``, ``no_response`` and ``bad`` (rows), ``too_long`` and ``cut_off``
        (trajectories).

    Raises:
        InputError: no problems, nothing that is of one of them, or a row that cannot be read.
    """
    from exgrpo_cli.models import load_tokenizer

    if recipe.curate.replay_ratio == 0:
        raise InputError("curate.replay_ratio = 0: nothing is ever replayed, so nothing is taken")
    if not run.problems.exists():
        raise InputError(f"{run.problems}: no problems yet; run: exgrpo init {run.root}")
    trained = max(run.steps("policy"), default=0)
    begun = [n for n in run.steps("rollouts") if any(run.rollouts(n).glob("*part-*"))]
    step = max([trained, *(number + 1 for number in begun)])
    policy = run.policy_path(trained, recipe.model.path)
    work = _Import(run, step, recipe, load_tokenizer(policy, recipe.model), policy)
    label = tidy_name(name or set_name(source))
    if label is None:
        raise InputError(f"{name or source}: {_NO_NAME}; give another by --source")
    for row in read_answered(source, columns or {}, skip_bad):
        work.counts["rows"] += 1
        if not isinstance(row, RowError):
            try:
                work.add(row, label)
            except RowError as error:
                if not skip_bad:
                    raise InputError(f"{row.where}: {error}") from None
                row = error
        work.counts["bad"] += isinstance(row, RowError)
        if work.counts["rows"] % 10_000 == 0:
            log(f"{source}: {work.counts['rows']:,} rows, {work.counts['trajectories']:,} new")
    work.flush()
    found = {key: work.counts[key] for key in _COUNTS}
    if not found["trajectories"] and not found["there_already"]:
        raise InputError(f"{source}: nothing to take in of {_left_out(found, recipe)}")
    if found["trajectories"]:
        log(
            f"{source}: {found['trajectories']} trajectories of {len(work.questions)} questions are"
            f" new (as {label}); step {step} takes them in"
        )
    if any(found[key] for key in _COUNTS[2:]):
        log(f"{source}: left out {_left_out(found, recipe)}")
    metrics = {"step": step, "source": label, **found, "questions": len(work.questions)}
    return Result(work.files, metrics=metrics)


_COUNTS = (
    "rows", "trajectories", "there_already", "other_problems", "no_response", "too_long",
    "cut_off", "bad",
)  # fmt: skip


def tidy_name(name: str) -> str | None:
    """A source's name as ids and file names can hold it; None where nothing is left, or it is what
    the run's own are called."""
    text = re.sub(r"[^\w.:+=@-]+", "-", name).strip("-.")
    return None if text in ("", "own") or step_number(text) is not None else text


def _left_out(found: Mapping[str, int], recipe: Recipe) -> str:
    words = {
        "other_problems": "rows of problems that are not the run's (by question or id)",
        "no_response": "rows without a response",
        "there_already": "that are there already",
        "too_long": f"beyond rollout.max_new_tokens = {recipe.rollout.max_new_tokens} or"
        " max_prompt_tokens",
        "cut_off": "that were cut off",
        "bad": "rows that cannot be read",
    }
    said = [f"{found[key]} {what}" for key, what in words.items() if found[key]]
    return ", ".join(said) or f"{found['rows']} rows"


@dataclass
class _Import:
    """An import at work."""

    run: RunDir
    step: int
    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase
    policy: str
    counts: Counter[str] = field(default_factory=Counter)
    questions: set[str] = field(default_factory=set)
    files: int = 0

    def __post_init__(self) -> None:
        from exgrpo_cli.engines.limits import policy_end_ids

        table = tables.read_table("problems", self.run.problems, ["problem_id", "prompt"])
        self._problems: dict[str, list[dict[str, str]]] = dict(table.iter_rows())
        self._by_text: dict[str, str] = {}
        for problem, prompt in self._problems.items():
            self._by_text.setdefault(last_question(prompt), problem)
        self._ends = policy_end_ids(self.policy, self.recipe.model)
        if not self._ends:
            raise InputError(
                f"{self.policy}: has no end token, neither its tokenizer's nor another"
            )
        own = self.tokenizer.eos_token_id
        self._end = own if isinstance(own, int) else self._ends[0]
        self._prompts: dict[str, tuple[list[int], str]] = {}
        self._samples: Counter[str] = Counter()
        self._texts: set[bytes] = set()
        self._rows: list[dict[str, Any]] = []
        self._known: set[tuple[str, str]] = set()
        for file in sorted((self.run.root / "rollouts").glob("step-*-import/[!.]*.parquet")):
            held = tables.read_table("rollouts", file, ["problem_id", "token_hash"])
            self._known |= set(held.iter_rows())

    def add(self, row: Answered, label: str) -> None:
        """Take a row's responses, as far as they are new.

        Raises:
            RowError: it names its source as it cannot be called.
        """
        self.counts["cut_off"] += row.cut
        self.counts["no_response"] += not row.responses and not row.cut
        problem = self._problem(row)
        if problem is None:
            self.counts["other_problems"] += 1
            return
        name = label if row.source is None else tidy_name(row.source)
        if name is None:
            raise RowError(f"source {row.source!r}: {_NO_NAME}")
        for text in row.responses:
            mark = hashlib.blake2b(f"{problem}\0{text}".encode(), digest_size=16).digest()
            if mark in self._texts:
                self.counts["there_already"] += 1
                continue
            self._texts.add(mark)
            self._take(problem, text, name)
            if len(self._rows) == _ROWS:
                self.flush()

    def _problem(self, row: Answered) -> str | None:
        found = None if row.question is None else self._by_text.get(row.question)
        return found or next((one for one in row.ids if one in self._problems), None)

    def _take(self, problem: str, text: str, name: str) -> None:
        if problem not in self._prompts:
            ids = render_prompt(self._problems[problem], self.tokenizer, self.recipe.model)
            self._prompts[problem] = (ids, self.tokenizer.decode(ids[-8:]))
        prompt, tail = self._prompts[problem]
        ids = self.tokenizer.encode(without_opening(text, tail), add_special_tokens=False)
        if ids[-1:] != [self._end] and (not ids or ids[-1] not in self._ends):
            ids.append(self._end)
        settings = self.recipe.rollout
        if len(ids) > settings.max_new_tokens or len(prompt) > settings.max_prompt_tokens:
            self.counts["too_long"] += 1
            return
        digest, sample = tables.token_hash(ids), self._samples[problem]
        self._samples[problem] += 1
        if (problem, digest) in self._known:
            self.counts["there_already"] += 1
            return
        self._known.add((problem, digest))
        # Log-probabilities of 0 until score has made exact ones.
        said = Completion(0, ids, [0.0] * len(ids), None, "stop")
        row = completion_row(
            Step(self.step, model=name),
            Asked(problem, sample, "import"),
            Request(0, prompt, 0),
            said,
            self.tokenizer,
        )
        rollout_id = f"i/{name}/{problem}/{digest[:16]}"
        self._rows.append(row | {"rollout_id": rollout_id, "policy": name, "mean_entropy": 0.0})
        self.counts["trajectories"] += 1
        self.questions.add(problem)

    def flush(self) -> None:
        """Write the rows that wait: a file that is there is whole."""
        if not self._rows:
            return
        ids = "\n".join(row["rollout_id"] for row in self._rows)
        name = f"import-{hashlib.blake2b(ids.encode(), digest_size=8).hexdigest()}.parquet"
        path = self.run.imported("rollouts", self.step) / name
        tables.write_table("rollouts", tables.frame("rollouts", self._rows), path)
        self._rows = []
        self.files += 1


def without_opening(text: str, prompt_end: str) -> str:
    """A response without the ``<think>`` that the prompt's template has put before it already."""
    _, opened, space = prompt_end.rpartition(_OPENS)
    if not opened or space.strip() or not text.lstrip().startswith(_OPENS):
        return text
    rest = text.lstrip().removeprefix(_OPENS)
    return rest.removeprefix(space) if rest.startswith(space) else rest
