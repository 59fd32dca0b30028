"""How large Adam's sqrt(v) is on a real model, and so what train.adam_eps should be.

    python benchmarks/adam_eps.py MODEL [--questions 4] [--samples 4] [--tokens 64] [--updates 4]

AdamW divides by sqrt(v) + eps, so eps must be far below sqrt(v), which falls with the loss's scale:
here the loss is the mean over rows. MODEL (a folder, with a chat template) samples answers to
arithmetic questions and makes a few updates on them, with the objective, the clip and the optimizer
of recipes/qwen2.5-math-7b.toml. Printed are the quantiles of sqrt(v), v bias-corrected, and the
share of the parameters below 10 eps, whose updates are more than 9% smaller than Adam's.
Embeddings stand apart, since those of rare tokens have hardly any gradient.

Rewards are drawn, half of each group being 1: a gradient's size does not hang on which answers are
right. Token sums are divided by so many times the longest response as 8,192 is of 1,500.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EPS = (1e-8, 1e-8 / 64, 1e-12, 1e-15)  # torch's; that of the paper's recipes
QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


def sampled_groups(recipe: Any, updates: int) -> list[Any]:
    """As many groups as the updates take, with drawn rewards."""
    import torch

    from exgrpo_cli.engines import Request, Sampling
    from exgrpo_cli.engines.transformers import TransformersEngine
    from exgrpo_cli.models import load_tokenizer
    from exgrpo_cli.problems.prompts import render_prompt
    from exgrpo_cli.tables import row_seed
    from exgrpo_cli.training.batch import Row
    from exgrpo_cli.training.objective import group_advantages

    tokenizer = load_tokenizer(recipe.model.path, recipe.model)
    lines = (ROOT / "data/arithmetic/train.jsonl").read_text(encoding="utf-8").splitlines()
    samples, rng = recipe.rollout.samples, random.Random(0)
    requests: list[Request] = []
    for line in lines[: updates * recipe.train.minibatch_questions]:
        question = f"Compute {json.loads(line)['prompt'].rstrip('=')}. Explain each step."
        ids = render_prompt([{"role": "user", "content": question}], tokenizer, recipe.model)
        for sample in range(samples):
            requests.append(Request(len(requests), ids, row_seed(0, question, sample)))
    engine = TransformersEngine(recipe, recipe.model.path)
    sampling = Sampling(recipe.rollout.temperature, recipe.rollout.max_new_tokens)
    answers = {done.index: done.token_ids for done in engine.generate(requests, sampling)}
    engine.close()
    groups = []
    for first in range(0, len(requests), samples):
        rewards = [float(i % 2) for i in range(samples)]
        rng.shuffle(rewards)
        advantages = group_advantages(torch.tensor(rewards), torch.zeros(samples, dtype=torch.long))
        rows = zip(requests[first : first + samples], advantages.tolist(), strict=True)
        groups.append(
            [Row(f"{r.index}", r.prompt_ids, answers[r.index], a, False, None) for r, a in rows]
        )
    return groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--questions", type=int, default=4, help="of an update")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64, help="of a response, at most")
    parser.add_argument("--updates", type=int, default=4)
    options = parser.parse_args()

    import torch

    from exgrpo_cli.models import load_model
    from exgrpo_cli.recipe import load_recipe
    from exgrpo_cli.training.head import open_head
    from exgrpo_cli.training.update import Terms, make_optimizer, run_updates

    flags = {
        "model.path": options.model, "model.system": "", "rollout.engine": "transformers",
        "rollout.device": "cpu", "rollout.samples": options.samples,
        "rollout.max_new_tokens": options.tokens, "train.minibatch_questions": options.questions,
        "train.tokens_per_microbatch": 2048,
        "objective.length_divisor": round(options.tokens * 8192 / 1500),
    }  # fmt: skip
    recipe = load_recipe(ROOT / "recipes/qwen2.5-math-7b.toml", flags=flags)
    groups = sampled_groups(recipe, options.updates)
    lengths = [len(row.token_ids) for group in groups for row in group]
    print(f"{len(lengths)} rows of {sum(lengths) / len(lengths):.0f} tokens in the mean")
    model = load_model(options.model, recipe.model, torch.device("cpu"), torch.float32)
    optimizer = make_optimizer(model, recipe.train)
    terms = Terms(recipe.objective, None, recipe.length_divisor, recipe.rollout.temperature)
    result = run_updates(open_head(model), groups, terms, optimizer, recipe.train, seed=0)
    print("gradient norms:", ", ".join(f"{norm:.3g}" for norm in result.norms))
    correction = 1 - recipe.train.betas[1] ** result.updates
    embeddings = model.get_input_embeddings().weight
    columns: dict[str, list[Any]] = {"all": [], "embeddings": [], "the rest": []}
    for parameter in optimizer.param_groups[0]["params"]:
        root = (optimizer.state[parameter]["exp_avg_sq"].flatten() / correction).sqrt_()
        columns["all"].append(root)
        columns["embeddings" if parameter is embeddings else "the rest"].append(root)
    roots = [torch.cat(parts).sort().values for parts in columns.values()]

    def line(name: str, cells: list[str]) -> None:
        print(f"{name:<24}" + "".join(f"{cell:>14}" for cell in cells))

    line("sqrt(v)", list(columns))
    line("parameters", [f"{len(root):,}" for root in roots])
    line("rms", [f"{float(root.square().mean().sqrt()):.2g}" for root in roots])
    for q in QUANTILES:
        line(f"quantile {q}", [f"{float(root[int(q * len(root))]):.2g}" for root in roots])
    for eps in EPS:
        below = [int(torch.searchsorted(root, 10 * eps)) / len(root) for root in roots]
        line(f"below 10 x {eps:.3g}", [f"{share:.2%}" for share in below])


if __name__ == "__main__":
    main()
