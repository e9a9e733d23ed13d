"""SGLang's own loader, models and layers with the plug-in, on a CPU by the reference backend.

``.ci/sglang`` runs this file in an environment that has SGLang's Python files.
"""

from importlib import util

import pytest
import torch

from tests.serving import sglang_engine as engine

if util.find_spec("sglang") is None:
    pytest.skip("SGLang is in the environment of .ci/sglang", allow_module_level=True)
engine.add_stand_ins()

import cute_kernels  # noqa: E402
import grouped  # noqa: E402
from cute_kernels.runtime import compile as compilation  # noqa: E402
from grouped.integrations import sglang as plugin  # noqa: E402
from grouped.integrations.sglang import SCHEMES  # noqa: E402
from tests.helpers import BF16, contains_all  # noqa: E402
from tests.serving import folders  # noqa: E402

LAYOUTS = ("modelopt", "compressed-tensors", "deepseek")
EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 4, 128, 64, 2
PREFIX = "model.layers.0.mlp.experts"

folders.integration.register()
CASES = [
    ("plain", "grouped", "grouped_bf16"),
    *(
        ("plain", s.name, next(n for n, r in folders.integration.RECIPES.items() if r == s.recipe))
        for s in SCHEMES.values()
        if s.recipe is not None
    ),
    ("modelopt", "grouped", "grouped_bf16"),
    ("modelopt", "grouped_nvfp4_row_scaled", "grouped_nvfp4_row_scaled"),
    ("modelopt, calibrated", "grouped", "grouped_nvfp4_row_scaled"),
    ("modelopt, calibrated", "grouped_w4a16", "grouped_bf16"),
    ("compressed-tensors", "grouped", "grouped_bf16"),
    ("compressed-tensors, calibrated", "grouped", "grouped_nvfp4_row_scaled"),
    ("deepseek", "grouped", "grouped_fp8_block"),
    ("deepseek", "grouped_w8a16", "grouped_bf16"),
]


@pytest.fixture(scope="module", autouse=True)
def sglang():
    """Load the plug-in as a server's process does, and start groups of one rank."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    engine.publish("grouped")
    engine.start_groups()
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return folders.write(tmp_path_factory.mktemp("folders"), LAYOUTS)


def make_layer(quant_config=None, intermediate=INTERMEDIATE, **options):
    """Return SGLang's layer of experts."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return FusedMoE(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        intermediate_size=intermediate,
        layer_id=0,
        top_k=TOP_K,
        params_dtype=BF16,
        quant_config=quant_config,
        prefix=PREFIX,
        **options,
    )


def plain_weights(projections=2):
    """Return the two weights of a layer."""
    generator = torch.Generator().manual_seed(0)
    shapes = (EXPERTS, projections * INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
    return tuple(torch.randn(s, generator=generator).mul(0.1).bfloat16() for s in shapes)


def fill(layer, w13, w2):
    """Load plain weights by SGLang's loader, and process them."""
    gate_and_up = w13.chunk(2, 1) if layer.moe_runner_config.is_gated else (w13,)
    for e in range(EXPERTS):
        for shard, w in zip(("w1", "w3"), gate_and_up, strict=False):
            layer.w13_weight.weight_loader(layer.w13_weight, w[e], "w13_weight", shard, e)
        layer.w2_weight.weight_loader(layer.w2_weight, w2[e], "w2_weight", "w2", e)
    layer.quant_method.process_weights_after_loading(layer)


def inputs(tokens=7, hidden=HIDDEN, experts=EXPERTS):
    """Return tokens and SGLang's routing of them."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    weights = torch.rand(tokens, TOP_K, generator=generator)
    scores = torch.rand(tokens, experts, generator=generator)
    return x, StandardTopKOutput(weights, scores.topk(TOP_K).indices.int(), None)


# ---- whole models


@pytest.mark.parametrize(("folder", "scheme", "implementation"), CASES)
def test_experts_have_the_bits_of_transformers(written, folder, scheme, implementation):
    """Load a checkpoint by SGLang's loader, and compare the experts of each layer."""
    engine.publish(scheme, written[folder])
    model = engine.load_model()
    want = folders.load(written[folder], implementation, SCHEMES[scheme].weight)
    x, routing = inputs(37, 256, 8)
    for got_layer, want_layer in zip(model.model.layers, want.model.layers, strict=True):
        experts = got_layer.mlp.experts
        assert experts.runner_backend.value == scheme
        got = experts(x, routing)
        with torch.no_grad():
            expected = want_layer.mlp.experts(x, routing.topk_ids.long(), routing.topk_weights)
        assert torch.equal(got, expected)


def test_block_with_router(written):
    """Run SGLang's whole block of experts with its router in plain PyTorch."""
    engine.publish("grouped", written["plain"])
    block = engine.load_model().model.layers[0].mlp
    want = folders.load(written["plain"], "grouped_bf16", None).model.layers[0].mlp
    x, _ = inputs(37, 256, 8)
    with torch.no_grad():
        logits, _ = block.gate(x)
        got = block.experts(x, block.topk.forward_native(x, logits))
        expected = want(x[None])[0]
    torch.testing.assert_close(got.float(), expected.float(), rtol=0.02, atol=0.02)


def test_parameters_can_be_rebalanced(written):
    """Check that EPLB, which moves parameters by expert, sees all tensors of the experts."""
    engine.publish("grouped_nvfp4_row_scaled", written["plain"])
    block = engine.load_model().model.layers[0].mlp
    moved = block.get_moe_weights()
    parameters = list(block.experts.parameters())
    assert len(moved) == len(parameters) == 6
    x, routing = inputs(37, 256, 8)
    before = block.experts(x, routing)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(2))
    for t in moved:
        t.copy_(t.clone()[order])
    inverse = order.argsort().int()
    routing = routing._replace(topk_ids=inverse[routing.topk_ids.long()])
    assert torch.equal(block.experts(x, routing), before)


# ---- layers


def test_other_backends_keep_their_methods():
    """Check that the plug-in changes nothing without its option."""
    engine.publish("triton")
    assert type(make_layer().quant_method).__name__ == "UnquantizedFusedMoEMethod"


def test_expert_parallel_parts(monkeypatch):
    """Add the outputs of two ranks with half of the experts each."""
    from sglang.srt.layers.moe.token_dispatcher import standard

    monkeypatch.setattr(standard, "get_device", lambda: "cpu")  # It knows accelerators only.
    engine.publish("grouped")
    w13, w2 = plain_weights()
    x, routing = inputs()
    outputs = []
    for rank in range(2):
        with engine.experts_rank("ep", rank, 2):
            layer = make_layer()
            assert layer.w13_weight.shape[0] == EXPERTS // 2
            fill(layer, w13, w2)
            outputs.append(layer(x, routing).float())
    want = grouped.moe(x, routing.topk_ids, routing.topk_weights, w13, w2)
    torch.testing.assert_close(sum(outputs), want.float(), rtol=0.02, atol=0.02)
    is_local = routing.topk_ids < EXPERTS // 2
    assert (outputs[0][~is_local.any(1)] == 0).all() and (outputs[1][is_local.all(1)] == 0).all()


def test_tensor_parallel_parts():
    """Add the outputs of two ranks with half of each expert."""
    engine.publish("grouped")
    w13, w2 = plain_weights()
    x, routing = inputs()
    outputs = []
    for rank in range(2):
        with engine.experts_rank("tp", rank, 2):
            layer = make_layer()
            assert layer.w2_weight.shape[2] == INTERMEDIATE // 2
            fill(layer, w13, w2)
            outputs.append(layer(x, routing).float())
    want = grouped.moe(x, routing.topk_ids, routing.topk_weights, w13, w2)
    torch.testing.assert_close(sum(outputs), want.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("on_input", [False, True])
def test_scaling_factor_of_routed_experts(on_input):
    """Compare with the output of ``grouped.moe`` times the factor."""
    engine.publish("grouped")
    w13, w2 = plain_weights()
    layer = make_layer(routed_scaling_factor=2.0, apply_router_weight_on_input=on_input)
    fill(layer, w13, w2)
    x, routing = inputs()
    want = grouped.moe(
        x, routing.topk_ids, routing.topk_weights, w13, w2, apply_router_weight_on_input=on_input
    )
    assert torch.equal(layer(x, routing), want * 2)


def activation_options():
    clamped = grouped.Activation("clamped_swiglu", alpha=1.702, limit=7.0)
    limits = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}
    return {
        "geglu": ({"activation": "gelu_tanh"}, "geglu", False),
        "squared relu": ({"activation": "relu2", "is_gated": False}, "srelu", False),
        "interleaved": (limits, clamped, True),
        "halves": ({**limits, "gate_up_interleaved": False}, clamped, False),
    }


@pytest.mark.parametrize("name", activation_options())
def test_activations(name):
    """Compare a layer with ``grouped.moe`` of the same activation."""
    options, activation, interleaved = activation_options()[name]
    engine.publish("grouped")
    w13, w2 = plain_weights(1 if options.get("is_gated") is False else 2)
    layer = make_layer(**options)
    fill(layer, w13, w2)
    x, routing = inputs()
    want = grouped.moe(
        x,
        routing.topk_ids,
        routing.topk_weights,
        w13,
        w2,
        activation=activation,
        interleaved=interleaved,
    )
    assert torch.equal(layer(x, routing), want)


def test_no_tokens():
    """Run a rank without tokens, as under data parallelism."""
    engine.publish("grouped_w4a16")
    layer = make_layer()
    fill(layer, *plain_weights())
    x, routing = inputs()
    empty = routing._replace(topk_weights=routing.topk_weights[:0], topk_ids=routing.topk_ids[:0])
    assert layer(x[:0], empty).shape == (0, HIDDEN)


# ---- kernels before requests


def test_token_counts():
    """Read the numbers of tokens from SGLang's options."""
    from grouped.integrations.sglang.warmup import token_counts

    engine.publish("grouped", chunked_prefill_size=2048, max_running_requests=64)
    assert token_counts().largest == 2048
    options = {"enable_mixed_chunk": True, "disable_radix_cache": True}
    engine.publish("grouped", chunked_prefill_size=2048, max_running_requests=64, **options)
    assert token_counts().largest == 2048 + 64


@pytest.mark.emulated
@pytest.mark.parametrize("scheme", ["grouped_w4a16", "grouped_nvfp4_row_scaled"])
def test_calls_after_loading_compile_nothing(scheme):
    """Load a layer for the emulated GPU, and compare the kernels before and after calls."""
    engine.publish(scheme, chunked_prefill_size=8, max_running_requests=8)
    x, routing = inputs(tokens=8)
    with cute_kernels.backend("emulated:sm_90a"):
        layer = make_layer()
        fill(layer, *plain_weights())
        kernels = set(compilation._kernels)
        for count in (3, 7):
            ids, weights = routing.topk_ids[:count], routing.topk_weights[:count]
            y = layer(x[:count], routing._replace(topk_ids=ids, topk_weights=weights))
            assert y.isfinite().all()
    assert kernels and set(compilation._kernels) == kernels


# ---- errors at start


OPTIONS = {
    "lora": ({"enable_lora": True, "lora_target_modules": ["q_proj"], "max_lora_rank": 8},
             ("--enable-lora", "merged")),
    "memory saver": ({"enable_memory_saver": True}, ("--enable-memory-saver", "omit")),
    "offload": ({"cpu_offload_gb": 1}, ("--cpu-offload-gb", "omit")),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_refused(name):
    options, words = OPTIONS[name]
    engine.publish("grouped_w4a16", **options)
    with pytest.raises(ValueError, match=contains_all(*words, "grouped_w4a16")):
        make_layer()


def test_all_to_all_is_refused(monkeypatch):
    """Refuse dispatchers that hand over tokens in layouts of their own."""
    from sglang.srt.layers.moe.utils import MoeA2ABackend
    from sglang.srt.runtime_context import get_flags

    engine.publish("grouped_w4a16")
    monkeypatch.setattr(get_flags().moe, "a2a_backend", MoeA2ABackend.DEEPEP)
    with pytest.raises(ValueError, match=contains_all("--moe-a2a-backend deepep", "none")):
        make_layer()


def test_shared_scales_are_refused_in_deterministic_inference():
    from sglang.srt.runtime_context import get_exec

    engine.publish("grouped_nvfp4")
    with get_exec().deterministic.override(enable_deterministic_inference=True):
        with pytest.raises(ValueError, match=contains_all("deterministic", "row_scaled")):
            make_layer()
        engine.publish("grouped_nvfp4_row_scaled")
        make_layer()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"activation": "gelu"}, ("'gelu'", "gelu_tanh", "omit")),
        ({"swiglu_limit": 10.0}, ("swiglu_limit=10.0", "omit")),
        ({"gemm1_alpha": 1.0, "gemm1_clamp_limit": 7.0, "gemm1_beta": 0.5}, ("gemm1_beta=0.5",)),
        ({"with_bias": True}, ("biases", "omit")),
        ({"no_combine": True}, ("one row for each expert", "omit")),
    ],
)
def test_layers_are_refused(options, words):
    engine.publish("grouped_w4a16")
    with pytest.raises(ValueError, match=contains_all(PREFIX, *words)):
        make_layer(**options)


def test_methods_of_models_are_refused():
    """Refuse a model that chooses the method of its experts."""
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    engine.publish("grouped_w4a16")
    with pytest.raises(ValueError, match=contains_all(PREFIX, "UnquantizedFusedMoEMethod")):
        make_layer(quant_method=UnquantizedFusedMoEMethod())


def test_runners_of_other_methods_are_refused():
    """Refuse weights of a method of SGLang that hands them to any backend."""
    from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

    with pytest.raises(NotImplementedError, match="omit --moe-runner-backend"):
        MoeRunner(resolve_moe_runner_backend("grouped"), MoeRunnerConfig())


def test_models_without_experts_are_refused(tmp_path):
    """Refuse a dense model before its weights are loaded."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).bfloat16().save_pretrained(tmp_path)
    engine.publish("grouped_w4a16", tmp_path)
    with pytest.raises(ValueError, match=contains_all("Qwen3ForCausalLM", "FusedMoE", "omit")):
        engine.load_model()


def test_checkpoints_are_refused(written):
    """Refuse a scheme with weights of another kind, and checkpoints in other formats."""
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    engine.publish("grouped_fp8_block", written["modelopt"])
    words = ("--moe-runner-backend grouped_fp8_block", "use --moe-runner-backend grouped")
    with pytest.raises(ValueError, match=contains_all(*words)):
        engine.load_model()
    engine.publish("grouped")
    per_tensor = Fp8Config(is_checkpoint_fp8_serialized=True)
    with pytest.raises(ValueError, match=contains_all("Fp8Config", "DeepSeek FP8", "omit")):
        make_layer(per_tensor)


def test_parts_of_blocks_are_refused():
    engine.publish("grouped_fp8_block")
    with pytest.raises(ValueError, match=contains_all("64 rows", "128", "--tp-size")):
        make_layer()


def test_weights_are_not_updated():
    """Refuse to write plain weights into quantized ones."""
    engine.publish("grouped_fp8_block")
    layer = make_layer(intermediate=128)
    w13, w2 = (torch.randn(EXPERTS, *shape).bfloat16() for shape in ((256, HIDDEN), (HIDDEN, 128)))
    fill(layer, w13, w2)
    with pytest.raises(NotImplementedError, match=contains_all(PREFIX, "grouped_bf16")):
        layer.w2_weight.weight_loader(layer.w2_weight, w2[0], "w2_weight", "w2", 0)
    with pytest.raises(NotImplementedError, match="start the server again"):
        layer.quant_method.restore_weights_before_loading(layer)


def test_incomplete_checkpoints_are_refused():
    engine.publish("grouped_w4a16")
    layer = make_layer()
    with pytest.raises(ValueError, match=contains_all(PREFIX, "local expert 0")):
        layer.quant_method.process_weights_after_loading(layer)


# ---- registration


def test_command_line(written):
    """Parse the option as a server does."""
    from sglang.srt.server_args import prepare_server_args

    folder = str(written["plain"])
    args = prepare_server_args(
        ["--model-path", folder, "--moe-runner-backend", "grouped_w4a16", "--device", "cpu"]
    )
    assert args.moe_runner_backend == "grouped_w4a16"
    with pytest.raises(SystemExit):
        prepare_server_args(["--model-path", folder, "--moe-runner-backend", "grouped_unknown"])


def test_register_adds_recipes():
    """Add a recipe of the user's, and refuse names and recipes that cannot be served."""
    from grouped import recipes

    assert "grouped_mine" in plugin.register(grouped_mine=recipes.BF16())
    assert SCHEMES.pop("grouped_mine").recipe == recipes.BF16()
    with pytest.raises(ValueError, match="triton"):
        plugin.register(triton=recipes.BF16())
    with pytest.raises(ValueError, match="FP8Current"):
        plugin.register(grouped_delayed=recipes.FP8Delayed())


def test_missing_symbols_are_named(monkeypatch):
    """Check the message for a release that lacks a name."""
    from grouped.integrations.sglang import symbols

    with pytest.raises(ImportError, match=contains_all("0.5.23", "sglang.srt.utils.nothing")):
        symbols._find("sglang.srt.utils", "nothing")
