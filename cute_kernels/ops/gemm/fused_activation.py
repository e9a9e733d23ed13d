"""Whether kernels activate in the epilogue of a product, asked before there are operands."""

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from cute_kernels.capability import support
from cute_kernels.formats import parse
from cute_kernels.runtime.backend import Choice, resolve_backend

from . import launcher as launch_gemm
from .fused_op import MGroupedGemmActivate


@functools.lru_cache(maxsize=1024)
def activates(
    choice: Choice,
    device: torch.device,
    dtype: torch.dtype,
    formats: tuple[str | None, str | None],
    shape: tuple[int, int],
    activation: str,
    interleaved: bool,
    rows: int,
    quantizer: bool,
    result: str | None = None,
) -> bool:
    """Whether to multiply by ``m_grouped_gemm_activate`` or ``m_grouped_quantize_gemm_activate``.

    Args:
        choice: ``chosen_backend()``.
        device: of the operands.
        dtype: of the result; plain operands are fp16 if it is, and else bf16.
        formats: texts of the formats of A and B; None if plain.
        shape: (N, K), N as B has rows.
        activation: as for these ops.
        interleaved: likewise.
        rows: of a group, to a power of two below.
        quantizer: what comes next is a quantizer that could activate as well.
        result: text of the format that the result is to be quantized to.
    """
    if device.type == "meta" or (device.type == "cuda" and not torch.cuda.is_available()):
        return True  # Nothing is computed.
    plain = torch.float16 if dtype == torch.float16 else torch.bfloat16

    def operand(text: str | None, rows: int) -> torch.Tensor:
        width = shape[1] if text is None else shape[1] // parse(text).element.per_byte
        return torch.empty(rows, width, dtype=plain if text is None else torch.uint8, device="meta")

    with _disable_current_modes():  # They may look into tensors.
        a, b = operand(formats[0], rows), operand(formats[1], shape[0]).unsqueeze(0)
        offs = torch.empty(1, dtype=torch.int32, device="meta")
    given: dict[str, Any] = {
        "epilogue": activation,
        "interleaved": interleaved,
        "quantize_to": result,
    }
    op = MGroupedGemmActivate(
        a, b, offs, out_dtype=dtype, **given, a_format=formats[0], b_format=formats[1]
    )
    backend = resolve_backend(choice, device)
    if not support(*op.capability(), backend.listed, activation=True, result=op.result_record):
        return False
    return backend.arch == "reference" or launch_gemm.activates(op, backend.arch, quantizer)
