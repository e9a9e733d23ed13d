"""Dispatch and combine: rows travel to the ranks of their experts, and results travel back.

PyTorch's collectives carry the rows, through NCCL or gloo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cute_kernels import ops

from ..functional.experts import ExpertsOptions, Layer, Routing, compute_routing, experts
from .wire_format import pack, unpack

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from cute_kernels.formats import Format

_collectives = torch.ops._c10d_functional
_INT32_MAX = torch.iinfo(torch.int32).max


class Splits(NamedTuple):
    """Numbers of rows sent to and received from each rank."""

    send: list[int]
    receive: list[int]

    @property
    def reversed(self) -> Splits:
        """The splits of the way back."""
        return Splits(self.receive, self.send)


class DispatchPlan(NamedTuple):
    """Destinations of this rank's tokens, and the rows that come back.

    A token travels once to each rank that has one of its experts. A pair is a token and an expert.
    T is the number of tokens of this rank, k of experts per token.

    Attributes:
        row: (T, k) int32. The row of each pair among the pairs that come back, or -1 for a pair
            that is not sent.
        pairs: Numbers of pairs sent to and received from each rank.
        token: (U,) int32. Tokens in the order in which they are sent, or -1 for a free row.
        tokens: Numbers of tokens sent to and received from each rank.
        metadata: (T, 2 k) int32, sent with each token. For each pair it has E minus the expert (0
            for a pair that is not sent) and the bits of the fp32 routing weight.
        source_expert: (V, 1) int32. The first expert of the rank that sent each received token.
    """

    row: Tensor
    pairs: Splits
    token: Tensor
    tokens: Splits
    metadata: Tensor
    source_expert: Tensor


class Exchange:
    """Sends rows to the ranks of their experts and brings results back.

    Args:
        group: The processes. Rank r has the experts [r E / R, (r + 1) E / R).
        num_experts: E. All experts of the layer.
        wire: Format in which tokens travel. None sends them in their own dtype.
        gradient_wire: Format in which the gradients of outputs travel. None as above.
        capacity: (pairs, tokens) that each rank sends to each other rank. None sends as many as
            there are.
        overlap: True computes work that needs no exchange while results travel.

    Attributes:
        sent: Bytes that this rank sent to other ranks, by the keys ``"dispatch"``, ``"combine"``,
            ``"dispatch_gradient"``, ``"combine_gradient"`` and ``"routing"``. Compiled code does
            not count.
        dropped: () int64 on the device, the number of pairs without a row in the capacity, over all
            calls. None before the first call with a capacity.
    """

    def __init__(
        self,
        group: ProcessGroup,
        num_experts: int,
        wire: Format | None = None,
        gradient_wire: Format | None = None,
        capacity: tuple[int, int] | None = None,
        overlap: bool = True,
    ) -> None:
        self.group: str = group.group_name
        self.ranks, self.rank = group.size(), group.rank()
        self.num_experts = num_experts
        self.wire, self.gradient_wire = wire, gradient_wire
        self.capacity = capacity
        self.overlap = overlap
        self.sent: Counter[str] = Counter()
        self.dropped: Tensor | None = None

    def __call__(
        self,
        x: Tensor,
        p: Tensor,
        routing: Routing,
        gate_up_layer: Layer,
        down_layer: Layer,
        options: ExpertsOptions,
        overlapped_work: Callable[[], object] | None = None,
    ) -> Tensor:
        """Compute experts that are distributed over the ranks.

        Args:
            x: (T, H). The tokens of this rank.
            p: (T, k) fp32. The routing weights.
            routing: Routing of these tokens to all E experts.
            gate_up_layer: The first layer, with the E / R experts of this rank.
            down_layer: The second layer.
            options: Options of ``grouped.functional.experts.experts``.
            overlapped_work: Called while results travel.

        Returns:
            (T, H) in ``options.dtype``.
        """
        plan = self.plan(routing, p)
        rows, weights, expert, source_token = _Dispatch.apply(x, p, plan, self)
        local = compute_routing(expert, self.num_experts // self.ranks)
        local_options = options._replace(dtype=rows.dtype, defer_routing_weights=True)
        h = experts(rows, weights, local, gate_up_layer, down_layer, local_options)
        in_flight = self._start(h.detach(), plan.pairs.reversed, "combine")
        if self.overlap and overlapped_work is not None:
            overlapped_work()
        # ``_Dispatch`` passes the gradient of the weights.
        return _Combine.apply(h, in_flight, p.detach(), source_token, plan, options.dtype, self)

    def plan(self, routing: Routing, p: Tensor) -> DispatchPlan:
        """Plan the exchange. Without a capacity, the ranks tell each other their row counts.

        Args:
            routing: Routing of this rank's T tokens to all E experts.
            p: (T, k) fp32. The routing weights.
        """
        num_experts, num_local = self.num_experts, self.num_experts // self.ranks
        row, offs = routing.row, routing.offs
        expert = torch.searchsorted(offs, row.masked_fill(row < 0, _INT32_MAX), right=True)
        owner = expert // num_local
        # destination[t, r] is r if token t goes to rank r, else -1. The last column collects pairs
        # without an expert.
        destination = row.new_full((p.shape[0], self.ranks + 1), -1)
        destination.scatter_(1, owner, owner.int())
        rank_routing = compute_routing(destination, self.ranks)
        first_expert = torch.arange(0, num_experts, num_local, dtype=torch.int32, device=p.device)
        if self.capacity is None:
            end_rows = torch.stack([offs[num_local - 1 :: num_local], rank_routing.offs])
            sent = (end_rows - pad(end_rows[:, :-1], (1, 0))).T
            received = self._all_to_all(sent, None, "routing")
            counts = torch.stack([sent, received]).permute(2, 0, 1).tolist()
            pairs, tokens = (Splits(send, receive) for send, receive in counts)
            token = rank_routing.token[: sum(tokens.send)]
            source = first_expert.repeat_interleave(received[:, 1], output_size=sum(tokens.receive))
        else:
            pairs, tokens = (Splits([n] * self.ranks, [n] * self.ranks) for n in self.capacity)
            max_pairs, max_tokens = self.capacity
            starts = pad(rank_routing.offs[:-1], (1, 0))
            slots = _slots(starts, rank_routing.offs, max_tokens, destination.numel())
            token = pad(rank_routing.token, (0, 1), value=-1)[slots]
            source = first_expert.repeat_interleave(max_tokens)
            # Pairs of tokens beyond the capacity of their rank are dropped, then pairs beyond it.
            position = rank_routing.row.gather(1, owner) - pad(starts, (0, 1))[owner]
            sent_expert = torch.where(position < max_tokens, expert, -1)
            sent_routing = compute_routing(sent_expert, num_experts)
            rank_starts = pad(sent_routing.offs[num_local - 1 :: num_local], (1, 0))
            position = sent_routing.row - rank_starts[owner]
            is_sent = (sent_routing.row >= 0) & (position < max_pairs)
            row = torch.where(is_sent, owner * max_pairs + position, -1).int()
            expert = torch.where(row >= 0, expert, num_experts)
            dropped = (routing.row >= 0).sum() - (row >= 0).sum()
            if self.dropped is None:
                self.dropped = torch.zeros_like(dropped)
            self.dropped.add_(dropped)  # In place, for CUDA graphs.
        weight_bits = p.detach().view(torch.int32)
        metadata = torch.stack([(num_experts - expert).int(), weight_bits], dim=2).flatten(1)
        return DispatchPlan(row, pairs, token, tokens, metadata, source.unsqueeze(1))

    def arrivals(self, metadata: Tensor, plan: DispatchPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Return token, expert and weight of each received pair, in the order of the way back.

        Args:
            metadata: (V, 2 k) int32, the metadata of the received tokens.
            plan: The plan of this exchange.

        Returns:
            (P,) int32 token, (P, 1) int32 local expert and (P, 1) fp32 weight. Token and expert are
            -1 in a free row.
        """
        num_local, all_metadata = self.num_experts // self.ranks, metadata.view(-1, 2)
        end = self.num_experts - self.rank * num_local
        expert = end - metadata[:, ::2]
        is_elsewhere = (expert < 0) | (expert >= num_local)
        # Sorted by the rank to which they go back, then by expert.
        sort_key = (expert + plan.source_expert).masked_fill(is_elsewhere, -1)
        routing = compute_routing(sort_key, self.num_experts)
        if self.capacity is None:
            pair = routing.pair[: sum(plan.pairs.receive)]
            pair_metadata = all_metadata[pair]
        else:
            end_rows = routing.offs[num_local - 1 :: num_local]
            starts = pad(end_rows[:-1], (1, 0))
            slots = _slots(starts, end_rows, self.capacity[0], expert.numel())
            pair = pad(routing.pair, (0, 1), value=-1)[slots]
            pair_metadata = all_metadata[pair].masked_fill(pair.unsqueeze(1) < 0, end + 1)
        weight = pair_metadata[:, 1:].contiguous().view(torch.float32)
        return pair // (metadata.shape[1] // 2), end - pair_metadata[:, :1], weight

    def move(
        self,
        x: Tensor,
        token: Tensor,
        splits: Splits,
        counter: str,
        wire: Format | None,
        metadata: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Send tokens to other ranks and return the received ones.

        Args:
            x: (T, H). Tokens or gradients of this rank.
            token: (U,) int32. Rows of ``x`` in the order in which they are sent.
            splits: Numbers of rows sent to and received from each rank.
            counter: Key of ``sent``.
            wire: Format in which the rows travel. None sends the dtype of ``x``.
            metadata: (T, M) int32 sent with each token. None sends none.

        Returns:
            (V, H) received tokens in the dtype of ``x``, and (V, M) int32 received metadata.
        """
        # Quantized before they are gathered, so each token once.
        words = x if wire is None else pack(x, wire).view(torch.float32)
        width, extra = words.shape[1], 0
        if metadata is not None:
            columns = [words, metadata.view(words.dtype)]
            # Rows of a multiple of 16 bytes stay where kernels accept them.
            padding = -sum(t.shape[1] for t in columns) % (16 // words.itemsize)
            words = torch.cat([*columns, words.new_zeros(len(x), padding)], dim=1)
            extra = metadata.shape[1] * 4 // words.itemsize
        gathered = ops.moe_gather(words, token)
        flat = self._all_to_all(gathered, splits, counter, words.shape[1] - width)
        received_metadata = flat[:, width : width + extra].contiguous().view(torch.int32)
        if wire is not None:
            tokens = unpack(flat.view(torch.int32), x.shape[1], wire, x.dtype)
            return tokens, received_metadata
        return flat[:, :width], received_metadata

    def _all_to_all(
        self, x: Tensor, splits: Splits | None, counter: str, metadata_columns: int = 0
    ) -> Tensor:
        return self._finish(self._start(x, splits, counter, metadata_columns))

    def _start(
        self, x: Tensor, splits: Splits | None, counter: str, metadata_columns: int = 0
    ) -> Tensor:
        """Start an exchange and return the received rows, which ``_finish`` makes readable."""
        splits = splits or Splits([1] * self.ranks, [1] * self.ranks)
        flat = x.contiguous().view(torch.uint8)
        if not torch.compiler.is_compiling():
            bytes_per_column = (len(x) - splits.send[self.rank]) * x.itemsize
            self.sent[counter] += bytes_per_column * (x.shape[1] - metadata_columns)
            self.sent["routing"] += bytes_per_column * metadata_columns
        with self._explain_errors():
            out: Tensor = _collectives.all_to_all_single(
                flat, splits.receive, splits.send, self.group
            )
        return out.view(x.dtype)

    def _finish(self, x: Tensor) -> Tensor:
        with self._explain_errors():
            out: Tensor = _collectives.wait_tensor(x)
        return out

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"the exchange of rows between the {self.ranks} ranks of group {self.group!r} "
                f"failed on rank {self.rank}: one of them is gone, or did not come before the "
                f"group's timeout ({error})"
            ) from error


def _slots(starts: Tensor, end_rows: Tensor, size: int, free: int) -> Tensor:
    """Return the rows [start, end) of each rank in a buffer with ``size`` rows per rank.

    Rows of the buffer without a row of a rank are ``free``.
    """
    rows = starts.unsqueeze(1) + torch.arange(size, device=starts.device)
    return torch.where(rows < end_rows.unsqueeze(1), rows, free).flatten()


class _Dispatch(torch.autograd.Function):
    """Sends tokens to the ranks of their experts. Their gradients come back and are summed here."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, p: Tensor, plan: DispatchPlan, exchange: Exchange
    ) -> tuple[Tensor, ...]:
        """Return rows, weights and experts of the received pairs, and the token of each."""
        ctx.save_for_backward(plan.row)
        ctx.splits, ctx.exchange, ctx.dtype = plan.pairs.reversed, exchange, x.dtype
        tokens, metadata = exchange.move(
            x, plan.token, plan.tokens, "dispatch", exchange.wire, plan.metadata
        )
        source_token, expert, weight = exchange.arrivals(metadata, plan)
        ctx.mark_non_differentiable(expert, source_token)
        return ops.moe_gather(tokens, source_token), weight, expert, source_token

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dp: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tokens, summed over pairs, and of the routing weights."""
        (row,) = ctx.saved_tensors
        dx = ctx.exchange._all_to_all(dx, ctx.splits, "dispatch_gradient")
        dp = pad(ctx.exchange._all_to_all(dp, ctx.splits, "routing").flatten(), (0, 1))
        return ops.moe_combine(dx, row, None, ctx.dtype), dp[row.long()], None, None


class _Combine(torch.autograd.Function):
    """Brings results back to their tokens.

    Experts receive the gradient of y, without routing weights, as
    ``ExpertsOptions.defer_routing_weights`` requires.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        in_flight: Tensor,
        p: Tensor,
        source_token: Tensor,
        plan: DispatchPlan,
        dtype: torch.dtype,
        exchange: Exchange,
    ) -> Tensor:
        """Return (T, H), the weighted sums of the expert outputs that are in flight."""
        ctx.save_for_backward(source_token, plan.token)
        ctx.splits, ctx.exchange, ctx.dtype = plan.tokens, exchange, h.dtype
        return ops.moe_combine(exchange._finish(in_flight), plan.row, p, dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of each expert output."""
        (source_token, token), exchange = ctx.saved_tensors, ctx.exchange
        tokens, _ = exchange.move(
            dy.to(ctx.dtype), token, ctx.splits, "combine_gradient", exchange.gradient_wire
        )
        return ops.moe_gather(tokens, source_token), None, None, None, None, None, None
