"""Log-probabilities and entropies of response tokens, without a tokens x vocabulary tensor.

Only the positions that predict response tokens go through the language-model head, and those in
chunks: a chunk's logits are made, reduced to two numbers a token, and dropped; the backward pass
makes them again. All values are of the distribution that is sampled, softmax(logits / temperature).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from exgrpo_cli.errors import InputError
from exgrpo_cli.policy import distributed
from exgrpo_cli.policy.packing import rounds

T = TypeVar("T")

# Logits (elements) held at a time: 32 MiB of float32 on a CPU, where caches are small; on a GPU
# large enough (512 MiB) that its matrix units are kept busy.
_CHUNK_CPU = 1 << 23
_CHUNK_GPU = 1 << 27


# --- the head, chunk by chunk -----------------------------------------------------------------


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
        temperature: above 0.
        entropies: whether they are wanted.
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
        temperature: above 0.

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


# --- models -----------------------------------------------------------------------------------

_PACKED_SDPA = "exgrpo_packed_sdpa"
_FLASH = ("flash_attention_2", "flash_attention_3")


@dataclass(frozen=True)
class Head:
    """A causal language model taken apart, where it can be."""

    model: nn.Module
    """The whole model: token ids in, logits out."""
    decoder: nn.Module | None
    """Token ids in, final hidden states out; None where the logits are not simply linear in them
    (a soft cap, a scale, an adapter on the head): then the model's own logits are used."""
    linear: nn.Linear | None
    """The language-model head; None as ``decoder``."""
    vocabulary: int
    """Token ids must be below this."""
    packed: str
    """The attention that keeps packed sequences apart; empty where the model knows none, so that
    rows have to be padded."""
    root: nn.Module | None = None
    """Of a sharded model: a module that is called with a function and calls it; its weights that
    are in no layer (embedding, head) are there only inside of it."""

    def run(self, function: Callable[[], T]) -> T:
        """Call a function that uses the model's weights."""
        if self.root is None:
            return function()
        result: T = self.root(function)
        if not torch.is_grad_enabled():
            # FSDP keeps the outermost weights for the backward pass; none will come.
            self.root.reshard()  # type: ignore[operator]
        return result


def open_head(model: nn.Module, root: nn.Module | None = None) -> Head:
    """Find a causal language model's decoder and head, and see how rows can be put into it.

    Both are tried out on a few tokens. The model's own logits are compared with the head's product
    with the final hidden states, so a model that does anything else in between is noticed whatever
    it is called. Two sequences behind one another are compared with each alone, so a model whose
    tokens see across is given padded rows instead.

    The model's attention may have been replaced afterwards; run it through
    :func:`token_statistics` alone.

    Args:
        model: a transformers causal language model, or a ``peft.PeftModel`` on one.
        root: see :class:`Head`.
    """
    inner: Any = model
    if hasattr(inner, "get_base_model") and hasattr(inner, "peft_config"):
        inner = inner.get_base_model()
    linear = inner.get_output_embeddings()
    decoder: Any = getattr(inner, "base_model", None)
    vocabulary = int(inner.get_input_embeddings().weight.shape[0])
    config = inner.config.get_text_config()
    altered = any(
        getattr(config, name, None) not in (None, 1, 1.0)
        for name in ("final_logit_softcapping", "logit_scale", "logits_scaling")
    )
    simple = type(linear) is nn.Linear and decoder is not None and decoder is not inner
    if not simple or altered or not _is_linear(model, decoder, linear, vocabulary, root):
        decoder = linear = None
    head = Head(model, decoder, linear, vocabulary, "", root)
    return replace(head, packed=_packed_attention(head, inner))


def _is_linear(
    model: nn.Module,
    decoder: nn.Module,
    linear: nn.Linear,
    vocabulary: int,
    root: nn.Module | None,
) -> bool:
    device = next(model.parameters()).device
    ids = torch.arange(4, device=device).remainder(vocabulary).unsqueeze(0)

    def both() -> tuple[Tensor, Tensor]:
        own = model(input_ids=ids, use_cache=False).logits
        return own, linear(decoder(input_ids=ids, use_cache=False).last_hidden_state)

    with _evaluating(model), torch.no_grad():
        own, ours = Head(model, decoder, linear, vocabulary, "", root).run(both)
    if own.shape != ours.shape:
        return False
    tolerance = 8 * torch.finfo(ours.dtype).eps * float(own.abs().max())
    return bool(torch.allclose(own.to(ours.dtype), ours, rtol=0, atol=tolerance))


def _packed_attention(head: Head, inner: Any) -> str:
    """The attention for packed rows, put into the model; empty where there is none."""
    own = str(inner.config._attn_implementation)
    if own == _PACKED_SDPA:  # from an earlier call
        return _PACKED_SDPA
    if own not in ("sdpa", *_FLASH):
        return ""
    rows = [[1, 2, 3, 1, 2], [3, 1]]
    ids = [[token % head.vocabulary for token in row] for row in rows]
    with _evaluating(head.model), torch.no_grad():
        alone = head.run(lambda: torch.cat([_outputs(head, [row], "") for row in ids]))
        name = own
        if own == "sdpa":
            from transformers import AttentionInterface

            AttentionInterface.register(_PACKED_SDPA, packed_sdpa)
            name = _PACKED_SDPA
            inner.set_attn_implementation(name)
        try:
            together = head.run(lambda: _outputs(head, ids, name))
        except (TypeError, ValueError):  # a model that does not hand the sequences' bounds on
            together = None
    if together is not None:
        # Other shapes, other rounding: far above that, far below what a token seen would change.
        tolerance = 1e-4 if alone.dtype in (torch.float32, torch.float64) else 0.1
        if float((together - alone).norm()) <= tolerance * float(alone.norm()):
            return name
    inner.set_attn_implementation(own)
    return ""


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_bounds: Sequence[int] | None = None,
    sliding_window: int | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each of the sequences that lie behind one another.

    Each sequence is a call of torch's attention, so its cost is the sum of the sequences' squares;
    neighbours of equal length share one. In the form that transformers wants
    (``AttentionInterface``); without ``sequence_bounds`` it is its own SDPA attention.

    Args:
        module: the attention layer.
        query: ``[1, heads, T, D]``.
        key: ``[1, key heads, T, D]``.
        value: as ``key``.
        attention_mask: not used with ``sequence_bounds``.
        sequence_bounds: 0, the end of the first sequence, of the second, ..., T.
        sliding_window: how many tokens back attention reaches; None for all.
        settings: ``scaling`` and ``dropout``.

    Returns:
        ``[1, T, heads, D]``, and None for the attention weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as sdpa

    settings = {name: settings[name] for name in ("scaling", "dropout") if name in settings}
    if sequence_bounds is None:
        return sdpa(module, query, key, value, attention_mask, **settings)  # type: ignore[no-any-return]
    sizes = [b - a for a, b in itertools.pairwise(sequence_bounds)]
    outputs = []
    start = 0
    for size, alike in itertools.groupby(sizes):
        count = len(list(alike))
        end = start + count * size
        # [1, heads, count x size, D] as [count, heads, size, D]
        q, k, v = (
            part[0, :, start:end].reshape(part.shape[1], count, size, -1).transpose(0, 1)
            for part in (query, key, value)
        )
        mask = None
        if sliding_window is not None and size > sliding_window:
            places = torch.arange(size, device=q.device)
            back = places[:, None] - places[None, :]
            mask = ((back >= 0) & (back < sliding_window))[None, None]
        output, _ = sdpa(module, q, k, v, mask, is_causal=mask is None, **settings)
        outputs.append(output.flatten(0, 1))
        start = end
    return torch.cat(outputs).unsqueeze(0), None


def _outputs(head: Head, rows: Sequence[Sequence[int]], packed: str) -> Tensor:
    """Final hidden states (or logits, where there is no decoder) of every position of every row.

    Args:
        head: the model.
        rows: token ids; not empty.
        packed: see :class:`Head`; else the rows are padded on the right. No attention mask is
            given: attention is causal and the padding comes last, so no token sees it.

    Returns:
        ``[positions, H]``: of packed rows one after the other, of padded ones with their padding.
    """
    device = next(head.model.parameters()).device
    options: dict[str, Any] = {}
    if packed:
        ids = [[token for row in rows for token in row]]
        places = [place for row in rows for place in range(len(row))]
        options["position_ids"] = torch.tensor([places], device=device)
        bounds = [0, *itertools.accumulate(len(row) for row in rows)]
        if packed == _PACKED_SDPA:
            options["sequence_bounds"] = bounds
        else:
            ends = torch.tensor(bounds, dtype=torch.int32, device=device)
            options |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
            longest = max(len(row) for row in rows)
            options |= {"max_length_q": longest, "max_length_k": longest}
    else:
        width = max(len(row) for row in rows)
        ids = [[*row, *[0] * (width - len(row))] for row in rows]
    input_ids = torch.tensor(ids, device=device)
    if head.decoder is None:
        values = head.model(input_ids=input_ids, use_cache=False, **options).logits
    else:
        values = head.decoder(input_ids=input_ids, use_cache=False, **options).last_hidden_state
    return values.flatten(0, 1)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def token_statistics(
    head: Head,
    prompt_ids: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[int]],
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
        temperature: above 0.
        entropies: whether they are wanted.

    Returns:
        ``[T]`` log-probabilities and ``[T]`` entropies (or None) over all response tokens, row
        after row, on the model's device.
    """
    device = next(head.model.parameters()).device
    rows = [[*p, *r[:-1]] for p, r in zip(prompt_ids, token_ids, strict=True)] or [[0]]
    width = max(len(row) for row in rows)
    ends = list(itertools.accumulate(len(row) if head.packed else width for row in rows))
    positions: list[int] = []
    for start, prompt, response in zip([0, *ends], prompt_ids, token_ids, strict=False):
        first = start + len(prompt) - 1
        positions.extend(range(first, first + len(response)))
    at = torch.tensor(positions, dtype=torch.long, device=device)
    labels = [token for response in token_ids for token in response]
    target = torch.tensor(labels, dtype=torch.long, device=device)

    def run() -> tuple[Tensor, Tensor | None]:
        values = _outputs(head, rows, head.packed)[at]
        if head.linear is None:
            logprobs, entropy = logits_statistics(values, target, temperature)
            return logprobs, entropy if entropies else None
        return linear_statistics(
            values,
            head.linear.weight,
            head.linear.bias,
            target,
            temperature,
            entropies=entropies,
        )

    return head.run(run)


def check_rows(
    prompt_ids: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[int]],
    vocabulary: int,
    names: Sequence[str] | None = None,
) -> None:
    """Refuse rows that a model cannot be run on.

    Args:
        prompt_ids: of each row.
        token_ids: of each row.
        vocabulary: ids must be below this.
        names: what to call the rows in the message; by default ``row 1``, ``row 2``, ...

    Raises:
        InputError: an empty prompt, or a token id outside the vocabulary.
    """
    for index, (prompt, response) in enumerate(zip(prompt_ids, token_ids, strict=True)):
        row = names[index] if names is not None else f"row {index + 1}"
        if not prompt:
            raise InputError(f"{row} has no prompt_ids: its first token has nothing before it")
        for ids in (prompt, response):
            if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
                wrong = next(i for i in ids if not 0 <= i < vocabulary)
                raise InputError(
                    f"{row} holds token id {wrong}, outside the policy's vocabulary of"
                    f" {vocabulary}; were these rows sampled from another model?"
                )


def score_sequences(
    model: nn.Module,
    prompt_ids: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[int]],
    temperature: float,
    tokens_per_batch: int,
    *,
    head: Head | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Exact log-probabilities and entropies of responses, without gradients.

    Several processes share the rows among them, and each gets all results.

    Args:
        model: a causal language model; it is run in evaluation mode.
        prompt_ids: of each row.
        token_ids: response tokens of each row.
        temperature: logits are divided by it; above 0.
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
    with _evaluating(model), torch.no_grad():
        if head is None:
            head = open_head(model)
        check_rows(prompt_ids, token_ids, head.vocabulary)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        rows = [row for row, response in enumerate(token_ids) if response]
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
