"""Modules, files and decoders that the tests of checkpoints share."""

import pytest
import torch

from tests.helpers import BF16, U8, e2m1_values

pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file

from grouped.nn import MoE

HIDDEN, INNER, EXPERTS = 64, 128, 3


EXPERT_STYLES = {
    "swiglu": {},
    "gpt-oss": {"bias": True, "interleaved": True, "activation": "clamped_swiglu"},
    "plain": {"activation": "gelu"},
}


LAYOUTS = ("modelopt", "compressed-tensors", "deepseek")


def make_moe(style="swiglu", seed=0, inner=INNER):
    torch.manual_seed(seed)
    return MoE(HIDDEN, inner, EXPERTS, 2, dtype=BF16, **EXPERT_STYLES[style])


def raw_bytes(t):
    return t.flatten().view(U8)


def files_of(folder):
    """Return the tensors of all safetensors files in a folder."""
    return {
        name: t
        for path in sorted(folder.glob("*.safetensors"))
        for name, t in load_file(path).items()
    }


def write(tensors, folder):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")


def same_files(a, b):
    tensors, want = files_of(a), files_of(b)
    return tensors.keys() == want.keys() and all(
        torch.equal(raw_bytes(t), raw_bytes(want[n])) for n, t in tensors.items()
    )


def decoded(tensors, name, layout):
    """Decode the tensors of the weight ``name`` in fp32, with numpy, by the text of its layout."""
    if layout == "deepseek":
        codes = tensors[f"{name}.weight"].float().numpy()
        scales = tensors[f"{name}.weight_scale_inv"].numpy()
        return codes * scales.repeat(128, 0).repeat(128, 1)[: codes.shape[0], : codes.shape[1]]
    codes = tensors[f"{name}.{'weight' if layout == 'modelopt' else 'weight_packed'}"]
    values = e2m1_values(codes).float().numpy()
    scales = tensors[f"{name}.weight_scale"].float().numpy().repeat(16, 1)
    if layout == "modelopt":
        return values * scales * tensors[f"{name}.weight_scale_2"].numpy()
    return values * scales / tensors[f"{name}.weight_global_scale"].numpy()


stacked_or_not = pytest.mark.parametrize("stacked", [False, True], ids=["experts", "stacked"])
