"""Processes that compile kernels into the disk cache.

``cute.compile`` is single-threaded, so several processes compile kernels in parallel. They are
separate programs: a forked child of a process that has used CUDA, torch or LLVM threads may hang,
and spawned children of ``multiprocessing`` run the caller's main script again.

Protocol: the parent writes a pickled ``bytes`` object to standard input, which holds a pickled
``(spec, arch)``. The worker answers on standard output with a pickled ``Answer``.
"""

import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Union

from .arch import Architecture
from .spec import KernelSpec

#: Result of a kernel: the result of ``compile_to_disk``, or the error as text.
Answer = Union[bool, str, None]  # noqa: UP007  (evaluated by Python 3.10 too)


class Worker:
    """The parent's side: one compiler process, started when needed, ended with the ``with`` block.

    If a process dies (a compiler crash, no memory), the kernel that it was compiling fails; the
    next kernel gets a new process.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            if kind is not None:
                self._process.kill()
            self._process.communicate()

    def compile(self, spec: KernelSpec, arch: Architecture) -> Answer:
        """Run ``compile_to_disk`` in the process and wait for its answer."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(pickle.dumps((spec, arch)), process.stdin)
            process.stdin.flush()
            answer: Answer = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError):
            self._process = None
            return f"the compiler process died with status {process.wait()}"
        return answer

    @staticmethod
    def _start() -> subprocess.Popen[bytes]:
        # The worker finds modules, and with them spec classes, where this process does.
        search_path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
        return subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": search_path},
        )


def main() -> None:
    """Compile kernels for the parent until standard input ends."""
    # Output of the compiler must not mix with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from .compile import compile_to_disk

    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: Answer
        try:
            answer = compile_to_disk(*pickle.loads(request))
        except Exception:  # the parent reports it, together with every other kernel's
            answer = traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()
