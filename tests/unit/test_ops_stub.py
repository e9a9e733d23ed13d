"""The type stub of ``cute_kernels.ops`` and the help texts of its functions."""

import inspect

import pytest

from cute_kernels import ops
from cute_kernels.ops import stub


def test_stub_is_up_to_date():
    assert stub.main(["--check"]) == 0, "run python -m cute_kernels.ops.stub --write"


def test_check_fails_for_an_outdated_stub(tmp_path, monkeypatch, capsys):
    """Check that ``--check`` fails for an outdated stub."""
    monkeypatch.setattr(stub, "STUB", tmp_path / "__init__.pyi")
    assert stub.main(["--check"]) == 1
    assert "run python -m cute_kernels.ops.stub --write" in capsys.readouterr().err
    assert stub.main(["--write"]) == 0
    assert stub.main(["--check"]) == 0


def test_stub_declares_every_public_function():
    functions = {name for name, value in vars(ops).items() if callable(value) and name.islower()}
    assert functions == set(stub.op_classes())


@pytest.mark.parametrize("name", [n for n, cls in stub.op_classes().items() if not cls.written])
def test_help_shows_signature_and_documentation(name):
    """Check that ``help`` of an op shows its signature and documentation."""
    function, cls = getattr(ops, name), stub.op_classes()[name]
    signature = inspect.signature(function)
    assert signature.parameters == inspect.signature(cls).parameters
    assert signature.return_annotation == ("list[Tensor]" if cls.returns_list else "Tensor")
    assert function.__name__ == name
    assert inspect.getdoc(function) == inspect.getdoc(cls)
