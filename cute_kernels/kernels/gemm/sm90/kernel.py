"""The persistent, warp-specialised grouped GEMM for sm_90a.

Roles of a CTA and the pipelines between them:

========== ======================== =======================================================
pipeline   from -> to               full; empty
========== ======================== =======================================================
tile ring  scheduler -> all others  one arrival; one per warp
numbers    scheduler -> other CTA's one arrival; one
ab         load -> consumers        the bytes of a stage; one per consumer warp of the cluster
ab         gather -> consumers      one per lane, once its copies are there
========== ======================== =======================================================
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint8, const_expr, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from cute_kernels.device.launch import env_stream

from ..common.fakes import FakeArguments
from ..common.loader import (
    LoadWarp,
    StageLoad,
    TmaSource,
    paired_sources,
    source_attributes,
)
from ..common.operand_kinds import OPERANDS
from ..common.output_store import EpilogueTensors, OutputStore, store_source
from ..common.problem import Extents, GemmArguments
from ..common.scheduler import TileReader, TileScheduler
from ..common.views import (
    codes_view,
    extents_of,
    interleaved_rows,
    matrix_view,
    ragged_rows_view,
    row_scales_view,
    scale_words_view,
    squares_view,
)
from .config import Sm90GemmConfig
from .consumer import Consumer
from .epilogue import Epilogue, StoreWarps
from .gather import Gathered, GatherWarp
from .promotion import Promoter
from .storage import Barriers, Layouts, Stages, make_pipelines
from .warp_schedule import WarpSchedule


class Sources(NamedTuple):
    """TMA sources, or their atoms or coordinates alone, of each tensor that TMA moves.

    Attributes:
        m: Elements or codes of operand M.
        n: Elements of operand N. None if they are gathered.
        m_scales: Block scales of operand M, of tiles or of single rows. None if absent.
        n_scales: Block scales of operand N, of single rows. None if absent.
        out: The output. None if TMA does not store it.
    """

    m: Any
    n: Any
    m_scales: Any = None
    n_scales: Any = None
    out: Any = None


class Sm90Gemm:
    """Grouped GEMM of one configuration. See the module's docstring."""

    def __init__(self, config: Sm90GemmConfig):
        self.config = config
        self.warps = WarpSchedule(config.consumers, config.has_store_warpgroup, config.gather_warps)

    @staticmethod
    def fake_args(config: Sm90GemmConfig) -> tuple[Any, ...]:
        """Return the fake arguments for compilation."""
        fake = FakeArguments(config)
        arguments = fake.arguments()
        if config.expanded == "a":
            arguments = arguments._replace(a=fake.expanded(config.multiplied), a_scales=None)
        if config.expanded == "b":
            arguments = arguments._replace(b=fake.expanded(config.multiplied), b_scales=None)
        if config.activations is not None:
            arguments = arguments._replace(a_amax=None)
        return (*arguments, env_stream())

    @cute.jit
    def __call__(self, *args: Any) -> None:
        """Launch the kernel with ``GemmArguments`` and a stream.

        If one operand is codes, the fp16 or bf16 elements of the other are in the order of
        ``decode``, and its K is a multiple of 128.
        """
        config, layouts = self.config, Layouts(self.config)
        x, stream = GemmArguments(*args[:-1]), args[-1]
        m, n, m_scales, n_scales = x.in_order(config.tile.swap_ab)
        # Codes of B may be padded along K.
        depth = x.a.shape[1] if config.grouping == "m_grouped" else None
        m, n = self.views(m, n, depth)
        sources = Sources(self.source(m, layouts.stages.m, layouts.tilers.m), None)
        if const_expr(not config.gathered):
            sources = sources._replace(
                n=self.source(n, layouts.stages.n, layouts.tilers.n, config.tile.num_ctas)
            )
        if const_expr(config.is_decoded):
            words = scale_words_view(m_scales)
            if const_expr(config.interleaves_halves):
                words = interleaved_rows(words)
            scales = self.source(words, layouts.stages.m_scales, layouts.tilers.m_scales)
            sources = sources._replace(m_scales=scales)
        squares = (None, None)
        if const_expr(config.kind.has_row_scales):
            rows_of, squares = self.row_scales(layouts, m_scales, n_scales)
            sources = sources._replace(m_scales=rows_of[0], n_scales=rows_of[1])
        if const_expr(config.stores_by_tma):
            sources = sources._replace(out=store_source(x.out, layouts.out))
        gathered = None
        if const_expr(config.gathered):
            gathered = Gathered(x.b if config.grouping == "k_grouped" else x.a, x.rows)
        self.kernel(
            source_attributes(Sources, sources, "atom"),
            source_attributes(Sources, sources, "tensor"),
            squares,
            EpilogueTensors.from_arguments(x),
            gathered,
            x.offs,
            extents_of(config, x, m, n),
            x.counter,
        ).launch(
            grid=[x.num_sms // config.tile.num_ctas * config.tile.num_ctas, 1, 1],
            block=[self.warps.num_threads, 1, 1],
            cluster=[config.tile.num_ctas, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=config.handled_rows.is_later,
        )

    def views(self, m: cute.Tensor, n: cute.Tensor, depth: Any) -> tuple[cute.Tensor, cute.Tensor]:
        """Return operands M and N as (rows, K, groups), or M as (rows, bytes, groups) of codes.

        ``depth`` is K.
        """
        config = self.config
        if config.ragged_k:
            return ragged_rows_view(m), ragged_rows_view(n)
        if config.is_decoded:
            m, n = codes_view(m), matrix_view(n, OPERANDS[config.multiplied], False)
        else:
            m_major, n_major = config.mn_major
            m, n = (
                matrix_view(m, config.m_kind, m_major, depth),
                matrix_view(n, config.n_kind, n_major, depth),
            )
        if not config.interleaves_halves:
            return m, n
        return (interleaved_rows(m), n) if config.tile.swap_ab else (m, interleaved_rows(n))

    def row_scales(
        self, layouts: Layouts, m_scales: cute.Tensor, n_scales: cute.Tensor
    ) -> tuple[list[TmaSource | None], tuple[cute.Tensor | None, ...]]:
        """Return the copies of fp32 scales of single rows, and the views of scales of squares.

        Both have an entry for operand M and one for operand N, None without.
        """
        staged, tilers = layouts.stages, layouts.tilers
        sides = (
            (m_scales, staged.m_scales, tilers.m_scales),
            (n_scales, staged.n_scales, tilers.n_scales),
        )
        rows = [
            tiler and self.source(row_scales_view(x), stages, tiler) for x, stages, tiler in sides
        ]
        return rows, tuple(squares_view(x) if tiler is None else None for x, _, tiler in sides)

    def source(
        self, tensor: cute.Tensor, staged: Any, tiler: tuple[int, ...], sharers: int = 1
    ) -> TmaSource:
        """Return the TMA copy of one stage of a tensor that ``sharers`` CTAs load together."""
        stage = cute.slice_(staged, (*[None] * len(tiler), 0))
        op = cpasync.CopyBulkTensorTileG2SOp()
        if sharers > 1:
            op = cpasync.CopyBulkTensorTileG2SMulticastOp()
        return TmaSource(*cpasync.make_tiled_tma_atom(op, tensor, stage, tiler, sharers))

    @cute.kernel
    def kernel(
        self,
        atoms: Sources,
        tensors: Sources,
        squares: tuple[cute.Tensor | None, ...],
        epilogue_tensors: EpilogueTensors,
        gathered: Gathered | None,
        offs: cute.Tensor,
        extents: Extents,
        counter: cute.Tensor | None,
    ) -> None:
        """Run the role of each warp.

        Args:
            atoms: TMA copies of the sources and the output.
            tensors: Coordinates of the sources and the output.
            squares: fp32 scales of squares of operands M and N. None without.
            epilogue_tensors: Tensors of the epilogue.
            gathered: Rows that are gathered. None if absent.
            offs: (G,) int32. End rows.
            extents: Sizes of the product.
            counter: (1,) int32 with dynamic scheduling. Otherwise None.
        """
        config, warps = self.config, self.warps
        layouts = Layouts(config)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

        smem = cutlass.memory.SmemAllocator()
        barriers = Barriers.allocate(config, layouts, smem)
        ab_pipeline, ring, numbers = make_pipelines(config, warps, barriers)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(config.tile.num_ctas, 1))
        shared = self.allocate_stages(smem, layouts)
        pipeline.pipeline_init_wait(cluster_shape_mn=(config.tile.num_ctas, 1))

        if const_expr(config.row_range is not None):
            # The next kernel's CTAs replace the CTAs of this one: each needs a whole SM.
            cute.arch.griddepcontrol_launch_dependents()
        tiles = TileReader(ring, barriers.tiles)
        consumer_registers, other_registers = warps.registers
        if warp < warps.num_consumer_warps:
            cute.arch.setmaxregister_increase(consumer_registers)
            buffers = (barriers.blocks, barriers.factors)
            store = OutputStore(atoms.out, tensors.out, barriers.blocks)
            epilogue = Epilogue(config, epilogue_tensors, *buffers, cta, output_store=store)
            promoter = None
            if const_expr(config.promotes):
                promoter = Promoter(config, shared, squares, cta)
            Consumer(config, layouts, shared, tiles, ab_pipeline, epilogue, promoter).run()
        else:
            if const_expr(config.has_store_warpgroup):
                if warp >= warps.first_store_warp:
                    cute.arch.setmaxregister_decrease(warps.store_registers)

                    def epilogue_of_group(group: Int32) -> Epilogue:
                        return Epilogue(
                            config, epilogue_tensors, barriers.blocks, barriers.factors, cta, group
                        )

                    StoreWarps(config, tiles, epilogue_of_group).run()
                else:
                    cute.arch.setmaxregister_decrease(other_registers)
            else:
                cute.arch.setmaxregister_decrease(other_registers)
            if warp == warps.scheduler_warp_id:
                TileScheduler(config, ring, barriers.tiles, offs, extents, counter, numbers).run()
            if warp == warps.load_warp_id:
                sources = paired_sources(Sources, atoms, tensors)
                loads = self.stage_loads(layouts, sources, shared, cta)
                LoadWarp(config, *loads, tiles, ab_pipeline).run()
            if const_expr(config.gathered):
                if warp >= warps.first_gather_warp:
                    number = warp - warps.first_gather_warp
                    GatherWarp(config, gathered, shared, tiles, ab_pipeline, number).run()
            if const_expr(config.handled_rows.is_later):
                # The kernels that share a product write different rows. But a kernel that waits for
                # this one must wait for the previous ones, too.
                if warp == warps.scheduler_warp_id and cute.arch.block_idx()[0] == 0:
                    cute.arch.griddepcontrol_wait()

    def allocate_stages(self, smem: cutlass.memory.SmemAllocator, layouts: Layouts) -> Stages:
        """Allocate the stages of both operands, and of their block scales, in shared memory."""

        def swizzled(layout: cute.ComposedLayout, element: Any) -> cute.Tensor:
            return smem.allocate_tensor(
                element, layout.outer, byte_alignment=1024, swizzle=layout.inner
            )

        def scales(layout: cute.Layout | None) -> cute.Tensor | None:
            if layout is None:
                return None
            return smem.allocate_tensor(Float32, layout, byte_alignment=128)

        staged, (m_element, n_element) = layouts.stages, layouts.elements
        if not self.config.is_decoded:
            m, n = swizzled(staged.m, m_element), swizzled(staged.n, n_element)
            return Stages(m, n, scales(staged.m_scales), scales(staged.n_scales))
        return Stages(
            m=smem.allocate_tensor(Uint8, staged.m, byte_alignment=1024),
            n=swizzled(staged.n, n_element),
            m_scales=smem.allocate_tensor(Int32, staged.m_scales, byte_alignment=128),
        )

    def stage_loads(
        self, layouts: Layouts, sources: Sources, shared: Stages, cta: Int32
    ) -> tuple[tuple[StageLoad, ...], tuple[StageLoad, ...]]:
        """Return the loads of operands M and N, and of their block scales."""
        tile, kind = self.config.tile, self.config.kind

        def private_load(name: str, k_divisor: int, is_scale: bool = False) -> StageLoad:
            """Return the load of a tensor that no other CTA shares."""
            tensors = (getattr(x, name) for x in (sources, shared, layouts.tilers))
            first_row = cta * tile.m if name.startswith("m") else Int32(0)
            return StageLoad(*tensors, k_divisor, first_row, Int32(0), 1, is_scale)

        common = (Int32(0), cta, tile.num_ctas, False)
        operand_n = []
        if sources.n is not None:
            operand_n.append(StageLoad(sources.n, shared.n, layouts.tilers.n, 1, *common))
        if self.config.is_decoded:
            codes, scales = (
                private_load("m", 8 // kind.bits),
                private_load("m_scales", kind.scale_tile_k, True),
            )
            return (codes, scales), tuple(operand_n)
        operand_m = [private_load("m", 1)]
        for name, loads in (("m_scales", operand_m), ("n_scales", operand_n)):
            if getattr(sources, name) is not None:
                loads.append(private_load(name, kind.sf_vec_size, True))
        return tuple(operand_m), tuple(operand_n)
