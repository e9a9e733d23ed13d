"""Values without a formula are refused; no dispatch falls through to another formula."""

import dataclasses
from typing import ClassVar

import pytest
import torch

from cute_kernels import capability, ops
from cute_kernels.arch import ARCHS
from cute_kernels.capability import UnsupportedError
from cute_kernels.device import activation_curves
from cute_kernels.device.codecs.values import ByteValues, NibbleValues, values_of
from cute_kernels.formats import (
    E2M1,
    E4M3,
    E8M0,
    NVFP4,
    RECORDS,
    BlockScale,
    ElementType,
    Format,
    GlobalScale,
    activations,
)
from cute_kernels.formats.activations import (
    Activation,
    Curve,
    alpha_of,
    curve_of,
    formula_of,
    parse_activation,
)
from cute_kernels.kernels.gemm import choose
from cute_kernels.kernels.gemm.common.operand_kinds import OPERANDS
from cute_kernels.kernels.gemm.variants import CONFIG_CLASSES
from cute_kernels.kernels.moe.config import RouterConfig
from cute_kernels.kernels.moe.router import RouterKernel
from cute_kernels.ops.gemm import launcher
from cute_kernels.reference import activations as reference_activations
from cute_kernels.reference import router as reference_router
from cute_kernels.reference.conversions import decode, encode, pack
from tests.helpers import BF16

E3M2 = ElementType("e3m2", 6, 28.0, torch.uint8)


@dataclasses.dataclass(frozen=True)
class Nibbles(Format):
    """E2M1 codes with power-of-two scales, as in MXFP4."""

    nan_scales: bool = False
    name: ClassVar[str] = "nibbles"
    element: ClassVar[ElementType] = E2M1
    scale: ClassVar[BlockScale] = BlockScale(E8M0, 32, "tiles_128x4")
    global_scale: ClassVar[None] = None
    columnwise: ClassVar[str] = "transposed"
    k_multiple: ClassVar[int] = 32


class SixBits(Nibbles):
    """Six-bit codes."""

    element: ClassVar[ElementType] = E3M2


@pytest.fixture
def unheard_of(monkeypatch):
    """Register an activation whose curve has no formula."""
    monkeypatch.setitem(activations._FACTS, "unheard_of", ("unheard_of", False))
    monkeypatch.setattr(activations, "ACTIVATIONS", tuple(activations._FACTS))
    yield "unheard_of"
    parse_activation.cache_clear()


@pytest.mark.parametrize("backend", ["reference", "emulated:sm_90a", "emulated:sm_100a"])
def test_ops_refuse_an_unknown_curve(unheard_of, backend):
    """Check that ops refuse an unknown activation curve."""
    import cute_kernels

    x, weight, offs = (
        torch.ones(8, 32, dtype=BF16),
        torch.ones(1, 32, 32, dtype=BF16),
        torch.tensor([8], dtype=torch.int32),
    )
    calls = (
        lambda: ops.moe_activate(x, unheard_of, offs, False),
        lambda: ops.moe_activate_gradient(x, x, unheard_of, offs, False),
        lambda: ops.grouped_quantize(
            x, "fp8_block", offs, None, True, False, None, None, unheard_of
        ),
        lambda: ops.m_grouped_gemm_activate(
            x,
            weight,
            offs,
            None,
            None,
            False,
            BF16,
            None,
            None,
            None,
            None,
            False,
            None,
            None,
            None,
            unheard_of,
            False,
            False,
        ),
    )
    for call in calls:
        with (
            cute_kernels.backend(backend),
            pytest.raises(
                UnsupportedError, match="unheard_of has the curve 'unheard_of', which is none of"
            ),
        ):
            call()


def test_neither_reference_nor_kernels_compute_an_unknown_curve(unheard_of, monkeypatch):
    """Check that reference and kernels refuse an unknown curve."""
    act = Activation(unheard_of)
    x = torch.ones(2, 4)
    uses = (
        lambda: curve_of(act),
        lambda: alpha_of(act),
        lambda: reference_activations.activate(x, act),
        lambda: reference_activations.activate_gradient(x, x, act),
        lambda: activation_curves._curve(None, act, None, False),
        lambda: activation_curves.quick_bound(act),
        lambda: activation_curves.FactorTable.create(act, "bfloat16"),
    )
    for use in uses:
        with pytest.raises(UnsupportedError, match="'unheard_of'"):
            use()
    # Listed, but in a family that neither side computes.
    monkeypatch.setitem(activations.CURVES, "unheard_of", Curve("piecewise"))
    for use in (uses[2], uses[3], uses[4]):
        with pytest.raises(
            UnsupportedError,
            match="no formula of the curve 'unheard_of', which is of the family 'piecewise'",
        ):
            use()


def test_reference_and_kernels_know_the_same_families_of_curves():
    """Check that reference and kernels implement the same families of curves."""
    families = {curve.family for curve in activations.CURVES.values()}
    assert families == set(reference_activations._FORMULAS) == set(activation_curves.CURVE_FAMILIES)
    assert {curve for curve, _ in activations._FACTS.values()} == set(activations.CURVES)
    assert formula_of(Activation("silu"), {"sigmoid": 1}) == 1


def test_the_record_chooses_the_decoder():
    """The decoder does not depend on the number of bits."""
    kinds = {"nibbles": NibbleValues, "bytes": ByteValues}
    for fmt in (kind.fmt for kind in OPERANDS.values() if kind.fmt is not None):
        assert isinstance(values_of(fmt, "bfloat16"), kinds[fmt.decoder_kind])
    for fmt in (Nibbles(), SixBits()):
        assert fmt.decoder_kind is None
        with pytest.raises(
            UnsupportedError, match=f"no kernel decodes .*: {fmt.element.name} codes with scales"
        ):
            values_of(fmt, "bfloat16")


def test_byte_formats_are_found_by_their_code_size(monkeypatch):
    """Their position in the list does not matter."""
    monkeypatch.setitem(RECORDS, "nibbles", Nibbles)
    monkeypatch.setitem(RECORDS, "six_bits", SixBits)
    assert capability.with_byte_codes(("fp8", "nibbles", "mxfp8", "six_bits")) == ("fp8", "mxfp8")
    for op in ("grouped_gemm_w4a8", "moe_quantize_gradient"):
        names = {name for row_op, name in capability._RUNS if row_op == op}
        assert names == {name for name in capability._FORMATS if RECORDS[name]().element.bits == 8}


def test_elements_without_a_conversion_are_refused():
    for call in (lambda: encode(E3M2, torch.ones(2)), lambda: encode(E8M0, torch.ones(2))):
        with pytest.raises(UnsupportedError, match="nothing encodes numbers as"):
            call()
    with pytest.raises(UnsupportedError, match="nothing decodes codes of e3m2"):
        decode(E3M2, torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(UnsupportedError, match="nothing packs codes of 2 bits"):
        pack(dataclasses.replace(E3M2, bits=2), torch.zeros(4, dtype=torch.uint8))


def test_literals_of_records_are_checked():
    with pytest.raises(ValueError, match="layout must be tiles_128x4 or mn_major, got 'rows'"):
        BlockScale(E4M3, 16, "rows")
    with pytest.raises(ValueError, match="per must be group or row, got 'column'"):
        GlobalScale("column", ("amax",))
    with pytest.raises(ValueError, match="columnwise must be transposed or untransposed, got 'no'"):
        type("Custom", (NVFP4,), {"columnwise": "no"})


def test_every_architecture_has_its_gemm_functions():
    """A port that misses one of these tables fails here, and not by a silent default."""
    assert (
        set(launcher._OPERAND_FUNCTIONS)
        == set(choose._SPLIT_LAUNCHES)
        == set(CONFIG_CLASSES)
        == set(ARCHS)
    )
    assert all(hasattr(module, "prefers_activation") for module in choose._PREFERENCES.values())


def test_an_unknown_score_is_refused():
    """Check that an unknown router score is refused."""
    logits, options = torch.ones(2, 4), (1, "tanh", False, 1, 1, 1.0)
    out = torch.ones(2, 1), torch.ones(2, 1, dtype=torch.int32), torch.ones(2, 4)
    with pytest.raises(UnsupportedError, match="no formula of the score 'tanh'"):
        reference_router.route(logits, None, None, options, out)
    config = next(f for f in dataclasses.fields(RouterConfig) if f.name == "score")
    assert config is not None
    with pytest.raises(UnsupportedError, match="no kernel computes the score 'tanh'"):
        RouterKernel(RouterConfig(**_router(score="tanh")))


def _router(**changes):
    required = {
        f.name: 32 for f in dataclasses.fields(RouterConfig) if f.default is dataclasses.MISSING
    }
    return required | changes
