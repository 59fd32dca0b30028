"""What the tests are made of: rows, tables, run directories, models and training steps.

Plain functions with small defaults; keywords replace them. torch is imported where it is needed.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import polars as pl

from exgrpo_cli import tables
from exgrpo_cli.recipe import Recipe, parse_recipe, to_toml
from exgrpo_cli.rundir import RunDir, step_name

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
    scored = [
        {
            "rollout_id": r["rollout_id"], "policy": step_name(step), "step": step,
            "logprobs": [logprob] * len(r["token_ids"]),
            "entropies": [entropy[r["rollout_id"]]] * len(r["token_ids"]),
            "mean_entropy": entropy[r["rollout_id"]], "mean_logprob": logprob,
        }
        for r in rows
        if r["rollout_id"] in entropy
    ]  # fmt: skip
    write("scores", run.scores(step), scored, parts, prefix)


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


def plan(run: RunDir, step: int) -> dict[str, list[str]]:
    """The planned questions of each role, in order."""
    table = tables.read_table("plan", run.plan(step))
    return {
        role: table.filter(pl.col("role") == role)["problem_id"].to_list()
        for role in ("fresh", "replay")
    }


def make_recipe(samples: int = 4, seed: int = 0, **curate_settings: object) -> Recipe:
    values = {"questions": 4, "replay_ratio": 0.5, **curate_settings}
    return parse_recipe(
        {"seed": seed, "rollout": {"samples": samples}, "curate": values}, "the test"
    )


# --- runs of chosen content -----------------------------------------------------------------------

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> & \\boxed{<b>8</b>}"


def make_metrics(run: RunDir, steps: int, seed: int = 0) -> None:
    """Metrics as the stages leave them, of a run that learns, with replay from step 3."""
    rng = random.Random(seed)
    every = max(steps // 6, 1)
    for step in range(steps + 1):
        share = step / max(steps, 1)
        rate = 0.25 + 0.4 * share + rng.uniform(-0.04, 0.04)
        if step % every == 0 or step == steps:
            value = 0.24 + 0.4 * share
            found = {"": value, "_low": value - 0.04, "_high": value + 0.05}
            metrics = {f"eval/heldout/pass@1{name}": number for name, number in found.items()}
            run.record(step, "evaluate-heldout", metrics | {"eval/heldout/pass@4": value + 0.2})
        if step == steps:
            break
        started = step >= 3
        curate = {
            "reward/mean": rate, "reward/fresh_mean": rate, "success_rate": rate,
            "rollout/tokens_mean": 30 + 12 * share + rng.uniform(-2, 2),
            "rollout/truncated_share": 0.06 * (1 - share),
            "rollout/no_answer_share": 0.03 * (1 - share),
            "pool/questions": 10 * step, "pool/trajectories": 24 * step,
            "pool/bucket_easy": 4 * step, "pool/bucket_medium": 4 * step + 3,
            "pool/bucket_hard": 2 * step + 6, "pool/retired": step * step // 12,
            "pool/age_mean": step / 2, "replay/started": float(started),
            "plan/fresh": 16 if started else 32, "plan/replay": 16 if started else 0,
        }  # fmt: skip
        train = {
            "train/loss": rng.uniform(-0.01, 0.01),
            "train/on_policy_loss": rng.uniform(-0.01, 0.01),
            "train/ratio_mean": 1 + rng.uniform(-0.001, 0.001),
            "train/clip_fraction": rng.uniform(0, 0.002), "train/entropy": 0.5 - 0.3 * share,
            "train/grad_norm": rng.uniform(0.2, 1.4),
        }  # fmt: skip
        if started:
            curate |= {"reward/replay_mean": rate - 0.1, "replay/questions": 16}
            curate |= {"replay/age_mean": step / 3, "replay/mean_entropy": 0.2 - 0.1 * share}
            train |= {"train/off_policy_loss": -0.05, "train/shaped_ratio_mean": 0.9}
        run.record(step, "curate", curate)
        run.record(step, "train", train)
        for stage, most in (("rollout", 1.2), ("verify", 0.2), ("score", 0.3), ("curate", 0.1)):
            run.record(step, f"time-{stage}", {f"time/{stage}": rng.uniform(0.7, 1) * most})
        run.record(step, "time-train", {"time/train": rng.uniform(0.8, 1.2)})


def make_tables(run: RunDir, step: int, hostile: str = "") -> None:
    """Problems, and one step's plan, rollouts, verdicts, curated, experience and questions."""
    gold = {"add<1>": "12", "mul": "8", "sub": "3"}
    questions = {"add<1>": f"7+5= {hostile}", "mul": "2*4=", "sub": "9-6="}
    system = {"role": "system", "content": "Be brief."}
    write("problems", run.problems, [
        problem_row(
            pid, answer=gold[pid], source="sums" if pid == "add<1>" else "others",
            prompt=[system, {"role": "user", "content": questions[pid]}],
        )
        for pid in gold
    ])  # fmt: skip
    texts = {
        "add<1>": ["7+5=12; \\boxed{12}", f"{hostile} \\boxed{{13}}", "I think…"],
        "mul": ["2*4=8; \\boxed{8}", "2*4=6; \\boxed{6}", "no idea"],
    }
    rollouts = [
        rollout_row(
            step, pid, sample, text, logprob=-0.5, mean_entropy=0.25, entropy_source="engine",
            entropies=[0.25] * len(text_ids(text)), seed=sample,
            finish_reason="length" if text.endswith("…") else "stop",
        )
        for pid, samples in texts.items()
        for sample, text in enumerate(samples)
    ]  # fmt: skip
    verdicts = []
    for r in rollouts:
        boxed = "\\boxed{" in r["text"]
        verdicts.append(
            verdict_row(
                r["rollout_id"], r["text"].endswith(f"\\boxed{{{gold[r['problem_id']]}}}"),
                status="ok" if boxed else "no_answer", seconds=0.01,
                extracted=r["text"].split("\\boxed{")[-1].rstrip("}") if boxed else None,
            )
        )  # fmt: skip
    for i in range(2):
        name, half = tables.part_name(i, 2), slice(3 * i, 3 * i + 3)
        write("rollouts", run.rollouts(step) / name, rollouts[half])
        write("verdicts", run.verdicts(step) / name, verdicts[half])
    write_plan(run, step, rollouts)
    chosen = {"reward": 1.0, "entropy_policy": step_name(step)}
    write("curated", run.curated(step), [
        rollouts[0] | chosen | {
            "collected_step": step, "logprob_source": "score", "entropy_source": "score",
            "bucket": "medium", "successes": 1, "attempts": 3, "rank": 1, "candidates": 2,
        }
    ])  # fmt: skip
    part = f"rollouts/{step_name(step)}/{tables.part_name(0, 2)}"
    write("experience", run.experience,
          [r | chosen | {"part": part} for r in (rollouts[0], rollouts[3])])  # fmt: skip
    keys = ("problem_id", "successes", "bucket", "retired_step")
    rest = {"attempts": 3, "last_step": step, "times_replayed": 0, "epoch": 0}
    write("questions", run.questions, [
        dict(zip(keys, values, strict=True)) | rest
        for values in (
            ("add<1>", 1, "medium", None), ("mul", 1, "hard", None), ("sub", 3, "easy", step),
        )
    ])  # fmt: skip


def make_run(root: Path, steps: int, hostile: str = "") -> RunDir:
    """A whole run of so many trained steps; the tables are of its last one."""
    run = RunDir(root)
    values = {"model": {"path": "models/tiny"}, "loop": {"steps": steps + 2}}
    recipe = parse_recipe(values | {"train": {"learning_rate": 1e-4}}, "test")
    tables.write_text(run.recipe, to_toml(recipe))
    make_metrics(run, steps)
    make_tables(run, steps - 1, hostile)
    for step in range(1, steps + 1):
        run.policy(step).mkdir(parents=True)
    make_evaluation(run, steps)
    return run


def make_evaluation(run: RunDir, step: int, name: str = "heldout") -> dict:
    """An evaluation's summary of two sources, in its place."""

    def source(name: str, value: float) -> dict:
        return {
            "source": name, "problems": 100, "samples": 400, "pass@1": value, "low": value - 0.04,
            "high": value + 0.05, "pass@4": value + 0.2, "pass@4_low": value + 0.15,
            "pass@4_high": value + 0.25, "truncated": 0.01, "tokens": 31.5,
        }  # fmt: skip

    summary = {
        "policy": step_name(step), "step": step, "samples": 4, "temperature": 0.6,
        "max_new_tokens": 72, "rows": [source("others", 0.5), source("sums", 0.7)],
        "overall": source("overall", 0.6),
    }  # fmt: skip
    tables.write_json(run.evaluation(step, name) / "summary.json", summary)
    return summary


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


def adapter(base: Path, folder: Path, seed: int = 0, **changes: Any) -> Any:
    """A LoRA adapter with random weights, saved; the peft model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = get_peft_model(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            LoraConfig(**settings | {"init_lora_weights": False} | changes),
        )
    model.save_pretrained(folder)
    return model


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
        ),
    ]  # fmt: skip


def settings(*sets: str) -> list[str]:
    return [word for one in sets for word in ("--set", one)]
