"""The choice of an activation in the epilogue of a product, made before there are operands."""

import functools

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
    """Return True if the epilogue of the product should apply the activation.

    The op is then ``m_grouped_gemm_activate`` or ``m_grouped_quantize_gemm_activate``.

    Args:
        choice: ``chosen_backend()``.
        device: Device of the operands.
        dtype: Dtype of the result. Plain operands are fp16 if it is fp16, and bf16 otherwise.
        formats: Texts of the formats of A and B. None for plain operands.
        shape: (N, K), with N the number of rows of B.
        activation: As for these ops.
        interleaved: As for these ops.
        rows: Rows of a group, rounded down to a power of two.
        quantizer: True if a quantizer follows that could apply the activation as well.
        result: Text of the format to which the result is to be quantized.
    """
    if device.type == "meta" or (device.type == "cuda" and not torch.cuda.is_available()):
        return True  # Nothing is computed there.
    plain = torch.float16 if dtype == torch.float16 else torch.bfloat16

    def operand(text: str | None, rows: int) -> torch.Tensor:
        width = shape[1] if text is None else shape[1] // parse(text).element.per_byte
        return torch.empty(rows, width, dtype=plain if text is None else torch.uint8, device="meta")

    with _disable_current_modes():  # A mode might look into the tensors.
        a, b = operand(formats[0], rows), operand(formats[1], shape[0]).unsqueeze(0)
        offs = torch.empty(1, dtype=torch.int32, device="meta")
    op = MGroupedGemmActivate(
        a,
        b,
        offs,
        out_dtype=dtype,
        a_format=formats[0],
        b_format=formats[1],
        epilogue=activation,
        interleaved=interleaved,
        quantize_to=result,
    )
    backend = resolve_backend(choice, device)
    if not support(*op.capability(), backend.listed, activation=True, result=op.result_record):
        return False
    return backend.arch == "reference" or launch_gemm.activates(op, backend.arch, quantizer)
