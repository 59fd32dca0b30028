"""Packed rows must not see across: layers that are no attention carry their state over."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Lfm2Config,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from exgrpo_cli.training.head import open_head
from exgrpo_cli.training.logprobs import score_sequences

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
    "mamba_n_groups": 1, "mamba_chunk_size": 8,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
ATTENTION = {"qwen2": Qwen2Config(**SIZES), "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS)}
HYBRIDS = {
    "lfm2": Lfm2Config(**SIZES, layer_types=["conv", "full_attention"], block_multiple_of=8),
    "falcon_h1": FalconH1Config(**SIZES, **MAMBA),
    "qwen3_next": Qwen3NextConfig(**SIZES, **EXPERTS, **LINEAR),
}


def build(config: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(config)  # it keeps which attention was found to fit
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*ATTENTION, *HYBRIDS])
def test_only_models_of_attention_alone_are_packed(name: str, dtype: torch.dtype) -> None:
    model = build((ATTENTION | HYBRIDS)[name], dtype)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert bool(open_head(model).packed) == (name in ATTENTION)
    after = model.state_dict()
    assert {key: value.dtype for key, value in after.items()} == {
        key: value.dtype for key, value in before.items()
    }
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", [*ATTENTION, *HYBRIDS])
def test_what_is_in_float32_beside_few_bits_stays_so(name: str) -> None:
    """An adapter's weights, and the frequencies of rotary embeddings."""
    base = build((ATTENTION | HYBRIDS)[name], torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    before = {key: (value.dtype, value.clone()) for key, value in tensors}
    assert {dtype for dtype, _ in before.values()} >= {torch.bfloat16, torch.float32}
    assert any("lora_A" in key and dtype == torch.float32 for key, (dtype, _) in before.items())
    assert any("inv_freq" in key and dtype == torch.float32 for key, (dtype, _) in before.items())
    open_head(model)
    for key, value in [*model.named_parameters(), *model.named_buffers()]:
        assert value.dtype == before[key][0], key
        assert torch.equal(value, before[key][1]), key


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_rows_log_probabilities_do_not_depend_on_the_row_before_it(name: str) -> None:
    model = build(HYBRIDS[name], torch.bfloat16)
    prompts, responses = [[1, 2, 3], [9, 8]], [[4, 5], [7, 6, 5]]
    together = score_sequences(model, prompts, responses, 1.0, tokens_per_batch=100)
    other = score_sequences(model, [[11, 12, 13], prompts[1]], responses, 1.0, 100)
    assert torch.equal(together[1][0], other[1][0])
