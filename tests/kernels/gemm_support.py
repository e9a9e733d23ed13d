"""Grouped GEMMs compiled from configurations, and their operands in poisoned buffers."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import ptx_emulator as emulator
from cute_kernels import reference
from cute_kernels.formats import NVFP4, Format, FP8Block
from cute_kernels.kernels.gemm.common.config import GemmConfig
from cute_kernels.kernels.gemm.common.problem import GemmArguments
from cute_kernels.kernels.gemm.sm90.config import Sm90GemmConfig
from cute_kernels.kernels.gemm.sm90.fp4.config import ArrangeConfig, ExpandConfig
from cute_kernels.kernels.gemm.sm100.config import ScaleTilesConfig, Sm100GemmConfig
from cute_kernels.layout.buffers import buffers
from cute_kernels.layout.prepack import prepack
from cute_kernels.layout.shapes import ceil_div
from cute_kernels.ops.gemm.operands_sm100 import scale_tiles
from cute_kernels.reference.groups import Groups
from cute_kernels.runtime import architecture, compile_kernel
from tests.helpers import DTYPES, F16, U8, assert_same_bytes, offs_from_splits, seeded_generator
from tests.kernels.op_support import array_of, check_touched

ARCH = "sm_100a"
NUM_SMS = 4
#: (rows of each group, N, K, rows of the tail).
SHAPES = {
    "one row": ([1], 8, 32, 0),
    "whole tiles": ([128, 256], 128, 256, 0),
    "tails": ([100, 0, 128, 5, 200], 136, 320, 11),
    "empty first and last": ([0, 0, 60, 0], 24, 64, 70),
    "padded pitch, part of a stage": ([3, 130], 40, 48, 1),
    "all empty": ([0, 0], 16, 32, 40),
    "long K": ([130, 7], 72, 1056, 0),
}
#: (rows of each group, columns of A, columns of B, rows of the tail).
WGRAD_SHAPES = {
    "one row": ([1], 8, 8, 0),
    "whole tiles": ([256, 512], 128, 128, 0),
    "tails": ([100, 0, 128, 5, 200, 300], 136, 200, 11),
    "all empty": ([0, 0], 8, 16, 3),
}
#: This byte is NaN in an E4M3 scale, an amax or an FP8 code; as two FP4 codes it is finite.
_POISON = 0xFF


def arch_of(config):
    return "sm_90a" if isinstance(config, Sm90GemmConfig) else ARCH


def activations_of(config):
    """Return the dtype of a plain A (sm_90a), or None if A is quantized."""
    return getattr(config, "activations", None)


def compiled(config, arch=ARCH, device="cpu"):
    """Return the kernel of a configuration, for the emulator or for this GPU."""
    return compile_kernel(config, architecture(arch if device == "cuda" else f"emulated:{arch}"))


@dataclass
class Operand:
    """One direction of a quantized tensor, or a plain matrix (``fmt`` is None) as codes."""

    codes: Tensor
    scales: Tensor | None = None
    amax: Tensor | None = None
    fmt: Format | None = None
    columnwise: bool = False

    def read(self):
        return reference.Operand(self.codes, self.fmt, self.scales, self.amax, self.columnwise)


#: Fields of an operand that are tensors, in the order of kernel arguments.
TENSOR_NAMES = ("codes", "scales", "amax")


def on_device_of(like, tensor):
    """Return the tensor on the device of ``like``, with its strides."""
    if tensor is None or tensor.device == like.device:
        return tensor
    shape = (*tensor.shape[:-1], tensor.stride(-2)) if tensor.dim() > 1 else tensor.shape
    return torch.empty(shape, dtype=tensor.dtype, device=like.device)[
        ..., : tensor.shape[-1]
    ].copy_(tensor)


def _poisoned(spec):
    """Allocate a buffer full of ``_POISON``."""
    out = spec.allocate(torch.device("cpu"), zeroed=False)
    out.untyped_storage().fill_(_POISON)
    return out


def quantize(x, offs, fmt, columnwise=False):
    """Quantize one direction of (T, K) with offs, or of (G, N, K), into poisoned buffers."""
    specs = buffers(
        fmt,
        x.shape,
        None if offs is None else len(offs),
        rowwise=not columnwise,
        columnwise=columnwise,
    )
    out = {name: _poisoned(spec) for name, spec in specs.items()}
    reference.quantize(reference.Elements(x), Groups.from_shape(x.shape, offs, x.device), fmt, out)
    codes, *scale_tensors = (out[name] for name in fmt.operand_names(columnwise))
    scales = scale_tensors.pop(0) if fmt.scale is not None else None
    return Operand(codes, scales, *scale_tensors[:1], fmt=fmt, columnwise=columnwise)


def formats_of(config):
    """Return the formats of A and B, or None for plain operands."""
    formats = []
    for kind in (config.kind, config.b_kind):
        fmt = kind.fmt
        if isinstance(fmt, FP8Block):
            fmt = replace(fmt, pow2_scales=getattr(config, "pow2_scales", False))
        formats.append(fmt)
    if config.row_scaled:
        formats[0] = NVFP4(row_scaled=True)
    return formats[0], formats[1]


def randn(*shape, seed):
    """Return values of several magnitudes, so that block scales and row amaxes differ."""
    generator = seeded_generator(seed)
    rows = torch.randn(*shape[:-1], 1, generator=generator).exp()
    return torch.randn(*shape, generator=generator) * rows


@dataclass
class Product:
    """Operands and options of one grouped GEMM.

    ``before`` holds the contents of the output before the launch; ``rows`` includes the tail.
    """

    config: GemmConfig
    a: Operand
    b: Operand
    offs: Tensor
    rows: int
    before: Tensor
    bias: Tensor | None = None
    alpha: Tensor | None = None

    def run(self, num_sms=NUM_SMS, device="cpu"):
        """Return the output of the kernel."""
        # A copy, also on the CPU.
        out = self.before.to(device, copy=True)
        self.run_into(out, num_sms)
        return out.cpu()

    def run_into(self, out, num_sms=NUM_SMS):
        """Run the kernel on this output."""
        self.launch(self.prepared(out, num_sms))

    def launch(self, arguments):
        """Run the kernel with prepared arguments."""
        compiled(self.config, arch_of(self.config), arguments.out.device.type)(*arguments)
        # The next launch needs a zeroed counter.
        assert arguments.counter is None or not arguments.counter.any()

    def prepared(self, out, num_sms=NUM_SMS):
        """Return the kernel's arguments on the output's device, operands prepared for it."""
        arch, device = arch_of(self.config), out.device.type
        offs, bias, alpha = (on_device_of(out, t) for t in (self.offs, self.bias, self.alpha))
        operands = {"a": self.a, "b": self.b}
        tensors = []
        for side, operand in operands.items():
            codes, scales, amax = (on_device_of(out, getattr(operand, n)) for n in TENSOR_NAMES)
            is_square = operand.fmt is not None and operand.fmt.is_2d
            if scales is not None and is_square and operand.columnwise:
                scales = scales.mT
            if side == "b" and getattr(self.config, "prepacked", False):
                codes = prepack(codes)
            is_expanded = getattr(self.config, "expanded", None) == side
            if is_expanded and self.config.activations is not None:
                depth = ceil_div(codes.shape[1], 128) * 128
                values = torch.full((len(codes), depth), torch.nan).to(codes)
                compiled(ArrangeConfig(self.config.activations), arch, device)(
                    codes, None, offs, values, num_sms
                )
                codes = values
            elif is_expanded:
                depth = ceil_div(2 * codes.shape[1], 128) * 128
                values = torch.full((len(codes), depth), torch.nan)
                values = values.to(out.device, F16)
                is_ragged = side == "a"
                compiled(ExpandConfig(is_ragged), arch, device)(
                    codes, scales, offs if is_ragged else None, values, num_sms
                )
                codes, scales = values, None
            tensors += [codes, scales, amax]
        if isinstance(self.config, Sm100GemmConfig) and self.config.pow2_scales:
            tile_config = ScaleTilesConfig.for_gemm(self.config)
            scale_positions = ((1, tile_config.a_squares), (4, tile_config.b_squares))
            tiles = [scale_tiles(tensors[i], is_square) for i, is_square in scale_positions]
            arranged = [torch.full(t.shape, _POISON, dtype=U8) for t in tiles]
            compiled(tile_config)(tensors[1], arranged[0], tensors[4], arranged[1], 0, num_sms)
            tensors[1], tensors[4] = arranged
        counter = offs.new_zeros(1) if self.config.uses_dynamic_scheduling else None
        common = {"offs": offs, "rows": None, "bias": bias, "alpha": alpha, "out": out}
        return GemmArguments(*tensors, **common, num_sms=num_sms, counter=counter)

    def expected(self):
        """Return the output of the tensor-core reference."""
        out = self.before.clone()
        config, groups = self.config, Groups.ragged(self.offs, self.rows)
        options = {
            "alpha": self.alpha,
            "accumulate": config.accumulate,
            "tensor_core": arch_of(config),
            "split": getattr(config, "split", False),
        }
        if config.grouping == "m_grouped":
            options |= {"bias": self.bias, "transpose_b": config.transpose_b}
        getattr(reference, f"{config.grouping}_gemm")(
            self.a.read(), self.b.read(), groups, out, **options
        )
        return out

    def check(self, num_sms=NUM_SMS, device="cpu", want=None, any_nan=False):
        """Check that the kernel's output has the bits of the reference, or of ``want``."""
        want = self.expected() if want is None else want
        assert_same_bytes(self.run(num_sms, device), want, any_nan=any_nan)


def m_grouped(config, sizes, n, k, tail=0, *, columnwise_b=False, seed=0):
    """Return the product of ragged rows, including the tail, and one matrix per group.

    This is fprop, or dgrad if B is columnwise.
    """
    offs, rows, groups = offs_from_splits(sizes), sum(sizes) + tail, len(sizes)
    x = randn(rows, k, seed=seed)
    transposed = columnwise_b or config.transpose_b
    w = randn(groups, *((k, n) if transposed else (n, k)), seed=seed + 1)
    a_fmt, b_fmt = formats_of(config)
    b = _plain(config, w) if b_fmt is None else quantize(w, None, b_fmt, columnwise_b)
    if columnwise_b:
        # Kernels must not read the padding along K: fill it with NaN, or with -6 and 6.
        codes = b.codes.view(U8)
        codes = codes if b_fmt.columnwise == "transposed" else codes.mT
        codes[..., b_fmt.element.width(k) :] = 0x7F
    if a_fmt is None or activations_of(config) is not None:
        a = _plain(config, x, rows - tail)
    else:
        a = quantize(x, offs, a_fmt)
    return Product(
        config,
        a,
        b,
        offs,
        rows,
        _before(config, rows, n),
        _bias(config, groups, n, seed),
        _alpha(config, groups, seed),
    )


def k_grouped(config, sizes, m, n, tail=0, *, seed=0):
    """Return the product of two ragged operands over their rows (wgrad)."""
    offs, rows = offs_from_splits(sizes), sum(sizes) + tail
    x, y = randn(rows, m, seed=seed), randn(rows, n, seed=seed + 1)
    a_fmt, b_fmt = formats_of(config)
    if a_fmt is not None and b_fmt is not None:
        a, b = quantize(x, offs, a_fmt, True), quantize(y, offs, b_fmt, True)
    else:
        a, b = _plain(config, x, rows - tail), _plain(config, y, rows - tail)
    before, alpha = _before(config, len(sizes), m, n), _alpha(config, len(sizes), seed)
    return Product(config, a, b, offs, rows, before, alpha=alpha)


def randomize_codes_and_scales(product, log2_range=20):
    """Fill the operands with all codes, NaN and infinity included, and scales of all magnitudes.

    fp32 scales are multiplied by up to 2^log2_range.
    """
    generator = seeded_generator(3)
    for operand in (product.a, product.b):
        codes = operand.codes.view(U8)
        random_values = torch.randint(0, 256, codes.shape, generator=generator).to(U8)
        # Few NaN and infinities, so that some sums are finite; padding and tails are unchanged.
        keeps_code = torch.rand(codes.shape, generator=generator).gt(0.002)
        keeps_code &= ~random_values.view(operand.codes.dtype).float().isfinite()
        keeps_code |= (codes == 0xFF) | (codes == 0)
        codes.copy_(torch.where(keeps_code, codes, random_values))
        scales = operand.scales
        if scales is not None and scales.dtype == U8:
            # A few scales take any value; padding and unwritten bytes are unchanged.
            random_values = torch.randint(0, 256, scales.shape, generator=generator)
            near = (scales + (random_values % 40 - 20)).clamp(1, 254)
            takes_any = torch.rand(scales.shape, generator=generator) < 0.004
            scales.copy_(
                torch.where(
                    (scales == 0) | (scales == 0xFF),
                    scales,
                    torch.where(takes_any, random_values, near).to(U8),
                )
            )
        elif scales is not None:
            power = (
                torch.randint(-log2_range, log2_range, scales.shape, generator=generator)
                .float()
                .exp2()
            )
            scales.copy_(torch.where(scales.isfinite(), scales * power, scales))
    return product


def product_of(config, sizes, n, k, tail=0):
    """Return ``m_grouped``, or ``k_grouped`` with A's columns first, as the configuration asks."""
    if config.grouping == "k_grouped":
        return k_grouped(config, sizes, k, n, tail)
    return m_grouped(config, sizes, n, k, tail)


def check_zeroed_tails(config, device="cpu", modes=({},)):
    """Check that rows of the tail become zeros, whatever the scales of A are there."""
    config = replace(config, zero_tail=True)
    for sizes, tail in (([100, 0, 5], 290), ([3], 0), ([0] * 32, 1)):
        product = m_grouped(config, sizes, 72, 96, tail)
        if config.row_scaled:
            product.a.amax[sum(sizes) :] = torch.nan
        want = product.expected()
        want[sum(sizes) :] = 0.0
        for mode in modes:
            with emulator.options(**mode):
                product.check(2, device, want)


def check_modes(mode, products):
    """Check each product on its number of SMs, in one mode of the emulator."""
    for product, num_sms in products:
        want = product.expected()
        with emulator.options(**mode):
            product.check(num_sms, want=want)


def check_live_rows(config):
    """Check that the kernel writes the rows of groups only, and reads nothing but its operands."""
    product = m_grouped(config, [100, 0, 5], 24, 64, tail=30)
    want, out = product.expected(), product.before.clone()
    prepared = product.prepared(out, 2)

    def run():
        out.copy_(product.before)
        product.launch(prepared)
        assert_same_bytes(out, want)

    check_touched(run, [array_of(out)[:105]], [t for t in prepared if t is not out])


def check_far_rows(config):
    """Check rows whose elements start at index 2^31: row 64 of the output, row 32 of codes.

    Only the pages that are written use memory.
    """
    product = m_grouped(config, [65, 33], 8, 32)
    if config.kind.fmt is not None and not config.kind.is_transposed:
        product.a.codes = torch.empty_strided(
            (98, 32), (2**26, 1), dtype=product.a.codes.dtype
        ).copy_(product.a.codes)
    out = torch.empty_strided(product.before.shape, (2**25, 1), dtype=product.before.dtype)
    product.run_into(out)
    assert_same_bytes(out.contiguous(), product.expected())


def check_many_groups(config):
    """Check more groups than the scheduler reads at once.

    If the kernel accumulates, a tile that runs twice gives a wrong sum.
    """
    sizes = [0] * 1100
    for group, rows in ((0, 1), (31, 2), (32, 130), (500, 3), (1099, 4)):
        sizes[group] = rows
    product_of(config, sizes, 8, 32).check()


def _plain(config, x, live=None):
    """Return a plain operand, with NaN in its rows from ``live`` on."""
    x = x.to(DTYPES[activations_of(config) or config.operand])
    if live is not None:
        x[live:] = torch.nan
    return Operand(x)


def _before(config, *shape):
    values = randn(*shape, seed=99) if config.accumulate else torch.full(shape, 1234.0)
    return values.to(DTYPES[config.out_dtype])


def _bias(config, groups, n, seed):
    return (
        None
        if config.bias_dtype is None
        else randn(groups, n, seed=seed + 2).to(DTYPES[config.bias_dtype])
    )


def _alpha(config, groups, seed):
    return randn(groups, 1, seed=seed + 3)[:, 0].contiguous() if config.has_alpha else None
