"""How kernels for sm_90a feed FP4 operands to fp16 or bf16 instructions; the bits of sums show it.

- K is cut into pieces of ``PIECE_K``, filled up with zeros. Instruction ``4 p + 2 w + h`` of one
  contracts elements ``e = 8 w + 2 h + {0, 1, 4, 5}`` of the four blocks ``2 j + p``.
- The side that is decoded in registers is ``DECODED_SCALE`` times its values, because of where the
  bits of a code are put.
"""

import torch
from torch import Tensor

from .shapes import PIECE_K

#: By the dtype that values are decoded to.
DECODED_SCALE = {"float16": 2.0**-14, "bfloat16": 2.0**-7}


def in_lane_order(values: Tensor) -> Tensor:
    """Values (R, K) in the order in which instructions contract them.

    Returns:
        (R, K up to a whole multiple of ``PIECE_K``), every 16 elements for one instruction.
    """
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % PIECE_K))
    # The factors of K: pieces, blocks as j and p, elements as w, e // 4, h and e % 2.
    split: Tensor = values.unflatten(1, (-1, 4, 2, 2, 2, 2, 2))
    return split.permute(0, 1, 3, 4, 6, 2, 5, 7).flatten(1)
