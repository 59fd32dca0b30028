"""An adapter is used only where each of its tensors has its place in the base model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from exgrpo_cli.errors import InputError
from exgrpo_cli.models import check_adapter, load_model
from exgrpo_cli.recipe import ModelSettings

SETTINGS = ModelSettings()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
        )
    ).save_pretrained(folder)  # fmt: skip
    return folder


def make_adapter(base: Path, folder: Path, **config: Any) -> Path:
    from peft import LoraConfig, get_peft_model

    settings = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False} | config
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    model = get_peft_model(model, LoraConfig(**settings))
    model.save_pretrained(folder, save_embedding_layers=bool(config.get("embeddings")))
    return folder


def check_both(adapter: Path) -> None:
    check_adapter(str(adapter), SETTINGS)
    load_model(str(adapter), SETTINGS, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"use_dora": True},
        {"target_modules": ["v_proj"], "layers_to_transform": [1]},
    ],
    ids=["all", "embeddings", "whole-head", "dora", "one-layer"],
)
def test_adapters_that_peft_saves_fit(base: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    check_both(make_adapter(base, tmp_path / "adapter", **config))


Tensors = dict[str, torch.Tensor]
FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): value for name, value in tensors.items()}


def without_first(tensors: Tensors) -> Tensors:
    return {name: value for name, value in tensors.items() if name != FIRST}


def wider(tensors: Tensors) -> Tensors:
    return {**tensors, FIRST: torch.zeros(2, 25)}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (renamed("base_model.model.model.", "base_model.model."),
         r"the adapter's base_model\.model\.layers\.0\.\S+ has no counterpart"),
        (renamed("layers.1.", "layers.7."), r"the adapter's \S+layers\.7\.\S+ has no counterpart"),
        (renamed("q_proj", "qkv_proj"), r"the adapter's \S+qkv_proj\S+ has no counterpart"),
        (without_first, rf"the base model's {FIRST} has no counterpart"),
        (wider, r"(size mismatch|another shape)"),
        (lambda _: {"x": torch.zeros(1)}, r"the adapter's x has no counterpart"),
    ],
    ids=["prefix", "layer", "module", "missing", "shape", "nothing"],
)  # fmt: skip
def test_adapters_of_other_models_are_refused(
    base: Path, tmp_path: Path, change: Callable[[Tensors], Tensors], says: str
) -> None:
    adapter = make_adapter(base, tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    for use in (
        lambda: check_adapter(str(adapter), SETTINGS),
        lambda: load_model(str(adapter), SETTINGS, torch.device("cpu"), torch.float32),
    ):
        with pytest.raises(InputError, match=rf"does not fit its base model: .*{says}") as error:
            use()
        assert "\n" not in str(error.value)


def test_damaged_adapters_are_one_line(base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(base, tmp_path / "adapter")
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text())
    shutil.copytree(adapter, tmp_path / "targets")
    other = tmp_path / "targets" / "adapter_config.json"
    other.write_text(json.dumps({**config, "target_modules": ["nothing_of_it"]}))
    with pytest.raises(InputError, match=r"does not fit its base model: .*nothing_of_it"):
        check_adapter(str(other.parent), SETTINGS)
    (adapter / "adapter_model.safetensors").write_bytes(b"\0" * 40)
    with pytest.raises(InputError, match="not a readable safetensors file"):
        check_adapter(str(adapter), SETTINGS)
