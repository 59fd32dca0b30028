"""docs/memory.md and benchmarks/memory.py: what a GPU has to hold."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks/memory.py"

if not SCRIPT.exists():
    pytest.skip("the benchmarks are not part of this copy", allow_module_level=True)


def load() -> Any:
    spec = importlib.util.spec_from_file_location("memory_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


memory = load()


def test_the_document_quotes_the_table() -> None:
    lines = memory.table(memory.MODELS, [1, 4, 8], 16384, 80e9, 16)
    assert "\n".join(lines) in (ROOT / "docs/memory.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen2.5-Math-1.5B", 1.543714), ("Qwen2.5-7B", 7.615617), ("Llama-3.1-8B", 8.030261)],
)
def test_parameters_are_those_of_the_published_models(name: str, billions: float) -> None:
    (shapes,) = (s for s in memory.MODELS if s.name == name)
    assert shapes.parameters / 1e9 == pytest.approx(billions, abs=1e-6)


def test_shapes_and_adapter_of_a_real_configuration(tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=300, hidden_size=48, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, intermediate_size=80, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    shapes = memory.read_shapes(tmp_path)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    assert shapes.parameters == sum(p.numel() for p in model.parameters())
    adapted = get_peft_model(model, LoraConfig(r=5, target_modules="all-linear"))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert shapes.lora(5) == trained
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen2"


@pytest.mark.parametrize(
    "options",
    [{}, {"autocast": False}, {"rank": 4}, {"checkpointing": True}],
    ids=str,
)
def test_activations_are_what_autograd_keeps(options: dict[str, Any]) -> None:
    shapes = memory.Shapes("small", 64, 3, 4, 1, 32, 112, 300, False, True)
    # A number of tokens that is no width: copies of weights are told by their shapes.
    measured, _ = memory.measured_activations(shapes, 250, **options)
    if "checkpointing" in options:
        expected = memory.checkpoint(shapes)
    else:
        expected = memory.layer_activations(shapes, **options)
    assert measured == expected
