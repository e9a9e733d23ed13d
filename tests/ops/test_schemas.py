"""Schemas of the ops: opcheck, fakes, out forms, versions, and compiled code."""

import functools

import pytest
import torch
from torch.library import opcheck
from torch.utils._pytree import tree_leaves, tree_map_only

import cute_kernels
from cute_kernels import backend
from cute_kernels.ops import registration
from cute_kernels.ops.plan import CallPlan
from tests.helpers import (
    BF16,
    F16,
    F32,
    I32,
    NVFP4_TEXTS,
    U8,
    GraphRecorder,
    assert_all_same,
    assert_same_bytes,
    dequantize_arguments,
    k_grouped_arguments,
    m_grouped_arguments,
    offs_from_splits,
    offs_tensor,
    ops,
    poisoned,
    quantize_operand,
    sample,
)

from .test_adamw import arguments as adamw_arguments
from .test_layouts import CALLS

OFFS = offs_from_splits((5, 0, 8))
ROWS = 15  # two rows of tail
INDEX = offs_tensor(3, 0, 6, 3, -1, 2, 7, 5, 5, 0, 1, 2**31 - 1, 4, 1, 1)


BY_ROW, SQUARE = NVFP4_TEXTS["row-scaled"], NVFP4_TEXTS["16x16"]


def nvfp4(cols):
    return quantize_operand(sample(ROWS, cols), "nvfp4", OFFS)


def weight(*shape, columnwise=False):
    return quantize_operand(sample(*shape), "nvfp4", columnwise=columnwise)


def x(cols=32, grad=False, dtype=F32):
    return sample(ROWS, cols, dtype=dtype).requires_grad_(grad)


def w(*shape, grad=False):
    return sample(*shape, dtype=F32).requires_grad_(grad)


def quantizing(a, b, *options, a_format="nvfp4"):
    return (a, b[0], OFFS, b[1:], a_format, "nvfp4", *options)


def prepacked():
    codes, *scales = weight(3, 8, 48)
    b = (cute_kernels.prepack(codes), *scales)
    return m_grouped_arguments(nvfp4(48), b, OFFS, prepacked=True)


def decoding_shapes():
    shapes = [2, 16, 0, 32, 1, 32]
    copy = ops.grouped_quantize(w(70), BY_ROW, None, None, False, True, shapes=shapes)
    return (*dequantize_arguments(copy, BY_ROW, 70, F32, columnwise=True), shapes)


def copy_of(text, columnwise=False, uniform=None):
    x, offs = (sample(ROWS, 32), OFFS) if uniform is None else (sample(*uniform), None)
    return quantize_operand(x, text, offs, columnwise=columnwise)


def fp8_cases(a, b):
    """Return cases of all GEMMs for operands in these formats."""
    texts, alpha = {"a_format": a, "b_format": b}, torch.rand(3)
    accumulation = ("split",) if a == "fp8" else ()
    all_options = (torch.rand(3, 64), alpha, True, F32)

    def weights(columnwise):
        return copy_of(b, columnwise, (3, 32, 64) if columnwise else (3, 8, 32))

    def quantizing(transpose_b, *options):
        codes, *scales = weights(transpose_b)
        return (x(), codes, OFFS, scales, a, b, *options)

    def dgrad(a_operand, **formats):
        return m_grouped_arguments(a_operand, weights(True), OFFS, *all_options, **formats)

    def fprop(a_operand, **formats):
        return m_grouped_arguments(a_operand, weights(False), OFFS, **formats)

    def wgrad():
        dy, x = (copy_of(text, True) for text in (a, a))
        return k_grouped_arguments(dy, x, OFFS, alpha, a_format=a, b_format=a)

    x16 = functools.partial(x, dtype=F16)
    m_gemm, quantize_gemm, k_gemm = "m_grouped_gemm", "m_grouped_quantize_gemm", "k_grouped_gemm"
    return [
        (m_gemm, f"{a} fprop", lambda: (*fprop(copy_of(a), **texts), *accumulation)),
        (m_gemm, f"{a} dgrad, everything", lambda: (*dgrad(copy_of(a), **texts), *accumulation)),
        (m_gemm, f"plain x {b} fprop", lambda: fprop(x16(), b_format=b)),
        (m_gemm, f"plain x {b} dgrad", lambda: dgrad(x16(), b_format=b)),
        (quantize_gemm, f"{a} fprop", lambda: quantizing(False)),
        (
            quantize_gemm,
            f"{a} dgrad",
            lambda: quantizing(True, *all_options, False, None, *accumulation),
        ),
        (k_gemm, a, lambda: (*wgrad(), *accumulation)),
    ]


def inverse(top_k):
    """Return token and row of a routing, with a missing pair."""
    order = torch.arange(ROWS * top_k - 1, -1, -1, dtype=I32)
    row = order.clone().view(ROWS, top_k)
    row[4, 0] = -1
    token = order // top_k
    token[(ROWS - 5) * top_k + top_k - 1] = -1
    return token, row


def weights_and_pairs():
    return torch.rand(ROWS, 1), torch.randperm(ROWS).int()


HADAMARD, STOCHASTIC = "nvfp4:hadamard", "nvfp4:block=16x16,stochastic_rounding"
#: Arguments (amax, rowwise, columnwise).
BOTH, BY_ROWS = (None, True, True), (None, True, False)


def everything():
    return torch.rand(3, 16), torch.rand(3), True, F32


#: More cases than ``CALLS``, by op: gradients and other options.
CASES_OF_OPS = {
    "compute_offsets": {"int64": lambda: (torch.tensor([3, 0, 4]), 16, torch.int64)},
    "moe_route": {
        "softmax": lambda: (x(grad=True), None, None, 2),
        "groups": lambda: (x(grad=True), w(32).flatten(), OFFS[:1], 2, "sigmoid", True, 4, 2, 2.5),
    },
    "moe_route_gradient": {
        "scores": lambda: (
            x(2),
            x(),
            torch.zeros(ROWS, 2).long() + torch.arange(2),
            x(),
            "sigmoid",
            False,
            2.0,
        ),
        "weights": lambda: (
            x(2),
            None,
            torch.zeros(ROWS, 2).long() - torch.arange(2),
            x(),
            "sigmoid",
            True,
            1.0,
            True,
        ),
    },
    "moe_gather": {"inverse": lambda: (x(grad=True), *inverse(2))},
    "moe_activate": {
        "halves": lambda: (x(grad=True), "swiglu", OFFS),
        "interleaved": lambda: (x(dtype=BF16), "clamped_swiglu:limit=3.0", None, True),
        "plain": lambda: (x(grad=True), "gelu"),
    },
    "moe_activate_gradient": {
        "weights": lambda: (x(), x(16), "swiglu", OFFS, True, *weights_and_pairs()),
        "alone": lambda: (x(), x(), "silu"),
    },
    "moe_combine": {
        "weights": lambda: (w(30, 8, grad=True), inverse(2)[1], w(15, 2, grad=True), F32),
        "sum": lambda: (x(dtype=BF16), inverse(1)[1]),
    },
    "grouped_quantize": {
        "rows": lambda: (x(48), "fp8_block", OFFS, *BOTH, *(None,) * 4, *inverse(2)),
        "columnwise": lambda: (x(48), "nvfp4", OFFS, None, False, True),
        "activation, 2D": lambda: (x(96), SQUARE, OFFS, *BOTH, None, None, "swiglu"),
        "activation, uniform": lambda: (w(2, 5, 64), "nvfp4", None, *BY_ROWS, None, None, "gelu"),
        "activation, shapes": lambda: (
            w(500),
            "nvfp4",
            None,
            *BOTH,
            None,
            None,
            "swiglu",
            [5, 32, 2, 32],
        ),
        "scale given": lambda: (x(48), "fp8:scaling=delayed", OFFS, *BOTH, torch.rand(3)),
        "scale given, rowwise": lambda: (
            w(2, 5, 48),
            "fp8:dtype=e5m2,scaling=delayed",
            None,
            *BY_ROWS,
            torch.rand(2),
        ),
        "uniform": lambda: (w(2, 5, 48), BY_ROW, None, *BOTH),
        "stochastic": lambda: (x(48), STOCHASTIC, OFFS, *BOTH, None, torch.tensor([1, 2])),
        "hadamard": lambda: (sample(ROWS, 48), HADAMARD, OFFS, torch.ones(2, 3), True, True),
        "4over6": lambda: (w(2, 5, 48), "nvfp4:four_over_six"),
        "shapes": lambda: (w(70), "nvfp4", None, *BOTH, *[None] * 3, [2, 16, 0, 32, 1, 32]),
    },
    "grouped_dequantize": {"shapes": decoding_shapes},
    "m_grouped_gemm": {
        "plain": lambda: (x(16, True), w(3, 8, 16, grad=True), OFFS),
        "everything": lambda: (
            x(16, True),
            w(3, 16, 8, grad=True),
            OFFS,
            w(3, 8, grad=True),
            torch.rand(3),
            True,
            BF16,
        ),
        "w4a16 dgrad with everything": lambda: m_grouped_arguments(
            x(48, dtype=F16), weight(3, 48, 16, columnwise=True), OFFS, *everything()
        ),
        "prepacked": prepacked,
        "rows": lambda: (
            x(16, True),
            w(3, 8, 16, grad=True),
            OFFS,
            None,
            None,
            False,
            *[None] * 5,
            False,
            None,
            *inverse(1),
        ),
        "fp8_block rows": lambda: (
            *m_grouped_arguments(
                quantize_operand(sample(7, 128), "fp8_block", offs_from_splits((7,))),
                quantize_operand(sample(3, 8, 128), "fp8_block:block=128x128"),
                OFFS,
                a_format="fp8_block",
                b_format="fp8_block:block=128x128",
            ),
            *(None, INDEX),
        ),
    },
    "m_grouped_gemm_activate": {
        "keeps z": lambda: (*prepacked(), None, None, None, "geglu", True, True)
    },
    "k_grouped_gemm": {
        "plain": lambda: (x(8, True), x(16, True), OFFS),
        "alpha": lambda: (x(8, True), x(16, True), OFFS, torch.rand(3), F32),
        "rows": lambda: (
            x(8, True),
            w(ROWS, 16, grad=True),
            OFFS,
            None,
            F32,
            *[None] * 5,
            *inverse(1),
        ),
    },
    "m_grouped_quantize_gemm": {
        "row-scaled dgrad with everything": lambda: quantizing(
            x(48, dtype=BF16), weight(3, 48, 16, columnwise=True), *everything(), a_format=BY_ROW
        )
    },
}
CASES = [
    *[(op, name, make) for name, (op, make) in CALLS.items()],
    *[(op, name, make) for op, cases in CASES_OF_OPS.items() for name, make in cases.items()],
    *fp8_cases("fp8", "fp8:dtype=e5m2"),
    *fp8_cases("fp8_block:pow2_scales=false", "fp8_block:block=128x128"),
    *fp8_cases("mxfp8", "mxfp8:block=32x32"),
]
#: Formats with other scales and columnwise copies: blocks, slots, squares, a shared scale.
TEXTS = ("fp8", "mxfp8", "mxfp8:block=32x32", "fp8_block", "fp8_block:block=128x128")


def decoding(text, columnwise):
    return dequantize_arguments(
        quantize_operand(x(160), text, OFFS, columnwise=columnwise),
        text,
        ROWS,
        F32,
        OFFS,
        columnwise,
    )


for text in TEXTS:
    CASES += [
        ("grouped_quantize", text, lambda t=text: (x(160), t, OFFS, *BOTH)),
        ("grouped_dequantize", text, lambda t=text: decoding(t, False)),
        ("grouped_dequantize", f"{text}, columnwise", lambda t=text: decoding(t, True)),
    ]
CASES.append(("grouped_quantize", "fp8_block, uniform", lambda: (w(2, 5, 160), "fp8_block")))
each_case = pytest.mark.parametrize(
    ("name", "make"), [pytest.param(name, make, id=f"{name}: {case}") for name, case, make in CASES]
)


def outputs_like(name, results, make=poisoned):
    """Return outputs for the out form of an op, by name."""
    schema = getattr(ops, f"{name}_out").default._schema
    (out,) = (a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write)
    if isinstance(results, torch.Tensor):
        return {out: make(results.detach())}
    return {out: [make(t.detach()) for t in results]}


map_tensors = functools.partial(tree_map_only, torch.Tensor)


def tensors(arguments):
    return [t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)]


def detached(arguments):
    return map_tensors(torch.Tensor.detach, arguments)


def registered_ops():
    return {name.split("::")[1] for name in registration._LIBRARY._op_defs}


#: Ops that write their arguments; they have separate tests.
IN_PLACE = {
    "adamw_quantize": lambda: adamw_arguments("nvfp4:block=16x16", (2, 3, 32)),
    "delayed_scaling_update": lambda: (
        x(3),
        torch.ones(3),
        "fp8:scaling=delayed",
        torch.ones(3),
        1,
        "most_recent",
    ),
}


def test_every_op_has_a_case():
    named = {name for name, _, _ in CASES}
    assert named | {f"{name}_out" for name in named} | set(IN_PLACE) == registered_ops()


@pytest.mark.parametrize(
    ("name", "make"), [pytest.param(name, make, id=name) for name, make in IN_PLACE.items()]
)
def test_in_place_ops_bump_versions_of_their_outputs(name, make):
    """Check that in-place ops increment the versions of written tensors only."""
    op, arguments = getattr(ops, name).default, make()
    opcheck(op, arguments)
    before = [[t._version for t in tensors(value)] for value in arguments]
    op(*arguments)
    for argument, value, versions in zip(op._schema.arguments, arguments, before, strict=False):
        is_written = argument.alias_info is not None
        assert [
            t._version > version for t, version in zip(tensors(value), versions, strict=True)
        ] == [is_written] * len(versions)


@pytest.mark.usefixtures("comparable")
@each_case
def test_opcheck(name, make):
    opcheck(getattr(ops, name).default, make())
    arguments = detached(make())
    opcheck(
        getattr(ops, f"{name}_out").default,
        arguments,
        outputs_like(name, getattr(ops, name)(*arguments)),
    )


@each_case
def test_all_forms_agree_and_inputs_are_unchanged(name, make):
    """Functional, without the dispatcher, on fake tensors, and into given outputs."""
    arguments = detached(make())
    before = map_tensors(torch.Tensor.clone, arguments)
    results = getattr(ops, name)(*arguments)
    direct = getattr(cute_kernels.ops, name)(*arguments)
    fakes = getattr(ops, name)(*map_tensors(lambda t: t.to("meta"), arguments))
    assert type(direct) is type(fakes) is type(results)
    assert_all_same(tensors(direct), tensors(results))
    for fake, real in zip(tensors(fakes), tensors(results), strict=True):
        assert fake.device.type == "meta"
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    outputs = outputs_like(
        name, results, torch.zeros_like
    )  # the functional form has zeros where an op does not write
    assert getattr(ops, f"{name}_out")(*arguments, **outputs) is None
    assert_all_same(tensors(outputs), tensors(results))
    assert_all_same(tensors(arguments), tensors(before))


def test_out_forms_take_any_pitch():
    data = x(48)
    want = ops.grouped_quantize(data, "nvfp4", OFFS)
    for pitch in (24, 32, 40):
        codes = torch.zeros(ROWS, pitch, dtype=U8)[:, :24]
        ops.grouped_quantize_out(data, "nvfp4", OFFS, out=[codes, *map(poisoned, want[1:])])
        assert_same_bytes(codes[:13], want[0][:13])


@pytest.mark.compile
def test_one_graph_serves_all_sizes_and_offsets():
    """Check that one graph serves all sizes and offsets."""
    graphs = GraphRecorder()

    def step(a, b, offs, ids):
        """Run routing, gather, combine, quantization and both products."""
        _, token, _, row = ops.compute_routing(ids, 5)
        a = ops.moe_combine(ops.moe_gather(a, token, row) * 2, row, None)
        q = ops.grouped_quantize(a, BY_ROW, offs, columnwise=True)
        v = ops.grouped_quantize(b, "nvfp4")
        y = ops.m_grouped_gemm(*m_grouped_arguments(q[:3], v, offs, a_format=BY_ROW))
        return y, ops.k_grouped_gemm(*k_grouped_arguments(q[3:], q[3:], offs))

    compiled = torch.compile(step, fullgraph=True, backend=graphs, dynamic=True)
    b = sample(3, 24, 32)
    for splits in ((40, 0, 33), (300, 5, 9), (2, 2, 2)):
        a, offs = sample(sum(splits) + 3, 32), offs_from_splits(splits)
        arguments = a, b, offs, torch.randint(-1, 6, (len(a), 2))
        assert_all_same(compiled(*arguments), step(*arguments))
    assert len(graphs) == 1


@each_case
def test_out_forms_bump_versions_of_their_outputs_only(monkeypatch, name, make):
    """PyTorch counts writes of the reference by itself, but not those of kernels."""
    arguments = detached(make())
    outputs = outputs_like(name, getattr(ops, name)(*arguments))
    monkeypatch.setattr(CallPlan, "compute_into", lambda *args, **options: None)
    output_tensors = tensors(outputs)
    before = [t._version for t in output_tensors]
    read = [t._version for t in tensors(arguments)]
    getattr(ops, f"{name}_out")(*arguments, **outputs)
    assert all(t._version > v for t, v in zip(output_tensors, before, strict=True))
    assert [t._version for t in tensors(arguments)] == read


@pytest.mark.parametrize("backend_name", ["reference", "reference:sm_90a", "emulated:sm_100a"])
def test_overwriting_a_buffer_saved_for_backward_raises(backend_name):
    """Check that overwriting a buffer saved for backward raises."""
    x = sample(15, 32)
    amax = torch.ones(3)
    y = (torch.rand(3, requires_grad=True) * amax).sum()
    with backend(backend_name):
        ops.grouped_amax_out(x, OFFS, amax=amax)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_inference_tensors_have_no_version():
    x = sample(15, 32)
    with torch.inference_mode():
        amax = torch.ones(3)
        ops.grouped_amax_out(x, OFFS, amax=amax)
    assert amax.equal(ops.grouped_amax(x, OFFS))
