"""The suites: what each measures, as tasks."""

from .base import Suite

__all__ = ["SUITES", "suite"]

#: By name, in the order of ``perf run --help``.
SUITES = ("quantize", "gemm", "layer", "moe", "memory", "host", "compile", "counts")


def suite(name: str) -> Suite:
	import importlib

	found: Suite = importlib.import_module(f"perf.suites.{name}").SUITE
	return found
