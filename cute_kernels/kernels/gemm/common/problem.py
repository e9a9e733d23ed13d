"""The sizes of a grouped GEMM, and the arguments of its kernel.

Sizes are named by the product of which a tile of the output is made, ``D[M, N] = sum over K``:

=========== ============================ ============================ =========================
grouping    M                            N                            K
=========== ============================ ============================ =========================
m_grouped   rows of the ragged tensor    columns of the output        contracted, uniform
k_grouped   columns of A                 columns of B                 rows of a group, ragged
=========== ============================ ============================ =========================

With ``swap_ab`` M and N of an m_grouped product change places. A tile of the tensor core has at
least 64 or 128 rows of M, most of which would be empty with few rows per group. But it may be
narrow in N.

The *tail* is the rows of a buffer after its last group. The last tile of a group is *partial* if
the group's rows do not fill it.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

#: N of every output must be a multiple of this: 16 bytes of the narrowest output type.
N_ALIGN = 8
#: Most rows of a buffer whose groups bound K: TMA addresses them in a mode of this extent.
RAGGED_ROWS = 2**30

GemmGrouping = Literal["m_grouped", "k_grouped"]


@dataclass(frozen=True)
class TileShape:
    """Rows of operands M and N that the tensor core works on at a time; architectures add fields.

    Attributes:
        m: Rows of operand M.
        n: Rows of operand N.
        num_ctas: CTAs of a cluster, which share a tile or have neighbouring tiles.
        swap_ab: True if operand M is B and operand N is A, see the module's docstring.
    """

    m: int
    n: int
    num_ctas: int = 1
    swap_ab: bool = False

    @property
    def cluster_m(self) -> int:
        """Rows of operand M in a cluster's tile."""
        return self.m

    @property
    def rows(self) -> int:
        """Rows of the output in a cluster's tile."""
        return self.n if self.swap_ab else self.cluster_m

    @property
    def cols(self) -> int:
        """Columns of the output in a cluster's tile."""
        return self.cluster_m if self.swap_ab else self.n


@dataclass(frozen=True)
class RowRange:
    """The row tiles of an m_grouped product that one kernel takes, if several kernels share it.

    A group is cut into tiles of ``chunk_rows`` rows, and one tile of the remaining rows. Every tile
    is taken by the kernel whose range, from ``min_rows`` (exclusive) to ``max_rows``, contains the
    number of its rows. So large groups get wide tiles and small ones narrow tiles, and the host
    need not know the sizes. A kernel that ``is_later`` starts on the SMs that the previous kernel
    has left.
    """

    chunk_rows: int
    min_rows: int
    max_rows: int
    is_later: bool = False


@dataclass(frozen=True)
class GemmProblem:
    """Sizes and types of a call, known on the host, that decide which kernels can compute it.

    Attributes:
        operand: Name of the operand kind of A.
        grouping: "m_grouped" or "k_grouped".
        out_dtype: Dtype of the output.
        groups: Number of groups, G.
        rows: Rows of the buffer, T. For slots in a k_grouped product it is the number of rows that
            they can hold.
        n: Columns of the product.
        m: Columns of A in a k_grouped product.
        k: K of an m_grouped product.
    """

    operand: str
    grouping: GemmGrouping
    out_dtype: str
    groups: int
    rows: int
    n: int
    m: int = 0
    k: int = 0


class GemmArguments(NamedTuple):
    """Arguments of a grouped GEMM kernel, in its order. A traced kernel also takes a stream.

    Operands and block scales are those of sm_90a. The kernel of sm_100a documents its differences.

    Attributes:
        a: (T, K). Elements that are multiplied. In a k_grouped product (T, M), or (M, slots) if
            quantized, or (M, 64 * tiles) codes.
        a_scales: Scale tiles of codes, or fp32 scales, see ``FakeArguments``.
        a_amax: (G,) fp32 for the global scale, or (T,) if it is row-scaled.
        b: (G, N, K) or (G, K, N), or (G, N, >= K / 2) codes. In a k_grouped product (T, N), or (N,
            slots).
        b_scales: Block scales of B. They may have a matrix per group.
        b_amax: (G,) fp32.
        offs: (G,) int32. End rows.
        rows: (T,) int32. Row index of ``a``, or of ``b`` in a k_grouped product, if ``gathered``.
        bias: (G, N).
        alpha: (G,) fp32.
        out: (T, N), or (G, M, N) of a k_grouped product.
        num_sms: CTAs to launch, rounded down to whole clusters. At least one cluster.
        z: (T, N). The preactivation, if it is stored.
        out_scales: Block scales of a quantized output, see ``FakeArguments``.
        out_global_scale: (G,) fp32. The amaxes to which they are relative, for a format with a
            global scale.
        counter: (1,) int32 with dynamic scheduling. It is 0 before and after a launch.
    """

    a: Any
    a_scales: Any
    a_amax: Any
    b: Any
    b_scales: Any
    b_amax: Any
    offs: Any
    rows: Any
    bias: Any
    alpha: Any
    out: Any
    num_sms: Any
    z: Any = None
    out_scales: Any = None
    out_global_scale: Any = None
    counter: Any = None

    def in_order(self, swap_ab: bool) -> tuple[Any, Any, Any, Any]:
        """Return operands M and N, and their block scales."""
        if swap_ab:
            return self.b, self.a, self.b_scales, self.a_scales
        return self.a, self.b, self.a_scales, self.b_scales


class Extents(NamedTuple):
    """Sizes of a product inside a kernel.

    Attributes:
        rows: Rows of the buffer.
        m: M of one group.
        n: N of one group.
        k: K; unused in a k_grouped product.
    """

    rows: Any
    m: Any
    n: Any
    k: Any
