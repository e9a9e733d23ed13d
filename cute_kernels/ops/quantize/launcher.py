"""Runners of the quantization ops on CuTe DSL kernels: choice of kernels, and their arguments.

Each function reads the metadata of an op and returns the runner of all calls with this metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ...formats import Format
from ...kernels.quantize.choose import choose_row_config, choose_tile_config, prefers_rows
from ...kernels.quantize.config import QuantizeProblem, RowsConfig, TileConfig, TokensConfig
from ...kernels.quantize.pass_config import AmaxConfig
from ...kernels.quantize.prologue import Prologue
from ...layout.buffers import BufferSpec
from ...reference.codecs import codec_of
from ...runtime.allocator import Allocator
from ...runtime.launch import Launcher
from ..activation_prologue import result_columns
from ..arguments import dense, dtype_name, readable
from ..gather_rows import gatherer, reads_tokens
from ..op import launched_by
from ..plan import Runner
from .op import GroupedQuantize

#: Outputs of kernels that write both copies, in the order of their arguments.
BUFFERS = ("codes", "scales", "codes_t", "scales_t", "scale_inv", "scale")


def quantize_problem(x: Tensor, offs: Tensor | None) -> QuantizeProblem:
    """Return the problem of quantizing a plain tensor."""
    return QuantizeProblem(
        dtype_name(x.dtype), x.shape[-1], "uniform" if offs is None else "ragged"
    )


def quantized(op: GroupedQuantize) -> QuantizeProblem:
    """Return the problem of ``op``: of ``x``, its gathered rows, or the result of an activation."""
    problem = quantize_problem(op.x, op.offs)
    if op.activation is None and op.rows is None:
        return problem
    return replace(
        problem,
        dtype=problem.dtype if op.activation is None or op.record.rounds_activation else "float32",
        cols=result_columns(op.x.shape[-1], op.activation),
        prologue=Prologue(dtype_name(op.x.dtype), op.activation, op.rows is not None),
    )


def _inputs(op: GroupedQuantize, reads_by_token: bool = False) -> tuple[Tensor | None, ...]:
    """Return x, the index of rows or its inverse, and offs as kernels take them."""
    return readable(op.x), dense(op.inverse if reads_by_token else op.rows), dense(op.offs)


def write_zeros(op: object, outputs: Sequence[Tensor]) -> None:
    """Write zeros to the amaxes of empty groups; nothing else needs to be written."""
    for out in outputs:
        if out.dtype == torch.float32:
            out.zero_()


def no_elements(op: GroupedQuantize) -> Runner:
    """Return the runner of a call without elements: it writes only global scales of groups."""
    fmt, names, count = op.record, tuple(op.specs()), op.num_groups
    directions = [direction for direction, on in ((False, op.rowwise), (True, op.columnwise)) if on]
    codec = codec_of(fmt)

    def run(op: GroupedQuantize, outputs: Sequence[Tensor]) -> None:
        """Launch the kernels."""
        out = dict(zip(names, outputs, strict=True))
        amax = op.x.new_zeros(count, dtype=torch.float32) if op.amax is None else op.amax.abs()
        for columnwise in directions:
            global_scale = fmt.global_scale_for(columnwise)
            if global_scale is not None and global_scale.per == "group":
                vectors = fmt.buffer_names(columnwise)[-len(global_scale.buffers) :]
                # One amax for both directions, or one per direction.
                vectors_of = codec.global_scale_vectors(
                    amax.expand(2, -1)[int(columnwise)], op.scale
                )
                for name, vector in zip(vectors, vectors_of, strict=True):
                    out[name].copy_(vector)

    return run


def _write_amax(source: Tensor, amax: Tensor | None) -> None:
    """Write the magnitudes of amaxes that the caller gave."""
    if amax is not None:
        torch.abs(source, out=amax)


@launched_by(GroupedQuantize)
def quantize(
    op: GroupedQuantize, launch: Launcher, blocks_before: tuple[int, int] | None = None
) -> Runner:
    """Return the runner of ``grouped_quantize``.

    ``blocks_before`` has the number of blocks of earlier groups that share the seed.
    """
    if op.shapes is not None:
        before = op.blocks_before() if op.seed is not None else [None] * op.num_groups
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
    return _tiles(op, fmt, problem, launch, blocks_before)


def choose_rows(
    op: GroupedQuantize,
    problem: QuantizeProblem,
    launch: Launcher,
    kind: type[RowsConfig],
    tokens: type[TokensConfig],
) -> RowsConfig:
    """Return the row configuration.

    It works token by token if tokens have several rows that share no scales with other rows.
    """
    if reads_tokens(op.inverse):
        config = choose_row_config(op.record, problem, launch.arch, tokens)
        if config.can_implement(problem):
            return config
    return choose_row_config(op.record, problem, launch.arch, kind)


def _gathered_first(op: GroupedQuantize, launch: Launcher) -> Runner:
    """Gather rows into memory first, since amaxes of groups must precede quantization."""
    gather = gatherer(op.x, launch, op.inverse)
    workspace = Allocator([BufferSpec((*op.lead, op.x.shape[1]), op.x.dtype)], op.device)
    after = quantize(replace(op, x=workspace.make()[0], rows=None, inverse=None), launch)

    def run(op: GroupedQuantize, outputs: Sequence[Tensor]) -> None:
        """Launch the kernels."""
        (x,) = workspace.make()
        gather(op.x, cast("Tensor", op.rows), op.inverse, x)
        after(replace(op, x=x, rows=None, inverse=None), outputs)

    return run


def each_member(runner_of: Callable[[Any, int], Runner]) -> Runner:
    """Return a runner that launches each group with a shape of its own as a uniform tensor.

    All calls have the same shapes, and therefore the same runners.
    """
    runners: list[Runner] = []

    def run(op: Any, outputs: Sequence[Tensor]) -> None:
        """Launch the kernels."""
        members = list(op.members(outputs))
        if not runners:
            runners.extend([runner_of(member, i) for i, (member, _) in enumerate(members)])
        for (member, into), runner in zip(members, runners, strict=True):
            runner(member, into)

    return run


def _rows(op: GroupedQuantize, config: RowsConfig, launch: Launcher) -> Runner:
    """Return the runner that quantizes row by row in one read, after amaxes of groups if needed."""
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
        """Launch the kernels."""
        out = dict(zip(names, outputs, strict=True))
        inputs, amax = _inputs(op, config.reads_tokens), out.get("amax")
        if amax_kernel is not None:
            amax_kernel(*inputs[::2], None, amax, launch.num_sms)
        elif takes_amax and op.amax is not None:
            _write_amax(op.amax, amax)
        scales = map(out.get, ("scales", "scale_inv", "scale"))
        kernel(*inputs, flat_amax(amax), out["codes"], *scales, launch.num_sms)

    return run


def _tiles(
    op: GroupedQuantize,
    fmt: Format,
    problem: QuantizeProblem,
    launch: Launcher,
    blocks_before: tuple[int, int] | None,
) -> Runner:
    """Return the runner that computes missing amaxes, then all copies from one read."""
    config: TileConfig = choose_tile_config(
        fmt,
        problem,
        launch.arch,
        rowwise=op.rowwise,
        columnwise=op.columnwise,
        compute_amax=op.amax is None,
    )
    if config.prologue is not None and config.prologue.gathered:
        needs_group_amax = config.compute_amax or (config.uses_row_amax and op.amax is not None)
        if needs_group_amax:
            return _gathered_first(op, launch)
    if blocks_before is not None:
        config = replace(config, is_member=True)
    kernel = launch.kernel(config)
    has_row_amax, row_kernel, names = config.uses_row_amax, None, tuple(op.specs())
    has_own = config.has_column_amax
    if has_row_amax and op.amax is not None:
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
        """Launch the kernels."""
        out = dict(zip(names, outputs, strict=True))
        amax, amax_t = out.get("amax"), out.get("amax_t")
        inputs = _inputs(op)
        row_amax = flat_amax(amax) if has_row_amax else None
        group_amax = amax_t if has_row_amax or amax is None else amax
        found_amax, seed = None, dense(op.seed)
        if op.scale is not None:
            group_amax, found_amax = dense(op.scale), amax
        elif op.amax is not None:
            _write_amax(op.amax[0] if has_own else op.amax, group_amax)
            if has_own:
                _write_amax(op.amax[1], amax_t)
        if row_kernel is not None:
            row_kernel(*inputs[::2], row_amax, None, launch.num_sms)
        buffers = map(out.get, BUFFERS)
        column_amax = amax_t if has_own else None
        is_own = has_own or amax_t is group_amax
        kernel(
            *inputs,
            row_amax,
            group_amax,
            *buffers,
            found_amax,
            column_amax,
            seed,
            *(blocks_before or (None, None)),
            launch.num_sms,
        )
        if amax_t is not None and group_amax is not None and not is_own:
            amax_t.copy_(group_amax)

    return run


def flat_amax(amax: Tensor | None) -> Tensor | None:
    """Return one amax per row, (T,) or (G, N), as the vector that kernels take."""
    return amax if amax is None or amax.dim() == 1 else amax.view(-1)
