"""Opening model folders: a plain Hugging Face folder, or a PEFT adapter on one."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from exgrpo_cli.errors import InputError, first_line
from exgrpo_cli.recipe import Autocast, ModelSettings, Recipe
from exgrpo_cli.rundir import refuse_removed
from exgrpo_cli.tables import read_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_HUB_SECONDS = 3.0
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def is_adapter(path: str) -> bool:
    """Whether the folder is a PEFT adapter."""
    return (Path(path) / "adapter_config.json").is_file()


def adapter_base(path: str) -> str:
    """The base model that an adapter folder names."""
    file = Path(path) / "adapter_config.json"
    base = read_json(file, "train or fetch the adapter again").get("base_model_name_or_path")
    if not base:
        raise InputError(f"{file}: base_model_name_or_path is missing")
    return str(base)


def check_policy(path: str) -> None:
    """Refuse what cannot be a policy, before anything heavy is loaded.

    A name that is no folder here is taken for a hub name when it looks like one (``org/name``).
    """
    if not path:
        raise InputError("no policy given: set model.path in the recipe, or give --policy")
    folder = Path(path)
    refuse_removed(folder)
    if not folder.exists():
        looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
        if looks_local or folder.parent.is_dir():
            raise InputError(f"{path}: no such policy folder")
        check_hub(path)
        return
    if not folder.is_dir():
        raise InputError(f"{path}: a policy is a folder with config.json and *.safetensors")
    if is_adapter(path):
        if not (folder / "adapter_model.safetensors").is_file():
            raise InputError(f"{path}: adapter_model.safetensors is missing from this adapter")
        check_policy(adapter_base(path))
        return
    if not (folder / "config.json").is_file():
        raise InputError(f"{path}: config.json is missing; a policy is a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"{path}: no weights (*.safetensors) in this policy folder")


@functools.cache
def check_hub(name: str) -> None:
    """Refuse a hub name that is neither in the hub's cache nor to be had, within seconds.

    Left to itself, opening one asks for each file again and again, and looking up the host's name
    alone can take half a minute; so one question is asked, in a thread that is not waited for.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    failed: list[Exception] = []

    def ask() -> None:
        try:
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_SECONDS)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_SECONDS)
    if not failed and not thread.is_alive():
        return
    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set"
    elif failed and isinstance(failed[0], HfHubHTTPError):
        why = f"{constants.ENDPOINT} says: {first_line(failed[0]).rstrip('.')}"
    else:
        why = f"{constants.ENDPOINT} does not answer (is there a network?)"
    raise InputError(
        f"{name}: no such folder, nor in the hub's cache ({constants.HF_HUB_CACHE}), and {why};"
        f" give a folder, or fetch it where there is a network: hf download {name}"
    )


def load_config(path: str, trust_remote_code: bool = False) -> Any:
    """The configuration (transformers) of a model: a folder or a hub name, not an adapter."""
    check_policy(path)  # before what takes long to import
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise InputError(f"{path}: config.json cannot be opened: {first_line(error)}") from error


def check_tokenizer(path: str) -> str:
    """The folder or hub name of a policy's tokenizer: an adapter's own, or its base model's. A
    folder without one is refused by the names of its files alone."""
    has_own = not is_adapter(path) or (Path(path) / "tokenizer_config.json").is_file()
    source = path if has_own else adapter_base(path)
    folder = Path(source)
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise InputError(f"{source}: no tokenizer in this policy folder (tokenizer.json and so on)")
    return source


def resolve_device(name: str) -> torch.device:
    """``auto`` to cuda, else mps, else cpu; other names as torch knows them."""
    import torch

    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise InputError(f"device {name!r} cannot be used here: {reason}") from error
    return device


def dtype_named(name: str) -> torch.dtype:
    """A recipe's ``float32``, ``bfloat16`` or ``float16``; float32 for any other name."""
    import torch

    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name, torch.float32)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` to bfloat16 on a GPU that has it, else float32; others as they are named."""
    import torch

    if name != "auto":
        return dtype_named(name)
    if device.type == "cuda" and torch.cuda.is_bf16_supported():
        return torch.bfloat16
    return torch.float32


def autocasts(device: torch.device, setting: Autocast) -> bool:
    """Whether a device computes in bfloat16, see ``train.autocast``."""
    import torch

    if device.type == "cuda":
        return bool(setting) and torch.cuda.is_bf16_supported()
    return device.type == "cpu" and setting == "always"


def training_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """The weights' type in training: float32 for all that is trained.

    A frozen base under an adapter may be in few bits. Scores are made of the same weights, so that
    they are the trainer's own log-probabilities.
    """
    import torch

    return resolve_dtype(recipe.model.dtype, device) if recipe.lora.enabled else torch.float32


def quiet_transformers() -> None:
    """No progress bars, and errors alone, unless TRANSFORMERS_VERBOSITY says otherwise."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()


def load_tokenizer(path: str, settings: ModelSettings) -> PreTrainedTokenizerBase:
    """The policy's tokenizer; an adapter's own, or its base model's."""
    check_policy(path)  # before what takes long to import
    from transformers import AutoTokenizer

    quiet_transformers()
    source = check_tokenizer(path)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            source, trust_remote_code=settings.trust_remote_code
        )
    except Exception as error:
        raise InputError(
            f"{source}: the tokenizer cannot be opened: {first_line(error)}"
        ) from error
    return tokenizer


def load_model(
    path: str, settings: ModelSettings, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """A causal language model in evaluation mode; an adapter is put on its base model, unmerged.

    Args:
        path: a Hugging Face folder, a PEFT adapter folder, or a hub name.
        settings: attention implementation and whether remote code may run.

    Returns:
        The model (a ``peft.PeftModel`` for an adapter), without gradients switched off.
    """
    check_policy(path)  # before what takes long to import
    from transformers import AutoModelForCausalLM

    quiet_transformers()
    base = adapter_base(path) if is_adapter(path) else path
    options: dict[str, Any] = {}
    if settings.attention != "auto":
        options["attn_implementation"] = settings.attention
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            base,
            dtype=dtype,
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
            **options,
        )
    except Exception as error:
        raise InputError(f"{path}: the policy cannot be opened: {first_line(error)}") from error
    if base != path:
        model = put_on(model, path)
    return model.to(device).eval()


def put_on(model: PreTrainedModel, adapter: str) -> PreTrainedModel:
    """A model under an adapter, of which every tensor has its place, and every place its tensor.

    peft itself passes over tensors that the model has no place for, and leaves places without
    tensors as they are: such an adapter would be without effect, in part or whole.

    Args:
        model: its base, which is changed in place.
    """
    from peft import PeftModel

    there = adapter_tensors(adapter)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what peft warns of is checked below
            found: Any = PeftModel.from_pretrained(model, adapter)
    except Exception as error:  # targets or shapes that this model does not have
        why = " ".join(str(error).split())[:300]
        raise InputError(f"{adapter}: does not fit its base model: {why}") from error
    _compare(adapter, there, found)
    return cast("PreTrainedModel", found)


def adapter_tensors(adapter: str) -> dict[str, list[int]]:
    """The shapes of an adapter's tensors by name, from the head of its file."""
    from safetensors import safe_open

    file = Path(adapter) / "adapter_model.safetensors"
    try:
        with safe_open(str(file), framework="pt") as reader:
            return {name: reader.get_slice(name).get_shape() for name in reader.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors raises its own kind on a damaged file
        raise InputError(f"{file}: not a readable safetensors file: {first_line(error)}") from error


def check_adapter(adapter: str, settings: ModelSettings) -> None:
    """Refuse an adapter that its base model has no place for, without loading weights."""
    import torch

    base = adapter_base(adapter)
    config = load_config(base, settings.trust_remote_code)
    there = adapter_tensors(adapter)
    from peft import PeftConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    quiet_transformers()
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            model: Any = AutoModelForCausalLM.from_config(
                config, trust_remote_code=settings.trust_remote_code
            )
            peft_config: Any = PeftConfig.from_pretrained(adapter)
            peft_config.init_lora_weights = False  # some begin by decomposing the base's weights
            found: Any = get_peft_model(model, peft_config)
    except Exception as error:
        raise InputError(f"{adapter}: does not fit its base model: {first_line(error)}") from error
    _compare(adapter, there, found)


def _compare(adapter: str, there: dict[str, list[int]], model: Any) -> None:
    """That an adapter's tensors are those that the model under it takes, in name and shape."""
    from peft import get_peft_model_state_dict

    places = get_peft_model_state_dict(model, save_embedding_layers=False)
    # An adapter on embedding or head may hold their own weights too (peft's save_embedding_layers).
    strange = there.keys() - places.keys() - model.state_dict().keys()
    other = {n for n, shape in there.items() if n in places and list(places[n].shape) != shape}
    for names, which, what in (
        (strange, "the adapter's", "has no counterpart"),
        (places.keys() - there.keys(), "the base model's", "has no counterpart"),
        (other, "the adapter's", "has another shape than the base model asks for"),
    ):
        if names:
            raise InputError(f"{adapter}: does not fit its base model: {which} {min(names)} {what}")
