"""What runs under compute-sanitizer on a GPU runs."""

import pytest

import cute_kernels
from perf import sanitize


@pytest.mark.parametrize("part", sanitize.PARTS)
def test_parts_run(monkeypatch, capsys, part):
    monkeypatch.setattr(sanitize, "_DEVICE", "cpu")
    called = []
    quantize = sanitize.ops.grouped_quantize
    monkeypatch.setattr(
        sanitize.ops, "grouped_quantize", lambda *a: called.append(a[1]) or quantize(*a)
    )
    with cute_kernels.backend("reference"):
        sanitize.PARTS[part]()
    assert "not here" not in capsys.readouterr().out
    if part == "quantize":
        assert set(called) == set(sanitize.FORMATS)
