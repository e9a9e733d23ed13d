"""``torch.library.opcheck`` of every op in both forms, and that the two forms agree."""

import pytest
import torch
from torch.library import opcheck

from cute_kernels.ops import registry
from tests.helpers import assert_same_bytes, offsets, ops, poisoned, sample

OFFS = offsets((5, 0, 8))
ROWS = 15  # two rows of tail


def nvfp4(cols, **flags):
    return ops.grouped_quantize_nvfp4(sample(ROWS, cols), OFFS, columnwise=True, **flags)


def weight(*shape, **flags):
    return ops.grouped_quantize_nvfp4(sample(*shape), columnwise=True, **flags)


def x(cols=32, grad=False, dtype=torch.float32):
    return sample(ROWS, cols, dtype=dtype).requires_grad_(grad)


def w(*shape, grad=False):
    return sample(*shape, dtype=torch.float32).requires_grad_(grad)


F32 = torch.float32
#: Op, case, arguments.
CASES = [
    ("compute_offsets", "default", lambda: (torch.tensor([3, 0, 4]),)),
    ("compute_offsets", "int64", lambda: (torch.tensor([3, 0, 4]), 16, torch.int64)),
    ("grouped_amax", "ragged", lambda: (x(), OFFS)),
    ("grouped_amax", "uniform", lambda: (w(2, 5, 16),)),
    ("grouped_dbias", "ragged", lambda: (x(dtype=torch.bfloat16), OFFS)),
    ("grouped_quantize_nvfp4", "rowwise", lambda: (x(48), OFFS)),
    ("grouped_quantize_nvfp4", "row-scaled", lambda: (x(48), OFFS, None, True)),
    (
        "grouped_quantize_nvfp4",
        "columnwise",
        lambda: (x(48), OFFS, None, False, False, False, True),
    ),
    ("grouped_quantize_nvfp4", "both, 2D", lambda: (x(48), OFFS, None, False, True, True, True)),
    ("grouped_quantize_nvfp4", "amax given", lambda: (x(48), OFFS, torch.ones(3))),
    (
        "grouped_quantize_nvfp4",
        "uniform",
        lambda: (w(2, 5, 48), None, None, True, False, True, True),
    ),
    ("grouped_dequantize_nvfp4", "rowwise", lambda: (*nvfp4(48)[:3], OFFS, ROWS, torch.bfloat16)),
    (
        "grouped_dequantize_nvfp4",
        "row-scaled",
        lambda: (*nvfp4(48, row_scaled=True)[:3], OFFS, ROWS, F32, True),
    ),
    (
        "grouped_dequantize_nvfp4",
        "columnwise",
        lambda: (*nvfp4(48)[3:], OFFS, ROWS, F32, False, True),
    ),
    ("grouped_dequantize_nvfp4", "uniform", lambda: (*weight(2, 5, 48)[:3], None, 5, F32)),
    ("m_grouped_gemm", "plain", lambda: (x(16, True), w(3, 8, 16, grad=True), OFFS)),
    (
        "m_grouped_gemm",
        "everything",
        lambda: (
            x(16, True),
            w(3, 16, 8, grad=True),
            OFFS,
            w(3, 8, grad=True),
            torch.rand(3),
            True,
            torch.bfloat16,
        ),
    ),
    ("k_grouped_gemm", "plain", lambda: (x(8, True), x(16, True), OFFS)),
    ("k_grouped_gemm", "alpha", lambda: (x(8, True), x(16, True), OFFS, torch.rand(3), F32)),
    (
        "m_grouped_gemm_nvfp4",
        "fprop",
        lambda: (*nvfp4(48)[:3], *weight(3, 8, 48)[:3], OFFS),
    ),
    (
        "m_grouped_gemm_nvfp4",
        "dgrad with everything",
        lambda: (
            *nvfp4(48, row_scaled=True)[:3],
            *weight(3, 48, 16)[3:],
            OFFS,
            torch.rand(3, 16),
            torch.rand(3),
            True,
            F32,
        ),
    ),
    (
        "m_grouped_gemm_w4a16",
        "fprop",
        lambda: (x(48, dtype=torch.bfloat16), *weight(3, 8, 48)[:3], OFFS),
    ),
    (
        "m_grouped_gemm_w4a16",
        "dgrad with everything",
        lambda: (
            x(48, dtype=torch.float16),
            *weight(3, 48, 16)[3:],
            OFFS,
            torch.rand(3, 16),
            torch.rand(3),
            F32,
        ),
    ),
    (
        "m_grouped_quantize_gemm_nvfp4",
        "fprop",
        lambda: (x(48), *weight(3, 8, 48)[:3], OFFS),
    ),
    (
        "m_grouped_quantize_gemm_nvfp4",
        "row-scaled dgrad with everything",
        lambda: (
            x(48, dtype=torch.bfloat16),
            *weight(3, 48, 16)[3:],
            OFFS,
            torch.rand(3, 16),
            torch.rand(3),
            True,
            F32,
        ),
    ),
    ("k_grouped_gemm_nvfp4", "plain", lambda: (*nvfp4(16)[3:], *nvfp4(32)[3:], OFFS)),
    (
        "k_grouped_gemm_nvfp4",
        "alpha",
        lambda: (*nvfp4(16)[3:], *nvfp4(32)[3:], OFFS, torch.rand(3), F32),
    ),
]
IDS = [f"{name}: {case}" for name, case, _ in CASES]
each_case = pytest.mark.parametrize(
    ("name", "make"), [(name, make) for name, _, make in CASES], ids=IDS
)


def output_names(name):
    schema = getattr(ops, f"{name}_out").default._schema
    return [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def outputs_like(name, results):
    """Buffers for the out form; None where the functional form returned nothing."""
    results = results if isinstance(results, tuple) else (results,)
    names = output_names(name)
    pairs = zip(names, results, strict=True)
    return {n: None if t.shape == (0,) else poisoned(t.detach()) for n, t in pairs}


def detached(arguments):
    return [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]


def registered():
    return {name.split("::")[1] for name in registry._LIBRARY._op_defs}


def test_every_op_has_a_case():
    assert {name for name, _, _ in CASES} | {f"{name}_out" for name, _, _ in CASES} == registered()


@each_case
def test_functional_form(name, make):
    opcheck(getattr(ops, name).default, make())


@each_case
def test_out_form(name, make):
    arguments = detached(make())
    outputs = outputs_like(name, getattr(ops, name)(*arguments))
    opcheck(getattr(ops, f"{name}_out").default, arguments, outputs)


@each_case
def test_both_forms_agree_and_inputs_stay(name, make):
    arguments = detached(make())
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    results = getattr(ops, name)(*arguments)
    outputs = outputs_like(name, results)
    for tensor in outputs.values():
        if tensor is not None:
            tensor.zero_()  # where an op does not write, the functional form has zeros
    assert getattr(ops, f"{name}_out")(*arguments, **outputs) is None
    results = results if isinstance(results, tuple) else (results,)
    for tensor, want in zip(outputs.values(), results, strict=True):
        if tensor is not None:
            assert_same_bytes(tensor, want)
    for a, b in zip(arguments, before, strict=True):
        if isinstance(a, torch.Tensor):
            assert_same_bytes(a, b, "an input")


@each_case
def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(name, make):
    arguments = detached(make())
    results = getattr(ops, name)(*arguments)
    meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
    fakes = getattr(ops, name)(*meta)
    if not isinstance(results, tuple):
        results, fakes = (results,), (fakes,)
    for fake, real in zip(fakes, results, strict=True):
        assert fake.device.type == "meta"
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_rows_of_codes_are_16_bytes_apart():
    codes = ops.grouped_quantize_nvfp4(x(48), OFFS)[0]
    assert codes.shape == (ROWS, 24) and codes.stride() == (32, 1)
    codes = ops.grouped_quantize_nvfp4(w(2, 5, 16))[0]
    assert codes.shape == (2, 5, 8) and codes.stride() == (80, 16, 1)


def test_out_form_takes_any_pitch():
    data = x(48)
    want = ops.grouped_quantize_nvfp4(data, OFFS)
    for pitch in (24, 32, 40):
        codes = torch.empty(ROWS, pitch, dtype=torch.uint8)[:, :24]
        outputs = outputs_like("grouped_quantize_nvfp4", want)
        outputs["out_codes"] = codes.zero_()
        ops.grouped_quantize_nvfp4_out(data, OFFS, **outputs)
        assert_same_bytes(codes[:13], want[0][:13])


def test_compile_once_for_all_sizes_and_offsets():
    """One graph serves every number of rows."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    def step(a, b, offs):
        q = ops.grouped_quantize_nvfp4(a, offs, row_scaled=True, columnwise=True)
        v = ops.grouped_quantize_nvfp4(b)
        y = ops.m_grouped_gemm_nvfp4(*q[:3], *v[:3], offs, row_scaled=True)
        return y, ops.k_grouped_gemm_nvfp4(*q[3:], *q[3:], offs)

    compiled = torch.compile(step, fullgraph=True, backend=count, dynamic=True)
    b = sample(3, 24, 32)
    for splits in ((40, 0, 33), (300, 5, 9), (2, 2, 2)):
        a, offs = sample(sum(splits) + 3, 32), offsets(splits)
        for got, want in zip(compiled(a, b, offs), step(a, b, offs), strict=True):
            assert_same_bytes(got, want)
    assert len(graphs) == 1
