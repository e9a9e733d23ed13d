"""The suites: what each measures, as tasks."""

import importlib

from .base import Suite

#: By name, in the order of ``perf run --help``.
SUITES = ("quantize", "gemm", "layer", "moe", "memory", "host", "compile", "counts")


def suite(name: str) -> Suite:
    return importlib.import_module(f"perf.suites.{name}").SUITE
