from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from cutlass import Float32, cute
from cutlass.cute.runtime import make_fake_compact_tensor

from cute_kernels.activations import parse_activation
from cute_kernels.device.activations import activated
from cute_kernels.device.launch import env_stream

_THREADS, _EACH = 64, 2


@dataclasses.dataclass(frozen=True)
class ActivationConfig:
	activation: str
	arch: str

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
		grid = [(a.shape[0] + _THREADS * _EACH - 1) // (_THREADS * _EACH), 1, 1]
		self.kernel(a, b, grad, value, of_a, of_b).launch(grid=grid, block=[_THREADS, 1, 1], stream=stream)

	@cute.kernel
	def kernel(
		self, a: cute.Tensor, b: cute.Tensor, grad: cute.Tensor, value: cute.Tensor, of_a: cute.Tensor, of_b: cute.Tensor
	) -> None:
		first = (cute.arch.block_idx()[0] * _THREADS + cute.arch.thread_idx()[0]) * _EACH
		if first < a.shape[0]:
			self.apply((a, b, grad), (value, of_a, of_b), first)

	def apply(self, inputs, outputs, first):
		act, arch = self.activation, self.config.arch
		tensors = inputs if act.is_gated else (inputs[0], inputs[2])
		given = [[t[first + i] for i in range(_EACH)] for t in tensors]
		made = activated(act, False, arch, given[: 1 + act.is_gated])
		made += activated(act, True, arch, given)
		for out, numbers in zip(outputs, made, strict=False):
			for i, number in enumerate(numbers):
				out[first + i] = number
