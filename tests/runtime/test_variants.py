"""What is compiled ahead of time is what the ops ask for."""

import itertools

import pytest
import torch

from cute_kernels.gemm.config import GemmConfig
from cute_kernels.ops.gemm import (
    KGroupedGemm,
    KGroupedGemmNVFP4,
    MGroupedGemm,
    MGroupedGemmNVFP4,
)
from cute_kernels.ops.quantize import ComputeOffsets, GroupedAmax, GroupedQuantizeNVFP4
from cute_kernels.runtime import aot, architecture
from cute_kernels.runtime.cache import CacheKey, cache_key

SM100 = architecture("sm_100a")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Recorder:
    """A launcher that notes which kernels it is asked for."""

    num_sms = 1

    def __init__(self):
        self.specs = set()

    def kernel(self, spec):
        self.specs.add(spec)
        return lambda *arguments: None


def inputs():
    """Ragged and uniform inputs of every dtype, with rows from short to very long."""
    for dtype, cols in itertools.product(DTYPES, (16, 2048, 4096, 8192, 16384, 32768, 1 << 20)):
        yield torch.empty(2, cols, dtype=dtype), torch.tensor([1, 2], dtype=torch.int32)
        yield torch.empty(1, 2, cols, dtype=dtype), None


def quantizations():
    directions = ((True, False), (False, True), (True, True))
    for (x, offs), (rowwise, columnwise) in itertools.product(inputs(), directions):
        groups = x.shape[0] if offs is None else offs.shape[0]
        for amax in (None, torch.ones(groups)):
            for row_scaled, block_2d in ((False, False), (True, False), (False, True)):
                yield GroupedQuantizeNVFP4(x, offs, amax, row_scaled, block_2d, rowwise, columnwise)


@pytest.fixture(scope="module")
def used():
    """The kernels that any quantization op may ask for."""
    recorder = Recorder()
    ops = list(quantizations())
    ops += [GroupedAmax(x, offs) for x, offs in inputs()]
    ops += [
        ComputeOffsets(torch.ones(3, dtype=splits), 1, out)
        for splits, out in itertools.product((torch.int32, torch.int64), (None, torch.int64))
    ]
    for op in ops:
        op.kernels(recorder)
    return recorder.specs


def test_every_kernel_in_use_is_listed_and_no_other(used):
    listed = aot.declared_specs(SM100)
    assert len(listed) == len(set(listed))
    quantizers = {spec for spec in listed if type(spec).__module__.startswith("cute_kernels.quan")}
    assert quantizers == used


def products(x_dtype, weight_dtype, rows_each):
    """The products of one layer, quantized and plain, with two groups of ``rows_each`` rows."""
    rows, n, k = 2 * rows_each, 512, 256
    offs = torch.tensor([rows_each, rows], dtype=torch.int32)
    slots = rows // 128 + 2

    def codes(*shape):
        return torch.empty(shape, dtype=torch.uint8, device="meta")

    def amax(size):
        return torch.empty(size, device="meta")

    b = (codes(2, n, k // 2), codes(2, n // 128, k // 64, 512), amax(2))
    offs = offs.to("meta")
    for row_scaled, with_bias in itertools.product((False, True), repeat=2):
        a = (codes(rows, k // 2), codes(slots, k // 64, 512), amax(rows if row_scaled else 2))
        bias = torch.empty(2, n, dtype=x_dtype, device="meta") if with_bias else None
        yield MGroupedGemmNVFP4(*a, *b, offs, bias, None, row_scaled, x_dtype)
    columnwise = [
        (codes(cols, 64 * slots), codes(cols // 128, 2 * slots, 512), amax(2)) for cols in (n, k)
    ]
    yield KGroupedGemmNVFP4(*columnwise[0], *columnwise[1], offs, None, weight_dtype)
    low = torch.bfloat16 if x_dtype == torch.float32 else x_dtype
    x, dy, weight = (
        torch.empty(shape, dtype=low, device="meta") for shape in ((rows, k), (rows, n), (2, n, k))
    )
    for bias in (None, torch.empty(2, n, dtype=x_dtype, device="meta")):
        yield MGroupedGemm(x, weight, offs, bias, None, False, x_dtype)
    yield MGroupedGemm(dy, weight, offs, None, None, True, x_dtype)
    yield KGroupedGemm(dy, x, offs, None, weight_dtype)


def test_every_product_of_a_layer_is_listed():
    recorder = Recorder()
    recorder.num_sms = 148
    for x_dtype, weight_dtype in itertools.product(DTYPES, repeat=2):
        for rows_each in (1, 48, 128, 300, 5000):
            for op in products(x_dtype, weight_dtype, rows_each):
                op.check()
                op.kernels(recorder)
    listed = set(aot.declared_specs(SM100))
    assert {spec for spec in listed if isinstance(spec, GemmConfig)} >= recorder.specs
    tiles = {spec.tile for spec in recorder.specs}
    assert len(tiles) >= 3 and len(recorder.specs) > 50


def test_listed_kernels_have_keys_of_their_own():
    keys = [cache_key(spec, SM100) for spec in aot.declared_specs(SM100)]
    assert all(isinstance(key, CacheKey) for key in keys)
    assert len({key.name for key in keys}) == len(keys)
