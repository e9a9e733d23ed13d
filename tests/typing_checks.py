"""Types that users see: mypy checks this file, as pyproject.toml says. pytest does not run it."""

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import cute_kernels
import grouped
from cute_kernels.capability import Support
from grouped.checkpoint import Report
from grouped.nn.router import RouterOutput


def check_layers(x: Tensor, offs: Tensor) -> None:
    """Check the parameters and the results of ``GroupedLinear`` and ``GroupedMLP``."""
    layer = grouped.nn.GroupedLinear(2, 16, 32, recipe=grouped.recipes.NVFP4())
    assert_type(layer.weight, nn.Parameter | grouped.GroupedTensor)
    assert_type(layer.bias, nn.Parameter | None)
    if isinstance(layer.weight, grouped.GroupedTensor):
        assert_type(layer.weight.format, grouped.Format)
    assert_type(layer(x, offs), Tensor)
    assert_type(layer(x, [2, 4], is_first_microbatch=True), Tensor)
    layer(x)  # type: ignore[call-arg]
    layer(x, offs, first_microbatch=True)  # type: ignore[call-arg]

    mlp = grouped.nn.GroupedMLP(2, 16, 32)
    assert_type(mlp.gate_up, grouped.nn.GroupedLinear)
    assert_type(mlp.down.weight, nn.Parameter | grouped.GroupedTensor)
    assert_type(mlp(x, offs), Tensor)


def check_mixture(x: Tensor, has_losses: bool) -> None:
    """Check ``MoE``, whose result depends on ``losses``."""
    moe = grouped.nn.MoE(16, 32, num_experts=4, top_k=2)
    assert_type(moe(x), Tensor)
    assert_type(moe(x, losses=True), tuple[Tensor, grouped.nn.MoELosses])
    assert_type(moe(x, losses=has_losses), Tensor | tuple[Tensor, grouped.nn.MoELosses])
    assert_type(moe.experts, grouped.nn.GroupedMLP)
    assert_type(moe.experts.gate_up.weight, nn.Parameter | grouped.GroupedTensor)
    assert_type(moe.shared, grouped.nn.GroupedMLP | None)
    assert_type(moe.router, grouped.nn.Router)
    assert_type(moe.router.weight, nn.Parameter)
    assert_type(moe.router(x), RouterOutput)


def check_functions(x: Tensor, offs: Tensor, has_dbias: bool) -> None:
    """Check the results of functions of tensors."""
    fmt = grouped.NVFP4(row_scaled=True)
    xq = grouped.quantize(x, fmt, offs=offs)
    assert_type(xq, grouped.GroupedTensor)
    assert_type(
        grouped.quantize(x, fmt, offs=offs, dbias=True), tuple[grouped.GroupedTensor, Tensor]
    )
    assert_type(
        grouped.quantize(x, fmt, offs=offs, dbias=has_dbias),
        grouped.GroupedTensor | tuple[grouped.GroupedTensor, Tensor],
    )
    assert_type(xq.dequantize(), Tensor)
    assert_type(xq.offs, Tensor | None)
    assert_type(xq.rowwise, grouped.QuantizedCopy | None)
    assert_type(xq.member(0), grouped.GroupedMember)
    assert_type(xq.member(0).codes, Tensor | None)
    assert_type(grouped.grouped_gemm(xq, xq), Tensor)
    assert_type(grouped.linear(x, x, None, offs, grouped.recipes.BF16()), Tensor)
    assert_type(grouped.compute_routing(offs, 4), grouped.Routing)
    assert_type(grouped.compute_offsets(offs), Tensor)
    assert_type(cute_kernels.ops.grouped_quantize(x, fmt.text, offs), list[Tensor])
    assert_type(cute_kernels.support("grouped_gemm", fmt, "sm_90a"), Support)
    assert_type(cute_kernels.active_backend(torch.device("cpu")), cute_kernels.Backend)


def check_models(model: nn.Module) -> None:
    """Check functions of whole models, in submodules that are imported on first use."""
    assert_type(grouped.prepare(model), int)
    assert_type(grouped.checkpoint.load(model, "folder"), Report)
    assert_type(grouped.optim.AdamW(model.parameters()), grouped.optim.AdamW)
    grouped.parallel.ExpertParallel(wire=grouped.MXFP8())
    grouped.quantise(model)  # type: ignore[attr-defined]
    grouped.NVFP4(row_scalled=True)  # type: ignore[call-arg]
    grouped.recipes.NVFP4(hadamrd=True)  # type: ignore[call-arg]
