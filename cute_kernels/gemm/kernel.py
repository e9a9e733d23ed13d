"""The persistent, warp-specialised grouped GEMM for sm_100a.

Roles of a CTA and what passes between them:

========== ======================== =======================================================
pipeline   from -> to               full; empty
========== ======================== =======================================================
tile ring  scheduler -> all others  one arrival; one a warp
ab         load -> MMA              the bytes of a stage; one commit
acc        MMA -> epilogue          one commit; one an epilogue warp
========== ======================== =======================================================

Every role walks the same tiles at its own pace: loads run ahead by the depth of the stages, across
tiles, and the MMA fills one accumulator while the epilogue empties the other. With two CTAs a tile
the MMA warp of the first issues for both; each CTA loads, and stores, its own half.

The tensor core takes 128 or 256 rows of operand M but any 16 of N. With ``swap_tails`` the tile of
a group's last rows, if they do not fill it, is multiplied with its operands swapped: both lie in
shared memory in the same way, so the loads of elements stay as they are and only the instructions
take B for operand M. N is then as small as the rows allow. The epilogue finds that tile transposed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import blackwell_helpers

from cute_kernels.gemm.config import TAIL_BOX_ROWS, TMEM_COLUMNS
from cute_kernels.gemm.epilogue import Epilogue, EpilogueTensors, EpilogueWarps, OutputStore
from cute_kernels.gemm.epilogue_swapped import SwappedEpilogue
from cute_kernels.gemm.fakes import fake_arguments
from cute_kernels.gemm.loader import LoadWarp, OperandLoad, RowBoxes, SwappedTail, TmaSource
from cute_kernels.gemm.mma import BlockScaledMma, MmaWarp, PlainMma
from cute_kernels.gemm.operands import (
    matrix_view,
    output_view,
    ragged_rows_view,
    scale_type,
    scales_view,
)
from cute_kernels.gemm.scheduler import TileReader, TileScheduler
from cute_kernels.gemm.storage import Barriers, Layouts, make_pipelines
from cute_kernels.gemm.warp_schedule import NamedBarrierId, WarpSchedule
from cute_kernels.layout.shapes import TILE_ROWS

if TYPE_CHECKING:
    from cute_kernels.gemm.config import GemmConfig

__all__ = ["GroupedGemmKernel"]


class GroupedGemmKernel:
    """Grouped GEMM of one configuration, see the module."""

    def __init__(self, config: GemmConfig):
        self.config = config
        self.warps = WarpSchedule(config.tile.num_ctas)

    @staticmethod
    def fake_args(config: GemmConfig) -> tuple[Any, ...]:
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
            a: NVFP4: (T, K / 2) uint8 codes, or (M, 64 * tiles) of slots in a k_grouped product;
                plain: (T, K), or (T, M) in a k_grouped product.
            a_scales: scale tiles (tiles, ceil(K / 64), 512) uint8, or (ceil(M / 128), 2 * tiles,
                512); None if plain.
            a_amax: (G,) fp32, or (T,) when row-scaled; None if plain.
            b: NVFP4: (G, N, >= K / 2) uint8 codes, or (N, 64 * tiles) of slots; plain: (G, N, K),
                (G, K, N) with ``transpose_b``, or (T, N) in a k_grouped product.
            b_scales: scale tiles (G, ceil(N / 128), tiles, 512) uint8, or (ceil(N / 128), 2 *
                tiles, 512); None if plain.
            b_amax: (G,) fp32; None if plain.
            offs: (G,) int32 end rows.
            bias: (G, N), or None.
            alpha: (G,) fp32, or None.
            out: (T, N), or (G, M, N) of a k_grouped product.
            num_sms: CTAs to launch, rounded down to whole clusters; at least one cluster.
            stream: where to launch.

        Rows of ``a``, ``b`` and ``out`` may have any pitch of whole 16 bytes.
        """
        config, layouts = self.config, Layouts(self.config)
        scales = [a_scales, b_scales]
        if cutlass.const_expr(config.tile.swap_ab):
            scales.reverse()
        operands = self.operands(a, b)
        sources = [
            self.source(operands[0], layouts, layouts.a, is_a=True, is_scale=False),
            self.source(operands[1], layouts, layouts.b, is_a=False, is_scale=False),
        ]
        if cutlass.const_expr(config.kind.is_block_scaled):
            sfa, sfb = [scales_view(x, config.kind) for x in scales]
            sources.append(self.source(sfa, layouts, layouts.sfa, is_a=True, is_scale=True))
            sources.append(self.source(sfb, layouts, layouts.sfb, is_a=False, is_scale=True))
            if cutlass.const_expr(config.tile.swap_tails):
                sources.append(self.source(sfb, layouts, layouts.sfa, is_a=True, is_scale=True))
                sources.append(self.source(sfa, layouts, layouts.sfb, is_a=False, is_scale=True))
                sources.append(self.box_source(operands[0], layouts))
        if cutlass.const_expr(config.grouping == "m_grouped" or config.ragged_k):
            num_rows = a.shape[0]
        else:
            # T itself is not known here; the most rows that the slots hold give the same slots.
            num_rows = (operands[0].shape[1] // TILE_ROWS - offs.shape[0] + 1) * TILE_ROWS - 1
        # B may be padded along K, A never is.
        size_k = operands[1 if config.tile.swap_ab else 0].shape[1]
        extents = tuple(
            Int32(x) for x in (num_rows, operands[0].shape[0], operands[1].shape[0], size_k)
        )
        stores = []
        if cutlass.const_expr(not config.tile.swap_ab):
            stores.append(self.output(out, layouts.out))
        if cutlass.const_expr(config.tile.swap_tails):
            stores.append(self.output(out, layouts.swapped_out))
        atoms = tuple(source.atom for source in sources)
        tensors = tuple(source.tensor for source in sources)
        num_clusters = num_sms // config.tile.num_ctas
        self.kernel(
            layouts.tiled_mma,
            layouts.tiled_mma_sf,
            atoms,
            tensors,
            tuple(store.atom for store in stores),
            tuple(store.tensor for store in stores),
            output_view(out),
            a_amax,
            b_amax,
            alpha,
            bias,
            offs,
            extents,
        ).launch(
            grid=[num_clusters * config.tile.num_ctas, 1, 1],
            block=[self.warps.num_threads, 1, 1],
            cluster=[config.tile.num_ctas, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    def operands(self, a: cute.Tensor, b: cute.Tensor) -> list[cute.Tensor]:
        """Operands M and N as (rows, K, groups)."""
        config = self.config
        matrices = [b, a] if config.tile.swap_ab else [a, b]
        if config.ragged_k:
            return [ragged_rows_view(x) for x in matrices]
        return [
            matrix_view(x, config.kind, mn_major)
            for x, mn_major in zip(matrices, config.mn_major, strict=True)
        ]

    def source(
        self, tensor: cute.Tensor, layouts: Layouts, staged: Any, is_a: bool, is_scale: bool
    ) -> TmaSource:
        """The TMA copy of one stage of a tensor."""
        config = self.config
        cluster_mn = (config.tile.num_ctas, 1)
        mma, tiler, cluster = layouts.tiled_mma, layouts.tiler, layouts.cluster
        if is_a:
            op = blackwell_helpers.cluster_shape_to_tma_atom_A(cluster_mn, mma.thr_id)
            make = cute.nvgpu.make_tiled_tma_atom_A
        elif is_scale:
            op = blackwell_helpers.cluster_shape_to_tma_atom_SFB(cluster_mn, mma.thr_id)
            make = cute.nvgpu.make_tiled_tma_atom_B
            mma, tiler, cluster = layouts.tiled_mma_sf, layouts.tiler_sf, layouts.cluster_sf
        else:
            op = blackwell_helpers.cluster_shape_to_tma_atom_B(cluster_mn, mma.thr_id)
            make = cute.nvgpu.make_tiled_tma_atom_B
        stage = cute.slice_(staged, (None, None, None, 0))
        internal_type = cutlass.Int16 if is_scale else None
        return TmaSource(
            *make(op, tensor, stage, tiler, mma, cluster.shape, internal_type=internal_type)
        )

    def box_source(self, tensor: cute.Tensor, layouts: Layouts) -> TmaSource:
        """The TMA copy of a box of rows of operand M."""
        box = cute.slice_(layouts.a_boxes, (None, None, 0))
        op = cpasync.CopyBulkTensorTileG2SOp(layouts.tiled_mma.op.cta_group)
        shape = (TAIL_BOX_ROWS, layouts.tiler[2])
        return TmaSource(*cpasync.make_tiled_tma_atom(op, tensor, box, shape))

    def output(self, out: cute.Tensor, staged: Any) -> TmaSource:
        """The TMA store of one block of the output, and its coordinates (rows, N, G)."""
        groups, rows, cols = (view := output_view(out)).shape
        stride = view.stride
        tensor = cute.make_tensor(
            out.iterator, cute.make_layout((rows, cols, groups), stride=(*stride[1:], stride[0]))
        )
        block = cute.slice_(staged, (None, None, 0))
        shape = tuple(cute.size(staged, mode=[i]) for i in range(2))
        return TmaSource(
            *cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, block, shape)
        )

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        tiled_mma_sf: cute.TiledMma,
        atoms: tuple[cute.CopyAtom, ...],
        tensors: tuple[cute.Tensor, ...],
        store_atoms: tuple[cute.CopyAtom, ...],
        store_tensors: tuple[cute.Tensor, ...],
        out: cute.Tensor,
        a_amax: cute.Tensor | None,
        b_amax: cute.Tensor | None,
        alpha: cute.Tensor | None,
        bias: cute.Tensor | None,
        offs: cute.Tensor,
        extents: tuple[Int32, ...],
    ) -> None:
        config, warps = self.config, self.warps
        layouts = Layouts(config)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        smem = cutlass.memory.SmemAllocator()
        barriers = Barriers.allocate(config, smem)
        ab_pipeline, acc_pipeline, ring, tmem = make_pipelines(config, warps, layouts, barriers)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(config.tile.num_ctas, 1))
        shared = self.allocate_stages(smem, layouts)
        acc_layout, out_type = layouts.acc_layout(), out.element_type
        if cutlass.const_expr(config.tile.swap_ab):
            size = config.staged_bytes * 8 // out_type.width
            staged_out = smem.allocate_tensor(out_type, cute.make_layout(size), byte_alignment=1024)
        else:
            staged_out = smem.allocate_tensor(
                out_type, layouts.out.outer, byte_alignment=1024, swizzle=layouts.out.inner
            )
        pipeline.pipeline_init_wait(cluster_shape_mn=(config.tile.num_ctas, 1))

        tiles = TileReader(ring, barriers.tiles)
        if warp == warps.scheduler_warp_id:
            TileScheduler(config, ring, barriers.tiles, offs, extents).run()
        if warp == warps.load_warp_id:
            sources = [TmaSource(*source) for source in zip(atoms, tensors, strict=True)]
            loads = self.stage_loads(tiled_mma, tiled_mma_sf, layouts, sources, shared, cta)
            operand_m, operand_n, tail = loads
            LoadWarp(config, operand_m, operand_n, tiles, ab_pipeline, tail).run()
        if warp == warps.mma_warp_id:
            tmem.wait_for_alloc()
            pointer = tmem.retrieve_ptr(Float32)
            mma = self.instructions(tiled_mma, layouts, shared, pointer)
            MmaWarp(mma, cta == 0, tiles, ab_pipeline, acc_pipeline).run()
        if warp < warps.mma_warp_id:
            tmem.allocate(TMEM_COLUMNS)
            tmem.wait_for_alloc()
            pointer = tmem.retrieve_ptr(Float32)
            epilogue_tensors = EpilogueTensors(out, a_amax, b_amax, alpha, bias)
            cta_row = cta * (config.tile.m // config.tile.num_ctas)
            acc = cute.make_tensor(pointer, acc_layout)
            direct = swapped = None
            if cutlass.const_expr(not config.tile.swap_ab):
                store = OutputStore(store_atoms[0], store_tensors[0], staged_out)
                direct = Epilogue(config, epilogue_tensors, store, acc, cta_row, acc_pipeline)
            if cutlass.const_expr(config.tile.may_swap):
                store = None
                if cutlass.const_expr(config.tile.swap_tails):
                    blocks = cute.make_tensor(staged_out.iterator, layouts.swapped_out.outer)
                    store = OutputStore(store_atoms[1], store_tensors[1], blocks)
                swapped = SwappedEpilogue(
                    *(config, epilogue_tensors, staged_out.iterator, store),
                    *(acc, cta_row, acc_pipeline),
                )
            EpilogueWarps(config, epilogue_tensors, direct, swapped, cta_row, tiles).run()
            tmem.relinquish_alloc_permit()
            cute.arch.barrier(
                barrier_id=int(NamedBarrierId.EPILOGUE),
                number_of_threads=warps.num_epilogue_threads,
            )
            tmem.free(pointer)

    def allocate_stages(
        self, smem: cutlass.memory.SmemAllocator, layouts: Layouts
    ) -> tuple[cute.Tensor, ...]:
        """Stages of operand M, operand N and their block scales in shared memory."""
        out = [
            smem.allocate_tensor(
                layouts.element, layout.outer, byte_alignment=1024, swizzle=layout.inner
            )
            for layout in (layouts.a, layouts.b)
        ]
        if self.config.kind.is_block_scaled:
            dtype = scale_type(self.config.kind)
            out += [
                smem.allocate_tensor(dtype, layout, byte_alignment=128)
                for layout in (layouts.sfa, layouts.sfb)
            ]
        return tuple(out)

    def stage_loads(
        self,
        tiled_mma: cute.TiledMma,
        tiled_mma_sf: cute.TiledMma,
        layouts: Layouts,
        sources: list[TmaSource],
        shared: tuple[cute.Tensor, ...],
        cta: Int32,
    ) -> tuple[tuple[OperandLoad, ...], tuple[OperandLoad, ...], SwappedTail | None]:
        """How operands M and N get into shared memory, and what differs for swapped tails."""
        thr_mma, thr_mma_sf = tiled_mma.get_slice(cta), tiled_mma_sf.get_slice(cta)
        coord = layouts.cluster.get_flat_coord(cta)
        coord_sf = layouts.cluster_sf.get_flat_coord(cta)
        tile_m, tile_n, tile_k = layouts.tiler

        def load(source: TmaSource, index: int) -> OperandLoad:
            rows, partition, mode = (
                (tile_m, thr_mma.partition_A, 2),
                (tile_n, thr_mma.partition_B, 1),
                (tile_m, thr_mma.partition_A, 2),
                (layouts.tiler_sf[1], thr_mma_sf.partition_B, 1),
            )[index]
            cluster, at = layouts.cluster, coord
            if index == 3:
                cluster, at = layouts.cluster_sf, coord_sf
            keep = [0] * 4
            keep[mode] = None
            mask = None
            if self.config.tile.num_ctas > 1:
                mask = cpasync.create_tma_multicast_mask(cluster, at, mcast_mode=mode)
            return OperandLoad(
                source,
                shared[index],
                (rows, tile_k),
                partition,
                at[mode],
                cute.make_layout(cute.slice_(cluster, tuple(keep)).shape),
                mask,
                index >= 2,
            )

        own = [load(source, i) for i, source in enumerate(sources[:4])]
        tail = None
        if self.config.tile.swap_tails:
            boxes = cute.make_tensor(shared[0].iterator, layouts.a_boxes.outer)
            tail = SwappedTail(
                RowBoxes(sources[6], boxes), load(sources[4], 2), load(sources[5], 3), cta
            )
        return tuple(own[::2]), tuple(own[1::2]), tail

    def instructions(
        self,
        tiled_mma: cute.TiledMma,
        layouts: Layouts,
        shared: tuple[cute.Tensor, ...],
        tmem: cute.Pointer,
    ) -> BlockScaledMma | PlainMma:
        """How a stage is multiplied."""
        config = self.config
        if config.kind.is_block_scaled:
            acc_stride = config.tile.n - config.acc_overlap
            return BlockScaledMma(config, shared, tmem, acc_stride, layouts.sf_first_columns())
        operands = (tiled_mma.make_fragment_A(shared[0]), tiled_mma.make_fragment_B(shared[1]))
        return PlainMma(tiled_mma, operands, cute.make_tensor(tmem, layouts.acc_layout()))
