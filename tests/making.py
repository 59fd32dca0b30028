"""What the tests are made of: rows, tables, run directories, models and training steps.

Plain functions with small defaults; keywords replace them. torch is imported where it is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from exgrpo_cli import tables
from exgrpo_cli.experience.curation import Curation
from exgrpo_cli.experience.history import history_digests
from exgrpo_cli.experience.pool import Experience
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe, parse_recipe
from exgrpo_cli.rundir import RunDir, step_name
from exgrpo_cli.stages import curate as curate_stage
from exgrpo_cli.step import Step

ROOT = Path(__file__).parents[1]

# --- rows -----------------------------------------------------------------------------------------


def text_ids(text: str) -> list[int]:
    """Token ids that are equal for equal texts only."""
    return [ord(c) for c in text] + [1]


def problem_row(problem_id: str, question: str | None = None, **changes: Any) -> dict[str, Any]:
    prompt = [{"role": "user", "content": problem_id if question is None else question}]
    row = {"problem_id": problem_id, "prompt": prompt, "answer": "1", "verifier": "math"}
    return row | {"source": "test"} | changes


def rollout_row(
    step: int, problem: str, sample: int, text: str = "", role: str = "fresh",
    logprob: float = -1.0, token_ids: list[int] | None = None, **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """``logprob`` is every token's; the mean entropy is its negative where none is given."""
    ids = text_ids(text) if token_ids is None else token_ids
    tag = "" if role == "fresh" else "r"
    return {
        "rollout_id": f"s{step:05d}/{problem}/{sample:02d}{tag}",
        "step": step, "problem_id": problem, "sample": sample, "role": role,
        "policy": step_name(step), "prompt_ids": [7, len(problem)], "token_ids": ids,
        "text": text, "logprobs": [logprob] * len(ids), "entropies": None,
        "mean_entropy": -logprob, "entropy_source": "logprobs", "mean_logprob": logprob,
        "tokens": len(ids), "token_hash": tables.token_hash(ids), "finish_reason": "stop",
        "seed": 0,
    } | changes  # fmt: skip


def verdict_row(rollout_id: str, correct: bool, **changes: Any) -> dict[str, Any]:
    return {
        "rollout_id": rollout_id, "reward": float(correct), "correct": correct,
        "status": "ok" if correct else "no_answer", "verifier": "math", "seconds": 0.0,
    } | changes  # fmt: skip


def row(
    step: int, problem: str, sample: int, correct: bool, text: str, role: str = "fresh",
    logprob: float = -1.0, entropy: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A rollout with its outcome."""
    made = rollout_row(step, problem, sample, text, role, logprob, correct=correct)
    return made if entropy is None else made | {"mean_entropy": entropy}


def group(step: int, problem: str, pattern: str, role: str = "fresh", **more: float) -> list[dict]:
    """Rows by a pattern: ``"1100"`` solves the first two of four; texts are all different.

    A replay group's pattern leaves out its replayed row, so its samples count from 1.
    """
    first = 1 if role == "replay" else 0
    return [
        row(step, problem, i + first, c == "1", f"{problem}.s{step}.{i + first}", role, **more)
        for i, c in enumerate(pattern)
    ]


# --- tables ---------------------------------------------------------------------------------------


def write(table: str, path: Path, rows: list[dict], parts: int = 1, prefix: str = "part") -> Path:
    """Rows as a table file, or, where the path names none, as parts in a folder."""
    if path.suffix == ".parquet":
        tables.write_table(table, tables.frame(table, rows), path)
        return path
    for i in range(parts):
        write(table, path / tables.part_name(i, parts, prefix), rows[i::parts])
    return path


def parts(folder: Path) -> pl.DataFrame:
    """All rows of a folder's parts."""
    return pl.concat([pl.read_parquet(file) for file in sorted(folder.glob("*.parquet"))])


def write_problems(run: RunDir, ids: list[str]) -> None:
    write("problems", run.problems, [problem_row(problem) for problem in ids])


def write_rollouts(run: RunDir, step: int, rows: list[dict], parts: int = 1) -> None:
    write("rollouts", run.rollouts(step), rows, parts)


def write_verdicts(run: RunDir, step: int, rows: list[dict], parts: int = 1) -> None:
    judged = [verdict_row(r["rollout_id"], r["correct"]) for r in rows]
    write("verdicts", run.verdicts(step), judged, parts)


def write_scores(
    run: RunDir, step: int, rows: list[dict], entropy: dict[str, float], prefix: str = "part",
    parts: int = 1, logprob: float = -0.25,
) -> None:  # fmt: skip
    """Scores under the step's policy of the rows whose id is in ``entropy``."""
    write("scores", run.scores(step), score_rows(step, rows, entropy, logprob), parts, prefix)


def score_rows(
    step: int, rows: list[dict], entropy: dict[str, float], logprob: float = -0.25
) -> list[dict]:
    return [
        {
            "rollout_id": r["rollout_id"], "policy": step_name(step), "step": step,
            "logprobs": [logprob] * len(r["token_ids"]),
            "entropies": [entropy[r["rollout_id"]]] * len(r["token_ids"]),
            "mean_entropy": entropy[r["rollout_id"]], "mean_logprob": logprob,
        }
        for r in rows
        if r["rollout_id"] in entropy
    ]  # fmt: skip


def import_row(step: int, problem: str, i: int, correct: bool, text: str) -> dict[str, Any]:
    """A trajectory of another model, that a step takes in."""
    return rollout_row(
        step, problem, i, text, "import", 0.0, correct=correct, mean_entropy=0.0, policy="r1",
        rollout_id=f"i/r1/{problem}/{step}.{i}",
    )  # fmt: skip


def write_imports(
    run: RunDir, step: int, rows: list[dict], entropy: dict[str, float] | None = None
) -> None:
    judged = [verdict_row(r["rollout_id"], r["correct"]) for r in rows]
    scored = score_rows(step, rows, entropy) if entropy is not None else []
    for table, made in (("rollouts", rows), ("verdicts", judged), ("scores", scored)):
        if made:
            write(table, run.imported(table, step) / "import-0.parquet", made)


def write_plan(run: RunDir, step: int, rows: list[dict], extra: list[dict] | None = None) -> None:
    """A plan that these rows could have followed."""
    planned = sorted({(r["problem_id"], r["role"]) for r in rows})
    keys = ("step", "problem_id", "role", "samples")
    made = [dict(zip(keys, (step, *one, 4), strict=True)) for one in planned]
    write("plan", run.plan(step), made + (extra or []))


def write_step(run: RunDir, step: int, rows: list[dict], parts: int = 1) -> None:
    write_plan(run, step, rows)
    write_rollouts(run, step, rows, parts)
    write_verdicts(run, step, rows, parts)


def curate(run: RunDir, step: int, recipe: Recipe, log: Log = quiet, **options: bool) -> dict:
    """The curate stage in a run, and its outcome with its metrics."""
    result = curate_stage.curate(Step.of(run, step), recipe, log=log, **options)
    return {**result.metrics, "skipped": bool(result.skipped), "finished": result.finished}


def rebuild(run: RunDir, upto: int, recipe: Recipe) -> None:
    """Derive a run's tables from its history alone, step after step."""
    digests = history_digests(run, upto)
    with Experience.open(run, recipe) as held:
        held.derive(upto)
        held.write(digests)


@contextmanager
def loaded(run: RunDir, recipe: Recipe) -> Iterator[Experience]:
    """The experience as the run's tables hold it."""
    found = Curation.read(run)
    with Experience.open(run, recipe) as held:
        assert found is not None
        assert held.load(found)
        yield held


def plan(run: RunDir, step: int) -> dict[str, list[str]]:
    """The planned questions of each role, in order."""
    table = tables.read_table("plan", run.plan(step))
    return {
        role: table.filter(pl.col("role") == role)["problem_id"].to_list()
        for role in ("fresh", "replay")
    }


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
    values = {"questions": 4, "replay_ratio": 0.5, **rules(**curate_settings)}  # type: ignore[arg-type]
    return parse_recipe(
        {"seed": seed, "rollout": {"samples": samples}, "curate": values}, "the test"
    )


# --- curated logs ---------------------------------------------------------------------------------


def vectors(name: str) -> dict:
    """Published values that are not part of this copy, where they lie beside it."""
    path = ROOT.parent / "shared" / "vectors" / f"{name}.json"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return json.loads(path.read_text(encoding="utf-8"))


def start_replay(run: RunDir, recipe: Recipe, problem: str = "zz") -> None:
    """Step 0: a success rate of 3/4 that stores nothing and lets replay start."""
    write_step(run, 0, group(0, problem, "1110"))
    curate(run, 0, recipe)


def experience(run: RunDir) -> pl.DataFrame:
    return tables.read_table("experience", run.experience)


def questions(run: RunDir) -> dict[str, dict]:
    table = tables.read_table("questions", run.questions)
    return {r["problem_id"]: r for r in table.to_dicts()}


def pool(run: RunDir) -> dict[str, list[str]]:
    """The stored rollout ids of each question."""
    stored: dict[str, list[str]] = {}
    for r in experience(run).to_dicts():
        stored.setdefault(r["problem_id"], []).append(r["rollout_id"])
    return stored


def fill_pool(run: RunDir, recipe: Recipe, patterns: dict[str, str]) -> None:
    start_replay(run, recipe)
    write_step(run, 1, [r for q, pattern in patterns.items() for r in group(1, q, pattern)])
    curate(run, 1, recipe)


def prepare_choice(run: RunDir, recipe: Recipe, scored: bool) -> list[dict]:
    """Three stored successes of ``a`` (steps 1, 1, 2), to be replayed in step 3."""
    start_replay(run, recipe)
    first = [
        row(1, "a", 0, True, "first", logprob=-1.0, entropy=0.5),
        row(1, "a", 1, True, "second", logprob=-2.0, entropy=0.4),
        row(1, "a", 2, False, "third"),
        row(1, "a", 3, False, "fourth"),
    ]
    second = [row(2, "a", i, i == 1, f"later {i}", logprob=-0.5, entropy=0.6) for i in range(4)]
    if scored:
        write_scores(run, 1, first, {r["rollout_id"]: r["mean_entropy"] for r in first})
    write_step(run, 1, first)
    curate(run, 1, recipe)
    write_step(run, 2, second)
    curate(run, 2, recipe)
    write_step(run, 3, group(3, "a", "000", "replay") + group(3, "b", "0000"))
    return first + second


def sample_by_plan(run: RunDir, step: int, pattern: str = "0000") -> list[str]:
    """Roll out what was planned; the fresh questions."""
    made = plan(run, step)
    rows = [r for q in made["fresh"] for r in group(step, q, pattern)]
    rows += [r for q in made["replay"] for r in group(step, q, "000", "replay")]
    write_rollouts(run, step, rows)
    write_verdicts(run, step, rows)
    return made["fresh"]


# --- models ---------------------------------------------------------------------------------------


def qwen(seed: int = 0, **changes: Any) -> Any:
    """A random Qwen2 of one small layer, in float32."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = {
        "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True,
        "initializer_range": 0.2, "max_position_embeddings": 256, "bos_token_id": None,
        "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(Qwen2Config(**config | changes)).eval()


def save(model: Any, folder: Path, tokenizer: Any = None, **generation: Any) -> Path:
    """A model folder: with the demo's tokenizer, whose tokens are characters, or another."""
    from transformers import GenerationConfig

    from exgrpo_cli.demo import make_tokenizer

    if generation:
        model.generation_config = GenerationConfig(**generation)
    model.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder


def adapter_of(base: Path, seed: int = 0, **changes: Any) -> Any:
    """A LoRA adapter with random weights on a model folder: the peft model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            LoraConfig(**settings | {"init_lora_weights": False} | changes),
        )


LETTERS, GUESSES = "acfghi", "0248"


def guesser(folder: Path) -> Path:
    """A policy that needs no training: a letter, and in a box one of four digits, all alike likely.

    ``problems.jsonl`` beside it holds those of the demo's problems whose answer is among them, so
    it succeeds at every fourth. Its embeddings are one-hot and its layer adds nothing, so that each
    token depends on the one before it alone; training changes that as any model's weights.
    """
    import torch

    from exgrpo_cli.demo import make_tokenizer

    tokenizer = make_tokenizer()
    ids = {c: tokenizer.convert_tokens_to_ids(c) for c in f"=\\boxed{{}}{LETTERS}{GUESSES}"}
    model = qwen(vocab_size=len(tokenizer), hidden_size=128, intermediate_size=128,
                 tie_word_embeddings=False)  # fmt: skip
    chain = {"=": LETTERS, "\\": "b", "b": "o", "o": "x", "x": "e", "e": "d", "d": "{"}
    following = {ids[a]: [ids[b] for b in text] for a, text in chain.items()}
    following |= {ids[c]: [ids["\\"]] for c in LETTERS}
    following[ids["{"]] = [ids[c] for c in GUESSES]
    following |= {ids[c]: [ids["}"]] for c in GUESSES}
    following[ids["}"]] = [tokenizer.eos_token_id]
    with torch.no_grad():
        layer = model.model.layers[0]
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(128)[: len(tokenizer)])
        model.lm_head.weight.zero_()
        for token, others in following.items():
            model.lm_head.weight[others, token] = 16 / 128**0.5  # a logit of 16, others of 0
    source = (ROOT / "data/arithmetic/train.jsonl").read_text().splitlines(keepends=True)
    easy = [line for line in source if json.loads(line)["answer"] in GUESSES]
    (folder / "problems.jsonl").write_text("".join(easy))
    return save(model, folder / "policy", tokenizer, eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id)  # fmt: skip


def small_run(policy: Path) -> list[str]:
    """The options of a run of a guesser that takes a second a step, with replay from step 1."""
    return [
        "--recipe", "recipes/demo.toml", "--model", str(policy),
        "--problems", str(policy.parent / "problems.jsonl"), *settings(
            "curate.questions=8", "rollout.samples=4", "rollout.questions_per_part=3",
            "curate.start_success=0.0", "curate.store_before_start=true", "evaluate.every=0",
            "verify.workers=1", "rollout.engine=transformers", "rollout.max_new_tokens=16",
            "train.keep_every=1",
        ),
    ]  # fmt: skip


def teacher(policy: Path) -> Path:
    """Two successes and a failure for each of twenty problems of a guesser; and another's."""
    lines = (policy.parent / "problems.jsonl").read_text().splitlines()[:20]
    rows = [
        {"prompt": row["prompt"], "generations": [f"{a}\\boxed{{{b}}}" for a, b in (
            ("c", row["answer"]), ("a", row["answer"]), ("f", "8" if row["answer"] != "8" else "0")
        )]}
        for row in map(json.loads, lines)
    ]  # fmt: skip
    file = policy.parent / "teacher.jsonl"
    rows.append({"prompt": "of another set", "generations": ["x"]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def settings(*sets: str) -> list[str]:
    return [word for one in sets for word in ("--set", one)]
