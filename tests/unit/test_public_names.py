"""Public names: what completion shows, what ``help`` says, and answers to misspelled names."""

import importlib
import inspect
import subprocess
import sys

import pytest

import cute_kernels
import grouped
from cute_kernels.formats import parse
from cute_kernels.formats.activations import Activation, parse_activation
from cute_kernels.records import did_you_mean
from tests.helpers import run_python

#: Modules that users see; each shows its public names only.
MODULES = (
    "cute_kernels",
    "cute_kernels.formats",
    "grouped",
    "grouped.checkpoint",
    "grouped.inspect",
    "grouped.nn",
    "grouped.optim",
    "grouped.parallel",
    "grouped.recipes",
)
#: Modules that need a library of an extra.
OPTIONAL = {"torchtitan", "transformers"}


def public_values(name):
    """Return the values of the names that ``dir`` shows, except for dunder names."""
    module = importlib.import_module(name)
    return {f"{name}.{key}": getattr(module, key) for key in dir(module) if key[:2] != "__"}


VALUES = {key: value for name in MODULES for key, value in public_values(name).items()}
CALLABLES = {key: value for key, value in VALUES.items() if callable(value)}


@pytest.mark.parametrize("name", [*MODULES, "grouped.integrations"])
def test_dir_shows_what_all_names(name):
    module = importlib.import_module(name)
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, key) for key in {*module.__all__} - OPTIONAL)


def test_completion_of_grouped_shows_what_users_need():
    names = {"checkpoint", "inspect", "integrations", "nn", "optim", "parallel", "recipes"}
    assert names <= {*dir(grouped)}
    assert not {"debug", "distributed", "functional", "tensor", "tracing"} & {*dir(grouped)}


@pytest.mark.parametrize("name", [key for key, value in VALUES.items() if inspect.ismodule(value)])
def test_public_modules_have_docstrings(name):
    assert VALUES[name].__doc__


@pytest.mark.parametrize("name", CALLABLES)
def test_public_functions_and_classes_have_docstrings(name):
    """Check that the docstring is the object's own, not one that ``dataclass`` made."""
    value = CALLABLES[name]
    assert value.__doc__ and not value.__doc__.startswith(f"{name.rpartition('.')[2]}(")


@pytest.mark.parametrize("name", [key for key, value in VALUES.items() if inspect.isclass(value)])
def test_public_methods_and_properties_have_docstrings(name):
    """Check the members that our classes define, unless they override a documented one."""
    cls, missing = VALUES[name], []
    for key, member in vars(cls).items():
        is_member = inspect.isfunction(member) or isinstance(member, (property, classmethod))
        if is_member and not key.startswith("_") and not inspect.getdoc(getattr(cls, key)):
            missing.append(key)
    assert not missing


def test_submodules_are_imported_on_first_use():
    """Check that ``import grouped`` imports no library of an extra and no lazy submodule."""
    run_python("""
import sys, grouped
lazy = ("checkpoint", "integrations", "parallel", "debug", "distributed")
assert not [name for name in lazy if f"grouped.{name}" in sys.modules]
assert not {"transformers", "safetensors", "torchtitan"} & {*sys.modules}
assert grouped.checkpoint.load and grouped.parallel.ExpertParallel and grouped.integrations
assert grouped.distributed and grouped.debug  # Deprecated, and forward with a warning.
""")


@pytest.mark.parametrize(
    ("code", "meant"),
    [
        ("import grouped; grouped.quantise", "quantize"),
        ("import grouped; grouped.chekpoint", "checkpoint"),
        ("import grouped; grouped.recipes.NVPF4", "NVFP4"),
        ("import cute_kernels; cute_kernels.suport", "support"),
    ],
)
def test_python_suggests_attributes_of_modules(code, meant):
    """Check that lazy submodules leave Python's own suggestions intact."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.rstrip().endswith(f"Did you mean: '{meant}'?")


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: parse("nvpf4"), "'nvfp4'"),
        (lambda: parse("NVFP4"), "'nvfp4'"),
        (lambda: parse("nvfp4:rowscaled"), "'row_scaled'"),
        (lambda: parse_activation("swigloo"), "'swiglu'"),
        (lambda: Activation("gleu"), "'gelu'"),
        (lambda: grouped.nn.GroupedMLP(1, 16, 16, activation="swigle"), "'swiglu'"),
        (lambda: grouped.nn.GroupedLinear(1, 16, 16, recipe="NVPF4"), r"grouped.recipes.NVFP4\(\)"),
        (lambda: cute_kernels.backend("emulated:sm100a").__enter__(), "'emulated:sm_100a'"),
        (lambda: cute_kernels.backend("emulated:sm_90a", sed=1).__enter__(), "'seed'"),
        (lambda: cute_kernels.support("grouped_gem", None, "sm_90a"), "'grouped_gemm'"),
        (lambda: cute_kernels.support("grouped_gemm", None, "sm90"), "'sm_90a'"),
    ],
)
def test_errors_suggest_the_name_that_was_meant(call, meant):
    with pytest.raises((ValueError, TypeError), match=rf"did you mean {meant}\?$"):
        call()


@pytest.mark.parametrize("name", ["", "zzz", None, 3])
def test_names_that_are_close_to_nothing_get_no_suggestion(name):
    assert did_you_mean(name, ("nvfp4", "mxfp8", None, (1, 2))) == ""
