"""Quantizer of gathered rows, token by token: a token is read and converted once for all its rows.

If rows share nothing with other rows of their group, the rows of one token have equal codes and
scales, one row in each of its top_k groups. A team takes a token as ``row_quantizer`` takes a row.
Scales leave shared memory one word per store and not one sector: on an H200 that is a third of the
time for FP8Block and more than half for NVFP4 (perf/results/quantize_h200.md).
"""

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64, const_expr, cute

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.groups import GroupCursor, group_start
from cute_kernels.device.launch import compact
from cute_kernels.device.memory import (
    bulk_load,
    load_shared,
    store_global,
    store_global_past_l1,
    store_shared,
    wait_each,
)
from cute_kernels.device.scales import row_scales_at
from cute_kernels.layout.shapes import SF_TILE_BYTES
from cute_kernels.layout.slots import TILE_ROWS

from .config import TokensConfig
from .row_quantizer import Output, RowsQuantizer
from .row_team import Lane, RowSharedMemory, row_address
from .row_values import RowValuesQuantizer

#: Bytes that a warp stores per row: the addresses of its codes and of its scales, 0 if there is no
#: row.
_DESTINATION_BYTES = 16


class TokensQuantizer(RowsQuantizer):
    """Persistent kernel that quantizes tokens. See the module's docstring."""

    def __init__(self, config: TokensConfig):
        super().__init__(config)
        self.table_words = config.num_compute_warps * WARP_SIZE * _DESTINATION_BYTES // 4

    @classmethod
    def fake_args(cls, config: TokensConfig) -> tuple[Any, ...]:
        """Return stand-ins for the arguments of ``RowsQuantizer``, with a (T, top_k) index."""
        x, _, *remaining = super().fake_args(config)
        return (x, compact(Int32, x.shape[0], cute.sym_int(), align=4), *remaining)

    @cute.jit
    def load(
        self,
        x: cute.Tensor,
        index: cute.Tensor,
        offs: cute.Tensor | None,
        team: Int32,
        shared: RowSharedMemory,
    ) -> None:
        """Run the loader: lane ``team`` starts the copies of its team's tokens.

        Args:
            x: (T, K) input.
            index: (T, top_k) int32 rows of each token.
            offs: (G,) int32.
            team: Team that this lane serves.
            shared: Shared memory.
        """
        stage, phase, row_bytes = Int32(0), Int32(1), self.row_bytes(x)
        token, step = self.tokens(team)
        while token < x.shape[0]:
            slot = team * self.config.num_stages + stage
            full_barrier = shared.full + slot
            wait_each(shared.empty + slot, phase)
            cute.arch.mbarrier_arrive_and_expect_tx(full_barrier, row_bytes)
            source = x.iterator.toint() + Int64(token) * row_bytes
            bulk_load(
                shared.rows.toint() + slot * self.stage_bytes, source, row_bytes, full_barrier
            )
            stage, phase = self.next_stage(stage, phase)
            token += step

    def tokens(self, team: Int32) -> tuple[Int32, Int32]:
        """Return the first token of a team and the distance to its next one.

        A small number of tokens is spread over many CTAs.
        """
        ctas = cute.arch.grid_dim()[0]
        return team * ctas + cute.arch.block_idx()[0], ctas * self.config.num_teams

    @cute.jit
    def compute(
        self,
        index: cute.Tensor,
        offs: cute.Tensor | None,
        out: Output,
        lane: Lane,
        shared: RowSharedMemory,
    ) -> None:
        """Run a team: quantize its tokens, and write codes and scales to all rows of each token.

        Args:
            index: (T, top_k) int32 rows of each token.
            offs: (G,) int32.
            out: Output buffers.
            lane: Position of the thread.
            shared: Shared memory.
        """
        config, top_k = self.config, index.shape[1]
        groups = GroupCursor(offs, offs.shape[0], out.codes.shape[0], Int32(0))
        if const_expr(self.writes_scales):
            if const_expr(self.is_tiled):
                self.clear_scale_padding(lane)
            self.clear_other_slots(groups, out.scales, lane)
        stage, phase, parity = Int32(0), Int32(0), Int32(0)
        token, step = self.tokens(lane.team)
        while token < index.shape[0]:
            slot = lane.team * config.num_stages + stage
            cute.arch.mbarrier_wait(shared.full + slot, phase)
            words, amaxes = self.load_row(shared.rows.toint() + slot * self.stage_bytes, lane)
            self.release(shared.empty + slot)
            stage, phase = self.next_stage(stage, phase)
            global_scale, amax = self.codec.zero_global_scale(), Float32(0.0)
            if const_expr(config.computes_amax):
                amax = self.row_amax(amaxes, lane, parity, shared)
                global_scale = self.codec.global_scale(amax)
                parity ^= 1
            for first_choice in cutlass.range(0, top_k, WARP_SIZE, unroll=1):
                destination_lane = lane._replace(
                    destinations=shared.batches.toint()
                    + lane.warp * (WARP_SIZE * _DESTINATION_BYTES),
                    num_destinations=cutlass.min(top_k - first_choice, Int32(WARP_SIZE)),
                )
                row = self.find(index, groups, out, token, first_choice, destination_lane)
                if const_expr(config.computes_amax):
                    if row >= 0 and lane.lane < WARP_SIZE:
                        out.amax[row] = amax
                self.write_row(
                    words,
                    amaxes,
                    global_scale,
                    Int64(0),
                    Boolean(True),
                    lane.scales_address,
                    destination_lane,
                )
                if const_expr(self.writes_scales):
                    self.sync_team(lane.team)
                    self.write_token_scales(out.scales, destination_lane)
                    self.sync_team(lane.team)
                # The next destinations overwrite these.
                cute.arch.sync_warp()
            token += step

    @cute.jit
    def find(
        self,
        index: cute.Tensor,
        groups: GroupCursor,
        out: Output,
        token: Int32,
        first_choice: Int32,
        lane: Lane,
    ) -> Int32:
        """Store the addresses of the token's rows in shared memory, one row per lane of a warp.

        Returns:
            The row of this lane, or -1 if it has none.
        """
        choice = first_choice + cute.arch.lane_idx()
        row, codes_address, scales_address = Int32(-1), Int64(0), Int64(0)
        if choice < index.shape[1]:
            row = index[token, choice]
            if row < 0 or row >= groups.end_row():
                row = Int32(-1)
            else:
                codes_address = row_address(out.codes, row)
                if const_expr(self.writes_scales):
                    group, _ = groups.group_of_row(row, Int32(0))
                    start = group_start(groups.offs, group, groups.num_rows)
                    slot = row - start + (start // TILE_ROWS + group) * TILE_ROWS
                    scales_address = self.slot_address(out.scales, slot)
        words = [
            Uint32(address >> shift)
            for address in (codes_address, scales_address)
            for shift in (0, 32)
        ]
        store_shared(lane.destinations + cute.arch.lane_idx() * _DESTINATION_BYTES, words)
        cute.arch.sync_warp()
        return row

    @cute.jit
    def put(self, offset: Int64, words: list[Uint32], lane: Lane) -> None:
        """Store words ``offset`` bytes after the start of each row of the token."""
        for i in cutlass.range(lane.num_destinations, unroll=4):
            row_start = _address(load_shared(lane.destinations + i * _DESTINATION_BYTES, 2))
            if row_start != 0:
                store_global_past_l1(row_start + offset, words)

    # ---- scales

    def slot_address(self, scales: cute.Tensor, slot: Int32) -> Int64:
        """Return the global address of the first scales of the row in a slot."""
        return (
            row_scales_at(scales, slot)
            if self.is_tiled
            else scales.iterator.toint() + Int64(slot) * 4
        )

    def word_pitch(self, scales: cute.Tensor) -> Int64:
        """Return the bytes from one word of a row's scales to the next."""
        return Int64(SF_TILE_BYTES if self.is_tiled else scales.shape[len(scales.shape) - 1] * 4)

    @cute.jit
    def write_token_scales(self, scales: cute.Tensor, lane: Lane) -> None:
        """Write the scales of a token to the slots of its rows, one word per lane."""
        for j in cutlass.range(lane.lane, self.scale_words(lane), self.team_threads, unroll=1):
            word, offset = (
                load_shared(lane.scales_address + j * 4, 1),
                Int64(j) * self.word_pitch(scales),
            )
            for i in cutlass.range(lane.num_destinations, unroll=4):
                row_start = _address(
                    load_shared(
                        lane.destinations + (i * _DESTINATION_BYTES + _DESTINATION_BYTES // 2), 2
                    )
                )
                if row_start != 0:
                    store_global(row_start + offset, word)

    @cute.jit
    def clear_other_slots(self, groups: GroupCursor, scales: cute.Tensor, lane: Lane) -> None:
        """Zero the scales of slots after the last row of each group, up to whole slot tiles."""
        warps, words = self.config.num_compute_warps, self.scale_words(lane)
        warp = cute.arch.block_idx()[0] * warps + lane.warp
        for item in cutlass.range(
            warp, groups.num_groups * words, cute.arch.grid_dim()[0] * warps, unroll=1
        ):
            group = item // words
            tile, start, end = groups.tile_span(group)
            count = cutlass.max(end - start, Int32(0))
            num_slots = (count + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS
            for row in cutlass.range(count + cute.arch.lane_idx(), num_slots, WARP_SIZE, unroll=1):
                address = self.slot_address(scales, tile * TILE_ROWS + row)
                store_global(
                    address + Int64(item - group * words) * self.word_pitch(scales), [Uint32(0)]
                )


class TokenValuesQuantizer(TokensQuantizer, RowValuesQuantizer):
    """``TokensQuantizer`` that writes values instead of codes and scales."""


def _address(words: list[Uint32]) -> Int64:
    """Return the address that two words hold, the low half first."""
    low, high = (Uint64(word) for word in words)
    return Int64(high << 32 | low)
