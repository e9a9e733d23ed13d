"""Records of activations: their values, texts and errors. No tensor is computed."""

import pytest

import grouped
from cute_kernels.formats.activations import ACTIVATIONS, Activation, is_gated, parse_activation
from tests.helpers import assert_value_semantics, contains_all

#: Written out, so that a wrong flag in the table of the package shows.
GATED = {"geglu", "swiglu", "reglu", "qgeglu", "sreglu", "clamped_swiglu"}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_records_are_values(name):
    """Check that activations are values with a text."""
    act = Activation(name)
    assert_value_semantics(act)
    assert act.text == name and parse_activation(name) == act
    assert act.is_gated == is_gated(act.text) == (name in GATED)
    assert act.width(64) == (32 if act.is_gated else 64)
    assert act.is_clamped == (name == "clamped_swiglu")


def test_gated_activations_share_the_curve_of_the_plain_one():
    pairs = {
        "geglu": "gelu",
        "swiglu": "silu",
        "reglu": "relu",
        "qgeglu": "qgelu",
        "sreglu": "srelu",
    }
    for gated, plain in pairs.items():
        assert Activation(gated).curve == Activation(plain).curve == plain


TEXTS = {
    "clamped_swiglu": Activation("clamped_swiglu"),
    "clamped_swiglu:limit=5.0": Activation("clamped_swiglu", limit=5),
    "clamped_swiglu:alpha=1.0": Activation("clamped_swiglu", alpha=1.0),
    "clamped_swiglu:alpha=2.5,limit=0.125": Activation("clamped_swiglu", 2.5, 0.125),
}


@pytest.mark.parametrize("text", [*TEXTS])
def test_a_record_has_one_text(text):
    assert TEXTS[text].text == text
    assert parse_activation(text) == TEXTS[text]
    assert is_gated(text)


def test_unknown_names_are_not_gated():
    assert not is_gated("swish") and not is_gated("")


def test_defaults_of_clamped_swiglu():
    act = Activation("clamped_swiglu")
    assert (act.alpha, act.limit) == (1.702, 7.0)


def test_the_record_is_public():
    assert grouped.Activation is Activation


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("swish", ["activation must be one of gelu, silu", "'swish'"]),
        ("", ["activation must be one of"]),
        ("clamped_swiglu:limit=7.0", ["must be written 'clamped_swiglu'"]),
        ("clamped_swiglu:limit=5", ["must be written 'clamped_swiglu:limit=5.0'"]),
        ("clamped_swiglu:limit=5.0,alpha=1.0", ["must be written", "alpha=1.0,limit=5.0"]),
        ("clamped_swiglu:beta=1.0", ["has the fields alpha, limit, got 'beta'"]),
        ("clamped_swiglu:limit=high", ["limit must be a value such as 7.0, got 'high'"]),
        ("clamped_swiglu:limit=-1.0", ["limit must be in [2^-64, 2^64], got -1.0"]),
        ("silu:alpha=2.0", ["alpha is of clamped_swiglu; silu has none"]),
    ],
)
def test_invalid_texts_raise(text, words):
    with pytest.raises(ValueError, match=contains_all("activation", *words)):
        parse_activation(text)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"name": "tanh"}, ValueError, "activation must be gelu or silu or"),
        ({"name": "clamped_swiglu", "limit": float("inf")}, ValueError, "limit must be in"),
        ({"name": "clamped_swiglu", "limit": float("nan")}, ValueError, "limit must be in"),
        ({"name": "clamped_swiglu", "alpha": 0.0}, ValueError, "alpha must be in"),
        ({"name": "clamped_swiglu", "alpha": True}, TypeError, "alpha must be a number, got True"),
        ({"name": "clamped_swiglu", "limit": "7"}, TypeError, "limit must be a number, got '7'"),
        ({"name": "gelu", "limit": 6.0}, ValueError, "limit is of clamped_swiglu; gelu has none"),
    ],
)
def test_invalid_records_raise(fields, error, message):
    with pytest.raises(error, match=message):
        Activation(**fields)
