"""Rows of tokens into the stages by an index: TMA copies four rows for each lane (``gather4``).

A stage has some rows in panels of 128 bytes. In an m_grouped product those are rows of the tile,
the same in all its stages. In a k_grouped product a stage has the next rows along K. Rows past the
group's last have the number -1: TMA returns zeros for numbers out of range.
"""

from typing import Any

from cutlass import Int32, Int64, Uint32, const_expr, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.nvgpu import cpasync, tcgen05

from cute_kernels.device.memory import load_global_if
from cute_kernels.device.ptx import asm_volatile, select
from cute_kernels.layout.shapes import PITCH_ALIGNMENT

from ..common.loader import TmaSource
from ..common.scheduler import WorkTile
from ..common.views import element_type
from .config import Sm100GemmConfig
from .storage import Stages

#: Rows of a copy, and bytes of each.
_ROWS, _ROW_BYTES = 4, 128
#: Mask that turns the address of a barrier into that of the first CTA of a pair.
_FIRST_OF_PAIR = 0xFEFFFFFF


def row_source(config: Sm100GemmConfig, matrix: cute.Tensor) -> TmaSource:
    """Return the TMA copy of ``_ROW_BYTES`` of one row of a matrix."""
    element = element_type(config.kind)
    width = _ROW_BYTES * 8 // element.width
    pitch = cute.assume(Int64(matrix.stride[0]), PITCH_ALIGNMENT * 8 // element.width)
    tensor = cute.make_tensor(matrix.iterator, cute.make_layout(matrix.shape, stride=(pitch, 1)))
    swizzle = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, element).inner
    row = cute.make_composed_layout(swizzle, 0, cute.make_layout((1, width), stride=(width, 1)))
    return TmaSource(
        *cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, row, (1, width))
    )


class GatherLoad:
    """Load of this CTA's rows by an index.

    Args:
        config: Configuration of the kernel.
        atom: TMA copy of ``_ROW_BYTES`` of a row of the matrix.
        index: (T,) int32. The row of the matrix for each row of the product.
        shared: Stages in shared memory.
        cta: Number of this CTA in the pair.
    """

    def __init__(
        self, config: Sm100GemmConfig, atom: Any, index: cute.Tensor, shared: Stages, cta: Int32
    ):
        self.config = config
        self.atom, self.index = atom, index
        self.cta = cta
        self.along_k = config.grouping == "k_grouped"
        self.is_m = not (self.along_k or config.tile.swap_ab)
        stages = shared.m if self.is_m else shared.n
        stage_k = config.mma_tiler_mnk[2]
        self.stage_bytes = config.element_stage_bytes[0 if self.is_m else 1]
        #: Elements of a panel, rows of this CTA across it.
        self.width = _ROW_BYTES * 8 // config.kind.bits
        self.cta_rows = (config.tile.m if self.is_m else config.tile.n) // config.tile.num_ctas
        panels, self.rows = (
            (self.cta_rows // self.width, stage_k) if self.along_k else (1, self.cta_rows)
        )
        copies = self.rows // _ROWS
        lane = cute.arch.lane_idx()
        self.row, self.panel = lane % copies * _ROWS, lane // copies
        self.copies_rows = self.panel < panels
        coordinate = ((self.row, 0), 0, 0, 0)
        if self.along_k:
            k = config.instruction_k
            coordinate = ((self.panel % panels * self.width, self.row % k), 0, self.row // k, 0)
        self.shared = stages.iterator.toint() + cute.crd2idx(coordinate, stages.layout) * (
            config.kind.bits // 8
        )
        self.barrier_mask = Int32(_FIRST_OF_PAIR - (1 << 32) if config.tile.num_ctas > 1 else -1)

    @cute.jit
    def start(self, tile: WorkTile, cta_rows: Any) -> cute.Tensor:
        """Return the row numbers of this lane's first copies.

        The CTA before this one has ``cta_rows`` rows of the tile; along K both have all rows.
        """
        rows = cute.make_rmem_tensor(_ROWS, Int32)
        if const_expr(self.along_k):
            self.list_rows(rows, tile.k_start, tile.rows)
        else:
            cta_first_row = self.cta * cta_rows
            self.list_rows(
                rows,
                (tile.m_row if self.is_m else tile.n_row) + cta_first_row,
                tile.rows - cta_first_row,
            )
        return rows

    def list_rows(self, rows: cute.Tensor, first_row: Int32, num_rows: Int32) -> None:
        """Read this lane's row numbers of a stage.

        The stage's rows begin at ``first_row`` in the index, and ``num_rows`` rows are left in the
        group.
        """
        for i in range(_ROWS):
            local = self.row + i
            address = self.index.iterator.toint() + Int64(first_row + local) * 4
            read = load_global_if(address, 4, local, num_rows)[0]
            rows[i] = Int32(select(local < num_rows, read, Uint32(0xFFFFFFFF)))

    @cute.jit
    def copy(
        self,
        rows: cute.Tensor,
        tile: WorkTile,
        k_tile: Int32,
        stage: Int32,
        barrier: cute.Pointer,
        end: Any,
    ) -> None:
        """Fill the ``k_tile``-th stage of a tile up to row ``end``.

        Then read the row numbers of the next stage, if it has other rows.
        """
        column = k_tile * self.width
        if const_expr(self.along_k):
            column = tile.n_row + self.cta * self.cta_rows + self.panel * self.width
        is_copied = Int32(self.copies_rows & (self.row < end))
        address, barrier = (
            self.shared + stage * self.stage_bytes,
            barrier.toint() & self.barrier_mask,
        )
        self.issue(
            [
                address,
                _address(self.atom),
                column,
                *(rows[i] for i in range(_ROWS)),
                barrier,
                is_copied,
            ]
        )
        if const_expr(self.along_k):
            rows_read = (k_tile + 1) * self.rows
            self.list_rows(rows, tile.k_start + rows_read, tile.rows - rows_read)

    def issue(self, operands: list[Any]) -> None:
        """Issue a predicated ``gather4`` copy."""
        name = "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier"
        name += "::complete_tx::bytes"
        if self.config.tile.num_ctas > 1:
            name += ".cta_group::2"
        asm_volatile(
            f"""{{
        .reg .pred p;
        setp.ne.s32 p, $8, 0;
        @p {name}
          [$0], [$1, {{$2, $3, $4, $5, $6}}], [$7];
        }}""",
            operands,
        )


def _address(atom: cute.CopyAtom) -> Int64:
    copy = cute_nvgpu.atom_make_exec_tma(atom._trait.value)
    kind = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<128>>")
    return Int64(cute_nvgpu.get_tma_desc_addr(kind, copy).toint())
