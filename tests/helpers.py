"""Inputs and comparisons that tests of several layers share."""

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

#: Copies to make: (rowwise, columnwise).
DIRECTIONS = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}

#: The texts of NVFP4 by second level and block shape.
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


def assert_is_value(record):
    again = dataclasses.replace(record)
    assert again == record and again is not record and hash(again) == hash(record)
    assert copy.deepcopy(record) == record and pickle.loads(pickle.dumps(record)) == record
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.name = "other"


def run_python(program, *arguments):
    """What a Python process in the root of the repository prints."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


#: What may happen to a file of a cache.
DAMAGE = {
    "missing": Path.unlink,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "one bit": lambda path: path.write_bytes(
        bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]
    ),
}


def has_compiler():
    """For the emulator and for Inductor."""
    return shutil.which(os.environ.get("CXX") or "g++") is not None


#: In one graph, by no compiler.
whole_graph = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="Inductor needs g++")

_RECORDS = (
    *(NVFP4(), NVFP4(row_scaled=True), NVFP4(block=(16, 16))),
    *(NVFP4(hadamard=True), NVFP4(four_over_six=True)),
    *(MXFP8(), MXFP8(E5M2), MXFP8(block=(32, 32))),
    *(FP8Block(), FP8Block(block=(128, 128)), FP8Block(pow2_scales=False), FP8(), FP8(E5M2)),
)
#: Formats that the reference quantizes without anything beside the tensor, by their texts.
BUILT = {fmt.text: fmt for fmt in _RECORDS if support("grouped_quantize", fmt, "reference")}

#: Byte that no quantizer writes by chance everywhere; marks what must stay untouched.
SENTINEL = 0xA5

#: Splits of rows over groups, by the thing that each is there to catch.
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
    return torch.tensor(splits, dtype=torch.int64).cumsum(0).tolist()


def spans(splits):
    return [(end - rows, end) for rows, end in zip(splits, end_rows(splits), strict=True)]


def ends(*rows):
    return torch.tensor(rows, dtype=I32)


def offsets(splits):
    return ends(*end_rows(splits))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def many_groups():
    """End rows of 1500 groups: none to two rows each, a long run of empty ones, and a long one."""
    sizes = torch.randint(0, 3, (1500,), generator=seeded(5))
    sizes[700:1400] = 0
    sizes[1450] = 130
    return sizes.cumsum(0).int()


def sample(*shape, dtype=BF16):
    """Normal values whose magnitude differs from block to block and from row to row."""
    x = torch.randn(shape)
    block = torch.randint(-6, 7, (*shape[:-1], -(-shape[-1] // 16))).repeat_interleave(16, dim=-1)
    return (x * block[..., : shape[-1]].float().exp2()).to(dtype)


def every_16_bits(dtype):
    """Every bit pattern of a dtype of 16 bits, NaN and infinities too."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)


def beside(values):
    values, inf = torch.as_tensor(values, dtype=F32), torch.tensor(torch.inf)
    return torch.cat([values, values.nextafter(inf), values.nextafter(-inf)])


def weird_values(rows, cols, dtype):
    """Rows of zeros, signed zeros, denormals, extremes, Inf and NaN between ordinary ones."""
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


def saved(x, weights_only=True):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def step(module, x, dy, *given, function=None, **options):
    """Output and gradients, that of x first, of the module or a function of it."""
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    y = (module if function is None else function)(leaf, *given, **options)
    y.backward(dy)
    return [y.detach(), leaf.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


class Graphs(list[Any]):
    """The backend aot_eager, which keeps the graphs that it is given."""

    def __call__(self, graph, inputs):
        self.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def poisoned(like):
    """A tensor of the shape, strides and dtype of ``like``, every byte of it a sentinel."""
    storage = torch.full((like.untyped_storage().nbytes(),), SENTINEL, dtype=U8)
    return storage.view(like.dtype).as_strided(like.shape, like.stride())


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def e2m1_values(codes):
    """fp64 values of bytes that are two E2M1 codes, the lower half first."""
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    return torch.where(nibbles > 7, -_E2M1[nibbles & 7], _E2M1[nibbles & 7])


def quantized(x, text, offs=None, *, columnwise=False):
    """What a reader needs of one direction of ``x``: codes, block scales, what decodes."""
    fmt = parse(text)
    buffers = ops.grouped_quantize(x, text, offs, rowwise=not columnwise, columnwise=columnwise)
    named = dict(zip(fmt.buffer_names(columnwise), buffers, strict=True))
    return [named[name] for name in fmt.operand_names(columnwise)]


def dequantize_arguments(copy, text, rows, dtype, offs=None, columnwise=False):
    """Arguments of ``grouped_dequantize`` of one direction's buffers, codes first."""
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
    """Arguments of ``m_grouped_gemm``; operands are plain or buffers of a direction, codes first."""
    left, a_scales, a_text = _operand(a, a_format)
    right, b_scales, b_text = _operand(b, b_format)
    quantized = (a_scales, b_scales, a_text, b_text, prepacked)
    return (left, right, offs, bias, alpha, transpose_b, out_dtype, *quantized)


def k_grouped_arguments(
    a, b, offs, alpha=None, out_dtype=None, *, a_format="nvfp4", b_format="nvfp4"
):
    left, a_scales, a_text = _operand(a, a_format)
    right, b_scales, b_text = _operand(b, b_format)
    return (left, right, offs, alpha, out_dtype, a_scales, b_scales, a_text, b_text)


def _operand(x, text):
    if isinstance(x, Tensor):
        return x, None, None
    return x[0], list(x[1:]), text


def assert_same_bytes(got, want, what="output", *, any_nan=False):
    """The message gives the first difference; with ``any_nan`` one NaN is as good as another."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, not {want.dtype}"
    if got.numel() == 0:
        return
    a = got.contiguous().flatten().view(U8).view(-1, got.element_size())
    b = want.contiguous().flatten().view(U8).view(-1, got.element_size())
    differs = (a != b).any(1)
    if any_nan:
        differs &= ~(got.isnan() & want.isnan()).flatten()
    wrong = differs.nonzero()
    if len(wrong):
        at = int(wrong[0])
        where = torch.unravel_index(torch.tensor(at), got.shape)
        raise AssertionError(
            f"{what}: {len(wrong)} of {len(a)} elements differ, first at "
            f"{tuple(int(i) for i in where)}: got {got.flatten()[at].item()!r} "
            f"(bytes {a[at].tolist()}), want {want.flatten()[at].item()!r} "
            f"(bytes {b[at].tolist()})"
        )


def assert_all_same(got, want, *, any_nan=False):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same_bytes(a, b, f"result {i}", any_nan=any_nan)


def assert_same_buffers(got, want):
    """Bitwise equality of buffers by name; of one that is None in ``want`` nothing is asked."""
    assert got.keys() == want.keys()
    for name, buffer in want.items():
        if buffer is not None:
            found = got[name]
            assert found is not None, name
            assert_same_bytes(found, buffer, name)
