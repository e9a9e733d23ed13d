"""What runs where: one table of op x format x architecture.

Errors, documentation and tests all read this table, so what the package says it supports is what it
runs. An architecture is ``"reference"`` (exact PyTorch, any device), ``"sm_90a"`` or ``"sm_100a"``.
"""

from __future__ import annotations

import dataclasses

import torch

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
_INTEGERS = (torch.int32, torch.int64)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
#: Dtypes of the plain operands of each op: of its input, or of the result of dequantizing.
_DTYPES = dict.fromkeys(OPS, _FLOATS) | {
    "compute_offsets": _INTEGERS,
    "grouped_gemm_w4a16": (torch.bfloat16, torch.float16),
}
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


def support(
    op: str, fmt: Format | type[Format] | None, arch: str, *, dtype: torch.dtype | None = None
) -> Support:
    """Say whether ``op`` runs for ``fmt`` on ``arch``.

    Of ops with several operands ``fmt`` is that of any of them: a GEMM of row-scaled activations
    and prepacked weights needs a yes to both.

    Args:
        op: one of ``OPS``.
        fmt: a format record such as ``NVFP4(row_scaled=True)``, a format class for its defaults, or
            None for plain bf16, fp16 or fp32 operands.
        arch: one of ``ARCHITECTURES``.
        dtype: dtype of the plain operands, of what is quantized, or of the decoded result; None for
            one that the op takes everywhere, such as bf16.

    Returns:
        A ``Support``, true if it runs, otherwise with the reason.

    Raises:
        ValueError: ``op`` or ``arch`` is not a known name.
        TypeError: ``fmt`` is no format.
    """
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}, got {arch!r}")
    if isinstance(fmt, type):
        fmt = fmt()
    if fmt is None:
        no = "" if op in _PLAIN_OPS else f"{op} needs a format"
    elif isinstance(fmt, NVFP4):
        no = _why_not_nvfp4(op, fmt, arch)
    elif isinstance(fmt, (MXFP8, FP8Block, FP8)):
        no = f"{type(fmt).__name__} is not built yet"
    else:
        raise TypeError(f"fmt must be a format record or None, got {fmt!r}")
    no = no or _why_not_dtype(op, fmt, arch, dtype)
    if not no and arch != "reference" and (op, arch) not in _KERNELS:
        no = f"no {arch} kernel of {op} yet"
    return Support(False, no) if no else _YES


def _why_not_nvfp4(op: str, fmt: NVFP4, arch: str) -> str:
    """Why ``op`` does not run for ``fmt``; empty if nothing is against it."""
    if op not in _NVFP4_OPS:
        return f"{op} takes plain tensors, not NVFP4"
    for flag in ("hadamard", "stochastic_rounding", "four_over_six"):
        if getattr(fmt, flag):
            return f"NVFP4({flag}=True) is not built yet"
    if op == "grouped_gemm_w4a16" and fmt.row_scaled:
        return "weights have one second-level scale a group"
    if op == "grouped_gemm_w4a16" and fmt.prepacked:
        return "prepacked weights multiply quantized activations: unpack() them"
    if op == "grouped_gemm" and fmt.prepacked and arch not in ("reference", "sm_90a"):
        return f"prepacked weights are for sm_90a, not {arch}: unpack() them"
    return ""


def _why_not_dtype(op: str, fmt: Format | None, arch: str, dtype: torch.dtype | None) -> str:
    """Why ``op`` does not take plain operands of ``dtype``; empty if nothing is against it."""
    if dtype is None:
        return ""
    if dtype not in _DTYPES[op]:
        names = " or ".join(str(d).removeprefix("torch.") for d in _DTYPES[op])
        return f"{op} takes {names}, not {str(dtype).removeprefix('torch.')}"
    # Quantized on the way, fp32 activations are no operands of a tensor core.
    if op == "grouped_gemm" and fmt is None and dtype == torch.float32 and arch != "reference":
        return (
            "a tensor core cuts float32 to tf32 before it multiplies: use bf16 or fp16 operands, "
            "or the backend reference"
        )
    return ""


def require(op: str, fmt: Format | None, arch: str, *, dtype: torch.dtype | None = None) -> None:
    """Raise ``UnsupportedError`` with the reason unless ``op`` runs for ``fmt`` on ``arch``."""
    status = support(op, fmt, arch, dtype=dtype)
    if not status:
        raise UnsupportedError(f"{op} with {fmt or 'plain tensors'} on {arch}: {status.reason}")


def markdown_table() -> str:
    """The support table of the README, in Markdown: formats that run alike share a row."""
    plain: dict[str, dict[str, torch.dtype]] = {
        "compute_offsets": {"int32, int64": torch.int32},
        "grouped_gemm": {"bf16, fp16": torch.bfloat16, "fp32": torch.float32},
    }
    floats = {"bf16, fp16, fp32": torch.float32}
    formats: tuple[tuple[str, Format], ...] = (
        ("NVFP4", NVFP4()),
        ("row-scaled NVFP4", NVFP4(row_scaled=True)),
        ("16x16 NVFP4", NVFP4(block=(16, 16))),
        ("prepacked NVFP4", NVFP4(prepacked=True)),
        ("MXFP8", MXFP8()),
        ("FP8Block", FP8Block()),
        ("FP8", FP8()),
    )

    def cells(op: str, fmt: Format | None, dtype: torch.dtype | None = None) -> str:
        answers = (support(op, fmt, arch, dtype=dtype) for arch in ARCHITECTURES)
        return " | ".join("yes" if answer else "-" for answer in answers)

    rows = ["| op | operands | " + " | ".join(ARCHITECTURES) + " |"]
    rows.append("|---|---|" + "---|" * len(ARCHITECTURES))
    for op in OPS:
        titles: dict[str, list[str]] = {}
        if op in _PLAIN_OPS:
            for title, dtype in plain.get(op, floats).items():
                titles.setdefault(cells(op, None, dtype), []).append(title)
        if op in _NVFP4_OPS:
            for title, fmt in formats:
                titles.setdefault(cells(op, fmt), []).append(title)
        rows += [f"| `{op}` | {', '.join(names)} | {key} |" for key, names in titles.items()]
    return "\n".join(rows)
