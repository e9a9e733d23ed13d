"""``perf freeze``: hashes that ignore names, and what a check reports."""

import copy
import json

import pytest

from perf import freeze
from perf.__main__ import main

#: A kernel with a parameter, inline assembly that declares a register and a label, and comments.
PTX = """
// Compiler Build ID: 1
.version 8.8
	// .globl	Config_0123_kernel_a_py
.extern .shared .align 1024 .b8 shared_a[];
.visible .entry Config_0123_kernel_a_py(
	.param .u32 Config_0123_kernel_a_py_param_0
)
{
	ld.param.b32 %r1, [Config_0123_kernel_a_py_param_0];
	// begin inline asm
	{
	.reg .b32 lo, hi;
wait:
	mul.lo.s32 lo, %r1, 3;
	mov.b32 %r2, lo;
	@%p1 bra wait;
}
	// end inline asm
	st.shared.b32 [shared_a+4], %r2;
	ret;
}
"""
RENAMED = {
    "kernel": ("Config_0123_kernel_a_py", "Spec_9_kernel_method_b_py"),
    "variable": ("shared_a", "buffer"),
    "register": (" lo", " low"),
    "label": ("wait", "again"),
    "comment": ("Build ID: 1", "Build ID: 2"),
    "layout": ("\n\tmov.b32 %r2, lo;", " mov.b32 %r2,  lo;\n\n"),
}
CHANGED = {
    "instruction": ("mul.lo.s32", "mul.hi.s32"),
    "constant": ("+4]", "+8]"),
    "parameter": ("param_0]", "param_1]"),
    "register": ("%r2, lo", "%r2, hi"),
    "order": ("lo, hi;", "hi, lo;"),
    "target": ("bra wait", "bra other"),
}
CONTENT = {
    "kernels": {"emulated:sm_90a": {"00aa": ["Config(1)", "Config(2)"], "00bb": ["Config(3)"]}},
    "tiles": {"sm_90a": {"fprop 2x8x16, bfloat16": {"256,8,1": [1, 8], "128,128,1": [64]}}},
}


@pytest.mark.parametrize(("old", "new"), RENAMED.values(), ids=RENAMED)
def test_kernels_that_differ_only_in_names_and_layout_have_equal_hashes(old, new):
    assert old in PTX
    assert freeze.ptx_hash(PTX.replace(old, new)) == freeze.ptx_hash(PTX)


@pytest.mark.parametrize(("old", "new"), CHANGED.values(), ids=CHANGED)
def test_kernels_with_different_code_have_different_hashes(old, new):
    assert old in PTX
    assert freeze.ptx_hash(PTX.replace(old, new)) != freeze.ptx_hash(PTX)


def test_kernels_of_a_module_are_numbered_also_where_one_name_begins_with_the_other():
    text = freeze.normalize(".entry fused() { ret; } .entry fused_next() { ret; }")
    assert text == ".entry kernel_0(){ret;}.entry kernel_1(){ret;}"


def changed(section, edit):
    """Return the differences after ``edit`` of a copy of a section."""
    content = copy.deepcopy(CONTENT)
    (group,) = content[section].values()
    edit(group)
    return freeze.differences(CONTENT, content)


def test_equal_contents_have_no_difference():
    assert freeze.differences(CONTENT, copy.deepcopy(CONTENT)) == []


def test_other_names_of_the_same_kernels_are_no_difference():
    assert changed("kernels", lambda group: group.update({"00bb": ["Spec(3)"]})) == []


def test_a_missing_kernel_is_reported_with_its_name():
    (line,) = changed("kernels", lambda group: group.pop("00bb"))
    assert line == "emulated:sm_90a: 1 kernel(s) with hash 00bb are missing: Config(3)"


def test_a_kernel_that_occurs_less_often_is_reported():
    (line,) = changed("kernels", lambda group: group["00aa"].pop())
    assert line.startswith("emulated:sm_90a: 1 kernel(s) with hash 00aa are missing")


def test_a_new_kernel_is_reported_with_its_name():
    (line,) = changed("kernels", lambda group: group.update({"00cc": ["Config(4)"]}))
    assert line == "emulated:sm_90a: 1 kernel(s) with hash 00cc are new: Config(4)"


def test_a_changed_tile_is_reported_with_its_case():
    (line,) = changed(
        "tiles",
        lambda group: group.update({"fprop 2x8x16, bfloat16": {"256,8,1": [1, 8, 64]}}),
    )
    assert line == (
        "sm_90a: tiles of fprop 2x8x16, bfloat16, 64 rows: 128,128,1 before, 256,8,1 now"
    )


def test_the_order_of_tiles_is_no_difference():
    assert freeze.group_by_tiles({("a", 8): "1", ("a", 1): "1", ("b", 1): ""}) == {
        "a": {"1": [1, 8]}
    }


def test_a_file_is_sorted_json_with_a_line_for_each_kernel():
    text = freeze.dump(CONTENT)
    assert json.loads(text) == CONTENT
    assert '   "00bb": ["Config(3)"]\n' in text


def test_short_files_have_names_of_classes():
    content = {"kernels": {"arch": {"00": ["package.module.Config(a=package.Tile(1))"]}}}
    assert freeze.shortened(content) == {"kernels": {"arch": {"00": ["Config"]}}}


@pytest.mark.parametrize(("count", "status"), [(1, 0), (2, 1)])
def test_the_exit_status_of_a_check_is_1_if_something_differs(
    monkeypatch, tmp_path, capsys, count, status
):
    """Check that a changed list gives exit status 1."""
    content = {"kernels": {"arch": {"00": ["Config"] * count}}}
    monkeypatch.setattr(freeze, "collect", lambda sections, jobs, match: content)
    file = tmp_path / "freeze.json"
    file.write_text(freeze.dump({"kernels": {"arch": {"00": ["Config"]}}}))
    assert main(["freeze", "--check", str(file)]) == status
    assert ("are new: Config" in capsys.readouterr().out) == bool(status)


def test_check_accepts_a_file_that_write_made(monkeypatch, tmp_path):
    monkeypatch.setattr(freeze, "collect", lambda sections, jobs, match: copy.deepcopy(CONTENT))
    for option in ((), ("--short",)):
        file = tmp_path / "freeze.json"
        assert main(["freeze", "--write", str(file), *option]) == 0
        assert main(["freeze", "--check", str(file)]) == 0


@pytest.fixture
def content(monkeypatch):
    """Return a content with many kernels that ``collect`` returns."""
    content = copy.deepcopy(CONTENT)
    content["kernels"]["emulated:sm_90a"] |= {f"{i:04x}": [f"Other({i})"] for i in range(30)}
    monkeypatch.setattr(freeze, "collect", lambda sections, jobs, match: copy.deepcopy(content))
    return content


def test_a_check_prints_20_differences_of_a_kind_or_all(content, tmp_path, capsys):
    """Check that the number of differences that are not printed is printed."""
    file = tmp_path / "freeze.json"
    file.write_text(freeze.dump(CONTENT))
    assert main(["freeze", "--check", str(file)]) == 1
    printed = capsys.readouterr()
    assert printed.out.count("are new") == 20
    assert "... and 10 more of this kind: --all prints them" in printed.out
    assert "30 differences" in printed.err
    assert main(["freeze", "--check", str(file), "--all"]) == 1
    assert capsys.readouterr().out.count("are new") == 30


@pytest.mark.parametrize(
    ("match", "status"), [(r"Config\(", 0), (r"Other\(7\)", 1), ("fprop 2x8", 0)]
)
def test_a_pattern_selects_kernels_and_cases(content, tmp_path, match, status):
    """Check that both sides of a comparison have the matching parts only."""
    file = tmp_path / "freeze.json"
    file.write_text(freeze.dump(CONTENT))
    assert main(["freeze", "--check", str(file), "--match", match]) == status
    assert main(["freeze", "--write", str(file), "--match", match]) == 0
    assert freeze.matching(content, match) == json.loads(file.read_text())
    assert main(["freeze", "--check", str(file), "--match", match]) == 0


def test_a_pattern_that_matches_nothing_is_an_error(content, tmp_path, capsys):
    """Check that a comparison of nothing fails and names the pattern."""
    file = tmp_path / "freeze.json"
    assert main(["freeze", "--write", str(file), "--match", "absent"]) == 2
    assert "no kernel or case of tiles matches --match 'absent'" in capsys.readouterr().err
    assert not file.exists()


def test_a_pattern_needs_a_file_with_whole_specs(content, tmp_path, capsys):
    """Check that a pattern and a file of names of classes are refused."""
    file = tmp_path / "freeze.json"
    assert main(["freeze", "--write", str(file), "--short"]) == 0
    assert main(["freeze", "--check", str(file), "--match", "Config"]) == 2
    assert "was written with --short" in capsys.readouterr().err


def test_matching_kernels_alone_are_compiled(monkeypatch):
    """Check that ``collect`` compiles the kernels whose spec matches."""
    compiled = []
    monkeypatch.setattr(freeze, "declared_specs", lambda arch: ["a(1)", "b(2)"])
    monkeypatch.setattr(freeze, "canonical_text", str)
    monkeypatch.setattr(freeze, "cache_key", lambda spec, arch: None)
    monkeypatch.setattr(
        freeze, "precompile", lambda specs, arch, jobs, load: compiled.extend(specs)
    )
    monkeypatch.setattr(freeze, "default_cache", lambda: None)
    with pytest.raises(RuntimeError, match=r"b\(2\) for emulated:sm_90a is not in the disk cache"):
        freeze.hash_kernels("emulated:sm_90a", match=r"^b")
    assert compiled == ["b(2)"]
