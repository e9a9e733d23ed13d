import dataclasses
import re
from typing import Any

import pytest

from cute_kernels.gemm.variants import kernel_specs
from perf.compiled import compile_for_emulator
from tests.helpers import each

pytest.importorskip("cutlass")


def facts(spec):
	"""What a variant has that another may not: its class with each field and value."""
	fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
	return {(type(spec), *field) for field in fields.items()}


def sample(specs):
	"""Few variants, which have every tile and every value of every option among them."""
	left, chosen = list(specs), []
	missing = set[tuple[Any, ...]]().union(*map(facts, left))
	while missing:
		best = max(left, key=lambda spec: len(facts(spec) & missing))
		chosen.append(best)
		missing -= facts(best)
	return chosen


CASES = [(arch, spec) for arch in ("sm_90a", "sm_100a") for spec in sample(kernel_specs(arch))]


@each(("arch", "spec"), CASES, str)
def test_arithmetic_is_exact(arch, spec):
	"""No flushed denormals and no approximations, but for reciprocals that are rounded afterwards."""
	ptx = compile_for_emulator(spec, arch).ptx
	assert ".entry" in ptx
	assert not re.findall(r"^.*(?:\.ftz|\.approx).*$", ptx.replace("rcp.approx.ftz", ""), re.MULTILINE)
