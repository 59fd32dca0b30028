"""A model's last hidden states and output layer, apart from each other."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")

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
    model: nn.Module, decoder: nn.Module, linear: nn.Linear, vocabulary: int, root: nn.Module | None
) -> bool:
    device = next(model.parameters()).device
    ids = torch.arange(4, device=device).remainder(vocabulary).unsqueeze(0)

    def both() -> tuple[Tensor, Tensor]:
        own = model(input_ids=ids, use_cache=False).logits
        return own, linear(decoder(input_ids=ids, use_cache=False).last_hidden_state)

    with evaluating(model), torch.no_grad():
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
    from transformers import AttentionInterface

    AttentionInterface.register(_PACKED_SDPA, packed_sdpa)
    name = _PACKED_SDPA if own == "sdpa" else own
    first, other, second = (
        torch.tensor(row).remainder(head.vocabulary)
        for row in ([1, 2, 3, 1, 2], [4, 3, 1, 2, 5], [3, 1, 2, 4])
    )

    def agree(alone_by: str, packed: str) -> bool:
        inner.set_attn_implementation(alone_by)
        alone = head.run(
            lambda: torch.cat([model_outputs(head, [row], "") for row in (first, second)])
        )
        inner.set_attn_implementation(packed)
        try:
            together = head.run(lambda: model_outputs(head, [first, second], packed))
            beside_other = head.run(lambda: model_outputs(head, [other, second], packed))
        except (TypeError, ValueError):  # a model that does not hand the sequences' bounds on
            return False
        # Other shapes, other rounding: far above that, far below what a token seen would change.
        wide = alone.dtype in (torch.float32, torch.float64)
        if float((together - alone).norm()) > (1e-4 if wide else 0.1) * float(alone.norm()):
            return False
        # A convolution may carry over less than that from the sequence before.
        seen = float((together - beside_other)[len(first) :].abs().max())
        return not wide or seen <= 1e-6 * float(together.abs().max())

    few_bits = next(head.model.parameters()).dtype in (torch.bfloat16, torch.float16)
    with evaluating(head.model), torch.no_grad():
        fits = agree(own, name)
        if fits and few_bits and head.root is None:
            # In few bits, what a state-space or convolution layer carries over from the sequence
            # before (Falcon-H1, LFM2, Qwen3-Next) may pass for rounding. Flash attention has no
            # float32, and is not what is asked here.
            with _wide_layers(inner):
                fits = agree("sdpa", _PACKED_SDPA)
    inner.set_attn_implementation(name if fits else own)
    return name if fits else ""


@contextlib.contextmanager
def _wide_layers(model: Any) -> Iterator[None]:
    """A model that computes in float32, one layer's weights widened at a time."""
    layers = [
        layer
        for child in (*model.base_model.children(), model.get_output_embeddings())
        for layer in (child if isinstance(child, nn.ModuleList) else [child])
    ]
    # Adapters and rotary frequencies may be in float32 already, and are to stay as they are.
    narrow: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def widen(layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        held = itertools.chain(layer.parameters(), layer.buffers())
        few_bits = (torch.bfloat16, torch.float16)
        narrow[layer] = [(tensor, tensor.data) for tensor in held if tensor.dtype in few_bits]
        for tensor, values in narrow[layer]:
            tensor.data = values.float()
        return _floats(args), _floats(kwargs)

    def restore(layer: nn.Module, *_: Any) -> None:
        for tensor, values in narrow.pop(layer, ()):
            tensor.data = values

    handles = [layer.register_forward_pre_hook(widen, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(restore, always_call=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _floats(values: Any) -> Any:
    """Arguments with float32 in place of other floating-point tensors."""
    if isinstance(values, Tensor):
        return values.float() if values.is_floating_point() else values
    if isinstance(values, dict):
        return {name: _floats(value) for name, value in values.items()}
    if isinstance(values, tuple | list):
        return type(values)(map(_floats, values))
    return values


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
        query: ``[1, heads, T, D]``.
        key: ``[1, key heads, T, D]``.
        sequence_bounds: 0, the end of the first sequence, of the second, ..., T.
        sliding_window: how many tokens back attention reaches; None for all.

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


def model_outputs(head: Head, rows: Sequence[Tensor], packed: str) -> Tensor:
    """Final hidden states (or logits, where there is no decoder) of every position of every row.

    Args:
        rows: ``[tokens]`` ids of each; not empty.
        packed: see :class:`Head`; else the rows are padded on the right. No attention mask is
            given: attention is causal and the padding comes last, so no token sees it.

    Returns:
        ``[positions, H]``: of packed rows one after the other, of padded ones with their padding.
    """
    device = next(head.model.parameters()).device
    options: dict[str, Any] = {}
    if packed:
        ids = torch.cat(list(rows)).unsqueeze(0)
        places = torch.cat([torch.arange(len(row)) for row in rows])
        options["position_ids"] = places.unsqueeze(0).to(device)
        bounds = [0, *itertools.accumulate(len(row) for row in rows)]
        if packed == _PACKED_SDPA:
            options["sequence_bounds"] = bounds
        else:
            ends = torch.tensor(bounds, dtype=torch.int32, device=device)
            options |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
            longest = max(len(row) for row in rows)
            options |= {"max_length_q": longest, "max_length_k": longest}
    else:
        ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    input_ids = ids.to(device, torch.long)
    if head.decoder is None:
        values = head.model(input_ids=input_ids, use_cache=False, **options).logits
    else:
        values = head.decoder(input_ids=input_ids, use_cache=False, **options).last_hidden_state
    return values.flatten(0, 1)  # type: ignore[no-any-return]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
