"""The families of kernels that ``perf sanitize`` runs, without the sanitizer."""

import inspect

import pytest

import cute_kernels
from cute_kernels.kernels.gemm.sm90.config import SM90_TILES
from perf import sanitize

#: An op of each kernel family, and the name of its argument that is a format.
OPS = {
    "quantize": ("grouped_quantize", "format"),
    "m_grouped": ("m_grouped_gemm", "b_format"),
    "k_grouped": ("k_grouped_gemm", "b_format"),
}


@pytest.mark.parametrize("family", [*OPS])
def test_families_run(monkeypatch, capsys, family):
    """Check that each family of the sanitizer runs all of its formats."""
    name, argument = OPS[family]
    op, called = getattr(sanitize.ops, name), set()

    def run(*args, **kwargs):
        arguments = inspect.signature(op).bind(*args, **kwargs).arguments
        called.add(arguments.get(argument) or "bfloat16")
        return op(*args, **kwargs)

    monkeypatch.setattr(sanitize, "_DEVICE", "cpu")
    monkeypatch.setattr(sanitize, "_WIDE", 512)
    monkeypatch.setattr(sanitize.ops, name, run)
    with cute_kernels.backend("reference"):
        sanitize.FAMILIES[family]()
    assert "not here" not in capsys.readouterr().out
    pairs = [pair for pair in sanitize.PAIRS if pair.a and pair.b]
    wanted = {
        "quantize": sanitize.FORMATS,
        "m_grouped": ["bfloat16", *(pair.b for pair in pairs if pair.is_valid_for("fprop"))],
        "k_grouped": ["bfloat16", *(pair.a for pair in pairs if pair.is_valid_for("wgrad"))],
    }
    assert called == set(wanted[family])


@pytest.mark.emulated
def test_mixtures_take_steps(monkeypatch, capsys):
    """Each in the recipes that are chosen; what a backend has no kernels for is said, and the
    others go on.
    """
    assert set(sanitize.FAMILIES) == {*OPS, "mixture"}
    steps, step = [], sanitize.grouped.optim.AdamW.step
    monkeypatch.setattr(sanitize, "_DEVICE", "cpu")
    monkeypatch.setattr(sanitize, "_selection", sanitize._Selection("^MXFP8$"))
    monkeypatch.setattr(sanitize.grouped.optim.AdamW, "step", lambda self: steps.append(step(self)))
    for name, here in (("reference", True), ("emulated:sm_90a", False)):
        steps.clear()
        with cute_kernels.backend(name):
            sanitize.mixture()
        mixtures = 1 + len(sanitize.MOE_OPTIONS)
        assert (len(steps), capsys.readouterr().out.count("not here")) == (
            (mixtures, 0) if here else (0, mixtures)
        )


def test_shares_make_the_whole(monkeypatch):
    """Check that two shares of the sanitizer's work cover all tiles and formats."""
    tiles, formats = [], []
    monkeypatch.setattr(sanitize, "_DEVICE", "cpu")
    monkeypatch.setattr(sanitize, "_quantize", lambda text, *_: formats.append(text))
    force_tile = sanitize.force_tile
    monkeypatch.setattr(sanitize, "force_tile", lambda t: tiles.append(t) or force_tile(t))
    with cute_kernels.backend("reference"):
        for share in range(2):
            monkeypatch.setattr(sanitize, "_selection", sanitize._Selection("^fp8$", share, 2))
            sanitize.quantize()
            sanitize.k_grouped()
    assert set(tiles) == set(SM90_TILES) and len(tiles) == 2 * len(SM90_TILES)
    assert set(formats) == {"fp8"}
