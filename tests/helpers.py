"""Inputs, arguments of ops, and comparisons that several test folders share."""

import copy
import dataclasses
import functools
import io
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import support
from cute_kernels.formats import FP8, MXFP8, NVFP4, FP8Block, parse

ops = torch.ops.cute_kernels
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
I32, U8 = torch.int32, torch.uint8

#: Dtypes of plain operands, by the names that kernels have for them.
DTYPES = {"bfloat16": BF16, "float16": F16, "float32": F32}

#: Copies to quantize, as (rowwise, columnwise).
DIRECTIONS = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}

#: Format texts of NVFP4 by block shape and kind of global scale.
NVFP4_TEXTS = {"1x16": "nvfp4", "16x16": "nvfp4:block=16x16", "row-scaled": "nvfp4:row_scaled"}


each_arch = pytest.mark.parametrize("arch", ("sm_90a", "sm_100a"))
each_copy = pytest.mark.parametrize(
    "copied",
    [
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(lambda m: pickle.loads(pickle.dumps(m)), id="pickle"),
    ],
)


def contains_all(*words):
    """Return a pattern that matches a message with all of the words, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(word)})" for word in words)


def assert_value_semantics(record):
    """Check that a record compares by value, can be hashed, copied and pickled, and is frozen."""
    again = dataclasses.replace(record)
    assert again == record and again is not record and hash(again) == hash(record)
    assert copy.deepcopy(record) == record and pickle.loads(pickle.dumps(record)) == record
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.name = "other"


def run_python(program, *arguments):
    """Run a program in a new Python process at the repository root and return what it prints."""
    command = [sys.executable, "-c", program, *arguments]
    process = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=200
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


#: Ways to damage a file of a cache.
DAMAGE = {
    "missing": Path.unlink,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "one bit": lambda path: path.write_bytes(
        bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]
    ),
}


def has_compiler():
    """Return True if there is a C++ compiler, which the emulator and Inductor need."""
    return shutil.which(os.environ.get("CXX") or "g++") is not None


#: ``torch.compile`` in one graph, without code generation.
compile_full_graph = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="Inductor needs g++")

_RECORDS = (
    NVFP4(),
    NVFP4(row_scaled=True),
    NVFP4(block=(16, 16)),
    NVFP4(hadamard=True),
    NVFP4(four_over_six=True),
    MXFP8(),
    MXFP8(E5M2),
    MXFP8(block=(32, 32)),
    FP8Block(),
    FP8Block(block=(128, 128)),
    FP8Block(pow2_scales=False),
    FP8(),
    FP8(E5M2),
)
#: Formats that the reference quantizes from the tensor alone, by format text.
REFERENCE_FORMATS = {
    fmt.text: fmt for fmt in _RECORDS if support("grouped_quantize", fmt, "reference")
}

#: Byte value that marks memory which must stay untouched. No quantizer fills a buffer with it.
SENTINEL = 0xA5

#: Row counts of the groups, by the case that each one covers.
SPLITS = {
    "one group": (37,),
    "one row": (1,),
    "equal": (64, 64, 64),
    "tile edges": (127, 128, 129, 1),
    "empty first": (0, 19, 40),
    "empty middle": (33, 0, 0, 50),
    "empty last": (130, 7, 0),
    "all empty": (0, 0, 0),
    "single rows": (1, 1, 1, 1, 1),
}


def end_rows(splits):
    """Return the end row of each group as a list."""
    return torch.tensor(splits, dtype=torch.int64).cumsum(0).tolist()


def row_ranges(splits):
    """Return (first row, end row) of each group."""
    return [(end - rows, end) for rows, end in zip(splits, end_rows(splits), strict=True)]


def offs_tensor(*end_rows):
    """Return end rows as an int32 tensor, the operand ``offs``."""
    return torch.tensor(end_rows, dtype=I32)


def offs_from_splits(splits):
    """Return ``offs`` of groups with these row counts."""
    return offs_tensor(*end_rows(splits))


def seeded_generator(seed):
    """Return a generator of random numbers on the CPU."""
    return torch.Generator().manual_seed(seed)


def offs_of_many_groups():
    """Return ``offs`` of 1500 groups: most have 0 to 2 rows, 700 are empty, one has 130."""
    sizes = torch.randint(0, 3, (1500,), generator=seeded_generator(5))
    sizes[700:1400] = 0
    sizes[1450] = 130
    return sizes.cumsum(0).int()


def sample(*shape, dtype=BF16):
    """Return normal values whose magnitudes differ between blocks and between rows."""
    x = torch.randn(shape)
    block = torch.randint(-6, 7, (*shape[:-1], -(-shape[-1] // 16))).repeat_interleave(16, dim=-1)
    return (x * block[..., : shape[-1]].float().exp2()).to(dtype)


def all_16_bit_values(dtype):
    """Return every bit pattern of a 16-bit dtype, including NaN and infinities."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)


def with_neighbors(values):
    """Return the fp32 values together with the next larger and next smaller numbers."""
    values, inf = torch.as_tensor(values, dtype=F32), torch.tensor(torch.inf)
    return torch.cat([values, values.nextafter(inf), values.nextafter(-inf)])


def special_values(rows, cols, dtype):
    """Return rows of zeros, signed zeros, denormals, extremes, Inf and NaN among ordinary rows."""
    x = sample(rows, cols, dtype=dtype)
    info = torch.finfo(dtype)
    tiny = info.tiny * info.eps  # the smallest denormal
    specials = (0.0, -0.0, tiny, -3 * tiny, info.tiny, info.max, -info.max, torch.inf, torch.nan)
    for i, value in enumerate(specials):
        if i < rows:
            x[i, i % cols :: 3] = value
        if len(specials) + i < rows:
            x[len(specials) + i] = value
    return x


def save_and_load(x, weights_only=True):
    """Return the object after a round trip through ``torch.save`` and ``torch.load``."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def forward_backward(module, x, dy, *arguments, function=None, **options):
    """Run forward and backward of a module, or of ``function``, which uses its parameters.

    Returns:
        The output, the gradient of x, and the gradients of the parameters.
    """
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    y = (module if function is None else function)(leaf, *arguments, **options)
    y.backward(dy)
    return [y.detach(), leaf.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


class GraphRecorder(list[Any]):
    """Backend of ``torch.compile``: aot_eager that also lists the graphs it compiled."""

    def __call__(self, graph, inputs):
        self.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def poisoned(like):
    """Return a tensor like ``like`` (shape, strides, dtype) whose bytes are all ``SENTINEL``."""
    storage = torch.full((like.untyped_storage().nbytes(),), SENTINEL, dtype=U8)
    return storage.view(like.dtype).as_strided(like.shape, like.stride())


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def e2m1_values(codes):
    """Return fp64 values of bytes with two E2M1 codes each, the lower half first."""
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    return torch.where(nibbles > 7, -_E2M1[nibbles & 7], _E2M1[nibbles & 7])


def quantize_operand(x, text, offs=None, *, columnwise=False):
    """Quantize ``x`` and return the tensors of one direction: codes, block scales, global scale."""
    fmt = parse(text)
    buffers = ops.grouped_quantize(x, text, offs, rowwise=not columnwise, columnwise=columnwise)
    named = dict(zip(fmt.buffer_names(columnwise), buffers, strict=True))
    return [named[name] for name in fmt.operand_names(columnwise)]


def dequantize_arguments(copy, text, rows, dtype, offs=None, columnwise=False):
    """Return arguments of ``grouped_dequantize`` for the buffers of one direction, codes first."""
    return (copy[0], list(copy[1:]), text, rows, dtype, offs, columnwise)


def m_grouped_arguments(
    a,
    b,
    offs,
    bias=None,
    alpha=None,
    transpose_b=False,
    out_dtype=None,
    *,
    a_format="nvfp4",
    b_format="nvfp4",
    prepacked=False,
):
    """Return arguments of ``m_grouped_gemm``.

    Operands are plain tensors, or lists with the buffers of one direction, codes first.
    """
    a, a_scales, a_text = _operand(a, a_format)
    b, b_scales, b_text = _operand(b, b_format)
    quantized = (a_scales, b_scales, a_text, b_text, prepacked)
    return (a, b, offs, bias, alpha, transpose_b, out_dtype, *quantized)


def k_grouped_arguments(
    a, b, offs, alpha=None, out_dtype=None, *, a_format="nvfp4", b_format="nvfp4"
):
    """Return arguments of ``k_grouped_gemm``; operands as in ``m_grouped_arguments``."""
    a, a_scales, a_text = _operand(a, a_format)
    b, b_scales, b_text = _operand(b, b_format)
    return (a, b, offs, alpha, out_dtype, a_scales, b_scales, a_text, b_text)


def _operand(x, text):
    if isinstance(x, Tensor):
        return x, None, None
    return x[0], list(x[1:]), text


def assert_same_bytes(got, want, label="output", *, any_nan=False):
    """Check bitwise equality; the message shows the first difference.

    Args:
        got: Tensor to check.
        want: Expected tensor.
        label: Name of the tensor in messages.
        any_nan: Accept any NaN where a NaN is expected.
    """
    assert got.shape == want.shape, f"{label}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{label}: dtype {got.dtype}, not {want.dtype}"
    if got.numel() == 0:
        return
    a = got.contiguous().flatten().view(U8).view(-1, got.element_size())
    b = want.contiguous().flatten().view(U8).view(-1, got.element_size())
    differs = (a != b).any(1)
    if any_nan:
        differs &= ~(got.isnan() & want.isnan()).flatten()
    wrong = differs.nonzero()
    if len(wrong):
        index = int(wrong[0])
        position = torch.unravel_index(torch.tensor(index), got.shape)
        raise AssertionError(
            f"{label}: {len(wrong)} of {len(a)} elements differ, first at "
            f"{tuple(int(i) for i in position)}: got {got.flatten()[index].item()!r} "
            f"(bytes {a[index].tolist()}), want {want.flatten()[index].item()!r} "
            f"(bytes {b[index].tolist()})"
        )


def assert_all_same(got, want, *, any_nan=False):
    """Check bitwise equality of two sequences of tensors."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same_bytes(a, b, f"result {i}", any_nan=any_nan)


def assert_same_buffers(got, want):
    """Check bitwise equality of buffers by name; skip those that are None in ``want``."""
    assert got.keys() == want.keys()
    for name, buffer in want.items():
        if buffer is not None:
            actual = got[name]
            assert actual is not None, name
            assert_same_bytes(actual, buffer, name)
