"""Saving trainer state: safetensors and JSON, a whole folder at a time."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from exgrpo_cli.errors import InputError
from exgrpo_cli.tables import remove_folder
from exgrpo_cli.training import distributed
from exgrpo_cli.training.policy import trainable

_FORMAT = 1


def save_trainer(
    out: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    updates: int,
    masters: bool,
    metrics: Mapping[str, Any],
    notes: Mapping[str, Any] | None = None,
    skipped: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Save what the next step needs beside the policy.

    ``trainer.json`` holds the counters and the metrics of the step that made it;
    ``optimizer.safetensors`` the optimizer's tensors as ``PARAMETER/exp_avg`` and so on;
    ``masters.safetensors`` the trained weights in float32, where the policy is saved in fewer
    bits. Several processes write their shards of both, as ``shard-00001-….safetensors`` and so on;
    any number of processes can go on from either form. Random numbers need no state: each step
    seeds its own from the recipe. ``skipped.jsonl`` is there when an update was left out.

    Args:
        optimizer: over the trainable parameters of ``model``, in their order.
        step: of the policy that was made, t + 1.
        updates: optimizer updates done since the run began.
        notes: what later steps need to know of earlier ones; JSON-able.
    """
    names = list(trainable(model))
    state = optimizer.state_dict()["state"]
    tensors = {
        f"{name}/{key}": value.detach()
        for index, name in enumerate(names)
        for key, value in state.get(index, {}).items()
    }
    weights = {n: p.detach() for n, p in trainable(model).items()} if masters else {}
    with distributed.shared_folder(out) as folder:
        if distributed.ranks() > 1:
            distributed.save_tensors(tensors | weights, folder)
        else:
            save_file(_on_cpu(tensors), folder / "optimizer.safetensors")
            if masters:
                save_file(_on_cpu(weights), folder / "masters.safetensors")
        if distributed.rank() > 0:
            return
        description = {
            "format": _FORMAT,
            "step": step,
            "updates": updates,
            "optimizer": type(optimizer).__name__,
            "parameters": len(names),
            "tensors": len(tensors) + len(weights),
            "metrics": dict(metrics),
            "notes": dict(notes or {}),
        }
        text = json.dumps(description, indent=2, sort_keys=True, allow_nan=False) + "\n"
        (folder / "trainer.json").write_text(text, encoding="utf-8")
        if skipped:
            text = "".join(json.dumps(line) + "\n" for line in skipped)
            (folder / "skipped.jsonl").write_text(text, encoding="utf-8")


def fresh_state(step: int, notes: Mapping[str, Any]) -> dict[str, Any]:
    """The ``trainer.json`` of a state in which nothing was updated yet, of any policy."""
    return {
        "format": _FORMAT,
        "step": step,
        "updates": 0,
        "parameters": None,
        "tensors": 0,
        "metrics": {},
        "notes": dict(notes),
    }


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def load_trainer(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int
) -> int:
    """Bring optimizer and weights to where :func:`save_trainer` left them.

    Args:
        model: the policy, as loaded from its own folder in float32; where the trainer state has
            float32 masters, they replace its weights.

    Returns:
        Optimizer updates done since the run began.

    Raises:
        InputError: no such state, a damaged one, or one of another step or model.
    """
    description = read_trainer(path)
    if description["step"] != step:
        raise InputError(
            f"{path}: this trainer state belongs to the policy of step {description['step']}, not"
            f" to that of step {step}"
        )
    parameters = trainable(model)
    if description["parameters"] not in (None, len(parameters)):
        raise InputError(
            f"{path}: {description['parameters']} parameters were trained, this policy has"
            f" {len(parameters)}; it is another model's"
        )
    found = _read_state(path, parameters, description.get("tensors"))
    masters = {name: found.pop(name) for name in list(found) if name in parameters}
    if masters:
        _put_masters(path, masters, parameters)
    state: dict[int, dict[str, Tensor]] = {}
    indices = {name: index for index, name in enumerate(parameters)}
    for name, tensor in found.items():
        parameter, _, key = name.rpartition("/")
        state.setdefault(indices[parameter], {})[key] = tensor
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    return int(description["updates"])


def _read_state(
    path: Path, parameters: Mapping[str, nn.Parameter], expected: int | None
) -> dict[str, Tensor]:
    """A trainer state's tensors, sharded as the parameters are that they belong to; none are
    expected while every update was left out."""
    if expected == 0:
        return {}
    if not any(path.glob("shard-*.safetensors")) and not (path / "optimizer.safetensors").exists():
        raise InputError(f"{path / 'optimizer.safetensors'}: missing from this trainer state")
    try:
        shapes = distributed.saved_tensors(path)
    except Exception as error:  # safetensors and torch raise their own kinds on a damaged file
        raise InputError(f"{path}: not readable as safetensors: {error}") from error
    if expected is not None and len(shapes) != expected:
        raise InputError(
            f"{path}: {len(shapes)} tensors of {expected}; a file is missing from this trainer"
            " state, or lies there that is not of it"
        )
    wanted: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        owner = name if name in parameters else name.rpartition("/")[0]
        if owner not in parameters:
            raise InputError(f"{path}: {owner} is not in this policy; it is another model's")
        if shape not in (parameters[owner].shape, torch.Size()):
            raise InputError(
                f"{path}: {name} is {list(shape)}, this policy's {list(parameters[owner].shape)};"
                " a shard file is missing, or it is another model's"
            )
        wanted[name] = (
            torch.zeros_like(parameters[owner], requires_grad=False)
            if shape == parameters[owner].shape
            else torch.zeros(())
        )
    try:
        distributed.load_tensors(wanted, path)
    except Exception as error:
        raise InputError(f"{path}: not readable as safetensors: {error}") from error
    return wanted


def read_trainer(path: Path) -> dict[str, Any]:
    """The description in a trainer state: ``step``, ``updates``, ``metrics``, ..."""
    file = path / "trainer.json"
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no trainer state (trainer.json is missing)") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(description, dict) or description.get("format") != _FORMAT:
        raise InputError(f"{file}: not a trainer state of format {_FORMAT}")
    return description


def _put_masters(
    path: Path, masters: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Give the parameters their float32 weights."""
    if masters.keys() != parameters.keys():
        raise InputError(f"{path}: holds other weights than this policy has")
    with torch.no_grad():
        for name, parameter in parameters.items():
            # The policy is the masters rounded: at most a unit in the last place of bfloat16.
            allowed = 2**-7 * parameter.float().abs() + 1e-6
            apart = (masters[name] - parameter.float()).abs() > allowed
            if bool(distributed.full(apart.any())):
                raise InputError(f"{path}: {name} differs from the policy's; not its trainer state")
            parameter.copy_(masters[name])


def prune_trainers(latest: Path, keep: int) -> list[Path]:
    """Remove old trainer states beside the latest, so that ``keep`` remain.

    Only folders named like the latest are looked at (``step-00007``, or ``step-00007-trainer`` and
    so on where that is its form), and none after it: policies may lie there too.
    """
    form = re.fullmatch(r"step-(\d{5,})(.*)", latest.name)
    if form is None:
        return []
    found = []
    for path in latest.parent.glob("step-*"):
        match = re.fullmatch(r"step-(\d{5,})" + re.escape(form[2]), path.name)
        if match and int(match[1]) <= int(form[1]) and (path / "trainer.json").is_file():
            found.append((int(match[1]), path))
    removed = [path for _, path in sorted(found)[: max(len(found) - keep, 0)]]
    for path in removed:
        remove_folder(path)
    for path in latest.parent.glob(".step-*.tmp"):  # left where a kill came meanwhile
        match = re.fullmatch(r"\.step-(\d{5,})" + re.escape(form[2]) + r"\.[^.]+\.tmp", path.name)
        if match and int(match[1]) <= int(form[1]):
            shutil.rmtree(path, ignore_errors=True)
    return removed
