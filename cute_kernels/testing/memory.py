"""Memory of a training step: the tensors that autograd saves, and the peak of fake tensors."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from torch.multiprocessing.reductions import StorageWeakRef


class SavedTensor(NamedTuple):
    """A tensor that is saved for the backward pass, and the bytes of its storage."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


@contextlib.contextmanager
def record_saved_tensors(module: nn.Module) -> Iterator[list[SavedTensor]]:
    """Yield a list of the tensors that calls inside the block save for their backward passes.

    Each storage is listed once. Parameters of the module are left out.
    """
    # A weak reference prevents another storage from getting the same address.
    known = {StorageWeakRef(p.untyped_storage()) for p in module.parameters()}
    saved: list[SavedTensor] = []

    def pack(t: Tensor) -> Tensor:
        """Record a saved tensor, unless its storage is known."""
        storage = t.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference not in known:
            known.add(reference)
            saved.append(SavedTensor(tuple(t.shape), t.dtype, storage.nbytes()))
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        yield saved


def fake_peak_bytes(step: Callable[[], object], existing: Sequence[Tensor]) -> int:
    """Return the peak memory in bytes of a step on fake tensors, above the existing tensors.

    torch's ``MemTracker`` adds up the live storages, without temporaries inside an op and without
    the rounding of an allocator.

    Args:
        step: The step; it runs on fake tensors, so nothing is computed.
        existing: Tensors that exist before the step, and do not count.
    """
    tracker = MemTracker()
    tracker.track_external(*existing)
    with tracker:
        step()
    totals = tracker.get_tracker_snapshot("peak").values()
    return sum(int(total["Total"]) for total in totals) - sum(t.nbytes for t in existing)
