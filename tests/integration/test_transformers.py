"""Experts of transformers' models on grouped kernels, beside its own implementations."""

import copy
import inspect
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import grouped
from cute_kernels import backend
from grouped import checkpoint, recipes
from grouped.nn import cached_weight as kept
from tests.helpers import (
    BF16,
    assert_same_buffers,
    assert_same_bytes,
    compile_full_graph,
    contains_all,
    seeded_generator,
)

transformers = pytest.importorskip("transformers", minversion="5.17")
moe = pytest.importorskip("transformers.integrations.moe")
from grouped.integrations import transformers as integration  # noqa: E402

HIDDEN, INNER, EXPERTS, VOCABULARY = 64, 32, 4, 64
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8}
DEEPSEEK = {**LATENT, "v_head_dim": 16, "qk_nope_head_dim": 16, "first_k_dense_replace": 1}
MODELS = {
    "Mixtral": {"intermediate_size": INNER, "num_local_experts": EXPERTS},
    "Qwen3Moe": {"moe_intermediate_size": INNER, "num_experts": EXPERTS},
    "DeepseekV3": {
        "moe_intermediate_size": INNER,
        "n_routed_experts": EXPERTS,
        "n_group": 2,
        "topk_group": 1,
        **DEEPSEEK,
    },
    "GptOss": {"intermediate_size": INNER, "num_local_experts": EXPERTS, "sliding_window": 32},
}
#: Distance of logits from fp64, relative to that of transformers' own bf16.
BOUNDS = {"grouped_bf16": 1.05, "grouped_fp8_block": 10, "grouped_mxfp8": 10, "grouped_nvfp4": 30}


@pytest.fixture(autouse=True)
def registered():
    integration.register()


@pytest.fixture
def single_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def model_of(name, dtype=BF16):
    """Return a small random model in ``eval`` mode."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON | MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config)
    for p in model.parameters():
        nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.1)
    return model.to(dtype).eval()


def ids_of():
    return torch.randint(1, VOCABULARY, (2, 9), generator=seeded_generator(1))


def logits(model, implementation):
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        return model(ids_of()).logits


@pytest.mark.parametrize("name", [*MODELS])
def test_logits_are_as_near_to_fp64_as_stock(name):
    """Check that the distance of the logits from fp64 is within a bound of stock transformers."""
    exact = logits(model_of(name, torch.float64), "eager")
    model = model_of(name)

    def distance(implementation):
        return (logits(model, implementation).double() - exact).norm()

    stock = distance("grouped_mm")
    for implementation, bound in BOUNDS.items():
        assert distance(implementation) <= bound * stock, implementation


@pytest.mark.parametrize("implementation", ["grouped_nvfp4", "grouped_fp8_block"])
@pytest.mark.parametrize("name", [*MODELS])
def test_prepared_weights_give_the_same_bits(name, implementation):
    """Check that prepared weights give the same logits."""
    model = model_of(name)
    want = logits(model, implementation)
    assert integration.prepare(model) == (1 if name == "DeepseekV3" else 2)
    assert integration.prepare(model) > 0  # again, with nothing left to do
    assert_same_bytes(logits(model, implementation), want)
    with torch.no_grad():
        more = model.generate(ids_of(), max_new_tokens=3, do_sample=False)
    assert more.shape == (2, 12)


def test_w4a16_is_a_product_with_decoded_weights():
    """Compare W4A16 experts with a model of decoded weights."""
    model = model_of("GptOss")
    decoded = copy.deepcopy(model)
    for layer in decoded.model.layers:
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            lies = weight.data.transpose(1, 2).contiguous()
            weight.data.copy_(grouped.quantize(lies, grouped.NVFP4()).dequantize().transpose(1, 2))
    model.set_experts_implementation("grouped_bf16")
    integration.prepare(model, grouped.NVFP4())
    got, want = logits(model, "grouped_bf16").float(), logits(decoded, "grouped_bf16").float()
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, "grouped_bf16") for name in MODELS), ("Mixtral", "grouped_fp8_block")],
)
def test_training_with_checkpointing_and_adamw(name, implementation):
    """Check that checkpointing changes no gradient, and that training reduces the loss."""
    model = model_of(name).train()
    model.set_experts_implementation(implementation)

    def gradients():
        model.zero_grad()
        model(ids_of(), labels=ids_of()).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    want = gradients()
    model.gradient_checkpointing_enable()
    for got, expected in zip(gradients(), want, strict=True):
        assert_same_bytes(got, expected)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        losses.append(model(ids_of(), labels=ids_of()).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.2


def experts_of(**options):
    """Return an experts module with random weights and the given options."""
    gated = options.get("has_gate", True)

    @moe.use_experts_implementation(**options)
    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts, self.act_fn = EXPERTS, nn.GELU()
            up = "gate_up_proj" if gated else "up_proj"
            width = INNER * (2 if gated else 1)
            for key, shape in ((up, (width, HIDDEN)), ("down_proj", (HIDDEN, INNER))):
                setattr(self, key, nn.Parameter(torch.randn(EXPERTS, *shape).bfloat16() / 8))
            self.post_expert_norm = nn.RMSNorm(HIDDEN, dtype=BF16)

        def forward(self, *args):
            raise AssertionError("eager")

    torch.manual_seed(2)
    return Experts(transformers.MixtralConfig())


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("options", [{}, {"has_gate": False}, {"has_post_expert_norm": True}])
def test_other_experts_beside_stock(options, parallel):
    """Compare experts with other options to stock transformers."""
    if not options.keys() <= inspect.signature(moe.use_experts_implementation).parameters.keys():
        pytest.skip(f"this release of transformers has no {options}")
    experts = experts_of(**options)
    experts._is_expert_parallel = parallel
    x = torch.randn(7, HIDDEN).bfloat16().requires_grad_()
    # The id behind the last expert is that of an expert of another rank.
    ids = torch.randint(0, EXPERTS + parallel, (7, 2))
    weights = torch.rand(7, 2).requires_grad_()
    results = []
    for implementation in ("grouped_mm", "grouped_bf16"):
        experts.config._experts_implementation = implementation
        y = experts(x, ids, weights.masked_fill(ids == EXPERTS, 0))
        results.append((y, *torch.autograd.grad(y.float().square().sum(), (x, weights))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0.03, atol=0.03)


@pytest.mark.compile
@pytest.mark.parametrize("name", [*MODELS])
def test_compiled_in_one_graph(name, fresh_dynamo):
    """Router, experts and what a model has beside them; in the last prepared experts."""
    model = model_of(name)
    model.set_experts_implementation("grouped_bf16" if name != "GptOss" else "grouped_nvfp4")
    if name == "GptOss":
        integration.prepare(model)
    block = model.model.layers[-1].mlp
    compiled = compile_full_graph(block, dynamic=True)

    def result(block, x):
        with torch.no_grad():
            y = block(x)
        return y[0] if isinstance(y, tuple) else y

    for tokens in (5, 9):
        x = torch.randn(1, tokens, HIDDEN).bfloat16()
        assert_same_bytes(result(compiled, x), result(block, x))


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_prepare_changes_all_or_nothing(name):
    """Check that ``prepare`` changes no layer if one layer cannot be prepared."""
    model = model_of(name)
    before = logits(model, "grouped_nvfp4")
    last_logits = model.model.layers[-1].mlp.experts
    whole = last_logits.down_proj
    last_logits.down_proj = nn.Parameter(whole[..., :24] if name == "Mixtral" else whole[:, :24])
    with pytest.raises(
        ValueError, match="down_proj of .*Experts: K must be a positive multiple of 16"
    ):
        integration.prepare(model)
    assert not any(isinstance(p, grouped.GroupedTensor) for p in model.parameters())
    last_logits.down_proj = whole
    assert_same_bytes(logits(model, "grouped_nvfp4"), before)


def test_what_a_prepared_model_says(tmp_path):
    """Check the memory footprint and the errors of a prepared model."""
    model = model_of("Mixtral")
    model.set_experts_implementation("grouped_nvfp4")
    plain, values = model.get_memory_footprint(), model.state_dict()
    integration.prepare(model)
    saved = sum(
        (p.numel() * 2 - p.nbytes)
        for p in model.parameters()
        if isinstance(p, grouped.GroupedTensor)
    )
    assert 0 < saved == plain - model.get_memory_footprint()
    for expert in (model, copy.deepcopy(model), model.model):
        with pytest.raises(ValueError, match=r"gate_up_proj is quantized: save before prepare\(\)"):
            expert.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    model.save_pretrained(tmp_path, state_dict=values)
    assert_same_buffers(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16).state_dict(), values
    )


def test_what_is_refused():
    """Check that invalid registrations and preparations are refused."""
    with pytest.raises(ValueError, match="scales that last from step to step"):
        integration.register(mine=recipes.FP8Delayed())
    with pytest.raises(TypeError, match="recipe"):
        integration.register(mine="bf16")
    with pytest.raises(ValueError, match="eager is an experts implementation of transformers"):
        integration.register(eager=recipes.BF16())
    with pytest.raises(ValueError, match="has no experts"):
        integration.prepare(nn.Linear(2, 2))
    model = model_of("Mixtral")
    for implementation, message in (
        ("eager", "experts_implementation='eager'"),
        ("grouped_bf16", "pass fmt"),
    ):
        model.set_experts_implementation(implementation)
        with pytest.raises(ValueError, match=message):
            integration.prepare(model)
    assert integration.prepare(model, grouped.NVFP4()) == integration.prepare(
        model, grouped.NVFP4()
    )
    with pytest.raises(ValueError, match="gate_up_proj is already nvfp4, but fmt is mxfp8"):
        integration.prepare(model, grouped.MXFP8())


def test_a_recipe_of_ones_own():
    assert "mine" in integration.register(mine=recipes.NVFP4(hadamard=True))
    assert logits(model_of("Mixtral"), "mine").isfinite().all()
    del integration.RECIPES["mine"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("implementation", [*integration.RECIPES])
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_prepared_models_of_other_dtypes_run(name, implementation, dtype):
    """Check prepared models in fp32 and fp16."""
    model = model_of(name, dtype)
    want = logits(model, implementation)
    integration.prepare(model, grouped.NVFP4() if implementation == "grouped_bf16" else None)
    got = logits(model, implementation)
    assert got.dtype == dtype
    if implementation == "grouped_bf16":
        assert (got - want).norm() < 0.5 * want.norm()
    else:
        assert_same_bytes(got, want)


@pytest.mark.distributed
def test_sharded_models_are_refused(single_rank):
    """Check that ``prepare`` refuses a model sharded with FSDP2."""
    model = model_of("Mixtral")
    want = logits(model, "grouped_nvfp4")
    for layer in model.model.layers:
        fully_shard(layer, mesh=single_rank)
    fully_shard(model, mesh=single_rank)
    assert_same_bytes(logits(model, "grouped_nvfp4"), want)
    with pytest.raises(
        ValueError,
        match=contains_all(
            "model.layers.0.mlp.experts.gate_up_proj", "FSDP2", "before fully_shard"
        ),
    ):
        integration.prepare(model)
    assert_same_bytes(logits(model, "grouped_nvfp4"), want)


@pytest.mark.distributed
def test_experts_that_are_dtensors_are_refused(single_rank):
    """Check that ``prepare`` refuses experts that are DTensors."""
    model = model_of("Mixtral")
    model.set_experts_implementation("grouped_nvfp4")
    experts = model.model.layers[-1].mlp.experts
    experts.down_proj = nn.Parameter(
        distribute_tensor(experts.down_proj.detach(), single_rank, [Shard(0)])
    )
    with pytest.raises(
        ValueError, match=contains_all("model.layers.1.mlp.experts.down_proj", "it is a DTensor")
    ):
        integration.prepare(model)
    assert not any(isinstance(p, grouped.GroupedTensor) for p in model.parameters())


def test_prepared_weights_train():
    """Check that prepared weights train with fp32 masters."""
    model, masters = model_of("Mixtral").train(), {}
    model.set_experts_implementation("grouped_fp8_block")
    integration.prepare(model, trainable=True, masters=masters)
    assert len(masters) == 4
    optimizer = grouped.optim.AdamW(model.parameters(), lr=1e-2, masters=masters)
    losses = []
    for _ in range(4):
        losses.append(model(ids_of(), labels=ids_of()).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]


def test_a_prepared_model_takes_implementations_that_multiply_its_weights(tmp_path):
    """Check that a prepared model refuses implementations that cannot multiply its weights."""
    model = model_of("Mixtral")
    model.set_experts_implementation("grouped_bf16")
    integration.prepare(model, grouped.MXFP8())
    torch.save(model, tmp_path / "model")
    for expert in (model, copy.deepcopy(model), torch.load(tmp_path / "model", weights_only=False)):
        want = logits(expert, "grouped_mxfp8")
        for name in ("eager", "grouped_mm", "grouped_nvfp4", "grouped_fp8_block"):
            with pytest.raises(
                ValueError,
                match=contains_all(
                    f"experts_implementation='{name}' cannot multiply the quantized weights"
                ),
            ):
                expert.set_experts_implementation(name)
            assert expert.config._experts_implementation == "grouped_mxfp8"
        with torch.no_grad():
            assert_same_bytes(expert(ids_of()).logits, want)
        with pytest.raises(ValueError, match="save_pretrained writes plain weights"):
            expert.save_pretrained(tmp_path)


@pytest.mark.emulated
def test_weights_lie_as_the_implementation_reads_them():
    model = model_of("Mixtral")
    with backend("emulated:sm_90a"):
        model.set_experts_implementation("grouped_nvfp4")
        integration.prepare(model, grouped.NVFP4())
        weight = model.model.layers[0].mlp.experts.down_proj
        before = weight.dequantize()
        for name, prepacked in (("grouped_bf16", False), ("grouped_nvfp4", True)):
            assert weight.prepacked is not prepacked
            model.set_experts_implementation(name)
            assert (
                weight.prepacked is prepacked
                and weight is model.model.layers[0].mlp.experts.down_proj
            )
            assert torch.equal(weight.dequantize(), before)


def test_prepared_experts_ask_transformers_for_nothing(monkeypatch):
    """Check that a forward pass of prepared experts does not query the registry of transformers.

    A lookup in every layer would slow the host down in a decode step. Later changes of the
    implementation or of the registry still take effect.
    """
    model, ids = model_of("Qwen3Moe"), ids_of()
    model.set_experts_implementation("grouped_bf16")
    with torch.no_grad():
        integration.prepare(model, grouped.NVFP4())
        plain = model(ids).logits
        requests = []
        get = type(moe.ALL_EXPERTS_FUNCTIONS).get_interface
        ask = lambda self, name, default: requests.append(name) or get(self, name, default)  # noqa: E731
        monkeypatch.setattr(type(moe.ALL_EXPERTS_FUNCTIONS), "get_interface", ask)
        assert_same_bytes(model(ids).logits, plain)
        assert not requests
        model.set_experts_implementation("grouped_nvfp4")
        assert not torch.equal(model(ids).logits, plain)
        zeros = lambda self, x, *_: torch.zeros_like(x)  # noqa: E731
        monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_nvfp4", zeros)
        model(ids)
        assert requests == ["grouped_nvfp4"] * 2
        experts = copy.deepcopy(model.model.layers[0].mlp.experts)
        assert experts.forward.args == (experts,)


def test_a_captured_call_that_quantizes_experts_warns(monkeypatch):
    """Check that a captured call warns if it quantizes experts."""
    model, ids = model_of("Qwen3Moe"), ids_of()
    model.set_experts_implementation("grouped_fp8_current")
    monkeypatch.setattr(kept, "is_captured", lambda weight: True)
    kept._warn_of_captured_quantization.cache_clear()
    with torch.no_grad():
        with pytest.warns(UserWarning, match=r"grouped.prepare\(model\)"):
            model(ids)
        kept._warn_of_captured_quantization.cache_clear()
        integration.prepare(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(ids)


@pytest.mark.parametrize("name", [*MODELS])
def test_names_of_experts_that_transformers_does_not_read_are_warned_of(name, tmp_path):
    """Check that saving warns of names that transformers does not load."""
    model = model_of(name)
    model.set_experts_implementation("grouped_bf16")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.save(model, tmp_path / "a", "deepseek")
    is_read = name in ("Qwen3Moe", "DeepseekV3")
    assert ["would leave them at random values" in str(w.message) for w in caught] == [True] * (
        not is_read
    )


@pytest.mark.emulated
def test_a_recorded_call_sees_that_a_weight_lies_in_another_order():
    """Check that a replayed call notices that a weight has been prepacked or unpacked."""
    pytest.importorskip("cutlass")
    model = model_of("Qwen3Moe")
    model.set_experts_implementation("grouped_nvfp4")
    experts = model.model.layers[0].mlp.experts
    x, ids = (
        torch.randn(6, HIDDEN, generator=seeded_generator(2)).to(BF16),
        torch.tensor([[0, 1], [1, 2], [2, 0]] * 2),
    )
    with torch.no_grad(), backend("emulated:sm_90a"):
        integration.prepare(model)
        call = lambda: experts(x, ids, torch.ones(6, 2))  # noqa: E731
        y = call()
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(experts, name)
            assert weight.prepacked
            for _ in range(4):  # The second is recorded, later ones are repeated.
                assert_same_bytes(call(), y, name)
            weight.data = weight.data.unpack()
            assert_same_bytes(call(), y, name)
