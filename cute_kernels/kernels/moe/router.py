"""The choice of experts and its gradient: a warp has a token, a lane every 32nd of its scores.

``cute_kernels.reference.router`` states the bits. Scores are compared as integers that rise with
them, where 0 stands for those that are not there, or not any more.
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
_NONE = 0xFFFFFFFF


def _check_score(score: str) -> None:
    if score not in ("softmax", "sigmoid"):
        raise UnsupportedError(f"no kernel computes the score {score!r}")


class RouterKernel(GridKernel):
    """Chooses experts, see the module."""

    ctas_per_sm, num_threads = 12, _WARPS * WARP_SIZE

    def __init__(self, config: RouterConfig):
        self.config = config
        _check_score(config.score)
        self.per_lane = config.per_lane

    @staticmethod
    def fake_args(config: RouterConfig) -> tuple[Any, ...]:
        """Stand-ins for what ``RouterConfig`` says, and the stream."""
        wide, narrow, ids = _matrices()
        bias = compact(Float32, wide.shape[1], align=4) if config.biased else None
        end = compact(Int32, 1, align=4) if config.ends else None
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
                    by = s[i]
                    if const_expr(bias is not None):
                        by = add_rn(by, bias[i * WARP_SIZE + lane])
                    keys[i] = _key(by)
            if const_expr(self.config.grouped):
                self.keep_groups(keys, experts // groups, groups, top_groups)
            is_there = True
            if const_expr(end is not None):
                is_there = token < end[0]
            total, k = Float32(0.0), Int32(0)
            while k < top_k:
                at = self.take(keys, self.largest(keys))
                w = Float32(0.0)
                for i in range_constexpr(self.per_lane):
                    if at == i * WARP_SIZE + lane:
                        w = s[i]
                w = cute.arch.shuffle_sync(w, at % WARP_SIZE)
                total = add_rn(total, w)
                if lane == k % WARP_SIZE:
                    weights[token, k] = w
                    ids[token, k] = Int64(at)
                    if not is_there:
                        ids[token, k] = Int64(-1)
                k += 1
            total, k = add_rn(total, Float32(TINY)), lane
            while k < top_k:
                # What this lane wrote.
                w = weights[token, k]
                if const_expr(self.config.renormalize):
                    w = _op("div", w, total)
                weights[token, k] = mul_rn(w, factor)
                k += WARP_SIZE
            token += cute.arch.grid_dim()[0] * _WARPS

    @cute.jit
    def largest(self, keys: cute.Tensor) -> Uint32:
        best = keys[0]
        for i in range_constexpr(1, self.per_lane):
            best = _larger(best, keys[i])
        return cute.arch.warp_redux_sync(best, "max")

    @cute.jit
    def take(self, keys: cute.Tensor, best: Uint32) -> Int32:
        """The first expert whose key is ``best``; it has none then."""
        lane, at = cute.arch.lane_idx(), Uint32(_NONE)
        for i in range_constexpr(self.per_lane - 1, -1, -1):
            at = select(keys[i] == best, Uint32(i * WARP_SIZE + lane), at)
        at = cute.arch.warp_redux_sync(at, "min")
        for i in range_constexpr(self.per_lane):
            keys[i] = select(at == Uint32(i * WARP_SIZE + lane), Uint32(0), keys[i])
        return Int32(at)

    @cute.jit
    def keep_groups(self, keys: cute.Tensor, size: Int32, groups: Int32, top_groups: Int32) -> None:
        """Drop the keys of all but the best groups; lane g has what group g is compared by."""
        lane, mine = cute.arch.lane_idx(), Uint32(0)
        of_group = cute.make_rmem_tensor(self.per_lane, Uint32)
        g = Int32(0)
        while g < groups:
            for i in range_constexpr(self.per_lane):
                of_group[i] = select((i * WARP_SIZE + lane) // size == g, keys[i], Uint32(0))
            first = self.largest(of_group)
            self.take(of_group, first)
            both = _key(add_rn(_number(first), _number(self.largest(of_group))))
            if lane == g:
                mine = both
            g += 1
        allowed, n = Int32(0), Int32(0)
        while n < top_groups:
            best = cute.arch.warp_redux_sync(mine, "max")
            at = Int32(
                cute.arch.warp_redux_sync(select(mine == best, Uint32(lane), Uint32(_NONE)), "min")
            )
            allowed |= 1 << at
            if lane == at:
                mine = Uint32(0)
            n += 1
        for i in range_constexpr(self.per_lane):
            is_kept = (allowed >> ((i * WARP_SIZE + lane) // size)) & 1
            keys[i] = select(is_kept != 0, keys[i], Uint32(0))


class RouterGradientKernel(GridKernel):
    """The gradient of the logits, see the module."""

    ctas_per_sm, num_threads = 12, _WARPS * WARP_SIZE

    def __init__(self, config: RouterGradientConfig):
        self.config = config
        _check_score(config.score)
        self.per_lane = config.per_lane

    @staticmethod
    def fake_args(config: RouterGradientConfig) -> tuple[Any, ...]:
        """Stand-ins for what ``RouterGradientConfig`` says, and the stream."""
        wide, narrow, ids = _matrices()
        out = (
            compact(BFloat16, cute.sym_int(), cute.sym_int(), align=2) if config.in_parts else wide
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
        token = cute.arch.block_idx()[0] * _WARPS + cute.arch.thread_idx()[0] // WARP_SIZE
        while token < scores.shape[0]:
            lane, experts, top_k = cute.arch.lane_idx(), scores.shape[1], ids.shape[1]
            total, dot, k = Float32(0.0), Float32(0.0), Int32(0)
            if const_expr(self.config.renormalize):
                while k < top_k:
                    at, w = Int32(ids[token, k]), Float32(0.0)
                    if at >= 0:
                        w = scores[token, at]
                    total = add_rn(total, w)
                    dot = add_rn(dot, mul_rn(mul_rn(dweights[token, k], factor), w))
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
                at, of_k = Int32(ids[token, k]), mul_rn(dweights[token, k], factor)
                if const_expr(self.config.renormalize):
                    of_k = _op("div", _op("sub", of_k, dot), total)
                for i in range_constexpr(self.per_lane):
                    if at == i * WARP_SIZE + lane:
                        d[i] = add_rn(d[i], of_k)
                k += 1
            total = Float32(0.0)
            if const_expr(self.config.score == "softmax"):
                for i in range_constexpr(self.per_lane):
                    total = add_rn(total, mul_rn(d[i], s[i]))
                total = _tree(total)
            for i in range_constexpr(self.per_lane):
                made = mul_rn(s[i], _op("sub", d[i], total))
                if const_expr(self.config.score == "sigmoid"):
                    made = mul_rn(mul_rn(d[i], s[i]), _op("sub", Float32(1.0), s[i]))
                if i * WARP_SIZE + lane < experts:
                    if const_expr(self.config.in_parts):
                        for j in range_constexpr(3):
                            part = made.to(BFloat16)
                            out[token, j * experts + i * WARP_SIZE + lane] = part
                            made = _op("sub", made, part.to(Float32))
                    else:
                        out[token, i * WARP_SIZE + lane] = made
            token += cute.arch.grid_dim()[0] * _WARPS


def _matrices() -> tuple[Any, Any, Any]:
    """Stand-ins for scores of all experts, weights and ids of the chosen."""
    tokens, experts, top_k = (cute.sym_int() for _ in range(3))
    wide, narrow = (compact(Float32, tokens, count, align=4) for count in (experts, top_k))
    return wide, narrow, compact(Int64, tokens, top_k, align=8)


def _op(name: str, a: Float32, b: Float32) -> Float32:
    return asm(f"{name}.rn.f32 $0, $1, $2;", [Float32], [a, b])


def _larger(a: Uint32, b: Uint32) -> Uint32:
    return asm("max.u32 $0, $1, $2;", [Uint32], [a, b])


def _tree(total: Float32) -> Float32:
    for i in range(5):
        total = add_rn(total, cute.arch.shuffle_sync_bfly(total, WARP_SIZE >> (i + 1)))
    return total


def _key(x: Float32) -> Uint32:
    """An integer that rises with a number, the largest for a NaN."""
    text = """{
.reg .b32 m; .reg .pred p;
mov.b32 m, $1; shr.s32 m, m, 31; or.b32 m, m, 0x80000000; mov.b32 $0, $1; xor.b32 $0, $0, m;
setp.nan.f32 p, $1, $1; selp.b32 $0, 0xFFFFFFFF, $0, p;
}"""
    return asm(text, [Uint32], [x])


def _number(key: Uint32) -> Float32:
    text = """{
.reg .b32 m;
shr.s32 m, $1, 31; not.b32 m, m; or.b32 m, m, 0x80000000; xor.b32 m, m, $1; mov.b32 $0, m;
}"""
    return asm(text, [Float32], [key])
