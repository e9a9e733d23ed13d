"""Loading into modules on the meta device, and into modules that cannot multiply the weights."""

import copy

import pytest
import torch
from torch import nn

import cute_kernels
import grouped
from grouped import checkpoint, recipes
from grouped.nn import MoE
from tests.grouped.checkpoint_support import (
    EXPERT_STYLES,
    EXPERTS,
    HIDDEN,
    INNER,
    LAYOUTS,
    make_moe,
    write,
)
from tests.helpers import BF16, contains_all


def on_meta(model):
    return copy.deepcopy(model).to("meta")


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
@pytest.mark.parametrize("style", EXPERT_STYLES)
def test_a_module_on_the_meta_device_is_allocated(style, layout, tmp_path):
    """Check outputs, parameters and reports against a module that was allocated before."""
    source = make_moe(style)
    if layout is None:
        write({n: t.contiguous() for n, t in stacked_names(source).items()}, tmp_path)
    else:
        checkpoint.save(source, tmp_path, layout)
    want, got = make_moe(style, seed=1), on_meta(make_moe(style, seed=2))
    reports = checkpoint.load(want, tmp_path), checkpoint.load(got, tmp_path, device="cpu")
    assert reports[0] == reports[1]
    assert not any(t.is_meta for t in (*got.parameters(), *got.buffers()))
    trains = [[p.requires_grad for p in m.parameters()] for m in (want, got)]
    assert trains[0] == trains[1]
    x = torch.randn(16, HIDDEN, dtype=BF16)
    with torch.no_grad():
        assert torch.equal(want(x), got(x))


def stacked_names(moe):
    """Return the plain tensors of a layer under the names of a stacked checkpoint."""
    gated = moe.experts.activation.is_gated
    names = {"gate_up": "gate_up_proj" if gated else "up_proj", "down": "down_proj"}
    return {
        key.replace("gate_up", names["gate_up"])
        .replace("experts.down", f"experts.{names['down']}")
        .replace("_proj.weight", "_proj")
        .replace("_proj.bias", "_proj_bias"): t
        for key, t in moe.state_dict().items()
    }


def test_no_plain_copy_of_quantized_experts_is_allocated(tmp_path, monkeypatch):
    """Check that only tensors outside of quantized experts are allocated."""
    checkpoint.save(make_moe(), tmp_path, "modelopt")
    sizes, empty_like = [], torch.empty_like

    def record(t, **options):
        sizes.append(tuple(t.shape))
        return empty_like(t, **options)

    monkeypatch.setattr(torch, "empty_like", record)
    checkpoint.load(on_meta(make_moe()), tmp_path, device="cpu")
    assert (EXPERTS, HIDDEN) in sizes
    assert not any(len(shape) == 3 for shape in sizes)


def test_tied_tensors_stay_tied(tmp_path):
    """Check that a tensor with two names is allocated once."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe, self.a, self.b = make_moe(), nn.Linear(8, 8), nn.Linear(8, 8)
            self.other = self.moe
            self.b.weight = self.a.weight

    checkpoint.save(Model(), tmp_path, "modelopt")
    model = Model().to("meta")
    model.b.weight = model.a.weight
    checkpoint.load(model, tmp_path, device="cpu")
    assert model.a.weight is model.b.weight and not model.a.weight.is_meta
    assert not any(p.is_meta for p in model.parameters())


class WithTable(nn.Module):
    """A layer with a table that no checkpoint has."""

    def __init__(self, is_buffer):
        super().__init__()
        self.moe = make_moe()
        if is_buffer:
            self.register_buffer("table", torch.arange(4.0), persistent=False)
        else:
            self.table = torch.arange(4.0)


@pytest.mark.parametrize("is_buffer", [True, False])
def test_a_table_without_values_is_named(is_buffer, tmp_path):
    """Check that tensors outside of the state dict must have values."""
    checkpoint.save(WithTable(is_buffer), tmp_path, "modelopt")
    with torch.device("meta"):
        model = WithTable(is_buffer)
    model.to("meta")
    with pytest.raises(ValueError, match=contains_all("table", "no checkpoint has it", "cpu")):
        checkpoint.load(model, tmp_path, device="cpu")
    assert all(p.is_meta for p in model.parameters())
    model.table = torch.arange(4.0)
    checkpoint.load(model, tmp_path, device="cpu")
    assert model.table.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_a_device_the_meta_device_is_refused(layout, tmp_path):
    checkpoint.save(make_moe(), tmp_path, layout)
    with pytest.raises(ValueError, match=contains_all("meta device", "device=")):
        checkpoint.load(on_meta(make_moe()), tmp_path)


@pytest.mark.parametrize(
    ("device", "error", "words"),
    [
        (1.5, TypeError, ["device", "1.5"]),
        (True, TypeError, ["device", "True"]),
        ("gpu", ValueError, ["device", "'gpu'"]),
        ("meta", ValueError, ["device", "meta"]),
    ],
)
def test_invalid_devices(device, error, words, tmp_path):
    checkpoint.save(make_moe(), tmp_path, "modelopt")
    with pytest.raises(error, match=contains_all(*words)):
        checkpoint.load(on_meta(make_moe()), tmp_path, device=device)


def test_an_optimizer_of_meta_parameters_raises(tmp_path):
    """Check that an optimizer made before loading raises at its next step."""
    checkpoint.save(make_moe(), tmp_path, "modelopt")
    model = on_meta(make_moe())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    checkpoint.load(model, tmp_path, device="cpu")
    with pytest.raises(RuntimeError, match="Make the optimizer after"):
        optimizer.step()


def test_a_recipe_without_a_product_is_refused(tmp_path):
    """Check that load names the recipe, the format and recipes that multiply it."""
    checkpoint.save(make_moe(), tmp_path, "deepseek")
    moe = MoE(HIDDEN, INNER, EXPERTS, 2, dtype=BF16, recipe=recipes.NVFP4RowScaled())
    before = list(moe.parameters())
    words = ["gate_up", "fp8_block", "NVFP4RowScaled()", "Use one of BF16(), FP8Block()"]
    with pytest.raises(ValueError, match=contains_all(*words)):
        checkpoint.load(moe, tmp_path)
    assert all(a is b for a, b in zip(moe.parameters(), before, strict=True))


def test_a_device_without_a_kernel_is_refused(tmp_path):
    """W4A8 has no kernel of sm_90a."""
    checkpoint.save(make_moe(), tmp_path, "modelopt")
    moe = MoE(HIDDEN, INNER, EXPERTS, 2, dtype=BF16, recipe=recipes.FP8Block())
    with (
        cute_kernels.backend("reference:sm_90a"),
        pytest.raises(cute_kernels.UnsupportedError, match=contains_all("FP8Block()", "BF16()")),
    ):
        checkpoint.load(moe, tmp_path)
    checkpoint.load(moe, tmp_path)


@pytest.fixture
def make_qwen3():
    """A function that returns a small model of transformers with an experts implementation."""
    transformers = pytest.importorskip("transformers")
    from grouped.integrations.transformers import register

    register()

    def make(implementation):
        config = transformers.Qwen3MoeConfig(
            hidden_size=128,
            moe_intermediate_size=128,
            intermediate_size=128,
            num_experts=4,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=64,
            num_experts_per_tok=2,
        )
        config._experts_implementation = implementation
        return transformers.AutoModelForCausalLM.from_config(config, dtype=BF16).eval()

    return make


@pytest.mark.parametrize(
    ("implementation", "words"),
    [
        ("grouped_mm", ["'grouped_mm'", "grouped_fp8_block", "set_experts_implementation"]),
        ("grouped_nvfp4_row_scaled", ["fp8_block", "Use one of grouped_bf16, grouped_fp8_block"]),
    ],
)
def test_an_implementation_without_a_product_is_refused(
    make_qwen3, implementation, words, tmp_path
):
    """Check that transformers' own implementations, and those of other formats, are refused."""
    checkpoint.save(make_qwen3("grouped_bf16"), tmp_path, "deepseek")
    model = make_qwen3(implementation)
    with pytest.raises(ValueError, match=contains_all(*words)) as error:
        checkpoint.load(model, tmp_path)
    assert "did you mean" not in str(error.value)
    assert not any(isinstance(p, grouped.GroupedTensor) for p in model.parameters())


def test_a_loaded_model_refuses_an_implementation_of_transformers(make_qwen3, tmp_path):
    """Check that quantized experts refuse implementations that cannot multiply them."""
    checkpoint.save(make_qwen3("grouped_bf16"), tmp_path, "modelopt")
    model = make_qwen3("grouped_bf16")
    checkpoint.load(model, tmp_path)
    with pytest.raises(ValueError, match="cannot multiply"):
        model.set_experts_implementation("grouped_mm")


def test_a_transformers_model_on_the_meta_device(make_qwen3, tmp_path):
    """Check logits of a model whose tables alone were built on the CPU."""
    source, ids = make_qwen3("grouped_bf16"), torch.arange(12)[None]
    checkpoint.save(source, tmp_path, "modelopt")
    want = make_qwen3("grouped_bf16")
    checkpoint.load(want, tmp_path)
    with torch.device("meta"):
        model = make_qwen3("grouped_bf16")
    with pytest.raises(ValueError, match=contains_all("model.rotary_emb.inv_freq")):
        checkpoint.load(model, tmp_path, device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    checkpoint.load(model, tmp_path, device="cpu")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, want(ids).logits)
