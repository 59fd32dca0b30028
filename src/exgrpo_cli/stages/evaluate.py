"""The evaluate stage: accuracy of a policy on held-out problems."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.engines import Engine, Request, Sampling, open_engine
from exgrpo_cli.errors import InputError, StageError
from exgrpo_cli.evaluation import (
    average_of_sources,
    format_table,
    interval_of,
    pass_ks,
    powers_of_two,
    summarise,
)
from exgrpo_cli.progress import Log, progress, quiet
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.stages.drafts import Drafts
from exgrpo_cli.stages.sampling import Asked, completion_row, encode_prompts
from exgrpo_cli.step import Result, Step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from exgrpo_cli.verifiers.pool import Pool

__all__ = ["evaluate", "evaluation_metrics", "format_table"]


def evaluate(
    step: Step,
    recipe: Recipe,
    *,
    force: bool = False,
    log: Log = quiet,
    engine: Callable[[str], Engine] | None = None,
    pool: Pool | None = None,
) -> Result:
    """Sample every problem, verify the answers, and sum up the accuracy by source.

    Writes ``rollouts.parquet``, ``verdicts.parquet``, ``evaluation.json`` (what was asked for) and
    ``summary.json``. What is there is not made again: a finished sampling is only verified and
    summed up, and changed answers are verified anew. The seeds depend on the recipe's seed, the
    problem and the sample, not on the policy, so policies are compared on common random numbers.

    Args:
        step: reads its policy and ``problems`` (a table), writes into the folder ``evaluation``,
            both of which must be given.
        recipe: ``seed``, ``evaluate``, ``rollout`` (engine, lengths), ``model`` and ``verify``. At
            temperature 0 one sample a problem is taken.
        force: evaluate anew, whatever the folder holds.
        log: gets plain lines.
        engine: gives a loaded engine that holds a policy, and is called only when there is
            something to sample; by default one is opened here, and closed.
        pool: workers that verify; by default they are started here, and ended.

    Returns:
        Metrics are the summary: ``policy``, ``step``, ``samples``, ``samples_by_source`` (of the
        sources that are there), ``temperature``, ``max_new_tokens``, ``left_out`` (problems whose
        prompts are too long), ``rows`` (by source), ``overall`` and ``average`` (of the sources);
        see :func:`exgrpo_cli.evaluation.summarise` and ``average_of_sources``.

    Raises:
        InputError: no problems whose prompts are short enough, the folder holds an evaluation of
            another policy or with other settings, or the policy cannot be opened.
        StageError: the engine left a row out, or no answer could be judged.
    """
    from exgrpo_cli.models import load_tokenizer
    from exgrpo_cli.stages.verify import refuse_errors, verify

    settings = recipe.evaluate
    policy, problems, out = step.policy(recipe.model.path), step.problems, step.evaluation
    samples, samples_by_source = settings.samples, dict(settings.samples_by_source)
    max_new_tokens = settings.max_new_tokens or recipe.rollout.max_new_tokens
    if settings.temperature == 0 and max([samples, *samples_by_source.values()]) > 1:
        log("evaluate: temperature 0 gives the same response every time; one sample a problem")
        samples, samples_by_source = 1, {}
    table = tables.read_table("problems", problems)
    if table.is_empty():
        raise InputError(f"{problems}: no problems in this table")
    tokenizer = load_tokenizer(policy, recipe.model)
    prompts = encode_prompts(
        dict(table.select("problem_id", "prompt").iter_rows()), tokenizer, recipe, log
    )
    if not prompts:
        raise InputError(
            f"{problems}: every prompt is longer than rollout.max_prompt_tokens ="
            f" {recipe.rollout.max_prompt_tokens}; raise it"
        )

    present = set(table["source"])
    by_source = {s: n for s, n in sorted(samples_by_source.items()) if s in present}
    sources = dict(table.select("problem_id", "source").iter_rows())
    counts = {pid: by_source.get(sources[pid], samples) for pid in prompts}
    asked = {
        "policy": step.policy_name,
        "step": step.number,
        "weights": policy_fingerprint(policy),
        "samples": samples,
        "samples_by_source": by_source or None,
        "temperature": float(settings.temperature),
        "max_new_tokens": max_new_tokens,
        "seed": recipe.seed,
        "problems": _digest([pid, *ids] for pid, ids in sorted(prompts.items())),
    }
    how = [recipe.verify.extract, recipe.verify.require]
    answers = _digest([*how, *sorted(table.select("problem_id", "answer", "verifier").rows())])
    rollouts, verdicts = out / "rollouts.parquet", out / "verdicts.parquet"
    request = out / "evaluation.json"
    anew = "remove its folder, and evaluate makes it anew"
    before = tables.read_json(request, anew) if request.exists() else {}
    sampled = force or not rollouts.exists()
    if not sampled:
        _refuse_other(out, before, asked)
        log(f"evaluate: {rollouts} is there; not sampled again")
    else:
        for stale in (rollouts, verdicts, out / "summary.json"):
            stale.unlink(missing_ok=True)
        tables.write_json(request, asked | {"answers": answers})
        _sample(step, recipe, tokenizer, prompts, counts, engine, log, force=force)
    if before.get("answers") != answers:
        verdicts.unlink(missing_ok=True)
        tables.write_json(request, asked | {"answers": answers})
    result = verify(step.at(rollouts=rollouts, verdicts=verdicts), recipe, pool=pool)
    for note in result.notes:
        log(f"evaluate: {note}")
    try:
        refuse_errors(result, verdicts)
    except StageError:
        verdicts.unlink()  # or the next evaluation would take them for judged
        raise

    judged = (
        tables.read_table(
            "rollouts", rollouts, ["rollout_id", "problem_id", "finish_reason", "tokens"]
        )
        .join(
            tables.read_table("verdicts", verdicts, ["rollout_id", "correct"]),
            on="rollout_id",
            validate="1:1",
        )
        .join(table.select("problem_id", "source"), on="problem_id", validate="m:1")
    )
    if judged.height != sum(counts.values()):
        raise StageError(
            f"{verdicts}: {judged.height} verdicts for {sum(counts.values())} samples;"
            " remove it and evaluate again"
        )
    bootstrap, ks = settings.bootstrap, powers_of_two(max(counts.values()))
    rows_by_source, overall = summarise(judged, ks, bootstrap, recipe.seed)
    summary = {
        "policy": step.policy_name,
        "step": step.number,
        "samples": samples,
        "samples_by_source": by_source,
        "temperature": float(settings.temperature),
        "max_new_tokens": max_new_tokens,
        "left_out": table.height - len(prompts),
        "rows": rows_by_source,
        "overall": overall,
        "average": average_of_sources(judged, bootstrap, recipe.seed),
    }
    tables.write_json(out / "summary.json", summary)
    return Result(int(sampled), int(not sampled), metrics=summary, notes=result.notes)


def evaluation_metrics(name: str, summary: Mapping[str, Any]) -> dict[str, float]:
    """A summary as flat metrics: ``eval/NAME/pass@1``, ``eval/NAME/pass@1_low``, and so on.

    Returns:
        Numbers over all problems; where there are several sources, also
        ``eval/NAME/SOURCE/pass@1`` and the rest of each.
    """
    groups = {f"eval/{name}": summary["overall"]}
    average = summary.get("average")
    if len(summary["rows"]) > 1:
        groups |= {f"eval/{name}/{row['source']}": row for row in summary["rows"]}
    metrics: dict[str, float] = {}
    for prefix, row in groups.items():
        for k in pass_ks(row):
            low, high = interval_of(row, k)
            metrics |= {
                f"{prefix}/pass@{k}": row[f"pass@{k}"],
                f"{prefix}/pass@{k}_low": low,
                f"{prefix}/pass@{k}_high": high,
            }
        metrics |= {f"{prefix}/truncated": row["truncated"], f"{prefix}/tokens": row["tokens"]}
    if average is not None:
        metrics |= {
            f"eval/{name}/average_pass@1": average["pass@1"],
            f"eval/{name}/average_pass@1_low": average["low"],
            f"eval/{name}/average_pass@1_high": average["high"],
        }
    return metrics


def policy_fingerprint(policy: str) -> str:
    """A hash that tells policies apart wherever they lie: names, sizes and samples of the weights.

    Args:
        policy: a folder with ``*.safetensors`` files, or a hub name, whose hash is the name's.
    """
    found = hashlib.blake2b(digest_size=16)
    folder = Path(policy)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        found.update(policy.encode())
    for file in files:
        size = file.stat().st_size
        found.update(f"{file.name}\x1f{size}\x1f".encode())
        with file.open("rb") as stream:
            # 64 windows of 4 KiB: an update moves weights everywhere, so it shows in them.
            for i in range(64):
                stream.seek(size * i // 64)
                found.update(stream.read(4096))
    return found.hexdigest()


def _sample(
    step: Step,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    prompts: dict[str, list[int]],
    counts: dict[str, int],
    engine: Callable[[str], Engine] | None,
    log: Log,
    *,
    force: bool,
) -> None:
    """Write the ``rollouts`` table, problem by problem; with vLLM, as the rollout stage does, what
    an interrupted evaluation had sampled is not sampled again."""
    settings, policy = recipe.evaluate, step.policy(recipe.model.path)
    asked = [Asked(name, sample) for name in prompts for sample in range(counts[name])]
    requests = [
        Request(
            i,
            prompts[one.problem_id],
            tables.row_seed(recipe.seed, "evaluate", one.problem_id, one.sample),
        )
        for i, one in enumerate(asked)
    ]
    limit = settings.max_new_tokens or recipe.rollout.max_new_tokens
    sampling = Sampling(settings.temperature, limit)
    rows: list[dict[str, Any] | None] = [None] * len(requests)
    if engine is None:
        log(f"evaluate: opening {policy}")
    loaded = open_engine(recipe, policy) if engine is None else engine(policy)
    out = step.evaluation / "rollouts.parquet"
    drafts = Drafts([out], f"{policy_fingerprint(policy)} {sampling}")
    if loaded.name != "transformers" and not force:
        for request, one in zip(requests, asked, strict=True):
            rows[request.index] = drafts.found(0, one.rollout_id(step.number, "e"), request)
    waiting = [request for request in requests if rows[request.index] is None]
    try:
        with progress(f"evaluate {step.policy_name}", len(waiting), log) as advance:
            for completion in loaded.generate(waiting, sampling):
                index = completion.index
                row = completion_row(
                    step, asked[index], requests[index], completion, tokenizer, prefix="e"
                )
                rows[index] = row
                if loaded.name != "transformers":
                    drafts.add(0, row)
                advance(1, len(completion.token_ids))
    except BaseException:  # such as SIGTERM
        drafts.save()
        raise
    finally:
        if engine is None:
            loaded.close()
    finished = [row for row in rows if row is not None]
    if len(finished) < len(rows):
        raise StageError(f"evaluate: the engine left {len(rows) - len(finished)} rows unfinished")
    tables.write_table("rollouts", tables.frame("rollouts", finished), out)
    drafts.drop(0)


def _refuse_other(out: Path, before: dict[str, Any], asked: dict[str, Any]) -> None:
    # Not the policy's name: a path may be spelled in several ways, and the weights tell.
    differing = [key for key in asked if key != "policy" and before.get(key) != asked[key]]
    if not differing:
        return
    readable = {"weights": "other weights", "problems": "other problems or prompts"}
    said = [
        readable.get(key) or f"{key} was {before.get(key)!r}, is now {asked[key]!r}"
        for key in differing
    ]
    raise InputError(
        f"{out}: holds another evaluation ({'; '.join(said)}); --force evaluates anew; or give"
        " another --out"
    )


def _digest(rows: Iterable[Iterable[object]]) -> str:
    """A hash of rows of plain values."""
    found = hashlib.blake2b(digest_size=16)
    for row in rows:
        found.update(json.dumps(list(row), ensure_ascii=False).encode() + b"\n")
    return found.hexdigest()
