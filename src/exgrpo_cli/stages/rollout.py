"""The rollout stage: sample the planned questions from the current policy."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.engines import Completion, Engine, Request, Sampling, open_engine
from exgrpo_cli.errors import InputError, StageError
from exgrpo_cli.progress import Log, progress, quiet
from exgrpo_cli.problems.prompts import render_prompt
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.rundir import RunDir
from exgrpo_cli.tables import WHOLE, Shard

if TYPE_CHECKING:
    import polars as pl
    from transformers import PreTrainedTokenizerBase

_DRAFT_SECONDS = 60.0


def rollout(
    *,
    problems: Path,
    out: Path,
    policy: str,
    policy_name: str,
    step: int,
    recipe: Recipe,
    plan: Path | None = None,
    shard: Shard = WHOLE,
    engine: Callable[[], Engine] | None = None,
    stale: Sequence[Path] = (),
    force: bool = False,
    log: Log = quiet,
) -> dict[str, Any]:
    """Sample every planned question and write a ``rollouts`` table in parts.

    The parts follow from the plan and ``rollout.questions_per_part`` alone, and each row's seed
    from the recipe's seed, the step, the question and the sample's number, so shards, restarts and
    repeats ask for the same samples. A part is written when its last row is finished. With vLLM,
    the finished rows of unfinished parts are kept every minute, so that a task that is sent again
    after a kill does not repeat them.

    Args:
        problems: the ``problems`` table.
        out: folder of the parts.
        policy: what samples: a Hugging Face folder, a PEFT adapter, or a hub name.
        policy_name: goes into the ``policy`` column.
        step: goes into the ``step`` column and the seeds.
        recipe: sections ``rollout``, ``model`` and ``lora``.
        plan: the ``plan`` table; without one every problem is fresh, with K samples.
        shard: which parts to do.
        engine: gives a loaded engine that holds this policy, and is called only when there is
            something to sample; by default one is opened here, and closed.
        stale: folders of what was made from earlier rollouts of this step (verdicts, scores); the
            part that is sampled anew is removed there, so that it is made anew too.
        force: sample parts again that exist.
        log: gets plain lines.

    Returns:
        Counts: ``parts_done``, ``parts_skipped``, ``rows``, ``tokens``, ``seconds``; where
        something was sampled, ``compute_seconds`` (waiting for the engine) and
        ``tokens_per_second`` (without opening it).

    Raises:
        InputError: a plan of other problems, an empty prompt, top_p below 1, a policy that cannot
            be opened.
        StageError: the engine left a row out.
    """
    check_sampling(recipe)
    started = time.monotonic()
    planned = _planned(problems, plan, step, recipe)
    if not planned:
        log(f"step {step}: every question is retired; there is nothing to sample")
        return {"parts_done": 0, "parts_skipped": 0, "rows": 0, "tokens": 0, "finished": True}
    groups = tables.chunked(len(planned), recipe.rollout.questions_per_part)
    names = [out / tables.part_name(i, len(groups)) for i in range(len(groups))]
    _refuse_other_division(out, len(groups))
    mine = [i for i in range(len(groups)) if shard.has(i)]
    todo = [i for i in mine if force or not names[i].exists()]
    result: dict[str, Any] = {
        "parts_done": len(todo),
        "parts_skipped": len(mine) - len(todo),
        "rows": 0,
        "tokens": 0,
    }
    for folder in stale:
        for i in todo:
            (folder / names[i].name).unlink(missing_ok=True)
    if todo:
        counts = _sample_parts(
            planned,
            [(groups[i], names[i]) for i in todo],
            policy,
            policy_name,
            step,
            recipe,
            engine,
            force,
            log,
        )
        result |= counts
    return result | {"seconds": round(time.monotonic() - started, 3)}


def encode_prompts(
    problems: pl.DataFrame, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, log: Log = quiet
) -> dict[str, list[int]]:
    """Prompt token ids of every problem whose prompt is not too long.

    Args:
        problems: columns ``problem_id`` and ``prompt``.
        tokenizer: the policy's.
        recipe: the template, and ``rollout.max_prompt_tokens``.
        log: is told how many prompts were left out.

    Raises:
        InputError: a prompt has no tokens; the problem is named.
    """
    encoded = {}
    too_long = []
    for problem_id, prompt in problems.select("problem_id", "prompt").iter_rows():
        ids = render_prompt(prompt, tokenizer, recipe.model)
        if not ids:
            raise InputError(f"problem {problem_id}: its prompt has no tokens")
        if len(ids) > recipe.rollout.max_prompt_tokens:
            too_long.append(problem_id)
        else:
            encoded[problem_id] = ids
    if too_long:
        log(
            f"{len(too_long)} prompts are longer than rollout.max_prompt_tokens ="
            f" {recipe.rollout.max_prompt_tokens} and are left out (the first is {too_long[0]})"
        )
    return encoded


def completion_row(
    problem_id: str,
    step: int,
    sample: int,
    role: str,
    policy: str,
    prompt_ids: Sequence[int],
    completion: Completion,
    text: str,
    seed: int,
) -> dict[str, Any]:
    """A row of the ``rollouts`` table.

    Where the engine gives no entropies, their mean is estimated: from the most probable tokens
    where the engine was asked for them, else by the mean negative log-probability of the sampled
    tokens, which is without bias, but has one sample a token.
    """
    count = len(completion.token_ids)
    mean_logprob = sum(completion.logprobs) / count
    if completion.entropies is not None:
        mean_entropy, source = sum(completion.entropies) / count, "engine"
    elif completion.topk_entropy is not None:
        mean_entropy, source = completion.topk_entropy, "topk"
    else:
        mean_entropy, source = -mean_logprob, "logprobs"
    return {
        "rollout_id": _rollout_id(step, problem_id, sample),
        "step": step,
        "problem_id": problem_id,
        "sample": sample,
        "role": role,
        "policy": policy,
        "prompt_ids": list(prompt_ids),
        "token_ids": completion.token_ids,
        "text": text,
        "logprobs": completion.logprobs,
        "entropies": completion.entropies,
        "mean_entropy": mean_entropy,
        "entropy_source": source,
        "mean_logprob": mean_logprob,
        "tokens": count,
        "token_hash": tables.token_hash(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "seed": seed,
    }


def _rollout_id(step: int, problem_id: str, sample: int) -> str:
    return f"s{step:05d}/{problem_id}/{sample:02d}"


def ensure_plan(run: RunDir, step: int, recipe: Recipe, log: Log = quiet) -> Path:
    """The step's plan; for step 0 it is made here, since no curation comes before it.

    Raises:
        InputError: a later step without a plan.
    """
    path = run.plan(step)
    if path.exists():
        return path
    if step > 0:
        raise InputError(
            f"{path}: step {step} has no plan; run: exgrpo curate {run.root} --step {step - 1}"
        )
    from exgrpo_cli.stages.curate import first_plan

    # Tasks of an array that start together write the same plan; the rename keeps it whole.
    tables.write_table("plan", first_plan(run.problems, recipe, log), path)
    return path


def training_sampling(recipe: Recipe) -> Sampling:
    """How training rollouts are sampled."""
    settings = recipe.rollout
    return Sampling(
        settings.temperature,
        settings.max_new_tokens,
        entropies=settings.entropies,
        entropy_top_k=recipe.entropy_top_k,
    )


def check_sampling(recipe: Recipe) -> None:
    """Refuse sampling that cannot be trained on.

    Raises:
        InputError: a truncating top_p, or greedy decoding.
    """
    if recipe.rollout.top_p < 1.0:
        raise InputError(
            f"rollout.top_p = {recipe.rollout.top_p}: training rollouts need top_p = 1, as a"
            " truncated distribution biases the importance ratios"
        )
    if recipe.rollout.temperature == 0.0:
        raise InputError("rollout.temperature = 0: training rollouts must be sampled; set it to 1")


def _refuse_other_division(out: Path, count: int) -> None:
    if not out.exists():
        return
    for file in out.glob("part-*.parquet"):
        if tables.part_number(file)[1] != count:
            raise InputError(
                f"{file}: this step was sampled in {tables.part_number(file)[1]} parts and the"
                f" recipe now gives {count}; restore rollout.questions_per_part, or remove {out}"
            )


def _planned(
    problems: Path, plan: Path | None, step: int, recipe: Recipe
) -> list[tuple[str, str, int, list[Mapping[str, str]]]]:
    """(problem_id, role, samples, prompt) of each planned question, in the plan's order."""
    table = tables.read_table("problems", problems, ["problem_id", "prompt"])
    prompts = dict(table.iter_rows())
    if plan is None:
        if not prompts:
            raise InputError(f"{problems}: no problems in this table")
        return [(pid, "fresh", recipe.rollout.samples, prompt) for pid, prompt in prompts.items()]
    rows = tables.read_table("plan", plan, ["step", "problem_id", "role", "samples"])
    for row_step, pid, _, _ in rows.iter_rows():
        if row_step != step:
            raise InputError(f"{plan}: is for step {row_step}, not for step {step}")
        if pid not in prompts:
            raise InputError(
                f"{plan}: question {pid} is not in {problems}; the plan is for another problem set"
            )
    return [(pid, role, samples, prompts[pid]) for _, pid, role, samples in rows.iter_rows()]


def _sample_parts(
    planned: list[tuple[str, str, int, list[Mapping[str, str]]]],
    parts: list[tuple[range, Path]],
    policy: str,
    policy_name: str,
    step: int,
    recipe: Recipe,
    engine: Callable[[], Engine] | None,
    force: bool,
    log: Log,
) -> dict[str, Any]:
    import polars as pl

    from exgrpo_cli.models import load_tokenizer

    tokenizer = load_tokenizer(policy, recipe.model)
    questions = [planned[q] for group, _ in parts for q in group]
    schema = {name: tables.polars_schema("problems")[name] for name in ("problem_id", "prompt")}
    encoded = encode_prompts(
        pl.DataFrame(
            {"problem_id": [q[0] for q in questions], "prompt": [q[3] for q in questions]},
            schema=schema,
        ),
        tokenizer,
        recipe,
        log,
    )
    requests: list[Request] = []
    rows: list[tuple[int, str, str, int]] = []  # part, problem_id, role, sample
    waiting = [0] * len(parts)
    for number, (group, _) in enumerate(parts):
        for q in group:
            problem_id, role, samples, _ = planned[q]
            if problem_id not in encoded:
                continue
            first = 1 if role == "replay" else 0  # sample 0 of a replay group is the replayed one
            for sample in range(first, first + samples):
                seed = tables.row_seed(recipe.seed, step, problem_id, sample)
                requests.append(Request(len(requests), encoded[problem_id], seed))
                rows.append((number, problem_id, role, sample))
                waiting[number] += 1

    sampling = training_sampling(recipe)
    tokens, computing = 0, 0.0
    done: list[dict[int, dict[str, Any]]] = [{} for _ in parts]
    if engine is None:
        log(f"rollout: opening {policy}")
    loaded = open_engine(recipe, policy) if engine is None else engine()
    started = time.monotonic()
    try:
        # An engine that batches by itself gets everything at once, and what it has finished of
        # unfinished parts is kept now and then. The transformers engine gets a part at a time, so
        # that its batches, and with them the last bits, are the same whatever the shards.
        calls = [requests]
        drafts = None
        if loaded.name == "transformers":
            calls = [[r for r in requests if rows[r.index][0] == p] for p in range(len(parts))]
        else:
            drafts = _Drafts([path for _, path in parts], f"{policy} {policy_name} {sampling}")
            for request in [] if force else requests:
                number, problem_id, _, sample = rows[request.index]
                row = drafts.found(number, _rollout_id(step, problem_id, sample), request)
                if row is not None:
                    done[number][request.index] = row
                    waiting[number] -= 1
            taken = {index for part in done for index in part}
            if taken:
                log(f"rollout: {len(taken)} rows that an interrupted task had finished are kept")
            calls = [[r for r in requests if r.index not in taken]]

        def close_part(number: int) -> None:
            finished, done[number] = done[number], {}
            _write_part([finished[i] for i in sorted(finished)], parts[number][1])
            if drafts is not None:
                drafts.drop(number)

        for number in (p for p in range(len(parts)) if waiting[p] == 0):
            close_part(number)
        with progress(f"rollout step {step}", sum(map(len, calls)), log) as advance:
            for call in calls:
                for completion, waited in _timed(loaded.generate(call, sampling)):
                    computing += waited
                    number, problem_id, role, sample = rows[completion.index]
                    request = requests[completion.index]
                    row = completion_row(
                        problem_id,
                        step,
                        sample,
                        role,
                        policy_name,
                        request.prompt_ids,
                        completion,
                        decode(tokenizer, completion.token_ids),
                        request.seed,
                    )
                    done[number][completion.index] = row
                    tokens += len(completion.token_ids)
                    waiting[number] -= 1
                    advance(1)
                    if waiting[number] == 0:
                        close_part(number)
                    elif drafts is not None:
                        drafts.add(number, row)
        if any(waiting):
            raise StageError(f"rollout: the engine left {sum(waiting)} rows unfinished")
        generating = max(time.monotonic() - started, 1e-9)
    finally:
        if engine is None:
            loaded.close()
    return {
        "rows": len(requests),
        "tokens": tokens,
        "compute_seconds": round(computing, 3),
        "tokens_per_second": round(tokens / generating, 1),
    }


class _Drafts:
    """Finished rows of unfinished parts, kept in hidden files beside them.

    A task that is killed leaves them behind, and the next one that does the part takes them over.
    Files of several tasks may lie together: rows are looked up one by one.
    """

    def __init__(self, paths: list[Path], sampled: str) -> None:
        """Read what earlier tasks left.

        Args:
            paths: of the parts.
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
        if time.monotonic() - self._saved < _DRAFT_SECONDS:
            return
        for path, rows in zip(self._paths, self._new, strict=True):
            if rows:
                name = f".{path.name}.{self._key}.{uuid.uuid4().hex[:12]}.rows"
                _write_part(rows, path.with_name(name))
                rows.clear()
        self._saved = time.monotonic()

    def drop(self, number: int) -> None:
        """The part is written: its drafts, whoever made them, are no longer needed."""
        self._new[number].clear()
        for file in self._files(number, "*"):
            file.unlink(missing_ok=True)


def _timed(completions: Iterator[Completion]) -> Iterator[tuple[Completion, float]]:
    """Each completion with the seconds that the engine took for it."""
    began = time.monotonic()
    for completion in completions:
        yield completion, time.monotonic() - began
        began = time.monotonic()


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """A response as text for reading: special tokens left out, spaces as they are."""
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    # A cut-off byte-level token may leave half a surrogate, which Parquet cannot hold.
    return str(text).encode("utf-8", "replace").decode("utf-8")


def _write_part(rows: list[dict[str, Any]], path: Path) -> None:
    tables.write_table("rollouts", tables.frame("rollouts", rows), path)
