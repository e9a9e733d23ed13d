"""What runs where: one table of op x format x architecture.

Errors, documentation and tests all read this table, so what the package says it supports is what it
runs. An architecture is ``"reference"`` (exact PyTorch, any device), ``"sm_90a"`` or ``"sm_100a"``.
"""

import dataclasses
import functools
from typing import Any

import torch

from .formats import E2M1, E4M3, E5M2, FP8, MXFP8, NVFP4, RECORDS, Format, FP8Block
from .records import UnsupportedError

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
    "grouped_gemm_w4a8",
    "delayed_scaling_update",
    "moe_route",
    "moe_route_gradient",
    "compute_routing",
    "moe_gather",
    "moe_activate",
    "moe_activate_gradient",
    "moe_quantize_gradient",
    "moe_combine",
)
_INTEGERS = (torch.int32, torch.int64)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
#: Dtypes of the plain operands of each op: of its input, or of the result of dequantizing.
_DTYPES = dict.fromkeys(OPS, _FLOATS) | {
    "compute_offsets": _INTEGERS,
    "grouped_gemm_w4a16": (torch.bfloat16, torch.float16),
    "delayed_scaling_update": (torch.float32,),
    "compute_routing": _INTEGERS,
    **dict.fromkeys(("moe_route", "moe_route_gradient"), (torch.float32,)),
}
_NO_SM90 = ("reference", "sm_100a")
_FORMATS = ("nvfp4", "fp8", "fp8_block", "mxfp8")


def with_byte_codes(names: tuple[str, ...]) -> tuple[str, ...]:
    """The formats among ``names`` whose codes are bytes, as their records say."""
    return tuple(name for name in names if RECORDS[name]().element.bits == 8)


_OF_BYTES = with_byte_codes(_FORMATS)
_OF_FORMATS = ("grouped_quantize", "grouped_dequantize", "grouped_gemm", "grouped_gemm_w4a16")
_NOT_PLAIN = ("grouped_quantize", "grouped_dequantize", "grouped_gemm_w4a16", "grouped_gemm_w4a8")
#: Of formats that have a second level, these take those whose scales the caller gives.
_OF_SOME = ("delayed_scaling_update", "moe_quantize_gradient")
#: What runs: architectures by op and name of the format, None if plain.
_RUNS: dict[tuple[str, str | None], tuple[str, ...]] = {
    **{(op, None): ARCHITECTURES for op in OPS if op not in (*_NOT_PLAIN, *_OF_SOME)},
    **{(op, name): ARCHITECTURES for op in _OF_FORMATS for name in _FORMATS},
    ("grouped_gemm", "mxfp8"): _NO_SM90,
    # By the format of the activations.
    **{("grouped_gemm_w4a8", name): _NO_SM90 for name in _OF_BYTES},
    ("delayed_scaling_update", "fp8"): ARCHITECTURES,
    **{("moe_quantize_gradient", name): ARCHITECTURES for name in _OF_BYTES},
}
#: Ops and formats that the reference backend adds like a tensor core that has no kernel of them.
_ADDED_ALIKE: dict[tuple[str, str | None], tuple[str, ...]] = {
    ("grouped_gemm", "mxfp8"): ("sm_90a",)
}
#: The ops that a tensor core adds in.
_GEMMS = ("grouped_gemm", "grouped_gemm_w4a16", "grouped_gemm_w4a8")
#: Reference backends that add like a tensor core, and whose.
_ADDS_LIKE = {f"reference:{arch}": arch for arch in ARCHITECTURES[1:]}
#: Ops that take groups that have shapes of their own.
_SHAPED = ("grouped_quantize", "grouped_dequantize")
#: Where ops put their input through an activation first, or their result last.
_ACTIVATES = ("grouped_quantize", *_GEMMS)
#: Architectures that take the order of bits of ``cute_kernels.prepack``.
_PREPACKED = ("reference", "sm_90a")
#: Elements that lanes of kernels take at once; blocks that they have whole, by bits of codes and
#: scales, and if tiled.
_PIECE = 16
_BLOCKS = {(8, 0, False): (0,), (4, 8, True): (16, 32), (8, 8, True): (32,), (8, 32, False): (128,)}
#: What is kept of a second level that both directions share.
_LEVEL = {"scale_inv", "scale", "amax"}


@dataclasses.dataclass(frozen=True)
class Support:
    """Whether a combination runs; ``reason`` says why not. True in a boolean context if it does."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


_YES = Support(True)


def support(
    op: str,
    fmt: Format | type[Format] | None,
    arch: str,
    *,
    dtype: torch.dtype | None = None,
    columnwise: bool = False,
    prepacked: bool = False,
    shapes: bool = False,
    activation: bool = False,
    gathered: bool = False,
    result: Format | None = None,
) -> Support:
    """Say whether ``op`` runs for ``fmt`` on ``arch``.

    Of ops with several operands ``fmt`` is that of any of them: a GEMM of row-scaled activations
    and prepacked weights needs a yes to both.

    Args:
        op: one of ``OPS``.
        fmt: a format record such as ``NVFP4(row_scaled=True)``, a format class for its
            defaults, or None for plain bf16, fp16 or fp32 operands.
        arch: one of ``ARCHITECTURES``; or ``"reference:sm_90a"`` or ``"reference:sm_100a"``,
            the reference backend that adds like the tensor core of that architecture, which
            takes what its kernels do, and some that are to come.
        dtype: dtype of the plain operands, of what is quantized, or of the decoded result; None
            for one that the op takes everywhere, such as bf16.
        columnwise: the columnwise copy is asked for, alone or with the rowwise one.
        prepacked: the weights have the order of bits of ``cute_kernels.prepack``.
        shapes: the groups have shapes of their own: the last dimension varies.
        activation: the input goes through an activation first, or the result of a GEMM last.
        gathered: rows of tokens come by an index.
        result: the format that the result is quantized to, after an activation.

    Returns:
        A ``Support``, true if it runs, otherwise with the reason.

    Raises:
        ValueError: ``op`` or ``arch`` is not a known name.
        TypeError: ``fmt`` is no format.
    """
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    if arch not in (*ARCHITECTURES, *_ADDS_LIKE):
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}, got {arch!r}")
    if isinstance(fmt, type):
        fmt = fmt()
    if not (fmt is None or isinstance(fmt, Format)):
        raise TypeError(f"fmt must be a format record or None, got {fmt!r}")
    core = _ADDS_LIKE.get(arch, arch)
    if arch in _ADDS_LIKE:
        arch = _whose_rows(op, fmt, _ADDS_LIKE[arch])
    reason = (
        _why_not_format(op, fmt)
        or _why_not_arch(op, fmt, arch)
        or _why_not_dtype(op, fmt, arch, dtype)
        or (_why_not_transformed(op, fmt, dtype) if columnwise else "")
        or (_why_not_prepacked(op, core) if prepacked else "")
    )
    if shapes and not reason and op not in _SHAPED:
        reason = f"{op} takes ragged or uniform groups, not those that have shapes of their own"
    if activation and not reason and op not in _ACTIVATES:
        reason = f"{op} takes no activation"
    if gathered and not reason:
        reason = _why_not_gathered(op, fmt, arch)
    if result is not None and not reason:
        reason = why_not_result(op, result, arch)
    return Support(False, reason) if reason else _YES


def _whose_rows(op: str, fmt: Format | None, core: str) -> str:
    """The architecture whose rows say what a reference runs that adds like the one of ``core``."""
    key = op, None if fmt is None else fmt.name
    return core if op in _GEMMS and core not in _ADDED_ALIKE.get(key, ()) else "reference"


def _why_not_format(op: str, fmt: Format | None) -> str:
    """Why ``op`` runs for ``fmt`` nowhere; empty if nothing is against it."""
    if fmt is None:
        return "" if (op, None) in _RUNS else f"{op} needs a format"
    kind = type(fmt).__name__
    if all(name != fmt.name for _, name in _RUNS):
        return f"{kind} is not built yet"
    if op == "grouped_gemm_w4a8" and fmt.element.bits != 8:
        return "it is of activations of a byte beside weights of four bits"
    if (op, fmt.name) not in _RUNS:
        takes_formats = any(other == op and name is not None for other, name in _RUNS)
        return (
            f"no {op} of {kind} yet" if takes_formats else f"{op} takes plain tensors, not {kind}"
        )
    level = fmt.global_scale
    if op in _OF_SOME and level is not None and not fmt.has_given_scale:
        return f"{fmt} has no scales that outlive a tensor"
    if op == "grouped_gemm_w4a16" and level is not None and level.per == "row":
        return "weights have one second-level scale a group"
    return ""


def _why_not_arch(op: str, fmt: Format | None, arch: str) -> str:
    key = op, None if fmt is None else fmt.name
    if arch not in _RUNS[key]:
        return f"no {arch} kernel of {op} yet"
    return "" if fmt is None or arch == "reference" else refuses(fmt)


@functools.lru_cache(maxsize=256)
def refuses(fmt: Format) -> str:
    """Why no kernel takes the facts of a record, whatever its name; empty if nothing is against
    them.

    What only some kernels do not take, their configurations say.
    """
    element, scale, level = fmt.element, fmt.scale, fmt.global_scale
    of_scale, vec, layout = (
        (scale.element.bits, scale.vec_size, scale.layout) if scale else (0, 0, None)
    )
    block, sizes = (
        getattr(fmt, "block", (1, vec)),
        _BLOCKS.get((element.bits, of_scale, fmt.has_scale_tiles), ()),
    )
    is_byte, is_piece = element.bits == 8, (element.bits, vec) == (4, _PIECE)
    per_piece = fmt.is_stochastic or fmt.searches_scale or fmt.is_transformed
    is_level = level is None
    if level is not None and level.buffers == ("amax",):
        is_level = level.per == "group" or not (fmt.is_2d or level.is_shared)
    elif level is not None:
        is_level = (
            level.per == "group" and level.is_shared and {"amax"} <= {*level.buffers} <= _LEVEL
        )
    blocks = f"block {block} of vec_size {vec}"
    rules = (
        (element in (E2M1, E4M3, E5M2), f"element {element.name}: it is e2m1, e4m3 or e5m2"),
        (
            fmt.k_multiple % _PIECE == 0,
            f"k_multiple {fmt.k_multiple}: it is a multiple of {_PIECE}",
        ),
        (
            vec in sizes and block in ((1, vec), (vec, vec)),
            f"{blocks}: {element.name} with scales of {of_scale} bits, {layout}, has {sizes}",
        ),
        (
            is_byte or fmt.columnwise == "transposed",
            f"columnwise {fmt.columnwise}: {element.name} is transposed",
        ),
        (
            is_byte or not fmt.has_given_scale,
            f"has_given_scale: {element.name} has scales of blocks",
        ),
        (
            is_piece or not per_piece,
            f"{blocks}: only e2m1 by {_PIECE} is drawn, transformed or chosen for",
        ),
        (
            is_piece or is_byte or not fmt.is_2d,
            f"{blocks}: squares of {element.name} are of {_PIECE}",
        ),
        (is_level, f"{level}: an amax of groups or single rows, or {sorted(_LEVEL)} shared"),
    )
    return next((why for is_taken, why in rules if not is_taken), "")


def _why_not_dtype(op: str, fmt: Format | None, arch: str, dtype: torch.dtype | None) -> str:
    """Why ``op`` does not take plain operands of ``dtype``; empty if nothing is against it."""
    if dtype is None:
        return ""
    if dtype not in _DTYPES[op]:
        names = " or ".join(str(d).removeprefix("torch.") for d in _DTYPES[op])
        return f"{op} takes {names}, not {str(dtype).removeprefix('torch.')}"
    # Quantized on the way, fp32 activations are no operands of a tensor core.
    if op == "grouped_gemm" and fmt is None and dtype == torch.float32 and arch != "reference":
        return "a tensor core cuts float32 to tf32 before it multiplies: use bf16 or fp16 operands, or the backend reference"
    return ""


def _why_not_transformed(op: str, fmt: Format | None, dtype: torch.dtype | None) -> str:
    if (
        fmt is None
        or not fmt.is_transformed
        or op != "grouped_quantize"
        or dtype in (None, torch.bfloat16)
    ):
        return ""
    return f"the columnwise copy of {fmt.text} is made of bfloat16 only"


def _why_not_prepacked(op: str, arch: str) -> str:
    if op in ("grouped_gemm_w4a16", "grouped_gemm_w4a8"):
        return "prepacked weights multiply quantized activations: unpack() them"
    if op == "grouped_gemm" and arch not in _PREPACKED:
        return f"prepacked weights are for sm_90a, not {arch}: unpack() them"
    return ""


def _why_not_gathered(op: str, fmt: Format | None, arch: str) -> str:
    if op not in _GEMMS:
        return f"{op} takes no index of rows"
    if fmt is None or op == "grouped_gemm_w4a16" or arch == "reference":
        return ""
    return (
        f"no {arch} kernel of {op} reads codes by an index: quantize rows by it (grouped_quantize)"
    )


def why_not_result(op: str, result: Format, arch: str) -> str:
    """Why ``op`` does not quantize its result to such a record; empty if nothing is against it."""
    level = result.global_scale
    if op not in _GEMMS or result.scale is None or result.is_2d or result.is_stochastic:
        return f"its result is quantized to blocks of single rows, to nearest even, not to {result.text}"
    if level is not None and level.per == "row":
        return f"no part of a row knows the amax of the row, which {result.text} is relative to"
    return "" if arch == "reference" else refuses(result)


def require(op: str, fmt: Format | None, arch: str, **facts: Any) -> None:
    """Raise ``UnsupportedError`` with the reason unless ``op`` runs for ``fmt`` on ``arch``.

    ``facts`` are the other arguments of ``support``.
    """
    status = support(op, fmt, arch, **facts)
    if not status:
        raise UnsupportedError(f"{op} with {fmt or 'plain tensors'} on {arch}: {status.reason}")


def markdown_table() -> str:
    """The support table of the README, in Markdown: formats that run alike share a row."""
    plain: dict[str, dict[str, torch.dtype]] = {
        "compute_offsets": {"int32, int64": torch.int32},
        "compute_routing": {"int32, int64": torch.int32},
        **dict.fromkeys(("moe_route", "moe_route_gradient"), {"fp32": torch.float32}),
        "grouped_gemm": {"bf16, fp16": torch.bfloat16, "fp32": torch.float32},
    }
    floats = {"bf16, fp16, fp32": torch.float32}
    formats: tuple[tuple[str, Format, bool], ...] = (
        ("NVFP4", NVFP4(), False),
        ("row-scaled NVFP4", NVFP4(row_scaled=True), False),
        ("16x16 NVFP4", NVFP4(block=(16, 16)), False),
        ("Hadamard NVFP4", NVFP4(hadamard=True), False),
        ("stochastic NVFP4", NVFP4(stochastic_rounding=True), False),
        ("4over6 NVFP4", NVFP4(four_over_six=True), False),
        ("prepacked NVFP4", NVFP4(), True),
        ("MXFP8", MXFP8(), False),
        ("FP8Block", FP8Block(), False),
        ("FP8", FP8(), False),
        ("delayed FP8", FP8(scaling="delayed"), False),
    )

    def cells(op: str, fmt: Format | None, **facts: Any) -> str:
        return " | ".join(
            "yes" if support(op, fmt, arch, **facts) else "-" for arch in ARCHITECTURES
        )

    rows = ["| op | operands | " + " | ".join(ARCHITECTURES) + " |"]
    rows.append("|---|---|" + "---|" * len(ARCHITECTURES))
    for op in OPS:
        titles: dict[str, list[str]] = {}
        if (op, None) in _RUNS:
            for title, dtype in plain.get(op, floats).items():
                titles.setdefault(cells(op, None, dtype=dtype), []).append(title)
        if any(other == op and name is not None for other, name in _RUNS):
            for title, fmt, prepacked in formats:
                if (op, fmt.name) not in _RUNS or (op in _OF_SOME and _why_not_format(op, fmt)):
                    continue
                titles.setdefault(cells(op, fmt, prepacked=prepacked), []).append(title)
        if op in _ACTIVATES:
            one = next(fmt for fmt in (None, NVFP4(), FP8()) if (op, fmt and fmt.name) in _RUNS)
            titles.setdefault(cells(op, one, activation=True), []).append("each with an activation")
        if op == "grouped_gemm":
            for title, fmt in (("FP8Block", FP8Block()), ("MXFP8", MXFP8()), ("NVFP4", NVFP4())):
                key = cells(op, fmt, activation=True, result=fmt)
                titles.setdefault(key, []).append(f"{title} to {title}")
        rows += [f"| `{op}` | {', '.join(names)} | {key} |" for key, names in titles.items()]
    return "\n".join(rows)
