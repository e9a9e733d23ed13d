"""Quantizer of 128x128 tiles: rowwise, columnwise or both copies from one read of the input.

The amaxes are known before. A tile is 128 slot rows by 128 columns. It lies in shared memory as
boxes 128 bytes wide, in TMA's 128-byte swizzle: the 16-byte chunk c of row r is at chunk c ^ (r %
8). Both directions read that without bank conflicts. Rowwise, eight lanes read the same chunk of
eight rows. Columnwise, a warp reads the 32 words of one row.

Roles:     one or two loader warps | num_teams teams of four warps, team n takes every n-th tile.
Pipeline:  tiles, loader -> team. full: one arrival and the bytes of the boxes, or the copies of all
           lanes. empty: one arrival per warp. A descriptor in shared memory says what the stage
           holds.

For NVFP4, a row of a lane's 32x64 unit gives 32 bytes of codes and 4 scale bytes, and so does a
column of its 64-row unit. Every code store is a whole 32-byte sector. The rowwise scales of a
warp's 32 rows fill four sectors. Columnwise scales go through shared memory and leave as 512-byte
tiles.

PTX instructions per element, counted by ``perf run counts`` for 1024 x 4096 bf16:

=============================  ========  ========
copies                         sm_100a   sm_90a
=============================  ========  ========
rowwise                        5.3       9.7
columnwise                     5.4       9.4
both                           10.2      18.4
both, 16x16 blocks             9.6       17.8
both, Hadamard                 15.1
both, stochastic rounding      22.0
both, Hadamard + stochastic    26.9      30.2
both, four_over_six            74.1      99.1
FP8Block: rowwise, both        4.5, 9.1
MXFP8: rowwise, both           4.3, 9.0
=============================  ========  ========

On sm_100a both NVFP4 copies read 2.05 bytes per element. perf/results/counts_sm100a.md says what
bounds these counts, perf/results/quantize_h200.md what was tried on an H200; the performance docs
have times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device.absmax import unpack_absmax
from cute_kernels.device.activation_curves import TABLE_BYTES
from cute_kernels.device.codecs import GlobalScaleRegisters, codec_of
from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.groups import GroupCursor
from cute_kernels.device.launch import env_stream
from cute_kernels.device.memory import store_shared
from cute_kernels.device.philox import Seed, seed_of
from cute_kernels.device.ptx import bits_as_f32, f32_as_bits
from cute_kernels.kernels.quantize.activated_elements import element_maker
from cute_kernels.kernels.quantize.chunk_amax import ChunkAmaxKernels
from cute_kernels.kernels.quantize.fakes import FakeBuffers
from cute_kernels.kernels.quantize.global_scales import GlobalScaleWriter
from cute_kernels.layout.shapes import SF_TILE_BYTES, scale_tiles
from cute_kernels.layout.slots import TILE_ROWS

from .byte_codes import ByteTiles
from .fill import TileFiller
from .geometry import TileAddresses, TileDescriptor, TileEncoding, TileGeometry, TileSharedMemory
from .loader import DESCRIPTOR_WORDS, GatheredRows, GatheredRowsLoader, TileLoader, Tma
from .nibble_codes import NibbleTiles
from .scales import write_column_scales
from .square_blocks import SQUARES_BYTES
from .team import CopyBuffers, Team

if TYPE_CHECKING:
    from cute_kernels.kernels.quantize.config import TileConfig

#: Bytes of a table of encode factors, one for each scale byte that is not negative.
_FACTORS_BYTES = 4 * 128


class TileQuantizer(ChunkAmaxKernels):
    """Persistent kernel that quantizes tiles. See the module's docstring."""

    def __init__(self, config: TileConfig):
        self.config = config
        self.dtype = config.dtype
        self.arch = config.arch
        self.codec = codec_of(config.format, config.dtype, config.arch)
        self.global_scale_writer = GlobalScaleWriter(self.codec)
        self.keeps_nan = config.fmt.amaxes_keep_nan
        #: True if ``scale_inv`` of given scales becomes NaN once an amax is known to be infinite.
        self.marks_global_scales = config.fmt.has_given_scale and config.fmt.nan_scales
        self.geometry = TileGeometry(config.dtype, self.codec.block)
        gathered = config.prologue is not None and config.prologue.gathered
        loader = GatheredRowsLoader if config.gathers_rows else TileLoader
        self.loader = loader(config, self.geometry, in_bands=not gathered)
        self.team = Team(config, self.geometry)
        self.maker = element_maker(config)
        self.filler = None if self.maker is None else TileFiller(self.maker, self.team)
        self.table = None if self.maker is None else self.maker.table
        is_bytes = config.fmt.element.bits == 8
        tiles = ByteTiles if is_bytes else NibbleTiles
        self.tiles = tiles(config, self.codec, self.geometry, self.team)  # type: ignore[arg-type]
        self.num_compute_warps = config.num_teams * config.warps_per_team
        self.num_threads = (self.num_compute_warps + self.loader.num_loaders) * WARP_SIZE
        #: Global scales of a tile: one, or one per copy.
        self.num_global_scales = 2 if config.has_column_amax else 1
        #: True if a team keeps the encode factors of its group's scales in shared memory.
        self.has_table = config.uses_group_amax and self.codec.table_size > 0
        self.factors_bytes = _FACTORS_BYTES * self.num_global_scales if self.has_table else 0
        #: Columnwise scale tiles of a slot tile, or 0 if scales do not go through shared memory.
        self.scale_tiles = 0
        if config.columnwise and config.fmt.has_scale_tiles:
            self.scale_tiles = scale_tiles(TILE_ROWS, self.codec.block)
        #: Bytes of a team's rowwise scales, columnwise scales, and amaxes of square blocks.
        self.scales_bytes = SF_TILE_BYTES if config.rowwise and is_bytes else 0
        self.scales_t_bytes = self.scale_tiles * SF_TILE_BYTES
        squares = 4 * self.geometry.row_blocks * self.geometry.col_blocks
        self.squares_bytes = max(SQUARES_BYTES, squares) if config.fmt.is_2d else 0

    @staticmethod
    def fake_args(config: TileConfig) -> tuple[Any, ...]:
        """Return stand-ins for the arguments, see ``TileConfig.kernel``."""
        fake = FakeBuffers(config.dtype, config.grouping, config.format)
        return (
            fake.x(config.prologue),
            fake.index(config.prologue),
            fake.offs(),
            fake.global_scale(per_row=True) if config.uses_row_amax else None,
            fake.global_scale() if config.uses_group_amax else None,
            fake.codes() if config.rowwise else None,
            fake.scales() if config.rowwise else None,
            fake.codes_t() if config.columnwise else None,
            fake.scales_t() if config.columnwise else None,
            *fake.global_scale_outputs(),
            fake.global_scale() if config.has_column_amax else None,
            fake.seed() if config.fmt.is_stochastic else None,
            *[Int64(0) if config.is_member else None] * 2,
            Int32(1),
            env_stream(),
        )

    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the amax reduction if the kernel computes amaxes, then the quantizer.

        If the caller gives the scales, the amaxes that the quantizer returns are cleared first.
        """
        *arguments, num_sms, stream = args
        x, _, offs, row_amax, group_amax, *_, scale_inv, scale, amax, column_amax, _, _, _ = (
            arguments
        )
        if const_expr(self.config.compute_amax and self.codec.fmt.is_transformed):
            amaxes = (None, group_amax) if column_amax is None else (group_amax, column_amax)
            self.launch_chunk_amax(x, offs, *amaxes, num_sms, stream)
        elif const_expr(self.config.compute_amax):
            self.launch_amax(x, offs, row_amax, group_amax, num_sms, stream)
        if const_expr(self.marks_global_scales):
            self.launch_global_scales(
                (amax,), (group_amax,), (scale_inv,), (scale,), num_sms, stream
            )
        elif const_expr(self.config.fmt.has_given_scale):
            self.launch_clear(amax, num_sms, stream)
        copies: tuple[Any, ...] = (None,) * 3
        if const_expr(self.filler is None and not self.config.gathers_rows):
            copies = self.loader.copy_of(x, GroupCursor.from_tensors(x, offs).num_rows)
        self.kernel(*copies, *arguments).launch(
            grid=[num_sms, 1, 1], block=[self.num_threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        box_copy: cute.CopyAtom | None,
        box_source: cute.Tensor | None,
        box: cute.ComposedLayout | None,
        x: cute.Tensor,
        index: Any,
        offs: cute.Tensor | None,
        row_amax: cute.Tensor | None,
        group_amax: cute.Tensor | None,
        codes: cute.Tensor | None,
        scales: cute.Tensor | None,
        codes_t: cute.Tensor | None,
        scales_t: cute.Tensor | None,
        scale_inv: cute.Tensor | None,
        scale: cute.Tensor | None,
        amax: cute.Tensor | None,
        column_amax: cute.Tensor | None,
        seed: cute.Tensor | None,
        rng_offset: Int64 | None,
        rng_offset_t: Int64 | None,
    ) -> None:
        """Set up shared memory and barriers, then run the loader warps and the teams."""
        config = self.config
        smem, table = cutlass.memory.SmemAllocator(), None
        if const_expr(self.table is not None):
            table = _bytes(smem, TABLE_BYTES)  # the first allocation, so that its addresses are low
        tiles, stages, copies = config.num_tiles, config.num_stages, 2 * config.num_teams
        shared = TileSharedMemory(
            tiles=smem.allocate_array(Uint8, tiles * config.tile_bytes, byte_alignment=1024),
            scales=_bytes(smem, config.num_teams * self.scales_bytes),
            scales_t=_bytes(smem, copies * self.scales_t_bytes),
            squares=_bytes(smem, copies * self.squares_bytes),
            factors=_bytes(smem, config.num_teams * self.factors_bytes),
            descriptors=smem.allocate_array(Int32, stages * DESCRIPTOR_WORDS, byte_alignment=16),
            full=smem.allocate_array(Int64, copies, byte_alignment=8),
            empty=smem.allocate_array(Int64, stages, byte_alignment=8),
            table=table,
        )
        tid = cute.arch.thread_idx()[0]
        if tid < copies:
            cute.arch.mbarrier_init(shared.full + tid, self.loader.arrivals)
        if tid < stages:
            cute.arch.mbarrier_init(shared.empty + tid, config.warps_per_team)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        cols = x.shape[len(x.shape) - 1] if self.maker is None else self.maker.cols(x)
        groups = GroupCursor.from_tensors(x, offs, index)
        warp = cute.arch.make_warp_uniform(tid // WARP_SIZE)
        if warp >= self.num_compute_warps:
            inputs = None
            if const_expr(config.gathers_rows):
                inputs = GatheredRows(x, index)
            elif const_expr(self.filler is None):
                cpasync.prefetch_descriptor(box_copy)
                inputs = Tma(box_copy, box_source, box)
            self.loader.load(
                groups, cols, group_amax, column_amax, inputs, shared, warp - self.num_compute_warps
            )
        else:
            threads = self.num_compute_warps * WARP_SIZE
            if const_expr(self.table is not None):
                self.table.fill(table.toint(), tid, threads)
            if const_expr(group_amax is not None and not self.marks_global_scales):
                thread = cute.arch.block_idx()[0] * threads + tid
                step = cute.arch.grid_dim()[0] * threads
                self.global_scale_writer.write(group_amax, scale_inv, scale, thread, step)
            out, seeds = CopyBuffers(codes, scales, codes_t, scales_t), (None, None)
            if const_expr(config.fmt.is_stochastic):
                # Both copies of square blocks have the same codes.
                column_offset = rng_offset_t if not config.fmt.is_2d else rng_offset
                seeds = (
                    seed_of(seed, False, rng_offset),
                    seed_of(seed, not config.fmt.is_2d, column_offset),
                )
            marked_scale_inv = scale_inv if self.marks_global_scales else None
            self.compute(
                x, index, groups, cols, row_amax, out, amax, marked_scale_inv, seeds, warp, shared
            )

    @cute.jit
    def compute(
        self,
        x: cute.Tensor,
        index: Any,
        groups: GroupCursor,
        cols: Int32,
        row_amax: cute.Tensor | None,
        out: CopyBuffers,
        amax: cute.Tensor | None,
        marked_scale_inv: cute.Tensor | None,
        seeds: tuple[Seed | None, Seed | None],
        warp: Int32,
        shared: TileSharedMemory,
    ) -> None:
        """Run a team: convert its tiles.

        Args:
            x: (T, K) or (G, N, K). Input. It is read here only if the team fills its tile.
            index: (R,) int32. Rows of x, or None. For AdamW the tensors of the update.
            groups: Groups of the rows.
            cols: Columns of the elements, K.
            row_amax: (T,) fp32. Amax of each row. Optional.
            out: Buffers of the copies.
            amax: (G,) fp32 output if the caller gives the scales, or None.
            marked_scale_inv: (G,) fp32 to set to NaN with an infinite amax. Optional.
            seeds: Random-number seeds of the rowwise and the columnwise copy, or None each.
            warp: Warp in the CTA.
            shared: Shared memory.
        """
        config = self.config
        team = warp // config.warps_per_team
        warp_in_team = warp - team * config.warps_per_team
        stage, phase, copy = team, Int32(0), Int32(0)
        count = Int32(1)
        factors_address = shared.factors.toint() + team * self.factors_bytes
        tables = [factors_address + i * _FACTORS_BYTES for i in range(self.num_global_scales)]
        global_scales, global_scale_group = (
            (self.codec.zero_global_scale(),) * self.num_global_scales,
            Int32(-1),
        )
        running_absmax, absmax_group = Uint32(0), Int32(0)
        while count > 0:
            cute.arch.mbarrier_wait(shared.full + (team * 2 + copy), phase)
            tile = self.loader.read_descriptor(shared, stage)
            count = tile.num_rows
            if count > 0:
                buffer = team * 2 + copy
                scales_t_address = shared.scales_t.toint() + buffer * self.scales_t_bytes
                tile_address = shared.tiles.toint()
                if const_expr(self.filler is None):
                    tile_address += stage * config.tile_bytes
                else:
                    tile_address += team * config.tile_bytes
                    self.filler.fill(x, index, tile, team, tile_address, shared.table)
                if const_expr(self.has_table):
                    if tile.group != global_scale_group:
                        global_scales, global_scale_group = self.global_scales_of(tile), tile.group
                        self.tabulate(global_scales, tables, team)
                elif const_expr(config.uses_group_amax):
                    global_scales = self.global_scales_of(tile)
                if const_expr(config.fmt.has_given_scale):
                    if tile.group != absmax_group:
                        self.report(amax, marked_scale_inv, absmax_group, running_absmax)
                        running_absmax, absmax_group = Uint32(0), tile.group
                addresses = TileAddresses(
                    tile=tile_address,
                    scales=shared.scales.toint() + team * self.scales_bytes,
                    scales_t=scales_t_address,
                    squares=shared.squares.toint() + buffer * self.squares_bytes,
                )
                encodings = tuple(
                    TileEncoding(global_scales[i], tables[i] if self.has_table else None, seeds[c])
                    for c, i in enumerate((0, self.num_global_scales - 1))
                )
                running_absmax = self.tiles.convert(
                    groups,
                    cols,
                    encodings,
                    row_amax,
                    out,
                    tile,
                    team,
                    warp_in_team,
                    addresses,
                    running_absmax,
                )
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(shared.empty + stage)
                if const_expr(self.scale_tiles > 0):
                    if warp_in_team < self.scale_tiles:
                        write_column_scales(
                            groups,
                            out.scales_t,
                            tile,
                            scales_t_address,
                            warp_in_team,
                            self.scale_tiles,
                        )
            stage, _ = self.loader.next_stage(stage, phase, config.num_teams)
            phase ^= copy
            copy ^= 1
        if const_expr(config.fmt.has_given_scale):
            self.report(amax, marked_scale_inv, absmax_group, running_absmax)

    @cute.jit
    def report(
        self,
        amax: cute.Tensor,
        marked_scale_inv: cute.Tensor | None,
        group: Int32,
        running_absmax: Uint32,
    ) -> None:
        """Raise the amax of a group to ``running_absmax``, the packed magnitudes of a warp."""
        self.merge(
            amax, group, unpack_absmax(running_absmax, self.dtype, self.arch), marked_scale_inv
        )

    def global_scales_of(self, tile: TileDescriptor) -> tuple[GlobalScaleRegisters, ...]:
        """Return the global scale of a tile, or one per copy."""
        amaxes = (tile.amax, tile.column_amax)[: self.num_global_scales]
        return tuple(self.codec.global_scale(bits_as_f32(Uint32(amax))) for amax in amaxes)

    @cute.jit
    def tabulate(
        self, global_scales: tuple[GlobalScaleRegisters, ...], tables: list[Int32], team: Int32
    ) -> None:
        """Write the tables of encode factors of a group, one factor per thread of the team."""
        thread = self.team.thread(team)
        factors = [
            self.codec.encode_factor(Uint32(thread), global_scale) for global_scale in global_scales
        ]
        self.team.sync(team)
        for i in range_constexpr(self.num_global_scales):
            store_shared(tables[i] + thread * 4, [f32_as_bits(factors[i])])
        self.team.sync(team)


def _bytes(smem: cutlass.memory.SmemAllocator, size: int) -> cute.Pointer:
    """Allocate ``size`` bytes of shared memory, at least 1, aligned to 16 bytes."""
    return smem.allocate_array(Uint8, max(size, 1), byte_alignment=16)
