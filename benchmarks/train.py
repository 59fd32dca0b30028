"""One training step of `exgrpo train` beside TRL's GRPOTrainer: tokens a second, and memory.

    python benchmarks/train.py --setup     # TRL into build/trl-venv, once (torch and its friends)
    python benchmarks/train.py [--models 30m tiny] [--updates 2] [--questions 2] [--threads 1]

Both get the same random Qwen2 in float32, the same prompts and responses of unlike lengths (the
responses log-normal, as reasoning is: a few reach the limit), the same rewards and the same number
of optimizer updates, on the CPU, each in a process of its own. TRL generates nothing: its
`rollout_func` hands it the given tokens; its loss (`dr_grpo`, beta 0, rewards not scaled), its
log-probabilities and its optimizer are its own. `exgrpo train` runs as the stage that it is, from
files to the next policy.

Counted is the time of the updates, on both sides without start, reading and saving, and without
what TRL does around generation (decoding, rewards); beside it the processor time, which other work
on the machine disturbs less. TRL's micro-batches have `--rows` rows; ours have as many tokens as
those, padding counted, so there are fewer of them; a line says what comes of ours having as many
tokens as those without padding, so that there are as many. TRL needs no old log-probabilities
here: each of its updates has rollouts of its own. Ours come from `exgrpo score`, which runs before;
a line says what it costs to let `train` compute them. Memory is the process's highest resident
size, less that before the model was opened, less 16 bytes a parameter (weights, gradients, two
moments), all in float32: what is left is activations, logits and whatever else. TRL too computes
its logits in tiles, of up to 4,096 tokens and 32,768 words; on a GPU with Triton they are changed
in place, in bfloat16, so its memory there is nearer to ours than here.

First, both compute the gradient of one update: the numbers say how far they are apart.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIDES = Path(__file__).with_name("train_sides.py")
TRL, TRL_VENV = "trl==1.16.0", ROOT / "build/trl-venv"
DATASETS = "datasets==4.7.0"  # with 5.2.0 Dataset.from_dict ends with a PicklingError

MODELS: dict[str, dict[str, int]] = {
    "30m": {
        "vocab_size": 32_768,
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 1536,
    },
    "tiny": {  # as the demo's
        "vocab_size": 96,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 384,
    },
}
SAMPLES, LONGEST = 8, 512
PROMPT, MEDIAN, SIGMA = (32, 128), 150, 0.8  # tokens; of the responses' log-normal lengths


# --- the data -------------------------------------------------------------------------------------


def draw(vocabulary: int, questions: int, equal: int, longest: int, seed: int) -> list[Any]:
    """Groups of one prompt, with responses and rewards; the first ``equal`` ones all alike."""
    rng = random.Random(seed)
    groups = []
    for question in range(questions):
        prompt = [rng.randrange(4, vocabulary) for _ in range(rng.randint(*PROMPT))]
        lengths = [
            min(max(round(rng.lognormvariate(0, SIGMA) * MEDIAN), 8), longest)
            for _ in range(SAMPLES)
        ]
        rewards = [float(rng.random() < 0.5) for _ in range(SAMPLES)]
        if question < equal:
            rewards = [float(question % 2)] * SAMPLES
        elif len(set(rewards)) == 1:
            rewards[0] = 1 - rewards[0]
        groups.append(
            {
                "prompt": prompt,
                "responses": [[rng.randrange(4, vocabulary) for _ in range(n)] for n in lengths],
                "rewards": rewards,
            }
        )
    rng.shuffle(groups)
    return groups


def response_tokens(groups: list[Any]) -> int:
    return sum(len(response) for group in groups for response in group["responses"])


def budget(groups: list[Any], rows: int) -> int:
    """Tokens of TRL's micro-batches: all rows of an update are padded to the longest."""
    prompt = max(len(group["prompt"]) for group in groups)
    response = max(len(r) for group in groups for r in group["responses"])
    return rows * (prompt + response)


# --- a process each -------------------------------------------------------------------------------


def call(kind: str, job: dict[str, Any], python: str, threads: int, folder: Path) -> dict[str, Any]:
    """A child's result; what it prints goes nowhere unless it fails."""
    file, out = folder / "job.json", folder / "result.json"
    file.write_text(json.dumps(job | {"threads": threads}))
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [python, str(SIDES), kind, str(file), str(out)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{kind} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return dict(json.loads(out.read_text()))


# --- the comparison -------------------------------------------------------------------------------


def setup() -> None:
    """TRL in a virtual environment of its own, with the torch and transformers used here."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    pins = [f"{name}=={version.partition('+')[0]}" for name, version in versions.items()]
    subprocess.run([sys.executable, "-m", "venv", str(TRL_VENV)], check=True)
    install = [str(TRL_VENV / "bin/python"), "-m", "pip", "install", "-q"]
    subprocess.run([*install, *pins, TRL, DATASETS, "psutil"], check=True)


def compare(name: str, options: argparse.Namespace, trl: str | None, folder: Path) -> None:
    """One model's lines of the table."""
    config, model = MODELS[name], folder / name

    def child(kind: str, job: dict[str, Any]) -> dict[str, Any]:
        python = trl if kind == "trl" and trl else sys.executable
        return call(kind, job, python, options.threads, folder)

    parameters = child("model", {"config": config, "folder": str(model)})["parameters"]
    warm_up_model = folder / f"{name}-warm-up"
    child("model", {"config": MODELS["tiny"], "folder": str(warm_up_model)})
    questions = options.questions
    total = questions * options.updates
    job = {
        "model": str(model),
        "warm_up_model": str(warm_up_model),
        "warm_up": draw(MODELS["tiny"]["vocab_size"], 1, 0, 16, 1),
        "questions": questions,
        "rows": options.rows,
        "scores": True,
        "checkpointing": False,
        "gradient": "",
    }

    groups = draw(config["vocab_size"], 2, 0, LONGEST, 2)
    check = job | {"groups": groups, "questions": 2, "budget": budget(groups, options.rows)}
    print(f"\n{name}: {parameters / 1e6:.1f}M parameters, vocabulary {config['vocab_size']:,}")
    if trl:
        places = [str(folder / "ours.safetensors"), str(folder / "trl.safetensors")]
        one = child("ours", check | {"gradient": places[0]})
        other = child("trl", check | {"gradient": places[1]})
        apart = child("compare", {"gradients": places})["difference"]
        print(
            f"the gradient of an update of {2 * SAMPLES} rows differs by {apart:.1e} of its norm;"
            f" loss {one['loss']:.6f} (TRL {other['loss']:.6f}), norm {one['norm']:.6f}"
            f" (TRL {other['norm']:.6f})"
        )

    print(f"{'':42}{'tokens/s':>9}{'':8}{'processor':>10}{'':7}{'memory':>11}")
    share = round(total * options.equal)
    cases: list[tuple[str, int, dict[str, Any]]] = [
        ("no group of equal rewards", 0, {}),
        (f"{share} of {total} groups of equal rewards", share, {}),
        ("no group of equal rewards, checkpointing", 0, {"checkpointing": True}),
    ]
    for title, equal, changes in cases:
        groups = draw(config["vocab_size"], total, equal, LONGEST, 3)
        tokens = response_tokens(groups)
        case = job | changes | {"groups": groups, "budget": budget(groups, options.rows)}
        runs = {"exgrpo": child("ours", case)}
        if trl:
            runs["TRL"] = child("trl", case)
        if not equal and not changes:
            padded = len(groups) * SAMPLES * case["budget"] / options.rows
            prompts = sum(len(group["prompt"]) * SAMPLES for group in groups)
            print(
                f"  {len(groups) * SAMPLES} rows, {tokens} response tokens (mean"
                f" {tokens / len(groups) / SAMPLES:.0f}), {prompts} prompt tokens;"
                f" {padded / (tokens + prompts):.2f} times that with padding;"
                f" {case['budget']} tokens a micro-batch"
            )
            runs["exgrpo, old log-probabilities computed"] = child("ours", case | {"scores": False})
            real = round(case["budget"] * (tokens + prompts) / padded)
            runs["exgrpo, as many micro-batches as TRL"] = child("ours", case | {"budget": real})
        lines = {
            who: (
                tokens / run["seconds"],
                run["cpu_seconds"],
                (run["memory"] - 16 * parameters) / 2**20,
            )
            for who, run in runs.items()
        }
        for who, (speed, seconds, memory) in lines.items():
            ratios = ["", "", ""]
            if trl and who != "TRL":
                their_speed, their_seconds, their_memory = lines["TRL"]
                ratios = [
                    f"{speed / their_speed:.2f}x",
                    f"{seconds / their_seconds:.2f}x",
                    f"{memory / their_memory:.2f}x",
                ]
            print(
                f"{title if who == 'exgrpo' else '':42}{speed:>9.0f}{ratios[0]:>8}"
                f"{seconds:>8.1f} s{ratios[1]:>7}{memory:>7.0f} MiB{ratios[2]:>7}  {who}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--setup", action="store_true", help=f"install {TRL} into {TRL_VENV}")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--updates", type=int, default=2, help="optimizer updates of the step")
    parser.add_argument("--questions", type=int, default=2, help=f"an update, {SAMPLES} rows each")
    parser.add_argument("--rows", type=int, default=4, help="rows of TRL's micro-batch")
    parser.add_argument("--equal", type=float, default=0.25, help="share of groups alike")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.setup:
        setup()
        return
    python = TRL_VENV / "bin/python"
    trl = str(python) if python.exists() else None
    if trl is None:
        print("TRL is not installed (python benchmarks/train.py --setup): exgrpo alone")
    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(f"float32, CPU, {options.threads} threads, {load}{f'; {TRL}' if trl else ''}")
    with tempfile.TemporaryDirectory() as name:
        for model in options.models:
            compare(model, options, trl, Path(name))


if __name__ == "__main__":
    main()
