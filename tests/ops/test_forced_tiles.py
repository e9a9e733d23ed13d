"""Every tile that can be forced, with hundreds of groups: the bits of the reference."""

import functools
import itertools

import pytest
import torch

import cute_kernels
from cute_kernels.gemm.config import TILE_SHAPES, GemmConfig
from cute_kernels.gemm.hopper.config import HOPPER_TILE_SHAPES, HopperGemmConfig
from cute_kernels.ops.gemm_kernels import force_tile
from tests.helpers import assert_same_bytes, ops, sample

pytest.importorskip("cutlass")

CONFIGS = {"sm_90a": HopperGemmConfig, "sm_100a": GemmConfig}
TILES = {"sm_90a": HOPPER_TILE_SHAPES, "sm_100a": TILE_SHAPES}
K, N, GROUPS = 32, 48, 300


def many_ends():
    """Most groups are empty or have a row or two; some have a tile's rows, or one more."""
    sizes = torch.randint(0, 3, (GROUPS,))
    sizes[100:180] = 0
    sizes[[0, 50, 181, 299]] = torch.tensor([129, 33, 257, 64])
    return sizes.cumsum(0).int()


def quantized(x, offs=None):
    with cute_kernels.backend("reference"):
        return ops.grouped_quantize_nvfp4(x, offs, None, False, False, True, offs is not None)


def fprop(offs):
    x = quantized(sample(int(offs[-1]) + 5, K), offs)[:3]
    shape = (len(x[0]), N)
    return "m_grouped_gemm_nvfp4_out", (*x, *quantized(sample(GROUPS, N, K))[:3], offs), shape


def wgrad(offs):
    rows = int(offs[-1]) + 5
    dy, x = (quantized(sample(rows, cols), offs)[3:] for cols in (N, K))
    return "k_grouped_gemm_nvfp4_out", (*dy, *x, offs), (GROUPS, N, K)


PRODUCTS = {"m_grouped": fprop, "k_grouped": wgrad}


def product(backend, name, arguments, shape):
    out = torch.full(shape, 3.0)
    with cute_kernels.backend(backend):
        getattr(ops, name)(*arguments, out_dtype=out.dtype, out=out)
    return out


@functools.cache
def problem(grouping, arch):
    """A call and what it gives."""
    torch.manual_seed(0)
    call = PRODUCTS[grouping](many_ends())
    return call, product(f"reference:{arch}", *call)


def cases():
    for arch, grouping in itertools.product(TILES, PRODUCTS):
        base = CONFIGS[arch]("nvfp4", grouping, tile=CONFIGS[arch].any_tile(grouping))
        for tile in filter(base.takes, TILES[arch]):
            yield pytest.param(arch, grouping, tile, id=f"{arch} {grouping} {tile}")


@pytest.mark.parametrize(("arch", "grouping", "tile"), cases())
def test_hundreds_of_groups(arch, grouping, tile):
    call, want = problem(grouping, arch)
    with force_tile(tile):
        assert_same_bytes(product(f"emulated:{arch}", *call), want)
