// A plot: uPlot draws lines and axes, this draws points and makes them reachable without a mouse.

/** Plots of the page by their names, for whoever wants the numbers behind them. */
const PLOTS = new Map();
const SHAPES = ["circle", "square", "diamond", "cross"];
const COLORS = 10;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const isOurs = (name) => Number(name.startsWith("ours"));
const timesOf = (things) => things.filter((t) => t.what === "time").length;

/** The place of each contender among the colours, the same on all pages: ours first, then who races most. */
const COLOR_OF = new Map([...groupBy(THINGS.filter((t) => t.unit in FACTORS), (t) => t.series)]
  .sort(([a, as], [b, bs]) => as[0].variant - bs[0].variant || isOurs(b) - isOurs(a) || timesOf(bs) - timesOf(as) || natural(a, b))
  .map(([name], i) => [name, i]));

/** Give the series of a plot different looks. */
function dress(series) {
  const taken = new Set();
  for (const one of series.filter((s) => !s.roof)) {
    const wanted = (COLOR_OF.get(one.name) ?? 0) % COLORS;
    let place = wanted;
    while (taken.has(place)) place = (place + 1) % COLORS + (taken.size >= COLORS ? COLORS * Math.floor(taken.size / COLORS) : 0);
    taken.add(place);
    one.color = `--c${place % COLORS}`;
    one.dash = [[], [6, 4], [2, 3], [9, 3, 2, 3]][Math.floor(place / COLORS) % 4];
    one.shape = isOurs(one.name) ? "circle" : SHAPES[1 + (place % 3)];
  }
}

function trace(context, shape, x, y, r) {
  context.beginPath();
  if (shape === "square") context.rect(x - r, y - r, 2 * r, 2 * r);
  else if (shape === "circle") context.arc(x, y, r, 0, 2 * Math.PI);
  else if (shape === "up" || shape === "down") {
    const s = shape === "up" ? 1 : -1;
    context.moveTo(x, y - s * r);
    context.lineTo(x + r, y + s * r);
    context.lineTo(x - r, y + s * r);
    context.closePath();
  } else {
    const [a, b] = shape === "cross" ? [r, r * 0.45] : [r * 1.2, 0];
    const ring = shape === "cross" ? [[a, b], [b, b], [b, a], [-b, a], [-b, b], [-a, b], [-a, -b], [-b, -b], [-b, -a], [b, -a], [b, -b], [a, -b]]
      : [[a, 0], [0, a], [-a, 0], [0, -a]];
    ring.forEach(([dx, dy], i) => (i ? context.lineTo(x + dx, y + dy) : context.moveTo(x + dx, y + dy)));
    context.closePath();
  }
}

function drawPoints(u, spec) {
  const context = u.ctx;
  const px = devicePixelRatio;
  context.save();
  context.setLineDash([]); // uPlot leaves that of its last line
  for (const one of spec.series.filter((s) => !s.hidden)) {
    if (one.roof) {
      drawRoofName(u, one, px);
      continue;
    }
    context.strokeStyle = context.fillStyle = css(one.color);
    for (const point of one.points) {
      const [x, y] = [u.valToPos(point.x, "x", true), u.valToPos(point.y, "y", true)];
      if (point.half) {
        context.lineWidth = px;
        context.beginPath();
        context.moveTo(x, u.valToPos(point.y - point.half, "y", true));
        context.lineTo(x, u.valToPos(point.y + point.half, "y", true));
        context.stroke();
      }
      trace(context, one.shape, x, y, 4.5 * px);
      context.fill();
      // An edge in the colour of the page tells points apart that lie on each other.
      context.lineWidth = px;
      context.strokeStyle = css("--back");
      context.stroke();
      context.strokeStyle = css(one.color);
      if (point.mark) drawMark(context, point.mark, x, y, px);
    }
  }
  context.restore();
}

/** A regression: a triangle above the point; an improvement: one below it. */
function drawMark(context, mark, x, y, px) {
  const color = context.fillStyle;
  context.fillStyle = css(mark > 0 ? "--worse" : "--better");
  trace(context, mark > 0 ? "up" : "down", x, y - mark * 13 * px, 5 * px);
  context.fill();
  context.fillStyle = color;
}

function drawRoofName(u, roof, px) {
  const context = u.ctx;
  const [first, last] = [roof.points[0], roof.points[roof.points.length - 1]];
  const isFlat = first.y === last.y;
  const at = isFlat ? last : first;
  context.font = `${12 * px}px system-ui, sans-serif`;
  context.fillStyle = css("--muted");
  context.textAlign = isFlat ? "right" : "left";
  context.textBaseline = isFlat ? "bottom" : "top";
  context.fillText(roof.name, u.valToPos(at.x, "x", true) + (isFlat ? -4 : 12) * px, u.valToPos(at.y, "y", true) - (isFlat ? 4 : -6) * px);
}

/** Round numbers of a logarithmic axis, fewer of them over many decades. */
function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const steps = decades > 4.2 ? [1] : decades > 1.2 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const step of steps) ticks.push(Number((step * 10 ** power).toPrecision(3)));
  }
  return ticks.filter((tick) => tick >= low && tick <= high);
}

const tickText = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });

/** Of ticks at given places those that have room; the last stays. */
function thinned(u, ticks, room) {
  const kept = [];
  for (const tick of [...ticks].reverse()) {
    const at = u.valToPos(tick, "x");
    if (!kept.length || kept[0].at - at >= room) kept.unshift({ tick, at });
  }
  return kept.map((k) => k.tick);
}

function rangeOf(values, axis) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  if (axis.log) return [low / (axis.pad || 1.3), high * (axis.pad || 1.3)];
  const margin = axis.pad ?? ((high - low) * 0.08 || Math.abs(high) * 0.1 || 1);
  return [axis.zero ? 0 : low - margin, high + margin];
}

function axisOf(spec, axis, isX) {
  const log = axis.log && !axis.ticks;
  return {
    label: axis.label, labelSize: 22, labelGap: 0, size: isX ? 36 : 62, gap: 4,
    font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif",
    stroke: () => css("--muted"),
    grid: { stroke: () => css("--grid"), width: 1 },
    ticks: { stroke: () => css("--grid"), width: 1, size: 4 },
    splits: axis.ticks ? (u) => thinned(u, axis.ticks, axis.room)
      : log ? (u) => logTicks(u.scales[isX ? "x" : "y"].min, u.scales[isX ? "x" : "y"].max) : undefined,
    filter: (u, splits) => splits,
    values: (u, splits) => splits.map((v) => (axis.format || tickText)(v)),
  };
}

/** The aligned columns that uPlot takes: each point has a row of its own. */
function columnsOf(series) {
  const rows = series.flatMap((one, i) => one.points.map((point) => [point.x, i, point.y])).sort((a, b) => a[0] - b[0]);
  return [rows.map((row) => row[0]), ...series.map((_, i) => rows.map((row) => (row[1] === i ? row[2] : null)))];
}

function createPlot(spec, holder) {
  const values = (name) => spec.series.flatMap((s) => s.points.flatMap((p) => (name === "x" ? p.x : [p.y - (p.half || 0), p.y + (p.half || 0)])));
  const scale = (axis, name) => ({ time: false, distr: axis.log ? 3 : 1, log: 10, range: () => rangeOf(values(name), axis) });
  const options = {
    width: holder.clientWidth, height: holder.clientHeight,
    legend: { show: false },
    cursor: { x: false, y: false, points: { show: false }, drag: { x: false, y: false, setScale: false } },
    scales: { x: scale(spec.x, "x"), y: scale(spec.y, "y") },
    axes: [axisOf(spec, spec.x, true), axisOf(spec, spec.y, false)],
    padding: [16, 16, 0, 0],
    series: [{}, ...spec.series.map((one) => ({
      label: one.name, show: !one.hidden, spanGaps: true, width: one.roof ? 1.5 : 2, points: { show: false },
      stroke: () => css(one.roof ? "--muted" : one.color), dash: one.roof ? (one.measured ? [] : [6, 5]) : one.dash,
      ...(one.line || one.roof ? {} : { paths: () => null }),
    }))],
    hooks: { draw: [(u) => drawPoints(u, spec)] },
  };
  return new uPlot(options, columnsOf(spec.series), holder);
}

/** What is said of a point, and the one that the cursor is on. */
function makePointer(spec, holder, readout) {
  const ring = h("div", { class: "ring", hidden: true });
  let current = null;
  const all = () => spec.series.filter((s) => !s.roof && !s.hidden && s.points.length);
  const show = (one, point) => {
    current = { one, point };
    const u = spec.u;
    u.over.append(ring);
    ring.hidden = false;
    ring.style.transform = `translate(${u.valToPos(point.x, "x")}px, ${u.valToPos(point.y, "y")}px)`;
    const note = point.note ? ` (${point.note})` : "";
    readout.replaceChildren(h("strong", null, one.name), ` ${point.label}: ${point.text}${note} `, h("a", { href: point.href }, "details"));
  };
  const near = (event) => {
    const box = spec.u.over.getBoundingClientRect();
    let best = [Infinity];
    for (const one of all()) {
      for (const point of one.points) {
        const [dx, dy] = [spec.u.valToPos(point.x, "x") - event.clientX + box.left, spec.u.valToPos(point.y, "y") - event.clientY + box.top];
        if (dx * dx + dy * dy < best[0]) best = [dx * dx + dy * dy, one, point];
      }
    }
    if (best[0] < 60 * 60 && (!current || current.point !== best[2])) show(best[1], best[2]);
  };
  const key = (event) => {
    const series = all();
    if (!series.length) return;
    if (event.key === "Enter" && current) location.hash = current.point.href.slice(1);
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -1e9, End: 1e9 }[event.key];
    const turn = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step && !turn) return;
    event.preventDefault();
    let s = current ? series.indexOf(current.one) : -1;
    if (s < 0) return show(series[0], series[0].points[0]);
    if (turn) s = (s + turn + series.length) % series.length;
    const points = series[s].points;
    const from = turn ? nearest(points, current.point.x) : points.indexOf(current.point);
    show(series[s], points[Math.max(0, Math.min(points.length - 1, from + (step || 0)))]);
  };
  holder.addEventListener("pointermove", near);
  holder.addEventListener("pointerdown", near);
  holder.addEventListener("keydown", key);
  return () => {
    if (current && !current.one.hidden) show(current.one, current.point);
    else ring.hidden = true;
  };
}

function nearest(points, x) {
  const far = points.map((p) => Math.abs(p.x - x));
  return far.indexOf(Math.min(...far));
}

function swatch(one) {
  const canvas = h("canvas", { width: 40, height: 28, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  context.strokeStyle = context.fillStyle = css(one.roof ? "--muted" : one.color);
  context.lineWidth = 3;
  context.setLineDash((one.roof ? (one.measured ? [] : [6, 5]) : one.dash).map((d) => d * 2));
  if (one.line || one.roof) {
    context.beginPath();
    context.moveTo(0, 14);
    context.lineTo(40, 14);
    context.stroke();
  }
  if (!one.roof) {
    trace(context, one.shape, 20, 14, 8);
    context.fill();
  }
  return canvas;
}

/**
 * A figure: plot, legend whose buttons hide series, what the cursor is on, and the numbers as a table.
 *
 * spec: name, title, x and y ({label, log, ticks, format}), series ([{name, line, points: [{x, y, half, label, text, href,
 * mark, note}]}], points by x), columns (heads of label and y in the table).
 */
function plotFigure(spec) {
  spec.series = spec.series.filter((one) => one.points.length);
  dress(spec.series);
  const shown = spec.series.filter((one) => !one.roof);
  const count = shown.reduce((sum, one) => sum + one.points.length, 0);
  if (!count) return h("p", { class: "empty" }, `${spec.title}: nothing is left to plot. Fewer filters show more.`);
  const readout = h("p", { class: "readout", "aria-live": "polite" }, "Point at the plot, or focus it and use the arrow keys.");
  const holder = h("div", {
    class: "plot", tabindex: "0", role: "application", "aria-roledescription": "plot",
    "aria-label": `${spec.title}: ${count} points of ${shown.length} contenders. Arrow keys move from point to point, Enter opens one. A table of them follows.`,
  });
  const again = makePointer(spec, holder, readout);
  const draw = () => {
    if (!holder.isConnected || !holder.clientWidth) return;
    if (spec.u) spec.u.destroy();
    spec.u = createPlot(spec, holder);
    again();
  };
  new ResizeObserver(draw).observe(holder);
  const legend = h("ul", { class: "legend", "aria-label": "Series" });
  const toggleAll = () => {
    const hide = shown.every((one) => !one.hidden);
    for (const one of shown) one.hidden = hide;
    fillLegend();
    legend.lastChild.firstChild.focus();
    draw();
  };
  const fillLegend = () => legend.replaceChildren(...spec.series.map((one) => h("li", null, h("button", {
    type: "button", "aria-pressed": String(!one.hidden),
    onclick: (e) => {
      one.hidden = !one.hidden;
      e.currentTarget.setAttribute("aria-pressed", String(!one.hidden));
      if (shown.length > 2) legend.lastChild.firstChild.textContent = shown.every((s) => !s.hidden) ? "Hide all" : "Show all";
      draw();
    },
  }, swatch(one), one.name))), shown.length < 3 ? "" : h("li", null,
    h("button", { type: "button", onclick: toggleAll }, shown.every((one) => !one.hidden) ? "Hide all" : "Show all")));
  fillLegend();
  spec.redraw = () => {
    fillLegend();
    draw();
  };
  PLOTS.set(spec.name, spec);
  const rows = shown.flatMap((one) => one.points.map((point) => h("tr", null,
    h("th", { scope: "row" }, one.name), h("td", null, point.href ? h("a", { href: point.href }, point.label) : point.label),
    h("td", { class: "number" }, point.text), h("td", null, point.note || ""))));
  const table = tableOf(`Data: ${spec.title}`, ["contender", ...spec.columns, "remark"], rows);
  return h("figure", { id: spec.name }, h("figcaption", null, spec.title), holder, readout, legend,
    h("details", { id: `${spec.name}-data` }, h("summary", null, `Table of the ${count} points`), table));
}
