"""The plug-in for vLLM, without vLLM: ``.ci/vllm`` runs it in the engine."""

import copy
import importlib
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import cute_kernels
import grouped
from cute_kernels.runtime import compile as compilation
from grouped import recipes
from grouped.checkpoint.layouts import LAYOUTS
from grouped.checkpoint.plain_tensors import WeightTensors, quantize_weight
from grouped.functional.moe import moe
from grouped.integrations import vllm as plugin
from grouped.integrations.serving import experts, schemes, warmup, weights
from grouped.integrations.serving.schemes import SCHEMES, load_format
from grouped.integrations.vllm import activations
from tests.helpers import BF16, F32, contains_all, save_and_load
from tests.integration import fake_vllm

EXPERTS, HIDDEN, INTERMEDIATE = 4, 64, 32
PREFIX = "model.layers.0.mlp.experts"


@pytest.fixture
def engine():
    """Install a stand-in for vLLM, and return the plug-in's modules that import it."""
    with fake_vllm.installed():
        names = ("method", "config", "warmup")
        modules = (importlib.import_module(f"{plugin.__name__}.{name}") for name in names)
        yield SimpleNamespace(**dict(zip(names, modules, strict=True)))


def plain_weights(seed=0, hidden=HIDDEN, intermediate=INTERMEDIATE):
    generator = torch.Generator().manual_seed(seed)
    shapes = (EXPERTS, 2 * intermediate, hidden), (EXPERTS, hidden, intermediate)
    return [torch.randn(shape, generator=generator).mul(0.2).to(BF16) for shape in shapes]


def inputs(tokens=9, experts=EXPERTS, hidden=HIDDEN):
    """Return tokens, routing weights and expert ids."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, hidden, generator=generator).to(BF16)
    ids = torch.rand(tokens, experts, generator=generator).topk(2).indices.to(torch.int32)
    return x, torch.rand(tokens, 2, generator=generator), ids


def make_method(engine, layer, scheme, stored=None, has_inputs=True):
    """Return the method of a layer whose parameters it has created."""
    formats = load_format(SCHEMES[scheme], stored, has_inputs)
    method = engine.method.GroupedExpertsMethod(layer, PREFIX, scheme, formats)
    layer.quant_method = method
    method.create_weights(layer, EXPERTS, layer.hidden_size, layer.hidden_size // 2, BF16)
    return method


def fill_plain(layer, w13, w2):
    """Fill plain parameters as the loader does, on the device where they were created."""
    for name, w in (("w13_weight", w13), ("w2_weight", w2)):
        layer.register_parameter(name, nn.Parameter(w.clone(), requires_grad=False))


def fill_quantized(layer, layout_name, w13, w2):
    """Fill the parameters of a layout; gate and up have global scales of their own."""
    layout = LAYOUTS[layout_name]
    for name, w, count in (("w13", w13, 2), ("w2", w2, 1)):
        projections = [layout.stored(quantize_weight(p, layout.fmt)) for p in w.chunk(count, 1)]
        for suffix in layout.suffixes:
            parameter = getattr(layer, name + suffix.replace(".", "_", 1)).data
            tensors = [stored[suffix] for stored in projections]
            if parameter.dim() < 3:
                value = torch.stack([t.reshape(-1) for t in tensors], 1).view(parameter.shape)
                parameter.copy_(value)
            else:
                for target, t in zip(parameter.chunk(count, 1), tensors, strict=True):
                    target.view(torch.uint8).copy_(t.contiguous().view(torch.uint8))


def reference(layout_name, w, count):
    """Return the weight that ``grouped.checkpoint`` makes of the same tensors."""
    from grouped.checkpoint.plain_tensors import reconcile, stack_experts

    layout = LAYOUTS[layout_name]
    projections = [layout.stored(quantize_weight(p, layout.fmt)) for p in w.chunk(count, 1)]
    stacked = [layout.weight_tensors(*tensors.values()) for tensors in projections]
    experts = [
        reconcile([WeightTensors(*p.expert(e)) for p in stacked], layout.fmt, False)[0]
        for e in range(EXPERTS)
    ]
    return grouped.GroupedTensor.from_parts(layout.fmt, *stack_experts(experts))


# ---- schemes


def test_schemes_decide_formats():
    """Compare the formats of plain and of quantized checkpoints with the recipes."""
    assert load_format(SCHEMES["grouped"], None, False)[:2] == (recipes.BF16(), None)
    scheme = SCHEMES["grouped_w4a16"]
    assert load_format(scheme, None, False)[:2] == (recipes.BF16(), grouped.NVFP4())
    modelopt = load_format(SCHEMES["grouped"], "modelopt", True)
    assert modelopt.recipe == recipes.NVFP4RowScaled() and modelopt.layout.name == "modelopt"
    assert load_format(SCHEMES["grouped"], "modelopt", False).recipe == recipes.BF16()
    deepseek = load_format(SCHEMES["grouped_w8a16"], "deepseek", True)
    assert deepseek[:2] == (recipes.BF16(), LAYOUTS["deepseek"].fmt)


@pytest.mark.parametrize(
    "name, layout", [("grouped_bf16", "modelopt"), ("grouped_fp8_block", "modelopt")]
)
def test_schemes_of_other_weights_are_refused(name, layout):
    """Refuse a scheme whose weights the checkpoint does not have, and name those that fit."""
    with pytest.raises(ValueError, match=contains_all(name, "nvfp4", "grouped_w4a16")):
        load_format(SCHEMES[name], layout, True)


def test_batch_invariant_schemes():
    """Compare the schemes that promise batch invariance with the table of the documentation."""
    names = {n for n, s in SCHEMES.items() if load_format(s, None, False).is_batch_invariant}
    assert SCHEMES.keys() - names == {"grouped_nvfp4", "grouped_fp8_current"}


# ---- parameters


@pytest.mark.parametrize("layout_name", ["modelopt", "compressed-tensors", "deepseek"])
@pytest.mark.parametrize("projections", [1, 2])
def test_parameters_of_layouts(layout_name, projections):
    """Compare the parameters with the tensors that the layout stores."""
    layout = LAYOUTS[layout_name]
    rows, columns = 256 * projections, 128
    sizes = weights.Sizes("w13", EXPERTS, rows, columns, projections)
    specs = {s.name: s for s in weights.parameter_specs(sizes, layout, BF16)}
    stored = layout.stored(
        quantize_weight(torch.ones(EXPERTS, rows, columns).bfloat16(), layout.fmt)
    )
    for suffix, t in stored.items():
        spec = specs.pop("w13" + suffix.replace(".", "_", 1))
        assert spec.dtype == t.dtype
        if spec.kind == weights.TENSOR:
            assert spec.shape == ((EXPERTS, 2) if projections == 2 else (EXPERTS,))
        else:
            assert spec.shape == t.shape
    assert not specs


def test_parts_of_blocks_are_refused():
    """Refuse a tensor-parallel part that cuts blocks, and say what to use instead."""
    sizes = weights.Sizes("w13", EXPERTS, 2 * 96, 256, 2)
    with pytest.raises(ValueError, match=contains_all(PREFIX, "96 rows", "128", "parallel")):
        weights.check_sizes(sizes, grouped.FP8Block(block=(128, 128)), PREFIX, "less parallel")


# ---- a layer


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if SCHEMES[name].recipe is not None])
def test_plain_checkpoints(engine, scheme):
    """Compare the experts of a plain checkpoint with ``grouped.moe``, to the bit."""
    hidden, (x, p, ids) = 256, inputs(hidden=256)
    layer = fake_vllm.RoutedExperts(hidden_size=hidden)
    method = make_method(engine, layer, scheme)
    is_online = SCHEMES[scheme].weight is not None
    assert method.uses_meta_device is is_online
    assert layer.w13_weight.is_meta is is_online
    w13, w2 = plain_weights(hidden=hidden, intermediate=hidden // 2)
    fill_plain(layer, w13, w2)
    for _ in range(2):  # vLLM processes layers that are quantized while loading twice.
        method.process_weights_after_loading(layer)
    fmt, recipe = SCHEMES[scheme].weight, SCHEMES[scheme].recipe
    want = [w if fmt is None else grouped.quantize(w, fmt) for w in (w13, w2)]
    with torch.inference_mode():
        y = method.apply(layer, x, p, ids, None, None)
    assert torch.equal(y, moe(x, ids, p, *want, recipe=recipe))


@pytest.mark.parametrize("layout_name", ["modelopt", "compressed-tensors", "deepseek"])
def test_quantized_checkpoints(engine, layout_name):
    """Compare the weights of a quantized checkpoint with those of ``grouped.checkpoint``."""
    hidden = 256
    layer = fake_vllm.RoutedExperts(hidden_size=hidden)
    method = make_method(engine, layer, "grouped", layout_name)
    w13, w2 = plain_weights(hidden=hidden, intermediate=hidden // 2)
    w13[1, : hidden // 2] *= 3  # Another global scale than that of the up projection.
    fill_quantized(layer, layout_name, w13, w2)
    method.process_weights_after_loading(layer)
    for weight, want in zip(
        method.operands(layer),
        (reference(layout_name, w13, 2), reference(layout_name, w2, 1)),
        strict=True,
    ):
        for name, t in want._inner().items():
            assert torch.equal(weight._inner()[name].view(torch.uint8), t.view(torch.uint8)), name
    names = {name for name, _ in layer.named_parameters()}
    assert names == {weights.buffer_name(w, n) for w in ("w13", "w2") for n in want._names}


def test_gpt_oss(engine):
    """Compare MXFP4 experts with the exact NVFP4 that ``grouped.checkpoint`` makes of them."""
    layout = LAYOUTS["gpt-oss"]
    layer = fake_vllm.RoutedExperts(activation="swigluoai")
    method = make_method(engine, layer, "grouped", "gpt-oss")
    assert method.weight_dtype == "gpt_oss_mxfp4"
    assert (layer.w13_weight_scale == 0xFF).all()  # NaN, until the loader fills it.
    generator = torch.Generator().manual_seed(0)
    wanted = []
    for codes, scales in (
        (layer.w13_weight, layer.w13_weight_scale),
        (layer.w2_weight, layer.w2_weight_scale),
    ):
        codes.data.random_(256, generator=generator)
        scales.data.random_(110, 124, generator=generator)
        blocks = codes.data.unflatten(-1, (-1, 16)).clone()
        tensors = layout.weight_tensors(blocks, scales.data.view(torch.float8_e8m0fnu).clone())
        wanted.append(grouped.GroupedTensor.from_parts(layout.fmt, *tensors))
    method.process_weights_after_loading(layer)
    for weight, want in zip(method.operands(layer), wanted, strict=True):
        assert torch.equal(weight.dequantize(), want.dequantize())
    sizes = weights.Sizes("w2", EXPERTS, 64, 48, 1)
    with pytest.raises(ValueError, match=contains_all("48 columns", "32", "advice")):
        weights.check_sizes(sizes, layout.fmt, PREFIX, "advice", layout)


def test_incomplete_checkpoints_are_refused(engine):
    """Refuse experts that the loader did not fill."""
    layer = fake_vllm.RoutedExperts()
    method = make_method(engine, layer, "grouped", "modelopt")
    w13, w2 = plain_weights()
    fill_quantized(layer, "modelopt", w13, w2)
    layer.w13_weight_scale_2.data[2, 1] = float("nan")
    with pytest.raises(ValueError, match=contains_all(PREFIX, "w13_weight_scale_2", "expert 2")):
        method.process_weights_after_loading(layer)
    layer = fake_vllm.RoutedExperts()
    method = make_method(engine, layer, "grouped_bf16")
    with pytest.raises(ValueError, match=contains_all(PREFIX, "w13_weight", "expert 0")):
        method.process_weights_after_loading(layer)


def test_expert_parallel_ranks(engine):
    """Sum the outputs of two ranks, and compare them with the output of all experts."""
    x, p, ids = inputs(experts=8)
    w13, w2 = (torch.cat(ws) for ws in zip(plain_weights(0), plain_weights(1), strict=True))
    total = torch.zeros_like(x, dtype=F32)
    for rank in range(2):
        expert_map = torch.full((8,), -1, dtype=torch.int32)
        expert_map[rank * EXPERTS : (rank + 1) * EXPERTS] = torch.arange(EXPERTS)
        layer = fake_vllm.RoutedExperts(expert_map=expert_map)
        method = make_method(engine, layer, "grouped_bf16")
        fill_plain(layer, *(w.chunk(2)[rank] for w in (w13, w2)))
        method.process_weights_after_loading(layer)
        total += method.apply(layer, x, p, ids)
    torch.testing.assert_close(total, moe(x, ids, p, w13, w2).float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("is_prepacked", [False, True])
def test_rebalanced_experts(engine, is_prepacked, monkeypatch):
    """Swap experts in the parameters, as EPLB does: outputs with swapped ids are the same."""
    monkeypatch.setattr(experts, "prepacks", lambda *_: is_prepacked)
    x, p, ids = inputs()
    layer = fake_vllm.RoutedExperts()
    method = make_method(engine, layer, "grouped_nvfp4_row_scaled")
    fill_plain(layer, *plain_weights())
    method.process_weights_after_loading(layer)
    y = method.apply(layer, x, p, ids)
    order = torch.tensor([2, 0, 3, 1])
    for _, parameter in layer.named_parameters():
        assert parameter.is_contiguous()
        rows = parameter.data.view(EXPERTS, -1)
        rows.copy_(rows[order].clone())
    assert torch.equal(method.apply(layer, x, p, order.argsort().to(torch.int32)[ids.long()]), y)


def test_reloaded_weights(engine):
    """Process new weights and copy them into the old parameters, as a reload of vLLM does."""
    x, p, ids = inputs()
    layer = fake_vllm.RoutedExperts()
    method = make_method(engine, layer, "grouped_fp8_current")
    fill_plain(layer, *plain_weights())
    method.process_weights_after_loading(layer)
    method.apply(layer, x, p, ids)
    old = dict(layer.named_parameters())
    for name in old:
        delattr(layer, name)
    fill_plain(layer, *plain_weights(7))
    del layer._already_called_process_weights_after_loading
    method.process_weights_after_loading(layer)
    for name, parameter in old.items():
        parameter.data.copy_(getattr(layer, name))
        delattr(layer, name)
        layer.register_parameter(name, parameter)
    new = [grouped.quantize(w, grouped.FP8()) for w in plain_weights(7)]
    got = method.apply(layer, x, p, ids)
    assert torch.equal(got, moe(x, ids, p, *new, recipe=recipes.FP8Current()))


def test_biases_and_weights_on_the_input(engine):
    """Compare biases, an interleaved activation and router weights on the input."""
    layer = fake_vllm.RoutedExperts(activation="swigluoai", swiglu_limit=5.0)
    layer.moe_config.has_bias = True
    method = make_method(engine, layer, "grouped_bf16")
    w13, w2 = plain_weights()
    fill_plain(layer, w13, w2)
    for name in ("w13_bias", "w2_bias"):
        getattr(layer, name).data.normal_(generator=torch.Generator().manual_seed(3))
    method.process_weights_after_loading(layer)
    layer.apply_router_weight_on_input = True
    x, p, ids = inputs()
    want = moe(
        x,
        ids,
        p,
        w13,
        w2,
        b1=layer.w13_bias,
        b2=layer.w2_bias,
        activation=grouped.Activation("clamped_swiglu", limit=5.0),
        interleaved=True,
        apply_router_weight_on_input=True,
    )
    assert torch.equal(method.apply(layer, x, p, ids), want)


# ---- refusals


def refused(engine, match, scheme="grouped_bf16", **options):
    layer = fake_vllm.RoutedExperts(**options)
    with pytest.raises(ValueError, match=match):
        make_method(engine, layer, scheme)


def test_unsupported_activations_are_refused(engine):
    """Refuse activations that no kernel computes."""
    refused(engine, contains_all(PREFIX, "'gelu'", "gelu_tanh", "omit"), activation="gelu")
    refused(engine, contains_all(PREFIX, "clamps", "7.0"), swiglu_limit=7.0)
    refused(engine, "adds 2", activation="swigluoai", swiglu_beta=2.0)
    assert activations.ACTIVATIONS["swigluoai"].interleaved


def test_unsupported_options_are_refused(engine, monkeypatch):
    """Refuse options of vLLM, each with one line that says what to do instead."""
    layer = fake_vllm.RoutedExperts()
    config = layer.moe_config

    def check(match, scheme="grouped_nvfp4"):
        with pytest.raises(ValueError, match=match) as error:
            make_method(engine, layer, scheme)
        assert "\n" not in str(error.value)

    config.is_lora_enabled = True
    check(contains_all("--enable-lora", "--quantization grouped_nvfp4", "merged"))
    config.is_lora_enabled = False
    parallel = config.moe_parallel_config
    parallel.use_all2all_kernels, parallel.all2all_backend = True, "deepep_low_latency"
    check(contains_all("deepep_low_latency", "allgather_reducescatter"))
    parallel.use_all2all_kernels = False
    monkeypatch.setattr(fake_vllm.CONFIG.model_config, "enable_sleep_mode", True)
    check("--enable-sleep-mode")
    monkeypatch.undo()
    envs = fake_vllm.NAMES["vllm"]["envs"]
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True)
    check(contains_all("VLLM_BATCH_INVARIANT=1", "grouped_nvfp4_row_scaled", "share a scale"))
    make_method(engine, layer, "grouped_fp8_block" if HIDDEN % 128 == 0 else "grouped_w4a16")


def test_missing_names_of_vllm(monkeypatch):
    """Name the release and the missing name; the plug-in then warns and registers nothing."""
    with fake_vllm.installed():
        monkeypatch.delitem(fake_vllm.NAMES["vllm.config"], "get_current_vllm_config")
        with (
            fake_vllm.installed(),
            pytest.raises(ImportError, match=contains_all("0.0", "vllm.config.get_current")),
        ):
            plugin.register()
        with fake_vllm.installed(), warnings.catch_warnings():
            plugin.load_plugin()


# ---- configurations


def test_configurations(engine):
    """Ask configurations of plain and quantized checkpoints for the methods of layers."""
    assert set(plugin.register()) == set(SCHEMES) <= set(fake_vllm.METHODS)
    plain = fake_vllm.REGISTERED["grouped_w4a16"]()
    layer = fake_vllm.RoutedExperts()
    assert plain.get_quant_method(layer, PREFIX).formats.weight == grouped.NVFP4()
    assert type(plain.get_quant_method(nn.Linear(1, 1), "x")).__name__ == "UnquantizedLinearMethod"
    cls = type(plain)
    assert cls.override_quantization_method({}, "grouped_w4a16") == "grouped_w4a16"
    assert cls.override_quantization_method({}, "modelopt") is None
    section = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["skipped"]}
    config = cls.from_config(section)
    for read in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert isinstance(read, fake_vllm._ModelOptConfig)
        assert read.get_quant_method(layer, PREFIX).formats.layout.name == "modelopt"
        assert read.get_quant_method(layer, "skipped").formats.layout is None
        assert read.get_quant_method(nn.Linear(1, 1), "x") == "theirs"


@pytest.mark.parametrize(
    "section, match",
    [
        ({"quant_method": "awq"}, contains_all("'awq'", "modelopt", "omit")),
        ({"quant_method": "fp8"}, "weight_block_size"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, contains_all("quant_algo", "NVFP4")),
    ],
)
def test_unsupported_checkpoints_are_refused(engine, section, match):
    """Refuse checkpoints whose experts are in other formats."""
    plugin.register()
    with pytest.raises(ValueError, match=match):
        fake_vllm.REGISTERED["grouped"].from_config(section)


def test_recipes_of_users(engine, monkeypatch):
    """Register a recipe, and refuse names of vLLM and recipes with a history."""
    monkeypatch.setattr(schemes, "SCHEMES", SCHEMES)
    plugin.register(grouped_mine=recipes.BF16())
    assert SCHEMES.pop("grouped_mine").recipe == recipes.BF16()
    with pytest.raises(ValueError, match="fp8"):
        plugin.register(fp8=recipes.BF16())
    with pytest.raises(ValueError, match="FP8Current"):
        plugin.register(grouped_delayed=recipes.FP8Delayed())


# ---- kernels before requests


def test_planned_token_counts(engine):
    """Plan all small token counts, larger ones in small steps, and the largest."""
    counts = warmup.TokenCounts(8192, (1, 2, 512))
    planned = list(counts.planned())
    assert planned[:256] == list(range(1, 257)) and planned[-1] == 8192
    assert all(b - a <= max(1, a / 32) for a, b in zip(planned, planned[1:], strict=False))
    assert counts.run() == [*(1 << i for i in range(14))]


@pytest.mark.emulated
@pytest.mark.parametrize(
    "scheme, layout_name", [("grouped_w4a16", None), ("grouped", "modelopt")], ids=str
)
def test_no_call_compiles(engine, scheme, layout_name):
    """Load weights, then call with any number of tokens: all kernels are loaded already."""
    x, p, ids = inputs(tokens=8)
    layer = fake_vllm.RoutedExperts()
    with cute_kernels.backend("emulated:sm_90a"):
        method = make_method(engine, layer, scheme, layout_name)
        if layout_name is None:
            fill_plain(layer, *plain_weights())
        else:
            fill_quantized(layer, layout_name, *plain_weights())
        compilation.forget_kernels()
        method.process_weights_after_loading(layer)
        loaded = set(compilation._kernels)
        for count in range(1, 9):
            y = method.apply(layer, x[:count], p[:count], ids[:count])
            assert y.isfinite().all()
        assert loaded and set(compilation._kernels) == loaded


def test_buffers_survive_a_file():
    """Save and load a weight whose buffers are parameters."""
    weight = grouped.quantize(plain_weights()[0], grouped.NVFP4())
    layer = nn.Module()
    weights.set_buffers(layer, "w13", weight)
    state = save_and_load(layer.state_dict())
    layer.load_state_dict(state)
    assert torch.equal(weights.wrap_buffers(layer, "w13", weight).dequantize(), weight.dequantize())
