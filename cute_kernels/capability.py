"""Support table of ops, formats and architectures.

Errors, documentation and tests all read this table, so the package runs what it claims to support.
An architecture is ``"reference"`` (exact PyTorch, any device), ``"sm_90a"`` or ``"sm_100a"``.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ptx_emulator.host.suggestions import did_you_mean

from .arch import ARCHS, family_of, suggest_arch
from .formats import E2M1, E4M3, E5M2, FP8, MXFP8, NVFP4, RECORDS, Format, FP8Block
from .formats.base import suggest_record
from .records import UnsupportedError

ARCHITECTURES = ("reference", *ARCHS)
#: Names of ops. The format of plain bf16, fp16 or fp32 operands is None.
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
#: Dtypes of the plain operands by op: of the input, or of the result of ``grouped_dequantize``.
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
    """Return the formats among ``names`` whose records have 8-bit elements."""
    return tuple(name for name in names if RECORDS[name]().element.bits == 8)


_BYTE_FORMATS = with_byte_codes(_FORMATS)
_FORMAT_OPS = ("grouped_quantize", "grouped_dequantize", "grouped_gemm", "grouped_gemm_w4a16")
_QUANTIZED_OPS = (
    "grouped_quantize",
    "grouped_dequantize",
    "grouped_gemm_w4a16",
    "grouped_gemm_w4a8",
)
#: Ops that take a format with a global scale only if the caller gives the scale.
_GIVEN_SCALE_OPS = ("delayed_scaling_update", "moe_quantize_gradient")
#: Supported architectures by op and name of the format, which is None for plain operands.
_RUNS: dict[tuple[str, str | None], tuple[str, ...]] = {
    **{(op, None): ARCHITECTURES for op in OPS if op not in (*_QUANTIZED_OPS, *_GIVEN_SCALE_OPS)},
    **{(op, name): ARCHITECTURES for op in _FORMAT_OPS for name in _FORMATS},
    ("grouped_gemm", "mxfp8"): _NO_SM90,
    # Activations of these formats; weights are NVFP4.
    **{("grouped_gemm_w4a8", name): _NO_SM90 for name in _BYTE_FORMATS},
    ("delayed_scaling_update", "fp8"): ARCHITECTURES,
    **{("moe_quantize_gradient", name): ARCHITECTURES for name in _BYTE_FORMATS},
}
#: Architectures whose tensor cores ``reference:<arch>`` emulates although they have no kernel yet.
_EMULATED_ONLY: dict[tuple[str, str | None], tuple[str, ...]] = {
    ("grouped_gemm", "mxfp8"): ("sm_90a",)
}
#: Ops whose sums a tensor core accumulates.
_GEMMS = ("grouped_gemm", "grouped_gemm_w4a16", "grouped_gemm_w4a8")
#: Reference backends that accumulate like the tensor cores of an architecture.
_TENSOR_CORE_BACKENDS = {f"reference:{arch}": arch for arch in ARCHITECTURES[1:]}
_NEEDS_BYTES = "it multiplies 8-bit activations by 4-bit weights"
#: Ops that take groups whose last dimensions differ.
_SHAPED_GROUP_OPS = ("grouped_quantize", "grouped_dequantize")
#: Ops that apply an activation to their input or to their result.
_ACTIVATION_OPS = ("grouped_quantize", *_GEMMS)
#: Architectures that take weights of ``cute_kernels.prepack``.
_PREPACKED_ARCHITECTURES = ("reference", "sm_90a")
#: Elements that one lane of a kernel holds.
_LANE_CHUNK = 16
#: Elements per block that kernels take, by (bits of codes, bits of scales, scales are in tiles).
_BLOCK_SIZES = {
    (8, 0, False): (0,),
    (4, 8, True): (16, 32),
    (8, 8, True): (32,),
    (8, 32, False): (128,),
}
#: Vectors of a global scale that both directions share.
_SCALE_VECTORS = {"scale_inv", "scale", "amax"}


@dataclasses.dataclass(frozen=True)
class Support:
    """Answer of ``support``: true in a boolean context if the combination runs.

    Attributes:
        ok: True if the combination runs.
        reason: Why it does not run. Empty if it does.
    """

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


_YES = Support(True)
#: End of the reasons that a kernel could remove. Other combinations cannot exist.
_YET = " yet"


def add_support(fmt: type[Format], ops: Sequence[str], archs: Sequence[str]) -> None:
    """Add rows to the support table, for a format that is defined outside of this package.

    ``docs/develop/add_format.md`` lists what an op needs to run; ``examples/add_a_format.py`` adds
    a format.

    Args:
        fmt: The record class, registered by ``formats.record``.
        ops: Some of ``OPS``.
        archs: Some of ``ARCHITECTURES``.

    Raises:
        ValueError: A name is unknown, or the class is not registered.
    """
    if RECORDS.get(fmt.name) is not fmt:
        raise ValueError(f"{fmt.__name__} is not registered: decorate it with formats.record")
    for kind, names, known in (("op", ops, OPS), ("arch", archs, ARCHITECTURES)):
        if unknown := [name for name in names if name not in known]:
            raise ValueError(
                f"{kind} must be one of {', '.join(known)}, got {unknown[0]!r}"
                + did_you_mean(unknown[0], known)
            )
    for op in ops:
        _RUNS[op, fmt.name] = tuple(archs)


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
    """Return a ``Support`` that says if ``op`` runs for ``fmt`` on ``arch``.

    If an op has several operands, ``fmt`` is the format of one of them. Ask once per operand: a
    GEMM of row-scaled activations and prepacked weights runs if both answers are true.

    Args:
        op: One of ``OPS``.
        fmt: Format record such as ``NVFP4(row_scaled=True)``, a format class for its
            defaults, or None for plain bf16, fp16 or fp32 operands.
        arch: One of ``ARCHITECTURES``, a compiler target that runs the kernels of one, such as
            ``"sm_103a"`` (B300), or ``"reference:sm_90a"`` or ``"reference:sm_100a"``:
            the reference backend that accumulates like the tensor cores of that architecture. That
            backend supports what the architecture's kernels support, and some planned combinations.
        dtype: Dtype of the plain operands, of the quantized input, or of the dequantized result.
            None for a dtype that the op supports everywhere, such as bf16.
        columnwise: True if the columnwise copy is requested, alone or with the rowwise copy.
        prepacked: True if the weights come from ``cute_kernels.prepack``.
        shapes: True if groups differ in their last dimension.
        activation: True if an activation is applied. Quantizers apply it to their input, and GEMMs
            to their result.
        gathered: True if rows are gathered by an index.
        result: Format that the result of a GEMM is quantized to after an activation. None if it
            stays plain.

    Returns:
        A ``Support``. If it is false, its ``reason`` says why.

    Raises:
        ValueError: ``op`` or ``arch`` is not a known name.
        TypeError: ``fmt`` is not a format.
    """
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}" + did_you_mean(op, OPS))
    arch_argument, arch = arch, family_of(arch)
    if arch not in (*ARCHITECTURES, *_TENSOR_CORE_BACKENDS):
        raise ValueError(
            f"arch must be one of {', '.join(ARCHITECTURES)}, got {arch_argument!r}"
            + suggest_arch(arch_argument, (*ARCHITECTURES, *_TENSOR_CORE_BACKENDS))
        )
    if isinstance(fmt, type):
        fmt = fmt()
    if not (fmt is None or isinstance(fmt, Format)):
        hint = (
            suggest_record(fmt)
            or ": pass the format of one role of a recipe, such as recipe.weight"
        )
        raise TypeError(f"fmt must be a format record or None, got {fmt!r}" + hint)
    tensor_core = _TENSOR_CORE_BACKENDS.get(arch, arch)
    if arch in _TENSOR_CORE_BACKENDS:
        arch = _capability_arch(op, fmt, _TENSOR_CORE_BACKENDS[arch])
    reason = (
        _why_format_unsupported(op, fmt)
        or _why_arch_unsupported(op, fmt, arch)
        or _why_dtype_unsupported(op, fmt, arch, dtype)
        or (_why_transform_unsupported(op, fmt, dtype) if columnwise else "")
        or (_why_prepacked_unsupported(op, tensor_core) if prepacked else "")
    )
    if shapes and not reason and op not in _SHAPED_GROUP_OPS:
        reason = f"{op} takes ragged or uniform groups, not groups with shapes of their own"
    if activation and not reason and op not in _ACTIVATION_OPS:
        reason = f"{op} takes no activation"
    if gathered and not reason:
        reason = _why_gather_unsupported(op, fmt, arch)
    if result is not None and not reason:
        reason = why_result_unsupported(op, result, arch)
    return Support(False, reason) if reason else _YES


def _capability_arch(op: str, fmt: Format | None, tensor_core: str) -> str:
    """Return the architecture whose table entries apply to ``reference:<tensor_core>``."""
    key = op, None if fmt is None else fmt.name
    return (
        tensor_core
        if op in _GEMMS and tensor_core not in _EMULATED_ONLY.get(key, ())
        else "reference"
    )


def _why_format_unsupported(op: str, fmt: Format | None) -> str:
    """Return why no architecture runs ``op`` for ``fmt``, or '' if one does."""
    if fmt is None:
        return "" if (op, None) in _RUNS else f"{op} needs a format"
    if (op, fmt.name) not in _RUNS:
        return _why_format_missing(op, fmt)
    if op == "grouped_gemm_w4a8" and fmt.element.bits != 8:
        return _NEEDS_BYTES
    scale = fmt.global_scale
    if op in _GIVEN_SCALE_OPS and scale is not None and not fmt.has_given_scale:
        return f"{fmt} computes the scales of each tensor; {op} needs scales that the caller gives"
    if op == "grouped_gemm_w4a16" and scale is not None and scale.per == "row":
        return "weights have one global scale per group"
    return ""


def _why_format_missing(op: str, fmt: Format) -> str:
    """Return why the table has no entry of ``op`` and ``fmt``."""
    kind = type(fmt).__name__
    if all(name != fmt.name for _, name in _RUNS):
        return f"{kind} is not built{_YET}"
    if op == "grouped_gemm_w4a8" and fmt.element.bits != 8:
        return _NEEDS_BYTES
    takes_formats = any(key[0] == op and key[1] is not None for key in _RUNS)
    return f"no {op} of {kind}{_YET}" if takes_formats else f"{op} takes plain tensors, not {kind}"


def _why_arch_unsupported(op: str, fmt: Format | None, arch: str) -> str:
    """Return why ``arch`` does not run ``op`` for ``fmt``, or '' if it does."""
    key = op, None if fmt is None else fmt.name
    if arch not in _RUNS[key]:
        return f"no {arch} kernel of {op}{_YET}"
    return "" if fmt is None or arch == "reference" else why_unsupported(fmt)


@functools.lru_cache(maxsize=256)
def why_unsupported(fmt: Format) -> str:
    """Return why no kernel supports the properties of a record, or '' if kernels may support it.

    The check ignores the record's name. Configurations check the limits of single kernels.
    """
    element, scale, global_scale = fmt.element, fmt.scale, fmt.global_scale
    scale_bits, vec_size, layout = (
        (scale.element.bits, scale.vec_size, scale.layout) if scale else (0, 0, None)
    )
    block = getattr(fmt, "block", (1, vec_size))
    sizes = _BLOCK_SIZES.get((element.bits, scale_bits, fmt.has_scale_tiles), ())
    is_byte = element.bits == 8
    is_lane_chunk = (element.bits, vec_size) == (4, _LANE_CHUNK)
    needs_lane_chunk = fmt.is_stochastic or fmt.searches_scale or fmt.is_transformed
    has_known_scale = global_scale is None
    if global_scale is not None and global_scale.buffers == ("amax",):
        has_known_scale = global_scale.per == "group" or not (fmt.is_2d or global_scale.is_shared)
    elif global_scale is not None:
        has_known_scale = (
            global_scale.per == "group"
            and global_scale.is_shared
            and {"amax"} <= {*global_scale.buffers} <= _SCALE_VECTORS
        )
    blocks = f"block {block} of vec_size {vec_size}"
    rules = (
        (element in (E2M1, E4M3, E5M2), f"element {element.name}: must be e2m1, e4m3 or e5m2"),
        (
            fmt.k_multiple % _LANE_CHUNK == 0,
            f"k_multiple {fmt.k_multiple}: must be a multiple of {_LANE_CHUNK}",
        ),
        (
            vec_size in sizes and block in ((1, vec_size), (vec_size, vec_size)),
            f"{blocks}: {element.name} with scales of {scale_bits} bits, {layout}, "
            f"needs a vec_size in {sizes}",
        ),
        (
            is_byte or fmt.columnwise == "transposed",
            f"columnwise {fmt.columnwise}: copies of {element.name} must be transposed",
        ),
        (
            is_byte or not fmt.has_given_scale,
            f"has_given_scale: {element.name} has block scales, which the caller cannot give",
        ),
        (
            is_lane_chunk or not needs_lane_chunk,
            f"{blocks}: stochastic rounding, transforms and scale search need e2m1 in blocks "
            f"of {_LANE_CHUNK}",
        ),
        (
            is_lane_chunk or is_byte or not fmt.is_2d,
            f"{blocks}: square blocks of {element.name} must have {_LANE_CHUNK} rows",
        ),
        (
            has_known_scale,
            f"{global_scale}: must be an amax per group or per row, or a shared scale per group "
            f"with vectors among {sorted(_SCALE_VECTORS)}",
        ),
    )
    return next((reason for holds, reason in rules if not holds), "")


def _why_dtype_unsupported(
    op: str, fmt: Format | None, arch: str, dtype: torch.dtype | None
) -> str:
    """Return why ``op`` does not take plain operands of ``dtype``, or '' if it does."""
    if dtype is None:
        return ""
    if dtype not in _DTYPES[op]:
        names = " or ".join(str(d).removeprefix("torch.") for d in _DTYPES[op])
        return f"{op} takes {names}, not {str(dtype).removeprefix('torch.')}"
    # fp32 activations are supported if the op quantizes them: then no tensor core reads fp32.
    if op == "grouped_gemm" and fmt is None and dtype == torch.float32 and arch != "reference":
        return (
            "a tensor core truncates float32 operands to tf32: use bf16 or fp16 operands, "
            "or the backend reference"
        )
    return ""


def _why_transform_unsupported(op: str, fmt: Format | None, dtype: torch.dtype | None) -> str:
    """Return why ``op`` cannot transform input of ``dtype`` for ``fmt``, or '' if it can."""
    if (
        fmt is None
        or not fmt.is_transformed
        or op != "grouped_quantize"
        or dtype in (None, torch.bfloat16)
    ):
        return ""
    return f"the columnwise copy of {fmt.text} can be made from bfloat16 only"


def _why_prepacked_unsupported(op: str, arch: str) -> str:
    """Return why ``op`` does not take prepacked weights on ``arch``, or '' if it does."""
    if op in ("grouped_gemm_w4a16", "grouped_gemm_w4a8"):
        return "prepacked weights need quantized activations: unpack() them"
    if op == "grouped_gemm" and arch not in _PREPACKED_ARCHITECTURES:
        return f"prepacked weights are for sm_90a, not {arch}: unpack() them"
    return ""


def _why_gather_unsupported(op: str, fmt: Format | None, arch: str) -> str:
    """Return why ``op`` does not gather rows of ``fmt`` on ``arch``, or '' if it does."""
    if op not in _GEMMS:
        return f"{op} does not gather rows by an index"
    if fmt is None or op == "grouped_gemm_w4a16" or arch == "reference":
        return ""
    return (
        f"no {arch} kernel of {op} gathers codes by an index: "
        "gather the rows while quantizing them (grouped_quantize)"
    )


def why_result_unsupported(op: str, result: Format, arch: str) -> str:
    """Return why ``op`` cannot quantize its result to ``result``, or '' if it can."""
    scale = result.global_scale
    if op not in _GEMMS or result.scale is None or result.is_2d or result.is_stochastic:
        return (
            f"{op} quantizes its result to blocks of single rows, to nearest even, "
            f"not to {result.text}"
        )
    if scale is not None and scale.per == "row":
        return f"{result.text} needs the amax of each row, but a tile of a GEMM holds part of a row"
    return "" if arch == "reference" else why_unsupported(result)


def require(op: str, fmt: Format | None, arch: str, **options: Any) -> None:
    """Raise an ``UnsupportedError`` with the reason unless ``op`` runs for ``fmt`` on ``arch``.

    ``options`` are the other arguments of ``support``.
    """
    status = support(op, fmt, arch, **options)
    if not status:
        raise UnsupportedError(f"{op} with {fmt or 'plain tensors'} on {arch}: {status.reason}")


def markdown_table() -> str:
    """Return the support table of docs/support.md in Markdown.

    Formats of an op that run on the same architectures share a row. "not yet" stands for a kernel
    that is not written, a dash for a combination that cannot exist.
    """
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

    def cell(status: Support) -> str:
        return "yes" if status else "not yet" if status.reason.endswith(_YET) else "-"

    def cells(op: str, fmt: Format | None, **options: Any) -> str:
        return " | ".join(cell(support(op, fmt, arch, **options)) for arch in ARCHITECTURES)

    rows = ["| op | operands | " + " | ".join(ARCHITECTURES) + " |"]
    rows.append("|---|---|" + "---|" * len(ARCHITECTURES))
    for op in OPS:
        titles: dict[str, list[str]] = {}
        if (op, None) in _RUNS:
            for title, dtype in plain.get(op, floats).items():
                titles.setdefault(cells(op, None, dtype=dtype), []).append(title)
        if any(key[0] == op and key[1] is not None for key in _RUNS):
            for title, fmt, prepacked in formats:
                if (op, fmt.name) not in _RUNS or (
                    op in _GIVEN_SCALE_OPS and _why_format_unsupported(op, fmt)
                ):
                    continue
                titles.setdefault(cells(op, fmt, prepacked=prepacked), []).append(title)
        if op in _ACTIVATION_OPS:
            example = next(fmt for fmt in (None, NVFP4(), FP8()) if (op, fmt and fmt.name) in _RUNS)
            titles.setdefault(cells(op, example, activation=True), []).append(
                "each with an activation"
            )
        if op == "grouped_gemm":
            for title, fmt in (("FP8Block", FP8Block()), ("MXFP8", MXFP8()), ("NVFP4", NVFP4())):
                key = cells(op, fmt, activation=True, result=fmt)
                titles.setdefault(key, []).append(f"{title} to {title}")
        rows += [f"| `{op}` | {', '.join(names)} | {key} |" for key, names in titles.items()]
    return "\n".join(rows)
