"""The files of small training steps, and training from them."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from exgrpo_cli import tables
from exgrpo_cli.models import load_model
from exgrpo_cli.progress import quiet
from exgrpo_cli.recipe import Recipe, parse_recipe
from exgrpo_cli.stages import train as stage
from exgrpo_cli.step import Step
from exgrpo_cli.training.batch import Batch
from exgrpo_cli.training.logprobs import score_sequences
from making import qwen

VOCABULARY, SAMPLES, LONGEST = 48, 4, 10


def tiny(dropout=0.0, layers=1):
    return qwen(num_hidden_layers=layers, attention_dropout=dropout)


def recipe(**sections) -> Recipe:
    values = {
        "seed": 3,
        "model": {"path": "unused"},
        "rollout": {"samples": SAMPLES, "max_new_tokens": LONGEST},
        "train": {
            "learning_rate": 0.01, "minibatch_questions": 100, "tokens_per_microbatch": 60,
            "device": "cpu",
        },
        "objective": {"entropy_bonus": 0.0},
    }  # fmt: skip
    for name, changes in sections.items():
        values[name] = values.get(name, {}) | changes
    return parse_recipe(values, "test")


def make_step(folder: Path, policy, step=0, *, replay=True, scores=True, seed=0, noise=0.0):
    """Files of one step: three fresh questions, two replay ones, one of them without a curated
    trajectory; question q0 is fresh and replayed at once. Returns train's arguments for them."""
    generator = torch.Generator().manual_seed(100 * seed + step)

    def draw(low, high):
        size = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(0, VOCABULARY, (size,), generator=generator).tolist()

    plan = [("q0", "fresh"), ("q1", "fresh"), ("q2", "fresh")]
    plan += [("q0", "replay"), ("q3", "replay")] if replay else []
    rows = []
    for problem, role in plan:
        prompt = draw(2, 6)
        for sample in range(int(role == "replay"), SAMPLES):
            rows.append(
                {
                    "rollout_id": f"s{step:05d}/{problem}-{role}/{sample:02d}",
                    "step": step, "problem_id": problem, "sample": sample, "role": role,
                    "policy": f"step-{step:05d}", "prompt_ids": prompt,
                    "token_ids": draw(1, LONGEST), "text": "", "finish_reason": "stop", "seed": 0,
                    "entropy_source": "engine", "mean_entropy": 1.0, "token_hash": "",
                }
            )  # fmt: skip
    exact = score_sequences(
        policy, [r["prompt_ids"] for r in rows], [r["token_ids"] for r in rows], 1.0, 500
    )
    for row, (logprobs, entropies) in zip(rows, exact, strict=True):
        shift = noise * torch.randn(len(logprobs), generator=generator)
        row |= {"logprobs": (logprobs + shift).tolist(), "entropies": entropies.tolist()}
        row |= {"mean_logprob": float(logprobs.mean()), "tokens": len(logprobs)}
    rewards = [float(torch.rand(1, generator=generator) < 0.5) for _ in rows]
    verdicts = [
        {"rollout_id": row["rollout_id"], "reward": reward, "correct": reward > 0, "status": "ok",
         "verifier": "math", "seconds": 0.0}
        for row, reward in zip(rows, rewards, strict=True)
    ]  # fmt: skip
    half = len(rows) // 2
    for index, part in enumerate((rows[:half], rows[half:])):
        name = tables.part_name(index, 2)
        tables.write_table("rollouts", tables.frame("rollouts", part), folder / "rollouts" / name)
    # Verdicts in another order than the rollouts.
    tables.write_table(
        "verdicts", tables.frame("verdicts", verdicts[::-1]), folder / "verdicts.parquet"
    )
    if scores:
        scored = [
            {"rollout_id": row["rollout_id"], "policy": row["policy"], "step": step,
             "logprobs": logprobs.tolist(), "entropies": entropies.tolist(),
             "mean_entropy": 1.0, "mean_logprob": -1.0}
            for row, (logprobs, entropies) in zip(rows, exact, strict=True)
        ]  # fmt: skip
        file = folder / "scores" / tables.part_name(0, 1)
        tables.write_table("scores", tables.frame("scores", scored), file)
        # Candidates' scores lie in the same folder; they are not even read here.
        (folder / "scores" / tables.part_name(0, 1, prefix="replay")).write_bytes(b"not Parquet")
    past = draw(3, LONGEST)
    replay_prompt = rows[-1]["prompt_ids"]
    curated = {
        "step": step, "problem_id": "q0", "rollout_id": "s00000/past/01", "collected_step": 0,
        "prompt_ids": replay_prompt,
        "token_ids": past, "logprobs": (-3 * torch.rand(len(past), generator=generator)).tolist(),
        "logprob_source": "score", "reward": 1.0, "mean_entropy": 1.0, "entropy_source": "score",
        "entropy_policy": "", "bucket": "hard", "successes": 1, "attempts": SAMPLES, "rank": 1,
        "candidates": 1,
    }  # fmt: skip
    file = folder / "curated.parquet"
    tables.write_table("curated", tables.frame("curated", [curated] if replay else []), file)
    return {
        "rollouts": folder / "rollouts",
        "verdicts": folder / "verdicts.parquet",
        "scores": folder / "scores" if scores else None,
        "curated": file,
        "step": step,
        "replay_started": replay,
        "trainer": None,
        "out_policy": folder / "policy" / f"step-{step + 1:05d}",
        "out_trainer": folder / "trainer" / f"step-{step + 1:05d}",
    }


def step_of(*, policy=None, step=0, out_policy=None, out_trainer=None, **files) -> Step:
    """A step of loose files, by the names of :func:`make_step`."""
    return Step.of(None, step, policy=policy, next_policy=out_policy, next_trainer=out_trainer,
                   **files)  # fmt: skip


def train(*, recipe, replay_started=True, curated=None, force=False, log=quiet, **files) -> dict:
    """The stage over loose files; its metrics, and whether the step was done before."""
    step = step_of(**files, curated=curated if replay_started else None)
    result = stage.train(step, recipe, force=force, log=log)
    return {**result.metrics, **({"skipped": True} if result.skipped else {})}


def read_groups(arguments, given, **changes):
    """The batch of files as :func:`make_step` names them."""
    kinds = ("rollouts", "verdicts", "scores", "curated", "step")
    return Batch.read(step_of(**{k: (arguments | changes)[k] for k in kinds})).groups(given)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def run(arguments, model, given_recipe=None, **changes):
    options = {"policy": str(model), "recipe": given_recipe or recipe()} | arguments | changes
    return train(**options)


def three_steps(root: Path, model_folder, given, scores=True):
    """Three steps of the stage, each from files."""
    policy, trainer = str(model_folder), None
    arguments = []
    for step in range(3):
        model = load_model(policy, given.model, torch.device("cpu"), torch.float32)
        files = make_step(root / str(step), model, step=step, scores=scores)
        arguments.append(files | {"policy": policy, "trainer": trainer})
        train(**arguments[-1], recipe=given)
        policy, trainer = str(files["out_policy"]), files["out_trainer"]
    return arguments
