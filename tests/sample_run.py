"""Run directories of chosen content, for the tests of what reads them."""

import random
from pathlib import Path

from exgrpo_cli import tables
from exgrpo_cli.recipe import parse_recipe, to_toml
from exgrpo_cli.rundir import RunDir, step_name

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
            metrics = {"eval/heldout/pass@1": value, "eval/heldout/pass@4": value + 0.2}
            metrics |= {
                "eval/heldout/pass@1_low": value - 0.04,
                "eval/heldout/pass@1_high": value + 0.05,
            }
            run.record(step, "evaluate-heldout", metrics)
        if step == steps:
            break
        started = step >= 3
        curate = {
            "reward/mean": rate,
            "reward/fresh_mean": rate,
            "success_rate": rate,
            "rollout/tokens_mean": 30 + 12 * share + rng.uniform(-2, 2),
            "rollout/truncated_share": 0.06 * (1 - share),
            "rollout/no_answer_share": 0.03 * (1 - share),
            "pool/questions": 10 * step,
            "pool/trajectories": 24 * step,
            "pool/bucket_easy": 4 * step,
            "pool/bucket_medium": 4 * step + 3,
            "pool/bucket_hard": 2 * step + 6,
            "pool/retired": step * step // 12,
            "pool/age_mean": step / 2,
            "replay/started": float(started),
            "plan/fresh": 16 if started else 32,
            "plan/replay": 16 if started else 0,
        }
        if started:
            curate |= {
                "reward/replay_mean": rate - 0.1,
                "replay/questions": 16,
                "replay/age_mean": step / 3,
                "replay/mean_entropy": 0.2 - 0.1 * share,
            }
        run.record(step, "curate", curate)
        train = {
            "train/loss": rng.uniform(-0.01, 0.01),
            "train/on_policy_loss": rng.uniform(-0.01, 0.01),
            "train/ratio_mean": 1 + rng.uniform(-0.001, 0.001),
            "train/clip_fraction": rng.uniform(0, 0.002),
            "train/entropy": 0.5 - 0.3 * share,
            "train/grad_norm": rng.uniform(0.2, 1.4),
        }
        if started:
            train |= {"train/off_policy_loss": -0.05, "train/shaped_ratio_mean": 0.9}
        run.record(step, "train", train)
        for stage, most in (("rollout", 1.2), ("verify", 0.2), ("score", 0.3), ("curate", 0.1)):
            run.record(step, f"time-{stage}", {f"time/{stage}": rng.uniform(0.7, 1) * most})
        run.record(step, "time-train", {"time/train": rng.uniform(0.8, 1.2)})


def rollout_rows(step: int, texts: dict[str, list[str]]) -> list[dict]:
    """Rows of the rollouts table: a text a sample; one that ends in … was cut off."""
    rows = []
    for problem_id, samples in texts.items():
        for sample, text in enumerate(samples):
            ids = [ord(c) % 100 for c in text] or [1]
            rows.append(
                {
                    "rollout_id": f"s{step:05d}/{problem_id}/{sample:02d}",
                    "step": step,
                    "problem_id": problem_id,
                    "sample": sample,
                    "role": "fresh",
                    "policy": step_name(step),
                    "prompt_ids": [1, 2, 3],
                    "token_ids": ids,
                    "text": text,
                    "logprobs": [-0.5] * len(ids),
                    "entropies": [0.25] * len(ids),
                    "mean_entropy": 0.25,
                    "entropy_source": "engine",
                    "mean_logprob": -0.5,
                    "tokens": len(ids),
                    "token_hash": tables.token_hash(ids),
                    "finish_reason": "length" if text.endswith("…") else "stop",
                    "seed": sample,
                }
            )
    return rows


def verdict_rows(rollouts: list[dict], gold: dict[str, str]) -> list[dict]:
    """Rows of the verdicts table: right where the text ends in the gold answer in a box."""
    rows = []
    for row in rollouts:
        boxed = "\\boxed{" in row["text"]
        right = row["text"].endswith(f"\\boxed{{{gold[row['problem_id']]}}}")
        rows.append(
            {
                "rollout_id": row["rollout_id"],
                "reward": float(right),
                "correct": right,
                "extracted": row["text"].split("\\boxed{")[-1].rstrip("}") if boxed else None,
                "status": "ok" if boxed else "no_answer",
                "verifier": "math",
                "seconds": 0.01,
            }
        )
    return rows


def make_tables(run: RunDir, step: int, hostile: str = "") -> None:
    """Problems, and one step's plan, rollouts, verdicts, curated, experience and questions."""
    gold = {"add<1>": "12", "mul": "8", "sub": "3"}
    questions = {"add<1>": f"7+5= {hostile}", "mul": "2*4=", "sub": "9-6="}
    write(
        "problems",
        run.problems,
        [
            {
                "problem_id": pid,
                "prompt": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": questions[pid]},
                ],
                "answer": gold[pid],
                "verifier": "math",
                "source": "sums" if pid == "add<1>" else "others",
            }
            for pid in gold
        ],
    )
    texts = {
        "add<1>": ["7+5=12; \\boxed{12}", f"{hostile} \\boxed{{13}}", "I think…"],
        "mul": ["2*4=8; \\boxed{8}", "2*4=6; \\boxed{6}", "no idea"],
    }
    rollouts = rollout_rows(step, texts)
    half = len(rollouts) // 2
    for i, rows in enumerate((rollouts[:half], rollouts[half:])):
        write("rollouts", run.rollouts(step) / tables.part_name(i, 2), rows)
        write("verdicts", run.verdicts(step) / tables.part_name(i, 2), verdict_rows(rows, gold))
    write(
        "plan",
        run.plan(step),
        [{"step": step, "problem_id": p, "role": "fresh", "samples": 3} for p in texts],
    )
    chosen = rollouts[0]
    write(
        "curated",
        run.curated(step),
        [
            {
                **{c: chosen[c] for c in ("problem_id", "rollout_id", "prompt_ids", "token_ids")},
                "logprobs": chosen["logprobs"],
                "step": step,
                "collected_step": step,
                "logprob_source": "score",
                "reward": 1.0,
                "mean_entropy": 0.25,
                "entropy_source": "score",
                "entropy_policy": step_name(step),
                "bucket": "medium",
                "successes": 1,
                "attempts": 3,
                "rank": 1,
                "candidates": 2,
            }
        ],
    )
    write(
        "experience",
        run.experience,
        [
            {
                **row,
                "reward": 1.0,
                "correct": True,
                "entropy_policy": step_name(step),
                "part": f"rollouts/{step_name(step)}/{tables.part_name(0, 2)}",
            }
            for row in (rollouts[0], rollouts[3])
        ],
    )
    write(
        "questions",
        run.questions,
        [
            {
                "problem_id": pid,
                "successes": k,
                "attempts": 3,
                "bucket": bucket,
                "last_step": step,
                "times_replayed": 0,
                "retired_step": retired,
                "epoch": 0,
            }
            for pid, k, bucket, retired in (
                ("add<1>", 1, "medium", None),
                ("mul", 1, "hard", None),
                ("sub", 3, "easy", step),
            )
        ],
    )


def write(table: str, path: Path, rows: list[dict]) -> None:
    """Rows as a table file."""
    tables.write_table(table, tables.frame(table, rows), path)


def make_run(root: Path, steps: int, hostile: str = "") -> RunDir:
    """A whole run of so many trained steps; the tables are of its last one."""
    run = RunDir(root)
    recipe = parse_recipe(
        {
            "model": {"path": "models/tiny"},
            "loop": {"steps": steps + 2},
            "train": {"learning_rate": 1e-4},
        },
        "test",
    )
    tables.write_text(run.recipe, to_toml(recipe))
    make_metrics(run, steps)
    make_tables(run, steps - 1, hostile)
    for step in range(1, steps + 1):
        run.policy(step).mkdir(parents=True)
    make_evaluation(run, steps)
    return run


def make_evaluation(run: RunDir, step: int, name: str = "heldout") -> dict:
    """An evaluation's summary of two sources, in its place."""

    def row(source: str, value: float) -> dict:
        return {
            "source": source,
            "problems": 100,
            "samples": 400,
            "pass@1": value,
            "low": value - 0.04,
            "high": value + 0.05,
            "pass@4": value + 0.2,
            "pass@4_low": value + 0.15,
            "pass@4_high": value + 0.25,
            "truncated": 0.01,
            "tokens": 31.5,
        }

    summary = {
        "policy": step_name(step),
        "step": step,
        "samples": 4,
        "temperature": 0.6,
        "max_new_tokens": 72,
        "rows": [row("others", 0.5), row("sums", 0.7)],
        "overall": row("overall", 0.6),
    }
    tables.write_json(run.evaluation(step, name) / "summary.json", summary)
    return summary
