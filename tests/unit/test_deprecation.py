"""Old names keep working for one release, with a ``DeprecationWarning`` that names the new one."""

import dataclasses
from typing import ClassVar

import pytest

from cute_kernels import formats
from cute_kernels.formats import FP8, MXFP8, NVFP4, GlobalScale
from cute_kernels.formats.base import Format

OLD_PROPERTIES = {
    "second_level": "global_scale",
    "columnwise_level": "columnwise_global_scale",
    "truncates": "rounds_activation",
    "how_made": "encode_only_fields",
    "takes_scale": "has_given_scale",
    "as_decoded": "for_decoding",
    "chooses_scales": "searches_scale",
    "decodes_by": "decoder_kind",
    "without_marks": "without_nan_scales",
}


@pytest.mark.parametrize(("old", "new"), OLD_PROPERTIES.items())
@pytest.mark.parametrize(
    "fmt", [NVFP4(four_over_six=True), FP8(scaling="delayed"), MXFP8()], ids=str
)
def test_old_properties_of_formats_warn_and_forward(fmt, old, new):
    with pytest.warns(DeprecationWarning, match=rf"{old} is deprecated .* use \w+\.{new}"):
        assert getattr(fmt, old) == getattr(fmt, new)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize(
    ("old", "new"), [("of_copy", "for_direction"), ("level", "global_scale_for")]
)
def test_old_methods_of_formats_warn_and_forward(old, new, columnwise):
    fmt = NVFP4(row_scaled=True)
    with pytest.warns(DeprecationWarning, match=old):
        assert getattr(fmt, old)(columnwise) == getattr(fmt, new)(columnwise)


def test_old_class_attribute_warns_and_forwards():
    with pytest.warns(DeprecationWarning, match="FP8.how_made is deprecated"):
        assert FP8.how_made == FP8.encode_only_fields


def test_old_class_name_warns_and_forwards():
    with pytest.warns(DeprecationWarning, match="SecondLevel is deprecated"):
        assert formats.SecondLevel is GlobalScale


@pytest.mark.parametrize(
    ("module", "name"),
    [("cute_kernels.formats", "SecondLevel"), ("grouped.debug", "check_offsets")],
    ids=["package", "module"],
)
def test_import_of_an_old_name_warns_once_at_the_importing_line(module, name):
    """An import from a package reads the name twice."""
    code = compile(f"\nfrom {module} import {name}", "user.py", "exec")
    with pytest.warns(DeprecationWarning) as warnings:
        exec(code, {})
    assert [(w.filename, w.lineno) for w in warnings] == [("user.py", 2)]


def test_format_class_with_old_names_warns_and_works():
    """Check that a format class with old attribute names warns and works."""
    with pytest.warns(DeprecationWarning) as warnings:

        @dataclasses.dataclass(frozen=True)
        class Custom(Format):
            """Format whose class still uses the old attribute names."""

            name: ClassVar[str] = "custom"
            scale: ClassVar[None] = None
            second_level: ClassVar[GlobalScale] = GlobalScale("group", ("amax", "scale"))
            columnwise: ClassVar[str] = "transposed"
            k_multiple: ClassVar[int] = 16
            how_made: ClassVar[tuple[str, ...]] = ("nan_scales",)

    assert len(warnings) == 2
    fmt = Custom()
    assert fmt.global_scale.buffers == ("amax", "scale")
    assert fmt.encode_only_fields == ("nan_scales",)
    assert fmt.buffer_names(columnwise=True) == ("codes_t", "amax_t", "scale_t")
    assert fmt.operand_names(columnwise=True) == ("codes_t", "amax_t")
