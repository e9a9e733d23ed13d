"""What runs where: one table of op x format x architecture.

Errors, documentation and tests all read this table, so what the package says it supports is what it
runs. An architecture is ``"reference"`` (exact PyTorch, any device), ``"sm_90a"`` or ``"sm_100a"``.
"""

from __future__ import annotations

import dataclasses

from cute_kernels.formats import FP8, MXFP8, NVFP4, Format, FP8Block

__all__ = [
    "ARCHITECTURES",
    "OPS",
    "Support",
    "UnsupportedError",
    "markdown_table",
    "require",
    "support",
]

ARCHITECTURES = ("reference", "sm_90a", "sm_100a")
#: Ops by name; ``None`` as the format means plain bf16, fp16 or fp32 operands.
OPS = (
    "compute_offsets",
    "grouped_amax",
    "grouped_dbias",
    "grouped_quantize",
    "grouped_dequantize",
    "grouped_gemm",
    "grouped_gemm_w4a16",
)
_PLAIN_OPS = ("compute_offsets", "grouped_amax", "grouped_dbias", "grouped_gemm")
_NVFP4_OPS = ("grouped_quantize", "grouped_dequantize", "grouped_gemm", "grouped_gemm_w4a16")
#: The ops that have CuTe DSL kernels, for every format that they take at all.
_KERNELS = {
    ("compute_offsets", "sm_90a"),
    ("compute_offsets", "sm_100a"),
    ("grouped_amax", "sm_90a"),
    ("grouped_amax", "sm_100a"),
    ("grouped_dbias", "sm_90a"),
    ("grouped_dbias", "sm_100a"),
    ("grouped_dequantize", "sm_90a"),
    ("grouped_dequantize", "sm_100a"),
    ("grouped_gemm", "sm_90a"),
    ("grouped_gemm", "sm_100a"),
    ("grouped_gemm_w4a16", "sm_90a"),
    ("grouped_quantize", "sm_90a"),
    ("grouped_quantize", "sm_100a"),
}


@dataclasses.dataclass(frozen=True)
class Support:
    """Whether a combination runs; ``reason`` says why not. True in a boolean context if it does."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


class UnsupportedError(NotImplementedError):
    """A combination of op, format and architecture that this version does not run."""


_YES = Support(True)


def support(op: str, fmt: Format | type[Format] | None, arch: str) -> Support:
    """Say whether ``op`` runs for ``fmt`` on ``arch``.

    Args:
        op: one of ``OPS``.
        fmt: a format record such as ``NVFP4(row_scaled=True)``, a format class for its defaults, or
            None for plain bf16, fp16 or fp32 operands.
        arch: one of ``ARCHITECTURES``.

    Returns:
        A ``Support``, true if it runs, otherwise with the reason.

    Raises:
        ValueError: ``op`` or ``arch`` is not a known name.
    """
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}, got {arch!r}")
    if isinstance(fmt, type):
        fmt = fmt()
    if fmt is None:
        if op not in _PLAIN_OPS:
            return Support(False, f"{op} needs a format")
    elif isinstance(fmt, NVFP4):
        if op not in _NVFP4_OPS:
            return Support(False, f"{op} takes plain tensors, not NVFP4")
        for flag in ("hadamard", "stochastic_rounding", "four_over_six"):
            if getattr(fmt, flag):
                return Support(False, f"NVFP4({flag}=True) is not built yet")
        if op == "grouped_gemm_w4a16" and fmt.row_scaled:
            return Support(False, "weights have one second-level scale a group")
    elif isinstance(fmt, (MXFP8, FP8Block, FP8)):
        return Support(False, f"{type(fmt).__name__} is not built yet")
    else:
        raise TypeError(f"fmt must be a format record or None, got {fmt!r}")
    if arch == "reference" or (op, arch) in _KERNELS:
        return _YES
    return Support(False, f"no {arch} kernel of {op} yet")


def require(op: str, fmt: Format | None, arch: str) -> None:
    """Raise ``UnsupportedError`` with the reason unless ``op`` runs for ``fmt`` on ``arch``."""
    status = support(op, fmt, arch)
    if not status:
        raise UnsupportedError(f"{op} with {fmt or 'plain tensors'} on {arch}: {status.reason}")


def markdown_table() -> str:
    """The support table of the README, in Markdown: formats that run alike share a row."""
    plain = {"compute_offsets": "int32, int64", "grouped_gemm": "bf16, fp16"}
    formats: tuple[tuple[str, Format], ...] = (
        ("NVFP4", NVFP4()),
        ("row-scaled NVFP4", NVFP4(row_scaled=True)),
        ("16x16 NVFP4", NVFP4(block=(16, 16))),
        ("MXFP8", MXFP8()),
        ("FP8Block", FP8Block()),
        ("FP8", FP8()),
    )

    def cells(op: str, fmt: Format | None) -> str:
        return " | ".join("yes" if support(op, fmt, arch) else "-" for arch in ARCHITECTURES)

    rows = ["| op | operands | " + " | ".join(ARCHITECTURES) + " |"]
    rows.append("|---|---|" + "---|" * len(ARCHITECTURES))
    for op in OPS:
        titles: dict[str, list[str]] = {}
        if op in _PLAIN_OPS:
            titles.setdefault(cells(op, None), []).append(plain.get(op, "bf16, fp16, fp32"))
        if op in _NVFP4_OPS:
            for title, fmt in formats:
                titles.setdefault(cells(op, fmt), []).append(title)
        rows += [f"| `{op}` | {', '.join(names)} | {key} |" for key, names in titles.items()]
    return "\n".join(rows)
