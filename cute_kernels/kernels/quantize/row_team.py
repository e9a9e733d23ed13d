"""Work of a team on one row of the row quantizer: load, amax, codes and scales.

A lane has chunks of 16 elements, so that it stores its codes beside those of its neighbours. If a
block is longer, neighbouring lanes have one chunk of it each, and compute its amax by shuffles.
"""

from typing import NamedTuple

from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from cute_kernels.arch import get_arch
from cute_kernels.device.absmax import absmax_words, fmax, warp_max
from cute_kernels.device.codecs import GlobalScaleRegisters, codec_of
from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.memory import (
    load_shared,
    store_global,
    store_global_pair,
    store_shared,
    store_shared_byte,
)
from cute_kernels.device.ptx import asm, bits_as_f32, f32_as_bits, select

from .activated_elements import element_maker
from .config import DTYPE_BYTES, K_MULTIPLE, RowsConfig


class RowSharedMemory(NamedTuple):
    """Pointers into shared memory.

    Attributes:
        table: Table of activation factors, if any.
        rows: Stages of ``rows_per_warp`` input rows.
        scales: Scale bytes of each team's batch, row by row.
        batches: A ``RowBatch`` per stage, for the batch that begins there.
        partial: fp32 amaxes of each warp's share of a row, in two buffers.
        full: Barriers of stages that the loader has filled.
        empty: Barriers of stages that the team has read.
        num_taken: Number of batches that the CTA has taken, int32.
    """

    table: cute.Pointer
    rows: cute.Pointer
    scales: cute.Pointer
    batches: cute.Pointer
    partial: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer
    num_taken: cute.Pointer


class Lane(NamedTuple):
    """Position of a thread in its team, and addresses that it uses.

    Attributes:
        team: Team in the CTA.
        warp: Warp in the CTA.
        lane: Thread in the team.
        row_in_team: Which of the rows that the team holds at once the thread works on.
        lane_in_row: Thread among those that share the row.
        num_chunks: Chunks of a row.
        scales_address: Shared-memory address of the team's scale bytes.
        table: Shared-memory address of the table of activation factors, if any.
        destinations: Shared-memory address of the output rows of a token (``token_quantizer``).
        num_destinations: Number of those rows.
    """

    team: Int32
    warp: Int32
    lane: Int32
    row_in_team: Int32 | int
    lane_in_row: Int32
    num_chunks: Int32
    scales_address: Int32
    table: Int32 | None = None
    destinations: Int32 | int = 0
    num_destinations: Int32 | int = 0


class RowTeam:
    """Warps that hold a row in registers, quantize it and write its codes.

    Args:
        config: Configuration of the kernel.
    """

    def __init__(self, config: RowsConfig):
        self.config = config
        self.dtype = config.dtype
        self.arch = config.arch
        self.codec = codec_of(config.format, config.dtype, config.arch)
        #: Elements of a lane chunk: a block, or a share of one that ``lanes_per_block`` lanes have.
        self.chunk_size = min(self.codec.block, K_MULTIPLE)
        #: Chunks that share one check against the end of the row.
        self.chunks_at_once = 2
        if (
            get_arch(config.arch).has_f32x2
            and not self.codec.has_scales
            and config.rows_per_warp <= 4
        ):
            # 16 bytes of 16-bit types: eight lanes of a row read them without bank conflicts in the
            # order of their codes.
            self.chunk_size, self.chunks_at_once = 8, 8 if config.is_light else 4
        self.lanes_per_block = self.codec.block // self.chunk_size if self.codec.has_scales else 1
        self.maker = element_maker(config)
        self.table = None if self.maker is None else self.maker.table
        self.chunk_words = self.chunk_size * DTYPE_BYTES[config.dtype] // 4
        prologue = config.prologue
        #: Bytes that a chunk takes of each input.
        self.chunk_bytes = (
            self.chunk_size * DTYPE_BYTES[prologue.dtype if prologue else config.dtype]
        )
        self.team_threads = config.warps_per_row * WARP_SIZE
        self.lanes_per_row = self.team_threads // config.rows_per_warp
        self.chunks_per_lane = config.max_cols // self.chunk_size // self.lanes_per_row
        #: Bytes of the longest row of the input.
        self.row_pitch = config.max_cols * self.chunk_bytes // self.chunk_size
        if self.maker:
            self.row_pitch = self.maker.row_bytes(config.max_cols)
        self.stage_bytes = self.row_pitch * config.rows_per_warp
        #: Bytes of a scale, and of the scales of a row.
        self.scale_bytes = self.codec.fmt.scale.element.bits // 8 if self.codec.has_scales else 1
        self.scale_pitch = config.max_cols // self.codec.block * self.scale_bytes
        #: True if batches follow the order of scales in 128x4 tiles.
        self.is_tiled = (
            self.codec.fmt.has_scale_tiles if self.codec.has_scales else not config.is_light
        )
        #: True if the kernel writes scales, through shared memory.
        self.writes_scales = self.codec.has_scales
        self.keeps_nan = config.fmt.amaxes_keep_nan
        #: True if the kernel needs amaxes of blocks.
        self.needs_amax = self.codec.has_scales or config.computes_amax

    @cute.jit
    def release(self, empty: cute.Pointer) -> None:
        """Arrive at the barrier of a stage that the warp has read."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(empty)

    @cute.jit
    def sync_team(self, team: Int32) -> None:
        """Synchronize the threads of a team."""
        if const_expr(self.config.warps_per_row == 1):
            cute.arch.sync_warp()
        else:
            cute.arch.barrier(barrier_id=team + 1, number_of_threads=self.team_threads)

    @cute.jit
    def load_row(self, source: Int32, lane: Lane) -> tuple[cute.Tensor, cute.Tensor]:
        """Load a lane's chunks of its row from a stage, and compute their amaxes.

        The 16-byte parts of a chunk are read in an order that depends on the lane, so that eight
        lanes touch all banks. ``quantize_row`` puts the codes back in order.

        Returns:
            The words of the chunks, and one fp32 amax per chunk, which is 0 past K. If lanes share
            a block, the amax is that of the block.
        """
        words = cute.make_rmem_tensor(self.chunks_per_lane * self.chunk_words, Uint32)
        amaxes = cute.make_rmem_tensor(self.chunks_per_lane, Float32)
        chunks = self.chunk_bytes // 16
        chunk_words = self.chunk_words // chunks
        swizzle_xor = self.swizzle_xor(lane.lane)
        row_address = source + lane.lane // self.lanes_per_row * self.row_pitch
        lane_address = row_address + lane.lane_in_row * self.chunk_bytes
        addresses = [lane_address + (swizzle_xor ^ c) * 16 for c in range(chunks)]
        # Past K this loads garbage, but without branches all loads are in flight at once.
        for i in range_constexpr(self.chunks_per_lane):
            for c in range_constexpr(chunks):
                if const_expr(self.maker is None):
                    address = addresses[c] + i * (self.lanes_per_row * self.chunk_bytes)
                    chunk = load_shared(address, 4)
                else:
                    column = (lane.lane_in_row + i * self.lanes_per_row) * self.chunk_size
                    column += (swizzle_xor ^ c) * self.maker.unit
                    units = self.maker.addresses(
                        row_address, column, lane.num_chunks * self.chunk_size
                    )
                    chunk = self.maker.make(
                        [load_shared(address, 4) for address in units], True, lane.table
                    )
                for w in range_constexpr(chunk_words):
                    words[i * self.chunk_words + c * chunk_words + w] = chunk[w]
        for i in range_constexpr(self.chunks_per_lane):
            amaxes[i] = Float32(0.0)
            if const_expr(self.needs_amax):
                if lane.lane_in_row + i * self.lanes_per_row < lane.num_chunks:
                    amaxes[i] = absmax_words(
                        self.block(words, i), self.dtype, self.arch, self.keeps_nan
                    )
            for bit in range_constexpr(self.lanes_per_block.bit_length() - 1):
                amaxes[i] = fmax(
                    amaxes[i],
                    cute.arch.shuffle_sync_bfly(amaxes[i], offset=1 << bit),
                    self.keeps_nan,
                )
        return words, amaxes

    def block(self, words: cute.Tensor, i: int) -> list[Uint32]:
        """Return the words of chunk ``i``."""
        return [words[i * self.chunk_words + w] for w in range(self.chunk_words)]

    def swizzle_xor(self, lane: Int32) -> Int32:
        """Return which 16-byte part of its chunks a lane reads first.

        The k-th part that it reads is part ``swizzle_xor ^ k``. Lanes 128 bytes apart get different
        numbers.
        """
        lanes_per_line = 128 // self.chunk_bytes
        return (lane // lanes_per_line) % (self.chunk_bytes // 16)

    @cute.jit
    def row_amax(
        self, amaxes: cute.Tensor, lane: Lane, parity: Int32, shared: RowSharedMemory
    ) -> Float32:
        """Return the amax of the row from those of its chunks; also a barrier of the team."""
        amax = amaxes[0]
        for i in range_constexpr(1, self.chunks_per_lane):
            amax = fmax(amax, amaxes[i], self.keeps_nan)
        warps_per_team = self.config.warps_per_row
        if const_expr(self.lanes_per_row < WARP_SIZE):
            for i in range_constexpr(self.lanes_per_row.bit_length() - 1):
                amax = fmax(amax, cute.arch.shuffle_sync_bfly(amax, offset=1 << i), self.keeps_nan)
        else:
            amax = warp_max(amax)
        if const_expr(warps_per_team > 1):
            # A warp that is one row ahead writes the other of the two buffers.
            address = shared.partial.toint() + parity * (4 * self.config.num_compute_warps)
            lane_in_warp = cute.arch.lane_idx()
            if lane_in_warp == 0:
                store_shared(address + lane.warp * 4, [f32_as_bits(amax)])
            self.sync_team(lane.team)
            warp = lane.team * warps_per_team + lane_in_warp % warps_per_team
            amax = warp_max(bits_as_f32(load_shared(address + warp * 4, 1)[0]))
        return amax

    @cute.jit
    def write_row(
        self,
        words: cute.Tensor,
        amaxes: cute.Tensor,
        global_scale: GlobalScaleRegisters,
        target: Int64,
        live: Boolean,
        scales_address: Int32,
        lane: Lane,
    ) -> None:
        """Write the codes and scales of a row, if it is ``live``.

        ``target`` is the global address of the row in the output.
        """
        if live:
            self.quantize_row(words, amaxes, global_scale, target, scales_address, lane)

    @cute.jit
    def quantize_row(
        self,
        words: cute.Tensor,
        amaxes: cute.Tensor,
        global_scale: GlobalScaleRegisters,
        target: Int64,
        scales_address: Int32,
        lane: Lane,
    ) -> None:
        """Write the codes of a lane's chunks to global memory, and scales to shared memory."""
        remaining, step = lane.num_chunks - lane.lane_in_row, self.lanes_per_row
        for i in range_constexpr(0, self.chunks_per_lane, self.chunks_at_once):
            last_chunk = min(i + self.chunks_at_once, self.chunks_per_lane) - 1
            if const_expr(self.chunks_at_once > 2):
                _, (factor, _) = self.codec.two_scales(amaxes[i], amaxes[i], global_scale)
                if last_chunk * step < remaining:
                    for j in range_constexpr(i, last_chunk + 1):
                        self.write_chunk(words, j, factor, None, target, scales_address, lane)
                else:
                    for j in range_constexpr(i, last_chunk):
                        if j * step < remaining:
                            self.write_chunk(words, j, factor, None, target, scales_address, lane)
            elif i * step < remaining:
                stored, factors = self.codec.two_scales(amaxes[i], amaxes[last_chunk], global_scale)
                for j in range_constexpr(i, last_chunk + 1):
                    if const_expr(j == i) or j * step < remaining:
                        self.write_chunk(
                            words, j, factors[j - i], stored[j - i], target, scales_address, lane
                        )

    @cute.jit
    def write_chunk(
        self,
        words: cute.Tensor,
        j: int,
        factor: Float32,
        stored: Uint32 | None,
        target: Int64,
        scales_address: Int32,
        lane: Lane,
    ) -> None:
        """Encode chunk ``j``, store its codes and stage its scale."""
        offset, block = j * self.lanes_per_row, self.block(words, j)
        if const_expr(self.chunks_at_once > 2 and self.chunk_bytes == 16):
            code = self.codec.encode_eight(block, factor)
            store_global_pair(
                target + lane.lane_in_row * self.chunk_size, offset * self.chunk_size, code
            )
        else:
            codes = self.codec.encode_row(block, factor)
            size = 4 * len(codes)
            self.put(
                target + lane.lane_in_row * size + offset * size,
                self.unswizzle(codes, self.swizzle_xor(lane.lane)),
                lane,
            )
        if const_expr(self.writes_scales):
            self.stage(stored, scales_address, lane.lane_in_row + offset)

    def put(self, offset: Int64, words: list[Uint32], lane: Lane) -> None:
        """Store words at the global address ``offset``; subclasses write several rows."""
        store_global(offset, words)

    @cute.jit
    def stage(self, stored: Uint32, scales_address: Int32, chunk: Int32) -> None:
        """Store the scale of a block in shared memory, by the lane that has its first chunk."""
        if const_expr(self.lanes_per_block == 1):
            store_shared_byte(scales_address + chunk, stored)
        elif chunk % self.lanes_per_block == 0:
            address = scales_address + chunk // self.lanes_per_block * self.scale_bytes
            if const_expr(self.is_tiled):
                store_shared_byte(address, stored)
            else:
                store_shared(address, [stored])

    def unswizzle(self, codes: list[Uint32], swizzle_xor: Int32) -> list[Uint32]:
        """Return the code words of a chunk in order.

        The 16-byte parts of the chunk were read in swizzled order.
        """
        chunks = self.chunk_bytes // 16
        if chunks > len(codes):  # the codes of a 16-byte part are half a word
            turn = (swizzle_xor & 1) * 16
            text = "shf.l.wrap.b32 $0, $1, $1, $2;"
            codes = [asm(text, [Uint32], [word, turn]) for word in codes]
            swizzle_xor = swizzle_xor >> 1
            chunks = len(codes)
        # Bit b of swizzle_xor exchanges parts that are 1 << b apart.
        per_chunk = len(codes) // chunks
        for bit in range(chunks.bit_length() - 1):
            swapped = ((swizzle_xor >> bit if bit else swizzle_xor) & 1) != 0
            distance = per_chunk << bit
            codes = [select(swapped, codes[i ^ distance], word) for i, word in enumerate(codes)]
        return codes


@cute.jit
def row_address(codes: cute.Tensor, row: Int32) -> Int64:
    """Return the global address of a row of codes; uniform groups have one pitch throughout."""
    pitch = Int64(codes.stride[len(codes.stride) - 2]) * (codes.element_type.width // 8)
    return codes.iterator.toint() + Int64(row) * pitch
