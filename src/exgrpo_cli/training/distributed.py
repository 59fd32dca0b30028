"""Several processes as one trainer: torch's process group, FSDP2, and what they tell each other.

In a single process every function here is the identity, so the trainer is written once. Processes
are started by ``torchrun``, which sets RANK, WORLD_SIZE and LOCAL_RANK.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from exgrpo_cli.errors import InputError
from exgrpo_cli.machine import processes
from exgrpo_cli.tables import atomic_folder

T = TypeVar("T")


def ranks() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This one's number, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextlib.contextmanager
def process_group(device: str) -> Iterator[str]:
    """Join the processes that torchrun started; a single process joins nothing.

    Yields the device of this process: with several, ``cuda`` becomes that of its local rank.
    """
    if processes() == 1:
        yield device
        return
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise InputError(
            f"train.device is {device!r}; with several processes it is auto, cpu or cuda"
        )
    if device == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        asked, there = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if asked > there:
            raise InputError(
                f"{there} GPUs here for {asked} processes; start torchrun with --nproc-per-node"
                f" {there}"
            )
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def gather(value: T) -> list[T]:
    """What each process has, in their order; everybody gets all of it."""
    if ranks() == 1:
        return [value]
    found: list[Any] = [None] * ranks()
    dist.all_gather_object(found, value)
    return found


def barrier() -> None:
    """Wait for all."""
    gather(None)


@contextlib.contextmanager
def shared_folder(path: Path) -> Iterator[Path]:
    """:func:`exgrpo_cli.tables.atomic_folder`, of one process, for all of them to write into."""
    if rank() == 0:
        with atomic_folder(path) as folder:
            yield Path(gather(str(folder))[0])
            barrier()
    else:
        yield Path(gather("")[0])
        barrier()
    barrier()  # nobody goes on before it stands


class Whole(nn.Module):
    """Calls a function inside the forward pass of a model's outermost module.

    FSDP2 gathers a module's weights around its forward pass. The log-probabilities need the
    language-model head's outside of any module's, chunk by chunk, so all of it goes in here.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], T]) -> T:
        return function()


def shard(model: nn.Module, device: torch.device) -> Whole | None:
    """Split a model's weights over the processes with FSDP2; None in a single process.

    Each decoder layer is a unit that is gathered when it is run and freed after it; embedding,
    head and what else there is are one more. Weights, gradients and optimizer state are sharded,
    in the weights' own dtype.

    Args:
        model: a transformers causal language model, or a ``peft.PeftModel`` on one; on the CPU or
            on the device. Its parameters become DTensors on the device.
    """
    if ranks() == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (ranks(),))
    names = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in names:
            fully_shard(module, mesh=mesh)
    whole = Whole(model)
    fully_shard(whole, mesh=mesh)
    return whole.train(model.training)


def full(tensor: Tensor) -> Tensor:
    """A sharded tensor whole, on every process; any other as it is."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_state(model: nn.Module, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """The state dict with whole tensors, on the first process's CPU; empty on the others.

    Tensors that share memory (tied) still do. In a single process it is the plain state dict.
    """
    wanted = {n: v for n, v in model.state_dict().items() if names is None or n in names}
    if ranks() == 1:
        return wanted
    tied = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    state: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    for name, tensor in wanted.items():
        key = tied.get(name, id(tensor))
        if key not in seen:
            whole = full(tensor.detach())
            seen[key] = whole.cpu() if rank() == 0 else torch.empty(0)
        state[name] = seen[key]
    return state if rank() == 0 else {}


def save_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write tensors as safetensors, each process its own shards (torch's distributed checkpoint).

    Args:
        tensors: of the same names on every process; DTensors or plain ones.
        folder: the same on every process.
    """
    dcp = _checkpoints()

    writer = dcp.HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    with _quiet():
        dcp.save(dict(tensors), storage_writer=writer, no_dist=ranks() == 1)


def saved_tensors(folder: Path) -> dict[str, torch.Size]:
    """Names and shapes of the tensors in a folder of safetensors, sharded or not."""
    dcp = _checkpoints()

    found = dcp.HuggingFaceStorageReader(path=str(folder)).read_metadata().state_dict_metadata
    return {name: getattr(entry, "size", torch.Size()) for name, entry in found.items()}


def load_tensors(tensors: dict[str, Tensor], folder: Path) -> None:
    """Fill tensors from a folder of safetensors, however many processes wrote it.

    Args:
        tensors: names as saved, of the full shapes as saved; filled in place.
        folder: the same on every process.
    """
    dcp = _checkpoints()

    reader = dcp.HuggingFaceStorageReader(path=str(folder))
    with _quiet():
        dcp.load(dict(tensors), storage_reader=reader, no_dist=ranks() == 1)


def _checkpoints() -> Any:
    """torch's distributed checkpoints, whose names mypy does not see."""
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that a checkpoint is made in one process; that is meant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
