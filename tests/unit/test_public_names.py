"""Public names: what completion shows, what ``help`` says, and answers to misspelled names."""

import importlib
import inspect
import os
import subprocess
import sys
import warnings

import pytest
import torch

import cute_kernels
import grouped
import ptx_emulator
from cute_kernels.arch import get_arch
from cute_kernels.formats import parse
from cute_kernels.formats.activations import Activation, parse_activation
from cute_kernels.runtime.arch import architecture
from grouped.checkpoint.layouts import get_writable_layout
from ptx_emulator.host import settings
from ptx_emulator.host.suggestions import did_you_mean
from tests.helpers import run_python

#: Modules that users see; each shows its public names only.
MODULES = (
    "cute_kernels",
    "cute_kernels.formats",
    "cute_kernels.ops",
    "grouped",
    "grouped.checkpoint",
    "grouped.convert",
    "grouped.inspect",
    "grouped.nn",
    "grouped.optim",
    "grouped.parallel",
    "grouped.recipes",
    "ptx_emulator",
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
    names = {"checkpoint", "convert", "inspect", "integrations", "nn", "optim", "parallel"}
    assert names | {"recipes"} <= {*dir(grouped)}
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
lazy = ("checkpoint", "convert", "integrations", "parallel", "debug", "distributed")
assert not [name for name in lazy if f"grouped.{name}" in sys.modules]
assert not {"transformers", "safetensors", "torchtitan"} & {*sys.modules}
assert grouped.checkpoint.load and grouped.parallel.ExpertParallel and grouped.integrations
assert grouped.convert.convert
assert grouped.distributed and grouped.debug  # Deprecated, and forward with a warning.
""")


@pytest.mark.parametrize("name", [*MODULES, "grouped.integrations", "grouped.distributed"])
def test_modules_suggest_attributes(name):
    """Check that the message of the error has the suggestion, also if it is caught."""
    module = importlib.import_module(name)
    attribute = max(getattr(module, "__all__", ["ExpertParallel"]), key=len)
    typo = f"{attribute[:3]}{attribute[4:]}"
    with pytest.raises(
        AttributeError, match=rf"has no attribute '{typo}': did you mean '{attribute}'"
    ):
        getattr(module, typo)


def test_an_attribute_of_a_submodule_is_suggested_with_its_module():
    with pytest.raises(AttributeError, match=r"did you mean grouped\.nn\.MoE\?$"):
        _ = grouped.MoE


@pytest.mark.parametrize("name", ["__wrapped__", "__bases__"])
def test_names_of_python_get_no_suggestion(name):
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'$"):
        getattr(grouped, name)


@pytest.mark.parametrize(
    ("code", "suggestion"),
    [
        ("import grouped; grouped.quantise", "quantize"),
        ("import grouped; grouped.chekpoint", "checkpoint"),
        ("import grouped; grouped.recipes.NVPF4", "NVFP4"),
        ("import cute_kernels; cute_kernels.suport", "support"),
    ],
)
def test_tracebacks_have_one_suggestion(code, suggestion):
    """Check that Python does not add a suggestion of its own to the one in the message."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stderr.rstrip().endswith(f": did you mean {suggestion!r}?")
    assert result.stderr.lower().count("did you mean") == 1


def test_unknown_environment_variables_warn_once(monkeypatch):
    """Check the warning, its suggestion, and that known variables and a second call do not warn."""
    monkeypatch.setattr(settings, "_warned", set())
    monkeypatch.setenv("CUTE_KERNELS_BACKED", "emulated:sm_100a")
    monkeypatch.setenv("CUTE_KERNELS_BACKEND", "reference")
    with pytest.warns(RuntimeWarning, match=r"BACKED has no effect.* mean 'CUTE_KERNELS_BACKEND'"):
        settings.warn_about_unknown_variables()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings.warn_about_unknown_variables()


@pytest.mark.parametrize("module", ["grouped", "ptx_emulator"])
def test_import_checks_environment_variables(module):
    result = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        capture_output=True,
        text=True,
        env={**os.environ, "CUTE_KERNELS_CASH": "0"},
    )
    assert "variable CUTE_KERNELS_CASH has no effect" in result.stderr


@pytest.mark.parametrize(
    ("call", "suggestion"),
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
        (lambda: get_arch("sm_100"), "'sm_100a'"),
        (lambda: architecture("emulate:sm_100a"), "'emulated:sm_100a'"),
        (lambda: grouped.NVFP4(row_scalled=True), "'row_scaled'"),
        (lambda: grouped.FP8Block(pow2_scale=True), "'pow2_scales'"),
        (lambda: Activation("clamped_swiglu", alfa=1.0), "'alpha'"),
        (lambda: grouped.recipes.NVFP4(hadamrd=True), "'hadamard'"),
        (lambda: grouped.recipes.Recipe(weigth=grouped.NVFP4()), "'weight'"),
        (lambda: get_writable_layout("model-opt"), "'modelopt'"),
        (lambda: cute_kernels.ops.compute_offsets(torch.ones(1), multiplyer=2), "'multiplier'"),
        (lambda: ptx_emulator.options(mode="caos").__enter__(), "'chaos'"),
    ],
)
def test_errors_suggest_the_name_that_was_meant(call, suggestion):
    with pytest.raises((ValueError, TypeError), match=rf"did you mean {suggestion}\?$"):
        call()


@pytest.mark.parametrize("name", ["", "zzz", None, 3])
def test_names_that_are_close_to_nothing_get_no_suggestion(name):
    assert did_you_mean(name, ("nvfp4", "mxfp8", None, (1, 2))) == ""
