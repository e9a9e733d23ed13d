"""Loader of the gradient quantizer: tiles of the inputs, and the weights of their rows."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.groups import GroupCursor
from cute_kernels.device.memory import load_global_if, store_shared
from cute_kernels.device.ptx import f32_as_bits, select
from cute_kernels.layout.slots import TILE_ROWS

from .geometry import TILE_COLS, TileDescriptor, TileSharedMemory
from .loader import TileLoader, Tma

#: Bytes of the weights of a stage's rows. A counter of rows follows them.
WEIGHTS_BYTES = TILE_ROWS * 4
FACTORS_BYTES = WEIGHTS_BYTES + 16


class GradientInputs(NamedTuple):
    """Inputs of the loader.

    Attributes:
        x: Boxes of x, (R, W).
        grad: Boxes of grad, (R, N).
        weight: (T * top_k,) fp32. Routing weights.
        pair: (R,) int32. Index of each row's weight.
        input_scales: (G,) fp32. Scales of both copies, None each if the format takes none.
        counter: (1,) int32. Counter of tiles.
    """

    x: Tma
    grad: Tma
    weight: cute.Tensor
    pair: cute.Tensor
    input_scales: tuple[cute.Tensor | None, cute.Tensor | None]
    counter: cute.Tensor


class GradientLoader(TileLoader):
    """Loads tiles of the inputs, and the weights of their rows."""

    @cute.jit
    def load(
        self, groups: GroupCursor, cols: Int32, inputs: GradientInputs, shared: TileSharedMemory
    ) -> None:  # type: ignore[override]
        """Load the tiles that the CTA takes from the counter, see ``TileLoader.load``."""
        stage, phase, band_tiles = Int32(0), Int32(1), self.config.band
        col_tiles = (cols + (TILE_COLS - 1)) // TILE_COLS
        num_tiles = groups.used_tiles()
        item, end = cute.arch.block_idx()[0], num_tiles * col_tiles
        while item < end:
            band = item // (band_tiles * col_tiles) * band_tiles
            slot_tile, col_tile = self.tile_of(item, num_tiles, col_tiles)
            group, first_row, num_rows = groups.locate_in_warp(slot_tile)
            least = item
            if num_rows <= 0:
                next_tile = groups.seek(band, Int32(0))[0]
                if next_tile >= band + band_tiles:
                    least = (
                        next_tile // band_tiles * (band_tiles * col_tiles)
                    )  # no rows up to there
            num_taken = self.take(inputs.counter, item, end, least)
            if num_rows > 0:
                weights = self.read_weights(inputs, first_row, num_rows)
                scales = [
                    Int32(0) if scale is None else Int32(f32_as_bits(scale[group]))
                    for scale in inputs.input_scales
                ]
                cute.arch.mbarrier_wait(shared.empty + stage, phase)
                tile = TileDescriptor(slot_tile, col_tile, first_row, num_rows, group, *scales)
                self.describe(shared, stage, tile)
                self.load_tile(tile, inputs, stage, stage, shared)
                self.store_weights(weights, shared.factors.toint() + stage * FACTORS_BYTES)
                self.announce(shared, stage)
                phase ^= stage
                stage ^= 1
            item = self.next(inputs.counter, num_taken, end)
        cute.arch.mbarrier_wait(shared.empty + stage, phase)
        self.describe(shared, stage, TileDescriptor(*[Int32(0)] * 7))
        self.announce(shared, stage)

    @cute.jit
    def take(self, counter: cute.Tensor, item: Int32, end: Int32, least: Int32) -> Int32:
        """Return in the first lane how many items have been taken.

        The request is made before the answer is needed. CTAs began with items of their own. The
        next item is not before ``least``.
        """
        num_taken = Int32(0)
        if cute.arch.lane_idx() == 0:
            if least > item:
                least = cutlass.min(least, end) - cute.arch.grid_dim()[0]
                cute.arch.atomic_max(counter.iterator, least, sem="relaxed", scope="gpu")
            num_taken = cute.arch.atomic_add(counter.iterator, Int32(1), sem="relaxed", scope="gpu")
        return num_taken

    @cute.jit
    def next(self, counter: cute.Tensor, num_taken: Int32, end: Int32) -> Int32:
        """Return the item that follows ``num_taken`` taken ones.

        The CTA whose request is the last of all clears the counter.
        """
        if cute.arch.lane_idx() == 0 and num_taken == end - 1:
            cute.arch.atomic_exch(counter.iterator, Int32(0), sem="relaxed", scope="gpu")
        return cute.arch.shuffle_sync(num_taken, 0) + cute.arch.grid_dim()[0]

    def read_weights(
        self, inputs: GradientInputs, first_row: Int32, num_rows: Int32
    ) -> list[Uint32]:
        """Return the weight of a lane's row in each 32 rows, or 0 if the row has none."""
        loaded, pairs = [], inputs.weight.shape[0]
        for i in range(TILE_ROWS // WARP_SIZE):
            row = i * WARP_SIZE + cute.arch.lane_idx()
            loaded += load_global_if(
                inputs.pair.iterator.toint() + Int64(first_row + row) * 4, 4, row, num_rows
            )
        pair_indices = [
            Int32(select(Int32(address) < 0, Uint32(pairs), address)) for address in loaded
        ]
        address = inputs.weight.iterator.toint()
        return [
            load_global_if(address + Int64(pair) * 4, 4, pair, pairs)[0] for pair in pair_indices
        ]

    @cute.jit
    def store_weights(self, weights: list[Uint32], address: Int32) -> None:
        """Write weights to shared memory, and reset the counter of rows that follows them."""
        for i, p in enumerate(weights):
            store_shared(address + (i * WARP_SIZE + cute.arch.lane_idx()) * 4, [p])
        with cute.arch.elect_one():
            store_shared(address + WEIGHTS_BYTES, [Uint32(0)])

    def sources(self, tile: TileDescriptor, inputs: GradientInputs) -> list[tuple[Tma, Int32]]:
        """Return the boxes of A, of B if the activation is gated, and of grad."""
        first_column, half = tile.col_tile * TILE_COLS, inputs.grad.source.shape[1]
        return [
            *((inputs.x, first_column + t * half) for t in range(self.config.num_tiles)),
            (inputs.grad, first_column),
        ]

    @cute.jit
    def announce(self, shared: TileSharedMemory, full: Int32) -> None:
        """Arrive at the barrier of a stage. Each lane arrives for its weights."""
        cute.arch.mbarrier_arrive(shared.full + full)  # each lane, for its weights
