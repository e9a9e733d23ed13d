"""Variants of NVFP4 in the reference: Hadamard, stochastic rounding, four over six."""

import numpy as np
import pytest
import torch

from cute_kernels import reference
from cute_kernels.formats import parse
from cute_kernels.layout.buffers import member_spans
from cute_kernels.layout.slots import uniform_tiles
from cute_kernels.reference.codecs.nvfp4 import _square_sum, _sum
from cute_kernels.reference.groups import Groups
from cute_kernels.reference.hadamard import transform
from tests.helpers import (
    BF16,
    E4M3,
    F16,
    F32,
    U8,
    assert_same_bytes,
    dequantize_arguments,
    offs_from_splits,
    ops,
    sample,
    special_values,
)
from tests.reference import fp8_oracle

from .oracle_variants import SIGNS, block_bytes, undo_hadamard
from .test_quantize import SEED, VARIANTS, check, seed_of

every_variant = pytest.mark.parametrize("text", [*VARIANTS])


def is_transformed(text):
    return "hadamard" in text


@every_variant
def test_special_values(text):
    check(special_values(45, 48, BF16), text, offs_from_splits((22, 3, 20)))


@every_variant
@pytest.mark.parametrize("dtype", [F16, F32])
def test_fp16_and_fp32_inputs(dtype, text):
    """Check fp16 and fp32 inputs, which transformed formats refuse."""
    if not is_transformed(text):
        check(special_values(40, 32, dtype), text, offs_from_splits((17, 3, 20)))
        return
    x, offs = sample(40, 32, dtype=dtype), offs_from_splits((17, 3, 20))
    for rowwise in (True, False):
        with pytest.raises(TypeError, match=f"x must be bfloat16.*hadamard.*{str(dtype)[6:]}"):
            ops.grouped_quantize(x, text, offs, None, rowwise, True, None, seed_of(text))
    plain = text.replace("hadamard,", "").replace(":hadamard", "")
    want = ops.grouped_quantize(x, plain, offs, None, True, False, None, seed_of(text))
    got = ops.grouped_quantize(x, text, offs, None, True, False, None, seed_of(text))
    for name, g, w in zip(("codes", "scales", "amax"), got, want, strict=True):
        assert_same_bytes(g, w, name)


@every_variant
def test_given_amaxes(text):
    x, offs = sample(40, 32), offs_from_splits((17, 0, 3, 20))
    amax = torch.tensor([[3.0, 1.0, 1e-3, torch.inf], [0.0, 2.0, 1e30, 17.0]])
    check(x, text, offs, amax if is_transformed(text) else amax[0])


def test_amaxes_with_a_transformed_copy_need_one_row_per_direction():
    """Check that given amaxes of a transformed format have one row per direction."""
    x, offs, text = sample(8, 32), offs_from_splits((3, 5)), "nvfp4:hadamard"
    ones, twos = torch.ones(2), torch.ones(2, 2)
    for wrong, rowwise, columnwise in ((ones, 1, 1), (twos, 1, 0), (twos, 0, 1)):
        with pytest.raises(ValueError, match="amax must have"):
            ops.grouped_quantize(x, text, offs, wrong, bool(rowwise), bool(columnwise))
    with pytest.raises(ValueError, match="amax must have 1 dim"):
        ops.grouped_quantize(x, "nvfp4", offs, twos, True, True)


def test_the_transform_adds_in_the_documented_order():
    # The distant row cancels row 0 first, so the 1 of a later row is not lost.
    for cancelling, small in ((8, 4), (4, 2), (2, 1)):
        x = torch.zeros(16, 16)
        x[0], x[cancelling], x[small] = 2.0**30, -SIGNS[cancelling] * 2.0**30, SIGNS[small]
        assert (transform(x)[0] == 0.25).all()
        check(x.bfloat16(), "nvfp4:hadamard", offs_from_splits((16,)))


@every_variant
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("uniform", [False, True])
def test_dequantizing_variants(text, columnwise, uniform):
    """Codes, scales and amaxes are decoded by the oracle, and the transform is undone."""
    x = sample(2, 35, 32) if uniform else sample(75, 32)
    offs = None if uniform else offs_from_splits((35, 0, 40))
    copy = ops.grouped_quantize(
        x, text, offs, None, not columnwise, columnwise, None, seed_of(text)
    )
    undo = undo_hadamard if is_transformed(text) and columnwise else None
    want = fp8_oracle.dequantized(text, copy, x.shape[-2], offs, columnwise, undo)
    arguments = dequantize_arguments(copy, text, x.shape[-2], F32, offs, columnwise)
    got = ops.grouped_dequantize(*arguments)
    assert_same_bytes(got, want)
    assert (got - x.float()).norm() / x.float().norm() < 0.25
    for dtype in (BF16, F16):
        low = ops.grouped_dequantize(*arguments[:4], dtype, *arguments[5:])
        assert_same_bytes(low, got.to(dtype))


def bytes_of_member(rows, cols, row_blocks, column_blocks):
    """Return random bytes (rows, cols) and (slots, cols) of a member behind other blocks."""
    slots = 128 * uniform_tiles(rows)
    rowwise = [list(block_bytes(SEED, 0, row_blocks + i)) for i in range(rows * cols // 16)]
    columnwise = [list(block_bytes(SEED, 1, column_blocks + i)) for i in range(slots // 16 * cols)]
    columns = torch.tensor(columnwise, dtype=U8).view(slots // 16, cols, 16)
    return torch.tensor(rowwise, dtype=U8).view(rows, cols), columns.mT.reshape(slots, cols)


@pytest.mark.parametrize("text", [text for text in VARIANTS if "stochastic" in text])
def test_members_with_own_shapes_continue_the_random_bytes(text):
    """Each member is a uniform tensor of one group whose blocks follow those of earlier members."""
    shapes = [(5, 32), (0, 16), (130, 16), (16, 48)]
    fmt, flat = parse(text), [size for shape in shapes for size in shape]
    members = [sample(1, *shape) for shape in shapes]
    names = fmt.buffer_names(False) + fmt.buffer_names(True)
    call = (text, None, None, True, True, None, seed_of(text))
    got = ops.grouped_quantize(torch.cat([m.flatten() for m in members]), *call, shapes=flat)
    buffers, member_slices = (
        dict(zip(names, got, strict=True)),
        member_spans(fmt, shapes, columnwise=True),
    )
    blocks_before = [0, 0]
    for i, member in enumerate(members):
        want = dict(zip(names, map(torch.clone, ops.grouped_quantize(member, *call)), strict=True))
        _, rows, cols = member.shape
        random_bytes = reference.GivenRandomNumbers(*bytes_of_member(rows, cols, *blocks_before))
        groups = Groups.uniform(1, rows, member.device)
        reference.quantize(
            reference.Elements(member),
            groups,
            fmt,
            want,
            reference.QuantizeInputs(random=random_bytes),
        )
        for buffer, t in want.items():
            assert_same_bytes(
                member_slices[buffer][i].view_of(buffers[buffer]), t, f"{buffer} of {member.shape}"
            )
        blocks_before[0] += rows * cols // 16
        blocks_before[1] += uniform_tiles(rows) * 8 * cols


@pytest.mark.parametrize("text", ["nvfp4:four_over_six", "nvfp4:block=16x16,four_over_six"])
def test_equal_errors_choose_the_scale_that_maps_to_six(text):
    """6 equals both 6 * 1 and 4 * 1.5."""
    x, amax = torch.full((16, 16), 6.0), torch.tensor([1536.0])
    codes, scales, _ = ops.grouped_quantize(x, text, offs_from_splits((16,)), amax)
    assert (codes == 0x77).all()
    assert scales.view(E4M3).float().max() == 1.0
    # 5 equals 4 * 1.25, but not 6 * 0.8125.
    x.fill_(5.0)
    codes, scales, _ = ops.grouped_quantize(x, text, offs_from_splits((16,)), amax)
    assert (codes == 0x66).all()
    assert scales.view(E4M3).float().max() == 1.25


def test_errors_are_summed_in_the_documented_order():
    """Few choices depend on the order, so the sums themselves are compared."""
    errors = torch.rand(16, 16, 3, 64).exp() * torch.randint(0, 20, (16, 16, 3, 64)).exp2()
    one_by_one = np.zeros((16, 3, 64), np.float32)
    for term in errors.numpy():
        one_by_one = one_by_one + term
    assert torch.equal(_sum(errors), torch.from_numpy(one_by_one))
    # (rows, ..., K): columns of a row one by one, then the rows as a tree.
    squares = errors[:, 0].numpy().reshape(16, 3, 4, 16)
    rows = np.zeros((16, 3, 4), np.float32)
    for column in range(16):
        rows = rows + squares[..., column]
    for half in (8, 4, 2, 1):
        rows = np.stack([rows[i] + rows[i + half] for i in range(half)])
    assert torch.equal(
        _square_sum(errors[:, 0]), torch.from_numpy(rows[0]).repeat_interleave(16, -1)
    )
