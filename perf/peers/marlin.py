"""Marlin of vLLM: bf16 rows times NVFP4 weights (W4A16)."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..operands import Operands
from .base import W4A16Peer, linear_nvfp4

_UTILS = "vllm.model_executor.layers.quantization.utils"
_ALIGN = "vllm.model_executor.layers.fused_moe.moe_align_block_size"
_BLOCKS = (8, 16, 32, 48, 64)
#: The block size is the smallest one of which an average expert fills less than this share.
_FILLED = 0.9


class Marlin(W4A16Peer):
    """Marlin: the product inside ``fused_marlin_moe``. Sorting rows by expert is not timed."""

    name = "Marlin"
    module = "vllm"

    def prepare(self, work: Operands) -> Callable[[], Tensor]:
        """Arrange the weights and sort the rows, and return the call of the kernel."""
        ops = importlib.import_module("vllm._custom_ops")
        types = importlib.import_module("vllm.scalar_type").scalar_types
        marlin = importlib.import_module(f"{_UTILS}.marlin_utils")
        n, k, experts = work.shape.n, work.shape.k, work.shape.experts
        weights, scales, global_scales = _weights(work, ops, marlin)
        mean = work.rows / experts
        block = next((b for b in _BLOCKS if mean / b < _FILLED), _BLOCKS[-1])
        owner = torch.repeat_interleave(
            torch.arange(experts, device=work.device), torch.tensor(work.sizes, device=work.device)
        )
        align = importlib.import_module(_ALIGN).moe_align_block_size
        order, owners, padded = align(owner.view(-1, 1).int(), block, experts)
        out = torch.empty(work.rows, n, dtype=torch.bfloat16, device=work.device)
        ones = torch.ones(work.rows, 1, device=work.device)
        workspace = marlin.marlin_make_workspace_new(work.device, 4)
        arguments = (
            work.a,
            out,
            weights,
            None,
            scales,
            None,
            global_scales,
            None,
            None,
            None,
            workspace,
        )
        options: dict[str, Any] = {
            "moe_block_size": block,
            "top_k": 1,
            "mul_topk_weights": False,
            "b_q_type": types.float4_e2m1f,
            "size_m": work.rows,
            "size_n": n,
            "size_k": k,
            "is_k_full": True,
            "use_atomic_add": False,
            "use_fp32_reduce": True,
            "is_zp_float": False,
        }
        return functools.partial(
            ops.moe_wna16_marlin_gemm, *arguments, order, owners, padded, ones, **options
        )


def _weights(work: Operands, ops: Any, marlin: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, block scales and global scales in Marlin's order."""
    fp4 = importlib.import_module(f"{_UTILS}.marlin_utils_fp4")
    codes, scales, global_scale = linear_nvfp4(work.b)
    sizes: dict[str, Any] = {"size_k": work.shape.k, "size_n": work.shape.n, "is_a_8bit": False}
    no_order = torch.empty(0, dtype=torch.int, device=work.device)
    half = scales.to(torch.bfloat16)
    # One power of two for all experts, as in its loader.
    factor = fp4._nvfp4_compute_scale_factor(half, torch.bfloat16)
    packed, arranged = [], []
    for code, scale in zip(codes, half, strict=True):
        words = code.view(torch.int32).T.contiguous()
        packed.append(ops.gptq_marlin_repack(b_q_weight=words, perm=no_order, num_bits=4, **sizes))
        permuted = marlin.marlin_permute_scales(s=scale.T.contiguous(), group_size=16, **sizes)
        arranged.append(
            fp4.nvfp4_marlin_process_scales(permuted, scale_factor=factor, a_dtype=torch.bfloat16)[
                0
            ]
        )
    processed = fp4.nvfp4_marlin_process_global_scale(global_scale, torch.bfloat16)
    return torch.stack(packed), torch.stack(arranged), processed / factor


PEER = Marlin
