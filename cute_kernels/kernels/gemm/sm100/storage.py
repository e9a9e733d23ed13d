"""Layouts of shared memory and of tensor memory in a CTA, and the pipelines over them."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.utils import blackwell_helpers, blockscaled_layout

from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.launch import DSL_TYPES
from cute_kernels.layout.shapes import SF_TILE_ROWS, round_up

from ..common.pipelines import make_pipeline, stage_barriers
from ..common.scheduler import TILE_WORDS
from ..common.views import element_type, scale_type
from .config import BOX_ROWS, SWAPPED_BLOCK, DecodedOperand, Sm100GemmConfig
from .warp_schedule import NamedBarrierId, WarpSchedule

_Kind = tcgen05.SmemLayoutAtomKind


class Stages(NamedTuple):
    """Stages in shared memory, or their layouts, of elements, block scales and decoded codes.

    Codes are (rows, bytes, STAGE), their block scales (*``DecodedOperand.scales``, STAGE).

    Attributes:
        m: Elements of operand M.
        n: Elements of operand N.
        m_scales: Block scales of operand M, or None. All later fields may be None, too.
        n_scales: Block scales of operand N.
        m_codes: Codes of operand M, if they are decoded.
        n_codes: Codes of operand N.
        m_codes_scales: Block scales of the codes of operand M.
        n_codes_scales: Block scales of the codes of operand N.
    """

    m: Any
    n: Any
    m_scales: Any = None
    n_scales: Any = None
    m_codes: Any = None
    n_codes: Any = None
    m_codes_scales: Any = None
    n_codes_scales: Any = None


def _swizzled(kind: _Kind, dtype: Any, *shape: int) -> cute.ComposedLayout:
    return cute.tile_to_shape(tcgen05.make_smem_layout_atom(kind, dtype), shape, order=(0, 1, 2))


class Layouts:
    """Tiled MMAs and layouts of a configuration; created while tracing.

    Attributes:
        tiled_mma_sf: MMA of one CTA whose N partition is that of operand N's block scales. These
            are not split between a pair of CTAs and come in whole tiles of 128 rows.
        cluster: CTAs of a cluster, (V, M, N, K), and ``cluster_sf`` for ``tiled_mma_sf``.
        stages: Stages in shared memory, (MMA, MMA_MN, MMA_K, STAGE).
        boxes: Stages of operand M as boxes of rows, (rows, K, boxes of all stages).
        out: Staged blocks of the output, (32, columns, STAGE), those of one epilogue warp together.
        halves: The same memory as twice as many blocks of half the columns, for products whose
            columns alternate between two halves.
        swapped_out: The same memory as blocks of tiles with swapped operands. None if no tiles have
            them or none leave by TMA.
    """

    def __init__(self, config: Sm100GemmConfig):
        self.config = config
        kind = config.mma_kind
        self.tiler = config.mma_tiler_mnk
        self.tiler_sf = (
            self.tiler[0] // config.tile.num_ctas,
            round_up(self.tiler[1], SF_TILE_ROWS),
            self.tiler[2],
        )
        group = tcgen05.CtaGroup.ONE if config.tile.num_ctas == 1 else tcgen05.CtaGroup.TWO
        m, n = self.elements = tuple(map(element_type, config.multiplied))
        self.tiled_mma = self._make_mma(group, self.tiler[:2])
        self.tiled_mma_sf = self._make_mma(tcgen05.CtaGroup.ONE, self.tiler_sf[:2])
        ctas = cute.make_layout((config.tile.num_ctas, 1, 1))
        self.cluster = cute.tiled_divide(ctas, (self.tiled_mma.thr_id.shape,))
        self.cluster_sf = cute.tiled_divide(ctas, (self.tiled_mma_sf.thr_id.shape,))
        stages = config.num_ab_stage
        self.stages = Stages(
            blackwell_helpers.make_smem_layout_a(self.tiled_mma, self.tiler, m, stages),
            blackwell_helpers.make_smem_layout_b(self.tiled_mma, self.tiler, n, stages),
        )
        if kind.is_block_scaled:
            scales = (self.tiled_mma, self.tiler, kind.sf_vec_size, stages)
            self.stages = self.stages._replace(
                m_scales=blockscaled_layout.make_smem_layout_sfa(*scales),
                n_scales=blockscaled_layout.make_smem_layout_sfb(*scales),
            )
        for codes in config.codes:
            self.stages = self.stages._replace(**self._codes(codes))
        self.boxes = None
        if config.tile.swap_partial:
            boxes = self.tiler[0] // config.tile.num_ctas // BOX_ROWS * stages
            self.boxes = _swizzled(_Kind.K_SW128, m, BOX_ROWS, self.tiler[2], boxes)
        dtype, blocks = (
            DSL_TYPES[config.out_dtype],
            config.num_store_stage * len(WarpSchedule.epilogue_warp_ids),
        )
        self.out = _swizzled(_Kind.K_SW128, dtype, WARP_SIZE, config.store_columns, blocks)
        self.halves = _swizzled(
            _Kind.K_SW64, dtype, WARP_SIZE, config.store_columns // 2, 2 * blocks
        )
        self.swapped_out = None
        if config.tile.swap_partial and config.activation is None:
            swizzle = _Kind.K_SW64 if dtype.width == 16 else _Kind.K_SW128
            blocks = config.staged_bytes * 8 // (SWAPPED_BLOCK * SWAPPED_BLOCK * dtype.width)
            self.swapped_out = _swizzled(swizzle, dtype, SWAPPED_BLOCK, SWAPPED_BLOCK, blocks)

    def _make_mma(self, group: tcgen05.CtaGroup, shape_mn: tuple[int, int]) -> cute.TiledMma:
        """Return the tiled MMA of a shape, with block scales if the kind has them."""
        kind = self.config.mma_kind
        major = [OperandMajorMode.MN if mn else OperandMajorMode.K for mn in self.config.mn_major]
        if not kind.is_block_scaled:
            return blackwell_helpers.make_trivial_tiled_mma(
                *self.elements, *major, cutlass.Float32, group, shape_mn
            )
        return blackwell_helpers.make_blockscaled_trivial_tiled_mma(
            *self.elements, *major, scale_type(kind), kind.sf_vec_size, group, shape_mn
        )

    def _codes(self, codes: DecodedOperand) -> dict[str, Any]:
        """Return the layouts of the stages of codes and their block scales, by their names."""
        stages, scales = self.config.num_codes_stage, None
        swizzle = {64: _Kind.K_SW64, 128: _Kind.K_SW128}[codes.row_bytes]
        staged = _swizzled(swizzle, cutlass.Uint8, codes.rows, codes.row_bytes, stages)
        if codes.scales:
            # Words of tiles, or rows, are contiguous.
            order = (0, 1, 2) if codes.kind.has_row_scales else (2, 1, 0, 3)
            scales = cute.make_ordered_layout((*codes.scales, stages), order=order)
        name = f"{codes.side}_codes"
        return {name: staged, f"{name}_scales": scales}

    def acc_layout(self) -> cute.Layout:
        """Return the layout of the accumulators in tensor memory, (MMA, MMA_M, MMA_N, STAGE)."""
        shape = self.tiled_mma.partition_shape_C(self.tiler[:2])
        stages = self.config.num_acc_stage + 1 if self.config.promotes else 2
        layout = self.tiled_mma.make_fragment_C(cute.append(shape, stages)).layout
        column = layout.stride[0][1]
        stage_stride = (self.tiler[1] - self.config.acc_overlap) * column
        return cute.make_layout(layout.shape, stride=(*layout.stride[:3], stage_stride))

    def stage_bytes(self) -> int:
        """Return the loaded bytes of one stage of all CTAs that share a tile."""
        staged = [*zip(self.stages[:2], self.elements, strict=True)]
        if self.config.mma_kind.is_block_scaled:
            scales = scale_type(self.config.mma_kind)
            staged += [(self.stages.m_scales, scales), (self.stages.n_scales, scales)]
        sizes = (
            cute.size_in_bytes(dtype, cute.slice_(layout, (None, None, None, 0)))
            for layout, dtype in staged
        )
        assert sum(sizes) == self.config.stage_bytes
        return self.config.loaded_bytes * self.config.tile.num_ctas


class Barriers(NamedTuple):
    """Full and empty barriers of the pipelines, and small buffers, in shared memory.

    Attributes:
        ab: Barriers of the stages.
        acc: Barriers of the accumulators.
        sched: Barriers of the tile records.
        tmem: Address of tensor memory.
        tmem_free: Barrier at which a CTA pair meets before tensor memory is freed.
        tiles: Tile records.
        codes: Barriers of the stages of codes. None if absent.
    """

    ab: cute.Pointer
    acc: cute.Pointer
    sched: cute.Pointer
    tmem: cute.Pointer
    tmem_free: cute.Pointer
    tiles: cute.Tensor
    codes: cute.Pointer | None = None

    @staticmethod
    def allocate(config: Sm100GemmConfig, smem: cutlass.memory.SmemAllocator) -> "Barriers":
        """Allocate the barriers and buffers."""
        words = cute.make_layout(config.num_sched_stage * TILE_WORDS)
        codes = stage_barriers(smem, config.num_codes_stage) if config.codes else None
        return Barriers(
            ab=stage_barriers(smem, config.num_ab_stage),
            acc=stage_barriers(smem, config.num_acc_stage),
            sched=stage_barriers(smem, config.num_sched_stage),
            tmem=smem.allocate_array(Int32, 1, byte_alignment=8),
            tmem_free=smem.allocate_array(Int64, 1, byte_alignment=8),
            tiles=smem.allocate_tensor(Int32, words, byte_alignment=16),
            codes=codes,
        )


class Pipelines(NamedTuple):
    """Pipelines between the warps."""

    ab: pipeline.PipelineTmaUmma
    acc: pipeline.PipelineUmmaAsync
    ring: pipeline.PipelineAsync
    tmem: cutlass.memory.TmemAllocator
    codes: pipeline.PipelineTmaAsync | None


def make_pipelines(
    config: Sm100GemmConfig, warps: WarpSchedule, layouts: Layouts, barriers: Barriers
) -> Pipelines:
    """Create the pipelines over the barriers."""
    ab_pipeline = make_pipeline(
        *(pipeline.PipelineTmaUmma, barriers.ab, config.num_ab_stage, warps.stage_arrivals, 1),
        tx_count=layouts.stage_bytes(),
        cta_layout_vmnk=layouts.cluster,
    )
    acc_pipeline = make_pipeline(
        *(
            pipeline.PipelineUmmaAsync,
            barriers.acc,
            config.num_acc_stage,
            1,
            warps.acc_consumer_arrivals,
        ),
        cta_layout_vmnk=layouts.cluster,
    )
    stages, consumers = config.num_sched_stage, warps.tile_consumer_arrivals
    ring = make_pipeline(pipeline.PipelineAsync, barriers.sched, stages, 1, consumers)
    tmem = cutlass.memory.TmemAllocator(
        barriers.tmem,
        barrier_for_retrieve=pipeline.NamedBarrier(
            barrier_id=int(NamedBarrierId.TMEM), num_threads=warps.num_tmem_threads
        ),
        allocator_warp_id=warps.epilogue_warp_ids[0],
        is_two_cta=config.tile.num_ctas == 2,
        two_cta_tmem_dealloc_mbar_ptr=barriers.tmem_free,
    )
    codes_pipeline = None
    if barriers.codes is not None:
        # The codes of a CTA are not shared with the other one.
        codes_pipeline = make_pipeline(
            *(
                pipeline.PipelineTmaAsync,
                barriers.codes,
                config.num_codes_stage,
                1,
                warps.num_decode_warps,
            ),
            tx_count=config.codes_stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )
    return Pipelines(ab_pipeline, acc_pipeline, ring, tmem, codes_pipeline)
