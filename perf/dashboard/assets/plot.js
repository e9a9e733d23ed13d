// A plot: uPlot draws lines and axes, this draws points and makes them reachable without a mouse.

/** Plots of the page by their names, for whoever wants the numbers behind them. */
const PLOTS = new Map();
const SHAPES = {
  circle: "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
  square: "M-4-4h8v8h-8z",
  diamond: "M0-5.5l5.5 5.5l-5.5 5.5l-5.5-5.5z",
  cross: "M-5-2h3v-3h4v3h3v4h-3v3h-4v-3h-3z",
  worse: "M0-18l5 10h-10z",
  better: "M0 18l5-10h-10z",
};
const DASHES = [[], [6, 4], [2, 3], [9, 3, 2, 3]];

const probe = document.body.appendChild(h("i", { hidden: true }));

/** A colour of the style sheet in the theme as it is. */
function css(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

/** The look of each contender, the same on all pages: ours first, then who races most. */
const LOOKS = new Map([...groupBy(THINGS.filter((t) => t.us), (t) => t.series)]
  .sort(([, a], [, b]) => Boolean(a[0].variant) - Boolean(b[0].variant) || (whoRank(b[0]) < 2) - (whoRank(a[0]) < 2) || b.length - a.length)
  .map(([name, [t]], i) => [name, {
    color: `--c${i % 10}`, dash: DASHES[Math.floor(i / 10) % 4], shape: whoRank(t) < 2 ? "circle" : ["square", "diamond", "cross"][i % 3],
  }]));

function stamp(context, shape, color, x, y, edge) {
  context.save();
  context.translate(x, y);
  context.scale(devicePixelRatio, devicePixelRatio);
  const path = new Path2D(SHAPES[shape]);
  context.fillStyle = color;
  context.fill(path);
  // An edge in the colour of the page tells points apart that lie on each other.
  context.strokeStyle = edge;
  context.lineWidth = 1;
  context.stroke(path);
  context.restore();
}

function drawPoints(u, series) {
  const [context, px, edge] = [u.ctx, devicePixelRatio, css("--back")];
  const at = (x, y) => [u.valToPos(x, "x", true), u.valToPos(y, "y", true)];
  context.save();
  context.setLineDash([]); // uPlot leaves that of its last line
  for (const one of series.filter((s) => !s.hidden)) {
    const color = context.fillStyle = css(one.color);
    if (one.roof) {
      const [first, last] = [one.points[0], one.points.at(-1)];
      const isFlat = first.y === last.y;
      const [x, y] = isFlat ? at(last.x, last.y) : at(first.x, first.y);
      context.font = `${12 * px}px system-ui, sans-serif`;
      [context.textAlign, context.textBaseline] = isFlat ? ["right", "bottom"] : ["left", "top"];
      context.fillText(one.name, x + (isFlat ? -4 : 12) * px, y + (isFlat ? -4 : 6) * px);
      continue;
    }
    for (const point of one.points) {
      const [x, y] = at(point.x, point.y);
      if (point.half) context.fillRect(x - px / 2, at(0, point.y + point.half)[1], px, at(0, point.y - point.half)[1] - at(0, point.y + point.half)[1]);
      stamp(context, one.shape, color, x, y, edge);
      const mark = { 1: "worse", "-1": "better" }[point.mark];
      if (mark) stamp(context, mark, css(`--${mark}`), x, y, edge);
    }
  }
  context.restore();
}

/** Round numbers of a logarithmic axis, fewer of them over many decades. */
function logTicks({ min, max }) {
  const decades = Math.log10(max / min);
  const steps = decades > 4.2 ? [1] : decades > 1.2 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8];
  const powers = Array.from({ length: decades + 3 }, (_, i) => 10 ** (Math.floor(Math.log10(min)) + i));
  return powers.flatMap((power) => steps.map((step) => Number((step * power).toPrecision(3)))).filter((tick) => tick >= min && tick <= max);
}

/** Of ticks at given places those that have room; the last stays. */
function thinned(u, ticks, room) {
  let next = Infinity;
  const hasRoom = (tick) => next - u.valToPos(tick, "x") >= room && ((next = u.valToPos(tick, "x")), true);
  return ticks.toReversed().filter(hasRoom).reverse();
}

function rangeOf(values, axis) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  if (axis.log) return [low / (axis.pad || 1.3), high * (axis.pad || 1.3)];
  const margin = axis.pad ?? ((high - low) * 0.08 || Math.abs(high) * 0.1 || 1);
  return [axis.zero ? 0 : low - margin, high + margin];
}

function axisOf(axis, isX) {
  const font = "12px system-ui, sans-serif";
  const line = { stroke: () => css("--grid"), width: 1 };
  const splits = axis.ticks ? (u) => thinned(u, axis.ticks, axis.room) : axis.log ? (u) => logTicks(u.scales[isX ? "x" : "y"]) : undefined;
  const format = axis.format || ((v) => v.toLocaleString("en", { maximumSignificantDigits: 4 }));
  return {
    label: axis.label, labelSize: 22, labelGap: 0, size: isX ? 36 : 62, gap: 4, font, labelFont: font, stroke: () => css("--muted"),
    grid: line, ticks: { ...line, size: 4 }, splits, filter: (u, all) => all, values: (u, all) => all.map(format),
  };
}

function createPlot(spec, holder) {
  // Each point has a row of its own in the aligned columns that uPlot takes.
  const rows = spec.series.flatMap((one, i) => one.points.map((point) => [point.x, i, point.y])).sort((a, b) => a[0] - b[0]);
  const columns = [rows.map((row) => row[0]), ...spec.series.map((_, i) => rows.map((row) => (row[1] === i ? row[2] : null)))];
  const points = spec.series.flatMap((one) => one.points);
  const scale = (axis, values) => ({ time: false, distr: axis.log ? 3 : 1, range: () => rangeOf(values, axis) });
  return new uPlot({
    width: holder.clientWidth, height: holder.clientHeight, padding: [16, 16, 0, 0], legend: { show: false },
    cursor: { x: false, y: false, points: { show: false }, drag: { x: false, y: false, setScale: false } },
    scales: { x: scale(spec.x, points.map((p) => p.x)), y: scale(spec.y, points.flatMap((p) => [p.y - (p.half || 0), p.y + (p.half || 0)])) },
    axes: [axisOf(spec.x, true), axisOf(spec.y, false)],
    series: [{}, ...spec.series.map((one) => ({
      show: !one.hidden, spanGaps: true, width: 2, points: { show: false }, stroke: () => css(one.color), dash: one.dash,
      ...(one.line || one.roof ? {} : { paths: () => null }),
    }))],
    hooks: { draw: [(u) => drawPoints(u, spec.series)] },
  }, columns, holder);
}

/** Lets the pointer and the keyboard choose a point, and says what it is; returns what shows it again. */
function makePointer(spec, holder, readout) {
  const ring = h("div", { class: "ring", hidden: true });
  let current = null;
  const shown = () => spec.series.filter((s) => !s.roof && !s.hidden);
  const place = (point) => [spec.u.valToPos(point.x, "x"), spec.u.valToPos(point.y, "y")];
  const show = (one, point) => {
    current = { one, point };
    spec.u.over.append(ring);
    ring.hidden = false;
    ring.style.translate = place(point).map((v) => `${v}px`).join(" ");
    const note = point.note ? ` (${point.note})` : "";
    readout.replaceChildren(h("strong", null, one.name), ` ${point.label}: ${point.text}${note} `, h("a", { href: point.href }, "details"));
  };
  const near = (event) => {
    const box = spec.u.over.getBoundingClientRect();
    const far = (point) => Math.hypot(place(point)[0] - event.clientX + box.left, place(point)[1] - event.clientY + box.top);
    const all = shown().flatMap((one) => one.points.map((point) => ({ one, point, far: far(point) })));
    const best = all.reduce((a, b) => (b.far < a.far ? b : a), { far: 60 });
    if (best.point && best.point !== current?.point) show(best.one, best.point);
  };
  const key = (event) => {
    if (event.key === "Enter" && current) location.hash = current.point.href.slice(1);
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -1e9, End: 1e9, ArrowDown: 0, ArrowUp: 0 }[event.key];
    const series = shown();
    if (step === undefined || !series.length) return;
    event.preventDefault();
    const at = current ? series.indexOf(current.one) : -1;
    if (at < 0) return show(series[0], series[0].points[0]);
    const turn = { ArrowDown: 1, ArrowUp: -1 }[event.key] || 0;
    const one = series[(at + turn + series.length) % series.length];
    const far = one.points.map((p) => Math.abs(p.x - current.point.x));
    const from = turn ? far.indexOf(Math.min(...far)) : one.points.indexOf(current.point);
    show(one, one.points[Math.max(0, Math.min(one.points.length - 1, from + step))]);
  };
  holder.addEventListener("pointermove", near);
  holder.addEventListener("pointerdown", near);
  holder.addEventListener("keydown", key);
  return () => (current && !current.one.hidden ? show(current.one, current.point) : (ring.hidden = true));
}

function swatch(one) {
  const icon = h("span", { class: "swatch", style: `color: var(${one.color})` });
  const line = one.line || one.roof ? `<path d="M-14 0h28" stroke="currentColor" stroke-width="2" stroke-dasharray="${one.dash}"/>` : "";
  icon.innerHTML = `<svg viewBox="-14 -7 28 14" aria-hidden="true">${line}<path d="${one.roof ? "" : SHAPES[one.shape]}" fill="currentColor"/></svg>`;
  return icon;
}

/** Buttons that hide and show series. */
const makeLegend = (series, draw) => h("ul", { class: "legend", "aria-label": "Series" }, series.map((one) => h("li", null, h("button", {
  type: "button", "aria-pressed": "true",
  onclick: (event) => {
    one.hidden = !one.hidden;
    event.currentTarget.setAttribute("aria-pressed", String(!one.hidden));
    draw();
  },
}, swatch(one), one.name))));

/**
 * A figure: plot, legend, what the cursor is on, and the numbers as a table.
 *
 * spec: name, title, x and y ({label, log, zero, pad, ticks, room, format}), series ([{name, line, roof, points: [{x, y, half, label,
 * text, href, mark, note}]}], points by x), columns (heads of label and text in the table).
 */
function plotFigure(spec) {
  spec.series = spec.series.filter((one) => one.points.length);
  for (const one of spec.series) Object.assign(one, one.roof ? { color: "--muted", dash: one.measured ? [] : [6, 5] } : LOOKS.get(one.name) || { color: "--c0", dash: [], shape: "circle" }, one.look);
  const shown = spec.series.filter((one) => !one.roof);
  const count = shown.reduce((sum, one) => sum + one.points.length, 0);
  if (!count) return h("p", { class: "empty" }, `${spec.title}: nothing is left to plot. Fewer filters show more.`);
  const readout = h("p", { class: "readout", "aria-live": "polite" }, "Point at the plot, or focus it and use the arrow keys.");
  const holder = h("div", {
    class: "plot", tabindex: "0", role: "application", "aria-roledescription": "plot",
    "aria-label": `${spec.title}: ${count} points of ${shown.length} series. Arrow keys move from point to point, Enter opens one. A table of them follows.`,
  });
  const again = makePointer(spec, holder, readout);
  spec.redraw = () => {
    if (!holder.isConnected || !holder.clientWidth) return;
    spec.u?.destroy();
    spec.u = createPlot(spec, holder);
    again();
  };
  new ResizeObserver(spec.redraw).observe(holder);
  PLOTS.set(spec.name, spec);
  const rows = shown.flatMap((one) => one.points.map((point) => h("tr", null,
    h("th", { scope: "row" }, one.name), h("td", null, point.href ? h("a", { href: point.href }, point.label) : point.label),
    h("td", { class: "number" }, point.text), h("td", null, point.note))));
  const table = tableOf(`Data: ${spec.title}`, ["series", ...spec.columns, "remark"], rows);
  return h("figure", { id: spec.name }, h("figcaption", null, spec.title), holder, readout, makeLegend(spec.series, spec.redraw),
    h("details", { id: `${spec.name}-data` }, h("summary", null, `Table of the ${count} points`), table));
}
