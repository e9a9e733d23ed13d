"""Order and scale of FP4 operands in fp16 or bf16 instructions of sm_90a. Both affect bits of sums.

- K is divided into chunks of ``DECODED_CHUNK_K``, padded with zeros. Instruction ``4 p + 2 w + h``
of a chunk
  contracts elements ``e = 8 w + 2 h + {0, 1, 4, 5}`` of the four blocks ``2 j + p``.
- The operand that is decoded in registers is ``DECODED_SCALE`` times its values, because of the
  position of a code's bits.
"""

import torch
from torch import Tensor

from .shapes import DECODED_CHUNK_K

#: Scale of decoded values by their dtype.
DECODED_SCALE = {"float16": 2.0**-14, "bfloat16": 2.0**-7}


def in_lane_order(values: Tensor) -> Tensor:
    """Return values (R, K) in the order in which instructions contract them.

    Returns:
        (R, K rounded up to a multiple of ``DECODED_CHUNK_K``), every 16 elements for one
        instruction.
    """
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % DECODED_CHUNK_K))
    # The factors of K: chunks, blocks as j and p, elements as w, e // 4, h and e % 2.
    split: Tensor = values.unflatten(1, (-1, 4, 2, 2, 2, 2, 2))
    return split.permute(0, 1, 3, 4, 6, 2, 5, 7).flatten(1)
