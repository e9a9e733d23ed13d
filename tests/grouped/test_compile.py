"""Functions and layers compiled into one graph, against eager mode, bit by bit."""

import copy

import pytest
import torch
from torch import nn

import grouped
from grouped import recipes
from grouped.nn import GroupedLinear, GroupedMLP
from tests.helpers import (
    BF16,
    F32,
    I32,
    GraphRecorder,
    assert_all_same,
    assert_same_buffers,
    assert_same_bytes,
    compile_full_graph,
    needs_compiler,
    sample,
)

from .cases import (
    ALL_RECIPES,
    EVERY_FORMAT,
    FORMATS,
    RECIPES,
    WEIGHT_FORMAT,
    assert_same_tensor,
    close,
    parameter,
)

K, N = 64, 48
TOKENS = (40, 130, 7)
pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("fresh_dynamo")]


def compiled(function):
    frames = GraphRecorder()
    return torch.compile(function, fullgraph=True, backend=frames), frames


def boundaries(tokens):
    return torch.tensor([tokens // 3, tokens // 3, tokens - 2], dtype=I32)


def step(function, module, x, offs):
    """Return the output and all gradients of a step, compiled for any number of tokens."""
    leaf = x.clone().requires_grad_()
    torch._dynamo.mark_dynamic(leaf, 0)
    module.zero_grad()
    torch.manual_seed(1)  # of stochastic rounding
    y = function(leaf, offs)
    y.float().square().sum().backward()
    return y.detach(), leaf.grad, *(p.grad.clone() for p in module.parameters())


def linear(recipe, **options):
    return GroupedLinear(3, K, max(N, 3 * recipe.multiple), recipe=recipe, dtype=BF16, **options)


def mlp(recipe, **options):
    return GroupedMLP(3, K, 32, recipe=recipe, dtype=BF16, **options)


#: Every recipe, and stacked or separate parameters; an MLP consists of two linear layers.
TRAINED = ALL_RECIPES | {
    "stochastic": recipes.NVFP4(hadamard=True, stochastic_rounding=True),
    "delayed": recipes.FP8Delayed(history_length=4),
}
CASES = [(mlp, name, True) for name in TRAINED] + [(mlp, "row-scaled", False)]
CASES += [(linear, "nvfp4", True), (linear, "bf16", False), (linear, "delayed", False)]


@pytest.mark.parametrize(("make", "name", "single"), CASES)
def test_training_with_changing_token_counts(make, name, single):
    """Check that training compiles once for changing numbers of tokens, with the eager bits."""
    module = make(TRAINED[name], single_parameter=single)
    twin, (function, frames) = copy.deepcopy(module), compiled(module)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in TOKENS:
            x, offs = sample(tokens, K), boundaries(tokens)
            assert_all_same(step(function, module, x, offs), step(twin, twin, x, offs))
            assert_same_buffers(module.state_dict(), twin.state_dict())
    assert len(frames) == 1


@needs_compiler
def test_inductor():
    module = mlp(RECIPES["row-scaled"])
    function = torch.compile(module, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in TOKENS:
            x, offs = sample(tokens, K), boundaries(tokens)
            got = step(function, module, x, offs)
            for a, b in zip(got, step(module, module, x, offs), strict=True):
                # Inductor's silu may differ from eager's in the last bit of fp32.
                close(a, b, 0.05)


def test_host_boundaries():
    """Check that compiled layers take end rows from the host and check them."""
    module = linear(RECIPES["nvfp4"])
    function, frames = compiled(module)
    for ends in ([13, 20, 35], [14, 21, 36], [2, 30, 40], [17, 17, 39]):
        x = sample(40, K)
        assert_same_bytes(function(x, ends).detach(), module(x, tuple(ends)).detach())
    assert len(frames) <= 2
    assert_same_bytes(
        function(x, torch.tensor([13, 20, 35])).detach(), module(x, [13, 20, 35]).detach()
    )
    with pytest.raises(Exception, match="must not decrease"):
        function(x, [13, 12, 35])


def test_microbatches_with_a_cached_weight():
    """Check that compiled layers reuse a cached weight for later microbatches."""
    module = linear(RECIPES["row-scaled"])
    function, _ = compiled(module)
    offs = boundaries(40)
    for flags in ((True, False, False), (True, False, None)):
        for flag in flags:
            x = sample(40, K)
            got = step(lambda v, o, f=flag: function(v, o, is_first_microbatch=f), module, x, offs)
            assert_all_same(got, step(module, module, x, offs))
        with torch.no_grad():
            module.weight.mul_(2)


def test_a_quantized_weight_that_is_trained():
    """Check that training a quantized weight compiles once."""
    module = linear(RECIPES["row-scaled"])
    module.weight = parameter()
    function, frames = compiled(module)
    optimizer = torch.optim.SGD([module.weight], lr=1.0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in TOKENS:
            x, offs = sample(tokens, K), boundaries(tokens)
            want = step(module, module, x, offs)
            assert_all_same(step(function, module, x, offs), want)
            optimizer.step()
    assert len(frames) == 1


#: One format per kind of buffers; tests of the ops have every format.
every_format = pytest.mark.parametrize(
    "fmt",
    [
        pytest.param(EVERY_FORMAT[name], id=name)
        for name in ("row-scaled", "fp8", "mxfp8", "128x128")
    ],
)


@every_format
def test_functions_that_return_grouped_tensors(fmt):
    """Check that compiled functions return GroupedTensors and accept them."""

    def quantize(x, grad, offs):
        """Return a GroupedTensor, and the decoded results of all forms of quantize."""
        xq, dbias = grouped.quantize(x, fmt, offs=offs, columnwise=True, dbias=True)
        activated = grouped.quantize(x, fmt, offs=offs, activation="swiglu", columnwise=True)
        d, dbias_z = grouped.quantize(x, fmt, offs=offs, activation="swiglu", grad=grad, dbias=True)
        values = [activated.dequantize(direction=name) for name in ("rowwise", "columnwise")]
        return xq, xq.dequantize(), dbias, *values, d.dequantize(), dbias_z

    function, frames = compiled(quantize)
    for tokens in TOKENS:
        arguments = sample(tokens, K), sample(tokens, K // 2), boundaries(tokens)
        for rows in arguments[:2]:
            torch._dynamo.mark_dynamic(rows, 0)
        got, want = function(*arguments), quantize(*arguments)
        assert_same_tensor(got[0], want[0])
        assert_all_same(got[1:], want[1:])
        assert got[0].offs is not arguments[2]
    assert len(frames) == 1


def test_products_into_out():
    """Check that compiled products write to ``out`` and accumulate."""

    def accumulate(dyq, xq, wq, main_grad, y):
        grouped.grouped_gemm(dyq, xq, out=main_grad, accumulate=True)
        return grouped.grouped_gemm(xq, wq, out=y), main_grad * 2

    function, _ = compiled(accumulate)
    offs = boundaries(40)
    xq = grouped.quantize(sample(40, K), FORMATS["1x16"], offs=offs, columnwise=True)
    dyq = grouped.quantize(sample(40, N), FORMATS["1x16"], offs=offs, columnwise=True)
    wq = grouped.quantize(sample(3, N, K), WEIGHT_FORMAT)
    results = []
    for run in (function, accumulate):
        main_grad, y = torch.ones(3, N, K), torch.full((40, N), 5.0)
        out, doubled = run(dyq, xq, wq, main_grad, y)
        assert_same_bytes(out, y)
        results.append((main_grad, y, doubled))
    assert_all_same(*results)
    assert (results[0][1][38:] == 5).all() and (results[0][0][1] == 1).all()


@pytest.mark.parametrize("is_quantized", [False, True])
def test_gradients_of_grouped_gemm_of_plain_rows(is_quantized):
    """Compare compiled and eager gradients of ``grouped_gemm``."""

    def loss(x, bias, w, offs):
        return grouped.grouped_gemm(x, w, offs=offs, bias=bias, out_dtype=F32).square().sum()

    function, _ = compiled(loss)
    grads = []
    x, w, bias, offs = sample(40, K), sample(3, N, K), torch.randn(3, N), boundaries(40)
    frozen = [grouped.quantize(w, WEIGHT_FORMAT, columnwise=True)] if is_quantized else []
    for run in (function, loss):
        leaves = [t.clone().requires_grad_() for t in ((x, bias) if frozen else (x, bias, w))]
        run(*leaves, *frozen, offs).backward()
        grads.append([leaf.grad for leaf in leaves])
    assert_all_same(*grads)


@every_format
def test_quantize_into_out(fmt):
    """Check that compiled code quantizes into an existing tensor."""

    def requantize(x, offs, out):
        return grouped.quantize(x, fmt, offs=offs, columnwise=True, out=out).dequantize()

    function, _ = compiled(requantize)
    out = grouped.quantize(sample(40, K), fmt, offs=boundaries(40), columnwise=True)
    x, offs = sample(40, K), torch.tensor([1, 2, 40], dtype=I32)
    want = grouped.quantize(x, fmt, offs=offs, columnwise=True)
    assert_same_bytes(function(x, offs, out), want.dequantize())
    assert_same_tensor(out, want)


@every_format
def test_in_place_updates_inside_the_graph(fmt):
    """Check that compiled in-place updates have the eager bits."""

    def update(p, grad):
        with torch.no_grad():
            p.add_(grad, alpha=-0.5)
        return p.dequantize()

    function, _ = compiled(update)
    p, grad = parameter(False, fmt), sample(3, N, K)
    q = nn.Parameter(p.clone(), requires_grad=False)
    assert_same_bytes(function(p, grad), update(q, grad))
    assert_same_tensor(p.data, q.data)


@pytest.mark.parametrize("name", ["bf16", "mxfp8"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_counts_of_unknown_number(name, dynamic):
    """``torch.bincount`` returns a tensor whose size depends on values."""
    layer, recipe = linear(ALL_RECIPES[name]), ALL_RECIPES[name]

    def route(x, experts):
        return grouped.compute_offsets(torch.bincount(experts, minlength=3))

    def module(x, experts):
        return layer(x, route(x, experts))

    def function(x, experts):
        return grouped.linear(x, layer.weight, layer.bias, route(x, experts), recipe)

    for called in (module, function):
        once = compile_full_graph(called, dynamic=dynamic)
        for experts in (torch.tensor([0, 0, 2, 2]), torch.tensor([1, 1, 1, 1, 2, 2])):
            x = sample(len(experts), K)
            assert_same_bytes(once(x, experts), called(x, experts))
        with pytest.raises(Exception, match="one end row for each of the 3 groups|u0.* 3"):
            once(sample(4, K), torch.tensor([0, 1, 2, 3]))
