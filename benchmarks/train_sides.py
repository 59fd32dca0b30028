"""What benchmarks/train.py starts in processes of their own: a random model, the updates of either
side (TRL's in its own virtual environment), the difference of two gradients."""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from train import LONGEST, SAMPLES

LEARNING_RATE = 1e-8  # nothing moves: every update sees the same model


def make_model(config: dict[str, int], folder: Path) -> int:
    """A random Qwen2 with a tokenizer that can decode its ids; its parameters."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(**config, max_position_embeddings=1024, tie_word_embeddings=True)
    )
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(config["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w2")),
        pad_token="w0",
        eos_token="w1",
        unk_token="w2",
    )
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def write_tables(groups: list[Any], policy: str, folder: Path) -> None:
    """The groups as rollouts of a policy, and their verdicts."""
    from exgrpo_cli import tables

    rollouts, verdicts = [], []
    for question, group in enumerate(groups):
        rows = zip(group["responses"], group["rewards"], strict=True)
        for sample, (response, reward) in enumerate(rows):
            rollout_id = f"s00000/q{question:04d}/{sample:02d}"
            zeros = [0.0] * len(response)
            rollouts.append(
                {
                    "rollout_id": rollout_id, "step": 0, "problem_id": f"q{question:04d}",
                    "sample": sample, "role": "fresh", "policy": policy,
                    "prompt_ids": group["prompt"], "token_ids": response, "text": "",
                    "logprobs": zeros, "mean_entropy": 0.0, "entropy_source": "logprobs",
                    "mean_logprob": 0.0, "tokens": len(response), "token_hash": "",
                    "finish_reason": "stop", "seed": 0,
                }
            )  # fmt: skip
            verdicts.append(
                {
                    "rollout_id": rollout_id, "reward": reward, "correct": reward > 0,
                    "status": "ok", "verifier": "exact", "seconds": 0.0,
                }
            )  # fmt: skip
    part = tables.part_name(0, 1)
    tables.write_table("rollouts", tables.frame("rollouts", rollouts), folder / "rollouts" / part)
    tables.write_table("verdicts", tables.frame("verdicts", verdicts), folder / "verdicts" / part)


def settled_memory() -> int:
    """Bytes resident now, after what was freed has been given back."""
    import psutil

    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def clocks() -> tuple[float, float]:
    """Seconds now: of the wall, and of this process on the processor."""
    return time.perf_counter(), time.process_time()


def peak_memory() -> int:
    """The most that was ever resident, bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def run_ours(job: dict[str, Any]) -> dict[str, Any]:
    """The train stage on a job's groups; before it, its scores."""
    import torch

    torch.set_num_threads(job["threads"])
    from safetensors.torch import load_file, save_file

    from exgrpo_cli.recipe import parse_recipe
    from exgrpo_cli.stages.score import score
    from exgrpo_cli.stages.train import train
    from exgrpo_cli.step import Step
    from exgrpo_cli.training import update

    run_updates, spent = update.run_updates, [0.0, 0.0]

    def timed(*arguments: Any, **options: Any) -> Any:
        started = clocks()
        found = run_updates(*arguments, **options)
        spent[:] = [b - a for a, b in zip(started, clocks(), strict=True)]
        return found

    update.run_updates = timed

    def step(groups: list[Any], model: str, questions: int, folder: Path) -> dict[str, Any]:
        recipe = parse_recipe(
            {
                "model": {"path": model},
                "rollout": {"samples": SAMPLES, "max_new_tokens": LONGEST},
                "score": {"device": "cpu", "tokens_per_batch": job["budget"]},
                "train": {
                    "learning_rate": LEARNING_RATE,
                    "minibatch_questions": questions,
                    "tokens_per_microbatch": job["budget"],
                    "gradient_checkpointing": job["checkpointing"],
                    "device": "cpu",
                },
                "objective": {"entropy_bonus": 0.0, "clip": "on"},
            },
            "benchmark",
        )
        write_tables(groups, model, folder)
        of = Step.of(
            None,
            policy=model,
            rollouts=folder / "rollouts",
            verdicts=folder / "verdicts",
            scores=folder / "scores" if job["scores"] else None,
            next_policy=folder / "policy",
            next_trainer=folder / "trainer",
        )
        if job["scores"]:
            score(of, recipe)
        return dict(train(of, recipe).metrics)

    with tempfile.TemporaryDirectory() as name:
        step(job["warm_up"], job["warm_up_model"], 1, Path(name) / "warm-up")
        before = settled_memory()
        metrics = step(job["groups"], job["model"], job["questions"], Path(name) / "step")
        if job["gradient"]:
            state = load_file(Path(name) / "step/trainer/optimizer.safetensors")
            moments = {k.removesuffix("/exp_avg"): v for k, v in state.items() if "exp_avg" in k}
            save_file({k: v for k, v in moments.items() if "/" not in k}, job["gradient"])
    return {
        "seconds": spent[0],
        "cpu_seconds": spent[1],
        "memory": metrics["train/peak_memory_mb"] * 2**20 - before,
        "loss": metrics["train/loss"],
        "norm": metrics["train/grad_norm"],
    }


def run_trl(job: dict[str, Any]) -> dict[str, Any]:
    """GRPOTrainer on a job's groups."""
    import torch

    torch.set_num_threads(job["threads"])
    from datasets import Dataset
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Timed(GRPOTrainer):  # type: ignore[misc]
        """Keeps the time of what surrounds generation, so that it can be left out."""

        around = (0.0, 0.0)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            started = clocks()
            found = super()._generate_and_score_completions(inputs)
            (wall, cpu), ended = self.around, clocks()
            self.around = wall + ended[0] - started[0], cpu + ended[1] - started[1]
            return found

    class Clock(TrainerCallback):  # type: ignore[misc]
        begun = (0.0, 0.0)
        ended = (0.0, 0.0)
        peak = 0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not any(self.begun):
                self.begun = clocks()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ended = clocks()
            self.peak = peak_memory()

    def step(groups: list[Any], model: str, questions: int, folder: str) -> tuple[Any, Clock]:
        taken: dict[str, int] = {}

        def rollouts(prompts: list[str], _: Any) -> dict[str, Any]:
            """The given responses, each question's in turn."""
            ids, responses, rewards = [], [], []
            for prompt in prompts:
                group, sample = groups[int(prompt)], taken.get(prompt, 0)
                taken[prompt] = sample + 1
                ids.append(group["prompt"])
                responses.append(group["responses"][sample])
                rewards.append(group["rewards"][sample])
            return {
                "prompt_ids": ids,
                "completion_ids": responses,
                "logprobs": None,
                "given": rewards,
            }

        def reward(given: list[float], **_: Any) -> list[float]:
            return given

        clock = Clock()
        rows = min(job["rows"], SAMPLES)
        trainer = Timed(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
            reward_funcs=reward,
            rollout_func=rollouts,
            train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(len(groups))]}),
            callbacks=[clock],
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                max_steps=len(groups) // questions,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=questions * SAMPLES // rows,
                num_generations=SAMPLES,
                max_completion_length=LONGEST,
                loss_type="dr_grpo",
                beta=0.0,
                scale_rewards="none",
                shuffle_dataset=False,
                gradient_checkpointing=job["checkpointing"],
                save_strategy="no",
                logging_steps=1,
                report_to="none",
                disable_tqdm=True,
            ),
        )
        trainer.train()
        return trainer, clock

    with tempfile.TemporaryDirectory() as name:
        step(job["warm_up"], job["warm_up_model"], 1, name)
        before = settled_memory()
        trainer, clock = step(job["groups"], job["model"], job["questions"], name)
    if job["gradient"]:
        names = {id(p): n for n, p in trainer.model.named_parameters()}
        state = trainer.optimizer.state
        save_file({names[id(p)]: s["exp_avg"] for p, s in state.items()}, job["gradient"])
    parts = zip(clock.begun, clock.ended, trainer.around, strict=True)
    seconds, cpu_seconds = (end - begun - around for begun, end, around in parts)
    history = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "memory": clock.peak - before,
        "loss": sum(entry["loss"] for entry in history) / len(history),
        "norm": sum(entry["grad_norm"] for entry in history) / len(history),
    }


def run_model(job: dict[str, Any]) -> dict[str, Any]:
    return {"parameters": make_model(job["config"], Path(job["folder"]))}


def run_compare(job: dict[str, Any]) -> dict[str, Any]:
    """Two gradients: how far apart, in parts of the second one's norm."""
    import torch
    from safetensors.torch import load_file

    ours, theirs = (load_file(name) for name in job["gradients"])
    if ours.keys() != theirs.keys():
        raise SystemExit(f"gradients of other weights: {ours.keys() ^ theirs.keys()}")
    difference = sum(
        float((ours[k].double() - v.double()).square().sum()) for k, v in theirs.items()
    )
    size = sum(float(torch.linalg.vector_norm(v.double())) ** 2 for v in theirs.values())
    return {"difference": (difference / size) ** 0.5}


CHILDREN = {"ours": run_ours, "trl": run_trl, "model": run_model, "compare": run_compare}


if __name__ == "__main__":
    kind, job, out = sys.argv[1:]
    Path(out).write_text(json.dumps(CHILDREN[kind](json.loads(Path(job).read_text()))))
