"""Records the tensors that autograd saves for backward passes."""

import contextlib
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


class SavedTensor(NamedTuple):
    """A tensor that is saved for a backward pass, and the bytes of its storage."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


@contextlib.contextmanager
def record_saved_tensors(module):
    """Record the tensors that calls inside save, each storage once, without the parameters."""
    # Weak references keep the storages' addresses from being used again.
    known = {StorageWeakRef(p.untyped_storage()) for p in module.parameters()}
    saved = []

    def pack(t):
        """Record the storage of t if it is new."""
        storage = t.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference not in known:
            known.add(reference)
            saved.append(SavedTensor(tuple(t.shape), t.dtype, storage.nbytes()))
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        yield saved
