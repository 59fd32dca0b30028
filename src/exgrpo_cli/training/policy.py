"""Opening a policy for training, and saving it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exgrpo_cli.errors import InputError
from exgrpo_cli.models import (
    autocasts,
    dtype_named,
    is_adapter,
    load_config,
    load_model,
    load_tokenizer,
    training_dtype,
)
from exgrpo_cli.recipe import ModelSettings, Recipe
from exgrpo_cli.training import distributed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# What a tokenizer may consist of, and the code that comes with a model.
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.tiktoken",
    "*.model",
    "*.py",
)


def saved_dtype(path: str, trust_remote_code: bool = False) -> torch.dtype:
    """The dtype of a policy's weights as its config names it; float32 where it names none.

    An adapter's is float32: it is small, and trained in that.

    Args:
        path: a Hugging Face folder, an adapter folder, or a hub name.
    """
    if is_adapter(path):
        return torch.float32
    config = load_config(path, trust_remote_code)
    found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return dtype_named(str(found).removeprefix("torch."))


def save_policy(
    model: nn.Module,
    tokenizer_source: str,
    out: Path,
    dtype: torch.dtype,
    settings: ModelSettings | None = None,
) -> None:
    """Save a policy as a plain Hugging Face folder, or an adapter as a PEFT folder.

    With it go the generation config and the tokenizer. An adapter names its base model by an
    absolute path where that is a local folder.

    Args:
        tokenizer_source: the folder whose tokenizer files are copied, or a hub name.
        settings: how to open a tokenizer that has to be saved anew (of a hub name).
    """
    model_any: Any = model
    with distributed.shared_folder(out) as folder:
        adapter = hasattr(model_any, "peft_config")
        names = trainable(model).keys() if adapter else None
        state = _cast(distributed.full_state(model, names), dtype)
        if distributed.rank() > 0:
            return
        if adapter:
            _save_adapter(model_any, folder, state)
        else:
            _mend_generation_config(model_any)
            model_any.save_pretrained(folder, state_dict=state)
            _name_dtype(folder / "config.json", dtype)
        _save_tokenizer(tokenizer_source, folder, settings or ModelSettings())


def _cast(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating-point tensors in another dtype; those that share memory (tied) still do."""
    cast: dict[tuple[int, torch.Size], Tensor] = {}
    result = {}
    for name, tensor in state.items():
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            result[name] = tensor
            continue
        key = (tensor.data_ptr(), tensor.shape)
        if key not in cast:
            cast[key] = tensor.detach().to(dtype)
        result[name] = cast[key]
    return result


def _name_dtype(file: Path, dtype: torch.dtype) -> None:
    """Put the dtype of the saved weights into the config; it holds that of the live model."""

    def rename(values: dict[str, Any]) -> None:
        for key, value in values.items():
            if key in ("dtype", "torch_dtype") and value is not None:
                values[key] = str(dtype).removeprefix("torch.")
            elif isinstance(value, dict) and key.endswith("_config"):
                rename(value)

    config = json.loads(file.read_text(encoding="utf-8"))
    rename(config)
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _mend_generation_config(model: Any) -> None:
    """Make a generation config savable: transformers loads contradictory ones, but refuses to
    save them (such as a temperature without ``do_sample``), and no step may be lost to that."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    try:
        config.validate(strict=True)
        return
    except ValueError:
        config.do_sample = True
    try:
        config.validate(strict=True)
    except ValueError:
        from transformers import GenerationConfig

        kept = ("bos_token_id", "eos_token_id", "pad_token_id")
        model.generation_config = GenerationConfig(**{k: getattr(config, k, None) for k in kept})


def _save_adapter(model: Any, folder: Path, state: dict[str, Tensor]) -> None:
    for config in model.peft_config.values():
        base = config.base_model_name_or_path
        if base and Path(base).is_dir():
            config.base_model_name_or_path = str(Path(base).resolve())
    # save_embedding_layers=False: adapters never resize embeddings here, and peft would ask the
    # hub for the base model's vocabulary.
    model.save_pretrained(folder, state_dict=state, save_embedding_layers=False)


def _save_tokenizer(source: str, folder: Path, settings: ModelSettings) -> None:
    own = Path(source)
    if own.is_dir():
        if is_adapter(source) and not (own / "tokenizer_config.json").is_file():
            base = json.loads((own / "adapter_config.json").read_text(encoding="utf-8"))
            _save_tokenizer(base["base_model_name_or_path"], folder, settings)
            return
        for pattern in _TOKENIZER_FILES:
            for file in own.glob(pattern):
                target = folder / file.name
                if file.is_dir():
                    shutil.copytree(file, target, dirs_exist_ok=True)
                else:
                    shutil.copyfile(file, target)
        return
    load_tokenizer(source, settings).save_pretrained(folder)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name, in the model's order (tied ones once)."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def dtype_to_save(policy: str, recipe: Recipe) -> torch.dtype:
    """The dtype of a trained policy's saved weights, see ``train.save_dtype``."""
    name = recipe.train.save_dtype
    if name != "auto":
        return dtype_named(name)
    if recipe.lora.enabled:
        return torch.float32
    return saved_dtype(policy, recipe.model.trust_remote_code)


def open_policy(
    policy: str, recipe: Recipe, device: torch.device, at_first: torch.device
) -> PreTrainedModel:
    """The policy with its trained parameters in float32 and everything else frozen.

    Args:
        device: where it will be trained.
        at_first: where it is put now.
    """
    lora = recipe.lora
    if is_adapter(policy) and not lora.enabled:
        raise InputError(
            f"{policy}: this policy is an adapter and lora.enabled is false; set it to true to"
            " train the adapter on, or merge it into its base model first"
        )
    model: Any = load_model(policy, recipe.model, at_first, training_dtype(recipe, device))
    if is_adapter(policy):
        model.set_adapter(model.active_adapter)
        if autocasts(device, recipe.train.autocast):
            for parameter in model.parameters():  # whole modules that the adapter replaces
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
    elif lora.enabled:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=lora.targets[0] if lora.targets == ["all-linear"] else lora.targets,
        )
        try:
            model = get_peft_model(model, config)
        except ValueError as error:
            raise InputError(f"lora.targets = {lora.targets}: {error}") from error
    recompute = recipe.train.gradient_checkpointing
    if recompute is True or (recompute == "auto" and device.type == "cuda"):
        inner = model.get_base_model() if hasattr(model, "peft_config") else model
        inner.gradient_checkpointing_enable({"use_reentrant": False})
    return model
