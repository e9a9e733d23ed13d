"""The PTX parser, and the tables that Python and C++ share."""

import re
from pathlib import Path

import pytest

import ptx_emulator as emulator
from ptx_emulator import isa
from ptx_emulator.engine import library
from ptx_emulator.lexer import literal, split_operands, statements, strip_comments
from ptx_emulator.parser import Module

HEADER = (Path(emulator.__file__).parent / "src" / "isa.h").read_text()


def _enum(name):
    """Return (name, value or "") of each member of the C++ enum."""
    body = re.search(rf"enum {name} : \w+ {{(.*?)}}", HEADER, re.DOTALL)
    assert body
    members = (
        m.strip().partition("=")
        for m in re.sub(r"//[^\n]*", "", body.group(1)).split(",")
        if m.strip()
    )
    return [(name.strip(), value.strip()) for name, _, value in members]


def test_flags_equal_those_of_the_engine():
    got = {name.removeprefix("F_"): eval(value) for name, value in _enum("Flag")}  # noqa: S307
    assert got == {flag.name: flag.value for flag in isa.Flag}


@pytest.mark.parametrize(
    ("enum", "prefix", "names"),
    [
        ("OperandKind", "K_", [kind.name for kind in isa.Kind]),
        ("Space", "", [name.upper() for name in isa.SPACES]),
        ("Rounding", "", [name.upper() for name in isa.ROUNDINGS]),
        ("Comparison", "CMP_", [name.upper() for name in isa.COMPARISONS]),
        ("Reduction", "ATOM_", [name.upper() for name in isa.REDUCTIONS]),
    ],
)
def test_tables_have_the_order_of_the_engine(enum, prefix, names):
    assert [name.removeprefix(prefix) for name, _ in _enum(enum)] == names


def test_records_have_the_sizes_of_the_engine():
    assert isa.INSTRUCTION.itemsize == 48
    assert isa.OPERAND.itemsize == 16


def test_literals_are_parsed():
    expected = {"0f3F800000": 0x3F800000, "0dBFF0000000000000": 0xBFF0000000000000}
    expected |= {"-0x10": -16, "017": 15, "12U": 12, "1.5": 0x3FC00000, "%r1": None}
    assert {text: literal(text) for text in expected} == expected


def test_operands_are_split_outside_of_brackets():
    assert split_operands("{%a, %b}, [%c, {%d, %e}], 3") == ["{%a, %b}", "[%c, {%d, %e}]", "3"]


def test_statements_have_their_kind_and_line():
    text = strip_comments("a; // b;\n/* c;\n d; */ L: { e f, g; }\n.loc 1 2 3\nh;")
    got = [(s.kind, s.text, s.line) for s in statements(text, 1)]
    assert got == [
        ("statement", "a", 1),
        ("label", "L", 3),
        ("open", "", 3),
        ("statement", "e f, g", 3),
        ("close", "", 3),
        ("statement", "h", 5),
    ]


def _parse(body):
    lib = library()
    text = f".version 8.8\n.target sm_100a\n.visible .entry k(.param .u64 p) {{ {body} }}"
    return Module(text, lib.emu_opcodes().decode().split(), lib.emu_types().decode().split())


def test_scopes_hide_registers_and_labels():
    """Check that registers and labels of an inner scope hide those of the outer scope."""
    kernel = _parse(
        ".reg .b32 %r<2>; L: { .reg .b32 %r<2>; mov.b32 %r0, 1; bra L; L: } bra L; ret;"
    ).kernels[0]
    inner, outer = kernel.instructions[1], kernel.instructions[2]
    assert (inner["aux"], outer["aux"]) == (2, 0)
    assert kernel.operands["reg"][0] == 2


def test_unknown_opcode_is_an_error_only_when_reached():
    assert _parse(".reg .pred %p; @%p frobnicate.b32 1; ret;").kernels[0].unsupported == {
        "frobnicate.b32"
    }


@pytest.mark.parametrize(
    "body", ["bra NOWHERE;", "mov.b32 %r0, 1", "@%q bra L; L:", ".reg .b32 %r<1>; {"]
)
def test_invalid_ptx_raises(body):
    with pytest.raises(emulator.PtxError):
        _parse(body)
