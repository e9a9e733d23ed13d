"""The dashboard in a browser: what it shows, and for whom."""

import itertools
import json
import re

import pytest

from perf.dashboard.numerics import read_numerics
from perf.dashboard.page import page
from tests.helpers import each
from tests.perf.chromium import MISSING, Browser
from tests.perf.dashboard_records import COUNTS, CURRENT, NVFP4, RECORDS, TOKENS, all_committed, save_numerics

pytestmark = [
  pytest.mark.skipif(MISSING is not None, reason=f"no browser: {MISSING}"),
  # One worker has the browser.
  pytest.mark.xdist_group("chromium"),
]

#: Texts of the heads and titles of the numbers of a row of a table.
ROW = "[...e.cells].map((c) => c.title || c.textContent).join('|')"
VIEWS = ("", "tokens", "roofline", "history", "kernels")
KERNEL = "kernel/gemm-nvfp4-row-scaled-x-nvfp4-fprop"
#: What the page has for whoever looks behind it.
PAGE = "perfDashboard"


class Page(Browser):
  """Asks the page, and does what its users do."""

  def go(self, view):
    self.evaluate(f"location.hash = {json.dumps(f'#/{view}')}")
    self.settle()

  def all(self, selector, what):
    """What is asked of each element ``e``."""
    found = f"[...document.querySelectorAll({json.dumps(selector)})]"
    return self.evaluate(f"{found}.map((e) => {what})")

  def texts(self, selector):
    return self.all(selector, "e.textContent")

  def click(self, selector):
    self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")
    self.settle()

  def pick(self, name, value):
    """Choose in a filter, by a change event."""
    change = f"(e.value = {json.dumps(value)}, e.dispatchEvent(new Event('change')))"
    self.all(f"#{name}", change)
    self.settle()

  def points(self, name, series):
    """Of a series of a plot."""
    plot = f"{PAGE}.plots.get({json.dumps(name)})"
    found = f"{plot}.series.find((s) => s.name === {json.dumps(series)})"
    return self.evaluate(f"{found}.points.map((p) => [p.x, p.y])")

  def inked(self, name, up=0):
    """The colour of the plot at each point, or above it, beside that of its series."""
    return self.evaluate(
      f"""(() => {{
                const {{ drawn, series }} = {PAGE}.plots.get({json.dumps(name)});
                const seen = (p) => {{
                    const [x, y] = drawn.at(p.x, p.y).map(Math.round);
                    const [r, g, b] = drawn.context.getImageData(x, y - {up}, 1, 1).data;
                    return `rgb(${{r}}, ${{g}}, ${{b}})`;
                }};
                const shown = series.filter((s) => !s.roof);
                return shown.map((s) => s.points.map((p) => [seen(p), {PAGE}.css(s.color)]));
            }})()"""
    )

  def drawn(self, name):
    """Whether each point is."""
    return [seen == wanted for seen, wanted in itertools.chain(*self.inked(name))]


@pytest.fixture(scope="module")
def started():
  with Page() as browser:
    yield browser


@pytest.fixture
def browser(started):
  """With a wide window and a light theme; what a test does must make no error."""
  started.errors.clear()
  started.resize(1280, 900)
  started.prefer("light")
  yield started
  # Reading pixels back is what only tests do.
  assert [error for error in started.errors if "willReadFrequently" not in error] == []


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
  folder = tmp_path_factory.mktemp("pages")
  save_numerics(folder / "numerics.jsonl")
  numerics = read_numerics([folder / "numerics.jsonl"])
  (folder / "made.html").write_text(page(RECORDS, numerics=numerics), encoding="utf-8")
  (folder / "committed.html").write_text(page(all_committed()), encoding="utf-8")
  return folder


@pytest.fixture
def made(pages):
  return pages / "made.html"


@each("which", ["made", "committed"])
def test_views_load_and_draw(browser, pages, which):
  browser.open(pages / f"{which}.html")
  slugs = browser.evaluate(f"[...{PAGE}.kernels.keys()]")
  cases = browser.evaluate(f"[...new Set({PAGE}.things.map((t) => t.caseId))]")
  others = [f"kernel/{slug}" for slug in slugs[::9]] + [f"case/{case}" for case in cases[::39]]
  for view in (*VIEWS, *others):
    browser.go(view)
    assert len(browser.texts("h1")) == 1, view
    assert not re.search("Nothing|NaN|undefined", browser.texts("main")[0]), view
    assert browser.texts("main tbody tr"), view
    drawn = browser.evaluate(f"[...{PAGE}.plots.values()].map((p) => Boolean(p.drawn))")
    least = {"tokens": 1, "roofline": 2, "history": 1}.get(view, 0)
    assert all(drawn) and len(drawn) >= least, view
  for view, title in (("nowhere", "page"), ("kernel/none", "kernel"), ("case/none", "case")):
    browser.go(view)
    assert browser.texts("h1") == [f"No such {title}"]


def test_time_against_tokens(browser, made):
  browser.open(made, "#/tokens")
  for contender, fmt in (("ours", NVFP4), ("ours, prepacked", NVFP4), ("torch", "bfloat16")):
    of = [r for r in CURRENT if (r.suite, r.contender, r.format) == ("gemm", contender, fmt)]
    wanted = sorted([r.case["rows"] / r.case["experts"], r.microseconds] for r in of)
    assert browser.points("tokens", f"{contender} · {fmt}") == wanted
  assert browser.evaluate(f"{PAGE}.plots.get('tokens').series.length") == 3
  browser.pick("rate", "speed")
  found = browser.points("tokens", f"ours · {NVFP4}")
  assert found == [[tokens, pytest.approx(2.0)] for tokens in TOKENS]
  assert all(browser.drawn("tokens")[:3])


def test_history_marks_regressions(browser, made):
  browser.open(made, "#/history")
  series = f"{PAGE}.plots.get('history').series"
  marks = browser.evaluate(f"{series}.map((s) => [s.name, s.points.map((p) => p.mark)])")
  prepacked, torch = f"ours, prepacked · {NVFP4}", "torch · bfloat16"
  assert dict(marks) == {f"ours · {NVFP4}": [0, 0], prepacked: [0, 1], torch: [0, -1]}
  old, new = browser.points("history", prepacked)
  assert new[1] / old[1] == pytest.approx(1.5)
  # The triangle stands above the point, in the colour of what is worse.
  worse = browser.evaluate(f"{PAGE}.css('--worse')")
  above = dict(zip(dict(marks), browser.inked("history", up=11), strict=True))
  assert above[prepacked][1][0] == worse and above[torch][1][0] != worse
  assert browser.texts("td.worse") == ["▲ worse"] * 3
  assert browser.texts("td.better") == ["▼ better"] * 3
  browser.pick("verdict", "worse")
  assert browser.texts("td.better") == []
  *_, last = browser.texts("tbody tr")
  assert "+50 %" in last and "aaaaaaa → bbbbbbb" in last


def test_filters(browser, made):
  browser.open(made, "#/")
  total = len({r.key for r in RECORDS})
  hidden = len({r.key for r in RECORDS if "tile" in r.contender})

  def shown():
    (status,) = browser.texts("#status")
    return int(status.removesuffix(f" of {total} measured things are shown."))

  assert shown() == total - hidden
  assert browser.texts("h3") == ["gemm", "quantize", "quantize", "counts", "counts"]
  browser.pick("filter-suite", "gemm")
  assert browser.texts("h3") == ["gemm"]
  browser.pick("filter-contender", "torch")
  assert browser.texts("thead th:not(:first-child)") == ["torchbfloat16"]
  assert shown() == 3
  address = browser.evaluate("location.hash")
  assert address == "#/?suite=gemm&contender=torch"
  browser.click("#filter-clear")
  assert shown() == total - hidden
  browser.pick("filter-place", "cpu:A machine")
  assert browser.texts("h2") == ["CPU: A machine"]
  browser.pick("filter-place", "")
  browser.pick("filter-format", "bfloat16")
  assert shown() == 3
  browser.click("#filter-clear")
  browser.pick("filter-contender", "ours, tile 128x16")
  assert shown() == hidden
  browser.click("#filter-clear")
  browser.evaluate("document.getElementById('filter-text').focus()")
  browser.type("PREPACKED rows=64")
  browser.wait("location.hash.includes('text=PREPACKED')")
  assert shown() == 1
  assert browser.evaluate("document.activeElement.id") == "filter-text"
  # A view can be sent to somebody.
  browser.open(made, address)
  assert shown() == 3
  assert browser.evaluate("document.getElementById('filter-suite').value") == "gemm"
  assert browser.evaluate("document.querySelector('nav a').hash.includes('contender=torch')")


def test_the_page_of_a_kernel_has_its_counts(browser, made):
  browser.open(made, "#/kernels")
  assert len(browser.texts("tbody tr")) == 3
  browser.click("tbody tr:last-child a")
  assert browser.texts("h1") == ["quantize nvfp4, row"]
  heads = browser.texts(".profile thead th")[1:]
  assert heads == [name for name in COUNTS if COUNTS[name]]
  numbers = "[...e.querySelectorAll('td')].map((c) => parseInt(c.title))"
  cells = browser.all(".profile tbody tr", numbers)
  assert cells == [[n * factor for n in COUNTS.values() if n] for factor in (1, 2)]
  rows = browser.texts(".profile tbody th")
  assert ["sm_90a" in rows[0], "sm_100a" in rows[1]] == [True, True]
  titles = {"GPU times: quantize on NVIDIA H200", "CPU: quantize on A machine"}
  assert titles <= set(browser.texts("h2"))
  browser.go(KERNEL)
  assert any(name.startswith("torch") for name in browser.texts(".legend button"))


@each(("width", "which"), [(390, "committed"), (320, "made")])
def test_a_phone_needs_no_sideways_scrolling(browser, pages, width, which):
  browser.resize(width, 800, is_phone=True)
  browser.open(pages / f"{which}.html")
  assert browser.evaluate("document.getElementById('filter-box').open") is False
  case = browser.evaluate(f"{PAGE}.things[0].caseId")
  more = ("numerics",) if which == "made" else ()
  for view in (*VIEWS, *more, KERNEL, f"case/{case}", "?suite=counts"):
    browser.go(view)
    sizes = browser.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert sizes == [width, width], view
  browser.evaluate("document.getElementById('filter-box').open = true")
  assert browser.evaluate("document.documentElement.scrollWidth") == width
  controls = "button, select, nav a, input[type=search]"
  heights = browser.all(controls, "[e.id || e.textContent, e.offsetHeight]")
  assert [name for name, height in heights if height and height < 32] == []


def test_numerics(browser, pages):
  browser.open(pages / "made.html", "#/numerics")
  browser.pick("quantity", "amax")
  browser.pick("operand", "up, input, rowwise, mxfp8")
  wanted = [r for r in read_numerics([pages / "numerics.jsonl"]) if r["role"] == "input"]
  wanted = [r["amax"] for r in wanted if r["direction"] == "rowwise"]
  for expert in (0, 1):
    drawn = browser.points("numerics", f"expert {expert}")
    assert drawn == [[step, row[expert]] for step, row in enumerate(wanted)]
  assert all(browser.drawn("numerics"))
  browser.pick("step", "0")
  rows = [e.split("|") for e in browser.all(".profile tbody tr", ROW)]
  (row,) = (row for name, *row in rows if name.startswith("up, input, r"))
  assert [*map(float, row)] == wanted[0]
  # Without them there is no such view.
  browser.open(pages / "committed.html", "#/numerics")
  assert browser.texts("h1") == ["No such page"]
