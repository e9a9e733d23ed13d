"""What a grouped GEMM is asked for, and what the configurations of all its kernels have in common.

Configurations are specs of kernels (``runtime.spec``); group boundaries and the number of SMs stay
dynamic, too.

Sizes are named by the product that a tile of the output is made of, ``D[M, N] = sum over K``:

=========== ============================ ============================ =========================
grouping    M                            N                            K
=========== ============================ ============================ =========================
m_grouped   rows of the ragged tensor    columns of the output        contracted, uniform
k_grouped   columns of A                 columns of B                 rows of a group, ragged
=========== ============================ ============================ =========================

With ``swap_ab`` M and N of an m_grouped product change places: a tile of the tensor core has at
least 64 or 128 rows of M, which few rows a group would leave empty, but may be narrow in N.

Two words: the *tail* is what a buffer has after the rows of its last group; the last tile of a
group is *partial* if the group's rows do not fill it.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

#: N of every output must be a multiple of this: 16 bytes of the narrowest output type.
N_ALIGN = 8
#: Rows of a buffer whose groups bound K, at most: TMA addresses them in a mode of this extent.
RAGGED_ROWS = 2**30

GemmGrouping = Literal["m_grouped", "k_grouped"]


@dataclass(frozen=True)
class TileShape:
    """What the tensor core works on at a time, rows of operands M and N; architectures add to it.

    ``num_ctas`` CTAs share a tile, or neighbouring tiles: a cluster. With ``swap_ab`` operand M is
    B and operand N is A, see the module.
    """

    m: int
    n: int
    num_ctas: int = 1
    swap_ab: bool = False

    @property
    def cluster_m(self) -> int:
        return self.m

    @property
    def rows(self) -> int:
        return self.n if self.swap_ab else self.cluster_m

    @property
    def cols(self) -> int:
        return self.cluster_m if self.swap_ab else self.n


@dataclass(frozen=True)
class RowRange:
    """The row tiles of an m_grouped product that one kernel takes, where several share it.

    A group is cut into tiles of ``chunk`` rows and one of what is left. Every tile is taken by the
    kernel whose range, from ``least`` (exclusive) to ``most``, holds its rows, so large groups get
    wide tiles and small ones narrow tiles without the host knowing which are which. A part that
    ``follows`` another starts on the SMs that are done with that one.
    """

    chunk_rows: int
    min_rows: int
    max_rows: int
    is_later: bool = False


@dataclass(frozen=True)
class GemmProblem:
    """The facts of a call that decide which kernels can run it; all known on the host.

    ``rows`` is T, the rows of the buffer, or of slots in a k_grouped product the most they hold;
    ``n`` are columns of the output, ``m`` those of A in a k_grouped product, ``k`` is K of an
    m_grouped one.
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
    """Arguments of a grouped GEMM kernel, in its order; a stream follows where it is traced.

    Operands and block scales are those of sm_90a; what differs on sm_100a is with its kernel.

    Attributes:
        a: (T, K) elements that are multiplied; in a k_grouped product (T, M), or (M, slots) if
            they are quantized, or (M, 64 * tiles) codes.
        a_scales: scale tiles if it is codes; fp32 scales, see ``FakeArguments``.
        a_amax: (G,) fp32 second level, or (T,) when row-scaled.
        b: (G, N, K) or (G, K, N), or (G, N, >= K / 2) codes; in a k_grouped product (T, N), or
            (N, slots).
        offs: (G,) int32 end rows.
        rows: (T,) int32, which rows of ``a``, or of ``b`` in a k_grouped product, are
            multiplied where they are ``gathered``.
        bias: (G, N).
        alpha: (G,) fp32.
        out: (T, N), or (G, M, N) of a k_grouped product.
        num_sms: CTAs to launch, rounded down to whole clusters; at least one cluster.
        z: (T, N), where the output has what an activation makes of it, if it is kept.
        out_scales: block scales of a quantized output, see ``FakeArguments``.
        out_global_scale: (G,) fp32, the amaxes that those are relative to, of a format with a second
            level.
        counter: (1,) int32, 0 before a launch and after it, of one that ``uses_dynamic_scheduling``.
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
        if swap_ab:
            return self.b, self.a, self.b_scales, self.a_scales
        return self.a, self.b, self.a_scales, self.b_scales


class Extents(NamedTuple):
    """Sizes of a product inside a kernel: rows of the buffer, M and N of one group, and K.

    K is unused in a k_grouped product.
    """

    rows: Any
    m: Any
    n: Any
    k: Any
