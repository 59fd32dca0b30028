"""Log-probabilities and entropies of response tokens, without a tokens x vocabulary tensor.

Only the positions that predict response tokens go through the language-model head, and those in
chunks: a chunk's logits are made, reduced to two numbers a token, and dropped; the backward pass
makes them again. All values are of the distribution that is sampled, softmax(logits / temperature).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from exgrpo_cli.errors import InputError
from exgrpo_cli.training import distributed
from exgrpo_cli.training.head import Head, evaluating, model_outputs, open_head
from exgrpo_cli.training.packing import rounds

# Logits (elements) held at a time: 32 MiB of float32 on a CPU, where caches are small; on a GPU
# large enough (512 MiB) that its matrix units are kept busy.
_CHUNK_CPU = 1 << 23

_CHUNK_GPU = 1 << 27

Ids = Sequence[int] | Tensor
"""The token ids of a row, ``[tokens]``."""


def linear_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperature: float,
    *,
    entropies: bool = True,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of labels, and entropies, of softmax((hidden W^T + b) / temperature).

    Differentiable once, in ``hidden``, ``weight`` and ``bias``, through both results. Logits are
    computed in the autocast dtype where autocast is on, else in that of the weight, and are
    reduced in float32 (float64 stays float64).

    Args:
        hidden: ``[T, H]`` hidden states of the positions that predict the labels.
        weight: ``[V, H]`` of the head.
        bias: ``[V]`` or None.
        labels: ``[T]`` int64.
        chunk_tokens: tokens a chunk; by default by the vocabulary's size.

    Returns:
        ``[T]`` log-probabilities and ``[T]`` entropies (or None), nats, float32 or float64.
    """
    kind = hidden.device.type
    autocast = torch.is_autocast_enabled(kind)
    compute = torch.get_autocast_dtype(kind) if autocast else weight.dtype
    if chunk_tokens is None:
        budget = _CHUNK_CPU if kind == "cpu" else _CHUNK_GPU
        chunk_tokens = max(budget // weight.shape[0], 1)
    logprobs, entropy = _LinearStatistics.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, labels, temperature, chunk_tokens, compute, entropies
    )
    return logprobs, entropy if entropies else None


def logits_statistics(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same from logits that are already there.

    Args:
        logits: ``[T, V]``; -inf for a token that cannot come is allowed.
        labels: ``[T]`` int64.

    Returns:
        ``[T]`` log-probabilities and ``[T]`` entropies, nats, float32 or float64.
    """
    scaled = _wide(logits) / temperature
    all_logprobs = scaled.log_softmax(dim=-1)
    logprobs = all_logprobs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    finite = all_logprobs.clamp(min=torch.finfo(all_logprobs.dtype).min)
    return logprobs, -(all_logprobs.exp() * finite).sum(dim=-1)


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


class _LinearStatistics(torch.autograd.Function):
    """See :func:`linear_statistics`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        chunk: int,
        compute: torch.dtype,
        entropies: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        wide = torch.float64 if compute == torch.float64 else torch.float32
        count = hidden.shape[0]
        logprobs = torch.empty(count, dtype=wide, device=hidden.device)
        normalizers = torch.empty_like(logprobs)
        entropy = torch.zeros_like(logprobs)
        with torch.autocast(hidden.device.type, enabled=False):
            head = _Cast(weight, bias, compute)
            for part in _parts(count, chunk):
                scaled = head.logits(hidden[part], temperature)
                highest = scaled.amax(dim=-1)
                scaled -= highest.unsqueeze(-1)
                masses = scaled.exp()
                mass = masses.sum(dim=-1)
                log_mass = mass.log()
                picked = scaled.gather(-1, labels[part].unsqueeze(-1)).squeeze(-1)
                logprobs[part] = picked - log_mass
                normalizers[part] = highest + log_mass
                if entropies:  # H = log Z - sum p z, with z shifted so that its maximum is 0
                    entropy[part] = log_mass - masses.mul_(scaled).sum(dim=-1) / mass
        ctx.save_for_backward(hidden, weight, bias, labels, normalizers, entropy)
        ctx.settings = (temperature, chunk, compute)
        if not entropies:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, normalizers, entropy = ctx.saved_tensors
        temperature, chunk, compute = ctx.settings
        to_logprobs, to_entropies = grads
        nothing = (None,) * 8
        if to_logprobs is None and to_entropies is None:
            return nothing
        wide = normalizers.dtype
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if of_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if of_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if of_bias else None
        with torch.autocast(hidden.device.type, enabled=False):
            head = _Cast(weight, bias, compute)
            for part in _parts(hidden.shape[0], chunk):
                logp = head.logits(hidden[part], temperature)
                logp -= normalizers[part].unsqueeze(-1)
                probs = logp.exp()
                # d logp_y / d z_j = [j = y] - p_j  and  d H / d z_j = -p_j (log p_j + H)
                upstream = None if to_logprobs is None else to_logprobs[part].unsqueeze(-1)
                if to_entropies is None:
                    factor: Any = -1 if upstream is None else -upstream
                else:
                    factor = logp.add_(entropy[part].unsqueeze(-1))
                    factor.mul_(-to_entropies[part].unsqueeze(-1))
                    if upstream is not None:
                        factor.sub_(upstream)
                grad = probs.mul_(factor)
                if upstream is not None:
                    grad.scatter_add_(-1, labels[part].unsqueeze(-1), upstream)
                grad /= temperature
                if grad_bias is not None:
                    grad_bias += grad.sum(dim=0)
                narrow = grad.to(compute)
                if grad_hidden is not None:
                    grad_hidden[part] = (narrow @ head.weight).to(hidden.dtype)
                if grad_weight is not None:
                    states = hidden[part].to(compute)
                    if compute == wide:
                        grad_weight.addmm_(narrow.T, states)
                    else:
                        grad_weight += narrow.T @ states
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *nothing[3:],
        )


class _Cast:
    """The head's weights in the dtype that its matrix product runs in."""

    def __init__(self, weight: Tensor, bias: Tensor | None, compute: torch.dtype) -> None:
        self.weight = weight.to(compute)
        self.bias = None if bias is None else bias.to(compute)
        self.compute = compute

    def logits(self, hidden: Tensor, temperature: float) -> Tensor:
        """``[T, V]`` logits / temperature, float32 or float64, free to be changed in place."""
        values = nn.functional.linear(hidden.to(self.compute), self.weight, self.bias)
        values = _wide(values)
        return values if temperature == 1.0 else values.div_(temperature)


def _parts(count: int, chunk: int) -> Iterator[slice]:
    for start in range(0, count, chunk):
        yield slice(start, min(start + chunk, count))


def token_statistics(
    head: Head,
    prompt_ids: Sequence[Ids],
    token_ids: Sequence[Ids],
    temperature: float,
    *,
    entropies: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """One forward pass over rows: log-probabilities and entropies, flat.

    The last token of a row is not run, since nothing is predicted from it. Without rows the model
    is run on a token whose result is not used: a process of several must not stay away.

    Args:
        head: see :func:`open_head`; its parameters get gradients unless they are switched off.
        prompt_ids: of each row; not empty.
        token_ids: response tokens of each row; not empty.

    Returns:
        ``[T]`` log-probabilities and ``[T]`` entropies (or None) over all response tokens, row
        after row, on the model's device.
    """
    device = next(head.model.parameters()).device
    responses = [torch.as_tensor(ids) for ids in token_ids]
    rows = [
        torch.cat([torch.as_tensor(p), r[:-1]]) for p, r in zip(prompt_ids, responses, strict=True)
    ] or [torch.zeros(1, dtype=torch.long)]
    width = max(len(row) for row in rows)
    ends = list(itertools.accumulate(len(row) if head.packed else width for row in rows))
    positions: list[int] = []
    for start, prompt, response in zip([0, *ends], prompt_ids, token_ids, strict=False):
        first = start + len(prompt) - 1
        positions.extend(range(first, first + len(response)))
    at = torch.tensor(positions, dtype=torch.long, device=device)
    labels = torch.cat(responses) if responses else torch.zeros(0)
    target = labels.to(device, torch.long)

    def run() -> tuple[Tensor, Tensor | None]:
        values = model_outputs(head, rows, head.packed)[at]
        if head.linear is None:
            logprobs, entropy = logits_statistics(values, target, temperature)
            return logprobs, entropy if entropies else None
        return linear_statistics(
            values, head.linear.weight, head.linear.bias, target, temperature, entropies=entropies
        )

    return head.run(run)


def check_rows(
    prompt_ids: Sequence[Ids],
    token_ids: Sequence[Ids],
    vocabulary: int,
    names: Sequence[str] | None = None,
) -> None:
    """Refuse rows that a model cannot be run on, by their names, or as ``row 1``, ``row 2``, ..."""
    for index, (prompt, response) in enumerate(zip(prompt_ids, token_ids, strict=True)):
        row = names[index] if names is not None else f"row {index + 1}"
        if not len(prompt):
            raise InputError(f"{row} has no prompt_ids: its first token has nothing before it")
        for ids in map(torch.as_tensor, (prompt, response)):
            wrong = ids[(ids < 0) | (ids >= vocabulary)]
            if len(wrong):
                raise InputError(
                    f"{row} holds token id {int(wrong[0])}, outside the policy's vocabulary of"
                    f" {vocabulary}; were these rows sampled from another model?"
                )


def score_sequences(
    model: nn.Module,
    prompt_ids: Sequence[Ids],
    token_ids: Sequence[Ids],
    temperature: float,
    tokens_per_batch: int,
    *,
    head: Head | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Exact log-probabilities and entropies of responses, without gradients.

    Several processes share the rows among them, and each gets all results.

    Args:
        model: a causal language model; it is run in evaluation mode.
        token_ids: response tokens of each row.
        tokens_per_batch: tokens of one forward pass.
        head: the model taken apart, if that was done before.

    Returns:
        For each row, in order: ``[T]`` log-probabilities and ``[T]`` entropies, nats, float32, on
        the CPU; empty for an empty response.

    Raises:
        InputError: temperature 0, an empty prompt, or a token id outside the vocabulary.
    """
    if temperature <= 0:
        raise InputError(
            "rollout.temperature is 0: greedy rollouts have no log-probabilities; set it above 0"
        )
    with evaluating(model), torch.no_grad():
        if head is None:
            head = open_head(model)
        check_rows(prompt_ids, token_ids, head.vocabulary)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        rows = [row for row, response in enumerate(token_ids) if len(response)]
        lengths = [len(prompt_ids[row]) + len(token_ids[row]) - 1 for row in rows]
        packed, ranks = bool(head.packed), distributed.ranks()
        for batches in rounds(lengths, tokens_per_batch, packed=packed, ranks=ranks):
            chosen = [rows[i] for i in batches[distributed.rank()]]
            logprobs, entropies = token_statistics(
                head, [prompt_ids[r] for r in chosen], [token_ids[r] for r in chosen], temperature
            )
            assert entropies is not None
            sizes = [len(token_ids[r]) for r in chosen]
            ends = list(itertools.accumulate(sizes))
            one, other = logprobs.float().cpu(), entropies.float().cpu()
            for row, end, size in zip(chosen, ends, sizes, strict=True):
                found[row] = (one[end - size : end].clone(), other[end - size : end].clone())
        empty = torch.zeros(0)
        results = [(empty, empty)] * len(token_ids)
        for part in distributed.gather(found):
            for row, values in part.items():
                results[row] = values
    return results
