"""Ahead-of-time compilation of kernels, several at once.

It fills a cache folder when an image is built, and serves programs that must not compile at a
critical moment, such as under a time-out or during a CUDA graph capture.
"""

import argparse
import contextlib
import dataclasses
import importlib
import os
import queue
import re
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures

import torch

from ..records import UnsupportedError
from .arch import Architecture, architecture, device_architecture
from .cache import cache_key, default_cache
from .compile import compile_kernel, is_on_disk
from .dsl import require_dsl
from .spec import KernelSpec, canonical_text, short_name
from .worker import Answer, Worker

#: Modules that list the kernels of a family, each by ``kernel_specs(arch: str)``: an iterable of
#: specs of kernels for ``"sm_90a"`` or ``"sm_100a"``. Listing needs no CuTe DSL.
FAMILIES = (
    "cute_kernels.kernels.quantize.variants",
    "cute_kernels.kernels.gemm.variants",
    "cute_kernels.kernels.moe.variants",
)


@dataclasses.dataclass(frozen=True)
class PrecompileResult:
    """Numbers of compiled and of already cached kernels, and the elapsed time in seconds."""

    compiled: int
    cached: int
    seconds: float


class PrecompileError(RuntimeError):
    """Some kernels did not compile. The message has each one's error."""


def declared_specs(arch: Architecture) -> list[KernelSpec]:
    """Return the kernel variants to compile ahead of time for an architecture."""
    return [
        spec
        for family in FAMILIES
        for spec in importlib.import_module(family).kernel_specs(arch.name)
    ]


def precompile(
    specs: Iterable[KernelSpec] | None = None,
    *,
    arch: str | Architecture | None = None,
    jobs: int | None = None,
    load: bool = True,
    progress: bool = True,
) -> PrecompileResult:
    """Compile kernels into the disk cache, and load them into this process.

    Args:
        specs: Kernels to compile. By default all that quantization and the recipes use.
        arch: ``"sm_90a"``, ``"sm_100a"``, ``"sm_103a"`` or ``"emulated:..."``; no such GPU is
            needed. By default the architecture of the current CUDA device.
        jobs: Number of compiler processes. By default one for each CPU of this process. A
            process takes about 0.5 GB.
        load: True also loads the kernels, so that no later call has to.
        progress: True shows a progress bar (tqdm if it is installed) on standard error.

    Returns:
        Numbers of compiled and of cached kernels, and the time.

    Raises:
        UnsupportedError: The CuTe DSL is missing, or no ``arch`` is given and there is no GPU.
        PrecompileError: A kernel did not compile, or, without ``load``, cannot be kept on disk.
    """
    started = time.perf_counter()
    require_dsl()
    target = _target(arch)
    todo = list(dict.fromkeys(declared_specs(target) if specs is None else specs))
    missing = [spec for spec in todo if not is_on_disk(spec, target)]
    jobs = min(jobs or _usable_cpus(), len(missing))
    if default_cache() is None or any(cache_key(spec, target) is None for spec in missing):
        jobs = 1  # other processes could not hand over what they compile
    run = _in_workers if jobs > 1 else _in_process
    failures, compiled = [], 0
    for spec, answer in _shown(run(missing, target, jobs), len(missing), progress):
        if isinstance(answer, str):
            failures.append(f"{canonical_text(spec)} for {target}: {answer}")
        elif answer is None and not load:
            failures.append(f"{canonical_text(spec)} for {target}: it cannot be kept on disk")
        else:
            compiled += answer is not False
    if failures:
        raise PrecompileError("\n".join(failures))
    if load:
        for spec in todo:
            compile_kernel(spec, target)
    return PrecompileResult(compiled, len(todo) - compiled, time.perf_counter() - started)


def _target(arch: str | Architecture | None) -> Architecture:
    """Return the architecture to compile for."""
    if isinstance(arch, Architecture):
        return arch
    if arch is not None:
        return architecture(arch)
    if not torch.cuda.is_available():
        raise UnsupportedError("there is no CUDA device to compile for; name an arch")
    return device_architecture(torch.cuda.current_device())


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_process(
    todo: Sequence[KernelSpec], arch: Architecture, jobs: int
) -> Iterator[tuple[KernelSpec, Answer]]:
    for spec in todo:
        answer: Answer
        try:
            compile_kernel(spec, arch)
            answer = True if is_on_disk(spec, arch) else None
        except Exception:  # reported together with every other kernel's
            answer = traceback.format_exc()
        yield spec, answer


def _in_workers(
    todo: Sequence[KernelSpec], arch: Architecture, jobs: int
) -> Iterator[tuple[KernelSpec, Answer]]:
    """Compile with ``jobs`` processes; yields in the order in which they finish."""
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def compile_one(spec: KernelSpec) -> Answer:
        worker = idle.get()
        try:
            return worker.compile(spec, arch)
        finally:
            idle.put(worker)

    with contextlib.ExitStack() as workers, futures.ThreadPoolExecutor(jobs) as pool:
        for _ in range(jobs):
            idle.put(workers.enter_context(Worker()))
        running = {pool.submit(compile_one, spec): spec for spec in todo}
        try:
            for future in futures.as_completed(running):
                yield running[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _shown(
    answers: Iterable[tuple[KernelSpec, Answer]], total: int, progress: bool
) -> Iterator[tuple[KernelSpec, Answer]]:
    """Yield ``answers`` unchanged, and report the progress on standard error."""
    if not progress or not total:
        yield from answers
        return
    try:
        from tqdm import tqdm
    except ImportError:
        for number, (spec, answer) in enumerate(answers, 1):
            print(f"{number}/{total} {_outcome(spec, answer)}", file=sys.stderr, flush=True)
            yield spec, answer
        return
    with tqdm(total=total, unit="kernel", desc="precompile") as bar:
        for spec, answer in answers:
            bar.set_postfix_str(_outcome(spec, answer), refresh=False)
            bar.update()
            yield spec, answer


def _outcome(spec: KernelSpec, answer: Answer) -> str:
    outcome = {True: "compiled", False: "cached", None: "not kept on disk"}
    return f"{short_name(spec)} {'failed' if isinstance(answer, str) else outcome[answer]}"


def _listed(spec: KernelSpec) -> str:
    """Return the name of a kernel in PTX and in the cache, and the text of its spec."""
    return f"{short_name(spec)} {canonical_text(spec)}"


def _matching_specs(arch: Architecture, pattern: str) -> list[KernelSpec]:
    """Return the kernels of an architecture whose names or specs match a regular expression.

    Raises:
        ValueError: ``pattern`` is not a regular expression, or matches no kernel.
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"--match must be a regular expression, got {pattern!r}: {error}"
        ) from None
    specs = [spec for spec in declared_specs(arch) if expression.search(_listed(spec))]
    if not specs:
        raise ValueError(
            f"--match {pattern!r} matches no kernel of {arch}: upper and lower case differ, and "
            "--list without --match shows all specs"
        )
    return specs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command ``python -m cute_kernels.precompile``, and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m cute_kernels.precompile",
        description="Compile kernels into the disk cache (CUTE_KERNELS_CACHE_DIR).",
    )
    parser.add_argument(
        "--arch",
        action="append",
        help="sm_90a, sm_100a, sm_103a or emulated:<arch>; may be repeated; default: the "
        "architecture of the current CUDA device",
    )
    parser.add_argument(
        "--match",
        default="",
        help="only kernels whose name or spec (see --list) has a match of this regular expression",
    )
    parser.add_argument("--jobs", type=int, help="processes; default: one for each usable CPU")
    parser.add_argument("--list", action="store_true", help="list the kernels, compile nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(arguments)
    try:
        for arch in map(_target, options.arch or [None]):
            specs = _matching_specs(arch, options.match)
            if options.list:
                print(*map(_listed, specs), sep="\n")
                continue
            result = precompile(
                specs, arch=arch, jobs=options.jobs, load=False, progress=not options.quiet
            )
            print(
                f"{arch}: {result.compiled} compiled, {result.cached} cached, "
                f"{result.seconds:.1f} s"
            )
    except (UnsupportedError, PrecompileError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
