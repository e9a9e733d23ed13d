"""Facts about the GPU architectures that kernels are written for.

Code asks a fact, not a name: ``get_arch(arch).has_f32x2``. A port then adds a record here and the
kernels that use its tensor cores.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from ptx_emulator.host.suggestions import did_you_mean


@dataclasses.dataclass(frozen=True)
class Arch:
    """GPU architecture: its instructions, its shared memory, and how kernels were tuned for it.

    Attributes:
        name: Architecture in the names of kernels, backends and configurations.
        mma: Tensor core instructions of the GEMM kernels.
        has_f32x2: True if instructions add, multiply and fuse two fp32 numbers in a register pair.
        has_three_input_max: True if an instruction returns the maximum of three fp32 magnitudes.
        has_fp4_convert: True if instructions round to E2M1 and decode it.
        has_block_scaled_mma: True if tensor cores apply block scales. Otherwise kernels decode
            codes that have block scales, and add the products of FP8 blocks in fp32 registers.
        has_tma_gather: True if TMA loads rows by an index.
        smem_bytes: Largest shared memory of a CTA, in bytes.
        tuned_by: Source of the tuning decisions of the quantizers. They are times measured on a
            GPU, or instruction counts of the emulator.
        targets: Compiler targets that run these kernels.
        gpus: Names of GPUs that run these kernels.
    """

    name: str
    mma: Literal["wgmma", "tcgen05"]
    has_f32x2: bool
    has_three_input_max: bool
    has_fp4_convert: bool
    has_block_scaled_mma: bool
    has_tma_gather: bool
    smem_bytes: int
    tuned_by: Literal["time", "instruction_count"]
    targets: tuple[str, ...]
    gpus: tuple[str, ...]


#: Records by name. A B300 (``sm_103a``) runs the kernels of ``sm_100a``, compiled for it.
ARCHS: Mapping[str, Arch] = MappingProxyType(
    {
        arch.name: arch
        for arch in (
            Arch(
                name="sm_90a",
                mma="wgmma",
                has_f32x2=False,
                has_three_input_max=False,
                has_fp4_convert=False,
                has_block_scaled_mma=False,
                has_tma_gather=False,
                smem_bytes=227 * 1024,
                tuned_by="time",
                targets=("sm_90a",),
                gpus=("H100", "H200"),
            ),
            Arch(
                name="sm_100a",
                mma="tcgen05",
                has_f32x2=True,
                has_three_input_max=True,
                has_fp4_convert=True,
                has_block_scaled_mma=True,
                has_tma_gather=True,
                smem_bytes=227 * 1024,
                tuned_by="instruction_count",
                targets=("sm_100a", "sm_103a"),
                gpus=("B200", "B300"),
            ),
        )
    }
)


def get_arch(name: str) -> Arch:
    """Return the record of an architecture.

    Raises:
        ValueError: ``name`` is not one of ``ARCHS``.
    """
    if name not in ARCHS:
        raise ValueError(
            f"arch must be one of {', '.join(ARCHS)}, got {name!r}" + did_you_mean(name, ARCHS)
        )
    return ARCHS[name]


def family_of(target: str) -> str:
    """Return the name of the architecture that runs a compiler target, or the text itself."""
    return next((arch.name for arch in ARCHS.values() if target in arch.targets), target)


def suggest_arch(text: str, choices: Iterable[str]) -> str:
    """Return a suggestion for an unknown name: the architecture of a GPU, or a close choice."""
    for arch in ARCHS.values():
        if isinstance(text, str) and text.upper() in arch.gpus:
            return f": {text} is {arch.name!r}"
    return did_you_mean(text, choices)
