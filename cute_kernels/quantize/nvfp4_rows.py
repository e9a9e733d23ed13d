"""Row-scaled NVFP4: a row's amax and its codes from one read of the row.

Work comes in packets of eight rows of a 128-row slot tile: rows 2p and 2p + 1 of each of its four
quarters, whose scales of one 128x4 tile fill exactly one 32-byte sector. A team of warps takes a
packet row by row (one warp takes several short rows at once), keeps the row in registers between
the amax and the codes, collects the packet's scale bytes in shared memory and writes them once, a
sector a lane.

Roles:     one loader warp, lane t serves team t | num_teams teams of warps_per_row warps.
Pipeline:  rows, loader -> team: full: one arrival and the rows' bytes; empty: one arrival a warp.
           Rows past the end of the group carry no bytes and, but for a packet's first, no stage.

Counted by perf.count_quantize at 1024 rows of bf16: 6.6 PTX instructions an element at K = 4096,
6.9 at 7168, 7.4 at 256, 10.1 at 128; 2.00 bytes read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, cute

from cute_kernels.device.encode import encode_row_block
from cute_kernels.device.groups import Grouping, next_item
from cute_kernels.device.memory import (
    bulk_load,
    load_shared,
    store_global,
    store_shared,
    store_shared_byte,
    wait_each,
)
from cute_kernels.device.nvfp4 import (
    absmax_words,
    fmax,
    scale_pair,
    second_level,
    warp_max,
)
from cute_kernels.device.ptx import asm, bits_as_f32, f32_as_bits, select
from cute_kernels.formats import NVFP4
from cute_kernels.layout.shapes import SF_TILE_BYTES, SF_TILE_COLS
from cute_kernels.quantize.config import DTYPE_BYTES, RowScaledConfig
from cute_kernels.quantize.fakes import FakeBuffers, env_stream

__all__ = ["RowScaledQuantizer"]

_BLOCK = NVFP4.sf_vec_size
_WARP = 32
_PACKET_ROWS = 8
_PACKETS = 16  # of a 128-row slot tile
_SECTOR = 32


class SharedMemory(NamedTuple):
    """Pointers into shared memory.

    Attributes:
        rows: num_teams * num_stages stages of ``rows_per_warp`` rows.
        scales: scale bytes of each team's packet, row by row.
        packets: with a packet's first stage, its number, its tile's first row and row count, and
            the group; no rows end the work.
        partial: amax of each warp's part of a row, two deep.
        full: arrival barriers of the stages.
        empty: release barriers of the stages.
    """

    rows: cute.Pointer
    scales: cute.Pointer
    packets: cute.Pointer
    partial: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer


class RowScaledQuantizer:
    """Persistent row-scaled quantizer, see the module."""

    def __init__(self, config: RowScaledConfig):
        self.config = config
        self.dtype = config.dtype
        self.arch = config.arch
        self.block_bytes = _BLOCK * DTYPE_BYTES[config.dtype]
        self.team_threads = config.warps_per_row * _WARP
        self.lanes_per_row = self.team_threads // config.rows_per_warp
        self.blocks_per_lane = config.max_cols // _BLOCK // self.lanes_per_row
        self.row_capacity = config.max_cols * DTYPE_BYTES[config.dtype]
        self.stage_bytes = self.row_capacity * config.rows_per_warp
        self.block_words = self.block_bytes // 4
        self.scale_pitch = config.max_cols // _BLOCK
        self.num_threads = (config.num_compute_warps + 1) * _WARP

    @staticmethod
    def fake_args(config: RowScaledConfig) -> tuple[Any, ...]:
        """Stand-ins for (x, offs, amax, codes, scales, num_sms, stream)."""
        fake = FakeBuffers(config.dtype, config.grouping == "uniform")
        amax = fake.amax(per_row=not config.group_amax)
        return (fake.x(), fake.offs(), amax, fake.codes(), fake.scales(), Int32(1), env_stream())

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        offs: cute.Tensor | None,
        amax: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor | None,
        num_sms: Int32,
        stream: Any,
    ) -> None:
        self.kernel(x, offs, amax, codes, scales).launch(
            grid=[num_sms, 1, 1], block=[self.num_threads, 1, 1], stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        offs: cute.Tensor | None,
        amax: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor | None,
    ) -> None:
        config = self.config
        num_slots = config.num_teams * config.num_stages
        smem = cutlass.memory.SmemAllocator()
        shared = SharedMemory(
            rows=smem.allocate_array(Uint8, num_slots * self.stage_bytes, byte_alignment=128),
            scales=smem.allocate_array(
                Uint8, config.num_teams * _PACKET_ROWS * self.scale_pitch, byte_alignment=16
            ),
            packets=smem.allocate_array(Int32, num_slots * 4, byte_alignment=16),
            partial=smem.allocate_array(Uint32, 2 * config.num_compute_warps, byte_alignment=8),
            full=smem.allocate_array(Int64, num_slots, byte_alignment=8),
            empty=smem.allocate_array(Int64, num_slots, byte_alignment=8),
        )
        tid = cute.arch.thread_idx()[0]
        if tid < num_slots:
            cute.arch.mbarrier_init(shared.full + tid, 1)
            cute.arch.mbarrier_init(shared.empty + tid, config.warps_per_row)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        warp = cute.arch.make_warp_uniform(tid // _WARP)
        if warp == config.num_compute_warps:
            team = tid % _WARP
            if team < config.num_teams:
                self.load(x, offs, team, shared)
        else:
            self.compute(x, offs, amax, codes, scales, warp, shared)

    @cute.jit
    def load(
        self,
        x: cute.Tensor,
        offs: cute.Tensor | None,
        team: Int32,
        shared: SharedMemory,
    ) -> None:
        """The loader: a lane finds the packets of its team and starts the copies of their rows."""
        config = self.config
        groups = Grouping.of(x, offs)
        stage, phase, group = Int32(0), Int32(1), Int32(0)
        step = cute.arch.grid_dim()[0] * config.num_teams
        item = cute.arch.block_idx()[0] * config.num_teams + team
        num_items = groups.num_tiles() * _PACKETS
        while item < num_items:
            packet = item % _PACKETS
            tile, group, first, count = groups.seek(item // _PACKETS, group)
            if tile != item // _PACKETS:
                item = next_item(item, step, tile, Int32(_PACKETS))
            else:
                for r in cutlass.range(0, _PACKET_ROWS, config.rows_per_warp, unroll=1):
                    if _packet_row(packet, r) < count or r == 0:
                        slot = team * config.num_stages + stage
                        wait_each(shared.empty + slot, phase)
                        if r == 0:
                            place = shared.packets.toint() + slot * 16
                            store_shared(place, [Uint32(v) for v in (item, first, count, group)])
                        self.load_rows(x, packet, r, first, count, slot, shared)
                        stage, phase = self.next_stage(stage, phase)
                item += step
        slot = team * config.num_stages + stage
        wait_each(shared.empty + slot, phase)
        store_shared(shared.packets.toint() + slot * 16, [Uint32(0)] * 4)
        cute.arch.mbarrier_arrive(shared.full + slot)

    @cute.jit
    def load_rows(
        self,
        x: cute.Tensor,
        packet: Int32,
        r: Int32,
        first: Int32,
        count: Int32,
        slot: Int32,
        shared: SharedMemory,
    ) -> None:
        """Fill a stage with rows ``r`` and on of a packet, as far as they exist."""
        row_bytes = x.shape[len(x.shape) - 1] * DTYPE_BYTES[self.dtype]
        rows = [_packet_row(packet, r + i) for i in range(self.config.rows_per_warp)]
        size = Int32(0)
        for row in rows:
            if row < count:
                size += row_bytes
        bar = shared.full + slot
        if size > 0:
            cute.arch.mbarrier_arrive_and_expect_tx(bar, size)
        else:
            cute.arch.mbarrier_arrive(bar)
        target = shared.rows.toint() + slot * self.stage_bytes
        for i in cutlass.range_constexpr(len(rows)):
            if rows[i] < count:
                source = x.iterator.toint() + Int64(first + rows[i]) * row_bytes
                bulk_load(target + i * self.row_capacity, source, row_bytes, bar)

    @cute.jit
    def next_stage(self, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        stage += 1
        if stage == self.config.num_stages:
            stage = Int32(0)
            phase ^= 1
        return stage, phase

    @cute.jit
    def compute(
        self,
        x: cute.Tensor,
        offs: cute.Tensor | None,
        amax: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor | None,
        warp: Int32,
        shared: SharedMemory,
    ) -> None:
        """A team's packets: rows to codes, scale bytes to shared memory, then out."""
        config = self.config
        team = warp // config.warps_per_row
        lane = cute.arch.thread_idx()[0] - team * self.team_threads
        part, lane_of_row = lane // self.lanes_per_row, lane % self.lanes_per_row
        num_blocks = x.shape[len(x.shape) - 1] // _BLOCK
        staged = shared.scales.toint() + team * (_PACKET_ROWS * self.scale_pitch)
        self.clear_scale_padding(staged, num_blocks, lane)
        stage, phase, parity = Int32(0), Int32(0), Int32(0)
        count = Int32(1)
        while count > 0:
            slot = team * config.num_stages + stage
            cute.arch.mbarrier_wait(shared.full + slot, phase)
            item, first, count, group = (
                Int32(word) for word in load_shared(shared.packets.toint() + slot * 16, 4)
            )
            packet = item % _PACKETS
            if _packet_row(packet, 0) < count:
                g = Float32(0.0)
                if cutlass.const_expr(config.group_amax):
                    g = amax[group]
                for r in cutlass.range(0, _PACKET_ROWS, config.rows_per_warp, unroll=1):
                    row = _packet_row(packet, r + part)
                    scales_at = staged + (r + part) * self.scale_pitch
                    live = row < count
                    # The first of a stage's rows is the lowest: without it there is no stage.
                    if _packet_row(packet, r) < count:
                        slot = team * config.num_stages + stage
                        cute.arch.mbarrier_wait(shared.full + slot, phase)
                        source = shared.rows.toint() + slot * self.stage_bytes
                        words, a = self.load_row(source, lane, num_blocks)
                        self.release(shared.empty + slot)
                        stage, phase = self.next_stage(stage, phase)
                        if cutlass.const_expr(not config.group_amax):
                            g = self.row_amax(a, warp, team, parity, shared)
                            parity ^= 1
                            if live and lane_of_row == 0:
                                amax[first + row] = g
                        target = _row_address(codes, first + row)
                        self.write_row(words, a, g, target, live, scales_at, lane, num_blocks)
                    if not live:
                        self.clear_row_scales(scales_at, lane_of_row, num_blocks)
                self.sync_team(team)
                self.write_scales(scales, item, staged, lane, num_blocks)
                # Otherwise the next row's amax keeps larger teams from overwriting what is read.
                if cutlass.const_expr(config.group_amax):
                    self.sync_team(team)
                cute.arch.sync_warp()
            else:
                self.release(shared.empty + slot)
                stage, phase = self.next_stage(stage, phase)
                if count > 0:
                    self.write_scales(scales, item, None, lane, num_blocks)

    @cute.jit
    def release(self, empty: cute.Pointer) -> None:
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty)

    @cute.jit
    def sync_team(self, team: Int32) -> None:
        if cutlass.const_expr(self.config.warps_per_row == 1):
            cute.arch.sync_warp()
        else:
            cute.arch.barrier(barrier_id=team + 1, number_of_threads=self.team_threads)

    @cute.jit
    def clear_scale_padding(self, staged: Int32, num_blocks: Int32, lane: Int32) -> None:
        """Zero the scales past K of a row's last tile; rows write only the ones before."""
        if lane < _PACKET_ROWS:
            end = (num_blocks + SF_TILE_COLS - 1) // SF_TILE_COLS * SF_TILE_COLS
            for b in cutlass.range(num_blocks, end, unroll=1):
                store_shared_byte(staged + lane * self.scale_pitch + b, Uint32(0))
        cute.arch.sync_warp()

    @cute.jit
    def clear_row_scales(self, scales_at: Int32, lane_of_row: Int32, num_blocks: Int32) -> None:
        """Zero the scales of a row of a packet that does not exist."""
        tiles_along_k = (num_blocks + SF_TILE_COLS - 1) // SF_TILE_COLS
        for j in cutlass.range(lane_of_row, tiles_along_k, self.lanes_per_row, unroll=1):
            store_shared(scales_at + j * SF_TILE_COLS, [Uint32(0)])

    @cute.jit
    def write_scales(
        self,
        scales: cute.Tensor,
        item: Int32,
        staged: Int32 | None,
        lane: Int32,
        num_blocks: Int32,
    ) -> None:
        """A packet's scale bytes to global memory, or zeros if it has no rows."""
        tiles_along_k = (num_blocks + SF_TILE_COLS - 1) // SF_TILE_COLS
        sectors = scales.iterator.toint() + item % _PACKETS * _SECTOR
        sectors += Int64(item // _PACKETS) * tiles_along_k * SF_TILE_BYTES
        for j in cutlass.range(lane, tiles_along_k, self.team_threads, unroll=1):
            sector = [Uint32(0)] * _PACKET_ROWS
            if cutlass.const_expr(staged is not None):
                for r in cutlass.range_constexpr(_PACKET_ROWS):
                    at = staged + (r * self.scale_pitch + j * SF_TILE_COLS)
                    sector[r] = load_shared(at, 1)[0]
            store_global(sectors + j * SF_TILE_BYTES, sector)

    @cute.jit
    def load_row(
        self, source: Int32, lane: Int32, num_blocks: Int32
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """A lane's blocks of its row in a stage, and their amaxes, which are 0 past K.

        The 16-byte chunks of a block are read in an order that depends on the lane, so that eight
        lanes touch all banks. ``quantize_row`` puts the codes back in order.
        """
        words = cute.make_rmem_tensor(self.blocks_per_lane * self.block_words, Uint32)
        a = cute.make_rmem_tensor(self.blocks_per_lane, Float32)
        twist = self.twist(lane)
        lane_of_row = lane % self.lanes_per_row
        lane_at = source + lane // self.lanes_per_row * self.row_capacity
        lane_at += lane_of_row * self.block_bytes
        chunks = self.block_bytes // 16
        places = [lane_at + (twist ^ c) * 16 for c in range(chunks)]
        # Past K there is garbage, but without a branch all loads are under way at once.
        for i in cutlass.range_constexpr(self.blocks_per_lane):
            for c in cutlass.range_constexpr(chunks):
                chunk = load_shared(places[c] + i * (self.lanes_per_row * self.block_bytes), 4)
                for w in cutlass.range_constexpr(4):
                    words[i * self.block_words + c * 4 + w] = chunk[w]
        for i in cutlass.range_constexpr(self.blocks_per_lane):
            a[i] = Float32(0.0)
            if lane_of_row + i * self.lanes_per_row < num_blocks:
                base = i * self.block_words
                block = [words[base + w] for w in range(self.block_words)]
                a[i] = absmax_words(block, self.dtype, self.arch)
        return words, a

    def twist(self, lane: Int32) -> Int32:
        """The chunk of its blocks that a lane reads first; lanes 128 bytes apart differ."""
        lanes_per_line = 128 // self.block_bytes
        return (lane // lanes_per_line) % (self.block_bytes // 16)

    @cute.jit
    def row_amax(
        self, a: cute.Tensor, warp: Int32, team: Int32, parity: Int32, shared: SharedMemory
    ) -> Float32:
        """The row's amax from its blocks' amaxes. Also a barrier of the team."""
        g = a[0]
        for i in cutlass.range_constexpr(1, self.blocks_per_lane):
            g = fmax(g, a[i])
        per_team = self.config.warps_per_row
        if cutlass.const_expr(self.lanes_per_row < _WARP):
            for i in cutlass.range_constexpr(self.lanes_per_row.bit_length() - 1):
                g = fmax(g, cute.arch.shuffle_sync_bfly(g, offset=1 << i))
        else:
            g = warp_max(g)
        if cutlass.const_expr(per_team > 1):
            # Two buffers: a warp that is a row ahead writes the other one.
            at = shared.partial.toint() + parity * (4 * self.config.num_compute_warps)
            lane = cute.arch.lane_idx()
            if lane == 0:
                store_shared(at + warp * 4, [f32_as_bits(g)])
            self.sync_team(team)
            other = team * per_team + lane % per_team
            g = warp_max(bits_as_f32(load_shared(at + other * 4, 1)[0]))
        return g

    @cute.jit
    def write_row(
        self,
        words: cute.Tensor,
        a: cute.Tensor,
        g: Float32,
        target: Int64,
        live: Boolean,
        scales_at: Int32,
        lane: Int32,
        num_blocks: Int32,
    ) -> None:
        """Write what becomes of a row, if it is ``live``; ``target`` is its place in the output."""
        if live:
            self.quantize_row(words, a, g, target, scales_at, lane, num_blocks)

    @cute.jit
    def quantize_row(
        self,
        words: cute.Tensor,
        a: cute.Tensor,
        g: Float32,
        target: Int64,
        scales_at: Int32,
        lane: Int32,
        num_blocks: Int32,
    ) -> None:
        """Codes of a lane's blocks to global memory, their scale bytes to shared memory."""
        s_dec, mult = second_level(g)
        twist = self.twist(lane)
        lane_of_row = lane % self.lanes_per_row
        for i in cutlass.range_constexpr(0, self.blocks_per_lane, 2):
            if lane_of_row + i * self.lanes_per_row < num_blocks:
                last = min(i + 1, self.blocks_per_lane - 1)
                scale_bytes, enc0, enc1 = scale_pair(a[i], a[last], s_dec, mult)
                for j, enc in ((i, enc0), (i + 1, enc1))[: last - i + 1]:
                    block = lane_of_row + j * self.lanes_per_row
                    if cutlass.const_expr(j == i) or block < num_blocks:
                        base = j * self.block_words
                        inputs = [words[base + w] for w in range(self.block_words)]
                        pair = encode_row_block(inputs, enc, self.dtype, self.arch)
                        store_global(target + block * (_BLOCK // 2), self.untwist(pair, twist))
                        byte = Uint32(scale_bytes) >> (8 * (j - i))
                        store_shared_byte(scales_at + block, byte)

    def untwist(self, pair: list[Uint32], twist: Int32) -> list[Uint32]:
        """Code words of a block whose chunks were read in twisted order, put in order."""
        if self.block_bytes == 64:  # a chunk's codes are half a word
            turn = (twist & 1) * 16
            text = "shf.l.wrap.b32 $0, $1, $1, $2;"
            pair = [asm(text, [Uint32], [word, turn]) for word in pair]
            twist = twist >> 1
        low, high = pair
        swapped = (twist & 1) != 0
        return [select(swapped, high, low), select(swapped, low, high)]


def _packet_row(packet: Int32, r: Int32) -> Int32:
    """The slot tile's row that is row ``r`` of a packet: four share 16 bytes of a scale tile."""
    return 2 * packet + r // 4 + 32 * (r % 4)


@cute.jit
def _row_address(codes: cute.Tensor, row: Int32) -> Int64:
    """Address of a row of codes; the rows of uniform groups follow each other at one pitch."""
    pitch = Int64(codes.stride[len(codes.stride) - 2]) * (codes.element_type.width // 8)
    return codes.iterator.toint() + Int64(row) * pitch
