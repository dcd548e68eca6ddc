"""Several processes that train one model, each on its share of the sequences of every batch.

`torchrun` starts them and says by the environment who is who. Weights, gradients and what the
optimizers remember are spread over all (FSDP2): a layer's weights are brought together while it
runs. Losses are normalised by the whole batch's counts, so that sums over processes are what one
process would have got.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dgemma.errors import UsageError


@dataclass(frozen=True, slots=True)
class Group:
    """The processes of a run, and which of them this one is."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this one writes and reports."""
        return self.rank == 0

    def part(self, rows: Tensor) -> Tensor:
        """The sequences of this process, of rows [fields, sequences, rows]."""
        return rows if self.size == 1 else rows.chunk(self.size, dim=1)[self.rank]

    def sum(self, own: Tensor) -> Tensor:
        """The sum over all processes; no gradient flows through it."""
        if self.size == 1:
            return own
        total = own.detach().clone()
        dist.all_reduce(total)
        return total

    def wait(self, device: torch.device) -> None:
        """Until all processes have come here."""
        self.sum(torch.zeros((), device=device))

    def any(self, own: bool, device: torch.device) -> bool:
        """Whether it holds for one process at least."""
        if self.size == 1:
            return own
        return bool(self.sum(torch.tensor(float(own), device=device)).item())

    def said_by_first(self, own: int, device: torch.device) -> int:
        """The first process's number, for all: what is read off a clock differs."""
        if self.size == 1:
            return own
        number = torch.tensor(own, device=device)
        dist.broadcast(number, src=0)
        return int(number.item())


ALONE = Group()


def join(device: torch.device) -> tuple[Group, torch.device]:
    """Meet the other processes, if `torchrun` started several; this one's place and device."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return ALONE, device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Group(dist.get_rank(), size), device


def leave(group: Group) -> None:
    """Part from the other processes."""
    if group.size > 1 and dist.is_initialized():
        dist.destroy_process_group()


def check_shares(sequences: int, accumulate: int, group: Group) -> None:
    """Refuse a batch that cannot be cut into equal parts of an even number of sequences."""
    parts = 2 * accumulate * group.size
    if accumulate < 1 or sequences % parts:
        raise UsageError(
            f"{sequences} sequences in a batch, {accumulate} parts and {group.size} processes; "
            f"the sequences must be a multiple of {parts}, since every second one of each share "
            "is conditioned on the model's own guess"
        )


def shard(objective: nn.Module, layers: nn.ModuleList, device: str, dtype: torch.dtype) -> None:
    """Spread the weights over all processes, in place: float32 where trained, `dtype` in passes.

    One layer after the other, so that no process ever holds all of them in float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # counts of rows are among them
    )
    for module in (*layers, objective):
        _prepare(module, dtype)
        fully_shard(module, mesh=mesh, mp_policy=policy)


def _prepare(module: nn.Module, dtype: torch.dtype) -> None:
    for weight in module.parameters():
        wanted = torch.float32 if weight.requires_grad else dtype
        if weight.dtype != wanted:
            weight.data = weight.data.to(wanted)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(dtype)
