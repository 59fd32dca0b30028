"""A LoRA adapter merged into its base model: one plain Hugging Face folder."""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exgrpo_cli.errors import InputError, StageError, first_line
from exgrpo_cli.progress import Log, quiet
from exgrpo_cli.recipe import ModelSettings

if TYPE_CHECKING:
    import torch


# The merged model's logits may differ from those of base and adapter by this share of the largest
# one, over a few tokens in float32; rounding alone is a thousand times less.
_TOLERANCE = 1e-3


def merge(
    adapter: Path,
    out: Path,
    *,
    base: str | None = None,
    dtype: str = "auto",
    settings: ModelSettings | None = None,
    force: bool = False,
    log: Log = quiet,
) -> dict[str, Any]:
    """Merge an adapter into its base model, W + (alpha / rank) B A, and save it as a plain folder.

    Runs on the CPU, in float32, whatever is saved, so that the sum is rounded once: 4 bytes of
    memory a parameter, and 2 more while half of that is saved. Before anything is written, the
    merged model's logits of a few tokens are compared with those of base and adapter.

    Args:
        adapter: a PEFT adapter folder, as train writes it with ``lora.enabled``.
        out: the model's folder; written whole or not at all.
        base: another place of the base model than the adapter names.
        dtype: of the saved weights: ``float32``, ``bfloat16``, ``float16``, or ``auto``: as the
            base model's.
        settings: whether remote code may run.

    Returns:
        ``policy`` (the folder), ``base``, ``dtype``, ``merged`` (adapted weights), ``parameters``,
        ``max_logit_difference`` (of the comparison, float32) and ``seconds``.

    Raises:
        InputError: not an adapter, of a kind that cannot be merged, damaged, or of another model;
            no base model; ``out`` exists, or is the adapter or the base.
        StageError: the merged model does not compute what base and adapter do.
    """
    started = time.monotonic()
    opened = settings or ModelSettings()
    config = _read_config(adapter)
    base = base or str(config.get("base_model_name_or_path") or "")
    _check_paths(adapter, base, out, force)

    import torch

    from exgrpo_cli.models import adapter_tensors, dtype_named, load_model, put_on
    from exgrpo_cli.training.policy import save_policy, saved_dtype

    log(f"merge: opening {base} on the CPU, in float32")
    plain: Any = load_model(base, opened, torch.device("cpu"), torch.float32)
    kind = saved_dtype(base, opened.trust_remote_code) if dtype == "auto" else dtype_named(dtype)
    model: Any = put_on(plain, str(adapter)).eval()
    adapted = sum(".lora_A." in n or "lora_embedding_A" in n for n in adapter_tensors(str(adapter)))
    log(f"merge: merging {adapted} adapted weights of {adapter}")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied embeddings; what comes of them is seen below
        before = _logits(model)
        try:
            merged = model.merge_and_unload(safe_merge=True)
        except ValueError as error:  # peft's search for what is not finite
            raise InputError(f"{adapter}: cannot be merged: {first_line(error)}") from error
        difference = float((before - _logits(merged)).abs().max())
    if not difference <= _TOLERANCE * float(before.abs().max()):
        raise StageError(
            f"{adapter}: the merged model's logits are off by {difference:.3g}; does the adapter"
            " change a weight that other modules share (tied embeddings)?"
        )
    if hasattr(merged, "peft_config"):  # earlier peft leaves it, and it would be saved as adapter
        del merged.peft_config
    log(f"merge: writing {out}")
    tokenizer = str(adapter) if (adapter / "tokenizer_config.json").is_file() else base
    save_policy(merged, tokenizer, out, kind, opened)
    return {
        "policy": str(out),
        "base": base,
        "dtype": str(kind).removeprefix("torch."),
        "merged": adapted,
        "parameters": sum(p.numel() for p in merged.parameters()),
        "max_logit_difference": difference,
        "seconds": round(time.monotonic() - started, 3),
    }


def _read_config(adapter: Path) -> dict[str, Any]:
    """The adapter's own settings, of a kind that can be merged."""
    file = adapter / "adapter_config.json"
    if not adapter.is_dir():
        raise InputError(f"{adapter}: no such adapter folder")
    if not file.is_file():
        plain = (adapter / "config.json").is_file()
        why = "a whole model needs no merging" if plain else "adapter_config.json is missing"
        raise InputError(f"{adapter}: not an adapter; {why}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind = str(config["peft_type"])
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{file}: not an adapter's configuration: {first_line(error)}") from None
    if kind != "LORA":
        raise InputError(f"{file}: peft_type {kind}; only LORA adapters can be merged")
    if not (adapter / "adapter_model.safetensors").is_file():
        raise InputError(f"{adapter}: adapter_model.safetensors is missing from this adapter")
    return dict(config)


def _check_paths(adapter: Path, base: str, out: Path, force: bool) -> None:
    from exgrpo_cli.models import check_policy, is_adapter

    if not base:
        raise InputError(f"{adapter}: names no base model; give it: --base PATH")
    try:
        check_policy(base)
    except InputError as error:
        raise InputError(f"base model of {adapter}: {error}; give another: --base PATH") from None
    if is_adapter(base):
        raise InputError(f"{base}: is an adapter itself; merge that one into its base model first")
    for taken in (adapter, Path(base)):
        if out.resolve() == taken.resolve():
            raise InputError(f"{out}: is merged itself; give the result a folder of its own")
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: is a file; the merged model is a folder")
    if out.exists() and not force:
        raise InputError(f"{out}: exists already; choose another folder, or replace it: --force")


def _logits(model: Any) -> torch.Tensor:
    """``[8, V]`` logits of a few tokens."""
    import torch

    ids = torch.arange(8).remainder(model.get_input_embeddings().weight.shape[0])
    logits: torch.Tensor = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    return logits
