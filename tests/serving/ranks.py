"""Serve on two ranks of a CPU: ``python -m tests.serving.ranks``.

vLLM loads the plug-in in each worker by its entry point. The log-probabilities of tensor-parallel
and expert-parallel experts must be those of one rank, within bf16.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from tests.serving import folders
from tests.serving.__main__ import difference, served


class Case(NamedTuple):
    """A server on two ranks.

    Attributes:
        folder: Name of the checkpoint.
        scheme: Value of ``--quantization``.
        is_expert_parallel: True divides the experts, False each expert's rows.
        error: Text of the error at start, or None if it serves.
        largest: Largest difference to one rank.
    """

    folder: str
    scheme: str
    is_expert_parallel: bool
    error: str | None = None
    largest: float = 0.02


CASES = (
    # Each rank quantizes its part of an expert with a global scale of its own.
    Case("plain", "grouped_w4a16", False, largest=0.2),
    Case("plain", "grouped_w4a16", True),
    Case("modelopt", "grouped", False),
    Case("compressed-tensors", "grouped", True),
    Case("deepseek", "grouped_w8a16", True),
    Case("deepseek", "grouped_w8a16", False, "use a smaller --tensor-parallel-size"),
)


@contextlib.contextmanager
def captured_output() -> Iterator[IO[str]]:
    """Write what this process and its children print into a file."""
    with tempfile.TemporaryFile("w+") as file:
        saved = [os.dup(descriptor) for descriptor in (1, 2)]
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        try:
            yield file
        finally:
            for descriptor, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)


def check(folder: Path, case: Case) -> bool:
    """Serve a case on two ranks, print the outcome, and return True if it is right."""
    name = f"{'EP' if case.is_expert_parallel else 'TP'} 2: {case.folder} / {case.scheme}"
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": case.is_expert_parallel}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"  # One core for each rank.
    with captured_output() as output:
        try:
            got = served(folder, case.scheme, **options)
        except Exception:
            got = None
        output.seek(0)
        text = output.read()
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "auto"
    if got is None:
        is_right = case.error is not None and case.error in text
        print(f"{'right' if is_right else f'{text}WRONG'}  refused: {name}", flush=True)
        return is_right
    error = difference(got, served(folder, case.scheme))
    is_right = error < case.largest and case.error is None
    print(f"{'right' if is_right else 'WRONG'}  {error:.4f} from one rank: {name}", flush=True)
    return is_right


def main() -> int:
    """Serve all cases, and return the exit status."""
    with tempfile.TemporaryDirectory() as root:
        written = folders.write(Path(root), ("modelopt", "compressed-tensors", "deepseek"))
        results = [check(written[case.folder], case) for case in CASES]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
