"""Peers of the benchmarks: availability, arguments and equal results."""

import os
from pathlib import Path

import pytest
import torch

import grouped
from cute_kernels import backend
from cute_kernels.reference.scales import tile_scales
from perf.cases import GroupedShape
from perf.measure import meter_of
from perf.measure.emulator import bind_compiler
from perf.operands import Operands
from perf.peers import PEERS, all_peers, cutlass, pytorch, quack
from perf.peers.base import NOISE, linear_nvfp4, padded_rows, row_scales, unpadded_rows
from perf.suites import layer, moe
from perf.suites.quantize import Input, Quantization
from tests.helpers import U8, seeded_generator

CPU = torch.device("cpu")
SHAPE = GroupedShape("small", "up", 4, 32, 128)
SIZES = "17 0 130 1"
ROWS = 148


def error_of(contender):
    return contender.error(contender.prepare()())


def product(kind="fprop"):
    return Operands(SHAPE, ROWS, kind, SIZES, CPU, seed=2)


def test_every_peer_says_whether_it_is_here():
    """Check that every peer says if it can run here."""
    peers = all_peers({})
    assert len(peers) == len(PEERS) and len({p.name for p in peers}) == len(peers)
    meter = meter_of("reference", "", True, {})
    missing = {peer.name: peer.missing(meter) for peer in peers}
    assert missing["torch"] == "" and "does not run on" in missing["quack"]
    assert set(all_peers({})[0].versions) == {"torch"}


def test_torch_products():
    for kind in ("fprop", "dgrad", "wgrad"):
        (contender,) = pytorch.PEER({}).products(product(kind))
        assert error_of(contender) <= contender.bound == NOISE["bfloat16"]


@pytest.mark.parametrize(
    ("quantize", "decode", "bound"),
    [
        (pytorch.nvfp4_given, pytorch.nvfp4_values, 0.12),
        (pytorch.nvfp4_rows, pytorch.nvfp4_values, 0.1),
        (pytorch.mxfp8_rows, pytorch.mxfp8_values, 0.03),
    ],
)
def test_torch_quantizers(quantize, decode, bound):
    """Check the error of PyTorch's quantizers, and the order of their nibbles."""
    x = torch.randn(40, 256, generator=seeded_generator(0)).bfloat16()
    got = quantize(x, x.abs().amax().float().view(1))
    assert (decode(*got) - x.float()).norm() / x.float().norm() < bound
    # Codes in the wrong nibble are no noise.
    if got[0].dtype == U8:
        swapped = got[0] << 4 | got[0] >> 4
        assert (decode(swapped, *got[1:]) - x.float()).norm() / x.float().norm() > 1


def test_padding_keeps_rows_apart():
    """Check that padding separates groups, and that unpadding restores the rows."""
    x = torch.arange(1, 9).float().view(8, 1)
    padded, owner = padded_rows(x, [3, 0, 5], 4)
    assert padded.flatten().tolist() == [1, 2, 3, 0, 4, 5, 6, 7, 8, 0, 0, 0]
    assert owner.tolist() == [0, 0, 0, -1, 2, 2, 2, 2, 2, -1, -1, -1]
    assert torch.equal(unpadded_rows(padded, [3, 0, 5], 4), x)


def test_scales_come_out_of_tiles():
    scales = torch.randint(0, 256, (256, 6), dtype=U8)
    assert torch.equal(row_scales(tile_scales(scales[None])[0], 200, 6), scales[:200])


def test_weights_for_other_libraries_are_ours():
    """Check that NVFP4 weights for other libraries decode to our values."""
    weight = torch.randn(3, 32, 64, generator=seeded_generator(1)).bfloat16()
    codes, scales, level = linear_nvfp4(weight)
    values = torch.stack(
        [pytorch.nvfp4_values(c, s, 1 / n) for c, s, n in zip(codes, scales, level, strict=True)]
    )
    assert torch.allclose(
        values, grouped.quantize(weight, grouped.NVFP4()).dequantize(torch.float32), rtol=1e-6
    )


def test_torchao_quantizers():
    """Check the error of torchao's quantizers."""
    pytest.importorskip("torchao")
    from perf.peers import torchao

    data = Input(64, 256, 2, CPU)
    for gives in (True, False):
        (contender,) = torchao.PEER({}).quantizers(data, Quantization("row", gives))
        assert error_of(contender) <= contender.bound


class FakeQuack:
    """The functions of quack 0.6.5 that are called, by its signatures."""

    def gemm(self, A, B, *, cu_seqlens_m=None, cu_seqlens_k=None, A_idx=None):
        starts = cu_seqlens_m if cu_seqlens_k is None else cu_seqlens_k
        assert starts[0] == 0 and (A_idx is None or A_idx.dtype == torch.int32)
        return torch._grouped_mm(A if A_idx is None else A[A_idx], B, offs=starts[1:])

    def gemm_gated(self, A, B, *, activation, store_preact=True, **rows):
        before = self.gemm(A, B, **rows)
        return before if store_preact else None, alternating[activation](before)

    def gemm_dgated(self, A, B, PreAct, *, activation, **rows):
        after, gradient = torch.func.vjp(alternating[activation], PreAct)
        return *gradient(self.gemm(A, B, **rows)), after


alternating = {"swiglu": lambda z: layer.swiglu(torch.cat((z[:, ::2], z[:, 1::2]), 1))}


@pytest.mark.parametrize("passes", layer.PASSES)
def test_quacks_experts(passes, monkeypatch):
    """Each way that its functions are put together gives what fp32 does."""
    monkeypatch.setattr(quack, "_interface", FakeQuack)
    peer, style = quack.PEER({}), moe.MOE_OPTIONS["DeepSeek-V3"]
    works = [layer.LayerWork("mlp", moe.TINY, 60, "zipf", passes, CPU)]
    works += [
        moe.MoEWork("moe", moe.TINY, 30, "random", passes, CPU, options=package)
        for package in ({}, style)
    ]
    works.append(moe.ExpertsWork(moe.TINY, 30, "random", passes, CPU))
    for work, offered in zip(
        works, (peer.layers, peer.mixtures, peer.mixtures, peer.experts), strict=True
    ):
        (contender,) = offered(work)
        assert error_of(contender) <= 0.02
    assert not list(
        peer.mixtures(
            moe.MoEWork(
                "moe", moe.TINY, 30, "random", passes, CPU, options=moe.MOE_OPTIONS["gpt-oss-120b"]
            )
        )
    )


def test_checkouts_are_named(tmp_path):
    """Check that messages of peers in checkouts name the path."""
    names = ("CUTLASS", "FlashInfer")
    peers = {peer.name: peer for peer in all_peers({})}
    wrong = {p.name: p for p in all_peers(dict.fromkeys(names, tmp_path))}
    blackwell, hopper = (meter_of(f"emulated:sm_{n}", "", True, {}) for n in ("100a", "90a"))
    for name in names:
        assert f"--path {name}=FOLDER" in peers[name].missing(blackwell)
        assert "sm_100a" in peers[name].missing(hopper)
        assert f"is not a checkout of {name}" in wrong[name].missing(blackwell)


@pytest.mark.skipif("CUTLASS" not in os.environ, reason="CUTLASS=FOLDER names a checkout")
@pytest.mark.parametrize("fmt", cutlass._FORMATS)
def test_products_of_nvidias_example_have_our_bits(fmt):
    """In a process of its own: the DSL binds to the emulator."""
    bind_compiler("sm_100a")
    work = Operands(GroupedShape("small", "up", 4, 384, 512), 256, "fprop", "37 150 1 68", CPU)
    for tile in cutlass._TILES:
        call = cutlass._Call(Path(os.environ["CUTLASS"]), work, fmt, tile, 4)
        got = call.prepare()()
        for name in ("reference:sm_100a", "emulated:sm_100a"):
            with backend(name):
                assert torch.equal(grouped.grouped_gemm(*call.operands), got)
