"""Configurations of the kernels of a mixture of experts; shapes stay dynamic."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class RoutingConfig:
    """The stable counting sort of (token, expert) pairs by expert.

    Each CTA of a cluster counts all pairs.

    Attributes:
        ids: Data type of the expert ids, ``"int32"`` or ``"int64"``.
        ctas: CTAs of a cluster.
        warps: Warps of a CTA.
        mapped: True if a map gives the expert of each id.
    """

    ids: str = "int64"
    ctas: int = 8
    warps: int = 32
    mapped: bool = False

    #: The compiled function takes (expert_ids, expert_map, offs, token, pair, row, top_k).
    #: ``expert_ids``, ``token``, ``pair``, ``row``: (T * top_k,); ``expert_map``: (N,) or None;
    #: ``offs``: (E,). All but the ids are int32.
    kernel: ClassVar[str] = "cute_kernels.kernels.moe.routing:RoutingKernel"


@dataclass(frozen=True)
class RouterConfig:
    """The choice of experts from logits.

    Attributes:
        score: Score of an expert, ``"softmax"`` or ``"sigmoid"``.
        renormalize: True if weights of a token are divided by their sum.
        per_lane: Scores per lane, a power of two.
        biased: True if a bias is added to the scores for the choice.
        grouped: True if experts are chosen from the best groups of experts.
        has_end: True if tokens from a device-side end on get no experts.
    """

    score: str
    renormalize: bool = True
    per_lane: int = 4
    biased: bool = False
    grouped: bool = False
    has_end: bool = False

    #: The compiled function takes (logits, bias, end, weights, ids, scores, groups, top_groups,
    #: factor, num_sms). ``logits``, ``scores``: (T, E) fp32. ``bias``: (E,) fp32 or None.
    #: ``weights``: (T, top_k) fp32. ``end``: (1,) int32 or None. ``ids``: (T, top_k) int64.
    kernel: ClassVar[str] = "cute_kernels.kernels.moe.router:RouterKernel"


@dataclass(frozen=True)
class RouterGradientConfig:
    """The gradient of ``RouterConfig``.

    Attributes:
        score: As in ``RouterConfig``.
        renormalize: As in ``RouterConfig``.
        per_lane: As in ``RouterConfig``.
        biased: True if the scores have a gradient, too.
        split_bf16: True if the output is three bf16 numbers whose sum is the gradient.
    """

    score: str
    renormalize: bool = True
    per_lane: int = 4
    biased: bool = False
    split_bf16: bool = False

    #: The compiled function takes (dweights, dscores, ids, scores, dlogits, factor, num_sms).
    #: ``dweights``: (T, top_k) fp32. ``dscores``: (T, E) fp32 or None. ``ids``: (T, top_k) int64.
    #: ``scores``: (T, E) fp32. ``dlogits``: (T, E) fp32, or (T, 3 E) bf16 if ``split_bf16``.
    kernel: ClassVar[str] = "cute_kernels.kernels.moe.router:RouterGradientKernel"


@dataclass(frozen=True)
class GatherConfig:
    """Configuration of the kernel that gathers rows of a matrix by an index.

    Attributes:
        width: Bytes that a lane moves at once: 16, 4 or 2. It divides the bytes of a row.
    """

    width: int = 16

    #: The compiled function takes (x, index, out, num_sms). ``x``: (T, W), ``out``: (R, W), both
    #: integers of 4 bytes, or of 2 bytes if ``width`` is 2. ``index``: (R,) int32.
    kernel: ClassVar[str] = "cute_kernels.kernels.moe.gather_combine:GatherKernel"


@dataclass(frozen=True)
class ScatterConfig(GatherConfig):
    """Configuration of the gather that reads each row of x once and writes all its copies."""

    #: The compiled function takes (x, index, row, out, num_sms). ``row``: (T, top_k) int32, the
    #: inverse of the index.
    kernel: ClassVar[str] = "cute_kernels.kernels.moe.gather_combine:ScatterKernel"


@dataclass(frozen=True)
class CombineConfig:
    """Configuration of the kernel that computes the weighted sum of each token's rows.

    Attributes:
        dtype: Data type of the rows.
        out: Data type of the sums.
        weighted: True if rows are multiplied by weights.
        vectorized: True if rows and sums are read and written 16 bytes of a row at a time.
    """

    dtype: str = "bfloat16"
    out: str = "bfloat16"
    weighted: bool = True
    vectorized: bool = True

    #: The compiled function takes (expert_output, row, weight, y, num_sms). ``expert_output``:
    #: (R, H). ``row``: (T, top_k) int32. ``weight``: (T, top_k) fp32 or None. ``y``: (T, H).
    kernel: ClassVar[str] = "cute_kernels.kernels.moe.gather_combine:CombineKernel"


@dataclass(frozen=True)
class ActivateConfig:
    """Configuration of the kernel that applies an activation to rows of experts, or its gradient.

    Attributes:
        activation: Text of the activation.
        arch: Name of the architecture.
        dtype: Data type of inputs and outputs.
        gradient: Compute the gradient.
        weighted: True if rows have routing weights, whose gradient is then computed, too. Only
            gradients have them.
        interleaved: True if the halves of a gated activation alternate column by column.
        ragged: True if rows after the last group are not written.
        vectorized: True if eight columns of the result are 16 bytes or more and are accessed at
            once.
    """

    activation: str
    arch: str
    dtype: str = "bfloat16"
    gradient: bool = False
    weighted: bool = False
    interleaved: bool = False
    ragged: bool = True
    vectorized: bool = True

    #: The compiled function takes (x, grad, offs, weight, pair, out, scaled, dweight, num_sms),
    #: with None for each one that the configuration does not use. ``x``: (R, W). ``grad``,
    #: ``scaled``: (R, N). ``weight``, ``dweight``: (T * top_k,) fp32. ``pair``: (R,) int32.
    #: ``out``: (R, N), or (R, W) for gradients.
    kernel: ClassVar[str] = "cute_kernels.kernels.moe.activate:ActivateKernel"
