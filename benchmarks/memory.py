"""Memory of training on GPUs, worked out from a model's shapes (see docs/memory.md).

    python benchmarks/memory.py [MODEL_FOLDER_OR_CONFIG_JSON ...] [--gpus 1 4 8] [--tokens 16384]
    python benchmarks/memory.py --check    # the activations' formula against torch, on the CPU

Without a model: Qwen2.5-Math-1.5B, Qwen2.5-7B and Llama-3.1-8B. GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK = 1 << 27  # logits held at a time on a GPU; policy/logprobs.py
RESERVE = 8e9  # of a GPU: CUDA's own, and what an allocator cannot use


@dataclass(frozen=True)
class Shapes:
    """A decoder with gated MLP and grouped-query attention, as Qwen2 and Llama are."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool
    qkv_bias: bool

    @property
    def q(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Width of all key heads, or value heads."""
        return self.kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> int:
        """Weights of a layer's seven projections."""
        return self.hidden * (2 * self.q + 2 * self.kv + 3 * self.intermediate)

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        bias = (self.q + 2 * self.kv) if self.qkv_bias else 0
        return self.layer_matrices + bias + 2 * self.hidden

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def root(self) -> int:
        """Parameters outside the layers."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.root

    def lora(self, rank: int) -> int:
        """Parameters of an adapter on all linear layers but the head."""
        ends = (self.hidden + self.q) * 2 + (self.hidden + self.kv) * 2
        return self.layers * rank * (ends + 3 * (self.hidden + self.intermediate))


MODELS = [
    Shapes("Qwen2.5-Math-1.5B", 1536, 28, 12, 2, 128, 8960, 151_936, True, True),
    Shapes("Qwen2.5-7B", 3584, 28, 28, 4, 128, 18_944, 152_064, False, True),
    Shapes("Llama-3.1-8B", 4096, 32, 32, 8, 128, 14_336, 128_256, False, False),
]


def read_shapes(path: Path) -> Shapes:
    """Of a model folder's config.json."""
    config = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    heads = config["num_attention_heads"]
    return Shapes(
        name=config.get("_name_or_path") or (path if path.is_dir() else path.parent).name,
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=config.get("attention_bias", config["model_type"] == "qwen2"),
    )


# --- bytes ----------------------------------------------------------------------------------------


def layer_activations(s: Shapes, *, autocast: bool = True, rank: int = 0) -> int:
    """Bytes a token that one layer keeps for its backward pass."""
    attention = 6 * s.q + 4 * s.kv
    if not autocast:  # float32 throughout
        return 24 * s.hidden + 2 * (attention + 8 * s.intermediate) + 4 * s.heads + 8
    stream = 18 if rank else 26  # the residual stream is bfloat16 on a frozen bfloat16 base
    adapter = 14 * rank
    return stream * s.hidden + attention + 8 * s.intermediate + 4 * s.heads + 8 + adapter


def checkpoint(s: Shapes, rank: int = 0) -> int:
    """Bytes a token that one layer keeps with gradient checkpointing: its input."""
    return (2 if rank else 4) * s.hidden


@dataclass(frozen=True)
class Need:
    """What one GPU needs, bytes."""

    state: float
    """Weights, gradients, optimizer: this GPU's shards of them."""
    gathered: float
    """Unsharded weights and gradients: two layers, and what is in no layer."""
    casts: float
    """bfloat16 copies of the layers' weights that autocast makes and autograd keeps."""
    head: float
    """Logits of a chunk, and the head in bfloat16."""
    token: float
    """Bytes a token of a micro-batch, in the layers' backward pass."""
    moments: tuple[tuple[float, float], ...]
    """Bytes, and bytes a token, at each moment that may be the highest."""

    def total(self, tokens: int) -> float:
        return max(fixed + tokens * token for fixed, token in self.moments)

    def most_tokens(self, memory: float) -> int:
        """The largest micro-batch that fits, in whole thousands."""
        room = min(
            (memory - RESERVE - fixed) / token if token else (memory - RESERVE - fixed) * 1e9
            for fixed, token in self.moments
        )
        return max(int(room) // 1000 * 1000, 0)


def need(s: Shapes, gpus: int, *, checkpointing: bool, rank: int = 0) -> Need:
    """See docs/memory.md for each line."""
    chunk = 2.5 * 4 * CHUNK
    if rank:
        state = (2 * s.parameters + 16 * s.lora(rank)) / gpus
        gathered = 2.0 * (2 * s.layer + s.root) if gpus > 1 else 0.0
        a_layers_casts, head, last = 0.0, chunk, 0.0
    else:
        state = 16 * s.parameters / gpus
        gathered = 4.0 * (4 * s.layer + s.root + s.embedding) if gpus > 1 else 4.0 * s.embedding
        a_layers_casts = 2.0 * s.layer_matrices
        head = chunk + 4.0 * s.embedding
        last = 12.0 * s.root if gpus > 1 else 0.0
    casts = s.layers * a_layers_casts
    one = layer_activations(s, rank=rank)
    kept = s.layers * (checkpoint(s, rank) if checkpointing else one)
    again = one if checkpointing else 0
    work = 6 * s.intermediate + 8 * s.hidden
    token = kept + again + work + 12 * s.hidden
    moments = (
        (state + gathered + casts + head, kept + 12.0 * s.hidden),  # the head
        (state + gathered + (a_layers_casts if checkpointing else casts), token),  # a layer
        (state + last, 0.0),  # gradients of what is in no layer are scattered last
    )
    return Need(state, gathered, casts, head, token, moments)


# --- the table ------------------------------------------------------------------------------------


def table(
    models: Sequence[Shapes], gpus: Sequence[int], tokens: int, memory: float, rank: int
) -> list[str]:
    """The lines that docs/memory.md quotes."""
    head = f"{'model':18}{'train':8}{'GPUs':>5}{'state':>7}{'gathered':>10}{'casts':>7}{'head':>6}"
    head += f"{'MB/token':>15}{f'total {tokens}':>13}{'most tokens':>17}"
    under = f"{'':61}{'plain  ckpt.':>15}{'ckpt.':>13}{'plain    ckpt.':>17}"
    lines = [head, under]
    for s in models:
        for kind, r in (("all", 0), (f"LoRA {rank}", rank)):
            for count in gpus:
                plain = need(s, count, checkpointing=False, rank=r)
                less = need(s, count, checkpointing=True, rank=r)
                most = [n.most_tokens(memory) for n in (plain, less)]
                parts = "".join(
                    f"{value / 1e9:>{width}.1f}"
                    for value, width in zip(
                        (plain.state, plain.gathered, plain.casts, plain.head),
                        (7, 10, 7, 6),
                        strict=True,
                    )
                )
                total = less.total(tokens)
                lines.append(
                    f"{s.name:18}{kind:8}{count:>5}{parts}"
                    f"{plain.token / 1e6:>9.2f}{less.token / 1e6:>6.2f}{total / 1e9:>13.1f}"
                    + "".join(f"{n or 'none':>{w}}" for n, w in zip(most, (9, 8), strict=True))
                )
    return lines


# --- the check ------------------------------------------------------------------------------------


def measured_activations(
    s: Shapes, tokens: int, *, autocast: bool = True, rank: int = 0, checkpointing: bool = False
) -> tuple[float, float]:
    """What torch keeps for the backward pass on the CPU: bytes a token of one layer, and of what
    is in no layer. Copies of weights are not counted; they are told by their shapes, so the number
    of tokens must be none of the model's widths."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from exgrpo_cli.training.head import open_head
    from exgrpo_cli.training.logprobs import token_statistics

    totals = []
    for layers in (1, 3):
        torch.manual_seed(0)
        model: Any = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=s.vocabulary,
                hidden_size=s.hidden,
                num_hidden_layers=layers,
                num_attention_heads=s.heads,
                num_key_value_heads=s.kv_heads,
                head_dim=s.head_dim,
                intermediate_size=s.intermediate,
                tie_word_embeddings=s.tied,
            )
        )
        if rank:
            from peft import LoraConfig, get_peft_model

            settings = LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules="all-linear")
            model = get_peft_model(model.bfloat16(), settings)
        if checkpointing:
            inner = model.get_base_model() if rank else model
            inner.gradient_checkpointing_enable({"use_reentrant": False})
        head = open_head(model)
        model.train()
        totals.append(_kept(model, head, token_statistics, tokens, autocast))
    a_layer = (totals[1] - totals[0]) / 2 / tokens
    return a_layer, totals[0] / tokens - a_layer


def _kept(model: Any, head: Any, run: Any, tokens: int, autocast: bool) -> int:
    """Bytes of the storages that a forward pass over two rows keeps, weights left out."""
    import torch

    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {shape for p in model.parameters() for shape in (p.shape, p.shape[::-1])}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights and (tensor.ndim != 2 or tensor.shape not in shapes):
            kept[place] = tensor  # held, so that its place is not used again
        return tensor

    row = [i % 50 for i in range(tokens // 2 + 1)]
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        run(head, [row[:8]] * 2, [row[8:]] * 2, 1.0)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def check() -> None:
    small = Shapes("small", 96, 3, 6, 3, 16, 200, 700, False, True)
    cases: list[tuple[str, dict[str, Any], int]] = [
        ("bfloat16 by autocast", {}, layer_activations(small)),
        ("float32", {"autocast": False}, layer_activations(small, autocast=False)),
        ("LoRA 8 on bfloat16", {"rank": 8}, layer_activations(small, rank=8)),
        ("checkpointing", {"checkpointing": True}, checkpoint(small)),
        ("LoRA 8, checkpointing", {"rank": 8, "checkpointing": True}, checkpoint(small, 8)),
    ]
    print(f"{'bytes a token and layer':30}{'formula':>9}{'measured':>10}")
    for title, options, formula in cases:
        measured, outside = measured_activations(small, 512, **options)
        print(f"{title:30}{formula:>9}{measured:>10.1f}   outside the layers {outside:.0f}")
    print(f"{'outside the layers, 12 h':30}{12 * small.hidden:>9}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", type=Path, help="model folders, or config.json files")
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, default=16384, help="train.tokens_per_microbatch")
    parser.add_argument("--memory", type=float, default=80, help="of a GPU, GB")
    parser.add_argument("--rank", type=int, default=16, help="lora.rank")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        check()
        return
    models = [read_shapes(path) for path in options.models] or MODELS
    print(
        "\n".join(table(models, options.gpus, options.tokens, options.memory * 1e9, options.rank))
    )


if __name__ == "__main__":
    main()
