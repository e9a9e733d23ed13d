"""The dashboard in a browser: what it shows, and for whom."""

import itertools
import json
import re

import pytest

from perf.dashboard.page import ASSETS, page
from tests.perf.chromium import MISSING, Browser
from tests.perf.dashboard_records import (
    COUNTS,
    NEW,
    NVFP4,
    OLD,
    RECORDS,
    TOKENS,
    all_committed,
    current,
)

pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=f"no browser: {MISSING}"),
    # One worker has the browser.
    pytest.mark.xdist_group("chromium"),
]

VIEWS = ("", "latest", "tokens", "roofline", "history", "kernels")
KERNEL = "kernel/gemm-nvfp4-row-scaled-x-nvfp4-fprop"
PLOTTED = {"": 1, "tokens": 1, "roofline": 2, "history": 1}
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(18, 21, 27)"


@pytest.fixture(scope="module")
def started():
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(started):
    """With a wide window, a light theme and no memory; what a test does must make no error."""
    started.errors.clear()
    started.resize(1280, 900)
    started.prefer("light")
    yield started
    started.evaluate("localStorage.clear()")
    # Reading pixels back is what only tests do.
    assert [error for error in started.errors if "willReadFrequently" not in error] == []


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "index.html"
    path.write_text(page(RECORDS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    path = tmp_path_factory.mktemp("committed") / "index.html"
    path.write_text(page(all_committed()), encoding="utf-8")
    return path


def go(browser, view):
    browser.evaluate(f"location.hash = {json.dumps(f'#/{view}')}")
    browser.settle()


def texts(browser, selector):
    found = f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"
    return browser.evaluate(found)


def points(browser, name, series):
    """Of a series of a plot, as it was given to uPlot."""
    return browser.evaluate(
        f"""(() => {{
            const plot = perfDashboard.plots.get({json.dumps(name)});
            const i = plot.series.findIndex((s) => s.name === {json.dumps(series)}) + 1;
            const rows = plot.u.data[0].map((x, row) => [x, plot.u.data[i][row]]);
            return rows.filter(([, y]) => y !== null);
        }})()"""
    )


def inked(browser, name):
    """Whether each point of a plot is drawn at its place, in its colour."""
    return browser.evaluate(
        f"""(() => {{
            const {{ u, series }} = perfDashboard.plots.get({json.dumps(name)});
            const seen = [];
            for (const one of series.filter((s) => !s.roof)) {{
                const probe = document.createElement("canvas").getContext("2d");
                const style = getComputedStyle(document.documentElement);
                probe.fillStyle = style.getPropertyValue(one.color);
                probe.fillRect(0, 0, 1, 1);
                const wanted = probe.getImageData(0, 0, 1, 1).data.join();
                for (const p of one.points) {{
                    const x = Math.round(u.valToPos(p.x, "x", true));
                    const y = Math.round(u.valToPos(p.y, "y", true));
                    seen.push(u.ctx.getImageData(x, y, 1, 1).data.join() === wanted);
                }}
            }}
            return seen;
        }})()"""
    )


def pick(browser, name, value):
    """Choose in a filter as its user would, by a change event."""
    browser.evaluate(
        f"""(() => {{
            const select = document.getElementById({json.dumps(name)});
            select.value = {json.dumps(value)};
            select.dispatchEvent(new Event("change"));
        }})()"""
    )
    browser.settle()


@pytest.mark.parametrize("which", ["made", "committed"])
def test_views_load_and_draw(browser, request, which):
    browser.open(request.getfixturevalue(which))
    kernels = set(browser.evaluate("KERNELS.map((k) => k.slug)"))
    cases = browser.evaluate("DATA.cases.length")
    others = [
        *(f"kernel/{slug}" for slug in sorted(kernels)[::9]),
        *(f"case/{i}" for i in range(0, cases, 39)),
    ]
    for view in (*VIEWS, *others):
        go(browser, view)
        assert len(texts(browser, "h1")) == 1, view
        assert "Nothing" not in texts(browser, "main")[0], view
        assert texts(browser, "main tbody tr"), view
        drawn = browser.evaluate("[...perfDashboard.plots.values()].map((p) => Boolean(p.u))")
        assert all(drawn) and len(drawn) >= PLOTTED.get(view, 0), view
    go(browser, "nowhere")
    assert texts(browser, "h1") == ["No such page"]
    go(browser, "kernel/none")
    assert texts(browser, "h1") == ["No such kernel"]


def test_time_against_tokens(browser, made):
    browser.open(made, "#/tokens?variants=1")
    for contender, fmt in {(r.contender, r.format) for r in current() if r.suite == "gemm"}:
        of = [r for r in current() if (r.suite, r.contender, r.format) == ("gemm", contender, fmt)]
        wanted = sorted([r.case["rows"] / r.case["experts"], r.microseconds] for r in of)
        assert points(browser, "tokens", f"{contender} · {fmt}") == wanted
        assert [x for x, _ in wanted] == list(TOKENS)
    assert browser.evaluate("perfDashboard.plots.get('tokens').series.length") == 4
    go(browser, "tokens?rate=speed")
    found = points(browser, "tokens", f"ours · {NVFP4}")
    assert found == [[tokens, pytest.approx(2.0)] for tokens in TOKENS]
    assert all(inked(browser, "tokens")[:3])


def test_rooflines(browser, made):
    browser.open(made, "#/roofline")
    ours = [r for r in current() if (r.contender, r.suite) == ("ours", "gemm")]
    wanted = sorted([r.flops / r.bytes, r.tflops] for r in ours)
    found = points(browser, "roofline", f"ours · {NVFP4}")
    assert [pytest.approx(point) for point in wanted] == found
    assert points(browser, "roofline", "bf16 700 TFLOP/s, measured")[0] == [175, 700]
    memory = points(browser, "roofline", "memory 4 TB/s, measured")
    assert all(y == pytest.approx(4.0 * x) for x, y in memory)
    assert memory[-1][1] == 1979
    (quantize,) = (r for r in current() if (r.suite, r.kind) == ("quantize", "gpu"))
    assert points(browser, "bandwidth", "ours · nvfp4") == [[3.0, pytest.approx(quantize.tbs)]]
    assert "15 % of a copy" in texts(browser, "#bandwidth table")[0]
    assert all(inked(browser, "roofline")) and all(inked(browser, "bandwidth"))


def test_history_marks_regressions(browser, made):
    browser.open(made, "#/history")
    plots = "perfDashboard.plots.get('history')"
    marks = browser.evaluate(f"{plots}.series.map((s) => [s.name, s.points.map((p) => p.mark)])")
    assert dict(marks) == {
        f"ours · {NVFP4}": [0, 0],
        f"ours, prepacked · {NVFP4}": [0, 1],
        "torch · bfloat16": [0, -1],
    }
    old, new = points(browser, "history", f"ours, prepacked · {NVFP4}")
    assert new[1] / old[1] == pytest.approx(1.5)
    assert texts(browser, ".changes .worse") == ["▲ worse"] * 3
    assert texts(browser, ".changes .better") == ["▼ better"] * 3
    pick(browser, "verdict", "worse")
    assert texts(browser, ".changes .better") == []
    row = texts(browser, ".changes tbody tr")[0]
    assert "+50 %" in row and f"{OLD[0]} → {NEW[0]}" in row
    # The triangle stands above the point.
    pixel = f"""(() => {{
        const {{ u, series }} = {plots};
        const p = series.find((s) => s.name.startsWith("ours, pre")).points[1];
        const [x, y] = [u.valToPos(p.x, "x", true), u.valToPos(p.y, "y", true)];
        return [...u.ctx.getImageData(x, y - 13, 1, 1).data];
    }})()"""
    assert browser.evaluate(pixel) == [0xB4, 0x23, 0x18, 255]


def test_filters(browser, made):
    browser.open(made, "#/latest")
    total = len({r.key for r in RECORDS})
    variants = len({r.key for r in RECORDS if "tile" in r.contender})
    status = f"{total - variants} of {total} measured things are shown."
    assert texts(browser, "#status") == [status]
    assert texts(browser, "h3") == ["gemm", "quantize", "quantize", "counts", "counts"]
    pick(browser, "filter-suite", "gemm")
    assert texts(browser, "h3") == ["gemm"]
    pick(browser, "filter-contender", "torch")
    assert texts(browser, "thead th:not(:first-child)") == ["torchbfloat16"]
    assert texts(browser, "#status") == [f"3 of {total} measured things are shown."]
    address = browser.evaluate("location.hash")
    assert address == "#/latest?suite=gemm&contender=torch"
    browser.evaluate("document.getElementById('filter-clear').click()")
    browser.settle()
    assert texts(browser, "#status") == [status]
    pick(browser, "filter-place", "cpu:A machine")
    assert texts(browser, "h2") == ["CPU: A machine"]
    pick(browser, "filter-place", "")
    pick(browser, "filter-format", "bfloat16")
    assert texts(browser, "#status") == [f"3 of {total} measured things are shown."]
    browser.open(made, address)
    assert texts(browser, "#status") == [f"3 of {total} measured things are shown."]
    assert browser.evaluate("document.getElementById('filter-suite').value") == "gemm"
    assert browser.evaluate("document.querySelector('nav a').hash.includes('contender=torch')")


def test_filter_by_text_and_variants(browser, made):
    browser.open(made, "#/tokens")
    browser.evaluate("document.getElementById('filter-text').focus()")
    browser.type("PREPACKED rows=64")
    browser.wait("location.hash.includes('text=PREPACKED')")
    assert texts(browser, "#status")[0].startswith("1 of")
    assert "Nothing" in texts(browser, "main")[0]
    assert browser.evaluate("document.activeElement.id") == "filter-text"
    browser.evaluate("document.getElementById('filter-clear').click()")
    browser.evaluate("document.getElementById('filter-variants').click()")
    browser.settle()
    assert f"ours, tile 128x16 · {NVFP4}" in texts(browser, ".legend button")


def test_times_and_counts_share_no_table(browser, committed):
    browser.open(committed, "#/latest")
    script = """[...document.querySelectorAll("main section.suite")].map((section) => {
        let before = section;
        while (before.tagName !== "H2") before = before.previousElementSibling;
        return [before.textContent, [...section.querySelectorAll("tbody th a")].map((a) => a.hash)];
    })"""
    kinds = {r.kind for r in all_committed()}
    heads = {"gpu": "GPU times: ", "cpu": "CPU: ", "emulator": "Emulator counts: "}
    sections = browser.evaluate(script)
    assert {h for h, _ in sections if h.startswith(tuple(heads[k] for k in kinds))}
    of_gpu = [h for h, _ in sections if h.startswith(heads["gpu"])]
    assert len(of_gpu) == len({(r.suite, r.gpu) for r in all_committed() if r.kind == "gpu"})
    # A suite's tables show one kind, one machine and one unit of time at a time.
    go(browser, "latest?suite=gemm")
    captions = texts(browser, "main caption")
    assert len(captions) == len(set(captions))


def test_the_page_of_a_kernel_has_its_counts(browser, made):
    browser.open(made, "#/kernels")
    assert len(texts(browser, "tbody tr")) == 3
    go(browser, "kernel/quantize-nvfp4-row")
    assert texts(browser, "h1") == ["quantize nvfp4, row"]
    script = """[...document.querySelector("main table").tBodies[0].rows].map((row) =>
        [...row.cells].map((cell, i) => i ? Number(cell.title) : cell.textContent))"""
    assert browser.evaluate(script) == [[name, n, 2 * n] for name, n in COUNTS.items()]
    heads = texts(browser, "main thead th")[1:3]
    assert ["sm_90a" in heads[0], "sm_100a" in heads[1]] == [True, True]
    assert "GPU times: quantize on NVIDIA H200" in texts(browser, "h2")
    assert "CPU: quantize on A machine" in texts(browser, "h2")
    go(browser, KERNEL)
    assert any(name.startswith("torch") for name in texts(browser, ".legend button"))


def test_the_keyboard_reaches_everything(browser, made):
    browser.open(made, "#/tokens")
    browser.evaluate("document.activeElement.blur()")
    active = "document.activeElement"
    browser.press("Tab")
    assert browser.evaluate(f"{active}.className") == "skip"
    assert browser.evaluate(f"{active}.getBoundingClientRect().left") >= 0
    browser.press("Enter")
    assert browser.evaluate(f"{active}.id") == "content"
    reached = []
    for _ in range(40):
        browser.press("Tab")
        name = f"{active}.id || {active}.className || {active}.textContent"
        ring = f"{active}.matches(':focus-visible') && getComputedStyle({active}).outlineStyle"
        name, outline = browser.evaluate(f"[{name}, {ring}]")
        if "plot" in name:
            break
        reached.append(name)
        assert outline in ("solid", "auto"), name
    assert {"case", "rate"} <= set(reached)
    browser.press("ArrowRight")
    readout = lambda: texts(browser, ".readout")[0]  # noqa: E731
    assert readout() == f"ours · {NVFP4} 1 token an expert: 22.5 µs (0.047 TFLOP/s) details"
    browser.press("ArrowRight")
    assert "16 tokens an expert: 60 µs" in readout()
    browser.press("ArrowDown")
    assert readout().startswith("ours, prepacked") and "16 tokens" in readout()
    browser.press("End")
    assert "128 tokens" in readout()
    assert browser.evaluate("document.querySelector('.ring').hidden") is False
    browser.press("Enter")
    assert browser.evaluate("location.hash").startswith("#/case/")
    assert browser.evaluate(f"{active}.tagName") == "H1"
    assert "128 tokens an expert" in texts(browser, "h1")[0]


def test_the_legend_hides_series(browser, made):
    browser.open(made, "#/tokens")
    assert all(inked(browser, "tokens"))
    browser.evaluate("document.querySelector('.legend button').focus()")
    browser.press("Space")
    assert browser.evaluate("document.activeElement.getAttribute('aria-pressed')") == "false"
    assert inked(browser, "tokens")[0] is False
    browser.press("Space")
    assert all(inked(browser, "tokens"))
    browser.evaluate("document.querySelector('.legend li:last-child button').click()")
    browser.settle()
    assert not any(inked(browser, "tokens"))
    assert browser.evaluate("document.activeElement.textContent") == "Show all"
    browser.press("Enter")
    assert all(inked(browser, "tokens"))


def test_a_screen_reader_finds_its_way(browser, made):
    browser.open(made, "#/tokens")
    found = browser.accessible()
    roles = [role for role, _ in found]
    for landmark in ("banner", "navigation", "main", "contentinfo", "search", "status"):
        assert landmark in roles, landmark
    controls = (
        "button",
        "combobox",
        "searchbox",
        "checkbox",
        "link",
        "application",
        "table",
        "region",
    )
    assert not [role for role, name in found if role in controls and not name]
    names = {name for role, name in found if role in ("combobox", "searchbox", "checkbox")}
    assert {
        "Suite",
        "GPU or machine",
        "Format",
        "Contender",
        "Text",
        "Our tuning variants",
    } <= names
    assert any(role == "application" and "9 points of 3 contenders" in name for role, name in found)
    assert browser.evaluate("document.documentElement.lang") == "en"
    for view in (*VIEWS, KERNEL):
        go(browser, view)
        levels = browser.evaluate(
            "[...document.querySelectorAll('h1,h2,h3')].map((h) => +h.tagName[1])"
        )
        assert levels[0] == 1 and all(b - a <= 1 for a, b in itertools.pairwise(levels)), view
        assert browser.evaluate("[...document.querySelectorAll('th')].every((h) => h.scope)")
        ids = browser.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
        assert len(ids) == len(set(ids)), view
        # Beside each plot stands a table of its points.
        script = """[...document.querySelectorAll("figure")].map((figure) => {
            const series = perfDashboard.plots.get(figure.id).series.filter((s) => !s.roof);
            const rows = figure.querySelectorAll("tbody tr").length;
            return [rows, series.reduce((n, s) => n + s.points.length, 0)];
        })"""
        assert all(rows == count for rows, count in browser.evaluate(script)), view


@pytest.mark.parametrize(("width", "which"), [(390, "committed"), (320, "made")])
def test_a_phone_needs_no_sideways_scrolling(browser, request, width, which):
    browser.resize(width, 800, is_phone=True)
    browser.open(request.getfixturevalue(which))
    assert browser.evaluate("document.getElementById('filter-box').open") is False
    for view in (*VIEWS, KERNEL, "case/2", "latest?suite=counts"):
        go(browser, view)
        sizes = browser.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert sizes == [width, width], view
    browser.evaluate("document.getElementById('filter-box').open = true")
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    small = """[...document.querySelectorAll("button, select, nav a, input[type=search]")]
        .map((e) => [e.id || e.textContent, e.getBoundingClientRect().height])
        .filter(([, height]) => height && height < 32)"""
    assert browser.evaluate(small) == []


def test_dark_mode(browser, made):
    background = "getComputedStyle(document.body).backgroundColor"
    browser.prefer("dark")
    browser.open(made, "#/tokens")
    assert browser.evaluate(background) == DARK
    assert all(inked(browser, "tokens"))
    browser.prefer("light")
    assert browser.evaluate(background) == LIGHT
    assert all(inked(browser, "tokens"))
    for theme, color in (("dark", DARK), ("light", LIGHT), ("system", LIGHT), ("dark", DARK)):
        browser.evaluate("document.getElementById('theme').click()")
        browser.settle()
        assert texts(browser, "#theme") == [f"Theme: {theme}"]
        assert browser.evaluate(background) == color
        assert all(inked(browser, "tokens"))
    browser.open(made)
    assert browser.evaluate(background) == DARK, "the choice is kept"


def luminance(color):
    value = color.lstrip("#")
    value = "".join(c * 2 for c in value) if len(value) == 3 else value
    parts = [int(value[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a, b):
    """As WCAG 2 defines it."""
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_read():
    themes = re.findall(
        r"color-scheme: (\w+);\n((?:\s*--.*\n)+)", (ASSETS / "style.css").read_text()
    )
    assert [name for name, _ in themes] == ["light", "dark", "dark"]
    assert themes[1][1].split() == themes[2][1].split()
    for name, text in themes:
        colors = dict(re.findall(r"--([\w-]+): (#\w+)", text))
        for back in ("back", "panel"):
            for front in ("text", "muted", "link", "worse", "better"):
                assert contrast(colors[front], colors[back]) >= 4.5, (name, front, back)
        for front in (*(f"c{i}" for i in range(10)), "bar", "focus"):
            assert contrast(colors[front], colors["back"]) >= 3.0, (name, front)
