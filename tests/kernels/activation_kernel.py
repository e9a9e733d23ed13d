"""A kernel that applies an activation and its gradient to fp32 numbers, two per thread and step."""

import dataclasses
from typing import Any, ClassVar

import cutlass
from cutlass import Float32, Uint8, cute
from cutlass.cute.runtime import make_fake_compact_tensor

from cute_kernels.device.activation_curves import TABLE_BYTES, FactorTable, activated
from cute_kernels.device.convert import pack_words
from cute_kernels.device.launch import env_stream
from cute_kernels.formats.activations import parse_activation

_THREADS, _NUMBERS, _CTAS = 64, 2, 8


@dataclasses.dataclass(frozen=True)
class ActivationConfig:
    """The activation's text, the architecture, and whether a table gives the factors."""

    activation: str
    arch: str
    uses_table: bool = False

    kernel: ClassVar[str] = "tests.kernels.activation_kernel:ActivationKernel"


class ActivationKernel:
    """Compute value, grad_a and grad_b for A, B and the gradient of the value."""

    def __init__(self, config):
        self.config = config
        self.activation = parse_activation(config.activation)

    @staticmethod
    def fake_args(config):
        """Return A, B, the gradient, three results (N,), all float32, and the stream."""
        count = cute.sym_int(divisibility=_NUMBERS)
        return *(make_fake_compact_tensor(Float32, (count,)) for _ in range(6)), env_stream()

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        grad: cute.Tensor,
        value: cute.Tensor,
        grad_a: cute.Tensor,
        grad_b: cute.Tensor,
        stream: Any,
    ) -> None:
        self.kernel(a, b, grad, value, grad_a, grad_b).launch(
            grid=[_CTAS, 1, 1], block=[_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        grad: cute.Tensor,
        value: cute.Tensor,
        grad_a: cute.Tensor,
        grad_b: cute.Tensor,
    ) -> None:
        """Process the numbers in steps of the grid."""
        table_at, thread = None, cute.arch.thread_idx()[0]
        if cutlass.const_expr(self.config.uses_table):
            table_at = (
                cutlass.memory.SmemAllocator()
                .allocate_array(Uint8, TABLE_BYTES, byte_alignment=16)
                .toint()
            )
            FactorTable.create(self.activation, "bfloat16").fill(table_at, thread, _THREADS)
        first_index = (cute.arch.block_idx()[0] * _THREADS + thread) * _NUMBERS
        for i in cutlass.range(first_index, a.shape[0], _CTAS * _THREADS * _NUMBERS, unroll=1):
            self.apply((a, b, grad), (value, grad_a, grad_b), i, table_at)

    def apply(self, inputs, outputs, first_index, table_at):
        """Compute the outputs of ``_NUMBERS`` numbers from ``first_index`` on."""
        act, arch = self.activation, self.config.arch
        tensors = inputs if act.is_gated else (inputs[0], inputs[2])
        numbers_of_inputs = [[t[first_index + i] for i in range(_NUMBERS)] for t in tensors]
        forward_inputs = numbers_of_inputs[: 1 + act.is_gated]
        if table_at is not None:
            words = [pack_words(numbers, "bfloat16") for numbers in forward_inputs]
            results = [FactorTable.create(act, "bfloat16").activated(words, table_at)]
        else:
            results = activated(act, False, arch, forward_inputs) + activated(
                act, True, arch, numbers_of_inputs
            )
        for out, numbers in zip(outputs, results, strict=False):
            for i, number in enumerate(numbers):
                out[first_index + i] = number
