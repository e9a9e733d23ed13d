"""Quantizer of gradients: the gradient of an activation and p times its result, from one read.

The loader brings tiles of the inputs. All warps turn them in place into tiles of the gradient and
of p a, as ``moe_activate_gradient`` defines them. Then four warps quantize the columns of each tile
of the stage, and four warps the rows of all tiles. A warp that is done begins with the next stage,
so warps take rows from a counter. CTAs take tiles from a counter, because many tiles have few rows.
The sum <grad, a> of each row in a tile goes to memory, and a second kernel adds the sums of a row.

A stage has 96 KiB, so there are two, and the loader has as much time as the work on one stage
takes. It reads tile positions, weights and scales ahead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr

from cute_kernels.arch import get_arch
from cute_kernels.device.absmax import unpack_absmax
from cute_kernels.device.activation_curves import (
    TABLE_BYTES,
    FactorTable,
    quick_bound,
    weighted_gradient,
)
from cute_kernels.device.codecs import codec_of
from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.convert import pack_words, unpack_words
from cute_kernels.device.groups import GroupCursor
from cute_kernels.device.launch import compact, env_stream
from cute_kernels.device.memory import load_shared, store_shared
from cute_kernels.device.ptx import add_rn, bits_as_f32
from cute_kernels.formats.activations import parse_activation
from cute_kernels.kernels.quantize.amax import AmaxKernels
from cute_kernels.kernels.quantize.fakes import FakeBuffers
from cute_kernels.kernels.quantize.global_scales import GlobalScaleWriter
from cute_kernels.layout.shapes import SF_TILE_BYTES, scale_tiles
from cute_kernels.layout.slots import TILE_ROWS

from .byte_codes import ByteTiles
from .geometry import (
    BOX_BYTES,
    BOX_SIZE,
    TILE_COLS,
    TileAddresses,
    TileDescriptor,
    TileGeometry,
    TileSharedMemory,
)
from .gradient_loader import FACTORS_BYTES, WEIGHTS_BYTES, GradientInputs, GradientLoader
from .loader import DESCRIPTOR_WORDS, Tma
from .scales import write_column_scales
from .team import CopyBuffers, Team

if TYPE_CHECKING:
    from cute_kernels.device.codecs import GlobalScaleRegisters
    from cute_kernels.kernels.quantize.config import GradientConfig, TileConfig

_THREADS = 256
#: Lanes that share a row of a tile, eight columns each, and rows that a warp has at once.
_LANES = TILE_COLS // 8
_ROWS = WARP_SIZE // _LANES


class GradientQuantizer(AmaxKernels):
    """Persistent kernel that quantizes gradients. See the module's docstring."""

    def __init__(self, config: GradientConfig):
        self.config, self.dtype, self.arch = config, config.dtype, config.arch
        self.act = parse_activation(config.activation)
        #: Crews of four warps: one per tile for its columns, and one for the rows.
        self.crews = config.num_tiles + 2
        self.tiles = [self.converter(copy) for copy in config.copies]
        self.loader = GradientLoader(config, self.tiles[0].columns.geometry)  # type: ignore[arg-type]
        self.threads = self.crews * config.copies[0].warps_per_team * WARP_SIZE
        self.has_given_scale = any(copy.fmt.has_given_scale for copy in config.copies)
        self.global_scale_writer = GlobalScaleWriter(self.tiles[0].columns.codec)
        #: True if ``scale_inv`` of given scales becomes NaN once an amax is known to be infinite.
        self.marks_global_scales = self.has_given_scale and any(
            copy.fmt.nan_scales for copy in config.copies
        )
        #: Columnwise scale tiles of each kind of tile, and the most bytes of them.
        self.scale_tiles = [
            t.columns.is_tiled * scale_tiles(TILE_ROWS, t.columns.codec.block) for t in self.tiles
        ]
        self.scales_bytes = SF_TILE_BYTES * max(self.scale_tiles)
        self.table = None
        if (
            get_arch(config.arch).tuned_by == "time"
            and config.has_table_room
            and quick_bound(self.act) is not None
        ):
            self.table = FactorTable.create(self.act, config.dtype)

    def converter(self, copy: TileConfig) -> ByteTiles:
        """Return the converter of the tiles of a copy."""
        codec = codec_of(copy.format, copy.dtype, copy.arch)
        geometry = TileGeometry(copy.dtype, codec.block)
        return ByteTiles(copy, codec, geometry, Team(copy, geometry))  # type: ignore[arg-type]

    @staticmethod
    def fake_args(config: GradientConfig) -> tuple[Any, ...]:
        """Return stand-ins for the arguments, see ``GradientConfig.kernel``."""
        fake, scaled = (FakeBuffers(config.dtype, "ragged", copy.format) for copy in config.copies)
        scaled.rows, scaled.groups, pairs = fake.rows, fake.groups, cute.sym_int()
        return (
            fake.x(),
            scaled.x(),
            fake.offs(),
            compact(Float32, pairs, align=4),
            compact(Int32, fake.rows, align=4),
            fake.global_scale(),
            scaled.global_scale(),
            fake.codes(),
            fake.scales(),
            fake.codes_t(),
            fake.scales_t(),
            *fake.global_scale_outputs(),
            None,
            None,
            scaled.codes_t(),
            scaled.scales_t(),
            *scaled.global_scale_outputs(),
            compact(Float32, cute.sym_int(), fake.rows, align=4),
            compact(Float32, pairs, align=4),
            Int32(1),
            compact(Int32, 1, align=4),
            env_stream(),
        )

    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernels: initialize amaxes, quantize, and add the sums of each row."""
        x, grad, offs, weight, pair, *copy_tensors, sums, dweight, num_sms, counter, stream = args
        input_scales, out = tuple(copy_tensors[:2]), tuple(copy_tensors[2:])
        if const_expr(self.marks_global_scales):
            halves = out[: len(out) // 2], out[len(out) // 2 :]
            scale_invs, scales, amaxes = zip(*(half[4:] for half in halves), strict=True)
            self.launch_global_scales(amaxes, input_scales, scale_invs, scales, num_sms, stream)
        elif const_expr(self.has_given_scale):
            amax, *more_amaxes = [
                tensor for tensor in (out[len(out) // 2 - 1], out[-1]) if tensor is not None
            ]
            self.launch_clear(amax, num_sms, stream, *more_amaxes)
        copies = [self.loader.copy_of(tensor, tensor.shape[0]) for tensor in (x, grad)]
        self.kernel(
            *copies[0], *copies[1], offs, weight, pair, input_scales, out, sums, counter
        ).launch(
            grid=[num_sms, 1, 1],
            block=[self.threads + WARP_SIZE, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )
        ctas = cutlass.min((x.shape[0] + (_THREADS - 1)) // _THREADS, num_sms * (2048 // _THREADS))
        self.add(x, offs, pair, sums, dweight).launch(
            grid=[ctas, 1, 1], block=[_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def add(
        self,
        x: cute.Tensor,
        offs: cute.Tensor,
        pair: cute.Tensor,
        sums: cute.Tensor,
        dweight: cute.Tensor,
    ) -> None:
        """Add the sums of each row over its tiles.

        Args:
            x: (R, W), for its rows.
            offs: (G,) int32.
            pair: (R,) int32 index of each row's weight.
            sums: (tiles along N, R) fp32.
            dweight: (T * top_k,) fp32 output.
        """
        row = cute.arch.block_idx()[0] * _THREADS + cute.arch.thread_idx()[0]
        end_row = GroupCursor.from_tensors(x, offs).end_row()
        while row < end_row:
            pair_index, total = pair[row], Float32(0.0)
            if pair_index >= 0 and pair_index < dweight.shape[0]:
                for t in cutlass.range(sums.shape[0], unroll=8):
                    total = add_rn(total, sums[t, row])
                dweight[pair_index] = total
            row += cute.arch.grid_dim()[0] * _THREADS

    @cute.kernel
    def kernel(
        self,
        x_copy: cute.CopyAtom,
        x_source: cute.Tensor,
        x_box: cute.ComposedLayout,
        grad_copy: cute.CopyAtom,
        grad_source: cute.Tensor,
        grad_box: cute.ComposedLayout,
        offs: cute.Tensor,
        weight: cute.Tensor,
        pair: cute.Tensor,
        input_scales: tuple[cute.Tensor | None, ...],
        out: tuple[cute.Tensor | None, ...],
        sums: cute.Tensor,
        counter: cute.Tensor,
    ) -> None:
        """Set up shared memory and barriers, then run the loader warp and the compute warps."""
        smem, stages = cutlass.memory.SmemAllocator(), self.config.num_stages

        def allocate(size: int, align: int = 16) -> cute.Pointer:
            return smem.allocate_array(Uint8, max(size, 1), byte_alignment=align)

        table = None
        if const_expr(self.table is not None):
            table = allocate(TABLE_BYTES)  # the first allocation, so that its addresses are low
        tiles = allocate(stages * self.config.tile_bytes, 1024)
        shared = TileSharedMemory(
            tiles=tiles,
            scales=allocate(self.config.num_tiles * SF_TILE_BYTES),
            scales_t=allocate(2 * (self.config.num_tiles + 1) * self.scales_bytes),
            squares=tiles,
            factors=allocate(stages * FACTORS_BYTES),
            descriptors=smem.allocate_array(Int32, stages * DESCRIPTOR_WORDS, byte_alignment=16),
            full=smem.allocate_array(Int64, stages, byte_alignment=8),
            empty=smem.allocate_array(Int64, stages, byte_alignment=8),
            table=table,
        )
        tid = cute.arch.thread_idx()[0]
        if tid < stages:
            cute.arch.mbarrier_init(shared.full + tid, WARP_SIZE)
            cute.arch.mbarrier_init(shared.empty + tid, self.threads // WARP_SIZE)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        groups, warp = (
            GroupCursor.from_tensors(x_source, offs),
            cute.arch.make_warp_uniform(tid // WARP_SIZE),
        )
        cols = x_source.shape[1], grad_source.shape[1]
        if warp == self.threads // WARP_SIZE:
            boxes = Tma(x_copy, x_source, x_box), Tma(grad_copy, grad_source, grad_box)
            inputs = GradientInputs(*boxes, weight, pair, input_scales, counter)
            self.loader.load(groups, cols[1], inputs, shared)
        else:
            if const_expr(self.table is not None):
                self.table.fill(table.toint(), tid, self.threads)
            copies_of_tensors = out[: len(out) // 2], out[len(out) // 2 :]
            copies, amaxes = (
                tuple(CopyBuffers(*tensors[:4]) for tensors in copies_of_tensors),
                [tensors[-1] for tensors in copies_of_tensors],
            )
            thread, marked_scale_invs = cute.arch.block_idx()[0] * self.threads + tid, [None, None]
            if const_expr(self.marks_global_scales):
                marked_scale_invs = [
                    tensors[4] if copy.fmt.nan_scales else None
                    for tensors, copy in zip(copies_of_tensors, self.config.copies, strict=True)
                ]
            else:
                for i, tensors in enumerate(copies_of_tensors):
                    levels = GlobalScaleWriter(self.tiles[i].columns.codec)
                    levels.write(
                        input_scales[i],
                        *tensors[4:-1],
                        thread,
                        cute.arch.grid_dim()[0] * self.threads,
                    )
            self.compute(groups, cols, copies, amaxes, marked_scale_invs, sums, warp, shared)

    @cute.jit
    def compute(
        self,
        groups: GroupCursor,
        cols: Any,
        out: Any,
        amaxes: Any,
        marked_scale_invs: Any,
        sums: cute.Tensor,
        warp: Int32,
        shared: TileSharedMemory,
    ) -> None:
        """Run a compute warp.

        Args:
            groups: Groups of the rows.
            cols: W and N.
            out: ``CopyBuffers`` of the gradient and of the weighted activation.
            amaxes: (G,) fp32. Outputs of both copies, or None each.
            marked_scale_invs: (G,) fp32 to set to NaN with an infinite amax, or None each.
            sums: (tiles along N, R) fp32. Workspace.
            warp: Warp in the CTA.
            shared: Shared memory.
        """
        config, copy_config = self.config, self.config.copies[0]
        crew = warp // copy_config.warps_per_team
        warp_in_team = warp - crew * copy_config.warps_per_team
        stage, phase, num_rows = Int32(0), Int32(0), Int32(1)
        running_absmax, absmax_group = Uint32(0), Int32(0)
        while num_rows > 0:
            cute.arch.mbarrier_wait(shared.full + stage, phase)
            tile = self.loader.read_descriptor(shared, stage)
            num_rows = tile.num_rows
            if const_expr(self.has_given_scale):
                if num_rows == 0 or tile.group != absmax_group:
                    self.report(amaxes, marked_scale_invs, crew, absmax_group, running_absmax)
                    running_absmax, absmax_group = Uint32(0), tile.group
            if num_rows > 0:
                stage_address = shared.tiles.toint() + stage * config.tile_bytes
                self.make(
                    tile,
                    stage_address,
                    shared.factors.toint() + stage * FACTORS_BYTES,
                    sums,
                    shared.table,
                )
                # The next load of this stage is an asynchronous write after these.
                cute.arch.fence_view_async_shared()
                cute.arch.barrier(barrier_id=self.crews + 1, number_of_threads=self.threads)
                column_tiles = cols[1] // TILE_COLS
                if crew > config.num_tiles:
                    for t in range_constexpr(config.num_tiles):
                        wide_tile = tile._replace(col_tile=t * column_tiles + tile.col_tile)
                        addresses = TileAddresses(
                            stage_address + t * copy_config.tile_bytes,
                            shared.scales.toint() + t * SF_TILE_BYTES,
                            stage_address,
                            stage_address,
                        )
                        self.tiles[0].rows.convert(
                            groups,
                            cols[0],
                            self.global_scale(0, tile),
                            out[0].codes,
                            out[0].scales,
                            wide_tile,
                            warp_in_team,
                            addresses,
                            Uint32(0),
                        )
                else:
                    scales_t = shared.scales_t.toint() + (crew * 2 + stage) * self.scales_bytes
                    addresses = TileAddresses(
                        stage_address + crew * copy_config.tile_bytes,
                        stage_address,
                        scales_t,
                        stage_address,
                    )
                    if crew < config.num_tiles:
                        wide_tile = tile._replace(col_tile=crew * column_tiles + tile.col_tile)
                        running_absmax = self.convert_columns(
                            0,
                            groups,
                            cols[0],
                            out[0],
                            wide_tile,
                            crew,
                            warp_in_team,
                            addresses,
                            running_absmax,
                        )
                    else:
                        running_absmax = self.convert_columns(
                            1,
                            groups,
                            cols[1],
                            out[1],
                            tile,
                            crew,
                            warp_in_team,
                            addresses,
                            running_absmax,
                        )
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(shared.empty + stage)
            phase ^= stage
            stage ^= 1

    @cute.jit
    def make(
        self,
        tile: TileDescriptor,
        tile_address: Int32,
        factors_address: Int32,
        sums: cute.Tensor,
        table: cute.Pointer | None,
    ) -> None:
        """Turn the rows of a stage in place into rows of the gradient and of p a.

        Warps take rows from the counter that follows the weights.
        """
        config, lane = self.config, cute.arch.lane_idx()
        unit, lane_row = lane % _LANES, lane // _LANES
        tile_addresses = [
            tile_address + unit // 8 * BOX_SIZE + t * config.copies[0].tile_bytes
            for t in range(config.num_tiles + 1)
        ]
        first_row = cute.arch.shuffle_sync(self.take(factors_address), 0)
        while first_row < tile.num_rows:
            next_row = self.take(factors_address)
            # If the number of rows is odd, two lanes compute the last row.
            row = cutlass.min(first_row + lane_row, tile.num_rows - 1)
            offset = row * BOX_BYTES + (unit ^ row) % 8 * 16
            words = [load_shared(address + offset, 4) for address in tile_addresses]
            *inputs, grad = [unpack_words(tile_words, config.dtype) for tile_words in words]
            p = bits_as_f32(load_shared(factors_address + row * 4, 1)[0])
            factors = None if self.table is None else self.table.factors(words[0], table.toint())
            gradients, scaled, total = weighted_gradient(self.act, config, inputs, grad, p, factors)
            cute.arch.sync_warp()  # both lanes have read the row
            if first_row + lane_row < tile.num_rows:
                for address, numbers in zip(tile_addresses, [*gradients, scaled], strict=True):
                    store_shared(address + offset, pack_words(numbers, config.dtype))
                if unit == 0:
                    sums[tile.col_tile, tile.first_row + row] = total
            first_row = cute.arch.shuffle_sync(next_row, 0)
        if tile.num_rows < TILE_ROWS:
            self.clear_rows(tile.num_rows, tile_address)

    @cute.jit
    def take(self, factors_address: Int32) -> Int32:
        """Return in the first lane the next rows that no warp has taken."""
        first_row = Int32(0)
        if cute.arch.lane_idx() == 0:
            counter = cute.make_ptr(Int32, factors_address + WEIGHTS_BYTES, cute.AddressSpace.smem)
            first_row = cute.arch.atomic_add(counter, Int32(_ROWS), sem="relaxed", scope="cta")
        return first_row

    @cute.jit
    def clear_rows(self, num_rows: Int32, tile_address: Int32) -> None:
        """Zero the rows of the stage's tiles from ``num_rows`` on."""
        for b in range_constexpr(self.config.tile_bytes // BOX_SIZE):
            base = tile_address + b * BOX_SIZE + num_rows * BOX_BYTES
            for i in cutlass.range(
                cute.arch.thread_idx()[0], (TILE_ROWS - num_rows) * 8, self.threads, unroll=1
            ):
                store_shared(base + i * 16, [Uint32(0)] * 4)

    @cute.jit
    def convert_columns(
        self,
        kind: int,
        groups: GroupCursor,
        cols: Int32,
        out: CopyBuffers,
        tile: TileDescriptor,
        crew: Int32,
        warp_in_team: Int32,
        addresses: TileAddresses,
        running_absmax: Uint32,
    ) -> Uint32:
        """Convert the columns of one tile; ``kind`` is 0 for the gradient and 1 for p a.

        Returns:
            ``running_absmax``, raised to the magnitudes of the tile.
        """
        tiles, num_scale_tiles = self.tiles[kind], self.scale_tiles[kind]
        running_absmax = tiles.columns.convert(
            groups,
            cols,
            self.global_scale(kind, tile),
            out.codes_t,
            out.scales_t,
            tile,
            warp_in_team,
            addresses,
            running_absmax,
        )
        if const_expr(num_scale_tiles > 0):
            tiles.team.sync(crew)
            if warp_in_team < num_scale_tiles:
                write_column_scales(
                    groups, out.scales_t, tile, addresses.scales_t, warp_in_team, num_scale_tiles
                )
        return running_absmax

    def global_scale(self, kind: int, tile: TileDescriptor) -> GlobalScaleRegisters:
        """Return the global scale of a group, for the copy ``kind``."""
        return self.tiles[kind].columns.codec.global_scale(
            bits_as_f32(Uint32((tile.amax, tile.column_amax)[kind]))
        )

    @cute.jit
    def report(
        self, amaxes: Any, marked_scale_invs: Any, crew: Int32, group: Int32, running_absmax: Uint32
    ) -> None:
        """Raise the amax of a group to the absmax that a warp has found in columns.

        The rowwise copy has the same amax.
        """
        absmax = unpack_absmax(running_absmax, self.dtype, self.arch)
        for i in range_constexpr(2):
            if const_expr(amaxes[i] is not None):
                if (crew == self.config.num_tiles) == bool(i):
                    self.merge(amaxes[i], group, absmax, marked_scale_invs[i])
