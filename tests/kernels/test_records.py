"""Formats that the package does not have: kernels agree with the reference or give a reason."""

import dataclasses
import hashlib

import pytest

from cutlass import Uint16

from cute_kernels import capability
from cute_kernels.capability import ARCHITECTURES, UnsupportedError, support
from cute_kernels.device import codecs as device
from cute_kernels.device.codecs.mxfp8 import MXFP8Codec
from cute_kernels.device.codecs.nibbles import NibbleCodec
from cute_kernels.formats import (
    E2M1,
    E4M3,
    E8M0,
    F32,
    FP8,
    MXFP8,
    NVFP4,
    RECORDS,
    BlockScale,
    FP8Block,
)
from cute_kernels.kernels.gemm.common.operand_kinds import OperandKind, operand_of
from cute_kernels.kernels.quantize.choose import choose_row_config, choose_tile_config
from cute_kernels.kernels.quantize.config import (
    DequantizeConfig,
    QuantizeProblem,
    RowsConfig,
    TileConfig,
)
from cute_kernels.reference import codecs as reference
from tests.helpers import BF16, contains_all, offs_tensor, ops

from . import op_support
from .quantize_support import check, expected, ragged

TILES, TRANSPOSED, UNTRANSPOSED = (
    "tiles_128x4",
    {"columnwise": "transposed"},
    {"columnwise": "untransposed"},
)
MXFP4, WIDE = TRANSPOSED | {"element": E2M1}, {"scale": BlockScale(E4M3, 32, TILES)}
#: (a record of the package, the fields that differ, the reason if kernels do not support it).
CASES = (
    (MXFP8, MXFP4, ""),
    (MXFP8, {"k_multiple": 16}, ""),
    (MXFP8, TRANSPOSED | {"block": (32, 32)}, ""),
    (NVFP4, WIDE | {"row_scaled": True}, ""),
    (FP8Block, UNTRANSPOSED, ""),
    (MXFP8, {"scale": BlockScale(E8M0, 24, TILES)}, "vec_size 24"),
    (FP8Block, {"scale": BlockScale(F32, 64, "mn_major")}, "block (1, 64)"),
    (MXFP8, MXFP4 | {"block": (32, 32)}, "block (32, 32)"),
    (MXFP8, {"scale": BlockScale(F32, 32, TILES)}, "scales of 32 bits, tiles"),
    (NVFP4, UNTRANSPOSED, "columnwise untransposed"),
    (NVFP4, WIDE | {"hadamard": True}, "stochastic rounding, transforms"),
    (FP8, {"k_multiple": 8}, "k_multiple 8"),
    (
        FP8,
        {"global_scale": dataclasses.replace(FP8.global_scale, is_shared=False)},
        "is_shared=False",
    ),
)


class NibblePowers(NibbleCodec):
    """E2M1 codes with the scales of MXFP8."""

    decode_scales, decode_factor = MXFP8Codec.decode_scales, MXFP8Codec.decode_factor

    def block_scales(self, a, b, global_scale):
        (low, low_factor), (high, high_factor) = (
            MXFP8Codec.block_scale(self, x, global_scale) for x in (a, b)
        )
        return (low | high << 8).to(Uint16), low_factor, high_factor


def register_format(base, changes, monkeypatch):
    """Register a format that differs from ``base`` in these fields and return its record."""
    # Caches of kernels identify a format by its name.
    name = f"{base.name}_{hashlib.sha256(repr(changes).encode()).hexdigest()[:8]}"
    record_fields = {field.name for field in dataclasses.fields(base)} & {*changes}
    class_fields = {k: v for k, v in changes.items() if k not in record_fields}
    if hasattr(base, "blocks"):
        vec = class_fields.get("scale", base.scale).vec_size
        class_fields |= {
            "__annotations__": {"block": tuple},
            "block": (1, vec),
            "blocks": ((1, vec), (vec, vec)),
        }
    cls = dataclasses.dataclass(frozen=True)(
        type("Invented", (base,), {"name": name, **class_fields})
    )
    codec = NibblePowers if changes.get("element") == E2M1 else device.CODECS[base.name]
    for table, value in (
        (RECORDS, cls),
        (device.CODECS, codec),
        (reference.CODECS, reference.CODECS[base.name]),
    ):
        monkeypatch.setitem(table, name, value)
    for op in ("grouped_quantize", "grouped_dequantize"):
        monkeypatch.setitem(capability._RUNS, (op, name), ARCHITECTURES)
    return cls(**{k: changes[k] for k in record_fields})


@pytest.mark.parametrize("arch", ARCHITECTURES[1:])
@pytest.mark.parametrize(("base", "changes", "message"), CASES, ids=str)
def test_kernels_agree_with_the_reference_or_give_a_reason(
    arch, base, changes, message, monkeypatch
):
    """Check that kernels support a new format record, or give a reason."""
    record = register_format(base, changes, monkeypatch)
    assert bool(support("grouped_quantize", record, arch)) == (not message)
    if message:
        for make in (
            RowsConfig,
            TileConfig,
            DequantizeConfig,
            lambda text, _: OperandKind(text, record),
        ):
            with pytest.raises(UnsupportedError, match=contains_all(record.name, message)):
                make(record.text, "bfloat16")
        return
    dtype = "float32" if changes is MXFP4 and arch == "sm_90a" else "bfloat16"
    problem, config_problem = (
        ragged(200, 288, offs_tensor(0, 0, 65, 65, 190, 198), dtype),
        QuantizeProblem(dtype, 288),
    )
    check(
        choose_tile_config(record, config_problem, arch, columnwise=True, compute_amax=True),
        problem,
    )
    if not record.is_2d:
        check(choose_row_config(record, config_problem, arch), problem)
    buffers = expected(problem, record, True, True)
    for columnwise in (False, True):
        codes, *scales = (buffers[name] for name in record.operand_names(columnwise))
        arguments = (codes, scales, record.text, 200, BF16, problem.offs, columnwise)
        op_support.check(arch, lambda arguments=arguments: ops.grouped_dequantize(*arguments)[:198])
    if changes is not MXFP4 and "columnwise" in changes:
        with pytest.raises(
            UnsupportedError, match=contains_all("no grouped GEMM kernel multiplies")
        ):
            operand_of(record)
