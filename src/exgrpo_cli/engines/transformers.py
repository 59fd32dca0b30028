"""Generation with transformers: left-padded batches, KV cache, exact entropies.

The engine for machines without vLLM, and for tests and laptops. ``generate`` of transformers does
the decoding; a logits processor does the sampling, so that each row has random numbers of its own
and its log-probabilities and entropies are recorded in float32 over the whole vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from exgrpo_cli.engines import Completion, Request, Sampling
from exgrpo_cli.engines.limits import end_ids
from exgrpo_cli.errors import InputError
from exgrpo_cli.models import load_model, load_tokenizer, resolve_device, resolve_dtype
from exgrpo_cli.recipe import Recipe

# Numbers of one pass over the vocabulary: bounds the float64 copies (8 bytes each) at 128 MiB.
_CHUNK = 1 << 24
# Finished rows are dropped when they are this share of the rows, but not below _SMALL rows.
_DROP_SHARE, _SMALL = 0.25, 8


class TransformersEngine:
    """A policy in transformers (see :class:`exgrpo_cli.engines.Engine`)."""

    name = "transformers"

    def __init__(self, recipe: Recipe, policy: str) -> None:
        """Load a policy."""
        self._settings = recipe.model
        self._batch_size = recipe.rollout.batch_size
        self._device = resolve_device(recipe.rollout.device)
        self._dtype = resolve_dtype(recipe.model.dtype, self._device)
        self._model: Any = None
        self.load(policy)

    def load(self, policy: str) -> None:
        """Go over to another policy: a model folder, or an adapter folder."""
        self.close()
        model: Any = load_model(policy, self._settings, self._device, self._dtype)
        if hasattr(model, "get_base_model"):  # peft's layers stay in the model that it wraps
            model = model.get_base_model()
        tokenizer = load_tokenizer(policy, self._settings)
        self._end_ids = end_ids(model.generation_config.eos_token_id, tokenizer.eos_token_id)
        # Repetition penalties and the like from the model's own generation_config are dropped:
        # what is sampled must be the distribution that training sees.
        model.generation_config = GenerationConfig()
        self._model = model.requires_grad_(False)

    def sleep(self) -> bool:
        """Nothing: ``close`` and a new start cost no more."""
        return False

    def close(self) -> None:
        """Free the model."""
        self._model = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield every request's completion once, short prompts first."""
        for request in requests:
            if not request.prompt_ids:
                raise InputError(f"request {request.index} has an empty prompt")
        by_length = sorted(requests, key=lambda request: len(request.prompt_ids))
        for first in range(0, len(by_length), self._batch_size):
            yield from self._batch(by_length[first : first + self._batch_size], sampling)

    def _batch(self, requests: list[Request], sampling: Sampling) -> Iterator[Completion]:
        """Sample one batch in rounds; finished rows leave it between the rounds.

        A round ends when a share of its rows has finished. The next goes on from the same KV
        cache, with the rows that are left.
        """
        end = torch.tensor(self._end_ids, dtype=torch.int64, device=self._device)
        pad = 0  # on the left it is masked out, after an end it is cut off: any id will do
        longest = max(len(request.prompt_ids) for request in requests)
        ids = torch.full((len(requests), longest), pad)
        mask = torch.zeros_like(ids)
        for i, request in enumerate(requests):
            ids[i, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[i, longest - len(request.prompt_ids) :] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        uniforms = None
        if sampling.temperature > 0:
            uniforms = torch.from_numpy(
                np.stack([row_uniforms(r.seed, sampling.max_new_tokens) for r in requests])
            )
        rows = torch.arange(len(requests))
        cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        logprobs = torch.empty((len(requests), 0), dtype=torch.float32)
        entropies = torch.empty_like(logprobs)
        produced = 0
        while len(rows):
            sampler = _Sampler(sampling, uniforms, rows, produced)
            ids = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=cache,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([_Stop(end, len(rows))]),
                generation_config=GenerationConfig(
                    do_sample=False,
                    use_cache=True,
                    max_new_tokens=sampling.max_new_tokens - produced,
                    eos_token_id=self._end_ids or None,
                    pad_token_id=pad,
                ),
            )
            produced = ids.shape[1] - longest
            steps = produced - logprobs.shape[1]
            logprobs = torch.cat([logprobs, sampler.column("logprobs", steps)], dim=1)
            if sampling.entropies:
                entropies = torch.cat([entropies, sampler.column("entropies", steps)], dim=1)
            response = ids[:, longest:]
            ended = torch.isin(response, end).cpu()
            response = response.cpu()
            done = ended.any(dim=1)
            lengths = torch.where(done, ended.int().argmax(dim=1) + 1, produced)
            leaving = done | (produced >= sampling.max_new_tokens)
            for i in leaving.nonzero()[:, 0].tolist():
                length = int(lengths[i])
                yield Completion(
                    index=requests[int(rows[i])].index,
                    token_ids=response[i, :length].tolist(),
                    logprobs=logprobs[i, :length].tolist(),
                    entropies=entropies[i, :length].tolist() if sampling.entropies else None,
                    finish_reason="stop" if done[i] else "length",
                )
            kept = (~leaving).nonzero()[:, 0]
            rows, logprobs = rows[kept], logprobs[kept]
            entropies = entropies[kept] if sampling.entropies else entropies
            there = kept.to(self._device)
            ids = ids[there]
            mask = torch.nn.functional.pad(mask[there], (0, ids.shape[1] - mask.shape[1]), value=1)
            if len(kept):
                cache.batch_select_indices(there)


class _Sampler(LogitsProcessor):  # type: ignore[misc]
    """Chooses each row's next token and records its log-probability and entropy.

    It answers with scores of 0 for the chosen token and minus infinity for all others, so the
    greedy decoding of ``generate`` takes what was chosen.
    """

    def __init__(
        self, sampling: Sampling, uniforms: torch.Tensor | None, rows: torch.Tensor, first: int
    ) -> None:
        self._sampling = sampling
        self._uniforms = None if uniforms is None else uniforms[rows]
        self._position = first
        self._columns: dict[str, list[torch.Tensor]] = {"logprobs": [], "entropies": []}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        uniforms = None
        if self._uniforms is not None:
            uniforms = self._uniforms[:, self._position]
        size = max(1, _CHUNK // scores.shape[1])
        chosen, logprobs, entropies = [], [], []
        for first in range(0, scores.shape[0], size):
            part = slice(first, first + size)
            log_p = log_distribution(scores[part], self._sampling)
            token = choose(log_p, None if uniforms is None else uniforms[part])
            chosen.append(token)
            logprobs.append(log_p.gather(1, token[:, None])[:, 0])
            if self._sampling.entropies:
                entropies.append(torch.special.entr(log_p.exp()).sum(dim=1))
        self._columns["logprobs"].append(torch.cat(logprobs))
        if self._sampling.entropies:
            self._columns["entropies"].append(torch.cat(entropies))
        self._position += 1
        return torch.full_like(scores, -torch.inf).scatter_(1, torch.cat(chosen)[:, None], 0.0)

    def column(self, name: str, steps: int) -> torch.Tensor:
        """What was recorded in the first ``steps`` steps, [rows, steps] float32 on the CPU."""
        return torch.stack(self._columns[name][:steps], dim=1).cpu()


class _Stop(StoppingCriteria):  # type: ignore[misc]
    """Ends a round when enough of its rows have produced an end token."""

    def __init__(self, end: torch.Tensor, rows: int) -> None:
        self._end = end
        self._enough = rows if rows <= _SMALL else max(1, int(rows * _DROP_SHARE))
        self._done = torch.zeros(rows, dtype=torch.bool, device=end.device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._done = self._done | torch.isin(input_ids[:, -1], self._end)
        return self._done | (self._done.sum() >= self._enough)


def row_uniforms(seed: int, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A row's random numbers, in [0, 1) float64, one for each position of its response.

    They come from a counter-based generator keyed by the seed (Philox 4x64), so they depend on
    nothing else: not on other rows, the batch, or the machine.
    """
    raw = np.random.Philox(key=seed).random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def log_distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probabilities of the distribution that is sampled, [rows, vocabulary] float32.

    Temperature 0 stands for 1 here: the choice is greedy, they are the model's own.
    """
    return torch.log_softmax(logits.float() / (sampling.temperature or 1.0), dim=-1)


def choose(log_p: torch.Tensor, uniforms: torch.Tensor | None) -> torch.Tensor:
    """One token a row, [rows] int64 on the device of ``log_p``, [rows, vocabulary]: by inversion of
    the distribution function at ``uniforms``, [rows] float64 on the CPU, or the most probable."""
    if uniforms is None:
        return log_p.argmax(dim=-1)
    # float64, since a float32 sum over 150 000 tokens would lose the rare ones; MPS has none.
    place = "cpu" if log_p.device.type == "mps" else log_p.device
    cumulative = log_p.to(place).double().exp().cumsum(dim=-1)
    # Below the last value even after rounding, so that a token of probability 0 is never chosen.
    target = uniforms.to(place).clamp(max=1 - 1e-12)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].to(log_p.device)
