"""The quantization ops on CuTe DSL kernels: the choice of kernels, and buffers as their arguments.

Each function takes an op for its metadata alone and returns what runs every call like it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ...formats import Format
from ...kernels.quantize.choose import choose_row_config, choose_tile_config, prefers_rows
from ...kernels.quantize.config import (
    AmaxConfig,
    QuantizeProblem,
    RowsConfig,
    TokensConfig,
)
from ...kernels.quantize.prologue import Prologue
from ...layout.buffers import BufferSpec, code_pitch
from ...layout.shapes import PITCH_ALIGNMENT
from ...reference.codecs import codec_of
from ...runtime.allocator import ALIGNMENT, Allocator
from ...runtime.launch import Launcher
from ..activation_prologue import result_columns
from ..arguments import dense, dtype_name, readable
from ..gather_rows import by_token, gatherer
from ..op import launched_by
from ..plan import Runner
from .op import GroupedQuantize

#: What kernels of both copies write, in the order of their arguments.
BUFFERS = ("codes", "scales", "codes_t", "scales_t", "scale_inv", "scale")


def quantize_problem(x: Tensor, offs: Tensor | None) -> QuantizeProblem:
    return QuantizeProblem(
        dtype_name(x.dtype), x.shape[-1], "uniform" if offs is None else "ragged"
    )


def quantized(op: GroupedQuantize) -> QuantizeProblem:
    """What is quantized:

    ``x``, or its rows by an index, or the elements that an activation makes of it.
    """
    problem = quantize_problem(op.x, op.offs)
    if op.activation is None and op.rows is None:
        return problem
    return replace(
        problem,
        dtype=problem.dtype if op.activation is None or op.record.rounds_activation else "float32",
        cols=result_columns(op.x.shape[-1], op.activation),
        prologue=Prologue(dtype_name(op.x.dtype), op.activation, op.rows is not None),
    )


def _inputs(op: GroupedQuantize, by_token: bool = False) -> tuple[Tensor | None, ...]:
    """x, the index of rows or its inverse, and offs as kernels take them."""
    return readable(op.x), dense(op.inverse if by_token else op.rows), dense(op.offs)


def write_zeros(op: object, outputs: Sequence[Tensor]) -> None:
    """All groups are empty: their amaxes are 0, and there is nothing else to write."""
    for out in outputs:
        if out.dtype == torch.float32:
            out.zero_()


def no_elements(op: GroupedQuantize) -> Runner:
    """All groups are empty: only the second level of groups is written."""
    fmt, names, count = op.record, tuple(op.specs()), op.num_groups
    asked = [way for way, on in ((False, op.rowwise), (True, op.columnwise)) if on]
    codec = codec_of(fmt)

    def run(op: GroupedQuantize, outputs: Sequence[Tensor]) -> None:
        out = dict(zip(names, outputs, strict=True))
        amax = op.x.new_zeros(count, dtype=torch.float32) if op.amax is None else op.amax.abs()
        for columnwise in asked:
            level = fmt.global_scale_for(columnwise)
            if level is not None and level.per == "group":
                vectors = fmt.buffer_names(columnwise)[-len(level.buffers) :]
                # One for both directions, or one each.
                vectors_of = codec.global_scale_vectors(
                    amax.expand(2, -1)[int(columnwise)], op.scale
                )
                for name, vector in zip(vectors, vectors_of, strict=True):
                    out[name].copy_(vector)

    return run


def _give(given: Tensor, amax: Tensor | None) -> None:
    """Write the amaxes of groups that the caller gave: magnitudes, whatever their sign."""
    if amax is not None:
        torch.abs(given, out=amax)


@launched_by(GroupedQuantize)
def quantize(op: GroupedQuantize, launch: Launcher, drawn: tuple[int, int] | None = None) -> Runner:
    """How ``grouped_quantize`` runs; ``drawn`` are the blocks that others with the seed have."""
    if op.shapes is not None:
        before = op.drawn_before() if op.seed is not None else [None] * op.num_groups
        return each_member(lambda member, i: quantize(member, launch, before[i]))
    if not op.x.numel() or (op.rows is not None and not op.rows.numel()):
        return no_elements(op)
    fmt, problem = op.record, quantized(op)
    if op.rowwise and not op.columnwise:
        rows = choose_rows(op, problem, launch, RowsConfig, TokensConfig)
        computes_first = op.rows is not None and rows.takes_amax and op.amax is None
        if (
            (prefers_rows(rows) or op.rows is not None)
            and not computes_first
            and rows.can_implement(problem)
        ):
            return _rows(op, rows, launch)
    return _tiles(op, fmt, problem, launch, drawn)


def choose_rows(
    op: GroupedQuantize,
    problem: QuantizeProblem,
    launch: Launcher,
    kind: type[RowsConfig],
    tokens: type[TokensConfig],
) -> RowsConfig:
    """The configuration by rows; by tokens where those have several rows which share nothing with
    others.
    """
    if by_token(op.inverse):
        config = choose_row_config(op.record, problem, launch.arch, tokens)
        if config.can_implement(problem):
            return config
    return choose_row_config(op.record, problem, launch.arch, kind)


def _gathered_first(op: GroupedQuantize, launch: Launcher) -> Runner:
    """Rows by an index go to memory where amaxes of groups, which are of no token, come first."""
    gather = gatherer(op.x, launch, op.inverse)
    workspace = Allocator([BufferSpec((*op.lead, op.x.shape[1]), op.x.dtype)], op.device)
    after = quantize(replace(op, x=workspace.make()[0], rows=None, inverse=None), launch)

    def run(op: GroupedQuantize, outputs: Sequence[Tensor]) -> None:
        (x,) = workspace.make()
        gather(op.x, cast("Tensor", op.rows), op.inverse, x)
        after(replace(op, x=x, rows=None, inverse=None), outputs)

    return run


def each_member(runner_of: Callable[[Any, int], Runner]) -> Runner:
    """Groups that have shapes of their own: each is launched as a uniform tensor of one group.

    Their shapes are those of every call, and so is what runs each.
    """
    runners: list[Runner] = []

    def run(op: Any, outputs: Sequence[Tensor]) -> None:
        members = list(op.members(outputs))
        if not runners:
            runners.extend([runner_of(member, i) for i, (member, _) in enumerate(members)])
        for (member, into), runner in zip(members, runners, strict=True):
            runner(member, into)

    return run


def _rows(op: GroupedQuantize, config: RowsConfig, launch: Launcher) -> Runner:
    """Rows to codes in one read; amaxes of rows too, those of groups before if not given."""
    kernel = launch.kernel(config)
    takes_amax, amax_kernel, names = config.takes_amax, None, tuple(op.specs())
    if takes_amax and op.amax is None:
        amax_kernel = launch.kernel(
            AmaxConfig(
                config.dtype,
                config.grouping,
                False,
                True,
                config.arch,
                config.prologue,
                op.record.amaxes_keep_nan,
            )
        )

    def run(op: GroupedQuantize, outputs: Sequence[Tensor]) -> None:
        out = dict(zip(names, outputs, strict=True))
        inputs, amax = _inputs(op, config.reads_tokens), out.get("amax")
        if amax_kernel is not None:
            amax_kernel(*inputs[::2], None, amax, launch.num_sms)
        elif takes_amax and op.amax is not None:
            _give(op.amax, amax)
        scales = map(out.get, ("scales", "scale_inv", "scale"))
        kernel(*inputs, flat_amax(amax), out["codes"], *scales, launch.num_sms)

    return run


def _tiles(
    op: GroupedQuantize,
    fmt: Format,
    problem: QuantizeProblem,
    launch: Launcher,
    drawn: tuple[int, int] | None,
) -> Runner:
    """Amaxes first where they are not given, then all copies from one read."""
    config = choose_tile_config(
        fmt,
        problem,
        launch.arch,
        rowwise=op.rowwise,
        columnwise=op.columnwise,
        compute_amax=op.amax is None,
    )
    if config.prologue is not None and config.prologue.gathered:
        by_group = config.compute_amax or (config.uses_row_amax and op.amax is not None)
        if by_group:
            return _gathered_first(op, launch)
    if drawn is not None:
        config = replace(config, is_member=True)
    kernel = launch.kernel(config)
    by_row, row_kernel, names = config.uses_row_amax, None, tuple(op.specs())
    has_own = config.has_column_amax
    if by_row and op.amax is not None:
        row_kernel = launch.kernel(
            AmaxConfig(
                problem.dtype,
                problem.grouping,
                True,
                False,
                launch.arch,
                problem.prologue,
                fmt.amaxes_keep_nan,
            )
        )

    def run(op: GroupedQuantize, outputs: Sequence[Tensor]) -> None:
        out = dict(zip(names, outputs, strict=True))
        amax, amax_t = out.get("amax"), out.get("amax_t")
        inputs = _inputs(op)
        row_amax = flat_amax(amax) if by_row else None
        group_amax = amax_t if by_row or amax is None else amax
        seen, seed = None, dense(op.seed)
        if op.scale is not None:
            group_amax, seen = dense(op.scale), amax
        elif op.amax is not None:
            _give(op.amax[0] if has_own else op.amax, group_amax)
            if has_own:
                _give(op.amax[1], amax_t)
        if row_kernel is not None:
            row_kernel(*inputs[::2], row_amax, None, launch.num_sms)
        buffers = map(out.get, BUFFERS)
        own = amax_t if has_own else None
        is_own = has_own or amax_t is group_amax
        kernel(
            *inputs,
            row_amax,
            group_amax,
            *buffers,
            seen,
            own,
            seed,
            *(drawn or (None, None)),
            launch.num_sms,
        )
        if amax_t is not None and group_amax is not None and not is_own:
            amax_t.copy_(group_amax)

    return run


def flat_amax(amax: Tensor | None) -> Tensor | None:
    """One amax a row, (T,) or (G, N), as the vector that kernels take."""
    return amax if amax is None or amax.dim() == 1 else amax.view(-1)


def _readable_rows(codes: Tensor) -> Tensor:
    """Rowwise codes, copied unless all rows are equally far apart, and as far as kernels ask."""
    pitch, aligned = codes.stride(-2), codes.data_ptr() % ALIGNMENT == 0
    even = codes.dim() == 2 or codes.stride(0) == codes.shape[1] * pitch
    if aligned and even and codes.stride(-1) == 1 and pitch % PITCH_ALIGNMENT == 0:
        return codes
    return codes.new_empty(*codes.shape[:-1], code_pitch(codes.shape[-1]))[
        ..., : codes.shape[-1]
    ].copy_(codes)
