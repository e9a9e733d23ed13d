"""Checks of op arguments. Every message names the argument, its value and the rule."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..formats import Format
from ..layout.buffers import buffers

#: Dtypes of plain operands.
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Classes of tensors whose values the host may read.
_READABLE = frozenset({Tensor, torch.nn.Parameter})


class EndRowChecks:
    """Process-wide settings of ``check_end_rows_of``.

    Attributes:
        reads_cpu: True if the values of CPU tensors are checked on the host.
        recorder: Function that is called with offs and the number of rows for each tensor on
            another device, or None.
    """

    reads_cpu = True
    recorder: Callable[[Tensor, int], object] | None = None


@contextlib.contextmanager
def unchecked_end_rows() -> Iterator[None]:
    """Do not read ``offs`` in the block; kernels then clamp the values.

    It is for tests of kernels.
    """
    before = EndRowChecks.reads_cpu
    EndRowChecks.reads_cpu = False
    try:
        yield
    finally:
        EndRowChecks.reads_cpu = before


def check_end_rows(values: Sequence[Any], rows: int, x: str = "x") -> None:
    """Check that ``values`` are end rows of groups in ``x``, which has ``rows`` rows."""
    start = 0
    for group, end in enumerate(values):
        if end < start:
            raise ValueError(
                f"offs must not decrease or be negative, got {end} at {group}"
                f"{_counts_hint(values, rows)}"
            )
        start = end
    if start > rows:
        raise ValueError(f"offs must end within the {rows} rows of {x}, got {start}")


def _counts_hint(values: Sequence[Any], rows: int) -> str:
    """Return a hint how to compute end rows, if the values look like counts."""
    total = sum(map(int, values))
    if min(values) < 0 or total > rows:
        return ""
    return (
        ". offs are the end rows of the groups, and these look like counts, "
        f"which add up to {total}: "
        "grouped.compute_offsets(counts) returns their end rows"
    )


def check_end_rows_of(offs: Tensor, rows: int, x: str = "x") -> None:
    """Check the end rows in a CPU tensor; give tensors of other devices to the recorder.

    Traced, transformed and meta tensors are skipped: the ops that run later check theirs.
    """
    if torch.compiler.is_compiling() or type(offs) not in _READABLE:
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(offs) or torch._is_functional_tensor(offs):
        return
    with (
        _disable_current_modes()
        if torch._C._len_torch_dispatch_stack()
        else contextlib.nullcontext()
    ):
        if not offs.is_cpu:
            if EndRowChecks.recorder is not None and not offs.is_meta:
                EndRowChecks.recorder(offs, rows)
            return
        values = offs.tolist() if EndRowChecks.reads_cpu else [0]
    if values[0] < 0 or values[-1] > rows or values != sorted(values):
        check_end_rows(values, rows, x)


def check_dtype(name: str, dtype: torch.dtype, allowed: Sequence[torch.dtype]) -> None:
    """Check that ``dtype`` is one of ``allowed``."""
    if dtype not in allowed:
        listed = " or ".join(str(d).removeprefix("torch.") for d in allowed)
        raise TypeError(f"{name} must be {listed}, got {str(dtype).removeprefix('torch.')}")


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    dtypes: Sequence[torch.dtype] = (),
    ndim: Sequence[int] = (),
    shape: Sequence[int | None] | None = None,
) -> None:
    """Check the dtype, the rank and, where it is not None, the ``shape`` of a tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {tensor!r}")
    if dtypes:
        check_dtype(name, tensor.dtype, dtypes)
    if shape is not None:
        ndim = (len(shape),)
    if ndim and tensor.dim() not in ndim:
        ranks = " or ".join(str(n) for n in ndim)
        raise ValueError(f"{name} must have {ranks} dimensions, got shape {tuple(tensor.shape)}")
    for i, want in enumerate(shape or ()):
        if want is not None and tensor.shape[i] != want:
            raise ValueError(
                f"{name} must have size {want} in dimension {i}, got shape {tuple(tensor.shape)}"
            )


def check_multiple(name: str, value: int, multiple: int, reason: str) -> None:
    """Check that ``value`` is a positive multiple of ``multiple``."""
    if value % multiple != 0 or value == 0:
        raise ValueError(
            f"{name} must be a positive multiple of {multiple} ({reason}), got {value}"
        )


def check_offs(offs: Tensor, num_groups: int | None = None) -> None:
    """Check that ``offs`` is (G,) int32 with G >= 1, and G = ``num_groups`` if that is given."""
    check_tensor("offs", offs, dtypes=(torch.int32,), ndim=(1,))
    if offs.shape[0] < 1:
        raise ValueError("offs must have at least one entry, got shape (0,)")
    if num_groups is not None and offs.shape[0] != num_groups:
        raise ValueError(
            f"offs must have one end row for each of the {num_groups} groups, "
            f"got {offs.shape[0]} entries"
        )


def check_inverse(inverse: Tensor | None, rows: Tensor | None, name: str, x: Tensor) -> None:
    """Check that ``inverse``, if given, is (T, k) int32 for the T rows of ``x``."""
    if inverse is not None:
        if rows is None:
            raise ValueError("inverse is the inverse of rows: pass both")
        check_tensor("inverse", inverse, dtypes=(torch.int32,), shape=(x.shape[0], None))
        same_device(name, x.device, inverse=inverse)


def check_rows(rows: Tensor, name: str, x: Tensor) -> None:
    """Check that ``rows`` is an int32 index of the rows of ``x``."""
    check_tensor("rows", rows, dtypes=(torch.int32,), ndim=(1,))
    check_tensor(name, x, ndim=(2,))
    same_device(name, x.device, rows=rows)
    if rows.shape[0] and not x.shape[0]:
        raise ValueError(f"rows must be empty, because {name} has no rows")


def check_seed(seed: Tensor | None, fmt: Format, argument: str, device: torch.device) -> None:
    """Check ``seed``: (2,) int64 for a stochastic format, else None.

    It must be on ``device``, the device of ``argument``.
    """
    if not fmt.is_stochastic:
        if seed is not None:
            raise ValueError(f"seed is for stochastic rounding, which {fmt.text} does not have")
        return
    if seed is None:
        raise ValueError(
            f"seed is missing: {fmt.text} rounds stochastically and needs a (2,) int64 seed"
        )
    check_tensor("seed", seed, dtypes=(torch.int64,), shape=(2,))
    same_device(argument, device, seed=seed)


def same_device(argument: str, device: torch.device, **tensors: Tensor | None) -> None:
    """Check that all tensors are on ``device``, the device of ``argument``."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        check_tensor(name, tensor)
        if tensor.device != device:
            raise ValueError(
                f"{name} must be on the device of {argument} ({device}), got {tensor.device}"
            )


def check_input(
    name: str, x: Tensor, offs: Tensor | None, shapes: Sequence[int] | None = None
) -> None:
    """Check the shape and the dtype of a plain input.

    ``x`` must be (T, K) with ``offs``, (capacity,) with ``shapes``, else (G, N, K); and bf16, fp16
    or fp32.
    """
    if shapes is not None:
        if offs is not None:
            raise ValueError("offs and shapes are both given: pass only one of them")
        check_tensor(f"{name} with shapes", x, dtypes=INPUT_DTYPES, ndim=(1,))
        return
    check_tensor(name, x, dtypes=INPUT_DTYPES, ndim=(3,) if offs is None else (2,))
    if offs is not None:
        check_offs(offs)
        same_device(name, x.device, offs=offs)
    elif x.shape[0] < 1:
        raise ValueError(f"{name} must have at least one group, got shape {tuple(x.shape)}")


def check_copy(
    codes_name: str,
    scales_name: str,
    copy: tuple[Tensor, Sequence[Tensor]],
    fmt: Format,
    shape: Sequence[int],
    num_groups: int | None,
    columnwise: bool,
    shapes: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Check one direction of a quantized tensor, ``copy``, against ``layout.buffers``.

    Args:
        codes_name: Name of the argument with the codes.
        scales_name: Name of the argument with the other ``Format.operand_names``.
        copy: Codes and the list of other buffers.
        fmt: Format.
        shape: (T, K) of a ragged tensor, (G, N, K) of a uniform one, or (capacity,) with
            ``shapes``.
        num_groups: G of a ragged tensor, else None.
        columnwise: True for the columnwise copy.
        shapes: (m, n) of each member. Optional.
    """
    codes, scales = copy
    names = fmt.operand_names(columnwise)
    wanted = buffers(
        fmt, shape, num_groups, shapes=shapes, rowwise=not columnwise, columnwise=columnwise
    )
    if len(scales) != len(names) - 1:
        raise ValueError(
            f"{scales_name} must be {', '.join(names[1:])} of {fmt.text}, got {len(scales)} tensors"
        )
    check_tensor(codes_name, codes, dtypes=(wanted[names[0]].dtype,), shape=wanted[names[0]].shape)
    for i, (name, tensor) in enumerate(zip(names[1:], scales, strict=True)):
        label = f"{scales_name}[{i}], the {name} of {fmt.text},"
        check_tensor(label, tensor, dtypes=(wanted[name].dtype,), shape=wanted[name].shape)
