"""fp32 block scales for kernels that multiply sums of 128 products by them."""

import cutlass
from cutlass import Float32, Int32, cute


def scale_at(scales: cute.Tensor, row: Int32, block: Int32, group: Int32 | None) -> Float32:
    """Return one scale of (rows or squares, blocks along K, groups), see ``views``.

    Coordinates past the last row, block or group are clamped to it. Tiles may reach past the last
    row. End rows that break the rules are anywhere, a block is read ahead, and the tail is a group
    past the last one.

    Args:
        scales: (rows or squares, blocks along K, groups) fp32.
        row: Row or square.
        block: Block along K.
        group: Group. None for a tensor that has all groups in its rows.
    """
    group = Int32(0) if group is None else cutlass.min(group, scales.shape[2] - 1)
    row, block = (cutlass.min(x, n - 1) for x, n in zip((row, block), scales.shape, strict=False))
    return scales[row, block, group]
