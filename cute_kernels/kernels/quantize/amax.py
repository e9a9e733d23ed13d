"""max |x| of rows and groups, from one read of the rows that exist.

Warps take runs of consecutive rows, about 16 KiB each. A run costs one atomic maximum per group
that it touches. The maximum of non-negative numbers is that of their bits, and does not depend on
the order, so the result is deterministic. Runs are taken from the last row to the first: a
quantizer then begins with the rows that were read last and are still in L2.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from cute_kernels.device.absmax import absmax_packed, fmax, unpack_absmax, warp_max
from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.groups import GroupCursor
from cute_kernels.device.launch import env_stream
from cute_kernels.device.memory import load_global, load_global_if
from cute_kernels.device.ptx import f32_as_bits

from .activated_elements import ElementMaker, element_maker
from .config import DTYPE_BYTES
from .fakes import FakeBuffers
from .global_scales import GlobalScaleWriter
from .pass_config import AmaxConfig

_LOAD_BYTES = 32
_UNROLL = 4
_RUN_BYTES = 16384
_THREADS = 512
_CTAS_PER_SM = 2
_INF_BITS, _NAN_BITS = 0x7F800000, 0x7FFFFFFF


class AmaxKernels:
    """Amax kernels, for the classes that launch them.

    The runtime names kernels after the variant that launches them. So kernels that several variants
    share are methods that they inherit.

    Attributes:
        dtype: Data type of the elements.
        arch: Name of the architecture.
        maker: Computes the elements. None if they are the input itself.
        keeps_nan: True if the amax of numbers with a NaN is NaN.
        global_scale_writer: Writes global scales in ``initialize_global_scales``.
    """

    dtype: str
    arch: str
    maker: ElementMaker | None
    keeps_nan: bool = False
    levels: GlobalScaleWriter

    @cute.jit
    def launch_amax(
        self,
        x: cute.Tensor,
        offs: cute.Tensor | None,
        row_amax: cute.Tensor | None,
        group_amax: cute.Tensor | None,
        num_sms: Int32,
        stream: Any,
    ) -> None:
        """Clear the amaxes of groups, then launch the reduction (``reduce``)."""
        grid, block = [num_sms * _CTAS_PER_SM, 1, 1], [_THREADS, 1, 1]
        if const_expr(group_amax is not None):
            self.launch_clear(group_amax, num_sms, stream)
        self.reduce(x, offs, row_amax, group_amax).launch(grid=grid, block=block, stream=stream)

    @cute.jit
    def launch_clear(
        self,
        group_amax: cute.Tensor,
        num_sms: Int32,
        stream: Any,
        second_amax: cute.Tensor | None = None,
    ) -> None:
        """Write zeros to amaxes of groups, the initial values of ``merge``."""
        grid, block = [num_sms, 1, 1], [_THREADS, 1, 1]
        self.clear(group_amax, second_amax).launch(grid=grid, block=block, stream=stream)

    @cute.jit
    def launch_global_scales(
        self,
        amaxes: tuple[cute.Tensor | None, ...],
        input_scales: tuple[cute.Tensor | None, ...],
        scale_invs: tuple[cute.Tensor | None, ...],
        scales: tuple[cute.Tensor | None, ...],
        num_sms: Int32,
        stream: Any,
    ) -> None:
        """Clear the amaxes of each copy, and write the global scales of given scales.

        ``merge`` may set their scale_inv to NaN later.
        """
        grid, block = [num_sms, 1, 1], [_THREADS, 1, 1]
        self.initialize_global_scales(amaxes, input_scales, scale_invs, scales).launch(
            grid=grid, block=block, stream=stream
        )

    @cute.kernel
    def initialize_global_scales(
        self,
        amaxes: tuple[cute.Tensor | None, ...],
        input_scales: tuple[cute.Tensor | None, ...],
        scale_invs: tuple[cute.Tensor | None, ...],
        scales: tuple[cute.Tensor | None, ...],
    ) -> None:
        """Write zeros to amaxes, and global scales of given scales.

        Args:
            amaxes: (G,) fp32 outputs, one per copy, or None.
            input_scales: (G,) fp32 given scales, one per copy.
            scale_invs: (G,) fp32 outputs, one per copy.
            scales: (G,) fp32 outputs, one per copy.
        """
        tid = cute.arch.thread_idx()[0] + cute.arch.block_idx()[0] * _THREADS
        step = cute.arch.grid_dim()[0] * _THREADS
        for i in range_constexpr(len(amaxes)):
            if const_expr(amaxes[i] is not None):
                for g in cutlass.range(tid, amaxes[i].shape[0], step, unroll=1):
                    amaxes[i][g] = Float32(0.0)
                    self.global_scale_writer.write_group(
                        input_scales[i], scale_invs[i], scales[i], g
                    )

    @cute.kernel
    def clear(self, group_amax: cute.Tensor, second_amax: cute.Tensor | None) -> None:
        """Write zeros to one or two (G,) fp32 tensors."""
        tid = cute.arch.thread_idx()[0] + cute.arch.block_idx()[0] * _THREADS
        step = cute.arch.grid_dim()[0] * _THREADS
        for g in cutlass.range(tid, group_amax.shape[0], step, unroll=1):
            group_amax[g] = Float32(0.0)
            if const_expr(second_amax is not None):
                second_amax[g] = Float32(0.0)

    @cute.kernel
    def reduce(
        self,
        x: cute.Tensor,
        offs: cute.Tensor | None,
        row_amax: cute.Tensor | None,
        group_amax: cute.Tensor | None,
    ) -> None:
        """Compute amaxes.

        Args:
            x: (T, K) or (G, N, K); its width follows from the activation.
            offs: (G,) int32, None if uniform.
            row_amax: (T,) fp32 output, or None.
            group_amax: (G,) fp32 output that holds zeros or partial amaxes, or None.
        """
        row_bytes = x.shape[len(x.shape) - 1] * (x.element_type.width // 8)
        groups = GroupCursor.from_tensors(x, offs)
        warps = cute.arch.grid_dim()[0] * (_THREADS // WARP_SIZE)
        warp = cute.arch.block_idx()[0] * (_THREADS // WARP_SIZE) + cute.arch.warp_idx()
        end_row = groups.end_row()
        run = cutlass.max(_RUN_BYTES // row_bytes, Int32(1))
        index = (end_row + run - 1) // run - 1 - warp
        while index >= 0:
            row = index * run
            run_end = cutlass.min(row + run, end_row)
            group = Int32(0)
            while row < run_end:
                end = run_end
                if const_expr(group_amax is not None):
                    group, group_end = groups.group_of_row(row, group)
                    end = cutlass.min(run_end, group_end)
                if const_expr(row_amax is None):
                    absmax = self.absmax(x, row, end)
                else:
                    absmax = self.absmax_rows(x, row_amax, row, end)
                if const_expr(group_amax is not None):
                    self.merge(group_amax, group, absmax)
                row = end
            index -= warps

    @cute.jit
    def absmax_rows(self, x: cute.Tensor, row_amax: cute.Tensor, row: Int32, end: Int32) -> Float32:
        """Write the amaxes of rows up to ``end``, and return the largest."""
        absmax = Float32(0.0)
        for r in cutlass.range(row, end, unroll=1):
            row_absmax = warp_max(self.absmax(x, r, r + 1))
            if cute.arch.lane_idx() == 0:
                row_amax[r] = row_absmax
            absmax = fmax(absmax, row_absmax, self.keeps_nan)
        return absmax

    @cute.jit
    def absmax(self, x: cute.Tensor, row: Int32, end: Int32) -> Float32:
        """Return a lane's share of the absmax of consecutive rows up to ``end``."""
        if const_expr(self.maker is not None):
            packed = self.absmax_computed(x, row, end)
        else:
            row_bytes = x.shape[len(x.shape) - 1] * DTYPE_BYTES[self.dtype]
            source = x.iterator.toint() + Int64(row) * row_bytes
            packed = self.absmax_loaded(source, (end - row) * row_bytes)
        return unpack_absmax(packed, self.dtype, self.arch, self.keeps_nan)

    @cute.jit
    def absmax_loaded(self, source: Int64, num_bytes: Int32) -> Uint32:
        """Return the packed absmax of input elements. Their size is a multiple of 32 bytes."""
        packed = Uint32(0)
        offset = cute.arch.lane_idx() * _LOAD_BYTES
        while offset + (_UNROLL - 1) * WARP_SIZE * _LOAD_BYTES < num_bytes:
            words = [packed]
            for i in range_constexpr(_UNROLL):
                words.extend(load_global(source + (offset + i * (WARP_SIZE * _LOAD_BYTES)), 8))
            packed = absmax_packed(words, self.dtype, self.arch, self.keeps_nan)
            offset += _UNROLL * WARP_SIZE * _LOAD_BYTES
        while offset < num_bytes:
            words = [packed, *load_global(source + offset, 8)]
            packed = absmax_packed(words, self.dtype, self.arch, self.keeps_nan)
            offset += WARP_SIZE * _LOAD_BYTES
        return packed

    @cute.jit
    def absmax_computed(self, x: cute.Tensor, row: Int32, end: Int32) -> Uint32:
        """Return the packed absmax of elements that an activation computes."""
        cols = self.maker.cols(x)
        units, x_bytes = cols // self.maker.unit, self.maker.row_bytes(cols)
        x_address = x.iterator.toint() + Int64(row) * x_bytes
        packed, count = Uint32(0), (end - row) * units
        for first_unit in cutlass.range(cute.arch.lane_idx(), count, _UNROLL * WARP_SIZE, unroll=1):
            inputs = []
            for i in range_constexpr(_UNROLL):
                unit = first_unit + i * WARP_SIZE
                r = unit // units
                addresses = self.maker.addresses(
                    x_address + r * x_bytes, (unit - r * units) * self.maker.unit, cols
                )
                inputs.append([load_global_if(address, 16, unit, count) for address in addresses])
            words = [
                packed,
                *(word for unit_words in inputs for word in self.maker.make(unit_words)),
            ]
            packed = absmax_packed(words, self.dtype, self.arch, self.keeps_nan)
        return packed

    @cute.jit
    def merge(
        self,
        group_amax: cute.Tensor,
        group: Int32,
        absmax: Float32,
        scale_inv: cute.Tensor | None = None,
    ) -> None:
        """Raise the amax of a group to the warp's largest fp32 ``absmax``.

        If that is infinite, ``scale_inv`` of the group becomes NaN.
        """
        absmax = warp_max(absmax)
        is_positive = absmax > 0.0
        if const_expr(self.keeps_nan):
            is_positive = f32_as_bits(absmax) != 0  # NaN is not above 0
        if is_positive:
            if cute.arch.lane_idx() == 0:
                bits = cute.recast_ptr(group_amax.iterator + group, dtype=Uint32)
                cute.arch.atomic_max(bits, f32_as_bits(absmax), sem="relaxed", scope="gpu")
                if const_expr(scale_inv is not None):
                    if f32_as_bits(absmax) == Uint32(_INF_BITS):
                        # Bits of NaN are above those of any scale.
                        bits = cute.recast_ptr(scale_inv.iterator + group, dtype=Uint32)
                        cute.arch.atomic_max(bits, Uint32(_NAN_BITS), sem="relaxed", scope="gpu")


class AmaxReducer(AmaxKernels):
    """Kernel of row and group amaxes. See the module's docstring."""

    def __init__(self, config: AmaxConfig):
        self.dtype = config.dtype
        self.arch = config.arch
        self.maker = element_maker(config)
        self.keeps_nan = config.keeps_nan

    @staticmethod
    def fake_args(config: AmaxConfig) -> tuple[Any, ...]:
        """Return stand-ins for the arguments, see ``AmaxConfig.kernel``."""
        fake = FakeBuffers(config.dtype, config.grouping)
        return (
            fake.x(config.prologue),
            fake.offs(),
            fake.global_scale(per_row=True) if config.per_row else None,
            fake.global_scale() if config.per_group else None,
            Int32(1),
            env_stream(),
        )

    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the reduction."""
        self.launch_amax(*args)
