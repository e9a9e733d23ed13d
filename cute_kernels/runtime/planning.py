"""The kernels that calls launch, found without running or compiling one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

from .arch import Architecture
from .backend import chosen_backend, resolve_backend
from .launch import Launcher, launcher
from .replay import OPS_BY_OVERLOAD
from .spec import KernelSpec

_META = torch.device("meta")
#: Arguments of the ``_out`` form of an op that its functional form lacks.
_OUT_ARGUMENTS = ("out", "accumulate")


class KernelNotes(TorchDispatchMode):
    """Dispatch mode that notes the kernels of all ops that are called in its block.

    Enter a ``FakeTensorMode`` around it, so that nothing is computed. Kernels are those of the
    active backend for the device of the fake tensors. Reference backends have none.

    Attributes:
        specs: The kernels, in the order in which they were first needed, as keys.
        architecture: Architecture of the kernels. None if no kernel was noted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.specs: dict[KernelSpec, None] = {}
        self.architecture: Architecture | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "grouped":
            # GroupedTensors call ops of this package, which are dispatched here, too.
            return NotImplemented
        kwargs = kwargs or {}
        if func.namespace == "cute_kernels":
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Plan an op on tensors of the same metadata without data."""
        name = func.__name__.partition(".")[0].removesuffix("_out")
        op_class = OPS_BY_OVERLOAD.get(getattr(torch.ops.cute_kernels, name).default)
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        if op_class is None or not tensors:
            return
        kwargs = {name: value for name, value in kwargs.items() if name not in _OUT_ARGUMENTS}
        device = tensors[0].device
        backend = resolve_backend(chosen_backend(), device)
        if backend.arch == "reference":
            return
        launch = launcher(backend, device)
        self.architecture = launch.target
        with _disable_current_modes():
            args, kwargs = tree_map_only(Tensor, _without_data, (args, kwargs))
            op = op_class(*args, **kwargs)
            op.check()
            run = op.build_runner(_NotingLauncher(launch, self.specs))
            outputs = [spec.allocate(_META, False) for spec in op.outputs()]
            run(op, outputs, **({"fresh": True} if op.fills_fresh else {}))


@dataclasses.dataclass
class _NotingLauncher:
    """A launcher that notes the specs of kernels and launches nothing.

    Attributes:
        launch: The launcher that calls would use.
        specs: Receives the specs as keys.
    """

    launch: Launcher
    specs: dict[KernelSpec, None]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.launch, name)

    def kernel(self, spec: KernelSpec) -> Callable[..., None]:
        """Note ``spec`` and return a kernel that does nothing."""
        self.specs[spec] = None
        return lambda *arguments: None


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
