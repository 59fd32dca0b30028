"""How long a policy's rows may be, and which tokens end them: the same for every engine."""

from __future__ import annotations

from collections.abc import Sequence

from exgrpo_cli.engines import Request
from exgrpo_cli.errors import InputError
from exgrpo_cli.models import adapter_base, is_adapter, load_config, load_tokenizer
from exgrpo_cli.recipe import ModelSettings, Recipe


def positions(policy: str, trust_remote_code: bool = False) -> int | None:
    """The most tokens that a policy's config allows for; None where it does not say."""
    base = adapter_base(policy) if is_adapter(policy) else policy
    config = load_config(base, trust_remote_code)
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def longest_row(recipe: Recipe, policy: str) -> int:
    """Tokens of the longest prompt and response together, no more than the model has positions."""
    new_tokens = max(recipe.rollout.max_new_tokens, recipe.evaluate.max_new_tokens or 0)
    wanted = recipe.rollout.max_prompt_tokens + new_tokens
    limit = positions(policy, recipe.model.trust_remote_code)
    return wanted if limit is None else min(wanted, limit)


def check_lengths(requests: Sequence[Request], longest: int) -> None:
    """Refuse prompts that are empty or leave no room for a token."""
    for request in requests:
        if not 0 < len(request.prompt_ids) < longest:
            raise InputError(
                f"request {request.index} has {len(request.prompt_ids)} prompt tokens; this"
                f" engine takes 1 to {longest - 1}"
                " (rollout.max_prompt_tokens, and the model's own limit)"
            )


def policy_end_ids(policy: str, settings: ModelSettings) -> list[int]:
    """All end tokens of a policy: its generation_config's and its tokenizer's."""
    from transformers import GenerationConfig

    base = adapter_base(policy) if is_adapter(policy) else policy
    tokenizer = load_tokenizer(policy, settings)
    try:
        generation = GenerationConfig.from_pretrained(base)
    except OSError:
        config = load_config(base, settings.trust_remote_code)
        generation = GenerationConfig.from_model_config(config)
    return end_ids(generation.eos_token_id, tokenizer.eos_token_id)


def end_ids(*found: int | list[int] | None) -> list[int]:
    """All end tokens, once each: the generation_config's (one or several), the tokenizer's."""
    lists = [ids if isinstance(ids, list) else [ids] for ids in found]
    return list(dict.fromkeys(int(one) for ids in lists for one in ids if one is not None))
