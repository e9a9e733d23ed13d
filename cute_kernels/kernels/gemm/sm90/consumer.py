"""The consumer warpgroups: warpgroup MMA over the stages, then the epilogue."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, const_expr, cute, pipeline, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from ..common.scheduler import TileReader, WorkTile
from .config import Sm90GemmConfig
from .epilogue import Epilogue, PingPong
from .fp4.decode import FragmentDecoder
from .promotion import Promoter
from .storage import Layouts, Stages
from .warp_schedule import WARPGROUP_SIZE


class Product(NamedTuple):
    """Tensors of a product of one width, without operand M.

    Attributes:
        tiled_mma: MMA that adds to accumulators.
        n: Operand N, in fragments over shared memory.
        acc: Accumulators.
        fresh: MMA that overwrites accumulators. None without promotion.
    """

    tiled_mma: cute.TiledMma
    n: cute.Tensor
    acc: cute.Tensor
    fresh: cute.TiledMma | None = None


class Consumer:
    """A consumer warpgroup.

    Args:
        config: Configuration of the kernel.
        layouts: Tiled MMAs and layouts.
        stages: Stages in shared memory.
        tiles: Reader of the tile records.
        ab_pipeline: Pipeline of the stages.
        epilogue: Epilogue of this warpgroup.
        promoter: Promotes the sums of each stage. None without promotion.
    """

    def __init__(
        self,
        config: Sm90GemmConfig,
        layouts: Layouts,
        stages: Stages,
        tiles: TileReader,
        ab_pipeline: pipeline.PipelineTmaAsync,
        epilogue: Epilogue,
        promoter: Promoter | None,
    ):
        self.config = config
        self.tiles = tiles
        self.ab_pipeline = ab_pipeline
        self.epilogue = epilogue
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP_SIZE)
        threads = cute.make_layout(config.consumers, stride=WARPGROUP_SIZE)
        self.ping_pong = PingPong(group)
        thread = layouts.tiled_mma.get_slice(threads(group))
        shape = thread.partition_shape_C((config.tile.m, config.tile.n))
        self.acc = cute.make_rmem_tensor(shape, Float32)
        self.thread, self.layouts, self.stages = threads(group), layouts, stages
        self.products = [self.product(width) for width in config.widths]
        self.promoter = promoter
        if promoter is not None:
            shape = (config.tile.m, config.partial_n)
            shape = self.mma(config.partial_n).partition_shape_C(shape)
            self.partial = cute.make_rmem_tensor(shape, Float32)
            self.partial_products = [
                self.partial_product(i) for i in range(config.tile.n // config.partial_n)
            ]
        if config.is_decoded:
            self.decoder = FragmentDecoder(config, stages.m, stages.m_scales)
            width = config.stage_k // config.k_groups
            shape = thread.partition_shape_A((config.tile.m, width))
            self.fragments = [cute.make_rmem_tensor(shape, layouts.elements[0]) for _ in range(2)]
        else:
            self.m = layouts.tiled_mma.make_fragment_A(thread.partition_A(stages.m))

    def mma(self, width: int) -> Any:
        """Return this thread's slice of the MMA of a width."""
        return self.layouts.mma_of_width(width).get_slice(self.thread)

    def partial_product(self, index: int) -> Product:
        """Return the product of the ``index``-th ``partial_n`` columns, into partial sums."""
        width = self.config.partial_n
        product = self.product(width, index)
        return product._replace(acc=self.partial, fresh=self.layouts.mma_of_width(width))

    def product(self, width: int, index: int = 0) -> Product:
        """Return the product of ``width`` columns of a tile, the ``index``-th of them."""
        config, tiled_mma = self.config, self.layouts.mma_of_width(width)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        mma = self.mma(width)
        # Columns follow each other, in registers as well as in shared memory. Instructions along M
        # use all columns of a tile.
        columns = cute.local_tile(self.stages.n, (width, config.stage_k), (index, 0, None))
        shape = mma.partition_shape_C((config.tile.m, width))
        layout = cute.make_layout(shape)
        if shape[1] > 1:
            layout = cute.make_layout(shape, stride=((1, 2, 4), config.tile.n // 2, 0))
        acc = cute.make_tensor(self.acc.iterator, layout)
        return Product(tiled_mma, tiled_mma.make_fragment_B(mma.partition_B(columns)), acc)

    @cute.jit
    def run(self) -> None:
        """Multiply and store all tiles of this CTA."""
        tile_state = self.tiles.new_state()
        ab_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Consumer, self.ab_pipeline.num_stages
        )
        if const_expr(self.config.is_ping_pong):
            self.ping_pong.start()
        tile, tile_state = self.tiles.next(tile_state)
        while tile.group >= 0:
            self.acc.fill(0.0)
            factors = self.epilogue.load_factors(tile)
            if const_expr(self.config.skips_rows):
                if tile.rows > self.epilogue.first_m:
                    ab_state = self.multiply_tile(tile, ab_state)
                else:
                    ab_state = self.skip_tile(tile, ab_state)
            else:
                ab_state = self.multiply_tile(tile, ab_state)
            if const_expr(self.config.is_ping_pong):
                self.ping_pong.begin()
            self.epilogue.store(self.acc, factors, tile)
            if const_expr(self.config.is_ping_pong):
                self.ping_pong.end()
            tile, tile_state = self.tiles.next(tile_state)
        if const_expr(self.config.is_ping_pong):
            self.ping_pong.finish()
        if const_expr(self.config.stores_by_tma):
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        if const_expr(self.config.has_store_warpgroup):
            # No barrier may stay incomplete.
            self.epilogue.wait_free()

    def wait(self, state: Any) -> None:
        """Wait for a stage.

        The tensor core sees data that lanes copied only after a fence.
        """
        self.ab_pipeline.consumer_wait(state)
        if self.config.gathered:
            cute.arch.fence_view_async_shared()

    @cute.jit
    def multiply_tile(self, tile: WorkTile, state: Any) -> Any:
        """Multiply all stages of a tile and return the next state."""
        if const_expr(self.config.promotes):
            state = self.multiply_promoted(tile, state)
        else:
            state = self.multiply_row_fitted(tile, state, 0)
        return state

    @cute.jit
    def skip_tile(self, tile: WorkTile, state: Any) -> Any:
        """Free all stages of a tile without multiplying and return the next state."""
        for _ in cutlass.range(tile.k_tiles(self.config), unroll=1):
            self.ab_pipeline.consumer_wait(state)
            self.ab_pipeline.consumer_release(state)
            state.advance()
        return state

    @cute.jit
    def multiply_row_fitted(self, tile: WorkTile, state: Any, index: int) -> Any:
        """Multiply with the first width from the ``index``-th on that holds the tile's rows."""
        if const_expr(index + 1 == len(self.products)):
            state = self.multiply(tile, state, self.products[index])
        else:
            if tile.rows <= self.config.widths[index]:
                state = self.multiply(tile, state, self.products[index])
            else:
                state = self.multiply_row_fitted(tile, state, index + 1)
        return state

    @cute.jit
    def multiply_promoted(self, tile: WorkTile, state: Any) -> Any:
        """Add the tile's products to fp32 sums, after the products of each stage by themselves.

        The sums of one warpgroup are promoted while the products of another one run.
        """
        promoter: Any = self.promoter
        promoter.read_squares(tile, Int32(0))
        for k_tile in cutlass.range(tile.k_tiles(self.config), unroll=1):
            self.promote_stage(tile, state, k_tile)
            state.advance()
        return state

    @cute.jit
    def promote_stage(self, tile: WorkTile, state: Any, k_tile: Int32) -> None:
        """Multiply a stage into fresh accumulators, and promote their sums."""
        promoter: Any = self.promoter
        self.wait(state)
        scales = None
        for index, product in enumerate(self.partial_products):
            warpgroup.fence()
            for block in range_constexpr(self.config.k_blocks):
                coordinate = (None, None, block, state.index)
                mma = product.fresh if block == 0 else product.tiled_mma
                cute.gemm(mma, product.acc, self.m[coordinate], product.n[coordinate], product.acc)
            warpgroup.commit_group()
            # Read while the products run.
            if const_expr(index == 0):
                scales = promoter.stage_scales(state.index)
                promoter.read_squares(tile, k_tile + 1)
            columns = promoter.first_columns(index, state.index)
            warpgroup.wait_group(0)
            is_read = index + 1 == len(self.partial_products)
            if const_expr(is_read and not promoter.has_columns):
                self.ab_pipeline.consumer_release(state)
            promoter.promote(self.acc, product.acc, index, state.index, scales, columns)
        if const_expr(promoter.has_columns):
            self.ab_pipeline.consumer_release(state)

    @cute.jit
    def multiply(self, tile: WorkTile, state: Any, product: Product) -> Any:
        """Multiply all stages of a tile into the accumulators and return the next state."""
        k_tiles = tile.k_tiles(self.config)
        if k_tiles > 0:
            # The state of the stage whose products are complete, one behind the current stage.
            complete = state.clone()
            self.wait(state)
            if const_expr(self.config.is_decoded):
                self.decoder.decode(self.fragments[0], state.index, 0)
            for k_tile in cutlass.range(k_tiles - 1, unroll=1):
                state, complete = self.multiply_stage(product, state, complete, k_tile > 0)
            blocks_left = tile.k_blocks - (k_tiles - 1) * self.config.k_blocks
            state, complete = self.multiply_stage(
                product, state, complete, k_tiles > 1, blocks_left
            )
            warpgroup.wait_group(0)
            self.ab_pipeline.consumer_release(complete)
        return state

    def gemm(self, product: Product, block: Any, stage: Int32, m: cute.Tensor) -> None:
        """Issue the instruction of one K block."""
        cute.gemm(
            product.tiled_mma, product.acc, m, product.n[None, None, block, stage], product.acc
        )

    @cute.jit
    def multiply_stage(
        self,
        product: Product,
        state: Any,
        complete: Any,
        is_behind: Boolean,
        blocks_left: Int32 | None = None,
    ) -> Any:
        """Multiply a stage and wait for the next one, unless it is the tile's last.

        The last stage has ``blocks_left`` instructions. Operand M of a group of instructions is
        decoded while the group before it is multiplied. That includes the next stage's first group:
        the compiler would not let a product run on while registers that a later one reads are
        written, if that crossed the end of a loop.

        Returns:
            The states of the next stage, and of the next one to free.
        """
        stage, config = state.index, self.config
        first_block = 0
        for group, count in enumerate(config.instruction_groups):
            warpgroup.fence()
            if const_expr(blocks_left is not None and first_block > 0 and config.skips_k):
                for block in cutlass.range(
                    first_block, cutlass.min(blocks_left, config.k_blocks), unroll=1
                ):
                    self.gemm(product, block, stage, self.m[None, None, block, stage])
            else:
                for block in range_constexpr(count):
                    if const_expr(config.is_decoded):
                        m = self.fragments[group % 2][None, None, block]
                    else:
                        m = self.m[None, None, first_block + block, stage]
                    self.gemm(product, first_block + block, stage, m)
            warpgroup.commit_group()
            first_block += count
            if const_expr(config.is_decoded or group == 0):
                # The products of the group before are complete, its fragments are free.
                warpgroup.wait_group(1)
            if const_expr(group == 0):
                if is_behind:
                    self.ab_pipeline.consumer_release(complete)
                    complete.advance()
            if const_expr(config.is_decoded and group + 1 < config.k_groups):
                self.decoder.decode(self.fragments[(group + 1) % 2], stage, group + 1)
        state.advance()
        if const_expr(blocks_left is None):
            self.wait(state)
            if const_expr(config.is_decoded):
                self.decoder.decode(self.fragments[0], state.index, 0)
        return state, complete
