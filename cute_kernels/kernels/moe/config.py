"""What the kernels of a mixture of experts are compiled for; shapes stay dynamic."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class RoutingConfig:
    """The stable counting sort of tokens by expert; each of the CTAs of a cluster counts all pairs."""

    ids: str = "int64"
    ctas: int = 8
    warps: int = 32

    #: The compiled function takes (expert_ids, offs, token, pair, row, top_k): expert_ids, token,
    #: pair and row of n = T * top_k elements, offs (E,), all but the ids int32.
    kernel: ClassVar[str] = "cute_kernels.kernels.moe.routing:RoutingKernel"


@dataclass(frozen=True)
class RouterConfig:
    """The choice of experts by logits.

    ``per_lane``: scores of a lane, a power of two; ``biased``: there is a selection bias; ``ends``:
    tokens end somewhere.
    """

    score: str
    renormalize: bool = True
    per_lane: int = 4
    biased: bool = False
    grouped: bool = False
    ends: bool = False

    #: The compiled function takes (logits, bias, end, weights, ids, scores, groups, top_groups,
    #: factor, num_sms): logits and scores (T, E), bias (E,) or None, weights (T, k) fp32, end (1,)
    #: int32 or None, ids (T, k) int64.
    kernel: ClassVar[str] = "cute_kernels.kernels.moe.router:RouterKernel"


@dataclass(frozen=True)
class RouterGradientConfig:
    """The gradient of that, attributes as there;

    ``biased``: of scores, too; ``in_parts``: as three bf16 numbers.
    """

    score: str
    renormalize: bool = True
    per_lane: int = 4
    biased: bool = False
    in_parts: bool = False

    #: The compiled function takes (dweights, dscores, ids, scores, dlogits, factor, num_sms),
    #: shapes as there.
    kernel: ClassVar[str] = "cute_kernels.kernels.moe.router:RouterGradientKernel"


@dataclass(frozen=True)
class GatherConfig:
    """Rows by an index; a lane moves ``width`` bytes at once, which divide the bytes of a row: 16,
    4 or 2.
    """

    width: int = 16

    #: The compiled function takes (x, index, out, num_sms): x (T, W) and out (R, W) integers of 4
    #: bytes, or 2 where that is the width; index (R,) int32.
    kernel: ClassVar[str] = "cute_kernels.kernels.moe.gather_combine:GatherKernel"


@dataclass(frozen=True)
class SpreadConfig(GatherConfig):
    """The same token by token: one read of each row of x."""

    #: The compiled function takes (x, index, row, out, num_sms), row (T, k) int32.
    kernel: ClassVar[str] = "cute_kernels.kernels.moe.gather_combine:SpreadKernel"


@dataclass(frozen=True)
class CombineConfig:
    """The weighted sum of each token's rows.

    With ``vectorized`` rows and sums are read and written 16 bytes of a row at a time.
    """

    dtype: str = "bfloat16"
    out: str = "bfloat16"
    weighted: bool = True
    vectorized: bool = True

    #: The compiled function takes (h, row, weight, y, num_sms): h (R, H), row (T, k) int32, weight
    #: (T, k) fp32 or None, y (T, H).
    kernel: ClassVar[str] = "cute_kernels.kernels.moe.gather_combine:CombineKernel"


@dataclass(frozen=True)
class ActivateConfig:
    """An activation of the rows of experts, or its gradient, with that of weights if rows have any.

    With ``ragged`` rows of a tail are left alone; with ``vectorized`` eight columns of the result
    are 16 bytes or more.
    """

    activation: str
    arch: str
    dtype: str = "bfloat16"
    gradient: bool = False
    weighted: bool = False
    interleaved: bool = False
    ragged: bool = True
    vectorized: bool = True

    #: The compiled function takes (x, grad, offs, weight, pair, out, scaled, dweight, num_sms):
    #: x (R, W); grad (R, N), weight and dweight (T * k,) fp32, pair (R,) int32 and scaled (R, N),
    #: each None where there is none; out (R, N), or (R, W) of a gradient.
    kernel: ClassVar[str] = "cute_kernels.kernels.moe.activate:ActivateKernel"
