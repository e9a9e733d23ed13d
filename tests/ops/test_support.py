"""The capability table against the ops: supported calls run, others raise the table's reason."""

import re
from itertools import product

import pytest
import torch

import cute_kernels
import grouped
from cute_kernels import UnsupportedError, backend, capability, support
from cute_kernels.capability import ARCHITECTURES, OPS
from cute_kernels.formats import NVFP4
from cute_kernels.layout.buffers import buffers
from tests.helpers import (
    BF16,
    F32,
    I32,
    dequantize_arguments,
    k_grouped_arguments,
    m_grouped_arguments,
    offs_from_splits,
    ops,
    sample,
)
from tests.helpers import DTYPES as FLOATS
from tests.unit.test_capability import FORMATS

#: Formats whose calls take one scale per group.
SCALED = {fmt for fmt in FORMATS if fmt is not None and fmt.has_given_scale}
#: Combinations that no call can express: a format for ops on plain tensors, or a missing one.
INEXPRESSIBLE = {
    *product(
        (op for op in OPS if (op, None) in capability._RUNS and op != "grouped_gemm"), FORMATS[1:]
    ),
    *product(
        (
            "grouped_quantize",
            "grouped_dequantize",
            "moe_quantize_gradient",
            "grouped_gemm_w4a16",
            "grouped_gemm_w4a8",
        ),
        FORMATS[:1],
    ),
    *(("grouped_gemm_w4a8", fmt) for fmt in FORMATS if fmt is not None and fmt.element.bits < 8),
    *product(("delayed_scaling_update",), set(FORMATS) - SCALED),
}
#: Variants that run on one architecture only here, because they share most of their kernels.
RUN_ON = {
    NVFP4(hadamard=True, stochastic_rounding=True): "sm_100a",
    NVFP4(four_over_six=True): "sm_90a",
}
OFFS = offs_from_splits((4, 0, 2))
K, N = 32, 16
DTYPES = (*FLOATS.values(), torch.float64, I32, torch.int64)
#: Formats with packed codes, whose bits can be reordered.
PACKED = (NVFP4(), NVFP4(block=(16, 16)))


def combinations():
    """Yield op, format, architecture, dtype and prepacked, with ids and marks."""
    for op, fmt, arch, prepacked in product(OPS, FORMATS, ARCHITECTURES, (False, True)):
        if (op, fmt) in INEXPRESSIBLE or prepacked and not (fmt in PACKED and op == "grouped_gemm"):
            continue
        if arch not in ("reference", RUN_ON.get(fmt, arch)):
            continue
        table_dtypes = [d for d in DTYPES if d in capability._DTYPES[op]]
        allowed = [d for d in table_dtypes if support(op, fmt, arch, dtype=d, prepacked=prepacked)]
        # No GEMM quantizes on the fly to formats with given scales, so no operand has a dtype.
        has_dtype = op != "grouped_gemm_w4a8" and not (op == "grouped_gemm" and fmt in SCALED)
        for dtype in DTYPES if allowed and has_dtype else table_dtypes[:1]:
            # The emulator runs one dtype here; kernel tests cover the others.
            if dtype not in allowed or arch == "reference" or dtype == allowed[0]:
                format_name = fmt.text if fmt else "plain"
                name = "-".join((op, format_name + " prepacked" * prepacked, arch, str(dtype)))
                marks = () if arch == "reference" else pytest.mark.emulated
                yield pytest.param(op, fmt, arch, dtype, prepacked, id=name, marks=marks)


def extra_arguments(fmt):
    return {
        "scale": torch.rand(len(OFFS)) if fmt.has_given_scale else None,
        "seed": torch.tensor([1, 2]) if fmt.is_stochastic else None,
    }


def operand_tensors(fmt, uniform=False, columnwise=False):
    """Return the tensors of one copy by the reference, or zeros if nothing quantizes the format."""
    shape, offs = ((len(OFFS), N, K), None) if uniform else ((6, K), OFFS)
    directions = {"rowwise": not columnwise, "columnwise": columnwise}
    if support("grouped_quantize", fmt, "reference"):
        with backend("reference"):
            tensors = ops.grouped_quantize(
                sample(*shape), fmt.text, offs, **directions, **extra_arguments(fmt)
            )
    else:
        specs = buffers(fmt, shape, None if uniform else len(OFFS), **directions)
        tensors = [spec.allocate(OFFS.device, True) for spec in specs.values()]
    named = dict(zip(fmt.buffer_names(columnwise), tensors, strict=True))
    return [named[name] for name in fmt.operand_names(columnwise)]


def per_group(fmt):
    return NVFP4() if fmt == NVFP4(row_scaled=True) else fmt


def grouped_quantize(fmt, dtype):
    x = sample(len(OFFS), N, K, dtype=dtype)
    for columnwise in (False, True):
        if columnwise and not support(
            "grouped_quantize", fmt, "reference", dtype=dtype, columnwise=True
        ):
            with pytest.raises(TypeError, match="must be bfloat16"):
                grouped.quantize(x, fmt, columnwise=True)
            return
        ops.grouped_quantize(x, fmt.text, None, None, True, columnwise, **extra_arguments(fmt))
        ops.grouped_quantize(x[0], fmt.text, OFFS, None, True, columnwise, **extra_arguments(fmt))
    grouped.quantize(x, fmt, columnwise=True, **extra_arguments(fmt))


def grouped_dequantize(fmt, dtype):
    for uniform, columnwise in product((False, True), (False, True)):
        rows, offs = (N, None) if uniform else (6, OFFS)
        copy = operand_tensors(fmt, uniform, columnwise)
        ops.grouped_dequantize(*dequantize_arguments(copy, fmt.text, rows, dtype, offs, columnwise))


def grouped_gemm(fmt, dtype, prepacked=False):
    """Call all three products with operands of a format."""
    plain = sample(6, K, dtype=dtype)
    if fmt is None:
        b = sample(3, N, K, dtype=dtype)
        ops.m_grouped_gemm(plain, b, OFFS)
        ops.m_grouped_gemm(plain, b.mT.contiguous(), OFFS, transpose_b=True)
        ops.k_grouped_gemm(plain, plain, OFFS)
        return
    weight = per_group(fmt)
    texts = {"a_format": fmt.text, "b_format": weight.text}
    b = operand_tensors(weight, uniform=True)
    if prepacked:
        b[0] = cute_kernels.prepack(b[0])
    ops.m_grouped_gemm(
        *m_grouped_arguments(operand_tensors(fmt), b, OFFS, prepacked=prepacked, **texts)
    )
    options = (None, None, False, None, prepacked, extra_arguments(fmt)["seed"])
    if not fmt.has_given_scale:
        ops.m_grouped_quantize_gemm(plain, b[0], OFFS, b[1:], *texts.values(), *options)
    if not prepacked:
        columns = operand_tensors(fmt, columnwise=True)
        texts["b_format"] = fmt.text
        ops.k_grouped_gemm(*k_grouped_arguments(columns, columns, OFFS, **texts))


def grouped_gemm_w4a16(fmt, dtype):
    """Call the product of plain activations and weights of a format."""
    x = sample(6, K, dtype=dtype)
    with backend("reference"):  # only the reference quantizes all of these formats
        weights = grouped.quantize(sample(len(OFFS), N, K), fmt, **extra_arguments(fmt))
    grouped.grouped_gemm(x, weights, offs=OFFS)
    codes, scales = weights.rowwise.operand
    ops.m_grouped_gemm(*m_grouped_arguments(x, [codes, *scales], OFFS, b_format=fmt.text))


def grouped_gemm_w4a8(fmt, dtype):
    b = operand_tensors(NVFP4(), uniform=True)
    ops.m_grouped_gemm(
        *m_grouped_arguments(operand_tensors(fmt), b, OFFS, a_format=fmt.text, b_format="nvfp4")
    )


def delayed_scaling_update(fmt, dtype):
    ops.delayed_scaling_update(torch.ones(2, 3, dtype=dtype), torch.ones(3, dtype=dtype), fmt.text)


#: Arguments of ops on plain tensors, made from one tensor.
PLAIN = {
    "compute_offsets": lambda x: (x[:, 0],),
    "compute_routing": lambda x: (x[:, :2], 4),
    "moe_route": lambda x: (x, None, None, 2),
    "moe_route_gradient": lambda x: (x[:, :2], None, torch.ones(6, 2).long(), x),
    "moe_gather": lambda x: (x, OFFS),
    "moe_activate": lambda x: (x, "swiglu"),
    "moe_activate_gradient": lambda x: (x, x, "silu"),
    "moe_combine": lambda x: (x, OFFS[:, None]),
    "grouped_amax": lambda x: (x, OFFS),
    "grouped_dbias": lambda x: (x, OFFS),
}


def moe_quantize_gradient(fmt, dtype):
    x, pair = torch.ones(6, K).to(dtype), torch.arange(6).int()
    ops.moe_quantize_gradient(
        x,
        x,
        fmt.text,
        fmt.text,
        "silu",
        OFFS,
        False,
        torch.ones(6, 1),
        pair,
        *[extra_arguments(fmt)["scale"]] * 2,
    )


_CALLS = (
    delayed_scaling_update,
    moe_quantize_gradient,
    grouped_quantize,
    grouped_dequantize,
    grouped_gemm,
    grouped_gemm_w4a16,
    grouped_gemm_w4a8,
)
CALLS = {call.__name__: call for call in _CALLS}


def call(op, fmt, dtype, **options):
    if op in PLAIN:
        getattr(ops, op)(*PLAIN[op](torch.ones(6, K).to(dtype)))
    else:
        CALLS[op](fmt, dtype, **options)


@pytest.mark.parametrize(("op", "fmt", "arch", "dtype", "prepacked"), list(combinations()))
def test_ops_agree_with_the_table(op, fmt, arch, dtype, prepacked):
    """Check that each op supports the combinations that ``support`` names."""
    packing = {"prepacked": prepacked}
    status = support(op, fmt, arch, dtype=dtype, **packing)
    name = arch if arch == "reference" else f"emulated:{arch}"
    options = packing if prepacked else {}
    with backend(name):
        if status:
            call(op, fmt, dtype, **options)
        elif support(op, fmt, arch, **packing):
            # The op does not take this dtype, or no tensor core does.
            error = UnsupportedError if support(op, fmt, "reference", dtype=dtype) else TypeError
            with pytest.raises(error, match=re.escape(str(dtype).removeprefix("torch."))):
                call(op, fmt, dtype, **options)
        else:
            with pytest.raises(UnsupportedError, match=re.escape(status.reason)):
                call(op, fmt, dtype, **options)


@pytest.mark.parametrize("core", ["sm_90a", "sm_100a"])
def test_a_tensor_core_reference_supports_what_its_kernels_do(core):
    with backend(f"reference:{core}"):
        for fmt, dtype in ((NVFP4(), BF16), (None, F32)):
            packing = {} if fmt is None else {"prepacked": True}
            status = support("grouped_gemm", fmt, core, dtype=dtype, **packing)
            if status:
                grouped_gemm(fmt, dtype, **packing)
            else:
                with pytest.raises(UnsupportedError, match=re.escape(status.reason)):
                    grouped_gemm(fmt, dtype, **packing)
