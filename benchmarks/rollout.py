"""The rollout stage against bare ``LLM.generate``, and how well entropies are estimated.

    python benchmarks/rollout.py speed      # tokens/s, with a random model made on the spot
    python benchmarks/rollout.py entropy    # error of the estimates; policy build/demo-model
    python benchmarks/rollout.py policy build/scaled     # only the random model

``speed`` starts vLLM once. Then, by turns, `rollout` samples all questions into Parquet and
``LLM.generate`` samples the same prompts with the same seeds and parameters; its outputs are
dropped. The prefix cache is emptied before each turn. Engine start-up is outside of both and
reported.

``entropy`` samples from a policy with vLLM, asking for the most probable tokens, and compares each
estimate of a response's mean entropy with the exact one of a forward pass.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def make_policy(folder: Path, vocabulary: int, width: int, layers: int, length: int) -> None:
    """A random Qwen2 with a byte-level tokenizer; responses have ``length`` tokens on average."""
    import random

    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        GenerationConfig,
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    letters = pre_tokenizers.ByteLevel.alphabet()
    words = [*sorted(letters)]
    draw = random.Random(0)
    seen = set(words)
    while len(words) < vocabulary - 1:
        word = "".join(draw.choices("abcdefghijklmnopqrstuvwxyzĠ", k=draw.randint(2, 7)))
        if word not in seen:
            seen.add(word)
            words.append(word)
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=max(width // 256, 1),
            intermediate_size=4 * width,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=0,
        )
    )
    ends = list(range(vocabulary - max(vocabulary // length, 1), vocabulary))
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = sum(p.numel() for p in model.parameters())
    print(f"policy: a random Qwen2 of {size / 1e6:.1f}M parameters, vocabulary {len(tokenizer)}")


def make_problems(path: Path, questions: int, characters: int) -> None:
    """Prompts of random letters, a token each; all of one run begin alike."""
    import random

    from exgrpo_cli import tables

    draw = random.Random(1)
    rows = [
        {
            "problem_id": f"q{i:05d}",
            "prompt": [
                {
                    "role": "user",
                    "content": "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=characters)),
                }
            ],
            "answer": "0",
            "verifier": "exact",
            "source": "benchmark",
        }
        for i in range(questions)
    ]
    tables.write_table("problems", tables.frame("problems", rows), path)


def speed(options: argparse.Namespace) -> None:
    """tokens/s of the stage and of bare vLLM."""
    from exgrpo_cli import tables
    from exgrpo_cli.engines import Request
    from exgrpo_cli.engines.vllm import VllmEngine
    from exgrpo_cli.models import load_tokenizer
    from exgrpo_cli.recipe import load_recipe
    from exgrpo_cli.stages.rollout import rollout
    from exgrpo_cli.stages.sampling import encode_prompts, training_sampling
    from exgrpo_cli.step import Step

    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        policy = options.policy
        if policy is None:
            policy = str(root / "policy")
            make_policy(
                Path(policy), options.vocabulary, options.width, options.layers, options.length
            )
        make_problems(root / "problems.parquet", options.questions, options.prompt)
        recipe = load_recipe(
            None,
            [
                f"rollout.samples={options.samples}",
                f"rollout.max_prompt_tokens={options.prompt}",
                f"rollout.max_new_tokens={4 * options.length}",
                *options.set,
            ],
            {"rollout.engine": "vllm", "model.path": policy},
        )
        began = time.perf_counter()
        engine = VllmEngine(recipe, policy)
        print(f"engine start-up {time.perf_counter() - began:.1f} s (outside of all figures below)")

        problems = tables.read_table(
            "problems", root / "problems.parquet", ["problem_id", "prompt"]
        )
        tokenizer = load_tokenizer(policy, recipe.model)
        prompts = encode_prompts(dict(problems.iter_rows()), tokenizer, recipe)
        sampling = training_sampling(recipe)
        requests = [
            Request(0, ids, tables.row_seed(recipe.seed, 0, name, sample))
            for name, ids in prompts.items()
            for sample in range(recipe.rollout.samples)
        ]
        turn = 0

        def stage() -> int:
            nonlocal turn
            turn += 1
            step = Step.of(
                None,
                policy=policy,
                problems=root / "problems.parquet",
                rollouts=root / f"rollouts-{turn}",
            )
            return int(rollout(step, recipe, engine=lambda _: engine).metrics["tokens"])

        def bare(**changes: Any) -> int:
            parameters = [engine.parameters(request, sampling) for request in requests]
            for one in parameters:
                for name, value in changes.items():
                    setattr(one, name, value)
            outputs = engine.llm.generate(
                [{"prompt_token_ids": request.prompt_ids} for request in requests],
                parameters,
                use_tqdm=False,
            )
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        ways: dict[str, Callable[[], int]] = {
            "exgrpo rollout": stage,
            "LLM.generate, the same": bare,
            "LLM.generate, top 8": lambda: bare(logprobs=8),
            "LLM.generate, no seeds": lambda: bare(seed=None),
            "LLM.generate, no seeds, no log-probs": lambda: bare(seed=None, logprobs=None),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        used: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(options.rounds + 1):
            for name, way in sorted(ways.items(), reverse=number % 2 == 1):  # to and fro
                engine.llm.reset_prefix_cache()
                began, cpu = time.perf_counter(), time.process_time()
                tokens = way()
                seconds = time.perf_counter() - began
                if number == 0 and way in (stage, bare):
                    print(f"  warm-up: {name}: {len(requests)} rows, {tokens} tokens")
                if number:
                    rates[name].append(tokens / seconds)
                    used[name].append((time.process_time() - cpu) / tokens * 1e6)
        engine.close()
        reference = rates["LLM.generate, the same"]
        print(f"medians of {options.rounds} turns; load of the machine {os.getloadavg()[0]:.1f}")
        for name in ways:
            middle = statistics.median(rates[name])
            ratio = statistics.median(a / b for a, b in zip(rates[name], reference, strict=True))
            print(
                f"{name:38}{middle:7.0f} tokens/s {ratio:5.2f}"
                f"  ({min(rates[name]):.0f} to {max(rates[name]):.0f};"
                f" this process {statistics.median(used[name]):.1f} µs a token)"
            )


def entropy(options: argparse.Namespace) -> None:
    """Errors of the estimates of a response's mean entropy."""
    import numpy as np
    import torch

    from exgrpo_cli.engines import Completion, Request, Sampling
    from exgrpo_cli.engines.vllm import VllmEngine
    from exgrpo_cli.models import load_model, load_tokenizer
    from exgrpo_cli.problems import import_problems
    from exgrpo_cli.recipe import load_recipe
    from exgrpo_cli.stages.sampling import Asked, completion_row, encode_prompts
    from exgrpo_cli.step import Step
    from exgrpo_cli.training.logprobs import score_sequences

    recipe = load_recipe(
        None,
        [f"rollout.max_new_tokens={options.tokens}", "rollout.max_prompt_tokens=128"],
        {"rollout.engine": "vllm", "model.path": options.policy},
    )
    problems = import_problems(Path(options.problems), limit=options.questions).frame
    tokenizer = load_tokenizer(options.policy, recipe.model)
    chats = dict(problems.select("problem_id", "prompt").iter_rows())
    prompts = encode_prompts(chats, tokenizer, recipe)
    requests = [
        Request(i, ids, i)
        for i, ids in enumerate(ids for ids in prompts.values() for _ in range(options.samples))
    ]
    engine = VllmEngine(recipe, options.policy)

    def sample(k: int) -> list[Completion]:
        sampling = Sampling(options.temperature, options.tokens, entropy_top_k=k)
        return sorted(engine.generate(requests, sampling), key=lambda c: c.index)

    def means(completions: list[Completion]) -> np.ndarray:
        step, asked = Step(model=options.policy), Asked("", 0)
        rows = [completion_row(step, asked, requests[c.index], c, tokenizer) for c in completions]
        return np.array([row["mean_entropy"] for row in rows])

    first = sample(0)
    estimates = {"sampled tokens": means(first)}
    for k in options.top_k:
        completions = sample(k)
        assert [c.token_ids for c in completions] == [c.token_ids for c in first]
        estimates[f"top {k} and tail"] = means(completions)
    engine.close()
    model = load_model(options.policy, recipe.model, torch.device("cpu"), torch.float32)
    scored = score_sequences(
        model,
        [request.prompt_ids for request in requests],
        [completion.token_ids for completion in first],
        options.temperature,
        16384,
    )
    exact = np.array([float(entropies.double().mean()) for _, entropies in scored])
    lengths = [len(completion.token_ids) for completion in first]
    print(
        f"{len(first)} responses of {np.mean(lengths):.0f} tokens on average, vocabulary"
        f" {model.config.vocab_size}; exact mean entropy {exact.mean():.4f} nats, between"
        f" {exact.min():.4f} and {exact.max():.4f}"
    )
    lowest = f"lowest of {options.samples}"
    print(f"{'estimate':20}{'mean error':>12}{'abs. error':>12}{'rank corr.':>12}{lowest:>14}")
    groups = exact.reshape(-1, options.samples).argmin(axis=1)
    for name, values in estimates.items():
        error = values - exact
        chosen = values.reshape(-1, options.samples).argmin(axis=1)
        print(
            f"{name:20}{error.mean():12.5f}{np.abs(error).mean():12.5f}"
            f"{rank_correlation(values, exact):12.4f}{(chosen == groups).mean():14.1%}"
        )


def rank_correlation(a: Any, b: Any) -> float:
    """Spearman's; ties in any order."""
    import numpy as np

    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(ranks)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("speed", help="tokens/s against bare LLM.generate")
    one.add_argument("--policy", help="a model folder; default: a random one")
    one.add_argument("--questions", type=int, default=16)
    one.add_argument("--samples", type=int, default=8)
    one.add_argument("--prompt", type=int, default=128, help="tokens")
    one.add_argument("--rounds", type=int, default=3)
    one.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    one.set_defaults(run=speed)
    two = kinds.add_parser("entropy", help="error of the estimated entropies")
    two.add_argument("--policy", default="build/demo-model", help="a model folder")
    two.add_argument("--problems", default="data/arithmetic/heldout.jsonl")
    two.add_argument("--questions", type=int, default=64)
    two.add_argument("--samples", type=int, default=8)
    two.add_argument("--tokens", type=int, default=72, help="maximum response length")
    two.add_argument("--temperature", type=float, default=1.0)
    two.add_argument("--top-k", type=int, nargs="+", default=[2, 4, 8, 20])
    two.set_defaults(run=entropy)
    three = kinds.add_parser("policy", help="write the random model of `speed`")
    three.add_argument("out", type=Path)
    for kind in (one, three):
        kind.add_argument("--length", type=int, default=128, help="mean tokens of a response")
        kind.add_argument("--vocabulary", type=int, default=8192)
        kind.add_argument("--width", type=int, default=256)
        kind.add_argument("--layers", type=int, default=4)
    three.set_defaults(run=lambda o: make_policy(o.out, o.vocabulary, o.width, o.layers, o.length))
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
