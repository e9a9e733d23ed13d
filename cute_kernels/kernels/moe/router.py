"""Choice of experts and its gradient: a warp has a token, and a lane every 32nd of its scores.

``cute_kernels.reference.router`` defines the bits. Scores are compared as integers that increase
with them; 0 stands for experts that do not exist or are already taken.
"""

from typing import Any

from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from cute_kernels.device.activation_curves import exponential
from cute_kernels.device.constants import WARP_SIZE
from cute_kernels.device.launch import GridKernel, compact, env_stream
from cute_kernels.device.ptx import add_rn, asm, mul_rn, select
from cute_kernels.records import UnsupportedError
from cute_kernels.reference.router import TINY

from .config import RouterConfig, RouterGradientConfig

_WARPS = 4
_NO_LANE = 0xFFFFFFFF


def _check_score(score: str) -> None:
    """Raise UnsupportedError if no kernel computes ``score``."""
    if score not in ("softmax", "sigmoid"):
        raise UnsupportedError(f"no kernel computes the score {score!r}")


class RouterKernel(GridKernel):
    """Kernel that chooses experts. See the module's docstring."""

    ctas_per_sm, num_threads = 12, _WARPS * WARP_SIZE

    def __init__(self, config: RouterConfig):
        self.config = config
        _check_score(config.score)
        self.per_lane = config.per_lane

    @staticmethod
    def fake_args(config: RouterConfig) -> tuple[Any, ...]:
        """Return stand-ins for the arguments, see ``RouterConfig.kernel``."""
        wide, narrow, ids = _matrices()
        bias = compact(Float32, wide.shape[1], align=4) if config.biased else None
        end = compact(Int32, 1, align=4) if config.has_end else None
        numbers = (Int32(1), Int32(1), Float32(1.0), Int32(1))
        return (wide, bias, end, narrow, ids, wide, *numbers, env_stream())

    @cute.kernel
    def kernel(
        self,
        logits: cute.Tensor,
        bias: cute.Tensor | None,
        end: cute.Tensor | None,
        weights: cute.Tensor,
        ids: cute.Tensor,
        scores: cute.Tensor,
        groups: Int32,
        top_groups: Int32,
        factor: Float32,
    ) -> None:
        """Choose the experts of each token.

        Args:
            logits: (T, E) fp32.
            bias: (E,) fp32 that is added to the scores for the choice. Optional.
            end: (1,) int32. Tokens from there on get id -1. Or None.
            weights: (T, top_k) fp32. Output.
            ids: (T, top_k) int64. Output.
            scores: (T, E) fp32. Output.
            groups: Groups of experts.
            top_groups: Groups that a token may choose from.
            factor: Factor of the weights.
        """
        token = cute.arch.block_idx()[0] * _WARPS + cute.arch.thread_idx()[0] // WARP_SIZE
        while token < logits.shape[0]:
            lane, experts, top_k = cute.arch.lane_idx(), logits.shape[1], ids.shape[1]
            s = cute.make_rmem_tensor(self.per_lane, Float32)
            keys = cute.make_rmem_tensor(self.per_lane, Uint32)
            for i in range_constexpr(self.per_lane):
                s[i], keys[i] = Float32(0.0), Uint32(0)
                if i * WARP_SIZE + lane < experts:
                    s[i] = logits[token, i * WARP_SIZE + lane]
                    keys[i] = _key(s[i])
            if const_expr(self.config.score == "softmax"):
                highest, total = _number(self.largest(keys)), Float32(0.0)
                for i in range_constexpr(self.per_lane):
                    s[i] = exponential(_op("sub", s[i], highest))
                    if i * WARP_SIZE + lane < experts:
                        total = add_rn(total, s[i])
                total = _tree(total)
            for i in range_constexpr(self.per_lane):
                if const_expr(self.config.score == "softmax"):
                    s[i] = _op("div", s[i], total)
                else:
                    s[i] = exponential(s[i], sigmoid=True)
                if i * WARP_SIZE + lane < experts:
                    scores[token, i * WARP_SIZE + lane] = s[i]
                    selection_score = s[i]
                    if const_expr(bias is not None):
                        selection_score = add_rn(selection_score, bias[i * WARP_SIZE + lane])
                    keys[i] = _key(selection_score)
            if const_expr(self.config.grouped):
                self.select_groups(keys, experts // groups, groups, top_groups)
            is_token = True
            if const_expr(end is not None):
                is_token = token < end[0]
            total, k = Float32(0.0), Int32(0)
            while k < top_k:
                expert = self.take(keys, self.largest(keys))
                weight_value = Float32(0.0)
                for i in range_constexpr(self.per_lane):
                    if expert == i * WARP_SIZE + lane:
                        weight_value = s[i]
                weight_value = cute.arch.shuffle_sync(weight_value, expert % WARP_SIZE)
                total = add_rn(total, weight_value)
                if lane == k % WARP_SIZE:
                    weights[token, k] = weight_value
                    ids[token, k] = Int64(expert)
                    if not is_token:
                        ids[token, k] = Int64(-1)
                k += 1
            total, k = add_rn(total, Float32(TINY)), lane
            while k < top_k:
                # This lane wrote it.
                weight_value = weights[token, k]
                if const_expr(self.config.renormalize):
                    weight_value = _op("div", weight_value, total)
                weights[token, k] = mul_rn(weight_value, factor)
                k += WARP_SIZE
            token += cute.arch.grid_dim()[0] * _WARPS

    @cute.jit
    def largest(self, keys: cute.Tensor) -> Uint32:
        """Return the largest key of the warp."""
        best = keys[0]
        for i in range_constexpr(1, self.per_lane):
            best = _larger(best, keys[i])
        return cute.arch.warp_redux_sync(best, "max")

    @cute.jit
    def take(self, keys: cute.Tensor, best: Uint32) -> Int32:
        """Return the first expert whose key is ``best``, and set its key to 0."""
        lane, expert = cute.arch.lane_idx(), Uint32(_NO_LANE)
        for i in range_constexpr(self.per_lane - 1, -1, -1):
            expert = select(keys[i] == best, Uint32(i * WARP_SIZE + lane), expert)
        expert = cute.arch.warp_redux_sync(expert, "min")
        for i in range_constexpr(self.per_lane):
            keys[i] = select(expert == Uint32(i * WARP_SIZE + lane), Uint32(0), keys[i])
        return Int32(expert)

    @cute.jit
    def select_groups(
        self, keys: cute.Tensor, size: Int32, groups: Int32, top_groups: Int32
    ) -> None:
        """Set the keys of all but the best groups to 0.

        Lane g has the number by which group g is compared, the sum of its two best scores.
        """
        lane, group_key = cute.arch.lane_idx(), Uint32(0)
        keys_of_group = cute.make_rmem_tensor(self.per_lane, Uint32)
        g = Int32(0)
        while g < groups:
            for i in range_constexpr(self.per_lane):
                keys_of_group[i] = select((i * WARP_SIZE + lane) // size == g, keys[i], Uint32(0))
            highest = self.largest(keys_of_group)
            self.take(keys_of_group, highest)
            two_best = _key(add_rn(_number(highest), _number(self.largest(keys_of_group))))
            if lane == g:
                group_key = two_best
            g += 1
        allowed, n = Int32(0), Int32(0)
        while n < top_groups:
            best = cute.arch.warp_redux_sync(group_key, "max")
            best_group = Int32(
                cute.arch.warp_redux_sync(
                    select(group_key == best, Uint32(lane), Uint32(_NO_LANE)), "min"
                )
            )
            allowed |= 1 << best_group
            if lane == best_group:
                group_key = Uint32(0)
            n += 1
        for i in range_constexpr(self.per_lane):
            is_allowed = (allowed >> ((i * WARP_SIZE + lane) // size)) & 1
            keys[i] = select(is_allowed != 0, keys[i], Uint32(0))


class RouterGradientKernel(GridKernel):
    """Kernel of the gradient of the logits. See the module's docstring."""

    ctas_per_sm, num_threads = 12, _WARPS * WARP_SIZE

    def __init__(self, config: RouterGradientConfig):
        self.config = config
        _check_score(config.score)
        self.per_lane = config.per_lane

    @staticmethod
    def fake_args(config: RouterGradientConfig) -> tuple[Any, ...]:
        """Return stand-ins for the arguments, see ``RouterGradientConfig.kernel``."""
        wide, narrow, ids = _matrices()
        out = (
            compact(BFloat16, cute.sym_int(), cute.sym_int(), align=2)
            if config.split_bf16
            else wide
        )
        return (
            narrow,
            wide if config.biased else None,
            ids,
            wide,
            out,
            Float32(1.0),
            Int32(1),
            env_stream(),
        )

    @cute.kernel
    def kernel(
        self,
        dweights: cute.Tensor,
        dscores: cute.Tensor | None,
        ids: cute.Tensor,
        scores: cute.Tensor,
        out: cute.Tensor,
        factor: Float32,
    ) -> None:
        """Compute the gradient of each token's logits.

        Args:
            dweights: (T, top_k) fp32.
            dscores: (T, E) fp32, or None.
            ids: (T, top_k) int64.
            scores: (T, E) fp32.
            out: (T, E) fp32, or (T, 3 E) bf16 if ``split_bf16``.
            factor: Factor of the weights.
        """
        token = cute.arch.block_idx()[0] * _WARPS + cute.arch.thread_idx()[0] // WARP_SIZE
        while token < scores.shape[0]:
            lane, experts, top_k = cute.arch.lane_idx(), scores.shape[1], ids.shape[1]
            total, dot, k = Float32(0.0), Float32(0.0), Int32(0)
            if const_expr(self.config.renormalize):
                while k < top_k:
                    expert, score_value = Int32(ids[token, k]), Float32(0.0)
                    if expert >= 0:
                        score_value = scores[token, expert]
                    total = add_rn(total, score_value)
                    dot = add_rn(dot, mul_rn(mul_rn(dweights[token, k], factor), score_value))
                    k += 1
                total = add_rn(total, Float32(TINY))
                dot = _op("div", dot, total)
            s, d = (cute.make_rmem_tensor(self.per_lane, Float32) for _ in range(2))
            for i in range_constexpr(self.per_lane):
                s[i], d[i] = Float32(0.0), Float32(0.0)
                if i * WARP_SIZE + lane < experts:
                    s[i] = scores[token, i * WARP_SIZE + lane]
                    if const_expr(dscores is not None):
                        d[i] = dscores[token, i * WARP_SIZE + lane]
            k = Int32(0)
            while k < top_k:
                expert, weight_gradient = Int32(ids[token, k]), mul_rn(dweights[token, k], factor)
                if const_expr(self.config.renormalize):
                    weight_gradient = _op("div", _op("sub", weight_gradient, dot), total)
                for i in range_constexpr(self.per_lane):
                    if expert == i * WARP_SIZE + lane:
                        d[i] = add_rn(d[i], weight_gradient)
                k += 1
            total = Float32(0.0)
            if const_expr(self.config.score == "softmax"):
                for i in range_constexpr(self.per_lane):
                    total = add_rn(total, mul_rn(d[i], s[i]))
                total = _tree(total)
            for i in range_constexpr(self.per_lane):
                gradient = mul_rn(s[i], _op("sub", d[i], total))
                if const_expr(self.config.score == "sigmoid"):
                    gradient = mul_rn(mul_rn(d[i], s[i]), _op("sub", Float32(1.0), s[i]))
                if i * WARP_SIZE + lane < experts:
                    if const_expr(self.config.split_bf16):
                        for j in range_constexpr(3):
                            term = gradient.to(BFloat16)
                            out[token, j * experts + i * WARP_SIZE + lane] = term
                            gradient = _op("sub", gradient, term.to(Float32))
                    else:
                        out[token, i * WARP_SIZE + lane] = gradient
            token += cute.arch.grid_dim()[0] * _WARPS


def _matrices() -> tuple[Any, Any, Any]:
    """Return stand-ins for the scores of all experts, and the weights and ids of the chosen."""
    tokens, experts, top_k = (cute.sym_int() for _ in range(3))
    wide, narrow = (compact(Float32, tokens, count, align=4) for count in (experts, top_k))
    return wide, narrow, compact(Int64, tokens, top_k, align=8)


def _op(name: str, a: Float32, b: Float32) -> Float32:
    """Emit an fp32 instruction that rounds to nearest even."""
    return asm(f"{name}.rn.f32 $0, $1, $2;", [Float32], [a, b])


def _larger(a: Uint32, b: Uint32) -> Uint32:
    """Return the larger of two unsigned integers."""
    return asm("max.u32 $0, $1, $2;", [Uint32], [a, b])


def _tree(total: Float32) -> Float32:
    """Return the sum over the lanes of the warp, as a tree."""
    for i in range(5):
        total = add_rn(total, cute.arch.shuffle_sync_bfly(total, WARP_SIZE >> (i + 1)))
    return total


def _key(x: Float32) -> Uint32:
    """Return an integer that increases with the number. NaN has the largest."""
    text = """{
.reg .b32 m; .reg .pred p;
mov.b32 m, $1; shr.s32 m, m, 31; or.b32 m, m, 0x80000000; mov.b32 $0, $1; xor.b32 $0, $0, m;
setp.nan.f32 p, $1, $1; selp.b32 $0, 0xFFFFFFFF, $0, p;
}"""
    return asm(text, [Uint32], [x])


def _number(key: Uint32) -> Float32:
    """Return the number whose key this is."""
    text = """{
.reg .b32 m;
shr.s32 m, $1, 31; not.b32 m, m; or.b32 m, m, 0x80000000; xor.b32 m, m, $1; mov.b32 $0, m;
}"""
    return asm(text, [Float32], [key])
