"""The rowwise copy row by row: a row's amax and its codes from one read of the row.

Work comes in packets of eight rows of a 128-row slot tile whose scales fill whole 32-byte sectors:
rows 2p and 2p + 1 of each of its four quarters where scales lie in 128x4 tiles, rows that follow
each other where they are MN-major. A team of warps takes a packet row by row (one warp takes
several short rows at once), keeps the row in registers between the amax and the codes, collects the
packet's scales in shared memory and writes them once, a sector a lane. Where the second level is
per group it is given, and rows are on their own.

A lane has pieces of 16 elements, so that its codes are stored beside its neighbours'. Of a longer
block neighbouring lanes have a piece each, and take its amax by shuffles.

Roles:     one loader warp, lane t serves team t | num_teams teams of warps_per_row warps.
Pipeline:  rows, loader -> team: full: one arrival and the rows' bytes; empty: one arrival a warp.
           Teams take packets with rows from a counter; rows past the end carry no bytes, and alone
           no stage.

On an H200, 65536 x 7168 bf16: FP8 with given amaxes 96 % of a copy's rate, FP8Block 94, MXFP8 95.
What an activation makes of bf16 there by a table, FP8Block of SwiGLU of 262144 x 1536 at 88 %.

Counted by perf run counts at 1024 rows of bf16 on sm_100a, row-scaled NVFP4: 6.4 PTX instructions
an element at K = 4096, 6.6 at 7168, 7.9 at 256; 2.00 bytes read. FP8 at 2048 rows of 4096: 3.46, of
which 1.1 name pairs of registers and are nothing in machine code.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr

from cute_kernels.device.absmax import absmax_words, fmax, warp_max
from cute_kernels.device.activations import TABLE_BYTES
from cute_kernels.device.codecs import Level, codec_of
from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.groups import Grouping, indexed
from cute_kernels.device.launch import env_stream
from cute_kernels.device.memory import (
    bulk_load,
    load_shared,
    store_global,
    store_global_pair,
    store_shared,
    store_shared_byte,
    wait_each,
)
from cute_kernels.device.ptx import asm, bits_as_f32, f32_as_bits, select
from cute_kernels.layout.shapes import SF_TILE_BYTES, SF_TILE_COLS
from cute_kernels.layout.slots import TILE_ROWS

from .activated_elements import maker_of
from .config import DTYPE_BYTES, K_MULTIPLE, RowsConfig
from .fakes import FakeBuffers
from .global_scales import LevelWriter

_PACKET_ROWS = 8
_PACKETS = 16  # of a 128-row slot tile
_SECTOR = 32


class SharedMemory(NamedTuple):
    """Pointers into shared memory: stages of ``rows_per_warp`` rows, with ``packets`` saying what
    begins in each.

    ``scales`` are bytes of each team's packet, row by row, ``partial`` amaxes of each warp's part
    of a row, two deep; ``table`` is what elements are made by, ``taken`` how many packets of the
    CTA are taken.
    """

    table: cute.Pointer
    rows: cute.Pointer
    scales: cute.Pointer
    packets: cute.Pointer
    partial: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer
    taken: cute.Pointer


class Output(NamedTuple):
    """The buffers of the copy; ``amax`` is an input where it is per group, and may be missing."""

    amax: cute.Tensor | None
    codes: cute.Tensor
    scales: cute.Tensor | None


class Packet(NamedTuple):
    """What a stage says of the packet that begins in it.

    ``item`` is ``_PACKETS`` times the number of its slot tile, ``first`` the matrix row of that
    tile's first row, ``count`` the rows of the tile that exist; none end the work.
    """

    item: Int32
    first: Int32
    count: Int32
    group: Int32


class Lane(NamedTuple):
    """Where a thread is in its team.

    ``lane`` counts in the team; ``part`` is which of the rows that the team holds at once, shared
    by lanes ``of_row``. ``staged`` is where in shared memory the team's scale bytes are, ``places``
    where the ``num_places`` rows go that a token is written to.
    """

    team: Int32
    warp: Int32
    lane: Int32
    part: Int32 | int
    of_row: Int32
    num_pieces: Int32
    staged: Int32
    table: Int32 | None = None
    places: Int32 | int = 0
    num_places: Int32 | int = 0


class RowsQuantizer:
    """Persistent quantizer by rows, see the module."""

    def __init__(self, config: RowsConfig):
        self.config = config
        self.dtype = config.dtype
        self.arch = config.arch
        self.codec = codec_of(config.format, config.dtype, config.arch)
        self.levels = LevelWriter(self.codec)
        #: What a lane takes at once: a block, or its part of one that ``sharing`` lanes have.
        self.piece = min(self.codec.block, K_MULTIPLE)
        #: Pieces that are looked at together, whether the row has all of them.
        self.at_once = 2
        if config.arch == "sm_100a" and not self.codec.has_scales and config.rows_per_warp <= 4:
            # Of 16-bit types a 16-byte chunk, which eight lanes of a row read without conflicts in
            # the order of their codes.
            self.piece, self.at_once = 8, 8 if config.is_light else 4
        self.sharing = self.codec.block // self.piece if self.codec.has_scales else 1
        self.maker = maker_of(config)
        self.table = None if self.maker is None else self.maker.table
        self.piece_words = self.piece * DTYPE_BYTES[config.dtype] // 4
        prologue = config.prologue
        #: Bytes that a piece takes of each input.
        self.piece_bytes = self.piece * DTYPE_BYTES[prologue.dtype if prologue else config.dtype]
        self.team_threads = config.warps_per_row * WARP_SIZE
        self.lanes_per_row = self.team_threads // config.rows_per_warp
        self.pieces_per_lane = config.max_cols // self.piece // self.lanes_per_row
        #: Bytes of the longest row of the input.
        self.row_pitch = config.max_cols * self.piece_bytes // self.piece
        if self.maker:
            self.row_pitch = self.maker.row_bytes(config.max_cols)
        self.stage_bytes = self.row_pitch * config.rows_per_warp
        #: Bytes of a scale, and of those of a row.
        self.scale_bytes = self.codec.fmt.scale.element.bits // 8 if self.codec.has_scales else 1
        self.scale_pitch = config.max_cols // self.codec.block * self.scale_bytes
        self.num_slots = config.num_teams * config.num_stages
        #: Words that ``SharedMemory.packets`` takes.
        self.table_words = 4 * self.num_slots
        self.num_threads = (config.num_compute_warps + 1) * WARP_SIZE
        #: Whether rows are taken in the order of scales in 128x4 tiles.
        self.is_tiled = (
            self.codec.fmt.has_scale_tiles if self.codec.has_scales else not config.is_light
        )
        #: Whether scales are written, by way of shared memory.
        self.writes_scales = self.codec.has_scales
        self.keeps_nan = config.fmt.amaxes_keep_nan
        #: Whether the amax of a block is asked for.
        self.needs_amax = self.codec.has_scales or config.computes_amax

    @staticmethod
    def fake_args(config: RowsConfig) -> tuple[Any, ...]:
        fake = FakeBuffers(config.dtype, config.grouping, config.format)
        inputs = (fake.x(config.prologue), fake.index(config.prologue), fake.offs())
        output = (fake.level(config.computes_amax), fake.codes(), fake.scales())
        return (*inputs, *output, *fake.results()[:2], Int32(1), env_stream())

    @cute.jit
    def __call__(self, *args: Any) -> None:
        *given, num_sms, stream = args
        self.kernel(*given).launch(
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
        config = self.config
        num_slots = self.num_slots
        smem = cutlass.memory.SmemAllocator()
        shared = SharedMemory(
            # The first, so that addresses in it are low.
            table=smem.allocate_array(
                Uint8, 1 if self.table is None else TABLE_BYTES, byte_alignment=16
            ),
            rows=smem.allocate_array(Uint8, num_slots * self.stage_bytes, byte_alignment=128),
            scales=smem.allocate_array(
                Uint8, config.num_teams * _PACKET_ROWS * self.scale_pitch, byte_alignment=16
            ),
            packets=smem.allocate_array(Int32, self.table_words, byte_alignment=16),
            partial=smem.allocate_array(Uint32, 2 * config.num_compute_warps, byte_alignment=8),
            full=smem.allocate_array(Int64, num_slots, byte_alignment=8),
            empty=smem.allocate_array(Int64, num_slots, byte_alignment=8),
            taken=smem.allocate_array(Int32, 1, byte_alignment=4),
        )
        tid = cute.arch.thread_idx()[0]
        if tid < num_slots:
            cute.arch.mbarrier_init(shared.full + tid, 1)
            cute.arch.mbarrier_init(shared.empty + tid, config.warps_per_row)
        if tid == 0:
            store_shared(shared.taken.toint(), [Uint32(0)])
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
            self.levels.write(amax, scale_inv, scale, thread, step)
            if const_expr(self.table is not None):
                self.table.fill(shared.table.toint(), tid, threads)
            lane = self.lane_of(warp, self.cols(x), shared)
            self.compute(index, offs, Output(amax, codes, scales), lane, shared)

    def cols(self, x: cute.Tensor) -> Int32:
        return x.shape[len(x.shape) - 1] if self.maker is None else self.maker.cols(x)

    def row_of(self, item: Int32, r: Int32 | int) -> Int32:
        """The slot tile's row that is row ``r`` of packet ``item``, of all packets or the tile's.

        Of those whose scales lie in tiles, four share 16 bytes of a scale tile.
        """
        # Neither is negative, which divisions of signed numbers would ask.
        packet = item & (_PACKETS - 1)
        if not self.is_tiled:
            return packet * _PACKET_ROWS + r
        return 2 * packet + (r >> 2) + ((r & 3) << 5)

    # ---- loader

    @cute.jit
    def load(
        self,
        x: cute.Tensor,
        index: cute.Tensor | None,
        offs: cute.Tensor | None,
        team: Int32,
        shared: SharedMemory,
    ) -> None:
        config = self.config
        groups = Grouping.of(x, offs, index)
        stage, phase, group = Int32(0), Int32(1), Int32(0)
        num_items = groups.tiles_to_last() * _PACKETS
        item, first, count = Int32(0), Int32(0), Int32(0)
        while item < num_items:
            # Lanes go on together: the packet of each is one with rows.
            count = Int32(0)
            while item < num_items and self.row_of(item, 0) >= count:
                item = self.take(shared)
                if item < num_items:
                    tile, group, first, count = groups.seek(item // _PACKETS, group)
                    if tile != item // _PACKETS:
                        count = Int32(0)
                        self.skip(tile * _PACKETS, shared)
            if item < num_items:
                for r in cutlass.range(0, _PACKET_ROWS, config.rows_per_warp, unroll=1):
                    if self.row_of(item, r) < count:
                        slot = team * config.num_stages + stage
                        wait_each(shared.empty + slot, phase)
                        if r == 0:
                            place = shared.packets.toint() + slot * 16
                            store_shared(place, [Uint32(v) for v in (item, first, count, group)])
                        self.load_rows(x, index, item, r, first, count, slot, shared)
                        stage, phase = self.next_stage(stage, phase)
        slot = team * config.num_stages + stage
        wait_each(shared.empty + slot, phase)
        store_shared(shared.packets.toint() + slot * 16, [Uint32(0)] * 4)
        cute.arch.mbarrier_arrive(shared.full + slot)

    def take(self, shared: SharedMemory) -> Int32:
        """The next packet of the CTA that no team has."""
        taken = cute.arch.atomic_add(shared.taken, Int32(1), sem="relaxed", scope="cta")
        return cute.arch.block_idx()[0] + taken * cute.arch.grid_dim()[0]

    def skip(self, item: Int32, shared: SharedMemory) -> None:
        """Take no packets before ``item``."""
        ctas = cute.arch.grid_dim()[0]
        least = (item - cute.arch.block_idx()[0] + ctas - 1) // ctas
        cute.arch.atomic_max(shared.taken, least, sem="relaxed", scope="cta")

    @cute.jit
    def load_rows(
        self,
        x: cute.Tensor,
        index: cute.Tensor | None,
        item: Int32,
        r: Int32,
        first: Int32,
        count: Int32,
        slot: Int32,
        shared: SharedMemory,
    ) -> None:
        """Fill a stage with rows ``r`` and on of a packet, as far as they exist."""
        row_bytes = self.row_bytes(x)
        rows = [self.row_of(item, r + i) for i in range(self.config.rows_per_warp)]
        size = Int32(0)
        for row in rows:
            if row < count:
                size += row_bytes
        bar = shared.full + slot
        cute.arch.mbarrier_arrive_and_expect_tx(bar, size)
        target = shared.rows.toint() + slot * self.stage_bytes
        for i in range_constexpr(len(rows)):
            if rows[i] < count:
                of_x = first + rows[i]
                if const_expr(index is not None):
                    of_x = indexed(index, of_x, x.shape[0])
                source = x.iterator.toint() + Int64(of_x) * row_bytes
                bulk_load(target + i * self.row_pitch, source, row_bytes, bar)

    def row_bytes(self, x: cute.Tensor) -> Int32:
        if self.maker is None:
            return x.shape[len(x.shape) - 1] * DTYPE_BYTES[self.dtype]
        return self.maker.row_bytes(self.cols(x))

    @cute.jit
    def next_stage(self, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        stage += 1
        if stage == self.config.num_stages:
            stage = Int32(0)
            phase ^= 1
        return stage, phase

    # ---- teams

    def lane_of(self, warp: Int32, cols: Int32, shared: SharedMemory) -> Lane:
        team = warp // self.config.warps_per_row
        lane = cute.arch.thread_idx()[0] - team * self.team_threads
        part, of_row = (
            (lane // self.lanes_per_row, lane % self.lanes_per_row)
            if self.config.rows_per_warp > 1
            else (0, lane)
        )
        num_pieces = cols // self.piece
        staged = shared.scales.toint() + team * (_PACKET_ROWS * self.scale_pitch)
        table = None if self.table is None else shared.table.toint()
        return Lane(team, warp, lane, part, of_row, num_pieces, staged, table)

    @cute.jit
    def compute(
        self,
        index: cute.Tensor | None,
        offs: cute.Tensor | None,
        out: Output,
        lane: Lane,
        shared: SharedMemory,
    ) -> None:
        """A team's packets: rows to codes, scale bytes to shared memory, then out."""
        if const_expr(self.writes_scales and self.is_tiled):
            self.clear_scale_padding(lane)
        stage, phase, parity = Int32(0), Int32(0), Int32(0)
        count = Int32(1)
        while count > 0:
            slot = lane.team * self.config.num_stages + stage
            cute.arch.mbarrier_wait(shared.full + slot, phase)
            words = load_shared(shared.packets.toint() + slot * 16, 4)
            packet = Packet(*[Int32(word) for word in words])
            count = packet.count
            if count > 0:
                stage, phase, parity = self.convert_packet(
                    out, packet, lane, stage, phase, parity, shared
                )
                if const_expr(self.writes_scales):
                    # Of packets without rows behind the tile's last, too; the first has some.
                    item = packet.item + 1
                    while self.row_of(item, Int32(0)) >= count:
                        self.write_scales(out.scales, packet._replace(item=item), None, lane)
                        item += 1

    @cute.jit
    def convert_packet(
        self,
        out: Output,
        packet: Packet,
        lane: Lane,
        stage: Int32,
        phase: Int32,
        parity: Int32,
        shared: SharedMemory,
    ) -> tuple[Int32, Int32, Int32]:
        config = self.config
        level = self.codec.zero_level()
        if const_expr(config.takes_amax):
            level = self.codec.global_scale(out.amax[packet.group])
        for r in cutlass.range(0, _PACKET_ROWS, config.rows_per_warp, unroll=1):
            row = self.row_of(packet.item, r + lane.part)
            scales_at = lane.staged + (r + lane.part) * self.scale_pitch
            live = row < packet.count
            # The first of a stage's rows is the lowest: without it there is no stage.
            if self.row_of(packet.item, r) < packet.count:
                slot = lane.team * config.num_stages + stage
                cute.arch.mbarrier_wait(shared.full + slot, phase)
                source = shared.rows.toint() + slot * self.stage_bytes
                words, a = self.load_row(source, lane)
                self.release(shared.empty + slot)
                stage, phase = self.next_stage(stage, phase)
                of_row = level
                if const_expr(config.computes_amax):
                    g = self.row_amax(a, lane, parity, shared)
                    of_row = self.codec.global_scale(g)
                    parity ^= 1
                    if live and lane.of_row == 0:
                        out.amax[packet.first + row] = g
                target = row_address(out.codes, packet.first + row)
                self.write_row(words, a, of_row, target, live, scales_at, lane)
            if const_expr(self.writes_scales):
                if not live:
                    self.clear_row_scales(scales_at, lane)
        if const_expr(self.writes_scales):
            self.sync_team(lane.team)
            self.write_scales(out.scales, packet, lane.staged, lane)
            # Otherwise the next row's amax keeps larger teams from overwriting what is read.
            if const_expr(not config.computes_amax):
                self.sync_team(lane.team)
        cute.arch.sync_warp()
        return stage, phase, parity

    @cute.jit
    def release(self, empty: cute.Pointer) -> None:
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty)

    @cute.jit
    def sync_team(self, team: Int32) -> None:
        if const_expr(self.config.warps_per_row == 1):
            cute.arch.sync_warp()
        else:
            cute.arch.barrier(barrier_id=team + 1, number_of_threads=self.team_threads)

    # ---- scales of a packet

    def scale_words(self, lane: Lane) -> Int32:
        blocks = (lane.num_pieces + (self.sharing - 1)) // self.sharing
        return (blocks + (SF_TILE_COLS - 1)) // SF_TILE_COLS if self.is_tiled else blocks

    @cute.jit
    def clear_scale_padding(self, lane: Lane) -> None:
        """Zero the scales past K of a row's last tile; rows write only the ones before."""
        if lane.lane < _PACKET_ROWS:
            blocks = (lane.num_pieces + (self.sharing - 1)) // self.sharing
            end = self.scale_words(lane) * SF_TILE_COLS
            for b in cutlass.range(blocks, end, unroll=1):
                store_shared_byte(lane.staged + lane.lane * self.scale_pitch + b, Uint32(0))
        self.sync_team(lane.team)

    @cute.jit
    def clear_row_scales(self, scales_at: Int32, lane: Lane) -> None:
        """Zero the scales of a row of a packet that does not exist."""
        for j in cutlass.range(lane.of_row, self.scale_words(lane), self.lanes_per_row, unroll=1):
            store_shared(scales_at + j * 4, [Uint32(0)])

    @cute.jit
    def write_scales(
        self, scales: cute.Tensor, packet: Packet, staged: Int32 | None, lane: Lane
    ) -> None:
        """A packet's scales to global memory, or zeros if it has no rows: a word a row."""
        sectors = self.sectors(scales, packet)
        words = self.scale_words(lane)
        for j in cutlass.range(lane.lane, words, self.team_threads, unroll=1):
            sector = [Uint32(0)] * _PACKET_ROWS
            if const_expr(staged is not None):
                for r in range_constexpr(_PACKET_ROWS):
                    sector[r] = load_shared(staged + (r * self.scale_pitch + j * 4), 1)[0]
            if const_expr(self.is_tiled):
                store_global(sectors + j * SF_TILE_BYTES, sector)
            else:
                slots = scales.shape[len(scales.shape) - 1]
                store_global(sectors + Int64(j) * slots * 4, sector)

    def sectors(self, scales: cute.Tensor, packet: Packet) -> Int64:
        """The address of a packet's first sector."""
        tile = packet.item // _PACKETS
        at = scales.iterator.toint() + packet.item % _PACKETS * _SECTOR
        rank = len(scales.shape)
        if self.is_tiled:
            return at + Int64(tile) * scales.shape[rank - 2] * SF_TILE_BYTES
        slot = Int64(tile) * TILE_ROWS
        if self.config.grouping == "uniform":
            # Each group has a matrix of its own.
            slot += Int64(packet.group) * (scales.shape[1] - 1) * scales.shape[2]
        return at + slot * 4

    # ---- a row

    @cute.jit
    def load_row(self, source: Int32, lane: Lane) -> tuple[cute.Tensor, cute.Tensor]:
        """A lane's blocks of its row in a stage, and their amaxes, which are 0 past K.

        The 16-byte chunks of a block are read in an order that depends on the lane, so that eight
        lanes touch all banks. ``quantize_row`` puts the codes back in order.
        """
        words = cute.make_rmem_tensor(self.pieces_per_lane * self.piece_words, Uint32)
        a = cute.make_rmem_tensor(self.pieces_per_lane, Float32)
        chunks = self.piece_bytes // 16
        chunk_words = self.piece_words // chunks
        twist = self.twist(lane.lane)
        row_at = source + lane.lane // self.lanes_per_row * self.row_pitch
        lane_at = row_at + lane.of_row * self.piece_bytes
        places = [lane_at + (twist ^ c) * 16 for c in range(chunks)]
        # Past K there is garbage, but without a branch all loads are under way at once.
        for i in range_constexpr(self.pieces_per_lane):
            for c in range_constexpr(chunks):
                if const_expr(self.maker is None):
                    at = places[c] + i * (self.lanes_per_row * self.piece_bytes)
                    chunk = load_shared(at, 4)
                else:
                    first = (lane.of_row + i * self.lanes_per_row) * self.piece
                    first += (twist ^ c) * self.maker.unit
                    units = self.maker.places(row_at, first, lane.num_pieces * self.piece)
                    chunk = self.maker.make([load_shared(at, 4) for at in units], True, lane.table)
                for w in range_constexpr(chunk_words):
                    words[i * self.piece_words + c * chunk_words + w] = chunk[w]
        for i in range_constexpr(self.pieces_per_lane):
            a[i] = Float32(0.0)
            if const_expr(self.needs_amax):
                if lane.of_row + i * self.lanes_per_row < lane.num_pieces:
                    a[i] = absmax_words(self.block(words, i), self.dtype, self.arch, self.keeps_nan)
            for bit in range_constexpr(self.sharing.bit_length() - 1):
                a[i] = fmax(
                    a[i], cute.arch.shuffle_sync_bfly(a[i], offset=1 << bit), self.keeps_nan
                )
        return words, a

    def block(self, words: cute.Tensor, i: int) -> list[Uint32]:
        return [words[i * self.piece_words + w] for w in range(self.piece_words)]

    def twist(self, lane: Int32) -> Int32:
        """The chunk of its blocks that a lane reads first; lanes 128 bytes apart differ."""
        lanes_per_line = 128 // self.piece_bytes
        return (lane // lanes_per_line) % (self.piece_bytes // 16)

    @cute.jit
    def row_amax(self, a: cute.Tensor, lane: Lane, parity: Int32, shared: SharedMemory) -> Float32:
        """The row's amax from its blocks' amaxes. Also a barrier of the team."""
        g = a[0]
        for i in range_constexpr(1, self.pieces_per_lane):
            g = fmax(g, a[i], self.keeps_nan)
        per_team = self.config.warps_per_row
        if const_expr(self.lanes_per_row < WARP_SIZE):
            for i in range_constexpr(self.lanes_per_row.bit_length() - 1):
                g = fmax(g, cute.arch.shuffle_sync_bfly(g, offset=1 << i), self.keeps_nan)
        else:
            g = warp_max(g)
        if const_expr(per_team > 1):
            # Two buffers: a warp that is a row ahead writes the other one.
            at = shared.partial.toint() + parity * (4 * self.config.num_compute_warps)
            of_warp = cute.arch.lane_idx()
            if of_warp == 0:
                store_shared(at + lane.warp * 4, [f32_as_bits(g)])
            self.sync_team(lane.team)
            other = lane.team * per_team + of_warp % per_team
            g = warp_max(bits_as_f32(load_shared(at + other * 4, 1)[0]))
        return g

    @cute.jit
    def write_row(
        self,
        words: cute.Tensor,
        a: cute.Tensor,
        level: Level,
        target: Int64,
        live: Boolean,
        scales_at: Int32,
        lane: Lane,
    ) -> None:
        """Write what becomes of a row, if it is ``live``; ``target`` is its place in the output."""
        if live:
            self.quantize_row(words, a, level, target, scales_at, lane)

    @cute.jit
    def quantize_row(
        self,
        words: cute.Tensor,
        a: cute.Tensor,
        level: Level,
        target: Int64,
        scales_at: Int32,
        lane: Lane,
    ) -> None:
        """Codes of a lane's pieces to global memory, the scales of blocks to shared memory."""
        left, step = lane.num_pieces - lane.of_row, self.lanes_per_row
        for i in range_constexpr(0, self.pieces_per_lane, self.at_once):
            last = min(i + self.at_once, self.pieces_per_lane) - 1
            if const_expr(self.at_once > 2):
                _, (factor, _) = self.codec.two_scales(a[i], a[i], level)
                if last * step < left:
                    for j in range_constexpr(i, last + 1):
                        self.write_piece(words, j, factor, None, target, scales_at, lane)
                else:
                    for j in range_constexpr(i, last):
                        if j * step < left:
                            self.write_piece(words, j, factor, None, target, scales_at, lane)
            elif i * step < left:
                stored, factors = self.codec.two_scales(a[i], a[last], level)
                for j in range_constexpr(i, last + 1):
                    if const_expr(j == i) or j * step < left:
                        self.write_piece(
                            words, j, factors[j - i], stored[j - i], target, scales_at, lane
                        )

    @cute.jit
    def write_piece(
        self,
        words: cute.Tensor,
        j: int,
        factor: Float32,
        stored: Uint32 | None,
        target: Int64,
        scales_at: Int32,
        lane: Lane,
    ) -> None:
        after, block = j * self.lanes_per_row, self.block(words, j)
        if const_expr(self.at_once > 2 and self.piece_bytes == 16):
            code = self.codec.encode_eight(block, factor)
            store_global_pair(target + lane.of_row * self.piece, after * self.piece, code)
        else:
            codes = self.codec.encode_row(block, factor)
            size = 4 * len(codes)
            self.put(
                target + lane.of_row * size + after * size,
                self.untwist(codes, self.twist(lane.lane)),
                lane,
            )
        if const_expr(self.writes_scales):
            self.stage(stored, scales_at, lane.of_row + after)

    def put(self, at: Int64, words: list[Uint32], lane: Lane) -> None:
        """Store what is ``at`` a place of the output, as ``write_row`` takes it."""
        store_global(at, words)

    @cute.jit
    def stage(self, stored: Uint32, scales_at: Int32, piece: Int32) -> None:
        if const_expr(self.sharing == 1):
            store_shared_byte(scales_at + piece, stored)
        elif piece % self.sharing == 0:
            at = scales_at + piece // self.sharing * self.scale_bytes
            if const_expr(self.is_tiled):
                store_shared_byte(at, stored)
            else:
                store_shared(at, [stored])

    def untwist(self, codes: list[Uint32], twist: Int32) -> list[Uint32]:
        """Code words of a block whose chunks were read in twisted order, put in order."""
        chunks = self.piece_bytes // 16
        if chunks > len(codes):  # a chunk's codes are half a word
            turn = (twist & 1) * 16
            text = "shf.l.wrap.b32 $0, $1, $1, $2;"
            codes = [asm(text, [Uint32], [word, turn]) for word in codes]
            twist = twist >> 1
            chunks = len(codes)
        # Bit b of the twist trades chunks 1 << b apart.
        per_chunk = len(codes) // chunks
        for bit in range(chunks.bit_length() - 1):
            swapped = ((twist >> bit if bit else twist) & 1) != 0
            distance = per_chunk << bit
            codes = [select(swapped, codes[i ^ distance], word) for i, word in enumerate(codes)]
        return codes


@cute.jit
def row_address(codes: cute.Tensor, row: Int32) -> Int64:
    """Address of a row of codes; the rows of uniform groups follow each other at one pitch."""
    pitch = Int64(codes.stride[len(codes.stride) - 2]) * (codes.element_type.width // 8)
    return codes.iterator.toint() + Int64(row) * pitch
