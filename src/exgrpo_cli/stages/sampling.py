"""What the stages that sample have in common: prompts as token ids, responses as rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exgrpo_cli import tables
from exgrpo_cli.engines import Completion, Request, Sampling
from exgrpo_cli.errors import InputError
from exgrpo_cli.problems.prompts import render_prompt
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import Recipe
from exgrpo_cli.step import Step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def training_sampling(recipe: Recipe) -> Sampling:
    """How training rollouts are sampled."""
    settings = recipe.rollout
    return Sampling(
        settings.temperature,
        settings.max_new_tokens,
        entropies=settings.entropies,
        entropy_top_k=recipe.entropy_top_k,
    )


def encode_prompts(
    prompts: Mapping[str, Sequence[Mapping[str, str]]],
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    log: Log = quiet,
) -> dict[str, list[int]]:
    """Prompt token ids of every problem whose prompt is not too long.

    Args:
        recipe: the template, and ``rollout.max_prompt_tokens``.
        log: is told how many prompts were left out.
    """
    encoded = {}
    too_long = []
    for problem_id, prompt in prompts.items():
        ids = render_prompt(prompt, tokenizer, recipe.model)
        if not ids:
            raise InputError(f"problem {problem_id}: its prompt has no tokens")
        if len(ids) > recipe.rollout.max_prompt_tokens:
            too_long.append(problem_id)
        else:
            encoded[problem_id] = ids
    if too_long:
        log(
            f"{len(too_long)} prompts are longer than rollout.max_prompt_tokens ="
            f" {recipe.rollout.max_prompt_tokens} and are left out (the first is {too_long[0]})"
        )
    return encoded


@dataclass(frozen=True)
class Asked:
    """Which row of the ``rollouts`` table a request is for."""

    problem_id: str
    sample: int
    role: str = "fresh"

    def rollout_id(self, step: int, prefix: str = "s") -> str:
        """``s00007/PROBLEM_ID/03``; an evaluation's begin with ``e``."""
        return f"{prefix}{step:05d}/{self.problem_id}/{self.sample:02d}"


def completion_row(
    step: Step,
    asked: Asked,
    request: Request,
    completion: Completion,
    tokenizer: PreTrainedTokenizerBase,
    prefix: str = "s",
) -> dict[str, Any]:
    """A row of the ``rollouts`` table.

    Where the engine gives no entropies, their mean is estimated: from the most probable tokens
    where the engine was asked for them, else by the mean negative log-probability of the sampled
    tokens, which is without bias, but has one sample a token.
    """
    count = len(completion.token_ids)
    mean_logprob = sum(completion.logprobs) / count
    if completion.entropies is not None:
        mean_entropy, source = sum(completion.entropies) / count, "engine"
    elif completion.topk_entropy is not None:
        mean_entropy, source = completion.topk_entropy, "topk"
    else:
        mean_entropy, source = -mean_logprob, "logprobs"
    return {
        "rollout_id": asked.rollout_id(step.number, prefix),
        "step": step.number,
        "problem_id": asked.problem_id,
        "sample": asked.sample,
        "role": asked.role,
        "policy": step.policy_name,
        "prompt_ids": request.prompt_ids,
        "token_ids": completion.token_ids,
        "text": decode(tokenizer, completion.token_ids),
        "logprobs": completion.logprobs,
        "entropies": completion.entropies,
        "mean_entropy": mean_entropy,
        "entropy_source": source,
        "mean_logprob": mean_logprob,
        "tokens": count,
        "token_hash": tables.token_hash(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "seed": request.seed,
    }


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """A response as text for reading: special tokens left out, spaces as they are."""
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    # A cut-off byte-level token may leave half a surrogate, which Parquet cannot hold.
    return str(text).encode("utf-8", "replace").decode("utf-8")
