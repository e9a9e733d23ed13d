"""Damaged checkpoints: ``load`` names the tensor and the fault, and changes nothing."""

import json
import struct

import pytest
import torch
from torch import nn

from tests.helpers import BF16, E4M3, U8

pytest.importorskip("safetensors")

from safetensors.torch import save_file

import grouped
from grouped import checkpoint
from grouped.checkpoint.files import Reader
from grouped.checkpoint.plain_tensors import quantize_weight
from grouped.nn import GroupedLinear, MoE

from .damaged_checkpoints import (
    E8M0,
    EXPERTS,
    F64,
    HIDDEN,
    INF,
    INNER,
    LAST,
    NAN,
    STACK,
    assert_refused,
    make_layers,
    save_layers,
    set_byte,
    write_folder,
)


def set_number(name, number):
    """Return a change of the last element of a tensor."""

    def change(tensors):
        """Put a scale of one byte into the tensor."""
        t = tensors[name]
        flat = t.clone().view(-1)
        flat[-1] = number
        tensors[name] = flat.view(t.shape)

    return change


#: Invalid numbers and the pattern of their message.
NONFINITE = {NAN: "nan", INF: "inf", -INF: "-inf"}
ZERO_SCALE = "a scale of zero over"
#: Layout, if stacked, the change, and the message. The last tensor that is loaded is wrong.
NUMBERS = {
    "a NaN scale": (
        "modelopt",
        False,
        set_byte(f"{LAST}.weight_scale", 0x7F),
        f"{LAST}.weight_scale in .* has nan",
    ),
    "a negative NaN": (
        "modelopt",
        False,
        set_byte(f"{LAST}.weight_scale", 0xFF),
        f"{LAST}.weight_scale in .* has nan",
    ),
    "a negative scale": (
        "modelopt",
        False,
        set_byte(f"{LAST}.weight_scale", 0xB8),
        f"{LAST}.weight_scale in .* has -1",
    ),
    "a scale of a stack": (
        "modelopt",
        True,
        set_byte(f"{STACK}_weight_scale", 0x7F),
        f"{STACK}_weight_scale in .* nan",
    ),
    "compressed-tensors": (
        "compressed-tensors",
        False,
        set_byte(f"{LAST}.weight_scale", 0x7F),
        f"{LAST}.weight_scale in .*model.safetensors has nan: "
        "block scales must be finite and not negative",
    ),
    **{
        f"a global scale of {number}": (
            "modelopt",
            False,
            set_number(f"{LAST}.weight_scale_2", number),
            rf"{LAST}.weight_scale_2 in .*model.safetensors has {message}",
        )
        for number, message in (NONFINITE | {-1.0: "-1", 0.0: ZERO_SCALE}).items()
    },
    **{
        f"a reciprocal global scale of {number}": (
            "compressed-tensors",
            False,
            set_number(f"{LAST}.weight_global_scale", number),
            rf"{LAST}.weight_global_scale in .*model.safetensors has {message}",
        )
        for number, message in (
            (NAN, "nan"),
            (INF, ZERO_SCALE),
            (-1.0, "-1"),
            (0.0, "0"),
            (1e-38, "1e-38"),
        )
    },
    **{
        f"a global scale of a stack of {number}": (
            "modelopt",
            True,
            set_number(f"{STACK}_weight_scale_2", number),
            f"{STACK}_weight_scale_2 in .* has {message}",
        )
        for number, message in ((NAN, "nan"), (-2.0, "-2"), (0.0, ZERO_SCALE))
    },
    **{
        f"an inverse scale of {number}": (
            "deepseek",
            False,
            set_number(f"{LAST}.weight_scale_inv", number),
            f"{LAST}.weight_scale_inv in .* has {message}",
        )
        for number, message in (
            (NAN, "nan"),
            (INF, "inf"),
            (-1.0, "-1"),
            (0.0, ZERO_SCALE),
            (1e38, r"1e\+38: codes times"),
        )
    },
}


@pytest.mark.parametrize("fault", [*NUMBERS])
def test_invalid_scales(fault, tmp_path):
    """Check that each kind of invalid scale is refused."""
    layout, stacked, change, message = NUMBERS[fault]
    tensors = save_layers(tmp_path / "a", layout, stacked)
    change(tensors)
    for strict in (True, False):
        assert_refused(
            make_layers(1),
            write_folder(tensors, tmp_path / "b"),
            ValueError,
            message,
            strict=strict,
        )


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors", "deepseek"])
@pytest.mark.parametrize("stacked", [False, True])
def test_an_expert_of_zeros_has_a_scale_of_zero(layout, stacked, tmp_path):
    """Check that an expert of zeros is saved with a scale of zero and loaded again."""
    model = make_layers()
    with torch.no_grad():
        model.layers[1].experts.down.weight[1] = 0
        model.layers[0].experts.gate_up.weight[0, INNER:] = 0
    tensors = save_layers(tmp_path / "a", layout, stacked, model)
    suffix = {
        "modelopt": "weight_scale_2",
        "compressed-tensors": "weight_global_scale",
        "deepseek": "weight_scale_inv",
    }
    name = f"{STACK}_{suffix[layout]}" if stacked else f"{LAST}.{suffix[layout]}"
    zero = INF if layout == "compressed-tensors" else 0
    t = tensors[name].clone()
    (t if not stacked else t[1]).fill_(zero)
    loaded = make_layers(1)
    report = checkpoint.load(loaded, write_folder(tensors | {name: t}, tmp_path / "b"))
    assert name in report.zero_scales
    down = loaded.layers[1].experts.down.weight.dequantize()
    assert not down[1].any() and down[0].isfinite().all() and down[0].any()


def test_blocks_of_zeros_have_a_scale_of_zero(tmp_path):
    """The weight has several rows and columns of square blocks; the last ones are smaller."""
    model = nn.ModuleDict({"experts": GroupedLinear(2, 304, 200, bias=False, dtype=BF16)})
    with torch.no_grad():
        model.experts.weight[1, 128:, :256] = 0
    tensors = save_layers(tmp_path / "a", "deepseek", model=model)
    name = "experts.1.weight_scale_inv"
    scales = tensors[name].clone()
    scales[1, :2] = 0
    report = checkpoint.load(model, write_folder(tensors | {name: scales}, tmp_path / "b"))
    assert (
        report.zero_scales == [name] and not model.experts.weight.dequantize()[1, 128:, :256].any()
    )
    for row, column in ((0, 0), (0, 2), (1, 2)):
        wrong = scales.clone()
        wrong[row, column] = 0
        with pytest.raises(ValueError, match=f"{name} in .* has a scale of zero over codes"):
            checkpoint.load(model, write_folder(tensors | {name: wrong}, tmp_path / "c"))


def test_quantized_weights_of_other_layers_are_checked(tmp_path):
    """Check that invalid scales of quantized weights outside of experts are refused."""
    tensors = save_layers(tmp_path / "a", "modelopt")
    router = quantize_weight(torch.randn(1, EXPERTS, HIDDEN).bfloat16(), grouped.NVFP4()).expert(0)
    del tensors["layers.1.router.weight"]
    tensors |= {
        f"layers.1.router{s}": t for s, t in checkpoint.LAYOUTS["modelopt"].stored(router).items()
    }
    checkpoint.load(make_layers(1), write_folder(tensors, tmp_path / "b"))
    set_byte("layers.1.router.weight_scale", 0x7F)(tensors)
    assert_refused(
        make_layers(1),
        write_folder(tensors, tmp_path / "b"),
        ValueError,
        "layers.1.router.weight_scale in .* has nan",
    )


def replace(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


#: Faults that headers show: layout, if stacked, the change, and the message.
HEADERS = {
    "codes": (
        "modelopt",
        False,
        replace(f"{LAST}.weight", lambda t: t[:-1]),
        f"{LAST}.weight is U8 of shape .127, 64.",
    ),
    "scales": (
        "modelopt",
        False,
        replace(f"{LAST}.weight_scale", lambda t: t[:, :-1]),
        rf"{LAST}.weight_scale in .* must have the shape \(128, 8\), the checkpoint has \(128, 7\)",
    ),
    "a level": (
        "modelopt",
        False,
        replace(f"{LAST}.weight_scale_2", lambda t: torch.ones(3)),
        rf"{LAST}.weight_scale_2 in .* must have one number, got F32 of shape \(3,\)",
    ),
    "levels of a stack": (
        "modelopt",
        True,
        replace(f"{STACK}_weight_scale_2", lambda t: torch.ones(3)),
        rf"{STACK}_weight_scale_2 in .* must have one number, or 2, got F32 of shape \(3,\)",
    ),
    "a level of integers": (
        "modelopt",
        False,
        replace(f"{LAST}.weight_scale_2", lambda t: torch.ones((), dtype=torch.int64)),
        rf"{LAST}.weight_scale_2 in .* must be F32 or .* in the layout modelopt, "
        r"got I64 of shape \(\)",
    ),
    "codes of another kind": (
        "modelopt",
        True,
        replace(f"{STACK}", lambda t: t.view(torch.int8)),
        f"{STACK} in .* must be U8 in the layout modelopt, got I8",
    ),
    "square scales": (
        "deepseek",
        False,
        replace(f"{LAST}.weight_scale_inv", lambda t: torch.ones(2, 1)),
        rf"{LAST}.weight_scale_inv in .* must have the shape \(1, 1\), the checkpoint has \(2, 1\)",
    ),
    "scales of integers": (
        "deepseek",
        False,
        replace(f"{LAST}.weight_scale_inv", lambda t: t.to(torch.int32)),
        f"{LAST}.weight_scale_inv in .* must be F32 or .*, got I32",
    ),
    "a router": (
        "deepseek",
        False,
        replace("layers.1.router.weight", lambda t: t[:1]),
        r"layers.1.router.weight in .* must have the shape \(2, 128\), "
        r"the checkpoint has \(1, 128\)",
    ),
    "a router of FP8": (
        "deepseek",
        False,
        replace("layers.1.router.weight", lambda t: t.to(E4M3)),
        "layers.1.router.weight is torch.float8_e4m3fn without the scales of a layout",
    ),
}


@pytest.mark.parametrize("fault", [*HEADERS])
def test_headers_are_checked_before_anything_is_loaded(fault, tmp_path):
    """Check that wrong shapes and dtypes are refused before the module changes."""
    layout, stacked, change, message = HEADERS[fault]
    tensors = save_layers(tmp_path / "a", layout, stacked)
    change(tensors)
    assert_refused(make_layers(1), write_folder(tensors, tmp_path / "b"), ValueError, message)


def plain_layer(seed=0):
    """Return one mixture and the tensors of a plain checkpoint of it."""
    model = make_layers(seed, 1)
    gate_up = model.layers[0].experts.gate_up.weight.detach()
    tensors = {"layers.0.router.weight": model.layers[0].router.weight.detach()}
    for g in range(EXPERTS):
        projections = {
            "gate_proj": gate_up[g, :INNER],
            "up_proj": gate_up[g, INNER:],
            "down_proj": gate_up[g, :INNER],
        }
        tensors |= {
            f"layers.0.experts.{g}.{name}.weight": t.clone() for name, t in projections.items()
        }
    return model, tensors


PLAIN_NAME = "layers.0.experts.1.down_proj.weight"
WRONG_PLAIN_TENSORS = {
    "shape": (lambda t: t[:, 1:], f"{PLAIN_NAME} is BF16 of shape .128, 127.*model.safetensors"),
    "fp8": (lambda t: t.to(E4M3), f"{PLAIN_NAME} is torch.float8_e4m3fn without the scales"),
    "complex": (lambda t: t.to(torch.complex64), f"{PLAIN_NAME} is C64 without the scales"),
}


@pytest.mark.parametrize(
    ("change", "message"), WRONG_PLAIN_TENSORS.values(), ids=WRONG_PLAIN_TENSORS
)
def test_plain_experts_are_checked(change, message, tmp_path):
    """Check that plain experts with wrong shapes or dtypes are refused."""
    _, tensors = plain_layer()
    checkpoint.load(make_layers(1, 1), write_folder(tensors, tmp_path / "a"))
    path = write_folder(tensors | {PLAIN_NAME: change(tensors[PLAIN_NAME])}, tmp_path / "b")
    assert_refused(make_layers(1, 1), path, ValueError, message)


def test_a_complex_tensor_does_not_load_into_fp64(tmp_path):
    """Check that a complex tensor is refused for a module in fp64."""
    _, tensors = plain_layer()
    wrong = {PLAIN_NAME: tensors[PLAIN_NAME].to(torch.complex64)}
    path = write_folder(tensors | wrong, tmp_path / "b")
    assert_refused(make_layers(1, 1).to(F64), path, ValueError, "C64")


def test_quantized_experts_do_not_load_into_fp64(tmp_path):
    checkpoint.save(make_layers(1, 1), tmp_path, "modelopt")
    message = "experts.0.gate_proj.weight is quantized, .* got torch.float64"
    assert_refused(make_layers(1, 1).to(F64), tmp_path, ValueError, message)


@pytest.fixture
def gpt_oss():
    """A mixture of gpt-oss, and the tensors of an MXFP4 checkpoint of it."""
    model = MoE(
        64, 64, EXPERTS, 1, bias=True, interleaved=True, activation="clamped_swiglu", dtype=BF16
    )
    tensors = {
        "router.weight": torch.zeros(EXPERTS, 64),
        "experts.gate_up_proj_bias": torch.zeros(EXPERTS, 128),
        "experts.down_proj_bias": torch.zeros(EXPERTS, 64),
    }
    for name, rows in (("gate_up", 128), ("down", 64)):
        blocks = torch.randint(0, 256, (EXPERTS, rows, 2, 16), dtype=U8)
        tensors[f"experts.{name}_proj_blocks"] = blocks
        tensors[f"experts.{name}_proj_scales"] = torch.full((EXPERTS, rows, 2), 120, dtype=U8)
    tensors |= {
        n: t for n, t in model.state_dict().items() if n.startswith("router") and n not in tensors
    }
    return model, tensors


def test_mxfp4_scales_may_be_e8m0(gpt_oss, tmp_path):
    """Check that MXFP4 scales load as uint8 and as E8M0."""
    model, tensors = gpt_oss
    checkpoint.load(model, write_folder(tensors, tmp_path / "a"))
    want = model.experts.down.weight.dequantize()
    e8m0 = {n: t.view(E8M0) if n.endswith("_scales") else t for n, t in tensors.items()}
    checkpoint.load(model, write_folder(e8m0, tmp_path / "b"))
    assert torch.equal(model.experts.down.weight.dequantize(), want)


@pytest.mark.parametrize(
    ("exponent", "message"),
    [
        (255, "experts.down_proj_scales in .* has nan"),
        (160, "experts.down_proj_blocks in .*: these MXFP4 weights have no exact NVFP4"),
    ],
)
def test_mxfp4_exponents(exponent, message, gpt_oss, tmp_path):
    """Check that MXFP4 exponents that are NaN or too large are refused."""
    model, tensors = gpt_oss
    checkpoint.load(model, write_folder(tensors, tmp_path / "a"))
    want = model.experts.down.weight.dequantize()
    tensors["experts.down_proj_scales"][1, 3, 1] = exponent
    with pytest.raises(ValueError, match=message):
        checkpoint.load(model, write_folder(tensors, tmp_path / "b"))
    assert torch.equal(model.experts.down.weight.dequantize(), want)


@pytest.mark.parametrize(
    "content",
    ["{", "", "[1]", '"x"', "\xff\xfe", '{"weight_map": {"a": 3}}', '{"weight_map": [1]}', "{}"],
    ids=repr,
)
def test_a_damaged_index(content, tmp_path):
    save_layers(tmp_path, "modelopt")
    (tmp_path / "model.safetensors.index.json").write_bytes(content.encode("latin1"))
    assert_refused(
        make_layers(1),
        tmp_path,
        ValueError,
        "model.safetensors.index.json (is not valid JSON|must hold a JSON|has no weight_map)",
    )


@pytest.mark.parametrize(
    "content", ["{", "", "[1]", "\xff\xfe", "[" * 100_000], ids=lambda text: repr(text[:9])
)
def test_a_damaged_config(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content.encode("latin1"))
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"config.json (is not valid JSON|must hold a JSON object, got list)"
    ):
        Reader(tmp_path).config()


def raw_file(path, entries, data, length=None):
    """Write a safetensors file with any header, whose length may be wrong."""
    header = json.dumps(entries).encode() if isinstance(entries, dict) else entries
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}},
        {"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 16]}},
        {"a": {"dtype": "X9", "shape": [4], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F32", "shape": [4]}},
        b"{",
        b"",
    ],
    ids=str,
)
def test_damaged_headers(header, tmp_path):
    """Check that damaged safetensors headers are refused."""
    raw_file(tmp_path / "model.safetensors", header, bytes(16))
    assert_refused(
        make_layers(1), tmp_path, ValueError, "model.safetensors is not a complete safetensors file"
    )
    raw_file(tmp_path / "model.safetensors", header, bytes(16), 2**40)
    assert_refused(
        make_layers(1), tmp_path, ValueError, "model.safetensors is not a complete safetensors file"
    )


def test_unreadable_dtypes(tmp_path):
    for dtype, count in (("F6_E2M3", 12), ("F4", 8)):
        raw_file(
            tmp_path / "model.safetensors",
            {"a": {"dtype": dtype, "shape": [8, 2], "data_offsets": [0, count]}},
            bytes(count),
        )
        with pytest.raises(ValueError, match=f"a in .*model.safetensors cannot be read as {dtype}"):
            Reader(tmp_path).rows("a", slice(0, 3))
        model = nn.ParameterDict({"a": nn.Parameter(torch.ones(8, 2))})
        assert_refused(model, tmp_path, ValueError, f"a is {dtype} without the scales")


def test_rename_must_be_a_mapping_of_regular_expressions(tmp_path):
    save_layers(tmp_path, "modelopt")
    for rename in ({"(": "x"}, {"(a)": r"\2"}):
        assert_refused(
            make_layers(1),
            tmp_path,
            ValueError,
            "rename has .*not a regular expression",
            rename=rename,
        )
    for rename in ([("a", "b")], {"a": 1}, {1: "a"}):
        assert_refused(make_layers(1), tmp_path, TypeError, "rename must be", rename=rename)
