"""Suites: sets of tasks that are measured."""

import importlib

from .base import Suite

#: Names of the suites, in the order of ``perf run --help``.
SUITES = ("quantize", "gemm", "layer", "moe", "memory", "host", "compile", "counts")


def suite(name: str) -> Suite:
    """Return a suite by its name."""
    return importlib.import_module(f"perf.suites.{name}").SUITE
