"""Quantized tensors whose members have shapes of their own (``shapes``)."""

import copy
import itertools
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import grouped
from grouped import GroupedTensor
from tests.helpers import (
    F16,
    GraphRecorder,
    assert_same_buffers,
    assert_same_bytes,
    offs_tensor,
    sample,
    save_and_load,
)

from .cases import (
    SHAPES,
    OpCounter,
    assert_same_tensor,
    bytes_of,
    pointers,
    ragged,
    shaped,
    uniform,
)

NVFP4, BY_ROW = grouped.NVFP4(), grouped.NVFP4(row_scaled=True)
STARTS = [0, 320, 320, 4480, 4640]
LIVE, CAPACITY = STARTS[-1], 4700


def quantize(x, fmt=NVFP4, shapes=SHAPES, **options):
    return grouped.quantize(x, fmt, shapes=shapes, columnwise=True, **options)


def make(fmt=NVFP4, shapes=SHAPES):
    return shaped(fmt, shapes=shapes)


def parameter(fmt=NVFP4, requires_grad=True):
    return nn.Parameter(make(fmt), requires_grad)


def test_metadata():
    """Check shapes, dtypes and groups of a tensor with given shapes."""
    q = make()
    assert q.shape == (CAPACITY,) and q.num_groups == 4 and q.offs is None
    assert q.grouping == "shapes" and q.member_shapes == tuple(SHAPES)
    assert q.shapes.dtype == q.element_offsets.dtype == torch.int64
    assert q.shapes.tolist() == [list(shape) for shape in SHAPES]
    assert q.element_offsets.tolist() == STARTS
    assert q.shapes is q.shapes and q.element_offsets is q.element_offsets
    for copied, kind in ((ragged(NVFP4), "ragged"), (uniform(NVFP4), "uniform")):
        assert copied.grouping == kind
        assert copied.shapes is copied.element_offsets is copied.member_shapes is None
    for copies in (q.rowwise, q.columnwise):
        assert all(t.dim() == 1 for t in copies)
    assert q.nbytes == sum(t.nbytes for t in (*q.rowwise, *q.columnwise))


def test_repr_reads_no_values():
    """Check that ``repr`` runs no op."""
    q, many = make(), grouped.quantize(sample(160), NVFP4, shapes=[(1, 16)] * 10)
    with OpCounter() as counter:
        texts = repr(q), repr(many)
    assert not counter.calls
    assert "(4700,), shapes=[(5, 64), (0, 32), (130, 32), (1, 160)], num_groups=4" in texts[0]
    assert "shapes=[(1, 16), (1, 16), (1, 16), (1, 16), ...], num_groups=10" in texts[1]
    repr(q.to("meta"))


@pytest.mark.parametrize(
    "shapes_form",
    [
        pytest.param(SHAPES, id="list"),
        pytest.param(tuple(SHAPES), id="tuple"),
        pytest.param(torch.tensor(SHAPES), id="int64"),
        pytest.param(np.array(SHAPES), id="numpy"),
        pytest.param([torch.Size(shape) for shape in SHAPES], id="sizes"),
    ],
)
def test_forms_of_shapes(shapes_form):
    q = make(shapes=shapes_form)
    assert q.member_shapes == tuple(SHAPES)
    assert all(type(size) is int for size in itertools.chain(*q.member_shapes))


def test_members_are_views():
    """Check that members are views of the buffers."""
    q = make(grouped.FP8())
    copies = q.rowwise.codes
    member = q.member(2).codes
    assert member.shape == (130, 32) and member._base is not None
    assert copies.data_ptr() <= member.data_ptr() < copies.data_ptr() + copies.nbytes
    assert_same_bytes(q.member(-2).codes, member)
    with pytest.raises(IndexError, match=r"\[0, 4\)"):
        q.member(4)


def test_state_dicts_and_moves():
    """Check state dicts, casts and moves to other devices."""
    a, b = (nn.ParameterDict({"w": parameter()}) for _ in range(2))
    b.load_state_dict(save_and_load(a.state_dict()))
    assert_same_tensor(b["w"].data, a["w"].data)
    a.to(F16)
    assert a["w"].dtype == F16
    assert_same_buffers(bytes_of(a["w"]), bytes_of(b["w"]))
    meta = copy.deepcopy(b).to("meta")
    assert meta["w"].is_meta and meta["w"].shapes.is_meta and meta["w"].num_groups == 4
    meta.to_empty(device="cpu").load_state_dict(b.state_dict())  # plain, as empty_like is
    assert_same_bytes(meta["w"].detach(), b["w"].dequantize().detach())


def test_files_have_the_shapes():
    """Check that pickled tensors have their shapes, and that wrong shapes are refused."""
    x = make()
    rebuild, (shape, dtype, name, fields, *more) = x.__reduce_ex__(2)
    assert fields["shapes"] == tuple(SHAPES)
    assert "shapes" not in uniform(NVFP4).__reduce_ex__(2)[1][3]
    wrong = fields | {"shapes": ((5, 64), (0, 32), (130, 48), (1, 160))}
    with pytest.raises(ValueError, match=r"shapes\[2\], \(130, 48\), must end within the 4700"):
        rebuild(shape, dtype, name, wrong, *more)
    with pytest.raises(ValueError, match="rowwise codes must have size"):
        rebuild(shape, dtype, name, fields | {"shapes": ((5, 64),)}, *more)


def test_copies_between_tensors():
    """Check ``copy_`` between tensors of the same and of other formats."""
    source, target = make(BY_ROW), make(BY_ROW)
    assert target.copy_(source) is target
    assert_same_tensor(target, source)
    copied = make(grouped.FP8()).copy_(source)
    assert_same_tensor(copied, quantize(source.dequantize(), copied.format))
    assert_same_bytes(torch.empty(CAPACITY).copy_(source), source.dequantize().float())
    shapes = [(4640 // 32, 32)]
    for wrong in (make(BY_ROW, shapes), make(NVFP4, shapes)):
        with pytest.raises(ValueError, match="copy_ needs a source of equal shapes"):
            target.copy_(wrong)
    with pytest.raises(RuntimeError, match="expand"):
        target.copy_(sample(CAPACITY + 1))
    target.data = make(NVFP4, shapes)
    assert target.member_shapes == tuple(shapes) and target.num_groups == 1
    assert target.shapes.tolist() == [[145, 32]]


def test_out_is_written():
    """Check that ``out`` is written in place, and that other shapes are refused."""
    x, q = sample(CAPACITY), make()
    before = pointers(q)
    assert quantize(x, out=q) is q
    assert_same_tensor(q, quantize(x))
    assert pointers(q) == before
    for name, argument, shapes in (
        ("shapes", x, [(5, 64)]),
        ("shape: ", x[:-1], SHAPES),
        ("shape", sample(3, 32, 64), None),
    ):
        with pytest.raises(ValueError, match=f"out was made with another {name}"):
            quantize(argument, shapes=shapes, out=q)


@pytest.mark.compile
def test_compiled_quantize_of_every_capacity(fresh_dynamo):
    """Check that ``quantize`` compiles once for all capacities."""
    graphs = GraphRecorder()

    @torch.compile(fullgraph=True, backend=graphs, dynamic=True)
    def step(x):
        q = quantize(x)
        return q, q.dequantize()

    for capacity in (LIVE, CAPACITY, LIVE + 1, 9999):
        x = sample(capacity)
        got, values = step(x)
        want = quantize(x)
        assert_same_tensor(got, want)
        assert_same_bytes(values, want.dequantize())
    assert len(graphs) == 1


@pytest.mark.compile
def test_each_shapes_have_a_graph_of_their_own(fresh_dynamo):
    """Check that each list of shapes is compiled separately."""
    graphs = GraphRecorder()

    @torch.compile(fullgraph=True, backend=graphs)
    def step(x, shapes):
        q = grouped.quantize(x, grouped.FP8(), shapes=shapes)
        return q, q.dequantize()

    x = sample(CAPACITY)
    for shapes in [[(rows, 64), (rows + 1, 32)] for rows in (5, 6, 7, 5)]:
        got, values = step(x, shapes)
        want = grouped.quantize(x, grouped.FP8(), shapes=shapes)
        assert_same_tensor(got, want)
        assert_same_bytes(values, want.dequantize())
    assert len(graphs) == 3


def test_fake_tensors_read_nothing():
    with FakeTensorMode():
        q = quantize(torch.empty(CAPACITY), BY_ROW)
        assert q.dequantize(direction="columnwise").shape == (CAPACITY,)
        assert q.shapes.shape == (4, 2) and q.element_offsets.shape == (5,)
        q.mul_(2)
    real = make(BY_ROW)
    for fake, t in zip((*q.rowwise, *q.columnwise), (*real.rowwise, *real.columnwise), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (t.shape, t.stride(), t.dtype)


#: Changed arguments of x (400,) and its shapes, by the message.
TYPE_ERRORS = {
    "int32 or int64": {"shapes": torch.ones(2, 2)},
    "must hold integers, got 64.0 at 0": {"shapes": [(5, 64.0)]},
}
VALUE_ERRORS = {
    "on the CPU, got one on meta: their values decide how large the buffers are": {
        "shapes": torch.empty(2, 2, dtype=torch.int64, device="meta")
    },
    "2 dimensions, got shape (2,)": {"shapes": torch.ones(2, dtype=torch.int64)},
    "(m, n) for each member, got 5 at 0": {"shapes": [5, 64]},
    "at least one member": {"shapes": []},
    "offs and shapes are both given": {"offs": [5]},
    "dbias has no meaning with shapes": {"dbias": True},
    "shapes is missing": {"shapes": None},
    "x with shapes must have 1 dim": {"x": torch.ones(2, 5, 32)},
}


@pytest.mark.parametrize("message", [*TYPE_ERRORS, *VALUE_ERRORS])
def test_quantize_checks_shapes(message):
    error, errors = (
        (TypeError, TYPE_ERRORS) if message in TYPE_ERRORS else (ValueError, VALUE_ERRORS)
    )
    arguments = {"x": torch.ones(400), "shapes": [(5, 64)]} | errors[message]
    with pytest.raises(error, match=re.escape(message)):
        grouped.quantize(arguments.pop("x"), NVFP4, **arguments)


@pytest.mark.compile
def test_shapes_on_a_tensor_cannot_be_traced(fresh_dynamo):
    step = torch.compile(
        lambda x, s: grouped.quantize(x, NVFP4, shapes=s), fullgraph=True, backend=GraphRecorder()
    )
    with pytest.raises(Exception, match="shapes must be a host list in compiled code"):
        step(sample(CAPACITY), torch.tensor(SHAPES))


def test_the_constructor_checks_its_parts():
    """Check that the constructor refuses parts that do not fit."""
    x = make()
    facts = ("shape", "dtype", "offs", "rowwise", "columnwise")
    fields = {name: getattr(x, name) for name in facts} | {"fmt": x.format, "shapes": SHAPES}
    assert_same_tensor(GroupedTensor(**fields), x)
    for changes, message in (
        ({"shape": (10, 470)}, r"shape must be \(capacity,\) with shapes"),
        ({"shapes": None}, r"shape must be \(G, N, K\) without offs"),
        ({"offs": offs_tensor(1)}, "offs and shapes are both given"),
        ({"shapes": [*SHAPES[:2], (100, 32), SHAPES[3]]}, "rowwise codes must have size"),
        ({"prepacked": True}, "prepacked weights are uniform, but shapes"),
    ):
        with pytest.raises(ValueError, match=message):
            GroupedTensor(**fields | changes)


def test_products_refuse_shapes():
    shaped, rows, offs = make(), ragged(NVFP4), [7, 7, 33]
    plain = sample(36, 64)
    for call, message in (
        (lambda: grouped.grouped_gemm(shaped, uniform(NVFP4)), "a must be ragged"),
        (lambda: grouped.grouped_gemm(shaped, shaped), "a must be ragged"),
        (lambda: grouped.grouped_gemm(rows, shaped), "b must be ragged or uniform, got groups"),
        (lambda: grouped.grouped_gemm(plain, shaped, offs=offs), "b must be uniform, got groups"),
        (
            lambda: grouped.linear(plain, shaped, None, offs, grouped.recipes.NVFP4()),
            r"weight must have 3 dimensions, got shape \(4700,\)",
        ),
        (shaped.prepack, "only uniform weights can be prepacked"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
