"""End rows of groups (``offs``): every form, the checks of their values, and who owns them."""

import copy
import inspect

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_kernels
import grouped
from cute_kernels.ops.checks import EndRowChecks, unchecked_end_rows
from grouped.nn.activation import activate
from tests.helpers import (
    BF16,
    E4M3,
    I32,
    assert_same_buffers,
    assert_same_bytes,
    compile_full_graph,
    contains_all,
    offs_tensor,
    ops,
    sample,
)

from .cases import FORMATS, bytes_of

ROWS = 40
FORMS = {
    "list": [7, 7, 33],
    "tuple": (7, 7, 33),
    "numpy int64": np.array([7, 7, 33]),
    "numpy uint8": np.array([7, 7, 33], dtype=np.uint8),
    "list of numpy": list(np.array([7, 7, 33])),
    "int64": torch.tensor([7, 7, 33]),
    "strided": offs_tensor(7, 0, 7, 0, 33, 0)[::2],
}


@pytest.mark.parametrize("offs", FORMS.values(), ids=FORMS)
def test_every_form_of_offs_means_the_same(offs):
    """Check that all forms of ``offs`` give the same tensor."""
    x = sample(ROWS, 32)
    want = grouped.quantize(x, FORMATS["1x16"], offs=offs_tensor(7, 7, 33), columnwise=True)
    got = grouped.quantize(x, FORMATS["1x16"], offs=offs, columnwise=True)
    assert got.offs.dtype == I32
    assert_same_buffers(bytes_of(got), bytes_of(want))


def test_offs_of_the_host_ignore_the_default_device():
    """Check that ``offs`` of the host ignore the default device."""
    x = sample(ROWS, 32)
    want = grouped.quantize(x, FORMATS["1x16"], offs=offs_tensor(7, 7, 33))
    with torch.device("meta"):
        got = grouped.quantize(x, FORMATS["1x16"], offs=[7, 7, 33])
    assert_same_buffers(bytes_of(got), bytes_of(want))


@pytest.mark.parametrize(
    ("offs", "error", "message"),
    [
        ([7, 6, 40], ValueError, "must not decrease or be negative, got 6 at 1"),
        ([-1, 6, 40], ValueError, "must not decrease or be negative, got -1 at 0"),
        ([7, 41], ValueError, "within the 40 rows of x, got 41"),
        ([], ValueError, "G >= 1"),
        ([7.0, 40.0], TypeError, "integers, got 7.0 at 0"),
        ([True, 40], TypeError, "integers, got True at 0"),
        (np.array([False, True]), TypeError, "integers"),
        ([[7, 40]], TypeError, "integers"),
        (torch.tensor([7.0, 40.0]), TypeError, "int32 or int64, got torch.float32"),
        (torch.tensor(40), ValueError, r"shape \(G,\)"),
        (torch.tensor([[7, 40]]), ValueError, r"shape \(G,\).*\(1, 2\)"),
        (torch.tensor([], dtype=I32), ValueError, "G >= 1"),
        (torch.zeros(2, dtype=I32, device="meta"), ValueError, "device of x"),
    ],
)
def test_offs_that_cannot_be_are_refused(offs, error, message):
    with pytest.raises(error, match=message):
        grouped.quantize(sample(ROWS, 32), FORMATS["1x16"], offs=offs)


@pytest.mark.parametrize(
    ("wild", "tame"),
    [
        ([-5, 20, 10, 99], [0, 20, 20, 40]),
        *(
            case
            for n in (1 << 31, (1 << 32) + 5, (1 << 62) + 1)
            for case in (([7, n, n], [7, 40, 40]), ([-n, 7, 40], [0, 7, 40]))
        ),
    ],
)
def test_unchecked_offs_are_clamped(wild, tame):
    """As those of a GPU, which nobody reads; what int32 cannot hold, cut to 32 bits, would be a row
    of the tensor.
    """
    x = sample(ROWS, 32)
    with unchecked_end_rows():
        q = (grouped.quantize(x, FORMATS["1x16"], offs=offs) for offs in (torch.tensor(wild), tame))
        got, want = (t.dequantize() for t in q)
    assert_same_bytes(got, want)
    with pytest.raises(ValueError, match="offs must"):
        grouped.quantize(x, FORMATS["1x16"], offs=torch.tensor(wild))


X, LINEAR = sample(ROWS, 32), grouped.nn.GroupedLinear(3, 32, 16, dtype=BF16)
MLP = grouped.nn.GroupedMLP(3, 32, 16, dtype=BF16)
WEIGHT, LOW = (
    LINEAR.weight.detach(),
    grouped.quantize(LINEAR.weight, FORMATS["1x16"], columnwise=True),
)
#: Calls that take offs, by modules and functions, by flat ops, and in other forms.
CALLS = {
    "quantize": lambda offs: grouped.quantize(X, FORMATS["1x16"], offs=offs),
    "linear": lambda offs: grouped.linear(X, WEIGHT, None, offs, grouped.recipes.NVFP4()),
    "GroupedLinear": lambda offs: LINEAR(X, offs),
    "GroupedMLP": lambda offs: MLP(X, offs),
    "gemm": lambda offs: grouped.grouped_gemm(X, WEIGHT, offs=offs),
    "W4A16": lambda offs: grouped.grouped_gemm(X, LOW, offs=offs),
    "wgrad": lambda offs: grouped.grouped_gemm(X, X, offs=offs),
    "gemm into out": lambda offs: grouped.grouped_gemm(
        X, WEIGHT, offs=offs, out=torch.zeros(ROWS, 16)
    ),
    "from_parts": lambda offs: grouped.GroupedTensor.from_parts(
        grouped.FP8(), X.to(E4M3), offs=offs, global_scale=ONES
    ),
    "func": lambda offs: torch.func.grad(
        lambda x: grouped.linear(x, WEIGHT, None, offs, RECIPE).sum()
    )(X),
    "activate": lambda offs: activate(X, "silu", offs),
    "op quantize": lambda offs: ops.grouped_quantize(X, "nvfp4", offs),
    "op m_grouped_gemm": lambda offs: ops.m_grouped_gemm(X, WEIGHT, offs),
    "op k_grouped_gemm": lambda offs: ops.k_grouped_gemm(X, X, offs),
    "op dequantize": lambda offs: ops.grouped_dequantize(
        X.to(E4M3), [ONES], "fp8", ROWS, BF16, offs
    ),
    "op amax": lambda offs: ops.grouped_amax(X, offs),
    "op amax into out": lambda offs: ops.grouped_amax_out(X, offs, amax=torch.zeros(3)),
    "op dbias": lambda offs: ops.grouped_dbias(X, offs),
    "op moe_activate": lambda offs: ops.moe_activate(X, "silu", offs),
    "op linear": lambda offs: torch.ops.grouped.linear(
        X, WEIGHT, None, offs, None, None, None, False
    ),
    "op of more rows": lambda offs: ops.m_grouped_gemm(
        X[:20], WEIGHT, offs, rows=torch.arange(20, dtype=I32).repeat(2)
    ),
}
ONES, RECIPE = torch.ones(3), grouped.recipes.BF16()


@pytest.mark.parametrize("backend", ["reference", "emulated:sm_90a"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_tensors_of_offs_on_a_cpu_are_checked_as_lists_are(call, backend):
    if backend != "reference" and call not in (CALLS["linear"], CALLS["op amax"]):
        pytest.skip("the check does not depend on the backend: two calls show it")
    with cute_kernels.backend(backend):
        for bad, message in (
            (
                offs_tensor(30, 0, 10),
                contains_all(
                    "got 0 at 1", "look like counts, which add up to 40", "grouped.compute_offsets"
                ),
            ),
            (offs_tensor(20, 30, 29), "must not decrease or be negative, got 29 at 2$"),
            (offs_tensor(-1, 30, 40), "negative, got -1 at 0$"),
            (offs_tensor(10, 20, 41), "within the 40 rows of .*, got 41$"),
        ):
            for _ in range(2):  # A plan does not depend on values.
                with pytest.raises(ValueError, match=message):
                    call(bad)
        for good in (offs_tensor(7, 7, 33), offs_tensor(0, 0, 0)):
            call(good)


@pytest.mark.compile
@pytest.mark.emulated
def test_compiled_and_replayed_calls_check_offs():
    """Check that compiled and replayed calls check ``offs``."""
    run = compile_full_graph(lambda x, offs: grouped.linear(x, WEIGHT, None, offs, RECIPE))
    run(X, offs_tensor(7, 7, 33))
    with pytest.raises(ValueError, match="got 0 at 1"):
        run(X, offs_tensor(30, 0, 10))
    with cute_kernels.backend("emulated:sm_90a"), torch.no_grad():
        for _ in range(3):
            MLP(X, offs_tensor(7, 7, 33))
        with pytest.raises(ValueError, match="got 0 at 1"):
            MLP(X, offs_tensor(30, 0, 10))


def test_offs_without_values_are_not_read():
    offs = offs_tensor(30, 0, 10)
    assert copy.deepcopy(LINEAR).to("meta")(X.to("meta"), offs.to("meta")).shape == (ROWS, 16)
    with FakeTensorMode() as mode:
        x, weight, fake = (mode.from_tensor(t) for t in (X, WEIGHT, offs))
        assert grouped.linear(x, weight, None, fake, RECIPE).shape == (ROWS, 16)


def test_a_tensor_of_a_file_has_its_offs_checked():
    q = grouped.quantize(X, grouped.FP8(), offs=[7, 7, 33])
    with pytest.raises(ValueError, match="offs must end within the 40 rows of the tensor, got 41"):
        grouped.GroupedTensor(q.shape, q.dtype, q.format, offs_tensor(7, 7, 41), q.rowwise, None)


@pytest.fixture
def recorded(monkeypatch):
    """CPU tensors are taken for those of a device that the host does not read."""

    names = {"EndRowChecks": EndRowChecks}
    source = "def record(offs, rows, *_):\n if EndRowChecks.recorder is not None: EndRowChecks.recorder(offs, rows)"  # noqa: E501
    exec(compile(source, cute_kernels.__file__, "exec"), names)  # Its line is not the caller's.
    for module in (grouped.tensor.offsets, cute_kernels.ops.op):
        monkeypatch.setattr(module, "check_end_rows_of", names["record"])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((-1, 30, 40), "an end row is negative"),
        ((30, 0, 10), "the end rows decrease"),
        ((7, 7, 41), "the last end row is past the 40 rows"),
    ],
)
def test_offs_of_a_device_are_checked_when_asked(recorded, bad, message):
    """Check that ``check_offsets`` reports invalid device offsets with their source line."""
    with grouped.inspect.check_offsets() as checks:
        LINEAR(X, offs_tensor(7, 7, 33))
        checks.check()
        ops.grouped_amax(X, offs_tensor(*bad))
        line = inspect.currentframe().f_lineno - 1
        LINEAR(X, offs_tensor(9, 8, 7))
        with pytest.raises(
            ValueError,
            match=contains_all(
                message, "offs of 3 groups", f"{__file__}:{line}", "grouped.compute_offsets"
            ),
        ):
            checks.check()
        checks.check()
    with (
        pytest.raises(ValueError, match=message),
        grouped.inspect.check_offsets(),
        torch.inference_mode(),
    ):
        LINEAR(X, offs_tensor(*bad))
    with pytest.raises(KeyError, match="its own"), grouped.inspect.check_offsets():
        LINEAR(X, offs_tensor(*bad))
        raise KeyError("its own")
    with (
        grouped.inspect.check_offsets(),
        pytest.raises(RuntimeError, match="active already"),
        grouped.inspect.check_offsets(),
    ):
        pass
    assert EndRowChecks.recorder is None


@pytest.mark.parametrize("multiplier", [1.5, 2.0, "2", None])
def test_a_multiplier_that_is_no_integer_is_refused(multiplier):
    grouped.compute_offsets(torch.tensor([1, 2]), multiplier=2)  # 2.0 finds its plan
    with pytest.raises(TypeError, match="multiplier must be an integer, got"):
        grouped.compute_offsets(torch.tensor([1, 2]), multiplier=multiplier)


def test_operands_of_wgrad_are_cut_alike():
    """Check that wgrad refuses operands with different ``offs``."""

    def tensor(offs):
        return grouped.quantize(sample(ROWS, 32), FORMATS["1x16"], offs=offs, columnwise=True)

    x = tensor([7, 7, 33])
    with pytest.raises(ValueError, match=r"cut at the same rows.*\[7, 8, 33\].*\[7, 7, 33\]"):
        grouped.grouped_gemm(tensor([7, 8, 33]), x)
    out = torch.zeros(3, 32, 32)
    with pytest.raises(ValueError, match="cut at the same rows"):
        grouped.grouped_gemm(tensor([7, 8, 33]), x, out=out, accumulate=True)
    assert not out.any()
    grouped.grouped_gemm(tensor([7, 7, 33]), x, out=out)
    assert out.any()


def test_a_quantized_tensor_owns_its_boundaries():
    """Neither side sees the other write: callers reuse offs buffers, ``out=`` rewrites offs."""
    offs = offs_tensor(7, 7, 33)
    x = sample(ROWS, 32)
    xq = grouped.quantize(x, FORMATS["1x16"], offs=offs)
    before = xq.dequantize()
    offs.fill_(3)
    assert_same_bytes(xq.dequantize(), before)
    next_offs = offs_tensor(1, 2, 3)
    grouped.quantize(x, FORMATS["1x16"], offs=next_offs, out=xq)
    xq.offs.zero_()
    assert offs.tolist() == [3, 3, 3] and next_offs.tolist() == [1, 2, 3]
