"""Names of architectures, and the architecture of a device."""

import dataclasses
import functools

import torch

from ptx_emulator.host.suggestions import did_you_mean

from ..arch import ARCHS
from ..records import UnsupportedError

#: Names of the architectures of ``ARCHS`` by compiler target.
TARGETS = {target: arch.name for arch in ARCHS.values() for target in arch.targets}
_EMULATED_PREFIX = "emulated:"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Target of a compilation.

    Attributes:
        name: Name of the kernels: ``"sm_90a"`` (Hopper) or ``"sm_100a"`` (Blackwell).
        target: Compiler target, one of ``TARGETS``. A B300 is ``"sm_103a"`` and runs the
            ``"sm_100a"`` kernels, compiled for it.
        emulated: True if the kernel runs on ``cute_kernels.emulator``, on host tensors, from its
            PTX.
    """

    name: str
    target: str
    emulated: bool = False

    def __str__(self) -> str:
        return f"{_EMULATED_PREFIX if self.emulated else ''}{self.target}"


def architecture(text: str) -> Architecture:
    """Return the ``Architecture`` of ``"sm_100a"`` or ``"emulated:sm_100a"``.

    Raises:
        ValueError: ``text`` is not the name of an architecture.
    """
    target = text.removeprefix(_EMULATED_PREFIX)
    emulated = text != target
    # The emulator has no sm_103a: its kernels are the sm_100a ones.
    if target not in TARGETS or emulated and TARGETS[target] != target:
        emulatable = (_EMULATED_PREFIX + name for name in dict.fromkeys(TARGETS.values()))
        names = (*TARGETS, *emulatable)
        raise ValueError(
            f"arch must be one of {', '.join(names)}, got {text!r}" + did_you_mean(text, names)
        )
    return Architecture(TARGETS[target], target, emulated)


def device_architecture(device: torch.device | int) -> Architecture:
    """Return the architecture of a CUDA device; one dictionary look-up after the first call.

    Args:
        device: CUDA device or its index; without an index, the current device.

    Raises:
        UnsupportedError: No kernel runs on the device; the message says why.
    """
    if isinstance(device, int):
        return _index_architecture(device)
    if device.type != "cuda":
        raise UnsupportedError(
            f"CuTe DSL kernels run on CUDA tensors, got one on {device.type}; CPU tensors use the "
            "reference backend or an emulated one"
        )
    index = device.index
    return _index_architecture(torch.cuda.current_device() if index is None else index)


@functools.cache
def _index_architecture(index: int) -> Architecture:
    """Return the architecture of the CUDA device with an index."""
    if torch.version.hip is not None:
        raise UnsupportedError("CuTe DSL kernels run on NVIDIA GPUs, this is a ROCm build of torch")
    major, minor = torch.cuda.get_device_capability(index)
    target = f"sm_{major}{minor}a"
    if target in TARGETS:
        return architecture(target)
    raise UnsupportedError(
        f"{torch.cuda.get_device_name(index)} (compute capability {major}.{minor}) is not "
        f"supported: {_missing(major)}; kernels exist for {', '.join(TARGETS)}"
    )


def _missing(major: int) -> str:
    """Return the reason why a compute capability is not supported."""
    if major < 9:
        return "it has no TMA and no warpgroup MMA, which all kernels use"
    if major == 12:
        return "its tensor cores lack the tcgen05 instructions of the Blackwell kernels"
    return "no kernel has been made for it"
