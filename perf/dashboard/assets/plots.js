// Plots and their points; plotly draws them.

let loading = null;
/** Load plotly with the first plot: it takes a second or two. */
const load = async () => document.head.append(h("script", { textContent: await unpacked("plotly").text() }));

/** The rank of each contender, which gives its color on all pages: this package first, then the most frequent. */
const RANKS = new Map([...Map.groupBy(ENTRIES.filter((t) => t.us), (t) => t.series)]
  .sort(([, [a, ...as]], [, [b, ...bs]]) => Boolean(a.variant) - Boolean(b.variant) || (contenderRank(b) < 2) - (contenderRank(a) < 2) || bs.length - as.length)
  .map(([name], i) => [name, i]));
const COLORS = ["#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"];
const SYMBOLS = ["circle", "square", "diamond", "cross", "x"];
const MARKS = { worse: ["triangle-up", "#d92d20"], better: ["triangle-down", "#16a34a"] };

/** An element into which plotly draws once it is in the page. */
function plotOf(title, traces, layout) {
  const plot = h("div", { className: "plot", ariaLabel: title });
  const axis = ({ label, ...more } = {}) => ({ gridcolor: "#8884", zerolinecolor: "#8886", automargin: true, title: { text: label, standoff: 14 }, ...more });
  queueMicrotask(async () => {
    await (loading ??= load());
    if (!plot.isConnected) return;
    await Plotly.newPlot(plot, traces, {
      ...layout, title: { text: title, font: { size: 14 }, x: 0 }, font: { color: getComputedStyle(document.body).color }, hovermode: "closest", showlegend: !layout.isMap,
      paper_bgcolor: "transparent", plot_bgcolor: "transparent", xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis),
      legend: { orientation: "h", yref: "container", y: 0 }, margin: { t: 50, r: 20 }, modebar: { bgcolor: "transparent" },
    }, { responsive: true, displaylogo: false });
    plot.on("plotly_click", ({ points: [{ customdata }] }) => customdata && (location.hash = customdata));
  });
  return plot;
}

/**
 * A plot of series and a table of its points.
 *
 * series: [{name, line, roof, points: [{x, y, half, label, text, href, mark, note}]}], points by x, "half" is half of an error bar; columns: heads of label and text.
 */
function figure(title, series, columns, xaxis, yaxis) {
  const shown = series.filter((line) => !line.roof);
  const rows = shown.flatMap((line) => line.points.map((p) => [line.name, h("a", { href: p.href }, p.label), p.text, p.note]));
  if (!rows.length) return h("p", {}, `${title}: no points pass the filters.`);
  const traces = series.map(({ name, line, roof, points }, i) => {
    const each = (get) => points.map(get);
    const index = RANKS.get(name) ?? i;
    const color = roof ? "#888" : COLORS[index % 10];
    return {
      name, x: each((p) => p.x), y: each((p) => p.y), mode: roof ? "lines" : line ? "lines+markers" : "markers",
      text: each((p) => [p.label, p.text, p.note].filter(Boolean).join("<br>")), hovertemplate: roof ? "" : "%{text}", customdata: each((p) => p.href),
      line: { color, dash: roof === "published" ? "dash" : "solid" }, error_y: { array: each((p) => p.half || 0), visible: points.some((p) => p.half), thickness: 1 },
      marker: { opacity: 1, size: each((p) => (p.mark in MARKS ? 16 : 9)), symbol: each((p) => MARKS[p.mark]?.[0] || SYMBOLS[Math.floor(index / 10) % 5]), color: each((p) => MARKS[p.mark]?.[1] || color) },
    };
  });
  return [plotOf(title, traces, { xaxis, yaxis }), h("details", {}, h("summary", {}, `Table of the ${rows.length} points`), tableOf(title, ["series", ...columns, "remark"], rows))];
}

/** Groups to draw over tokens per expert: cases that differ only in their rows. */
function tokenGroups(entries) {
  const groups = Map.groupBy(entries.filter((t) => t.isRace && t.tokens), (t) => `${t.suite} on ${t.device}: ${caseText(t, (name) => name !== "rows")}: ${t.protocol}`);
  return new Map([...groups].filter(([, group]) => unique(group.map((t) => t.tokens)).length > 1)
    .sort(([, a], [, b]) => (b[0].kind === "gpu") - (a[0].kind === "gpu") || b.length - a.length));
}

const baseOf = (t, group) => group.find((o) => o.contender === "torch" && /^(bf16|bfloat16)$/i.test(o.format) && o.caseId === t.caseId);

const RATES = new Map([
  ["time, µs", { unit: "us", valueOf: (t) => t.us, note: remark }],
  ["speed relative to torch in bf16", {
    unit: "×", valueOf: (t, group) => baseOf(t, group)?.us / t.us, note: (t, group) => `measured at ${t.commit}, torch at ${baseOf(t, group).commit}`,
  }],
]);

/** Series of entries, with a point per entry. */
const seriesOf = (entries, line, pointOf) => [...Map.groupBy(entries.toSorted(contenderOrder), (t) => t.series)].map(([name, group]) => ({
  name, line, points: group.map((t) => ({ href: address({ view: "case", case: t.caseId }), ...pointOf(t) })).sort((a, b) => a.x - b.x),
}));

function tokensPlot(title, group, label) {
  const { unit, valueOf, note } = RATES.get(label);
  const entries = group.filter((t) => valueOf(t, group));
  const series = seriesOf(entries, true, (t) => ({
    x: t.tokens, y: valueOf(t, group), half: unit === "us" ? (t.spread || 0) / 2 * (t.us / t.value) : 0, label: tokensText(t), text: amount(valueOf(t, group), unit), note: note(t, group),
  }));
  const tickvals = unique(entries.map((t) => t.tokens));
  return figure(title, series, ["tokens per expert", label], { label: "tokens per expert", type: "log", tickvals, ticktext: tickvals.map(short) },
    { label, ...(unit === "us" ? { type: "log" } : { rangemode: "tozero" }) });
}

const roofLine = ([, name, rate, isMeasured], unit, points) => {
  const roof = isMeasured ? "measured" : "published";
  return { name: `${name} ${short(rate)} ${unit}, ${roof}`, roof, points: points.map(([x, y]) => ({ x, y })) };
};

/** Rooflines of a GPU: products over their arithmetic intensity, and memory-bound kernels over their size. */
function rooflinePlots(gpu, entries) {
  const [products, moves] = [entries.filter((t) => t.tflops), entries.filter((t) => !t.flops)];
  const [intensity, size] = [(t) => t.flops / t.bytes, (t) => t.bytes / 1e6];
  const memory = DATA.roofs[gpu].find(([kind]) => kind === "copy");
  const dense = DATA.roofs[gpu].filter(([kind]) => kind !== "copy");
  const point = (t) => ({ label: caseText(t), note: `${amount(t.value, t.unit)}, ${remark(t)}` });
  const roofline = seriesOf(products, false, (t) => ({ ...point(t), x: intensity(t), y: t.tflops, text: `${short(intensity(t))} FLOP/B` }));
  const bandwidth = seriesOf(moves, false, (t) => ({ ...point(t), x: size(t), y: t.tbs, text: `${short(t.tbs)} TB/s` }));
  if (products.length && memory && dense.length) {
    const ridge = ([, , rate]) => rate / memory[2];
    const [low, top] = [Math.min(...products.map(intensity)), Math.max(...dense.map(ridge))];
    const high = 1.5 * Math.max(top, ...products.map(intensity));
    roofline.push(roofLine(memory, "TB/s", [low, top].map((x) => [x, x * memory[2]])), ...dense.map((roof) => roofLine(roof, "TFLOP/s", [ridge(roof), high].map((x) => [x, roof[2]]))));
  }
  if (moves.length && memory) bandwidth.push(roofLine(memory, "TB/s", [Math.min(...moves.map(size)) / 1.05, Math.max(...moves.map(size)) * 1.05].map((x) => [x, memory[2]])));
  return [
    figure(`Products on ${gpu}: TFLOP/s over FLOP per byte`, roofline, ["case", "intensity"], { label: "useful FLOP / least byte", type: "log" }, { label: "TFLOP/s", type: "log" }),
    figure(`Memory-bound kernels on ${gpu}: TB/s of the least bytes`, bandwidth, ["case", "rate"], { label: "least bytes, MB", type: "log" }, { label: "TB/s", rangemode: "tozero" }),
  ];
}

/** Groups of histories that share a plot: contenders of one case and quantity. */
function historyGroups(entries) {
  const groups = Map.groupBy(entries.filter((t) => t.history), (t) => `${t.suite} on ${t.device}: ${caseText(t)}: ${t.measure}`);
  const longest = (group) => Math.max(...group.map((t) => t.history.length));
  return new Map([...groups].sort(([, a], [, b]) => b[0].isRace - a[0].isRace || longest(b) - longest(a)));
}

function historyPlot(title, entries) {
  const commits = unique(entries.flatMap((t) => t.history).sort((a, b) => natural(a.time, b.time)).map((step) => step.commit));
  const [{ unit, quantity }] = entries;
  const series = entries.toSorted(contenderOrder).map((t) => ({
    name: t.series, line: true,
    points: t.history.map((step) => ({
      x: step.commit, y: step.value, half: (step.spread || 0) / 2, mark: step.verdict, text: amount(step.value, unit), href: address({ view: "case", case: t.caseId }),
      label: `${step.commit}, ${step.time.slice(0, 10)}`,
      note: step.verdict in MARKS ? `${step.verdict} by ${percent(Math.abs(step.worse_by))}, noise ${percent(step.noise)}` : "",
    })),
  }));
  const label = unit === "1" ? quantity : `${quantity}, ${unit.replace("us", "µs")}`;
  const isPositive = series.every((s) => s.points.every((p) => p.y > p.half));
  return figure(title, series, ["commit", label], { label: "commit", type: "category", categoryarray: commits }, { label, type: isPositive ? "log" : "linear" });
}

/** Steps that are worse or better, the newest first; "open" if no step came later. */
const changesOf = (entries) => entries.filter((t) => t.history).flatMap((entry) => entry.history.map((step, i, steps) => ({
  entry, step, before: steps[i - 1], open: step.verdict === "worse" && i + 1 === steps.length,
}))).filter((c) => c.step.verdict in MARKS).sort((a, b) => natural(b.step.time, a.step.time) || Math.abs(b.step.worse_by) - Math.abs(a.step.worse_by));
