"""Kernels of grouped_dequantize, against the reference bit for bit."""

import itertools
import pickle

import pytest
import torch

from cute_kernels import backend
from cute_kernels.formats import FP8, MXFP8, NVFP4, FP8Block, parse
from cute_kernels.kernels.quantize.choose import choose_dequantize_config
from cute_kernels.kernels.quantize.config import DequantizeConfig
from cute_kernels.layout.buffers import buffers
from cute_kernels.ops.checks import unchecked_end_rows
from cute_kernels.testing.compiled import compile_for_emulator
from tests.helpers import (
    BF16,
    DTYPES,
    E5M2,
    F32,
    U8,
    assert_same_bytes,
    dequantize_arguments,
    each_arch,
    offs_of_many_groups,
    offs_tensor,
    ops,
    seeded_generator,
)

from .op_support import (
    ARCHITECTURES,
    array_of,
    check,
    check_code,
    check_touched,
    each_mode,
    watching,
)
from .quantize_support import ragged_cases

#: (format text, True for the columnwise copy).
KINDS = {
    "rowwise": ("nvfp4", False),
    "row-scaled": ("nvfp4:row_scaled", False),
    "columnwise": ("nvfp4", True),
    "transformed": ("nvfp4:hadamard", True),
}
_BYTES = (
    FP8Block(),
    FP8Block(dtype=E5M2),
    FP8Block(block=(128, 128)),
    MXFP8(),
    MXFP8(E5M2),
    MXFP8(block=(32, 32)),
    FP8(),
    FP8(E5M2, "delayed"),
)
#: The same for formats with FP8 codes.
BYTE_KINDS = {
    f"{fmt.text} {'columnwise' if columnwise else 'rowwise'}": (fmt.text, columnwise)
    for fmt, columnwise in itertools.product(_BYTES, (False, True))
}
#: One kind per layout of scales.
ONE_PER_LAYOUT = [k for k, (text, _) in BYTE_KINDS.items() if ":" not in text or "128x128" in text]
each_kind = pytest.mark.parametrize("kind", [*KINDS])
RAGGED = ragged_cases("odd rows, K past two strips", 128, 16, 272, 48, 32, 144, 16)
UNIFORM = {"partial tiles": (2, 100, 112), "whole tiles": (1, 256, 64), "two tiles": (3, 129, 48)}


def arguments(shape, offs, kind, dtype="bfloat16"):
    """Return random bytes, and fp32 numbers of all sizes, half of them finite in any dtype.

    For MXFP8, K is twice that of ``shape``.
    """
    text, columnwise = (KINDS | BYTE_KINDS)[kind]
    fmt, generator = parse(text), seeded_generator(sum(shape))
    shape = (*shape[:-1], fmt.k_multiple // 16 * shape[-1])
    groups = None if offs is None else len(offs)
    specs = buffers(fmt, shape, groups, rowwise=not columnwise, columnwise=columnwise)
    copy = [random_buffer(specs[name], generator) for name in fmt.operand_names(columnwise)]
    return [*copy, offs, shape[-2], DTYPES[dtype], text, columnwise]


def random_buffer(spec, generator):
    """Return random bytes; fp32 amaxes and scales are mostly finite numbers."""
    if spec.dtype == F32:
        numbers = torch.exp2(torch.rand(spec.shape, generator=generator) * 20 - 10)
        choice = torch.randint(0, 10, spec.shape, generator=generator)
        return torch.where(
            choice < 5, torch.tensor([0.0, 1e-45, 1e-38, 3e38, torch.inf])[choice % 5], numbers
        )
    padded_shape = (*spec.shape[:-1], spec.pitch or spec.shape[-1])
    return torch.randint(0, 256, padded_shape, generator=generator, dtype=U8).view(spec.dtype)[
        ..., : spec.shape[-1]
    ]


def dequantize(args, **out):
    """Call the op on the result of ``arguments``; with ``out`` its out form."""
    *copy, offs, rows, dtype, text, columnwise = args
    call = dequantize_arguments(copy, text, rows, dtype, offs, columnwise)
    if out:
        ops.grouped_dequantize_out(*call, **out)
        return out["out"]
    return ops.grouped_dequantize(*call)


def check_case(arch, kind, dtype, case, **options):
    rows, cols, offs = RAGGED[case]
    args = arguments((rows, cols), offs, kind, dtype)
    check(arch, lambda: dequantize(args), **options)


@each_kind
@each_arch
def test_ragged_groups(arch, kind):
    for case in RAGGED:
        check_case(arch, kind, "bfloat16", case)


@pytest.mark.parametrize("kind", [*BYTE_KINDS])
def test_ragged_groups_of_byte_formats(kind):
    for i, case in enumerate(RAGGED):
        check_case(ARCHITECTURES[i % 2], kind, "float32", case)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("kind", ["rowwise", "columnwise", "transformed"])
def test_fp16_and_fp32_outputs(kind, dtype):
    for case in ("odd rows, K past two strips", "tail", "one row"):
        check_case("sm_90a", kind, dtype, case)


@pytest.mark.parametrize("kind", [*KINDS, *ONE_PER_LAYOUT])
def test_uniform_groups(kind):
    for i, shape in enumerate(UNIFORM.values()):
        args = arguments(
            shape, None, kind, "float16" if kind in ONE_PER_LAYOUT and i else "bfloat16"
        )
        arch = ARCHITECTURES[kind in KINDS]
        check(arch, lambda args=args: dequantize(args))


@each_mode
@pytest.mark.parametrize("kind", [*KINDS, *ONE_PER_LAYOUT])
def test_any_order_of_warps(kind, mode):
    check_case("sm_90a", kind, "bfloat16", "odd rows, K past two strips", num_sms=1, **mode)


@pytest.mark.parametrize("kind", [*KINDS, *ONE_PER_LAYOUT])
def test_more_than_a_thousand_groups(kind):
    offs = offs_of_many_groups()
    args = arguments((int(offs[-1]) + 5, 16), offs, kind)
    check("sm_100a", lambda: dequantize(args))


@each_kind
def test_only_rows_of_groups_are_touched(kind):
    """Check that rows outside of the groups are neither read nor written."""
    rows, cols, offs = RAGGED["tail"]
    args = arguments((rows, cols), offs, kind)
    codes, scales, amax = args[:3]
    live = int(offs[-1])
    out = torch.full((rows, cols), -7.0, dtype=BF16)
    if args[-1]:
        readable = [codes]
        needed = [amax, offs]
    else:
        pitch = codes.stride(0)
        # Full rows, except the padding of the last one.
        needed = [
            codes.as_strided((rows * pitch,), (1,))[: (live - 1) * pitch + cols // 2],
            amax,
            offs,
        ]
        readable = []
        if kind == "row-scaled":
            needed[1] = amax[:live]
    needed = [array_of(t) for t in (*needed, out[:live])]
    with backend("emulated:sm_90a"):
        check_touched(lambda: dequantize(args, out=out), needed, [scales.numpy(), *readable])
    assert (out[live:] == -7).all()
    assert_same_bytes(out[:live], dequantize(args)[:live], any_nan=True)


@pytest.mark.parametrize("live", [0, 219, 259, 260])
def test_the_tail_of_a_new_result_is_zero(live):
    """Check that a new result has zeros in its tail."""
    args = arguments((260, 144), offs_tensor(0, 0, live), "row-scaled")
    want = dequantize(args)
    storage = torch.full((2, 260, 144), -7.0, dtype=BF16)
    config = DequantizeConfig(NVFP4(row_scaled=True).text, "bfloat16")
    run = compile_for_emulator(config, "sm_90a")
    for out, fresh in zip(storage, (0, 1), strict=True):
        readable = [args[0].as_strided((260 * 80,), (1,)), *args[1:4], out]
        with watching(*map(array_of, readable)):
            run(*args[:4], out, fresh, 2)
        assert_same_bytes(out[:live], want[:live], any_nan=True)
        assert (out[live:] == (0 if fresh else -7)).all()


@pytest.mark.parametrize("kind", [*KINDS, *ONE_PER_LAYOUT])
@unchecked_end_rows()
def test_invalid_end_rows(kind):
    """Check that invalid end rows cause no access outside of the buffers."""
    args = arguments((140, 64), offs_tensor(-5, 20, 1000, 2**31 - 1), kind)
    for num_sms in (1, 7):
        check("sm_90a", lambda: dequantize(args), num_sms=num_sms)
    args[-5] = offs_tensor(100, 20, -7, 130)
    out = dequantize(args)
    with watching(*args, out), backend("emulated:sm_90a"):
        dequantize(args, out=out)


@each_kind
def test_generated_code_is_exact_without_spills(kind):
    """Check that the generated code uses exact instructions and no local memory."""
    text, columnwise = KINDS[kind]
    config = choose_dequantize_config(parse(text), "bfloat16", "ragged", columnwise)
    assert pickle.loads(pickle.dumps(config)) == config
    # The only FMA allowed multiplies by 1/4; ptxas cannot fuse it with another product.
    check_code(config, "sm_90a", r"\.ftz|\.approx|\bfma\.(?!.*0f3E800000, zero)")
