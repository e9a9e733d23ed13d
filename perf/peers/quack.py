"""quack 0.6: grouped bf16 products, and MLPs with SwiGLU in the epilogue."""

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..contender import Contender
from ..operands import Operands
from ..suites.layer import LayerWork
from .base import NOISE, Peer


class Quack(Peer):
	"""Tuned by its own autotuner on the first call of a shape, which takes half a minute."""

	name = "quack"
	module = "quack"
	distribution = "quack-kernels"
	capabilities = (9, 10)

	def products(self, work: Operands) -> Iterator[Contender]:
		def prepare() -> Any:
			groups = {"cu_seqlens_k" if work.is_wgrad else "cu_seqlens_m": _starts(work.offs)}
			return functools.partial(_interface().gemm, *work.factors, **groups)

		yield self.product(work, "bfloat16", prepare)

	def layers(self, work: LayerWork) -> Iterator[Contender]:
		"""The MLP; without a backward pass what that would need is not stored."""
		if work.layer == "mlp":
			make = functools.partial(_Mlp, work)
			bound = 4 * NOISE["bfloat16"]
			yield work.contender("quack", "BF16", make, bound, versions=self.versions)


def _interface() -> Any:
	return importlib.import_module("quack.gemm_interface")


def _starts(offs: Tensor) -> Tensor:
	return F.pad(offs, (1, 0))


class _Mlp:
	"""An MLP as its functions make it; gate and value are interleaved before."""

	def __init__(self, work: LayerWork) -> None:
		self._work = work
		self._ends = _starts(work.offs)
		up, self._down = work.weights
		gate, value = up.chunk(2, dim=1)
		self._up = torch.stack((gate, value), 2).flatten(1, 2).contiguous()
		self._gemm = _interface()

	def run(self) -> tuple[Tensor, ...]:
		gemm, work = self._gemm, self._work
		rows = {"cu_seqlens_m": self._ends}
		before, hidden = gemm.gemm_gated(
			work.x, self._up.transpose(1, 2), activation="swiglu", store_preact=work.backward, **rows
		)
		y = gemm.gemm(hidden, self._down.transpose(1, 2), **rows)
		if work.dy is None:
			return (y,)
		d_before, again = gemm.gemm_dgated(work.dy, self._down, before, activation="swiglu", **rows)
		depth = {"cu_seqlens_k": self._ends}
		dx = gemm.gemm(d_before, self._up, **rows)
		d_down = gemm.gemm(work.dy.T, again, **depth)
		return y, dx, gemm.gemm(d_before.T, work.x, **depth), d_down

	def results(self) -> list[Tensor]:
		"""As ``LayerWork.expected``: gate before value."""
		y, *gradients = self.run()
		if not gradients:
			return [y]
		dx, d_up, d_down = gradients
		gate, value = d_up.unflatten(1, (-1, 2)).unbind(2)
		return [y, dx, torch.cat((gate, value), 1), d_down]


PEER = Quack
