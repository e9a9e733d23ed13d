"""Quantizer of the rowwise copy, row by row: the amax and the codes of a row from one read.

Work comes in row batches: eight rows of a 128-row slot tile whose scales fill whole 32-byte
sectors. If scales lie in 128x4 tiles, a batch has rows 2p and 2p + 1 of each of the tile's four
quarters. If scales are MN-major, it has eight consecutive rows.

A team of warps takes a batch row by row (one warp takes several short rows at once). It keeps the
row in registers between the amax and the codes, collects the scales of the batch in shared memory
and writes them once, one sector per lane. If the global scale is per group, it is an input, and
rows do not depend on each other.

``row_team`` has the work on a row.

Roles:     one loader warp, lane t serves team t | num_teams teams of warps_per_row warps.
Pipeline:  rows, loader -> team. full: one arrival and the bytes of the rows. empty: one arrival per
           warp. Teams take batches that have rows from a counter. A row past the end of its group
           carries no bytes, and no stage if it is alone.

Measured on an H200 for 65536 x 7168 bf16, relative to the rate of a copy: FP8 with given amaxes 96
%, FP8Block 94 %, MXFP8 95 %. FP8Block of SwiGLU of 262144 x 1536 bf16, with a table of factors: 88
%.

Counted by ``perf run counts`` for 1024 rows of bf16 on sm_100a, row-scaled NVFP4: 6.4 PTX
instructions per element at K = 4096, 6.6 at 7168, 7.9 at 256; 2.00 bytes read. FP8 for 2048 rows of
4096: 3.46, of which 1.1 only name register pairs and are no machine instructions.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr

from cute_kernels.device.activation_curves import TABLE_BYTES
from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.groups import GroupCursor, indexed
from cute_kernels.device.launch import env_stream
from cute_kernels.device.memory import (
    bulk_load,
    load_shared,
    store_global,
    store_shared,
    store_shared_byte,
    wait_each,
)
from cute_kernels.layout.shapes import SF_TILE_BYTES, SF_TILE_COLS
from cute_kernels.layout.slots import TILE_ROWS

from .config import DTYPE_BYTES, RowsConfig
from .fakes import FakeBuffers
from .global_scales import GlobalScaleWriter
from .row_team import Lane, RowSharedMemory, RowTeam, row_address

#: Rows of a batch, and batches of a 128-row slot tile.
_BATCH_ROWS, _BATCHES = 8, 16
#: Bytes of a sector of scales.
_SECTOR = 32


class Output(NamedTuple):
    """Buffers of the rowwise copy.

    Attributes:
        amax: (T,) fp32 output, or (G,) fp32 input, or None.
        codes: (T, K) or (G, N, K) codes.
        scales: Block scales as ``layout.buffers`` describes them, or None.
    """

    amax: cute.Tensor | None
    codes: cute.Tensor
    scales: cute.Tensor | None


class RowBatch(NamedTuple):
    """The batch that begins in a stage.

    Attributes:
        item: Number of the batch: ``_BATCHES`` times the slot tile, plus the batch in the tile.
        first_row: Matrix row of the first row of the slot tile.
        num_rows: Rows of the slot tile that exist; 0 ends the work.
        group: Group of the slot tile.
    """

    item: Int32
    first_row: Int32
    num_rows: Int32
    group: Int32


class RowsQuantizer(RowTeam):
    """Persistent kernel that quantizes rows. See the module's docstring."""

    def __init__(self, config: RowsConfig):
        super().__init__(config)
        self.global_scale_writer = GlobalScaleWriter(self.codec)
        self.num_slots = config.num_teams * config.num_stages
        #: Words of ``RowSharedMemory.batches``.
        self.table_words = 4 * self.num_slots
        self.num_threads = (config.num_compute_warps + 1) * WARP_SIZE

    @staticmethod
    def fake_args(config: RowsConfig) -> tuple[Any, ...]:
        """Return stand-ins for the arguments, see ``RowsConfig.kernel``."""
        fake = FakeBuffers(config.dtype, config.grouping, config.format)
        inputs = (fake.x(config.prologue), fake.index(config.prologue), fake.offs())
        output = (fake.global_scale(config.computes_amax), fake.codes(), fake.scales())
        return (*inputs, *output, *fake.global_scale_outputs()[:2], Int32(1), env_stream())

    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel: one CTA per SM."""
        *arguments, num_sms, stream = args
        self.kernel(*arguments).launch(
            grid=[num_sms, 1, 1], block=[self.num_threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        index: cute.Tensor | None,
        offs: cute.Tensor | None,
        amax: cute.Tensor | None,
        codes: cute.Tensor,
        scales: cute.Tensor | None,
        scale_inv: cute.Tensor | None,
        scale: cute.Tensor | None,
    ) -> None:
        """Set up shared memory and barriers, then run the loader warp and the teams."""
        config = self.config
        num_slots = self.num_slots
        smem = cutlass.memory.SmemAllocator()
        shared = RowSharedMemory(
            # The first allocation, so that addresses in it are low.
            table=smem.allocate_array(
                Uint8, 1 if self.table is None else TABLE_BYTES, byte_alignment=16
            ),
            rows=smem.allocate_array(Uint8, num_slots * self.stage_bytes, byte_alignment=128),
            scales=smem.allocate_array(
                Uint8, config.num_teams * _BATCH_ROWS * self.scale_pitch, byte_alignment=16
            ),
            batches=smem.allocate_array(Int32, self.table_words, byte_alignment=16),
            partial=smem.allocate_array(Uint32, 2 * config.num_compute_warps, byte_alignment=8),
            full=smem.allocate_array(Int64, num_slots, byte_alignment=8),
            empty=smem.allocate_array(Int64, num_slots, byte_alignment=8),
            num_taken=smem.allocate_array(Int32, 1, byte_alignment=4),
        )
        tid = cute.arch.thread_idx()[0]
        if tid < num_slots:
            cute.arch.mbarrier_init(shared.full + tid, 1)
            cute.arch.mbarrier_init(shared.empty + tid, config.warps_per_row)
        if tid == 0:
            store_shared(shared.num_taken.toint(), [Uint32(0)])
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        warp = cute.arch.make_warp_uniform(tid // WARP_SIZE)
        if warp == config.num_compute_warps:
            team = tid % WARP_SIZE
            if team < config.num_teams:
                self.load(x, index, offs, team, shared)
        else:
            threads = config.num_compute_warps * WARP_SIZE
            thread = cute.arch.block_idx()[0] * threads + tid
            step = cute.arch.grid_dim()[0] * threads
            self.global_scale_writer.write(amax, scale_inv, scale, thread, step)
            if const_expr(self.table is not None):
                self.table.fill(shared.table.toint(), tid, threads)
            lane = self.lane_of(warp, self.cols(x), shared)
            self.compute(index, offs, Output(amax, codes, scales), lane, shared)

    def cols(self, x: cute.Tensor) -> Int32:
        """Return K, the columns of the elements."""
        return x.shape[len(x.shape) - 1] if self.maker is None else self.maker.cols(x)

    def row_of(self, item: Int32, r: Int32 | int) -> Int32:
        """Return the row in its slot tile of row ``r`` of batch ``item``.

        ``item`` may count batches of the tile or of all tiles. If scales lie in tiles, four rows of
        a batch share 16 bytes of a scale tile.
        """
        # Masks and shifts suffice because no operand is negative; signed divisions would check.
        batch = item & (_BATCHES - 1)
        if not self.is_tiled:
            return batch * _BATCH_ROWS + r
        return 2 * batch + (r >> 2) + ((r & 3) << 5)

    # ---- loader

    @cute.jit
    def load(
        self,
        x: cute.Tensor,
        index: cute.Tensor | None,
        offs: cute.Tensor | None,
        team: Int32,
        shared: RowSharedMemory,
    ) -> None:
        """Run the loader: lane ``team`` fills the stages of its team.

        Args:
            x: (T, K) or (G, N, K). Input. Its width follows from the prologue.
            index: (R,) int32. Rows of x if rows are gathered, else None.
            offs: (G,) int32, None if uniform.
            team: Team that this lane serves.
            shared: Shared memory.
        """
        config = self.config
        groups = GroupCursor.from_tensors(x, offs, index)
        stage, phase, group = Int32(0), Int32(1), Int32(0)
        num_items = groups.used_tiles() * _BATCHES
        item, first_row, num_rows = Int32(0), Int32(0), Int32(0)
        while item < num_items:
            # Lanes continue together once each of them has a batch with rows.
            num_rows = Int32(0)
            while item < num_items and self.row_of(item, 0) >= num_rows:
                item = self.take(shared)
                if item < num_items:
                    tile, group, first_row, num_rows = groups.seek(item // _BATCHES, group)
                    if tile != item // _BATCHES:
                        num_rows = Int32(0)
                        self.skip(tile * _BATCHES, shared)
            if item < num_items:
                for r in cutlass.range(0, _BATCH_ROWS, config.rows_per_warp, unroll=1):
                    if self.row_of(item, r) < num_rows:
                        slot = team * config.num_stages + stage
                        wait_each(shared.empty + slot, phase)
                        if r == 0:
                            address = shared.batches.toint() + slot * 16
                            store_shared(
                                address, [Uint32(v) for v in (item, first_row, num_rows, group)]
                            )
                        self.load_rows(x, index, item, r, first_row, num_rows, slot, shared)
                        stage, phase = self.next_stage(stage, phase)
        slot = team * config.num_stages + stage
        wait_each(shared.empty + slot, phase)
        store_shared(shared.batches.toint() + slot * 16, [Uint32(0)] * 4)
        cute.arch.mbarrier_arrive(shared.full + slot)

    def take(self, shared: RowSharedMemory) -> Int32:
        """Return the next batch of the CTA that no team has taken."""
        index = cute.arch.atomic_add(shared.num_taken, Int32(1), sem="relaxed", scope="cta")
        return cute.arch.block_idx()[0] + index * cute.arch.grid_dim()[0]

    def skip(self, item: Int32, shared: RowSharedMemory) -> None:
        """Advance the counter so that no batch before ``item`` is taken."""
        ctas = cute.arch.grid_dim()[0]
        least = (item - cute.arch.block_idx()[0] + ctas - 1) // ctas
        cute.arch.atomic_max(shared.num_taken, least, sem="relaxed", scope="cta")

    @cute.jit
    def load_rows(
        self,
        x: cute.Tensor,
        index: cute.Tensor | None,
        item: Int32,
        r: Int32,
        first_row: Int32,
        num_rows: Int32,
        slot: Int32,
        shared: RowSharedMemory,
    ) -> None:
        """Start the copies of rows ``r`` and following of a batch into one stage, if they exist."""
        row_bytes = self.row_bytes(x)
        rows = [self.row_of(item, r + i) for i in range(self.config.rows_per_warp)]
        size = Int32(0)
        for row in rows:
            if row < num_rows:
                size += row_bytes
        full_barrier = shared.full + slot
        cute.arch.mbarrier_arrive_and_expect_tx(full_barrier, size)
        target = shared.rows.toint() + slot * self.stage_bytes
        for i in range_constexpr(len(rows)):
            if rows[i] < num_rows:
                x_row = first_row + rows[i]
                if const_expr(index is not None):
                    x_row = indexed(index, x_row, x.shape[0])
                source = x.iterator.toint() + Int64(x_row) * row_bytes
                bulk_load(target + i * self.row_pitch, source, row_bytes, full_barrier)

    def row_bytes(self, x: cute.Tensor) -> Int32:
        """Return the bytes of an input row."""
        if self.maker is None:
            return x.shape[len(x.shape) - 1] * DTYPE_BYTES[self.dtype]
        return self.maker.row_bytes(self.cols(x))

    @cute.jit
    def next_stage(self, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """Return the stage and phase that follow."""
        stage += 1
        if stage == self.config.num_stages:
            stage = Int32(0)
            phase ^= 1
        return stage, phase

    # ---- teams

    def lane_of(self, warp: Int32, cols: Int32, shared: RowSharedMemory) -> Lane:
        """Return the position of the calling thread in its team."""
        team = warp // self.config.warps_per_row
        lane = cute.arch.thread_idx()[0] - team * self.team_threads
        row_in_team, lane_in_row = (
            (lane // self.lanes_per_row, lane % self.lanes_per_row)
            if self.config.rows_per_warp > 1
            else (0, lane)
        )
        num_chunks = cols // self.chunk_size
        scales_address = shared.scales.toint() + team * (_BATCH_ROWS * self.scale_pitch)
        table = None if self.table is None else shared.table.toint()
        return Lane(team, warp, lane, row_in_team, lane_in_row, num_chunks, scales_address, table)

    @cute.jit
    def compute(
        self,
        index: cute.Tensor | None,
        offs: cute.Tensor | None,
        out: Output,
        lane: Lane,
        shared: RowSharedMemory,
    ) -> None:
        """Run a team: quantize the rows of its batches and write their scales.

        Args:
            index: (R,) int32 rows of x, unused here.
            offs: (G,) int32, None if uniform; unused here.
            out: Output buffers.
            lane: Position of the thread.
            shared: Shared memory.
        """
        if const_expr(self.writes_scales and self.is_tiled):
            self.clear_scale_padding(lane)
        stage, phase, parity = Int32(0), Int32(0), Int32(0)
        num_rows = Int32(1)
        while num_rows > 0:
            slot = lane.team * self.config.num_stages + stage
            cute.arch.mbarrier_wait(shared.full + slot, phase)
            words = load_shared(shared.batches.toint() + slot * 16, 4)
            batch = RowBatch(*[Int32(word) for word in words])
            num_rows = batch.num_rows
            if num_rows > 0:
                stage, phase, parity = self.convert_batch(
                    out, batch, lane, stage, phase, parity, shared
                )
                if const_expr(self.writes_scales):
                    # Write zeros for the following batches without rows. The first batch of the
                    # next tile ends the loop: its row number is 0.
                    item = batch.item + 1
                    while self.row_of(item, Int32(0)) >= num_rows:
                        self.write_scales(out.scales, batch._replace(item=item), None, lane)
                        item += 1

    @cute.jit
    def convert_batch(
        self,
        out: Output,
        batch: RowBatch,
        lane: Lane,
        stage: Int32,
        phase: Int32,
        parity: Int32,
        shared: RowSharedMemory,
    ) -> tuple[Int32, Int32, Int32]:
        """Quantize the rows of a batch; scales go through shared memory.

        Returns:
            The stage and phase after the batch, and the parity of ``RowSharedMemory.partial``.
        """
        config = self.config
        global_scale = self.codec.zero_global_scale()
        if const_expr(config.takes_amax):
            global_scale = self.codec.global_scale(out.amax[batch.group])
        for r in cutlass.range(0, _BATCH_ROWS, config.rows_per_warp, unroll=1):
            row = self.row_of(batch.item, r + lane.row_in_team)
            scales_address = lane.scales_address + (r + lane.row_in_team) * self.scale_pitch
            live = row < batch.num_rows
            # The first row of a stage is the lowest. If it does not exist, there is no stage.
            if self.row_of(batch.item, r) < batch.num_rows:
                slot = lane.team * config.num_stages + stage
                cute.arch.mbarrier_wait(shared.full + slot, phase)
                source = shared.rows.toint() + slot * self.stage_bytes
                words, a = self.load_row(source, lane)
                self.release(shared.empty + slot)
                stage, phase = self.next_stage(stage, phase)
                row_scale = global_scale
                if const_expr(config.computes_amax):
                    amax = self.row_amax(a, lane, parity, shared)
                    row_scale = self.codec.global_scale(amax)
                    parity ^= 1
                    if live and lane.lane_in_row == 0:
                        out.amax[batch.first_row + row] = amax
                target = row_address(out.codes, batch.first_row + row)
                self.write_row(words, a, row_scale, target, live, scales_address, lane)
            if const_expr(self.writes_scales):
                if not live:
                    self.clear_row_scales(scales_address, lane)
        if const_expr(self.writes_scales):
            self.sync_team(lane.team)
            self.write_scales(out.scales, batch, lane.scales_address, lane)
            # Otherwise the barrier in the next row's amax keeps warps from overwriting scales
            # that others still read.
            if const_expr(not config.computes_amax):
                self.sync_team(lane.team)
        cute.arch.sync_warp()
        return stage, phase, parity

    # ---- scales of a batch

    def scale_words(self, lane: Lane) -> Int32:
        """Return the 32-bit words of scales that a row has."""
        blocks = (lane.num_chunks + (self.lanes_per_block - 1)) // self.lanes_per_block
        return (blocks + (SF_TILE_COLS - 1)) // SF_TILE_COLS if self.is_tiled else blocks

    @cute.jit
    def clear_scale_padding(self, lane: Lane) -> None:
        """Zero the scales past K of the last tile of a row; rows write only the scales before K."""
        if lane.lane < _BATCH_ROWS:
            blocks = (lane.num_chunks + (self.lanes_per_block - 1)) // self.lanes_per_block
            end = self.scale_words(lane) * SF_TILE_COLS
            for b in cutlass.range(blocks, end, unroll=1):
                store_shared_byte(lane.scales_address + lane.lane * self.scale_pitch + b, Uint32(0))
        self.sync_team(lane.team)

    @cute.jit
    def clear_row_scales(self, scales_address: Int32, lane: Lane) -> None:
        """Zero the scales of a row of a batch that does not exist."""
        for j in cutlass.range(
            lane.lane_in_row, self.scale_words(lane), self.lanes_per_row, unroll=1
        ):
            store_shared(scales_address + j * 4, [Uint32(0)])

    @cute.jit
    def write_scales(
        self, scales: cute.Tensor, batch: RowBatch, scales_address: Int32 | None, lane: Lane
    ) -> None:
        """Write the scales of a batch to global memory, one word per row and lane.

        ``scales_address`` is None for a batch without rows, which gets zeros.
        """
        sectors = self.sectors(scales, batch)
        words = self.scale_words(lane)
        for j in cutlass.range(lane.lane, words, self.team_threads, unroll=1):
            sector = [Uint32(0)] * _BATCH_ROWS
            if const_expr(scales_address is not None):
                for r in range_constexpr(_BATCH_ROWS):
                    sector[r] = load_shared(scales_address + (r * self.scale_pitch + j * 4), 1)[0]
            if const_expr(self.is_tiled):
                store_global(sectors + j * SF_TILE_BYTES, sector)
            else:
                slots = scales.shape[len(scales.shape) - 1]
                store_global(sectors + Int64(j) * slots * 4, sector)

    def sectors(self, scales: cute.Tensor, batch: RowBatch) -> Int64:
        """Return the global address of the first 32-byte sector of a batch's scales."""
        tile = batch.item // _BATCHES
        address = scales.iterator.toint() + batch.item % _BATCHES * _SECTOR
        rank = len(scales.shape)
        if self.is_tiled:
            return address + Int64(tile) * scales.shape[rank - 2] * SF_TILE_BYTES
        slot = Int64(tile) * TILE_ROWS
        if self.config.grouping == "uniform":
            # Each group has its own scale matrix.
            slot += Int64(batch.group) * (scales.shape[1] - 1) * scales.shape[2]
        return address + slot * 4
