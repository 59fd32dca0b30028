"""The rollout stage: sample the planned questions from the policy that the step is due to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.engines import Completion, Engine, Request, open_engine
from exgrpo_cli.errors import InputError, StageError
from exgrpo_cli.progress import Log, progress, quiet
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.stages.drafts import Drafts
from exgrpo_cli.stages.sampling import Asked, completion_row, encode_prompts, training_sampling
from exgrpo_cli.step import Result, Step
from exgrpo_cli.tables import WHOLE, Shard

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class _Question:
    """A planned question."""

    problem_id: str
    role: str
    samples: int
    prompt: list[Mapping[str, str]]


@dataclass
class _Part:
    """A part that is being sampled."""

    path: Path
    questions: list[_Question]
    waiting: set[int] = field(default_factory=set)
    """Requests that are not finished."""
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rows of those that are."""


def rollout(
    step: Step,
    recipe: Recipe,
    *,
    shard: Shard = WHOLE,
    force: bool = False,
    log: Log = quiet,
    engine: Callable[[str], Engine] | None = None,
) -> Result:
    """Sample every planned question and write a ``rollouts`` table in parts.

    The parts follow from the plan and ``rollout.questions_per_part`` alone, and each row's seed
    from the recipe's seed, the step, the question and the sample's number, so shards, restarts and
    repeats ask for the same samples. A part is written when its last row is finished. With vLLM,
    the finished rows of unfinished parts are kept every minute and when the stage is ended, so that
    a task that is sent again does not repeat them. In a run, the verdicts and scores of a part that
    is sampled anew are removed.

    Args:
        step: reads ``problems`` and ``plan`` (without one every problem is fresh, with K samples;
            a run's first plan is made here), writes ``rollouts``.
        recipe: sections ``rollout``, ``model``, ``lora``, ``loop.lag`` and ``curate.questions``.
        shard: which parts to do.
        force: sample parts again that exist.
        log: gets plain lines.
        engine: gives a loaded engine that holds a policy, and is called only when there is
            something to sample; by default one is opened here, and closed.

    Returns:
        Parts done and skipped; metrics ``rows``, ``tokens`` and ``seconds``, and where something
        was sampled ``tokens_per_second`` (without opening the engine). What was computed is the
        waiting for the engine.

    Raises:
        InputError: no plan, a plan of other problems, an empty prompt, a policy that cannot be
            opened.
        StageError: the engine left a row out.
    """
    started = time.monotonic()
    step = step.lagged(recipe.loop.lag)
    questions = _planned(step, recipe, log)
    if not questions:
        log(f"step {step.number}: every question is retired; there is nothing to sample")
        return Result(finished=True, metrics={"rows": 0, "tokens": 0})
    groups = tables.chunked(len(questions), recipe.rollout.questions_per_part)
    _refuse_other_division(step.rollouts, len(groups))
    mine = [
        _Part(step.rollouts / tables.part_name(i, len(groups)), [questions[q] for q in group])
        for i, group in enumerate(groups)
        if shard.has(i)
    ]
    todo = [part for part in mine if force or not part.path.exists()]
    if step.run is not None:
        for part in todo:
            for folder in (step.verdicts, step.scores):
                (folder / part.path.name).unlink(missing_ok=True)
    metrics: dict[str, Any] = {"rows": 0, "tokens": 0}
    computing = None
    if todo:
        counts, computing = _sample(step, recipe, todo, engine, force=force, log=log)
        metrics |= counts
    metrics["seconds"] = round(time.monotonic() - started, 3)
    return Result(len(todo), len(mine) - len(todo), metrics=metrics, compute_seconds=computing)


def ensure_plan(step: Step, recipe: Recipe, log: Log = quiet) -> Path | None:
    """The path of a step's plan; for a run's step 0 it is made here, since no curation comes before
    it. None for loose files without one."""
    path = step.find("plan")
    if path is None or path.exists() or "plan" in step.given or step.run is None:
        return path
    if step.number > 0:
        raise InputError(
            f"{path}: step {step.number} has no plan; run: exgrpo curate {step.run.root} --step"
            f" {step.number - 1}"
        )
    from exgrpo_cli.experience.plan import first_plan

    # Tasks of an array that start together write the same plan; the rename keeps it whole.
    tables.write_table("plan", first_plan(step.problems, recipe, log), path)
    return path


def _planned(step: Step, recipe: Recipe, log: Log) -> list[_Question]:
    """The planned questions, in the plan's order."""
    plan = ensure_plan(step, recipe, log)
    problems = step.problems
    table = tables.read_table("problems", problems, ["problem_id", "prompt"])
    prompts = dict(table.iter_rows())
    if plan is None:
        if not prompts:
            raise InputError(f"{problems}: no problems in this table")
        return [
            _Question(name, "fresh", recipe.rollout.samples, prompt)
            for name, prompt in prompts.items()
        ]
    rows = tables.read_table("plan", plan, ["step", "problem_id", "role", "samples"])
    for number, name, _, _ in rows.iter_rows():
        if number != step.number:
            raise InputError(f"{plan}: is for step {number}, not for step {step.number}")
        if name not in prompts:
            raise InputError(
                f"{plan}: question {name} is not in {problems}; the plan is for another problem set"
            )
    return [
        _Question(name, role, samples, prompts[name]) for _, name, role, samples in rows.iter_rows()
    ]


def _refuse_other_division(out: Path, count: int) -> None:
    if not out.exists():
        return
    for other in tables.divisions(out.glob("part-*.parquet")).keys() - {count}:
        raise InputError(
            f"{out}: this step was sampled in {other} parts and the recipe now gives {count};"
            f" restore rollout.questions_per_part, or remove {out}"
        )


def _requests(
    step: Step, recipe: Recipe, parts: list[_Part], tokenizer: PreTrainedTokenizerBase, log: Log
) -> tuple[list[Request], list[Asked]]:
    """What is asked of the engine, part by part; counts what each part waits for."""
    prompts = {q.problem_id: q.prompt for part in parts for q in part.questions}
    encoded = encode_prompts(prompts, tokenizer, recipe, log)
    requests: list[Request] = []
    asked: list[Asked] = []
    for part in parts:
        for question in part.questions:
            ids = encoded.get(question.problem_id)
            if ids is None:
                continue
            # sample 0 of a replay group is the replayed one
            first = 1 if question.role == "replay" else 0
            for sample in range(first, first + question.samples):
                seed = tables.row_seed(recipe.seed, step.number, question.problem_id, sample)
                requests.append(Request(len(requests), ids, seed))
                asked.append(Asked(question.problem_id, sample, question.role))
                part.waiting.add(requests[-1].index)
    return requests, asked


def _sample(
    step: Step,
    recipe: Recipe,
    parts: list[_Part],
    engine: Callable[[str], Engine] | None,
    *,
    force: bool,
    log: Log,
) -> tuple[dict[str, Any], float]:
    """Sample and write parts; the counts, and the seconds of waiting for the engine."""
    from exgrpo_cli.models import load_tokenizer

    policy = step.policy(recipe.model.path)
    tokenizer = load_tokenizer(policy, recipe.model)
    requests, asked = _requests(step, recipe, parts, tokenizer, log)
    sampling = training_sampling(recipe)
    tokens, computing = 0, 0.0
    if engine is None:
        log(f"rollout: opening {policy}")
    loaded = open_engine(recipe, policy) if engine is None else engine(policy)
    part_of = {index: number for number, part in enumerate(parts) for index in part.waiting}
    started = time.monotonic()
    drafts = None
    try:
        # An engine that batches by itself gets everything at once, and what it has finished of
        # unfinished parts is kept now and then. The transformers engine gets a part at a time, so
        # that its batches, and with them the last bits, are the same whatever the shards.
        if loaded.name != "transformers":
            sampled = f"{policy} {step.policy_name} {sampling}"
            drafts = Drafts([part.path for part in parts], sampled)
            if not force:
                _take_over(step, parts, requests, asked, drafts, log)
        calls = [[requests[index] for index in sorted(part.waiting)] for part in parts]
        if drafts is not None:
            calls = [[request for call in calls for request in call]]

        def close(number: int) -> None:
            rows = [parts[number].rows.pop(index) for index in sorted(parts[number].rows)]
            tables.write_table("rollouts", tables.frame("rollouts", rows), parts[number].path)
            if drafts is not None:
                drafts.drop(number)

        for number in [p for p, part in enumerate(parts) if not part.waiting]:
            close(number)
        with progress(f"rollout step {step.number}", sum(map(len, calls)), log) as advance:
            for call in calls:
                for completion, waited in _timed(loaded.generate(call, sampling)):
                    computing += waited
                    index = completion.index
                    number = part_of[index]
                    row = completion_row(step, asked[index], requests[index], completion, tokenizer)
                    parts[number].rows[index] = row
                    parts[number].waiting.discard(index)
                    tokens += len(completion.token_ids)
                    advance(1, len(completion.token_ids))
                    if not parts[number].waiting:
                        close(number)
                    elif drafts is not None:
                        drafts.add(number, row)
        unfinished = sum(len(part.waiting) for part in parts)
        if unfinished:
            raise StageError(f"rollout: the engine left {unfinished} rows unfinished")
        generating = max(time.monotonic() - started, 1e-9)
    except BaseException:  # such as SIGTERM
        if drafts is not None:
            drafts.save()
        raise
    finally:
        if engine is None:
            loaded.close()
    counts = {
        "rows": len(requests),
        "tokens": tokens,
        "tokens_per_second": round(tokens / generating, 1),
    }
    return counts, round(computing, 3)


def _take_over(
    step: Step,
    parts: list[_Part],
    requests: list[Request],
    asked: list[Asked],
    drafts: Drafts,
    log: Log,
) -> None:
    """Rows that an interrupted task had finished, into their parts."""
    taken = 0
    for number, part in enumerate(parts):
        for index in sorted(part.waiting):
            row = drafts.found(number, asked[index].rollout_id(step.number), requests[index])
            if row is not None:
                part.rows[index] = row
                part.waiting.discard(index)
                taken += 1
    if taken:
        log(f"rollout: {taken} rows that an interrupted task had finished are kept")


def _timed(completions: Iterator[Completion]) -> Iterator[tuple[Completion, float]]:
    """Each completion with the seconds that the engine took for it."""
    began = time.monotonic()
    for completion in completions:
        yield completion, time.monotonic() - began
        began = time.monotonic()
