"""Tensors that are no expert's: ``save`` writes them, however they lie in memory."""

import pytest
import torch
from torch import nn

from grouped.nn import MoE
from tests.helpers import BF16

pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file

from grouped import checkpoint


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.moe = MoE(64, 128, 3, 2, dtype=BF16)
        whole = torch.randn(6, 8)
        self.register_buffer("whole", whole)
        self.register_buffer("part", whole[2:5])
        self.turned = nn.Parameter(torch.randn(4, 8).t())


def test_views_and_strides_are_written_as_whole_tensors(tmp_path):
    """Check that views and strided tensors are saved whole and loaded in place."""
    model = Model()
    checkpoint.save(model, tmp_path, "deepseek")
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors["part"], model.whole[2:5]) and torch.equal(
        tensors["turned"], model.turned
    )
    loaded = Model()
    for t in (loaded.whole, loaded.turned):
        t.data.zero_()
    checkpoint.load(loaded, tmp_path)
    assert torch.equal(loaded.whole, model.whole) and torch.equal(loaded.turned, model.turned)
    assert loaded.turned.is_leaf and loaded.turned.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=["float16", "bfloat16"])
def test_quantized_weights_decode_to_the_dtype_of_the_module(dtype, tmp_path):
    """Check that plain tensors load in the dtype of the module."""
    checkpoint.save(Model().moe, tmp_path, "deepseek")
    loaded = Model().moe.to(dtype)
    checkpoint.load(loaded, tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {dtype}


def test_a_tensor_that_would_be_broadcast_is_refused(tmp_path):
    """Check that a tensor that broadcasting would fit is refused."""
    model, folder = Model().moe, tmp_path / "wrong"
    checkpoint.save(model, tmp_path, "deepseek")
    tensors = load_file(tmp_path / "model.safetensors")
    folder.mkdir()
    save_file(
        tensors | {"router.weight": tensors["router.weight"][:1].clone()},
        folder / "model.safetensors",
    )
    with pytest.raises(ValueError, match="router.weight"):
        checkpoint.load(model, folder)


class Transposed(nn.Module):
    """Experts as transformers' gpt-oss has them: weights are (E, K, N)."""

    has_gate, is_transposed = True, True

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate_up_proj = nn.Parameter(torch.randn(3, 64, 256).to(BF16))
        self.down_proj = nn.Parameter(torch.randn(3, 128, 64).to(BF16))


def test_weights_that_replace_transposed_ones_say_so(tmp_path):
    """Check that loaded weights of transposed experts clear ``is_transposed``."""
    plain, loaded = Transposed(), Transposed()
    checkpoint.save(plain, tmp_path, "modelopt")
    checkpoint.load(loaded, tmp_path)
    assert not loaded.is_transposed and plain.is_transposed
    for got, want in zip(loaded.parameters(), plain.parameters(), strict=True):
        assert (got.dequantize().mT - want).norm() < 0.12 * want.norm()
