"""Shared memory of a CTA, and the pipelines over it."""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint8, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from cute_kernels.device.launch import DSL_TYPES

from ..common.pipelines import make_pipeline, stage_barriers
from ..common.scheduler import TILE_WORDS
from ..common.views import element_type
from .config import WARPGROUP_M, Sm90GemmConfig
from .fp4.operand import codes_stages, scale_stages
from .warp_schedule import WARPS, WarpSchedule

_Kind = warpgroup.SmemLayoutAtomKind
#: Swizzles that keep the rows of a tile in different banks, by the bytes of a row.
_K_SWIZZLES = {128: _Kind.K_SW128}
_MN_SWIZZLES = {16: _Kind.MN_INTER, 32: _Kind.MN_SW32, 64: _Kind.MN_SW64, 128: _Kind.MN_SW128}


class Stages(NamedTuple):
    """Stages of operands M and N, (rows, K, STAGE), in shared memory, or their layouts.

    Operand M is bytes if it is decoded. Then its block scales are (row tiles, K tiles, words,
    STAGE). Block scales of single rows are (rows, 1, STAGE).
    """

    m: Any
    n: Any
    m_scales: Any = None
    n_scales: Any = None


class Layouts:
    """The tiled MMA and the layouts of a configuration; created while tracing.

    Attributes:
        elements: Types of the elements that are multiplied.
        tiled_mma: MMA of a tile.
        tilers: Extents of one stage, without the last mode.
        stages: Layouts of the stages.
        out: Blocks of output, of one warp each, that TMA stores. None if it stores none.
    """

    def __init__(self, config: Sm90GemmConfig):
        self.config = config
        tile = config.tile
        if config.is_decoded:
            self.elements = (DSL_TYPES[config.multiplied],) * 2
        else:
            self.elements = element_type(config.m_kind), element_type(config.n_kind)
        m_major, n_major = config.mn_major
        self.tiled_mma = self.mma_of_width(tile.n)
        n_tiler = (tile.n, config.stage_k)
        n = self._staged(1, n_tiler, n_major)
        if config.is_decoded:
            m_tiler, m = codes_stages(config)
            scale_tiler, scales = scale_stages(config)
            self.tilers, self.stages = Stages(m_tiler, n_tiler, scale_tiler), Stages(m, n, scales)
        else:
            m_tiler = (tile.m, config.stage_k)
            m = self._staged(0, m_tiler, m_major)
            rows = config.row_scales
            self.tilers = Stages(m_tiler, n_tiler, *((r, 1) if r else None for r in rows))
            self.stages = Stages(m, n, *(self._scales(r) if r else None for r in rows))
        #: Blocks of output, of one warp each, that TMA stores, or None if it stores none.
        self.out = None
        if config.stores_by_tma:
            rows, cols = config.block_shape
            atom = warpgroup.make_smem_layout_atom(_Kind.K_SW128, DSL_TYPES[config.out_dtype])
            blocks = config.consumers * config.num_store_stage * WARPS
            self.out = cute.tile_to_shape(atom, (rows // WARPS, cols, blocks), (0, 1, 2))
        if config.interleaves_halves:
            names = ("m", "m_scales") if tile.swap_ab else ("n", "n_scales")
            tilers = {name: getattr(self.tilers, name) for name in names}
            self.tilers = self.tilers._replace(
                **{name: ((2, t[0] // 2), *t[1:]) for name, t in tilers.items() if t is not None}
            )

    def mma_of_width(self, width: int) -> cute.TiledMma:
        """Return the tiled MMA of a number of columns."""
        config, source = self.config, warpgroup.OperandSource
        return hopper_helpers.make_trivial_tiled_mma(
            *self.elements,
            *(OperandMajorMode.MN if mn else OperandMajorMode.K for mn in config.mn_major),
            Float32,
            (config.consumers, 1, 1),
            (WARPGROUP_M, width),
            source.RMEM if config.is_decoded else source.SMEM,
        )

    def _staged(self, operand: int, tiler: tuple[int, int], mn_major: bool) -> Any:
        """Return the layout of the stages of operand M (0) or N (1)."""
        element = self.elements[operand]
        width = element.width // 8 * tiler[0 if mn_major else 1]
        swizzles = _MN_SWIZZLES if mn_major else _K_SWIZZLES
        atom = warpgroup.make_smem_layout_atom(swizzles[min(width, 128)], element)
        order = (1, 0, 2) if mn_major else (0, 1, 2)
        return cute.tile_to_shape(atom, (*tiler, self.config.num_ab_stage), order)

    def _scales(self, rows: int) -> cute.Layout:
        """Return the layout of the stages of scales of single rows."""
        return cute.make_layout((rows, 1, self.config.num_ab_stage), stride=(1, rows, rows))


class Barriers(NamedTuple):
    """Full and empty barriers of the pipelines, and small buffers, in shared memory.

    Attributes:
        ab: Barriers of the stages.
        sched: Barriers of the tile records.
        tiles: Tile records.
        blocks: Blocks that the epilogue stages, bytes or ``Layouts.out``.
        factors: fp32 factors of a tile's rows for each warpgroup, or amaxes of rows. None if
            absent.
        numbers: Barriers of the tile numbers that a cluster's first CTA passes on. None if absent.
    """

    ab: cute.Pointer
    sched: cute.Pointer
    tiles: cute.Tensor
    blocks: cute.Tensor
    factors: cute.Tensor | None
    numbers: cute.Pointer | None

    @staticmethod
    def allocate(
        config: Sm90GemmConfig, layouts: Layouts, smem: cutlass.memory.SmemAllocator
    ) -> "Barriers":
        """Allocate the barriers and buffers."""
        words = cute.make_layout(
            config.num_sched_stage * TILE_WORDS + 4 * config.uses_dynamic_scheduling
        )
        size = config.consumers * config.num_store_stage * config.block_bytes
        factors = None
        if config.factor_words:
            layout = cute.make_layout(config.factor_words)
            factors = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        blocks = (Uint8, cute.make_layout(size), 128)
        if layouts.out is not None:
            blocks = (DSL_TYPES[config.out_dtype], layouts.out.outer, 1024, layouts.out.inner)
        return Barriers(
            ab=stage_barriers(smem, config.num_ab_stage),
            sched=stage_barriers(smem, config.num_sched_stage),
            tiles=smem.allocate_tensor(Int32, words, byte_alignment=16),
            blocks=smem.allocate_tensor(*blocks),
            factors=factors,
            numbers=stage_barriers(smem, 1)
            if config.uses_dynamic_scheduling and config.tile.num_ctas > 1
            else None,
        )


class Pipelines(NamedTuple):
    """Pipelines between the warps."""

    ab: pipeline.PipelineTmaAsync
    ring: pipeline.PipelineAsync
    numbers: pipeline.PipelineAsync | None


def make_pipelines(config: Sm90GemmConfig, warps: WarpSchedule, barriers: Barriers) -> Pipelines:
    """Create the pipelines over the barriers."""
    ab_pipeline = make_pipeline(
        *(pipeline.PipelineTmaAsync, barriers.ab, config.num_ab_stage, warps.stage_arrivals),
        # A stage that several CTAs write is free when the consumers of all of them are done.
        warps.num_consumer_warps * config.tile.num_ctas,
        tx_count=config.stage_bytes - (config.n_stage_bytes[0] if config.gathered else 0),
        cta_layout_vmnk=cute.make_layout((1, config.tile.num_ctas, 1, 1)),
    )
    stages, consumers = config.num_sched_stage, warps.tile_consumer_arrivals
    ring = make_pipeline(pipeline.PipelineAsync, barriers.sched, stages, 1, consumers)
    numbers = None
    if barriers.numbers is not None:
        numbers = make_pipeline(pipeline.PipelineAsync, barriers.numbers, 1, 1, 1)
    return Pipelines(ab_pipeline, ring, numbers)
