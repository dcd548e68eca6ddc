"""Training in several processes: FSDP2 sharding, collectives, and tensors that may be sharded.

`torchrun` starts the processes. Weights, gradients and optimizer states are sharded over all of
them; a layer's weights are gathered while it runs. Losses are normalized by the counts of the whole
batch, so that their sum over processes is the loss of a single process.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dgemma.errors import UsageError


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The processes of a run; `rank` identifies this one."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """True for rank 0, which reports and writes files."""
        return self.rank == 0

    def slice_batch(self, rows: Tensor) -> Tensor:
        """Return this process's sequences of rows [fields, sequences, rows]."""
        return rows if self.size == 1 else rows.chunk(self.size, dim=1)[self.rank]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over all processes, without a gradient."""
        if self.size == 1:
            return x
        total = x.detach().clone()
        dist.all_reduce(total)
        return total

    def barrier(self, device: torch.device) -> None:
        self.all_reduce(torch.zeros((), device=device))

    def any(self, flag: bool, device: torch.device) -> bool:
        """Return True if the flag is set in at least one process."""
        if self.size == 1:
            return flag
        return bool(self.all_reduce(torch.tensor(float(flag), device=device)).item())

    def broadcast(self, number: int, device: torch.device) -> int:
        """Return rank 0's number, for values that differ, such as clock readings."""
        if self.size == 1:
            return number
        shared = torch.tensor(number, device=device)
        dist.broadcast(shared, src=0)
        return int(shared.item())


SINGLE_PROCESS = ProcessGroup()


def init_distributed(device: torch.device) -> tuple[ProcessGroup, torch.device]:
    """Join the process group if `torchrun` started several; returns it and this rank's device."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return SINGLE_PROCESS, device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return ProcessGroup(dist.get_rank(), size), device


def destroy_distributed(group: ProcessGroup) -> None:
    if group.size > 1 and dist.is_initialized():
        dist.destroy_process_group()


def check_batch_split(sequences: int, grad_accum_steps: int, group: ProcessGroup) -> None:
    """Refuse a batch that does not split into micro-batches of an even number of sequences."""
    divisor = 2 * grad_accum_steps * group.size
    if grad_accum_steps < 1 or sequences % divisor:
        raise UsageError(
            f"{sequences} sequences in a batch, {grad_accum_steps} micro-batches and {group.size} "
            f"processes; the sequences must be a multiple of {divisor}, since every second one of "
            "each micro-batch is self-conditioned"
        )


def shard_model(
    objective: nn.Module, layers: nn.ModuleList, device: str, dtype: torch.dtype
) -> None:
    """Shard the weights over all processes in place: trained ones in float32, `dtype` in passes.

    One layer at a time, so that no process holds the whole model in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # row counts are among them
    )
    for module in (*layers, objective):
        _cast_weights(module, dtype)
        fully_shard(module, mesh=mesh, mp_policy=policy)


def _cast_weights(module: nn.Module, dtype: torch.dtype) -> None:
    for weight in module.parameters():
        target = torch.float32 if weight.requires_grad else dtype
        if weight.dtype != target:
            weight.data = weight.data.to(target)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(dtype)


# --- tensors that may be sharded (DTensor, which is imported only where there is one)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor on every process; all of them must call this."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def local_shard(tensor: Tensor) -> Tensor:
    """Return this process's shard, sharing its memory."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def shard_like(full: Tensor, model: Tensor) -> Tensor:
    """Shard a full tensor, the same on every process, as `model` is."""
    full, mesh = full.to(model.device), getattr(model, "device_mesh", None)
    if mesh is None:
        return full
    from torch.distributed.tensor import distribute_tensor

    placements = model.placements  # type: ignore[attr-defined]
    # Every process has the full tensor: nothing is sent.
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def gather_to_cpu(tree: Any, *, keep: bool) -> Any:
    """Gather the tensors of a tree of dicts and lists to the CPU; as None if not `keep`.

    All processes take part, one tensor at a time; those that do not keep need no memory for it.
    """
    if isinstance(tree, Tensor):
        full = full_tensor(tree.detach())
        return full.cpu() if keep else None
    if isinstance(tree, dict):
        return {key: gather_to_cpu(value, keep=keep) for key, value in tree.items()}
    if isinstance(tree, list):
        return [gather_to_cpu(value, keep=keep) for value in tree]
    return tree


def shard_state_like(state: Any, model: Tensor) -> Any:
    """Shard an optimizer's state of one weight as the weight is."""
    return {
        key: shard_like(value, model)
        if isinstance(value, Tensor) and value.shape == model.shape
        else value
        for key, value in state.items()
    }


@torch.no_grad()
def all_finite(tensors: list[Tensor]) -> Tensor:
    """Return per tensor whether this process's shard is finite."""
    return torch.stack([local_shard(tensor).detach().isfinite().all() for tensor in tensors])
