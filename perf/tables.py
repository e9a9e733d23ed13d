"""The measured tables of the README as data: which records fill which cells."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from grouped.recipes import NAMES

from .cases import OWN
from .records import Record
from .suites.counts import ROUTINGS
from .suites.memory import RECOMPUTED
from .suites.moe import SLICES


@dataclass(frozen=True)
class Cell:
    """Which record a cell shows, by fields and entries of its case, and how.

    ``show`` is ``"value"``, ``"flops"``, or ``"copy"`` for the share of that ceiling.
    """

    where: Mapping[str, Any]
    show: str = "value"
    scale: float = 1.0
    digits: int = 0
    unit: str = ""


@dataclass(frozen=True)
class Row:
    """A row of a table: its first cells, and what the records of all others have in common."""

    titles: tuple[str, ...]
    where: Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of numbers: its head, what is shown, what is added to that, and what it is divided
    by.
    """

    title: str
    cell: Cell
    plus: Cell | None = None
    over: Cell | None = None


@dataclass(frozen=True)
class Table:
    """A table of the README between the markers of its name.

    ``heads`` are titles of the first columns, that name the rows, ``where`` is what all its records
    have in common, a ``kind`` among it, and ``summary`` the first sentence below it.
    """

    name: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    where: Mapping[str, Any]
    summary: str = ""


_H200 = {"kind": "gpu", "gpu": "NVIDIA H200"}


def _of(quantity: str, digits: int = 0, scale: float = 1.0, unit: str = "", **where: Any) -> Cell:
    return Cell({"quantity": quantity, **where}, "value", scale, digits, unit)


def _time(**where: Any) -> Cell:
    return _of("time", **where)


# The demo.

_FULL_NVFP4 = "NVFP4(hadamard=True, stochastic_rounding=True)"
_DEMO = Table(
    "demo",
    ("recipe",),
    tuple(Row((name,), {"format": name}) for name in (*NAMES, _FULL_NVFP4)),
    (
        Column("held-out loss at the start", _of("start loss", 3)),
        Column("at the end, nats a byte", _of("end loss", 3)),
        Column("above BF16", _of("end loss above BF16", 2, unit=" %")),
        *(
            Column(f"SNR of {role}", _of(f"SNR of {role}", 1, unit=" dB"))
            for role in ("weights", "activations", "gradients")
        ),
        Column("ms a step", _of("time of a step")),
    ),
    {"suite": "demo", "kind": "cpu", "contender": "ours"},
)

_GIB = 2.0**-30


def _bytes(quantity: str, model: str) -> Cell:
    return _of(quantity, 2, _GIB, model=model)


_MEMORY = Table(
    "memory",
    ("recipe",),
    (
        *(Row((name,), {"format": name, "contender": "ours"}) for name in NAMES),
        *(
            Row((f"{name}, `recompute`",), {"format": name, "contender": "ours, recompute"})
            for name in RECOMPUTED
        ),
    ),
    tuple(
        column
        for model in SLICES
        for column in (
            Column(
                f"{model}: kept",
                _bytes("saved of activations", model),
                _bytes("saved of weights", model),
            ),
            Column("peak", _bytes("peak", model)),
        )
    ),
    {"suite": "memory", "kind": "cpu", "layer": "moe"},
    "GiB.",
)

# Counts on the emulator.

_BLACKWELL = {"suite": "counts", "kind": "emulator", "gpu": "sm_100a, 8 SMs"}
_ROWS, _COLS = 2048, 4096
_ELEMENTS = _ROWS * _COLS


def _quantizer(title: str, text: str, directions: str, amax: str, **more: Any) -> Row:
    where = {"op": "quantize", "format": text, "directions": directions, "amax": amax}
    return Row((title,), {**where, "contender": "ours", **more})


_QUANTIZERS = (
    _quantizer("rowwise, amax given", "nvfp4", "row", "given"),
    _quantizer("row-scaled, one read", "nvfp4:row_scaled", "row", "computed"),
    _quantizer("columnwise, amax given", "nvfp4", "column", "given"),
    _quantizer("row + column, amax given", "nvfp4", "row+column", "given"),
    _quantizer("16x16 row + column, amax given", "nvfp4:block=16x16", "row+column", "given"),
    _quantizer("row-scaled + column, two reads", "nvfp4:row_scaled", "row+column", "computed"),
)


def _each(quantity: str, digits: int = 2) -> Cell:
    return _of(quantity, digits, 1 / _ELEMENTS)


_COUNT_QUANTIZE = Table(
    "counts-quantize",
    ("kernel",),
    _QUANTIZERS,
    (
        Column("thread instructions", _each("thread instructions", 1)),
        Column("bytes read", _each("bytes read"), plus=_each("bytes read by TMA")),
        Column("bytes written", _each("bytes written"), plus=_each("bytes written by TMA")),
        Column(
            "store sectors used",
            _of("bytes written", scale=1 / 32, digits=2),
            over=_of("sectors written"),
        ),
        Column(
            "shared wavefronts a request", _of("shared wavefronts", 2), over=_of("shared accesses")
        ),
    ),
    {**_BLACKWELL, "rows": _ROWS, "cols": _COLS},
)


def _tile_rows() -> tuple[Row, ...]:
    rows = []
    for name, sizes in ROUTINGS.items():
        where = {"routing": sizes, "product": "fprop"}
        title = "256 each" if name == "balanced" else sizes
        tiles = {"balanced": ("256x256", "256x128", "128x128"), "ragged": ("256x256", "128x128")}
        for tile in tiles.get(name, ("256x256",)):
            chosen = "ours" if tile == "256x256" else f"ours, tile {tile}"
            ours = {"contender": chosen, "format": "nvfp4:row_scaled x nvfp4"}
            rows.append(Row((title, "ours", tile), {**where, **ours}))
            theirs = {"contender": f"CUTLASS example, tile {tile}", "format": "nvfp4 x nvfp4"}
            rows.append(Row(("", "example", tile), {**where, **theirs}))
            title = ""
    return tuple(rows)


_COUNT_GEMM = Table(
    "counts-gemm",
    ("rows of the experts", "kernel", "tile"),
    _tile_rows(),
    (
        Column(
            "MMA work / useful",
            _of("MMA operations", 2),
            over=Cell({"quantity": "MMA operations"}, show="flops"),
        ),
        Column("TMA load MB", _of("bytes read by TMA", scale=1e-6, digits=1)),
        Column(
            "store MB",
            _of("bytes written by TMA", scale=1e-6, digits=1),
            plus=_of("bytes written", scale=1e-6),
        ),
        Column("thousand warp instructions", _of("warp instructions", scale=1e-3)),
        Column("thousand shared wavefronts", _of("shared wavefronts", scale=1e-3)),
    ),
    {**_BLACKWELL, "n": 2048, "k": 2048},
)

# Times on an H200.

_COMPILED = "torch.compile"
_QUANTIZE = Table(
    "quantize-h200",
    ("kernel",),
    (
        *_QUANTIZERS,
        *(
            _quantizer(
                f"{name} {title}{', amax given' * (amax == 'given')}", text, directions, amax
            )
            for name, text, amax in (
                ("FP8", "fp8", "given"),
                ("MXFP8", "mxfp8", "computed"),
                ("FP8Block", "fp8_block", "computed"),
                ("FP8Block 128x128", "fp8_block:block=128x128", "computed"),
            )
            for title, directions in (
                ("rowwise", "row"),
                ("columnwise", "column"),
                ("row + column", "row+column"),
            )
        ),
        Row(("amax of groups",), {"op": "amax", "contender": "ours"}),
        _quantizer(f"{_COMPILED}, amax given", "nvfp4", "row", "given", contender=_COMPILED),
        _quantizer(
            f"{_COMPILED}, row-scaled", "nvfp4:row_scaled", "row", "computed", contender=_COMPILED
        ),
    ),
    (
        Column("us", _time()),
        Column("share of a copy's rate", Cell({"quantity": "time"}, show="copy")),
    ),
    {**_H200, "suite": "quantize", "rows": 65536, "cols": 7168, "groups": 8},
    "Share: each input read and each output written once, over the rate of a copy kernel.",
)

_ROW_SCALED = "nvfp4:row_scaled x nvfp4"
_CONTENDERS = (
    Column("NVFP4", _time(contender="ours", format=_ROW_SCALED)),
    Column("NVFP4, prepacked", _time(contender="ours, prepacked", format=_ROW_SCALED)),
    Column("W4A16", _time(contender="ours", format="bfloat16 x nvfp4")),
    Column("FP8", _time(contender="ours", format="fp8 x fp8")),
    Column("FP8Block", _time(contender="ours", format="fp8_block x fp8_block:block=128x128")),
    Column("bf16", _time(contender="ours", format="bfloat16")),
    Column("torch, bf16", _time(contender="torch", format="bfloat16")),
    Column("torch, FP8 rowwise", _time(contender="torch", format="fp8 rowwise")),
)
_UP = {**_H200, "suite": "gemm", "model": "DeepSeek-V3", "layer": "up", "product": "fprop"}
_EXPERTS = 32


def _tokens(count: int) -> dict[str, int]:
    return {"experts": _EXPERTS, "rows": count * _EXPERTS}


_GEMM = Table(
    "gemm-h200",
    ("tokens an expert",),
    (
        *(
            Row((str(n),), {**_tokens(n), "routing": "balanced"})
            for n in (1, 8, 16, 64, 128, 512, 4096)
        ),
        Row(("128, Zipf's law",), {**_tokens(128), "routing": "zipf"}),
    ),
    _CONTENDERS,
    _UP,
    "Microseconds.",
)
_GEMM_H100 = replace(
    _GEMM,
    name="gemm-h100",
    rows=tuple(Row((str(n),), {**_tokens(n), "routing": "balanced"}) for n in (1, 16, 128, 512)),
    where={**_GEMM.where, "gpu": "NVIDIA H100 80GB HBM3"},
)


def _step(name: str, **where: Any) -> Column:
    return Column(name, _of("time", 2, 1e-3, **where))


_KEPT = ("FP8Block", "NVFP4RowScaled")
_LAYER = Table(
    "layer-h200",
    ("layer", "tokens an expert"),
    tuple(
        Row((layer, str(n)), {"layer": layer, **_tokens(n)})
        for layer in ("linear", "mlp")
        for n in (128, 512)
    ),
    (
        _step("torch, bf16", contender="torch", format="BF16"),
        *(
            _step(name, contender="ours", format=name)
            for name in ("BF16", "NVFP4RowScaled", "FP8Block")
        ),
        *(
            _step(f"{name}, weight kept", contender="ours, weight kept", format=name)
            for name in _KEPT[::-1]
        ),
    ),
    {**_H200, "suite": "layer", "model": "DeepSeek-V3", "pass": "forward+backward"},
    "Milliseconds.",
)


def _contenders(peers: tuple[str, ...], *more: str) -> tuple[Column, ...]:
    return (
        *(Column(f"{peer}, bf16", _time(contender=peer)) for peer in peers),
        *(Column(recipe, _time(contender="ours", format=recipe)) for recipe in ("BF16", *more)),
        *(
            Column(f"{name}, weights kept", _time(contender="ours, weight kept", format=name))
            for name in _KEPT
        ),
    )


def _mixtures(name: str, passes: str, counts: tuple[tuple[int, ...], ...], *more: str) -> Table:
    return Table(
        name,
        ("model", "tokens"),
        tuple(
            Row(
                (f"{model}{scope and ', as it is'}", f"{n}{how and ', Zipf'}"),
                {"model": model, "tokens": n, "routing": how or "random", "scope": scope or None},
            )
            for model, tokens in zip(SLICES, counts, strict=True)
            for scope in ("", "model")[: 1 + (model in OWN)]
            for n in tokens
            for how in ("", "zipf")[: 1 + (n == 4096 and model[:3] != "Mix")]
        ),
        _contenders(("torch", "transformers", "quack"), *more),
        {**_H200, "suite": "moe", "pass": passes},
        "Microseconds.",
    )


_FEW = (64, 4096)
_MOE = _mixtures("moe-h200", "forward", ((*_FEW, 32768), _FEW, _FEW, _FEW))
_MOE_STEP = _mixtures(
    *("moe-step-h200", "forward+backward", ((4096, 32768), (512, 2048), (4096,), (4096,))),
    *("FP8Block", "NVFP4RowScaled"),
)


def _call(title: str, text: str, contender: str = "ours", **case: Any) -> Row:
    return Row((title,), {"contender": contender, "format": text, **case})


_PRODUCT = {"call": "m_grouped_gemm"}
_HOST = Table(
    "host-h200",
    ("call",),
    (
        _call("row-scaled quantize", "nvfp4:row_scaled", call="quantize", directions="row"),
        _call(
            "row-scaled quantize, both copies",
            "nvfp4:row_scaled",
            call="quantize",
            directions="row+column",
        ),
        _call("NVFP4 GEMM", "nvfp4:row_scaled x nvfp4:block=16x16", **_PRODUCT),
        _call("FP8Block GEMM", "fp8_block x fp8_block:block=128x128", **_PRODUCT),
        _call("bf16 GEMM", "bfloat16", **_PRODUCT),
        _call("`torch._grouped_mm`", "bfloat16", "torch", **_PRODUCT),
    ),
    (Column("us", _of("host time")),),
    {**_H200, "suite": "host"},
)

#: Tables by the name in their markers.
TABLES = {
    table.name: table
    for table in (
        *(_DEMO, _MEMORY, _COUNT_QUANTIZE, _COUNT_GEMM, _QUANTIZE, _GEMM, _GEMM_H100),
        *(_LAYER, _MOE, _MOE_STEP, _HOST),
    )
}


def matches(record: Record, where: Mapping[str, Any]) -> bool:
    return all(
        wanted == (record.case[name] if name in record.case else getattr(record, name, None))
        for name, wanted in where.items()
    )
