"""The persistent, warp-specialised grouped GEMM for sm_100a.

Roles of a CTA and the pipelines between them:

========== ======================== =======================================================
pipeline   from -> to               full; empty
========== ======================== =======================================================
tile ring  scheduler -> all others  one arrival; one per warp
ab         load -> MMA              the bytes of a stage; one commit
codes      codes load -> decoders   the bytes of a stage; one per warp
acc        MMA -> epilogue          one commit; one per epilogue warp
========== ======================== =======================================================

Every role walks the same tiles at its own pace. Loads run ahead by the depth of the stages, across
tiles, and the MMA fills one accumulator while the epilogue empties the other. With two CTAs per
tile the MMA warp of the first issues for both; each CTA loads, and stores, its own half.

The tensor core multiplies 128 or 256 rows of operand M but any multiple of 8 or 16 rows of N. With
``swap_partial`` a partial tile, of a group's last rows, is multiplied with its operands swapped.
The loads of elements stay as they are, and only the instructions use B as operand M. N is then as
small as the rows allow. The epilogue finds that tile transposed.

Codes that no instruction multiplies by the other operand are decoded by warps into the stages that
the MMA reads. These warps arrive at the barriers of the stages, as the load warp does: see
``decode``.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, const_expr, cute, pipeline
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import blackwell_helpers

from cute_kernels.device.launch import DSL_TYPES, env_stream

from ..common.fakes import FakeArguments
from ..common.loader import LoadWarp, TmaSource, paired_sources, source_attributes
from ..common.operand_kinds import OperandKind
from ..common.output_store import EpilogueTensors, OutputStore, store_source
from ..common.problem import Extents, GemmArguments
from ..common.scheduler import TileReader, TileScheduler
from ..common.views import (
    extents_of,
    interleaved_rows,
    matrix_view,
    ragged_rows_view,
    row_scales_view,
    scale_type,
    scales_view,
    squares_view,
)
from .codes import codes_load_warp, codes_sources, decoded_squares
from .config import BOX_ROWS, TMEM_COLUMNS, Sm100GemmConfig
from .decode import DecodeWarps
from .epilogue import Epilogue
from .epilogue_swapped import SwappedEpilogue
from .epilogue_warps import EpilogueWarps
from .gather import GatherLoad, row_source
from .loader import RowBoxes, StageLoads, SwappedPartial, SwappingLoadWarp
from .mma import MmaWarp, StageMma
from .promotion import Promoter
from .storage import Barriers, Layouts, Stages, make_pipelines
from .warp_schedule import NamedBarrierId, WarpSchedule


class Sources(NamedTuple):
    """TMA sources of each tensor that TMA reads, or only their atoms or coordinates.

    Attributes:
        m: Elements of operand M. None if they are decoded or gathered.
        n: Elements of operand N, in the same form.
        m_scales: Block scales of operand M, or None. All later fields may be None, too.
        n_scales: Block scales of operand N.
        partial_m_scales: Block scales of operand M of partial tiles with swapped operands.
        partial_n_scales: Block scales of operand N of such tiles.
        partial_boxes: Elements of A of such tiles, by boxes of rows.
        m_codes: Codes of operand M, if they are decoded.
        n_codes: Codes of operand N.
        m_codes_scales: Block scales of the codes of operand M. None for squares.
        n_codes_scales: Block scales of the codes of operand N.
        rows: Matrix whose rows are gathered.
    """

    m: Any
    n: Any
    m_scales: Any = None
    n_scales: Any = None
    partial_m_scales: Any = None
    partial_n_scales: Any = None
    partial_boxes: Any = None
    m_codes: Any = None
    n_codes: Any = None
    m_codes_scales: Any = None
    n_codes_scales: Any = None
    rows: Any = None


class Stores(NamedTuple):
    """TMA stores of the output, or only their atoms or coordinates. Absent ones are None.

    Attributes:
        direct: Tiles whose operands are not swapped.
        swapped: Tiles whose operands are swapped.
        z: The stored preactivation.
    """

    direct: Any = None
    swapped: Any = None
    z: Any = None


class TmaArguments(NamedTuple):
    """Copies of TMA and the coordinates of their tensors, as the kernel gets them.

    Attributes:
        source_atoms: Copies of the sources.
        source_tensors: Coordinates of the sources.
        store_atoms: Stores.
        store_tensors: Coordinates of the stores.
    """

    source_atoms: Sources
    source_tensors: Sources
    store_atoms: Stores
    store_tensors: Stores


class ScaleTensors(NamedTuple):
    """fp32 block scales that warps read without TMA.

    Attributes:
        promoted: Scales of operands M and N whose sums are promoted. None if absent.
        squares: Scales of squares of operands M and N that are decoded. None if absent.
    """

    promoted: tuple[cute.Tensor, cute.Tensor] | None
    squares: tuple[cute.Tensor | None, ...]


class Sm100Gemm:
    """Grouped GEMM of one configuration. See the module's docstring."""

    def __init__(self, config: Sm100GemmConfig):
        self.config = config
        self.warps = WarpSchedule(config.tile.num_ctas, bool(config.codes))

    @staticmethod
    def fake_args(config: Sm100GemmConfig) -> tuple[Any, ...]:
        """Return the fake arguments for compilation."""
        return (*FakeArguments(config).arguments(), env_stream())

    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel with ``GemmArguments`` and a stream.

        A quantized A consists of codes (T, K), packed if several share a byte. In a k_grouped
        product of P slots it is (M, P), or (P, M) for untransposed copies. B is (G, N, >= K), or
        (G, K, N) with ``transpose_b``, or (N, P) or (P, N). Tiles of block scales are ([G,] row
        tiles, tiles along K or P, 512) uint8.

        Rows of ``a``, ``b`` and ``out`` may have any pitch that is a multiple of 16 bytes.
        """
        config, layouts = self.config, Layouts(self.config)
        x, stream = GemmArguments(*args[:-1]), args[-1]
        m, n, m_scales, n_scales = x.in_order(config.tile.swap_ab)
        operands, depth = (m, n), None
        if const_expr(config.grouping == "m_grouped"):
            # B may be padded along K, A never is.
            depth = x.a.shape[1] * (x.a.element_type.width // config.kind.bits)
        m = self.matrix(m, config.m_kind, config.mn_major[0], depth)
        n = self.matrix(n, config.n_kind, config.mn_major[1], depth)
        if const_expr(config.interleaves_halves):
            m, n = (interleaved_rows(m), n) if config.tile.swap_ab else (m, interleaved_rows(n))
        promoted = None
        if const_expr(config.promotes):
            promoted = tuple(
                (row_scales_view if has_rows else squares_view)(x)
                for x, has_rows in zip((m_scales, n_scales), config.row_scales, strict=True)
            )
        if const_expr(config.mma_kind.is_block_scaled):
            m_scales = scales_view(m_scales, config.mma_kind)
            n_scales = scales_view(n_scales, config.mma_kind)
        scales = (m_scales, n_scales)
        sources = self.sources(layouts, m, n, *scales)._replace(
            **codes_sources(config, layouts.stages, operands, scales, depth)
        )
        if const_expr(config.gathered):
            sources = sources._replace(
                rows=row_source(config, x.b if config.grouping == "k_grouped" else x.a)
            )
        tensors = EpilogueTensors.from_arguments(x)
        stores = self.stores(layouts, tensors.out, tensors.z)
        num_clusters = x.num_sms // config.tile.num_ctas
        self.kernel(
            layouts.tiled_mma,
            layouts.tiled_mma_sf,
            TmaArguments(
                source_attributes(Sources, sources, "atom"),
                source_attributes(Sources, sources, "tensor"),
                source_attributes(Stores, stores, "atom"),
                source_attributes(Stores, stores, "tensor"),
            ),
            tensors,
            ScaleTensors(promoted, decoded_squares(config, scales)),
            x.rows,
            x.offs,
            extents_of(config, x, m, n),
        ).launch(
            grid=[num_clusters * config.tile.num_ctas, 1, 1],
            block=[self.warps.num_threads, 1, 1],
            cluster=[config.tile.num_ctas, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    def matrix(self, x: cute.Tensor, kind: OperandKind, mn_major: bool, depth: Any) -> cute.Tensor:
        """Return the view of an operand as (rows, K, groups)."""
        if self.config.ragged_k:
            return ragged_rows_view(x)
        return matrix_view(x, kind, mn_major, depth)

    def sources(
        self,
        layouts: Layouts,
        m: cute.Tensor,
        n: cute.Tensor,
        m_scales: cute.Tensor | None,
        n_scales: cute.Tensor | None,
    ) -> Sources:
        """Return the TMA copies of one stage of each tensor that is not decoded or gathered."""
        staged, out = layouts.stages, Sources(None, None)
        excluded_sides = [codes.side for codes in self.config.codes]
        if self.config.gathered:
            excluded_sides.append(
                "n" if self.config.tile.swap_ab or self.config.grouping == "k_grouped" else "m"
            )
        if "m" not in excluded_sides:
            out = out._replace(m=self.source(layouts, m, staged.m, True))
        if "n" not in excluded_sides:
            out = out._replace(n=self.source(layouts, n, staged.n, False))
        if self.config.mma_kind.is_block_scaled:
            out = out._replace(
                m_scales=self.source(layouts, m_scales, staged.m_scales, True, True),
                n_scales=self.source(layouts, n_scales, staged.n_scales, False, True),
            )
        if self.config.tile.swap_partial and out.m is not None:
            out = out._replace(partial_boxes=self.box_source(layouts, m))
        if self.config.tile.swap_partial and self.config.mma_kind.is_block_scaled:
            out = out._replace(
                partial_m_scales=self.source(layouts, n_scales, staged.m_scales, True, True),
                partial_n_scales=self.source(layouts, m_scales, staged.n_scales, False, True),
            )
        return out

    def source(
        self, layouts: Layouts, tensor: cute.Tensor, staged: Any, of_m: bool, is_scale: bool = False
    ) -> TmaSource:
        """Return the TMA copy of one stage of operand M or N: its elements or its block scales.

        All CTAs need those of operand N.
        """
        mma, cluster, tiler = layouts.tiled_mma, layouts.cluster, layouts.tiler
        op_of, make = (
            blackwell_helpers.cluster_shape_to_tma_atom_A,
            cute.nvgpu.make_tiled_tma_atom_A,
        )
        if not of_m:
            op_of, make = (
                blackwell_helpers.cluster_shape_to_tma_atom_B,
                cute.nvgpu.make_tiled_tma_atom_B,
            )
        if is_scale and not of_m:
            op_of = blackwell_helpers.cluster_shape_to_tma_atom_SFB
            mma, cluster, tiler = layouts.tiled_mma_sf, layouts.cluster_sf, layouts.tiler_sf
        op = op_of((self.config.tile.num_ctas, 1), layouts.tiled_mma.thr_id)
        stage, kind = (
            cute.slice_(staged, (None, None, None, 0)),
            cutlass.Int16 if is_scale else None,
        )
        return TmaSource(*make(op, tensor, stage, tiler, mma, cluster.shape, internal_type=kind))

    def box_source(self, layouts: Layouts, tensor: cute.Tensor) -> TmaSource:
        """Return the TMA copy of one box of rows of A in partial tiles."""
        box = cute.slice_(layouts.boxes, (None, None, 0))
        op = cpasync.CopyBulkTensorTileG2SOp(layouts.tiled_mma.op.cta_group)
        shape = (BOX_ROWS, layouts.tiler[2])
        return TmaSource(*cpasync.make_tiled_tma_atom(op, tensor, box, shape))

    def stores(self, layouts: Layouts, out: cute.Tensor, z: cute.Tensor | None) -> Stores:
        """Return the TMA stores of one block of the output, and of the preactivation."""
        stores, config = Stores(), self.config
        if config.result is not None:
            return stores
        if not config.tile.swap_ab:
            stores = stores._replace(
                direct=store_source(out, layouts.halves if config.is_gated else layouts.out)
            )
            if z is not None:
                stores = stores._replace(
                    z=store_source(
                        z, *((layouts.halves, 2) if config.interleaves_halves else (layouts.out,))
                    )
                )
        if layouts.swapped_out is not None:
            stores = stores._replace(swapped=store_source(out, layouts.swapped_out))
        return stores

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        tiled_mma_sf: cute.TiledMma,
        tma: TmaArguments,
        tensors: EpilogueTensors,
        scales: ScaleTensors,
        rows: cute.Tensor | None,
        offs: cute.Tensor,
        extents: Extents,
    ) -> None:
        """Run the role of each warp.

        Args:
            tiled_mma: MMA of a tile.
            tiled_mma_sf: MMA whose N partition is that of operand N's block scales.
            tma: Copies of TMA and their coordinates.
            tensors: Tensors of the epilogue.
            scales: Block scales that warps read without TMA.
            rows: (T,) int32. Row index. None if rows are not gathered.
            offs: (G,) int32. End rows.
            extents: Sizes of the product.
        """
        config, warps = self.config, self.warps
        layouts = Layouts(config)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        smem = cutlass.memory.SmemAllocator()
        barriers = Barriers.allocate(config, smem)
        pipelines = make_pipelines(config, warps, layouts, barriers)
        ab_pipeline, acc_pipeline, ring, tmem, codes_pipeline = pipelines
        pipeline.pipeline_init_arrive(cluster_shape_mn=(config.tile.num_ctas, 1))
        shared = self.allocate_stages(smem, layouts)
        acc_layout = layouts.acc_layout()
        staged_out = self.allocate_output(smem, layouts)
        column_scales = None
        if const_expr(config.column_scale_bytes > 0):
            words = config.column_scale_bytes // 4
            column_scales = smem.allocate_array(Float32, words, byte_alignment=16)
        pipeline.pipeline_init_wait(cluster_shape_mn=(config.tile.num_ctas, 1))

        tiles = TileReader(ring, barriers.tiles)
        if warp == warps.scheduler_warp_id:
            TileScheduler(config, ring, barriers.tiles, offs, extents).run()
        if warp == warps.load_warp_id:
            sources = paired_sources(Sources, tma.source_atoms, tma.source_tensors)
            loads = StageLoads(layouts, tiled_mma, tiled_mma_sf, cta)
            gather = None
            if const_expr(config.gathered):
                gather = GatherLoad(config, sources.rows.atom, rows, shared, cta)
            self.load_warp(loads, sources, shared, tiles, ab_pipeline, gather).run()
        if const_expr(config.codes):
            if warp == warps.codes_load_warp_id:
                sources = paired_sources(Sources, tma.source_atoms, tma.source_tensors)
                codes_load_warp(config, sources, shared, cta, tiles, codes_pipeline).run()
            if warp >= warps.first_decode_warp_id:
                DecodeWarps(
                    config, warps, shared, scales.squares, cta, tiles, codes_pipeline, ab_pipeline
                ).run()
        if warp == warps.mma_warp_id:
            tmem.wait_for_alloc()
            pointer = tmem.retrieve_ptr(Float32)
            MmaWarp(
                StageMma(config, shared, pointer), cta == 0, tiles, ab_pipeline, acc_pipeline
            ).run()
        if warp < warps.mma_warp_id:
            tmem.allocate(TMEM_COLUMNS)
            tmem.wait_for_alloc()
            pointer = tmem.retrieve_ptr(Float32)
            cta_row = cta * (config.tile.m // config.tile.num_ctas)
            acc = cute.make_tensor(pointer, acc_layout)
            direct = swapped = None
            if const_expr(not config.tile.swap_ab):
                halves = cute.make_tensor(staged_out.iterator, layouts.halves.outer)
                out_blocks = halves if config.is_gated else staged_out
                store = z_store = None
                if const_expr(config.result is None):
                    store = OutputStore(
                        tma.store_atoms.direct, tma.store_tensors.direct, out_blocks
                    )
                if const_expr(config.stores_preactivation):
                    z_store = OutputStore(
                        tma.store_atoms.z,
                        tma.store_tensors.z,
                        halves if config.interleaves_halves else staged_out,
                    )
                direct = Epilogue(config, tensors, store, z_store, acc, cta_row, acc_pipeline)
            if const_expr(config.tile.may_swap):
                store = None
                if const_expr(layouts.swapped_out is not None):
                    blocks = cute.make_tensor(staged_out.iterator, layouts.swapped_out.outer)
                    store = OutputStore(tma.store_atoms.swapped, tma.store_tensors.swapped, blocks)
                staged = staged_out.iterator
                swapped = SwappedEpilogue(
                    config, tensors, staged, store, acc, cta_row, acc_pipeline
                )
            promoter = None
            if const_expr(scales.promoted is not None):
                promoter = Promoter(
                    config, scales.promoted, acc, column_scales, cta_row, acc_pipeline
                )
            EpilogueWarps(config, tensors, direct, swapped, cta_row, tiles, promoter).run()
            tmem.relinquish_alloc_permit()
            cute.arch.barrier(
                barrier_id=int(NamedBarrierId.EPILOGUE),
                number_of_threads=warps.num_epilogue_threads,
            )
            tmem.free(pointer)

    def allocate_stages(self, smem: cutlass.memory.SmemAllocator, layouts: Layouts) -> Stages:
        """Allocate the stages of elements, codes and block scales in shared memory."""
        staged = layouts.stages
        out = Stages(
            *(
                smem.allocate_tensor(dtype, x.outer, byte_alignment=1024, swizzle=x.inner)
                for x, dtype in zip(staged[:2], layouts.elements, strict=True)
            )
        )
        if self.config.mma_kind.is_block_scaled:
            dtype = scale_type(self.config.mma_kind)
            out = out._replace(
                m_scales=smem.allocate_tensor(dtype, staged.m_scales, byte_alignment=128),
                n_scales=smem.allocate_tensor(dtype, staged.n_scales, byte_alignment=128),
            )
        for codes in self.config.codes:
            name = f"{codes.side}_codes"
            layout, scales = getattr(staged, name), getattr(staged, f"{name}_scales")
            allocated = smem.allocate_tensor(
                cutlass.Uint8, layout.outer, byte_alignment=1024, swizzle=layout.inner
            )
            out = out._replace(**{name: allocated})
            if scales is not None:
                dtype = Float32 if codes.kind.has_row_scales else Int32
                allocated = smem.allocate_tensor(dtype, scales, byte_alignment=128)
                out = out._replace(**{f"{name}_scales": allocated})
        return out

    def allocate_output(self, smem: cutlass.memory.SmemAllocator, layouts: Layouts) -> cute.Tensor:
        """Allocate the staged blocks of the output in shared memory."""
        dtype = DSL_TYPES[self.config.out_dtype]
        if self.config.tile.swap_ab:
            layout = cute.make_layout(self.config.staged_bytes * 8 // dtype.width)
            return smem.allocate_tensor(dtype, layout, byte_alignment=1024)
        return smem.allocate_tensor(
            dtype, layouts.out.outer, byte_alignment=1024, swizzle=layouts.out.inner
        )

    def load_warp(
        self,
        loads: StageLoads,
        sources: Sources,
        shared: Stages,
        tiles: TileReader,
        ab_pipeline: pipeline.PipelineTmaUmma,
        gather: GatherLoad | None,
    ) -> LoadWarp:
        """Return the load warp of elements and their block scales."""
        operand_m = [] if sources.m is None else [loads.m(sources.m, shared.m)]
        operand_n = [] if sources.n is None else [loads.n(sources.n, shared.n)]
        if self.config.mma_kind.is_block_scaled:
            operand_m.append(loads.m(sources.m_scales, shared.m_scales, is_scale=True))
            operand_n.append(loads.n(sources.n_scales, shared.n_scales, is_scale=True))
        load_arguments = (tuple(operand_m), tuple(operand_n), tiles, ab_pipeline, gather)
        if not self.config.tile.swap_partial or sources.m is None and gather is None:
            return LoadWarp(self.config, *load_arguments)
        boxes = None
        if gather is None:
            boxes = RowBoxes(
                sources.partial_boxes,
                cute.make_tensor(shared.m.iterator, loads.layouts.boxes.outer),
            )
        partial = SwappedPartial(boxes, loads.cta)
        if self.config.mma_kind.is_block_scaled:
            partial = partial._replace(
                m_scales=loads.m(sources.partial_m_scales, shared.m_scales, is_scale=True),
                n_scales=loads.n(sources.partial_n_scales, shared.n_scales, is_scale=True),
            )
        return SwappingLoadWarp(self.config, partial, *load_arguments)
