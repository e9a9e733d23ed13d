"""accelerate, PEFT and safetensors beside quantized weights: each works, or says at once what does."""  # noqa: E501

import copy

import pytest
import torch
from torch import nn

import grouped
from grouped import GroupedTensor, recipes
from tests.helpers import BF16, F16, F32, assert_same_bytes, contains_all, seeded_generator

accelerate = pytest.importorskip("accelerate")
safetensors = pytest.importorskip("safetensors.torch")

CPU, OFFS = torch.device("cpu"), [10, 32]
FORMATS = [grouped.NVFP4(), grouped.MXFP8(), grouped.FP8Block(block=(128, 128)), grouped.FP8()]
RECIPES = {"NVFP4": recipes.NVFP4(), "FP8Block": recipes.FP8Block(), "W4A16": recipes.BF16()}


def make_model(recipe=RECIPES["NVFP4"], **options):
    """Return a small prepared model."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"mlp": grouped.nn.GroupedMLP(2, 64, 64, bias=True, recipe=recipe, dtype=BF16)}
    ).eval()
    fmt = None if recipe.is_quantized else grouped.NVFP4()
    grouped.prepare(model, fmt, columnwise=True)
    return model


def run(model):
    x = torch.randn(32, 64, generator=seeded_generator(1)).to(BF16)
    with torch.no_grad():
        return model["mlp"](x, OFFS)


def cpu_offload(model):
    accelerate.cpu_offload(model, execution_device=CPU)


def cpu_offload_with_hook(model):
    accelerate.cpu_offload_with_hook(model, execution_device=CPU)


def dispatch(model):
    accelerate.dispatch_model(model, {"mlp": "cpu"}, main_device="cpu", force_hooks=True)


def prepared_by_accelerator(model):
    accelerate.Accelerator(cpu=True).prepare(model)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize(
    "offload", [cpu_offload, cpu_offload_with_hook, dispatch, prepared_by_accelerator]
)
def test_offloaded_weights_have_the_same_bits(offload, recipe):
    """Check that offloaded weights give the same bits."""
    model = make_model(recipe)
    want = run(model)
    offload(model)
    for _ in range(2):
        assert_same_bytes(run(model), want)
    weight = model["mlp"].down.weight
    assert (
        isinstance(weight, GroupedTensor)
        and isinstance(weight, nn.Parameter)
        and not weight.requires_grad
    )
    assert weight.is_meta == (offload is cpu_offload)


def test_offloaded_weights_come_back():
    """Check that removing the hooks restores the weights."""
    model = make_model()
    want = run(model)
    cpu_offload(model)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert not model["mlp"].down.weight.is_meta
    assert_same_bytes(run(model), want)


def test_a_parameter_by_its_class():
    """Check that the class of a parameter constructs parameters from GroupedTensors only."""
    p = nn.Parameter(grouped.quantize(torch.ones(2, 32, 64), FORMATS[0]), requires_grad=False)
    for requires_grad in (False, True):
        again = type(p)(p.data, requires_grad=requires_grad)
        assert (
            isinstance(again, nn.Parameter)
            and again.requires_grad is requires_grad
            and again.rowwise is not None
        )
    with pytest.raises(TypeError, match="cannot be made of a plain tensor"):
        type(p)(torch.ones(2, 32, 64), requires_grad=False)
    with pytest.raises(TypeError, match="dtype and fmt are missing"):
        type(p)((2, 32, 64))


def test_disk_offload_is_refused_before_anything_changes(tmp_path):
    """Check that offloading to disk is refused and changes nothing."""
    model = make_model()
    want = run(model)
    for dtype in (BF16, F16, F32):
        copied = copy.deepcopy(model).to(dtype)
        with pytest.raises(
            (TypeError, RuntimeError), match=contains_all("no memory of its own", "cpu_offload")
        ):
            accelerate.disk_offload(copied, tmp_path / str(dtype), execution_device=CPU)
        assert not any(p.is_meta for p in copied.parameters())
    with pytest.raises(TypeError, match="cpu_offload"):
        accelerate.dispatch_model(
            model, {"mlp": "disk"}, main_device="cpu", offload_dir=tmp_path / "x", force_hooks=True
        )
    assert_same_bytes(run(model), want)


def test_plain_weights_that_are_offloaded_are_not_replaced(tmp_path):
    for offload in (
        cpu_offload,
        lambda m: accelerate.disk_offload(m, tmp_path, execution_device=CPU),
    ):
        torch.manual_seed(0)
        model = nn.ModuleDict(
            {"mlp": grouped.nn.GroupedMLP(2, 64, 64, recipe=RECIPES["NVFP4"], dtype=BF16)}
        ).eval()
        want = run(model)
        offload(model)
        with pytest.raises(
            ValueError,
            match=contains_all(
                "mlp.gate_up.weight",
                "a hook of accelerate offloads it",
                "remove_hook_from_submodules",
            ),
        ):
            grouped.prepare(model)
        assert_same_bytes(run(model), want)
        accelerate.hooks.remove_hook_from_submodules(model)
        assert grouped.prepare(model) == 1
        assert_same_bytes(run(model), want)


SAVED = {
    "save_file": lambda m, path: safetensors.save_file(m.state_dict(), path / "a"),
    "save": lambda m, path: safetensors.save(m.state_dict()),
    "save_model": lambda m, path: safetensors.save_model(m, path / "a"),
    "Accelerator.save_model": lambda m, path: accelerate.Accelerator(cpu=True).save_model(m, path),
    "dlpack": lambda m, path: torch.from_dlpack(m["mlp"].down.weight.detach()),
}


@pytest.mark.parametrize("save", SAVED.values(), ids=SAVED)
def test_files_that_hold_plain_tensors_only(save, tmp_path):
    with pytest.raises(
        TypeError,
        match=contains_all(
            "no memory of its own", "to_parts()", "from_parts", "grouped.checkpoint.save"
        ),
    ):
        save(make_model(), tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_other_libraries_get_no_null_pointer():
    with pytest.raises(AttributeError, match=contains_all("no memory of its own", ".dequantize()")):
        _ = make_model()["mlp"].down.weight.__cuda_array_interface__


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_what_the_message_advises(fmt, tmp_path):
    """Check both ways to save that the error message recommends."""
    q = grouped.quantize(torch.randn(2, 32, 64, generator=seeded_generator(0)), fmt)
    safetensors.save_file(q.to_parts(), tmp_path / "a")
    again = GroupedTensor.from_parts(fmt, **safetensors.load_file(tmp_path / "a"), dtype=q.dtype)
    assert_same_bytes(again.dequantize(), q.dequantize())
    torch.save(q, tmp_path / "b")
    assert_same_bytes(torch.load(tmp_path / "b").dequantize(), q.dequantize())


@pytest.mark.parametrize(
    "copied",
    [
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(None, id="save"),
    ],
)
def test_copies_of_prepared_models(copied, tmp_path):
    """Check that copies and saved states of prepared models give the same bits."""
    model = make_model()
    if copied is None:
        torch.save(model, tmp_path / "model")
        copied_value = torch.load(tmp_path / "model", weights_only=False)
        torch.save(model.state_dict(), tmp_path / "state")
        model.load_state_dict(torch.load(tmp_path / "state"))
    else:
        copied_value = copied(model)
    assert_same_bytes(run(copied_value), run(model))
    assert grouped.prepare(copied_value) == 1 and isinstance(
        copied_value["mlp"].down.weight, GroupedTensor
    )


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_prepared_models_change_their_dtype(recipe, dtype):
    """Check that prepared models can be cast."""
    model = make_model(recipe)
    want = run(model)
    model.to(dtype)
    x = torch.randn(32, 64, generator=seeded_generator(1)).to(BF16).to(dtype)
    with torch.no_grad():
        got = model["mlp"](x, OFFS)
    assert got.dtype == model["mlp"].down.weight.dtype == dtype
    torch.testing.assert_close(got.float(), want.float(), rtol=0.05, atol=0.05)


def test_a_dtype_that_no_weight_has():
    model = make_model()
    with pytest.raises(
        TypeError, match="dtype must be bfloat16 or float16 or float32, got float64"
    ):
        model.double()


def test_swapped_weights():
    """Check that ``swap_tensors`` exchanges quantized weights."""
    a, b = make_model(), make_model()
    with torch.no_grad():
        b["mlp"].down.weight.mul_(2)
    wants = run(b), run(a)
    for name in ("gate_up", "down"):
        torch.utils.swap_tensors(getattr(a["mlp"], name).weight, getattr(b["mlp"], name).weight)
    for model, want in zip((a, b), wants, strict=True):
        assert_same_bytes(run(model), want)


def test_swapped_plain_weights():
    """A kept copy refers to the weight, which torch then refuses; a change of mode drops the copy."""  # noqa: E501
    models = [
        grouped.nn.GroupedLinear(2, 64, 64, bias=False, recipe=RECIPES["NVFP4"], dtype=BF16).eval()
        for _ in (0, 1)
    ]
    x = torch.randn(32, 64, generator=seeded_generator(1)).to(BF16)
    with torch.no_grad():
        wants = [model(x, OFFS) for model in reversed(models)]
        torch.utils.swap_tensors(*(model.eval().weight for model in models))
        for model, want in zip(models, wants, strict=True):
            assert_same_bytes(model(x, OFFS), want)
