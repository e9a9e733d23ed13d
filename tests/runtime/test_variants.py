"""Kernels that are compiled ahead of time: the list holds every kernel in use and no other."""

import itertools

import pytest
import torch

import cute_kernels
import grouped
from cute_kernels.formats import parse
from cute_kernels.kernels.gemm.common.config import GemmConfig
from cute_kernels.ops import op as op_module
from cute_kernels.ops.delayed_scaling.op import ALGORITHMS, DelayedScalingUpdate
from cute_kernels.ops.dequantize.op import GroupedDequantize
from cute_kernels.ops.gemm.fused_op import MGroupedQuantizeGemm
from cute_kernels.ops.moe.op import MoeQuantizeGradient
from cute_kernels.ops.optimizer.op import AdamWQuantize
from cute_kernels.ops.quantize.op import GroupedQuantize
from cute_kernels.ops.reductions.op import ComputeOffsets, GroupedAmax, GroupedDbias
from cute_kernels.runtime import aot, architecture
from cute_kernels.runtime.cache import cache_key
from cute_kernels.runtime.plan_cache import PLANS
from cute_kernels.runtime.spec import resolve
from grouped.nn import GroupedLinear
from grouped.recipes import NVFP4, FP8Block, FP8Current, NVFP4RowScaled
from tests.helpers import BF16, DTYPES, I32, NVFP4_TEXTS, offs_tensor

ARCHITECTURES = [architecture("sm_90a"), architecture("sm_100a")]


def with_nan_scales(*texts):
    """Return the formats and their variants with NaN scales, which recipes use."""
    return (*texts, *(f"{text}{',' if ':' in text else ':'}nan_scales" for text in texts))


#: Formats whose quantizers are also compiled with SwiGLU.
ACTIVATED = with_nan_scales("nvfp4", "nvfp4:row_scaled", "fp8", "fp8_block", "mxfp8")
TRANSFORMED = with_nan_scales("nvfp4:hadamard", "nvfp4:hadamard,stochastic_rounding")
TEXTS = with_nan_scales(*NVFP4_TEXTS.values(), "fp8", "fp8:dtype=e5m2")


class Recorder:
    """Launcher that records the specs of kernels and runs nothing."""

    num_sms, bandwidth = 148, None

    def __init__(self, arch="sm_100a"):
        self.arch = arch
        self.specs = set()

    def kernel(self, spec):
        self.specs.add(spec)
        return lambda *arguments: None


def reduction_inputs():
    for dtype, cols in itertools.product(
        DTYPES.values(), [16, *(1 << i for i in range(8, 16)), 1 << 20]
    ):
        yield torch.empty(2, cols, dtype=dtype), offs_tensor(1, 2)
        yield torch.empty(1, 2, cols, dtype=dtype), None


def quantizations():
    """Yield the quantization ops whose kernels are compiled ahead of time."""
    directions = ((True, False), (False, True), (True, True))
    for (x, offs), (rowwise, columnwise) in itertools.product(reduction_inputs(), directions):
        groups = x.shape[0] if offs is None else offs.shape[0]
        for amax in (None, torch.ones(groups)):
            for text in TEXTS:
                yield GroupedQuantize(x, text, offs, amax, rowwise, columnwise)
        if x.dtype == BF16:
            for text in with_nan_scales("fp8_block:block=128x128" if offs is None else "fp8_block"):
                yield GroupedQuantize(x, text, offs, None, rowwise, columnwise)
            for text in TRANSFORMED if columnwise and offs is not None else ():
                for amax in (None, torch.ones(2, groups) if rowwise else torch.ones(groups)):
                    yield GroupedQuantize(x, text, offs, amax, rowwise, columnwise)
    halves, offs = torch.empty(2, 64, dtype=BF16), offs_tensor(1, 2)
    for text in ACTIVATED:
        yield GroupedQuantize(halves, text, offs, columnwise=True, activation="swiglu")
    for cols in (2048, 4096, 8192):
        tokens, rows = torch.empty(1, cols, dtype=BF16), torch.zeros(2, dtype=I32)
        indices = {"rows": rows, "inverse": rows[None]}
        blocks = itertools.product(with_nan_scales("fp8_block"), (False, True))
        for text, columnwise in (
            *blocks,
            *((text, False) for text in with_nan_scales("nvfp4:row_scaled")),
        ):
            yield GroupedQuantize(tokens, text, offs, columnwise=columnwise, **indices)
            if columnwise:
                yield GroupedQuantize(tokens, text, offs, rowwise=False, columnwise=True, **indices)


def dequantizations():
    scales = [torch.empty(0), torch.empty(0)]
    for offs, dtype, text in itertools.product((None, offs_tensor(1, 2)), DTYPES.values(), TEXTS):
        codes = torch.empty(2, 16).to(parse(text).element.dtype)
        values = codes if offs is not None else codes[None]
        for columnwise in (False, True):
            yield GroupedDequantize(values, scales, text, 2, dtype, offs, columnwise)


def products():
    for (x, offs), text in itertools.product(
        reduction_inputs(), with_nan_scales("nvfp4", NVFP4_TEXTS["row-scaled"])
    ):
        if offs is not None:
            codes = torch.empty(2, 16, x.shape[1] // 2, dtype=torch.uint8)
            scales = [torch.empty(0), torch.empty(2)]
            yield MGroupedQuantizeGemm(x, codes, offs, scales, text, "nvfp4")
            if (
                x.dtype == BF16
                and text in with_nan_scales(NVFP4_TEXTS["row-scaled"])
                and 1024 < x.shape[1] <= 8192
            ):
                rows = torch.zeros(4, dtype=I32)
                yield MGroupedQuantizeGemm(
                    x, codes, offs, scales, text, "nvfp4", rows=rows, inverse=rows.view(2, 2)
                )


def used_specs(arch):
    """Return the specs of the quantizers that the ops of this module use."""
    recorder = Recorder(arch)
    ops = list(quantizations())
    ops += [GroupedAmax(x, offs) for x, offs in reduction_inputs()]
    ops += dequantizations()
    ops += products()
    halves, row = torch.empty(2, 256, dtype=BF16), torch.zeros(2, dtype=I32)
    grad_and_input = (halves, halves[:, :128])
    options = ("swiglu", offs_tensor(1, 2), False, torch.empty(2, 1), row)
    delayed = ("fp8:dtype=e5m2,scaling=delayed", "fp8:scaling=delayed")
    pairs = [("fp8_block",) * 2, ("mxfp8",) * 2, delayed]
    for texts in (*pairs, *(tuple(with_nan_scales(text)[1] for text in pair) for pair in pairs)):
        ops.append(MoeQuantizeGradient(*grad_and_input, *texts, *options, *[torch.ones(2)] * 2))
    for dtype, cols in itertools.product(DTYPES.values(), (1, 8)):
        ops.append(GroupedDbias(torch.empty(2, cols, dtype=dtype), offs_tensor(1, 2)))
    for splits, out in itertools.product((I32, torch.int64), (None, torch.int64)):
        ops.append(ComputeOffsets(torch.ones(3, dtype=splits), 1, out))
    state, text = (torch.ones(2, 3), torch.ones(3)), "fp8:scaling=delayed"
    for amax, algorithm, skip in itertools.product(
        (None, torch.ones(3)), ALGORITHMS, (False, True)
    ):
        ops.append(
            DelayedScalingUpdate(*state, text, amax, algorithm=algorithm, skip_nonfinite=skip)
        )
    master = torch.empty(1, 2, 32)
    for dtype, text in itertools.product(
        (BF16, torch.float32), ("nvfp4", "mxfp8", "fp8_block:block=128x128")
    ):
        ops.append(
            AdamWQuantize(*[master] * 3, master.to(dtype), master, [], text, True, True, *[0.0] * 4)
        )
    for op in ops:
        op.build_runner(recorder)
    return {spec for spec in recorder.specs if is_quantizer(spec)}


def is_quantizer(spec):
    return type(spec).__module__.startswith("cute_kernels.kernels.quantize.")


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=str)
def test_the_list_holds_the_quantizers_in_use_and_no_other(arch):
    listed = aot.declared_specs(arch)
    assert len(listed) == len(set(listed))
    assert set(filter(is_quantizer, listed)) == used_specs(arch.name)


@pytest.mark.parametrize(
    ("recipe", "arch"),
    [
        *itertools.product((grouped.recipes.BF16, NVFP4, NVFP4RowScaled), ARCHITECTURES),
        *itertools.product((FP8Block, FP8Current), ARCHITECTURES[:1]),
    ],
)
@pytest.mark.parametrize("features", [256, 2048])
def test_training_and_inference_use_listed_kernels_only(monkeypatch, recipe, features, arch):
    """Check that training and inference use only kernels that ``precompile`` lists."""
    recorder = Recorder(arch.name)
    monkeypatch.setattr(op_module, "launcher", lambda backend, device: recorder)
    monkeypatch.setattr(PLANS, "_plans", {})
    # FP8 kernels are listed without a bias only.
    bias = recipe not in (FP8Block, FP8Current)
    layer = GroupedLinear(3, features, features, bias, recipe=recipe(), dtype=BF16)
    with cute_kernels.backend(f"emulated:{arch}"):
        for tokens in (3, 300, 4000):
            x = torch.randn(tokens, features, dtype=BF16, requires_grad=True)
            offs = offs_tensor(1, 2, tokens)
            layer(x, offs).sum().backward()
            with torch.no_grad():
                layer(x, offs)
    assert any(isinstance(spec, GemmConfig) for spec in recorder.specs)
    assert recorder.specs <= set(aot.declared_specs(arch))


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=str)
def test_listed_kernels_have_classes_and_distinct_keys(arch):
    """Check that listed kernels have classes and distinct keys."""
    listed = aot.declared_specs(arch)
    assert len({cache_key(spec, arch).name for spec in listed}) == len(listed)
    names = {spec.kernel for spec in listed}
    assert len(names) > 5
    for name in names:
        kernel = resolve(name)
        assert isinstance(kernel, type) and callable(kernel.fake_args), name
