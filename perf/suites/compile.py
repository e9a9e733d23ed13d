"""Time to compile and to load a kernel, and its registers and stack."""

import dataclasses
import functools
import tempfile
import timeit
from collections.abc import Iterator
from unittest import mock

import torch

from cute_kernels.runtime.aot import declared_specs
from cute_kernels.runtime.arch import Architecture, architecture, device_architecture
from cute_kernels.runtime.compile import compile_kernel, forget_kernels
from cute_kernels.runtime.dsl import require_dsl
from cute_kernels.runtime.emulated import EmulatedKernel
from cute_kernels.runtime.spec import KernelSpec, canonical_text, short_name
from cute_kernels.testing.cubin import read_resources

from ..contender import Contender, Run, Task, same_for_all_copies, unchecked
from ..measure.base import Measurement, Meter, time_measurement
from .base import Options, Suite

_REPEATS = 3


class _CompileMeter(Meter):
    """Compiles into a temporary cache folder, then loads from it.

    For emulated kernels it also reads the number of registers and the stack size from the machine
    code.
    """

    kind = "cpu"
    backend = "reference"

    def __init__(self, arch: Architecture, quick: bool) -> None:
        self.target = arch
        self.arch = arch.name
        self.device = torch.device("cpu")
        self.quick = quick

    def measure_one(self, contender: Contender, run: Run) -> list[Measurement]:
        """Measure the times to compile and to load, and read the resources."""
        cold, warm = [], []
        for _ in range(1 if self.quick else _REPEATS):
            with (
                tempfile.TemporaryDirectory() as folder,
                mock.patch.dict("os.environ", CUTE_KERNELS_CACHE_DIR=folder),
            ):
                cold.append(_microseconds(run))
                warm.append(_microseconds(run))
        kernel = run()
        measurements = [
            time_measurement(cold, "compile time", "empty cache"),
            time_measurement(warm, "load time", "from the disk cache"),
        ]
        if isinstance(kernel, EmulatedKernel):
            resources = read_resources(kernel.cubin).values()
            counts = {
                "registers": max(r.registers for r in resources),
                "stack bytes": max(r.stack_bytes for r in resources),
                "cubin bytes": len(kernel.cubin),
            }
            measurements += [
                Measurement(name, n, "1", "counted", 0.0, 1) for name, n in counts.items()
            ]
        return measurements


def _microseconds(run: Run) -> float:
    forget_kernels()
    return timeit.timeit(run, number=1) * 1e6


def _tasks(meter: Meter, options: Options) -> Iterator[Task]:
    """Yield a task per kernel that ``precompile`` declares; without ``--full`` one per kind."""
    assert isinstance(meter, _CompileMeter)
    require_dsl()
    specs: dict[object, KernelSpec] = {}
    for spec in declared_specs(meter.target):
        kind = (type(spec).__name__, getattr(spec, "operand", ""), getattr(spec, "format", ""))
        specs.setdefault(canonical_text(spec) if options.full else kind, spec)
    for spec in list(specs.values())[: 2 if options.quick else None]:
        contenders = [unchecked("ours", "", functools.partial(compile_kernel, spec, meter.target))]
        yield Task(
            "compile",
            {"arch": meter.arch, "kernel": short_name(spec), "spec": _brief(spec)},
            same_for_all_copies(contenders),
        )


def _brief(spec: KernelSpec) -> str:
    """Return the class of a spec and its fields that differ from their defaults."""
    changed = []
    for field in dataclasses.fields(spec):  # type: ignore[arg-type]
        value = getattr(spec, field.name)
        if value != field.default:
            text = value if isinstance(value, (str, bool, int)) else canonical_text(value)
            changed.append(f"{field.name}={text}")
    return f"{type(spec).__name__}({', '.join(changed)})"


def _meters(options: Options) -> list[Meter]:
    if options.backend.startswith("emulated:"):
        targets = [architecture(options.backend)]
    elif torch.cuda.is_available():
        targets = [device_architecture(torch.cuda.current_device())]
    else:
        targets = [architecture(f"emulated:{name}") for name in ("sm_90a", "sm_100a")]
    return [_CompileMeter(target, options.quick) for target in targets]


SUITE = Suite(_tasks, _meters)
