import dataclasses
from typing import Any, ClassVar

import cutlass
from cutlass import Float32, Uint8, cute
from cutlass.cute.runtime import make_fake_compact_tensor

from cute_kernels.device.activation_curves import TABLE_BYTES, FactorTable, activated
from cute_kernels.device.convert import pack_words
from cute_kernels.device.launch import env_stream
from cute_kernels.formats.activations import parse_activation

_THREADS, _EACH, _CTAS = 64, 2, 8


@dataclasses.dataclass(frozen=True)
class ActivationConfig:
    activation: str
    arch: str
    by_table: bool = False

    kernel: ClassVar[str] = "tests.kernels.activation_kernel:ActivationKernel"


class ActivationKernel:
    def __init__(self, config):
        self.config = config
        self.activation = parse_activation(config.activation)

    @staticmethod
    def fake_args(config):
        """A, B, the gradient, three results (N,) and the stream."""
        count = cute.sym_int(divisibility=_EACH)
        return *(make_fake_compact_tensor(Float32, (count,)) for _ in range(6)), env_stream()

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        grad: cute.Tensor,
        value: cute.Tensor,
        of_a: cute.Tensor,
        of_b: cute.Tensor,
        stream: Any,
    ) -> None:
        self.kernel(a, b, grad, value, of_a, of_b).launch(
            grid=[_CTAS, 1, 1], block=[_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        grad: cute.Tensor,
        value: cute.Tensor,
        of_a: cute.Tensor,
        of_b: cute.Tensor,
    ) -> None:
        table_at, thread = None, cute.arch.thread_idx()[0]
        if cutlass.const_expr(self.config.by_table):
            table_at = (
                cutlass.memory.SmemAllocator()
                .allocate_array(Uint8, TABLE_BYTES, byte_alignment=16)
                .toint()
            )
            FactorTable.create(self.activation, "bfloat16").fill(table_at, thread, _THREADS)
        first = (cute.arch.block_idx()[0] * _THREADS + thread) * _EACH
        for i in cutlass.range(first, a.shape[0], _CTAS * _THREADS * _EACH, unroll=1):
            self.apply((a, b, grad), (value, of_a, of_b), i, table_at)

    def apply(self, inputs, outputs, first, table_at):
        act, arch = self.activation, self.config.arch
        tensors = inputs if act.is_gated else (inputs[0], inputs[2])
        given = [[t[first + i] for i in range(_EACH)] for t in tensors]
        forward = given[: 1 + act.is_gated]
        if table_at is not None:
            words = [pack_words(numbers, "bfloat16") for numbers in forward]
            made = [FactorTable.create(act, "bfloat16").activated(words, table_at)]
        else:
            made = activated(act, False, arch, forward) + activated(act, True, arch, given)
        for out, numbers in zip(outputs, made, strict=False):
            for i, number in enumerate(numbers):
                out[first + i] = number
