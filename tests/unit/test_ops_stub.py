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
    names = (name for name in vars(ops) if not name.startswith("_"))
    functions = {name for name in names if callable(getattr(ops, name)) and name.islower()}
    assert functions == set(stub.op_classes()) == {*ops.__all__}


@pytest.mark.parametrize("name", stub.op_classes())
def test_help_shows_signature_and_documentation(name):
    """Check that ``help`` of an op shows its signature and documentation."""
    function, cls = getattr(ops, name), stub.op_classes()[name]
    signature = inspect.signature(function)
    assert signature.parameters == inspect.signature(cls).parameters
    result = "None" if cls.written else "list[Tensor]" if cls.returns_list else "Tensor"
    assert signature.return_annotation == result
    assert function.__name__ == name
    assert inspect.getdoc(function) == inspect.getdoc(cls)
