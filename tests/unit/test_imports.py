"""Imports go from upper to lower layers, and no two files import each other."""

import ast
import re
from pathlib import Path

import pytest

from tests.helpers import needs_compiler, run_python

ROOT = Path(__file__).parents[2]
PACKAGES = ("ptx_emulator", "cute_kernels", "grouped")
#: The layer of each package or module; the longest prefix of a module's name decides. A module may
#: import modules of lower layers and of its own entry.
LAYERS = {
    "ptx_emulator.host": 0,  # Services that all packages share.
    "ptx_emulator": 1,
    "cute_kernels.deprecation": 1,
    "cute_kernels.records": 1,
    "cute_kernels.arch": 1,
    "cute_kernels.formats": 2,
    "cute_kernels.layout": 3,
    "cute_kernels.capability": 4,
    "cute_kernels.reference": 5,
    "cute_kernels.device": 5,
    "cute_kernels.kernels.quantize": 6,
    "cute_kernels.kernels.gemm": 6,
    "cute_kernels.kernels.moe": 7,
    "cute_kernels.runtime": 8,
    "cute_kernels.ops": 9,
    "cute_kernels.testing": 10,
    "cute_kernels": 11,  # Public names and command lines.
    "grouped.tracing": 12,
    "grouped.tensor": 13,
    "grouped.ownership": 14,
    "grouped.recipes": 14,
    "grouped.functional": 15,
    "grouped.inspect": 16,
    "grouped.nn": 17,
    "grouped": 18,
}
#: How a configuration names its kernel, which the runtime imports: ``"package.module:Name"``.
NAMED = re.compile(r"((?:cute_kernels|grouped)(?:\.\w+)*):(\w+)")
REFERENCE_NEEDS_ONLY = {
    "cute_kernels.formats",
    "cute_kernels.layout",
    "cute_kernels.records",
    "cute_kernels.reference",
}


def modules():
    """Return the files of all modules, by the name of the module."""
    files = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            names = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return files


MODULES = modules()


def layer(name):
    names = name.split(".")
    prefixes = (".".join(names[:n]) for n in range(len(names), 0, -1))
    return next(prefix for prefix in prefixes if prefix in LAYERS)


def imported_names(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


def names_in_strings(nodes):
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = NAMED.fullmatch(node.value)
            if named and named[1] in MODULES:
                yield named[1]


def all_imports(tree, *, with_names=False):
    """Return the names of imported modules. Imports in functions and for type checkers count."""
    nodes = list(ast.walk(tree))
    return {*imported_names(nodes), *(names_in_strings(nodes) if with_names else ())}


def parse(name):
    """Return the syntax tree of a module, with absolute names instead of relative imports."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            node.module, node.level = f"{package.rsplit('.', node.level - 1)[0]}.{node.module}", 0
    return tree


@pytest.mark.parametrize("name", [*MODULES])
def test_imports_go_down(name):
    source = layer(name)
    for target in all_imports(parse(name), with_names=True):
        if target.split(".")[0] not in PACKAGES:
            continue
        imported = layer(target)
        assert imported == source or LAYERS[imported] < LAYERS[source], (
            f"{name} ({source}) imports {target}"
        )
        if source == "cute_kernels.reference":
            assert imported in REFERENCE_NEEDS_ONLY, f"{name} imports {target}"


def circles(imports):
    """Return the sets of modules that import each other, directly or through others of the set."""
    reached = {}
    for name in imports:
        pending, targets = [name], set()
        while pending:
            new = set(imports.get(pending.pop(), ())) - targets
            targets |= new
            pending += new
        reached[name] = targets
    cycles = {
        frozenset(target for target in reached[name] if name in reached.get(target, ()))
        for name in imports
        if name in reached[name]
    }
    return sorted(map(set, cycles), key=sorted)


def test_circles_are_found():
    imports = {"a": {"b"}, "b": {"c", "x"}, "c": {"a"}, "d": {"a", "e"}, "e": {"d"}, "f": {"f"}}
    assert circles(imports) == [{"a", "b", "c"}, {"d", "e"}, {"f"}]


def test_no_files_import_each_other():
    """Imports in functions and for type checkers count; names of kernels in strings do not."""
    assert not circles({name: all_imports(parse(name)) & set(MODULES) for name in MODULES})


def test_only_tests_of_perf_import_perf():
    """The benchmarks are no part of the packages, whose tests must not depend on them."""
    tests, importing = ROOT / "tests", []
    for path in sorted(tests.rglob("*.py")):
        if tests / "perf" in path.parents:
            continue
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        absolute = [n for n in nodes if not getattr(n, "level", 0)]
        if any(name.split(".")[0] == "perf" for name in imported_names(absolute)):
            importing.append(str(path.relative_to(tests)))
    assert not importing


@pytest.mark.parametrize("is_blocked", [False, True])
def test_the_packages_do_not_load_the_dsl_and_work_without_it(is_blocked):
    code = f"""
import sys, torch
names = {{"cutlass", "cuda", "tvm_ffi", "hypothesis", "pytest"}}
fresh = names.difference(sys.modules)
if {is_blocked}:
	sys.modules |= dict.fromkeys(names)  # importing them raises ImportError
import cute_kernels, grouped, cute_kernels.runtime.aot
x = torch.ones(4, 32, dtype=torch.bfloat16)
q = grouped.quantize(x, grouped.NVFP4(), offs=[1, 4])
assert q.dequantize().equal(x) and not any(map(sys.modules.get, fresh))
"""
    run_python(code)


@pytest.mark.emulated
@needs_compiler
def test_the_emulator_works_without_torch_and_the_dsl():
    code = """
import sys
sys.modules["torch"] = sys.modules["cutlass"] = None
import cute_kernels, numpy
assert cute_kernels.__all__ == ["__version__", "emulator"]
cute_kernels.emulator.load_ptx('''.version 8.8
.target sm_100a
.visible .entry k(.param .u64 p) {
.reg .b64 %d; ld.param.u64 %d, [p]; st.global.b32 [%d], 7; }''')
x = numpy.zeros(1, numpy.uint32)
cute_kernels.emulator.launch("k", (1,), (1,), (x,))
assert x[0] == 7 and cute_kernels.emulator.installed() is None
"""
    run_python(code)
