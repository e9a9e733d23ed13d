"""The tiles that grouped GEMMs choose for recorded cases, without running a kernel.

A case runs on fake tensors, so that nothing is computed. Each op that the case calls is planned for
a GPU as if it ran there, and the tiles of its GEMM kernels are recorded.
"""

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

import grouped
from cute_kernels import UnsupportedError
from cute_kernels.kernels.gemm.common.config import GemmConfig
from cute_kernels.ops.gemm.base_op import GroupedGemm
from cute_kernels.runtime.backend import Backend
from cute_kernels.runtime.replay import OPS_BY_OVERLOAD

from .cases import GroupedShape
from .contender import Contender
from .measure.base import Meter
from .operands import Operands
from .records import Record
from .suites import fused, gemm
from .suites.base import Options
from .suites.gemm import PAIRS, Pair
from .suites.layer import LayerShape, LayerWork
from .suites.moe import MoEShape, MoEWork

#: Result of a case that an architecture does not support.
UNSUPPORTED = "unsupported"
_META = torch.device("meta")
#: Arguments of the ``_out`` form of an op that its functional form lacks.
_OUT_ARGUMENTS = ("out", "accumulate")

#: Runs a case; the result is not used.
Run = Callable[[], Any]
#: A case, and its number of rows or tokens.
Case = tuple[str, int]
#: The tiles of each case, see ``choose``.
Choices = dict[Case, str]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU for which tiles are chosen.

    Attributes:
        name: Architecture, and the product if its memory decides something.
        arch: Architecture of the kernels, such as ``"sm_90a"``.
        num_sms: Number of SMs.
        bandwidth: Peak bytes per second of the memory, None for the GPU that the model describes.
    """

    name: str
    arch: str
    num_sms: int
    bandwidth: float | None = None


#: For each architecture, the first GPU knows no bandwidth, as on the emulator. The bandwidth is two
#: words per clock of the memory, times the width of the bus in bytes.
GPUS = (
    Gpu("sm_90a", "sm_90a", 132),
    Gpu("sm_90a, H100", "sm_90a", 132, 2 * 2.619e9 * 5120 / 8),
    Gpu("sm_90a, H200", "sm_90a", 132, 2 * 3.201e9 * 6144 / 8),
    Gpu("sm_100a", "sm_100a", 148),
)
ARCHITECTURES = tuple(dict.fromkeys(gpu.arch for gpu in GPUS))


class _FakeMeter(Meter):
    """A meter that only names the architecture for which the operands of a case are made."""

    kind = "cpu"

    def __init__(self, arch: str) -> None:
        self.backend, self.arch = f"emulated:{arch}", arch
        self.device = torch.device("cpu")


class _Launcher:
    """A launcher that records the specs of kernels and launches nothing."""

    def __init__(self, gpu: Gpu) -> None:
        self.arch, self.num_sms, self.bandwidth = gpu.arch, gpu.num_sms, gpu.bandwidth
        self.specs: list[Any] = []

    def kernel(self, spec: Any) -> Callable[..., None]:
        """Record ``spec`` and return a kernel that does nothing."""
        self.specs.append(spec)
        return lambda *arguments: None


class _TileNotes(TorchDispatchMode):
    """Plans each grouped GEMM that is called in its block, and records the tiles for each GPU."""

    def __init__(self, arch: str) -> None:
        super().__init__()
        self.tiles: dict[Gpu, list[str]] = {gpu: [] for gpu in GPUS if gpu.arch == arch}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "grouped":
            # The tensor subclass calls ops of ``cute_kernels``, which are dispatched here, too.
            return NotImplemented
        kwargs = kwargs or {}
        if func.namespace == "cute_kernels":
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan the op on tensors of the same metadata without data, and record its tiles."""
        name = func.__name__.partition(".")[0].removesuffix("_out")
        op_class = OPS_BY_OVERLOAD.get(getattr(torch.ops.cute_kernels, name).default)
        if op_class is None or not issubclass(op_class, GroupedGemm):
            return
        kwargs = {name: value for name, value in kwargs.items() if name not in _OUT_ARGUMENTS}
        with _disable_current_modes():
            args, kwargs = tree_map_only(torch.Tensor, _without_data, (args, kwargs))
            op = op_class(*args, **kwargs)
            for gpu, tiles in self.tiles.items():
                tiles.append(_tiles_of_op(op, gpu))


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _tiles_of_op(op: GroupedGemm, gpu: Gpu) -> str:
    """Return the tiles of the GEMM kernels that ``op`` launches on a GPU, in their order."""
    launcher = _Launcher(gpu)
    try:
        plan = op.plan(Backend(f"emulated:{gpu.arch}", gpu.arch), lambda _: launcher)
    except UnsupportedError:
        return UNSUPPORTED
    plan.run(op, [spec.allocate(_META, False) for spec in op.outputs()])
    configs = [spec for spec in launcher.specs if isinstance(spec, GemmConfig)]
    return " ".join(tile_text(config.tile) for config in configs)


def tile_text(tile: Any) -> str:
    """Return the values of a tile in the order of its fields, such as ``"256,128,2,1,2,0"``."""
    return ",".join(str(int(value)) for value in dataclasses.astuple(tile))


@functools.lru_cache(maxsize=1)
def _operands(shape: GroupedShape, rows: int, product: str, meter: Meter) -> Operands:
    """Return operands of a product. The routing has no influence: ``offs`` is on the device."""
    return Operands(shape, rows, product, "balanced", meter.device)


def _product(
    shape: GroupedShape, rows: int, product: str, pair: Pair, meter: Meter
) -> tuple[Case, Run]:
    """Return the case and the call of a grouped product."""
    sizes = f"{shape.experts}x{shape.n}x{shape.k}"
    text = f"{product} {sizes}, {pair.text(product)}{pair.variant}"
    shape = dataclasses.replace(shape, model="", layer="")

    def run() -> None:
        _call(gemm.ours(pair, _operands(shape, rows, product, meter), meter))

    return (text, rows), run


def _pair(record: Record) -> Pair:
    """Return the formats and options of a recorded product."""
    a, _, b = record.format.partition(" x ")
    options = record.contender.split(", ")
    return Pair(
        None if a == "bfloat16" else a,
        None if b in ("", "bfloat16") else b,
        prepacked="prepacked" in options,
        quantizes="tokens quantized too" in options,
        accumulates="accumulating" in options,
    )


def _layer(record: Record, meter: Meter) -> tuple[Case, Run]:
    """Return the case and the call of a pass of a layer, or of a mixture of experts."""
    case = record.case
    sizes = ("", case["experts"], case["hidden"], case["intermediate"])
    is_cached, recompute = "cached weight" in record.contender, "recompute" in record.contender
    recipe = getattr(grouped.recipes, record.format)()
    work: Callable[..., LayerWork]
    if "top_k" in case:
        layer, rows = f"moe top {case['top_k']}", case["tokens"]
        shape: LayerShape = MoEShape(*sizes, case["top_k"])
        work = functools.partial(MoEWork, options={"recompute": True} if recompute else None)
    else:
        layer, rows = case["layer"], case["rows"]
        shape, work = LayerShape(*sizes), LayerWork
    text = f"{layer} {'x'.join(map(str, sizes[1:]))}, {case['pass']}, {record.format}"
    text += ", cached weights" * is_cached + ", recompute" * recompute

    def run() -> None:
        work(layer, shape, rows, "random", case["pass"], meter.device).package_step(
            recipe, is_cached
        ).run()

    return (text, rows), run


def _fused_case(case: Mapping[str, Any], contender: str, fmt: str) -> Case:
    return f"{case['call']}, {fmt}, {contender}", case["tokens"]


def _call(contender: Contender) -> Any:
    return contender.prepare()()


def _fused_calls(meter: Meter) -> Iterator[tuple[Case, Run]]:
    """Yield the fused calls of a mixture that the suite ``counts`` has."""
    for task in fused.tasks(meter, Options()):
        for contender in task.contenders(0):
            case = _fused_case(task.case, contender.name, contender.format)
            yield case, functools.partial(_call, contender)


def why_skipped(record: Record) -> str:
    """Return why a record has no tiles, or an empty text if it has some."""
    if not record.contender.startswith("ours"):
        return "of another library"
    if "product" in record.case or "pass" in record.case:
        return ""
    return "" if "call" in record.case and record.suite == "counts" else f"suite {record.suite}"


def _recorded(record: Record, meter: Meter) -> tuple[Case, Run | None]:
    """Return the case of a record and its call, or None for fused calls, which always run."""
    case = record.case
    if "product" in case:
        model, layer = str(case.get("model", "")), str(case.get("layer", ""))
        shape = GroupedShape(model, layer, case["experts"], case["n"], case["k"])
        return _product(shape, case["rows"], case["product"], _pair(record), meter)
    if "pass" in case:
        return _layer(record, meter)
    return _fused_case(case, record.contender, record.format), None


def _cases(records: Iterable[Record], meter: Meter) -> Iterator[tuple[Case, Run]]:
    """Yield all cases: those of the suite ``gemm`` with all models, fused calls, and records."""
    for shape, rows, product, _ in gemm.cases(Options(full=True)):
        for pair in PAIRS:
            if pair.is_valid_for(product):
                yield _product(shape, rows, product, pair, meter)
    yield from _fused_calls(meter)
    for record in records:
        if not why_skipped(record):
            case, run = _recorded(record, meter)
            if run is not None:
                yield case, run


def choose(records: Iterable[Record], arch: str) -> dict[str, Choices]:
    """Return the tiles that the GEMMs of all cases have on the GPUs of an architecture.

    Args:
        records: Recorded cases, added to those of the suite ``gemm`` and to the fused calls.
        arch: ``"sm_90a"`` or ``"sm_100a"``.

    Returns:
        Tiles by name of the GPU and case. Values are texts: the tiles of the kernels of one GEMM
        are separated by spaces, the GEMMs of a pass by ``" | "``. Cases without a GEMM have an
        empty text. The first GPU has all cases, the others have those in which they differ.
    """
    meter = _FakeMeter(arch)
    reference, *variants = [gpu for gpu in GPUS if gpu.arch == arch]
    choices: dict[str, Choices] = {gpu.name: {} for gpu in (reference, *variants)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.callback(_operands.cache_clear)
        for case, run in _cases(records, meter):
            if case in choices[reference.name]:
                continue
            notes = _TileNotes(arch)
            try:
                with notes, meter.active():
                    run()
            except UnsupportedError:
                choices[reference.name][case] = UNSUPPORTED
                continue
            texts = {gpu: " | ".join(tiles) for gpu, tiles in notes.tiles.items()}
            choices[reference.name][case] = texts[reference]
            for gpu in variants:
                if texts[gpu] != texts[reference]:
                    choices[gpu.name][case] = texts[gpu]
    return choices


def count_recorded(records: Iterable[Record], choices: Choices, arch: str) -> dict[str, int]:
    """Count the distinct recorded cases by what became of them.

    Returns:
        Numbers by ``"covered"``, ``"unsupported"`` and the reasons why others have no tiles.
    """
    meter = _FakeMeter(arch)
    outcomes = {}
    for record in records:
        key = (record.suite, record.contender, record.format, *record.case.items(), record.gpu)
        reason = why_skipped(record)
        if not reason:
            case, _ = _recorded(record, meter)
            reason = {"": "launches no GEMM", UNSUPPORTED: UNSUPPORTED}.get(
                choices[case], "covered"
            )
        outcomes[key] = reason
    return dict(collections.Counter(outcomes.values()))
