"""The log of a run, written by hand: rollouts, verdicts, scores and plans of chosen outcomes."""

import polars as pl

from exgrpo_cli import tables
from exgrpo_cli.experience.history import history_digests
from exgrpo_cli.experience.pool import Experience
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe, parse_recipe
from exgrpo_cli.rundir import RunDir, step_name
from exgrpo_cli.stages import curate as stage
from exgrpo_cli.step import Step


def curate(run: RunDir, step: int, recipe: Recipe, log: Log = quiet, **options: bool) -> dict:
    """The curate stage in a run, and its outcome with its metrics."""
    result = stage.curate(Step.of(run, step), recipe, log=log, **options)
    return {**result.metrics, "skipped": bool(result.skipped), "finished": result.finished}


def rebuild(run: RunDir, upto: int, recipe: Recipe) -> None:
    """Derive a run's tables from its history alone, step after step."""
    digests = history_digests(run, upto)
    with Experience.open(run, recipe) as experience:
        experience.derive(upto)
        experience.write(digests)


CHOOSE = {
    "lowest_entropy": "mean_entropy",
    "highest_entropy": "-mean_entropy",
    "lowest_perplexity": "-mean_logprob",
    "random": "luck",
    "newest": "age",
}
WEIGHTS = {
    "normal": {},
    "linear": {"bucket_weight": "bucket"},
    "sqrt": {"bucket_weight": "sqrt(bucket)"},
    "linear_clip": {"bucket_weight": "least(bucket, samples / 2.0)"},
    "uniform": {"bucket": "0"},
}


def rules(
    selection: str = "lowest_entropy",
    weights: str = "normal",
    lower: int = 0,
    upper: int | None = None,
    max_age: int | None = None,
    max_per_question: int | None = None,
    max_trajectories: int | None = None,
    **others: object,
) -> dict[str, object]:
    """The rules that tests vary, by short names, beside other settings of ``curate``."""
    found: dict[str, object] = {**WEIGHTS[weights], "choose": CHOOSE[selection], **others}
    bounds = [f"k > {lower}"] if lower else []
    bounds += [f"k <= {upper}"] if upper is not None else []
    if bounds:
        found["store"] = " AND ".join(["correct AND k < n", *bounds])
    limits = {"age": max_age, "newness": max_per_question, "pool_newness": max_trajectories}
    drop = [f"{column} > {limit}" for column, limit in limits.items() if limit is not None]
    if drop:
        found["drop"] = " OR ".join(drop)
    return found


def make_recipe(samples: int = 4, seed: int = 0, **curate_settings: object) -> Recipe:
    """A small recipe; ``curate`` by its settings, or by the short names of :func:`rules`."""
    values = {"questions": 4, "replay_ratio": 0.5, **rules(**curate_settings)}  # type: ignore[arg-type]
    return parse_recipe(
        {"seed": seed, "rollout": {"samples": samples}, "curate": values}, "the test"
    )


def text_ids(text: str) -> list[int]:
    """Token ids that are equal for equal texts only."""
    return [ord(c) for c in text] + [1]


def row(
    step: int,
    problem: str,
    sample: int,
    correct: bool,
    text: str,
    role: str = "fresh",
    logprob: float = -1.0,
    entropy: float | None = None,
) -> dict:
    """A rollout with its verdict; ``logprob`` is every token's, the entropy its negative."""
    ids = text_ids(text)
    tag = "" if role == "fresh" else "r"
    return {
        "rollout_id": f"s{step:05d}/{problem}/{sample:02d}{tag}",
        "step": step,
        "problem_id": problem,
        "sample": sample,
        "role": role,
        "policy": step_name(step),
        "prompt_ids": [7, len(problem)],
        "token_ids": ids,
        "text": text,
        "logprobs": [logprob] * len(ids),
        "entropies": None,
        "mean_entropy": -logprob if entropy is None else entropy,
        "entropy_source": "logprobs",
        "mean_logprob": logprob,
        "tokens": len(ids),
        "token_hash": tables.token_hash(ids),
        "finish_reason": "stop",
        "seed": 0,
        "correct": correct,
    }


def group(step: int, problem: str, pattern: str, role: str = "fresh", **more: float) -> list[dict]:
    """Rows by a pattern: ``"1100"`` solves the first two of four; texts are all different.

    A replay group's pattern leaves out its replayed row, so its samples count from 1.
    """
    first = 1 if role == "replay" else 0
    return [
        row(step, problem, i + first, c == "1", f"{problem}.s{step}.{i + first}", role, **more)
        for i, c in enumerate(pattern)
    ]


def write_problems(run: RunDir, ids: list[str]) -> None:
    tables.write_table(
        "problems",
        tables.frame(
            "problems",
            [
                {
                    "problem_id": problem,
                    "prompt": [{"role": "user", "content": problem}],
                    "answer": "1",
                    "verifier": "math",
                    "source": "test",
                }
                for problem in ids
            ],
        ),
        run.problems,
    )


def write_verdicts(run: RunDir, step: int, rows: list[dict], parts: int = 1) -> None:
    for i in range(parts):
        verdicts = [
            {
                "rollout_id": r["rollout_id"],
                "reward": float(r["correct"]),
                "correct": r["correct"],
                "status": "ok" if r["correct"] else "no_answer",
                "verifier": "math",
                "seconds": 0.0,
            }
            for r in rows[i::parts]
        ]
        path = run.verdicts(step) / tables.part_name(i, parts)
        tables.write_table("verdicts", tables.frame("verdicts", verdicts), path)


def write_rollouts(run: RunDir, step: int, rows: list[dict], parts: int = 1) -> None:
    for i in range(parts):
        path = run.rollouts(step) / tables.part_name(i, parts)
        tables.write_table("rollouts", tables.frame("rollouts", rows[i::parts]), path)


def write_scores(
    run: RunDir,
    step: int,
    rows: list[dict],
    entropy: dict[str, float],
    prefix: str = "part",
    parts: int = 1,
    logprob: float = -0.25,
) -> None:
    """Scores under the step's policy of the rows whose id is in ``entropy``."""
    scored = [
        {
            "rollout_id": r["rollout_id"],
            "policy": step_name(step),
            "step": step,
            "logprobs": [logprob] * len(r["token_ids"]),
            "entropies": [entropy[r["rollout_id"]]] * len(r["token_ids"]),
            "mean_entropy": entropy[r["rollout_id"]],
            "mean_logprob": logprob,
        }
        for r in rows
        if r["rollout_id"] in entropy
    ]
    for i in range(parts):
        path = run.scores(step) / tables.part_name(i, parts, prefix)
        tables.write_table("scores", tables.frame("scores", scored[i::parts]), path)


def write_plan(run: RunDir, step: int, rows: list[dict], extra: list[dict] | None = None) -> None:
    """A plan that these rows could have followed."""
    planned = {(r["problem_id"], r["role"]) for r in rows}
    tables.write_table(
        "plan",
        tables.frame(
            "plan",
            [
                {"step": step, "problem_id": problem, "role": role, "samples": 4}
                for problem, role in sorted(planned)
            ]
            + (extra or []),
        ),
        run.plan(step),
    )


def write_step(run: RunDir, step: int, rows: list[dict], parts: int = 1) -> None:
    write_plan(run, step, rows)
    write_rollouts(run, step, rows, parts)
    write_verdicts(run, step, rows, parts)


def plan(run: RunDir, step: int) -> dict[str, list[str]]:
    """The planned questions of each role, in order."""
    table = tables.read_table("plan", run.plan(step))
    return {
        role: table.filter(pl.col("role") == role)["problem_id"].to_list()
        for role in ("fresh", "replay")
    }
