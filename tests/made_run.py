"""Run directories of chosen content, for the tests of what reads them."""

from __future__ import annotations

import random
from pathlib import Path

from exgrpo_cli import tables
from exgrpo_cli.recipe import parse_recipe, to_toml
from exgrpo_cli.rundir import RunDir, step_name
from making import problem_row, rollout_row, text_ids, verdict_row, write, write_plan

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


def rollout_rows(step: int, texts: dict[str, list[str]]) -> list[dict]:
    """A text a sample; one that ends in … was cut off."""
    return [
        rollout_row(
            step, pid, sample, text, logprob=-0.5, mean_entropy=0.25, entropy_source="engine",
            entropies=[0.25] * len(text_ids(text)), seed=sample,
            finish_reason="length" if text.endswith("…") else "stop",
        )
        for pid, samples in texts.items()
        for sample, text in enumerate(samples)
    ]  # fmt: skip


def verdict_rows(rollouts: list[dict], gold: dict[str, str]) -> list[dict]:
    """Right where the text ends in the gold answer in a box."""
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
    return verdicts


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
    rollouts = rollout_rows(step, texts)
    verdicts = verdict_rows(rollouts, gold)
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
    stored = chosen | {"part": part, "correct": True}
    write("experience", run.experience, [r | stored for r in (rollouts[0], rollouts[3])])
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
