"""Where kernels that multiply sums of 128 products by fp32 block scales read these."""

import cutlass
from cutlass import Float32, Int32, cute


def scale_at(scales: cute.Tensor, row: Int32, block: Int32, group: Int32 | None) -> Float32:
    """One scale of (rows or squares, blocks along K, groups), see ``views``.

    Tiles may reach past the last row, end rows that break the rules anywhere; and there is a block
    after the last, and a group after the last, the tail. Then it is that of the last. ``group`` is
    None of a tensor that has all groups in its rows.
    """
    group = Int32(0) if group is None else cutlass.min(group, scales.shape[2] - 1)
    row, block = (cutlass.min(x, n - 1) for x, n in zip((row, block), scales.shape, strict=False))
    return scales[row, block, group]
