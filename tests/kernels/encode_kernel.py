"""A kernel that encodes blocks of 16 numbers as E2M1 codes, one block per thread."""

import dataclasses
from typing import Any, ClassVar

from cutlass import Float32, Uint32, const_expr, cute
from cutlass.cute.runtime import make_fake_compact_tensor

from cute_kernels.device.codecs import codec_of
from cute_kernels.device.launch import env_stream
from cute_kernels.kernels.quantize.config import DTYPE_BYTES

_THREADS = 64


@dataclasses.dataclass(frozen=True)
class EncodeConfig:
    """Input dtype, architecture, and whether codes are rounded stochastically."""

    dtype: str
    arch: str = "sm_90a"
    is_stochastic: bool = False

    kernel: ClassVar[str] = "tests.kernels.encode_kernel:EncodeKernel"


class EncodeKernel:
    """Multiply each block by its factor and encode it."""

    def __init__(self, config):
        self.codec = codec_of("nvfp4", config.dtype, config.arch)
        self.is_stochastic = config.is_stochastic

    @staticmethod
    def fake_args(config):
        """Return words (N, W), factors (N,), random words (N, 4), codes (N, 2) and the stream."""
        count, words = cute.sym_int(), 4 * DTYPE_BYTES[config.dtype]
        factors = make_fake_compact_tensor(Float32, (count,))
        blocks, random_words, codes = (
            make_fake_compact_tensor(Uint32, (count, n), stride_order=(1, 0)) for n in (words, 4, 2)
        )
        return blocks, factors, random_words, codes, env_stream()

    @cute.jit
    def __call__(
        self,
        blocks: cute.Tensor,
        factors: cute.Tensor,
        random_words: cute.Tensor,
        codes: cute.Tensor,
        stream: Any,
    ) -> None:
        grid = [(blocks.shape[0] + _THREADS - 1) // _THREADS, 1, 1]
        self.kernel(blocks, factors, random_words, codes).launch(
            grid=grid, block=[_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        blocks: cute.Tensor,
        factors: cute.Tensor,
        random_words: cute.Tensor,
        codes: cute.Tensor,
    ) -> None:
        """Encode one block."""
        i = cute.arch.block_idx()[0] * _THREADS + cute.arch.thread_idx()[0]
        if i < blocks.shape[0]:
            words = [blocks[i, w] for w in range(blocks.shape[1])]
            if const_expr(self.is_stochastic):
                random_row = [random_words[i, w] for w in range(4)]
                pair = self.codec.round_row(words, factors[i], random_row)
            else:
                pair = self.codec.encode_row(words, factors[i])
            codes[i, 0] = pair[0]
            codes[i, 1] = pair[1]
