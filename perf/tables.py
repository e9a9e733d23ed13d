"""The measured tables of docs/performance.md, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from grouped.recipes import NAMES

from .cases import MOE_OPTIONS
from .records import Record
from .suites.counts import ROUTINGS
from .suites.memory import RECOMPUTED
from .suites.moe import SLICES


@dataclass(frozen=True)
class Cell:
    """The record of a cell, and how it is shown.

    Attributes:
        conditions: Fields of the record, and entries of its case.
        show: ``"value"``, ``"flops"``, or ``"copy"`` for the share of that ceiling.
        scale: Factor of the number.
        digits: Digits after the point.
        unit: Text after the number.
    """

    conditions: Mapping[str, Any]
    show: str = "value"
    scale: float = 1.0
    digits: int = 0
    unit: str = ""


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        titles: Its first cells.
        conditions: Conditions of the records of all its other cells.
    """

    titles: tuple[str, ...]
    conditions: Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of numbers.

    Attributes:
        title: Its head.
        cell: The number that is shown.
        plus: A number that is added.
        over: A number by which it is divided.
    """

    title: str
    cell: Cell
    plus: Cell | None = None
    over: Cell | None = None


@dataclass(frozen=True)
class Table:
    """A table of the page between the markers of its name.

    Attributes:
        name: Name in the markers.
        heads: Titles of the first columns, which name the rows.
        rows: Rows.
        columns: Columns of numbers.
        conditions: Conditions of all records, a ``kind`` among them.
        summary: First sentence below the table.
    """

    name: str
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    conditions: Mapping[str, Any]
    summary: str = ""


_H200 = {"kind": "gpu", "gpu": "NVIDIA H200"}


def _cell(
    quantity: str, digits: int = 0, scale: float = 1.0, unit: str = "", **conditions: Any
) -> Cell:
    """Return a cell that shows the value of a record."""
    return Cell(
        {"quantity": quantity, **conditions}, show="value", scale=scale, digits=digits, unit=unit
    )


def _time(**conditions: Any) -> Cell:
    return _cell("time", **conditions)


# The demo.

_FULL_NVFP4 = "NVFP4(hadamard=True, stochastic_rounding=True)"
_DEMO = Table(
    "demo",
    ("recipe",),
    tuple(Row((name,), {"format": name}) for name in (*NAMES, _FULL_NVFP4)),
    (
        Column("held-out loss at the start", _cell("start loss", 3)),
        Column("at the end, nats per byte", _cell("end loss", 3)),
        Column("above BF16", _cell("end loss above BF16", 2, unit=" %")),
        *(
            Column(f"SNR of {role}", _cell(f"SNR of {role}", 1, unit=" dB"))
            for role in ("weights", "activations", "gradients")
        ),
        Column("ms per step", _cell("time of a step")),
    ),
    {"suite": "demo", "kind": "cpu", "contender": "ours"},
)

_GIB = 2.0**-30


def _gib(quantity: str, model: str) -> Cell:
    return _cell(quantity, 2, _GIB, model=model)


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
                f"{model}: saved",
                _gib("saved of activations", model),
                _gib("saved of weights", model),
            ),
            Column("peak", _gib("peak", model)),
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
    conditions = {"op": "quantize", "format": text, "directions": directions, "amax": amax}
    return Row((title,), {**conditions, "contender": "ours", **more})


_QUANTIZERS = (
    _quantizer("rowwise, amax given", "nvfp4", "row", "given"),
    _quantizer("row-scaled, one read", "nvfp4:row_scaled", "row", "computed"),
    _quantizer("columnwise, amax given", "nvfp4", "column", "given"),
    _quantizer("row + column, amax given", "nvfp4", "row+column", "given"),
    _quantizer("16x16 row + column, amax given", "nvfp4:block=16x16", "row+column", "given"),
    _quantizer("row-scaled + column, two reads", "nvfp4:row_scaled", "row+column", "computed"),
)


def _per_element(quantity: str, digits: int = 2) -> Cell:
    return _cell(quantity, digits, 1 / _ELEMENTS)


_COUNT_QUANTIZE = Table(
    "counts-quantize",
    ("kernel",),
    _QUANTIZERS,
    (
        Column("thread instructions", _per_element("thread instructions", 1)),
        Column("bytes read", _per_element("bytes read"), plus=_per_element("bytes read by TMA")),
        Column(
            "bytes written",
            _per_element("bytes written"),
            plus=_per_element("bytes written by TMA"),
        ),
        Column(
            "store sectors used",
            _cell("bytes written", scale=1 / 32, digits=2),
            over=_cell("sectors written"),
        ),
        Column(
            "shared wavefronts per request",
            _cell("shared wavefronts", 2),
            over=_cell("shared accesses"),
        ),
    ),
    {**_BLACKWELL, "rows": _ROWS, "cols": _COLS},
)


def _tile_rows() -> tuple[Row, ...]:
    """Return two rows per routing and tile: this package, and NVIDIA's example."""
    rows = []
    for name, sizes in ROUTINGS.items():
        conditions = {"routing": sizes, "product": "fprop"}
        title = "256 each" if name == "balanced" else sizes
        tiles = {"balanced": ("256x256", "256x128", "128x128"), "ragged": ("256x256", "128x128")}
        for tile in tiles.get(name, ("256x256",)):
            chosen = "ours" if tile == "256x256" else f"ours, tile {tile}"
            ours = {"contender": chosen, "format": "nvfp4:row_scaled x nvfp4"}
            rows.append(Row((title, "ours", tile), {**conditions, **ours}))
            theirs = {"contender": f"CUTLASS example, tile {tile}", "format": "nvfp4 x nvfp4"}
            rows.append(Row(("", "example", tile), {**conditions, **theirs}))
            title = ""
    return tuple(rows)


_COUNT_GEMM = Table(
    "counts-gemm",
    ("rows of the experts", "kernel", "tile"),
    _tile_rows(),
    (
        Column(
            "MMA work / useful",
            _cell("MMA operations", 2),
            over=Cell({"quantity": "MMA operations"}, show="flops"),
        ),
        Column("TMA load MB", _cell("bytes read by TMA", scale=1e-6, digits=1)),
        Column(
            "store MB",
            _cell("bytes written by TMA", scale=1e-6, digits=1),
            plus=_cell("bytes written", scale=1e-6),
        ),
        Column("thousand warp instructions", _cell("warp instructions", scale=1e-3)),
        Column("thousand shared wavefronts", _cell("shared wavefronts", scale=1e-3)),
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
    ("tokens per expert",),
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
    conditions={**_GEMM.conditions, "gpu": "NVIDIA H100 80GB HBM3"},
)


def _step(name: str, **conditions: Any) -> Column:
    return Column(name, _cell("time", 2, 1e-3, **conditions))


_CACHED = ("FP8Block", "NVFP4RowScaled")
_LAYER = Table(
    "layer-h200",
    ("layer", "tokens per expert"),
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
            _step(f"{name}, cached weight", contender="ours, cached weight", format=name)
            for name in _CACHED[::-1]
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
            Column(f"{name}, cached weights", _time(contender="ours, cached weight", format=name))
            for name in _CACHED
        ),
    )


def _mixtures(
    name: str, passes: str, token_counts: tuple[tuple[int, ...], ...], *recipes: str
) -> Table:
    """Return a table of mixtures of experts; ``token_counts`` are those of each model."""
    rows = []
    for model, counts in zip(SLICES, token_counts, strict=True):
        for scope in ("", "model") if model in MOE_OPTIONS else ("",):
            for tokens in counts:
                has_zipf = tokens == 4096 and not model.startswith("Mix")
                for routing in ("random", "zipf") if has_zipf else ("random",):
                    titles = (
                        f"{model}, all options" if scope else model,
                        f"{tokens}, Zipf" if routing == "zipf" else str(tokens),
                    )
                    conditions = {
                        "model": model,
                        "tokens": tokens,
                        "routing": routing,
                        "scope": scope or None,
                    }
                    rows.append(Row(titles, conditions))
    return Table(
        name,
        ("model", "tokens"),
        tuple(rows),
        _contenders(("torch", "transformers", "quack"), *recipes),
        {**_H200, "suite": "moe", "pass": passes},
        "Microseconds.",
    )


_FEW = (64, 4096)
_MOE = _mixtures("moe-h200", "forward", ((*_FEW, 32768), _FEW, _FEW, _FEW))
_MOE_STEP = _mixtures(
    "moe-step-h200",
    "forward+backward",
    ((4096, 32768), (512, 2048), (4096,), (4096,)),
    "FP8Block",
    "NVFP4RowScaled",
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
    (Column("us", _cell("host time")),),
    {**_H200, "suite": "host"},
)

#: Tables by the name in their markers.
TABLES = {
    table.name: table
    for table in (
        _DEMO,
        _MEMORY,
        _COUNT_QUANTIZE,
        _COUNT_GEMM,
        _QUANTIZE,
        _GEMM,
        _GEMM_H100,
        _LAYER,
        _MOE,
        _MOE_STEP,
        _HOST,
    )
}


def matches(record: Record, conditions: Mapping[str, Any]) -> bool:
    """Return True if a record has these fields and entries of its case."""
    return all(
        wanted == (record.case[name] if name in record.case else getattr(record, name, None))
        for name, wanted in conditions.items()
    )
