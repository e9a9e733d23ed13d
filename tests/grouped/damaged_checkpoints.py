"""Checkpoints of two mixtures, and helpers that change and load them."""

import json

import pytest
import torch
from torch import nn

from tests.helpers import BF16, U8, assert_same_bytes

pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file

from grouped import checkpoint
from grouped.nn import MoE

HIDDEN, INNER, EXPERTS = 128, 128, 2


F16, F64, E8M0, NAN, INF = torch.float16, torch.float64, torch.float8_e8m0fnu, torch.nan, torch.inf


def make_layers(seed=0, count=2):
    """Return a module of ``count`` mixtures."""
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {
            "layers": nn.ModuleList(
                [MoE(HIDDEN, INNER, EXPERTS, 1, dtype=BF16) for _ in range(count)]
            )
        }
    )


def save_layers(folder, layout, stacked=False, model=None):
    """Save a module and return the tensors of the file."""
    checkpoint.save(model or make_layers(), folder, layout, stacked=stacked)
    return load_file(folder / "model.safetensors")


def write_folder(tensors, folder, config=None):
    """Write tensors, and a config if there is one, and return the folder."""
    folder.mkdir(exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(
            config if isinstance(config, str) else json.dumps(config)
        )
    return folder


def assert_refused(model, folder, error, message, **options):
    """Check that ``load`` raises and leaves parameters, versions and values as they were."""
    before = {
        name: (t, t._version, t.detach().clone())
        for name, t in model.state_dict(keep_vars=True).items()
    }
    with pytest.raises(error, match=message):
        checkpoint.load(model, folder, **options)
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys()
    for name, (t, version, values) in before.items():
        assert after[name] is t and t._version == version, name
        assert_same_bytes(t.detach(), values, name)


def set_byte(name, byte):
    """Return a change of the fourth byte of a tensor."""

    def change(tensors):
        tensors[name].view(U8).view(-1)[3] = byte

    return change


LAST, STACK = "layers.1.experts.1.down_proj", "layers.1.experts.down_proj"
