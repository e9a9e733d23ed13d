"""The persistent, warp-specialised grouped GEMM for sm_90a.

Roles of a CTA and what passes between them:

========== ======================== =======================================================
pipeline   from -> to               full; empty
========== ======================== =======================================================
tile ring  scheduler -> all others  one arrival; one a warp
ab         load -> consumers        the bytes of a stage; one a consumer warp of the cluster
========== ======================== =======================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Int32, Uint8, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from cute_kernels.gemm.config import OPERANDS
from cute_kernels.gemm.epilogue import EpilogueTensors
from cute_kernels.gemm.fakes import fake_arguments
from cute_kernels.gemm.hopper.consumer import Consumer
from cute_kernels.gemm.hopper.epilogue import HopperEpilogue
from cute_kernels.gemm.hopper.loader import (
    SCALE_TILE_K,
    StageLoad,
    codes_view,
    scale_words_view,
)
from cute_kernels.gemm.hopper.storage import (
    HopperBarriers,
    HopperLayouts,
    make_hopper_pipelines,
)
from cute_kernels.gemm.hopper.warp_schedule import HopperWarpSchedule
from cute_kernels.gemm.loader import LoadWarp, TmaSource
from cute_kernels.gemm.operands import matrix_view, output_view, ragged_rows_view
from cute_kernels.gemm.scheduler import TileReader, TileScheduler
from cute_kernels.layout.shapes import TILE_ROWS

if TYPE_CHECKING:
    from cute_kernels.gemm.hopper.config import HopperGemmConfig

__all__ = ["HopperGemmKernel"]


class HopperGemmKernel:
    """Grouped GEMM of one configuration, see the module."""

    def __init__(self, config: HopperGemmConfig):
        self.config = config
        self.warps = HopperWarpSchedule(config.consumers)

    @staticmethod
    def fake_args(config: HopperGemmConfig) -> tuple[Any, ...]:
        """Stand-ins for the arguments of ``__call__``."""
        return fake_arguments(config)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a_scales: cute.Tensor | None,
        a_amax: cute.Tensor | None,
        b: cute.Tensor,
        b_scales: cute.Tensor | None,
        b_amax: cute.Tensor | None,
        offs: cute.Tensor,
        bias: cute.Tensor | None,
        alpha: cute.Tensor | None,
        out: cute.Tensor,
        num_sms: Int32,
        stream: Any,
    ) -> None:
        """Launch the kernel.

        Args:
            a: (T, K) fp16 or bf16; in a k_grouped product (T, M), or (M, 64 * tiles) codes.
            a_scales: scale tiles if it is codes.
            a_amax: (G,) fp32, or (T,) when row-scaled.
            b: (G, N, K) or (G, K, N), or (G, N, >= K / 2) codes; in a k_grouped product (T, N), or
                (N, 128 * tiles) fp16.
            b_scales: scale tiles if it is codes.
            b_amax: (G,) fp32.
            offs: (G,) int32 end rows.
            bias: (G, N), or None.
            alpha: (G,) fp32, or None.
            out: (T, N), or (G, M, N) of a k_grouped product.
            num_sms: CTAs to launch, rounded down to whole clusters; at least one cluster.
            stream: where to launch.

        What is fp16 or bf16 beside codes has its elements in the order of ``decode``, and K as a
        multiple of 128.
        """
        config, layouts = self.config, HopperLayouts(self.config)
        operands, scales = [a, b], [a_scales, b_scales]
        if cutlass.const_expr(config.tile.swap_ab):
            operands, scales = [b, a], [b_scales, a_scales]
        major_m, major_n = config.mn_major
        if cutlass.const_expr(config.ragged_k):
            views = [ragged_rows_view(x) for x in operands]
        elif cutlass.const_expr(config.is_decoded):
            views = [
                codes_view(operands[0]),
                matrix_view(operands[1], OPERANDS[config.multiplied], False),
            ]
        else:
            views = [
                matrix_view(operands[0], config.kind, major_m),
                matrix_view(operands[1], config.kind, major_n),
            ]
        sources = [
            self.source(views[0], layouts.m, layouts.m_tiler),
            self.source(views[1], layouts.n, layouts.n_tiler, config.tile.num_ctas),
        ]
        if cutlass.const_expr(config.is_decoded):
            words = scale_words_view(scales[0])
            sources.append(self.source(words, layouts.scales, layouts.scale_tiler))
        size_k = views[1].shape[1]
        if cutlass.const_expr(config.grouping == "m_grouped" or config.ragged_k):
            num_rows = a.shape[0]
        else:
            # T itself is not known here; the most rows that the slots hold give the same slots.
            num_rows = (size_k // TILE_ROWS - offs.shape[0] + 1) * TILE_ROWS - 1
        extents = tuple(Int32(x) for x in (num_rows, views[0].shape[0], views[1].shape[0], size_k))
        self.kernel(
            tuple(source.atom for source in sources),
            tuple(source.tensor for source in sources),
            EpilogueTensors(output_view(out), a_amax, b_amax, alpha, bias),
            offs,
            extents,
        ).launch(
            grid=[num_sms // config.tile.num_ctas * config.tile.num_ctas, 1, 1],
            block=[self.warps.num_threads, 1, 1],
            cluster=[config.tile.num_ctas, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    def source(
        self, tensor: cute.Tensor, staged: Any, tiler: tuple[int, ...], sharers: int = 1
    ) -> TmaSource:
        """The TMA copy of one stage of a tensor, of which each of several CTAs loads a part."""
        stage = cute.slice_(staged, (*[None] * len(tiler), 0))
        op = cpasync.CopyBulkTensorTileG2SOp()
        if sharers > 1:
            op = cpasync.CopyBulkTensorTileG2SMulticastOp()
        return TmaSource(*cpasync.make_tiled_tma_atom(op, tensor, stage, tiler, sharers))

    @cute.kernel
    def kernel(
        self,
        atoms: tuple[cute.CopyAtom, ...],
        tensors: tuple[cute.Tensor, ...],
        epilogue_tensors: EpilogueTensors,
        offs: cute.Tensor,
        extents: tuple[Int32, ...],
    ) -> None:
        config, warps = self.config, self.warps
        layouts = HopperLayouts(config)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        smem = cutlass.memory.SmemAllocator()
        barriers = HopperBarriers.allocate(config, smem)
        ab_pipeline, ring = make_hopper_pipelines(config, warps, barriers)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(config.tile.num_ctas, 1))
        shared = self.allocate_stages(smem, layouts)
        pipeline.pipeline_init_wait(cluster_shape_mn=(config.tile.num_ctas, 1))

        tiles = TileReader(ring, barriers.tiles)
        consumer_registers, other_registers = warps.registers
        if warp < warps.num_consumer_warps:
            cute.arch.setmaxregister_increase(consumer_registers)
            stages = (shared[0], shared[2] if config.is_decoded else None, shared[1])
            buffers = (barriers.blocks, barriers.factors)
            epilogue = HopperEpilogue(config, epilogue_tensors, *buffers, cta)
            Consumer(config, layouts, stages, tiles, ab_pipeline, epilogue).run()
        else:
            cute.arch.setmaxregister_decrease(other_registers)
            if warp == warps.scheduler_warp_id:
                TileScheduler(config, ring, barriers.tiles, offs, extents).run()
            if warp == warps.load_warp_id:
                sources = [TmaSource(*source) for source in zip(atoms, tensors, strict=True)]
                loads = self.stage_loads(layouts, sources, shared, cta)
                LoadWarp(config, *loads, tiles, ab_pipeline).run()

    def allocate_stages(
        self, smem: cutlass.memory.SmemAllocator, layouts: HopperLayouts
    ) -> tuple[cute.Tensor, ...]:
        """Stages of operands M and N, and of operand M's block scales, in shared memory."""

        def swizzled(layout: cute.ComposedLayout) -> cute.Tensor:
            return smem.allocate_tensor(
                layouts.element, layout.outer, byte_alignment=1024, swizzle=layout.inner
            )

        if not self.config.is_decoded:
            return swizzled(layouts.m), swizzled(layouts.n)
        return (
            smem.allocate_tensor(Uint8, layouts.m, byte_alignment=1024),
            swizzled(layouts.n),
            smem.allocate_tensor(Int32, layouts.scales, byte_alignment=128),
        )

    def stage_loads(
        self,
        layouts: HopperLayouts,
        sources: list[TmaSource],
        shared: tuple[cute.Tensor, ...],
        cta: Int32,
    ) -> tuple[tuple[StageLoad, ...], tuple[StageLoad, ...]]:
        """How operands M and N, and operand M's block scales, get into shared memory."""
        tile = self.config.tile
        per_byte = 8 // self.config.kind.bits if self.config.is_decoded else 1
        own = (cta * tile.m, Int32(0), 1)
        operand_m = [StageLoad(sources[0], shared[0], layouts.m_tiler, per_byte, *own, False)]
        if self.config.is_decoded:
            tiler = layouts.scale_tiler
            operand_m.append(StageLoad(sources[2], shared[2], tiler, SCALE_TILE_K, *own, True))
        common = (Int32(0), cta, tile.num_ctas)
        operand_n = StageLoad(sources[1], shared[1], layouts.n_tiler, 1, *common, False)
        return tuple(operand_m), (operand_n,)
