"""Modules on a real GPU: the reference's bits, no synchronization, graphs, streams."""

import threading
from concurrent import futures

import pytest
import torch

import cute_kernels
import grouped
from cute_kernels.formats import parse
from tests.helpers import I32, seeded_generator

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
ARCH = cute_kernels.active_backend(CUDA).arch
FEATURES, ROWS = 256, 104
SPLITS = ([40, 40, 57, 96], [0, 10, 10, 104], [96, 96, 96, 96])
NAMES = ("BF16", "FP8Block", "FP8Current", "NVFP4", "NVFP4RowScaled")
RECIPES = [getattr(grouped.recipes, name) for name in NAMES]


class Mixture(grouped.nn.MoE):
    def forward(self, x, offs):
        return super().forward(x)


LAYERS = {
    "linear": lambda bias, recipe: grouped.nn.GroupedLinear(
        4, FEATURES, 96, bias=bias, recipe=recipe
    ),
    "mlp": lambda bias, recipe: grouped.nn.GroupedMLP(4, FEATURES, 128, bias=bias, recipe=recipe),
    "moe": lambda bias, recipe: Mixture(FEATURES, 128, 4, 2, bias=bias, recipe=recipe),
}


def ends(split, device=CUDA):
    return torch.tensor(split, dtype=I32, device=device)


@pytest.fixture
def no_synchronization():
    """Fail on a synchronization with the host."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def make_layer(recipe, device=CUDA, bias=True, kind=LAYERS["mlp"]):
    torch.manual_seed(0)
    return kind(bias, recipe()).to(device)


def make_input(device=CUDA, seed=1):
    return torch.randn(ROWS, FEATURES, generator=seeded_generator(seed)).bfloat16().to(device)


def step(layer, x, offs):
    """Run a forward and a backward pass, and return the output and all gradients."""
    x = x.clone().requires_grad_()
    y = layer(x, offs)
    y.float().square().sum().backward()
    gradients = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    return [y.detach(), x.grad, *gradients]


def assert_same(got, want, closely=()):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        bound = 1e-2 * b.abs().max().item() if i in closely else 0
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0, atol=bound)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", LAYERS.values(), ids=LAYERS)
def test_a_step_has_the_bits_of_the_tensor_core_reference(kind, recipe, split):
    """Compare a step on the GPU with the reference of its tensor core."""
    cpu = torch.device("cpu")
    with cute_kernels.backend(f"reference:{ARCH}"):
        want = step(make_layer(recipe, cpu, kind=kind), make_input(cpu), ends(split, cpu))
    # The router's gradients and those of biases are products of PyTorch: those of x, the router and
    # the biases of MoE.
    closely = (1, 2, 4, 6) if kind is LAYERS["moe"] else ()
    assert_same(step(make_layer(recipe, kind=kind), make_input(), ends(split)), want, closely)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", LAYERS.values(), ids=LAYERS)
def test_a_step_reads_nothing_on_the_host(kind, recipe, request):
    """Check that a step does not synchronize with the GPU."""
    layer, x, offs = make_layer(recipe, kind=kind), make_input(), ends(SPLITS[0])
    want = step(layer, x, offs)  # compiles
    request.getfixturevalue("no_synchronization")
    got = step(layer, x, offs)
    torch.cuda.set_sync_debug_mode("default")
    assert_same(got, want)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", LAYERS.values(), ids=LAYERS)
def test_graph_replay_with_other_offsets_and_rows(kind, recipe):
    """Check that a captured graph replays with other offsets and rows."""
    layer, x, offs = make_layer(recipe, kind=kind), make_input(), ends(SPLITS[0])
    inputs = [(ends(split), make_input(seed=i)) for i, split in enumerate(SPLITS)]
    expected = [step(layer, rows, split) for split, rows in inputs]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(layer, x, offs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(layer, x, offs)
    for (split, rows), want in zip(inputs, expected, strict=True):
        offs.copy_(split)
        x.copy_(rows)
        graph.replay()
        assert_same(out, want)


def draw_choice(seed, device=CUDA):
    """Return int32 ids of 8 experts, with -1 among them, and routing weights."""
    rng = seeded_generator(seed)
    ids = torch.rand(ROWS, 8, generator=rng).argsort(1)[:, :3]
    ids[torch.rand(ids.shape, generator=rng) < 0.2] = -1
    return ids.int().to(device), torch.rand(ids.shape, generator=rng).to(device)


def make_call(recipe, device=CUDA, **options):
    """Return ``grouped.moe`` of three of 8 experts, as a function of tokens, ids and weights."""

    def create(bias, recipe):
        return grouped.nn.GroupedMLP(3, FEATURES, 128, bias, recipe=recipe)

    layer = make_layer(recipe, device, kind=create)
    expert_map = torch.tensor([2, -1, 0, -1, -1, 1, -1, -1], dtype=I32, device=device)
    parameters = [layer.gate_up.weight, layer.down.weight]
    biases = {"b1": layer.gate_up.bias, "b2": layer.down.bias}

    def call(x, ids, weights, **more):
        arguments = (x, ids, weights, *parameters)
        options_and_biases = {**biases, **options, **more}
        return grouped.moe(*arguments, recipe=recipe(), expert_map=expert_map, **options_and_biases)

    return call


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_moe_has_the_bits_of_the_tensor_core_reference(recipe, on_input, request):
    """With foreign experts, replayed or not, into a tensor, without a synchronization."""
    cpu, options = torch.device("cpu"), {"apply_router_weight_on_input": on_input}
    with cute_kernels.backend(f"reference:{ARCH}"), torch.no_grad():
        want = make_call(recipe, cpu, **options)(make_input(cpu), *draw_choice(0, cpu))
    call, x, choice = make_call(recipe, **options), make_input(), draw_choice(0)
    with torch.no_grad():
        assert_same([call(x, *choice)], [want])  # compiles
        call(x, *choice, out=torch.empty_like(x))
        request.getfixturevalue("no_synchronization")
        results = [call(x, *choice) for _ in range(3)]
        results += [call(x, *choice, out=torch.full_like(x, torch.nan)) for _ in range(3)]
        torch.cuda.set_sync_debug_mode("default")
    for y in results:
        assert_same([y], [want])


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_moe_in_a_graph_with_other_ids_and_tokens(recipe, on_input):
    """Rows of other experts may hold NaN; tokens without an expert have zeros."""
    call, x = make_call(recipe, apply_router_weight_on_input=on_input), make_input()
    ids, weights = draw_choice(0)
    nothing = torch.full_like(ids, -1), weights
    choices = [draw_choice(1), nothing, draw_choice(2)]
    with torch.no_grad():
        want = [call(make_input(seed=i), *choice) for i, choice in enumerate(choices)]
        call(x, ids, weights, out=torch.empty_like(x))
        out = torch.full_like(x, torch.nan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call(x, ids, weights)
            call(x, ids, weights, out=out)
    for i, (choice, result) in enumerate(zip(choices, want, strict=True)):
        for target, source in zip((x, ids, weights), (make_input(seed=i), *choice), strict=True):
            target.copy_(source)
        out.fill_(torch.nan)
        graph.replay()
        assert_same([y, out], [result, result])
    assert not want[1].any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_streams(recipe):
    layer = make_layer(recipe, bias=False)
    inputs = [(make_input(), ends(split)) for split in SPLITS[:2]]
    with torch.no_grad():
        want = [layer(x, offs) for x, offs in inputs]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in inputs]
        for _ in range(20):
            got = []
            for stream, (x, offs) in zip(streams, inputs, strict=True):
                with torch.cuda.stream(stream):
                    got.append(layer(x, offs))
            torch.cuda.synchronize()
            assert_same(got, want)


@pytest.mark.compile
def test_compiled_step():
    """Compare a compiled step with an eager step."""
    layer, offs = make_layer(grouped.recipes.NVFP4RowScaled), ends(SPLITS[0])
    want = step(layer, make_input(), offs)
    got = step(torch.compile(layer, fullgraph=True), make_input(), offs)
    for a, b in zip(got, want, strict=True):
        assert (a.float() - b.float()).norm() <= 0.02 * b.float().norm()


def test_dequantize_and_members_on_the_gpu():
    """Compare decoded values and members with those of the CPU."""
    x, offs = make_input(), ends(SPLITS[0])
    q = grouped.quantize(x, grouped.NVFP4(row_scaled=True), offs=offs, columnwise=True)
    want = grouped.quantize(x.cpu(), q.format, offs=offs.cpu(), columnwise=True)
    for direction in ("rowwise", "columnwise"):
        assert_same([q.dequantize(direction=direction)], [want.dequantize(direction=direction)])
    for g in range(4):
        for name, value in vars(want.member(g)).items():
            got = getattr(q.member(g), name).cpu()
            assert got.dtype == value.dtype and torch.equal(got.float(), value.float()), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_lens_waits_for_nothing_and_sees_what_it_sees_on_a_cpu(recipe):
    def looked(device):
        """Return a step's results and the records of the inspector on one device."""
        layer, x, offs = make_layer(recipe, device), make_input(device), ends(SPLITS[0], device)
        plain = step(layer, x, offs)
        with grouped.inspect.inspect_quantization(layer):
            step(layer, x, offs)  # Loads kernels.
        lens = grouped.inspect.inspect_quantization(layer)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if device == CUDA else "default")
        try:
            with lens:
                values = step(layer, x, offs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_same(values, plain)
        return [r for r in lens.records() if (r["layer"], r["role"]) == ("gate_up", "input")]

    for got, want in zip(looked(CUDA), looked(torch.device("cpu")), strict=True):
        assert got["noise"] == pytest.approx(want["noise"]) and got["amax"] == want["amax"]
        assert got["underflow"] == want["underflow"] and got["rows"] == want["rows"]


@pytest.mark.parametrize(
    "text", ["nvfp4", "nvfp4:block=16x16", "fp8", "fp8_block:block=128x128", "mxfp8"]
)
def test_an_optimizer_has_the_bits_of_torch_then_quantize(monkeypatch, text):
    w, results = torch.randn(3, 200, 160, generator=seeded_generator(0)).to(CUDA), []
    for _ in range(2):
        p = torch.nn.Parameter(grouped.quantize(w.bfloat16(), parse(text), columnwise=True))
        ours = grouped.optim.AdamW([p], lr=3e-3, masters={p: w})
        for seed in range(4):
            p.grad = torch.randn(w.shape, generator=seeded_generator(seed)).bfloat16().to(CUDA)
            ours.step()
        results.append(
            [*ours.state[p].values(), *(t.view(torch.uint8) for t in p._inner().values())]
        )
        monkeypatch.setattr(grouped.optim, "_has_kernel", lambda part: False)
    assert_same(*results)


def test_offs_are_checked_without_a_synchronization():
    """Also in the replays of a graph; the message has the first call."""
    layer, x = make_layer(grouped.recipes.BF16, kind=LAYERS["linear"]), make_input()
    offs = ends([40, 40, 57, 96])
    with torch.no_grad(), grouped.inspect.check_offsets() as check:
        layer(x, offs)
        torch.cuda.set_sync_debug_mode("error")
        layer(x, offs)
        torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(x, offs)
        graph.replay()
        check.check()
        offs.copy_(ends([40, 0, 17, 47]))
        graph.replay()
        with pytest.raises(ValueError, match=rf"the end rows decrease.*{__file__}:\d+"):
            check.check()
        offs.copy_(ends([40, 40, 57, ROWS + 1]))
        layer(x, offs)
        with pytest.raises(ValueError, match=f"past the {ROWS} rows"):
            check.check()


def test_threads_of_autograd_have_the_block_of_the_thread_that_calls_backward():
    """Check that autograd threads use the backend of the thread that calls ``backward``."""
    values, barrier = {}, threading.Barrier(2)

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.name = name
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            values[ctx.name] = threading.get_ident(), cute_kernels.active_backend(dy.device).name
            return dy, None

    def job(name):
        y = Note.apply(torch.ones(2, device=CUDA, requires_grad=True), name).sum()
        with cute_kernels.backend(name):
            barrier.wait()
            y.backward()
            return threading.get_ident()

    with cute_kernels.backend("reference:sm_100a"), futures.ThreadPoolExecutor(2) as pool:
        callers = list(pool.map(job, ["reference", "reference:sm_90a"]))
        Note.apply(torch.ones(2, device=CUDA, requires_grad=True), "main").sum().backward()
    handed_over = torch.__version__ >= "2.13"
    for name in ("reference", "reference:sm_90a", "main"):
        flags = "reference:sm_100a" if name == "main" or not handed_over else name
        assert values[name][1] == flags
    assert not {thread for thread, _ in values.values()} & set(callers)
