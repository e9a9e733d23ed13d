// The views: each gives a title and what stands below it.

const NOTHING = "Nothing that was measured passes the filters.";
const p = (...children) => h("p", {}, children);
const missing = (what) => [`No such ${what}`, link({}, "Latest numbers")];
const fields = (...children) => h("div", { className: "fields" }, children);

function latestView(things) {
  if (!things.length) return ["Latest numbers", NOTHING];
  return ["Latest numbers", p("Medians, ± half of the range of the repeats where it was kept. Of each row the fastest is bold."),
    // GPUs are first, by their name.
    [...Map.groupBy(things, (t) => t.where)].sort(([a], [b]) => natural(b, a)).map(([where, here]) => [h("h2", {}, where),
      [...Map.groupBy(here, (t) => t.suite)].map(([suite, group]) => [h("h3", {}, suite), pivots(group)])])];
}

function rooflineView(things) {
  const gpus = Map.groupBy(things.filter((t) => t.kind === "gpu"), (t) => t.place);
  const [gpu, found, field] = pick("gpu", "GPU", new Map([...gpus].sort(([, a], [, b]) => b.length - a.length)));
  return ["Rooflines",
    p("How near kernels come to what the GPU can do. Bytes are the least that a contender must move, of operands in the form in which it has them; operations are the useful ones. Roofs are the highest that runs measured, or else those of the data sheet (dashed). Memory is the rate of a copy: what only reads may pass it a little."),
    found ? [field, rooflinePlots(gpu, found.filter((t) => t.isRace && t.tbs))] : NOTHING];
}

function tokensView(things) {
  const [title, group, field] = pick("group", "Case", tokenGroups(things));
  if (!group) return ["Time against tokens", NOTHING];
  const [rate, , rateField] = pick("rate", "Rate", new Map([...RATES].filter(([, { of }]) => group.some((t) => of(t, group)))));
  return ["Time against tokens", fields(field, rateField), tokensPlot(title, group, rate), pivots(group)];
}

function historyView(things) {
  const [title, group, field] = pick("thing", "What", historyGroups(things));
  const [, isWanted, verdictField] = pick("verdict", "Changes", new Map([["worse and better", () => true], ["worse", (c) => c.step.verdict === "worse"], ["worse, not mended since", (c) => c.open]]));
  const changes = changesOf(things).filter(isWanted);
  return ["History",
    p("Medians of each commit. ▲ marks a regression, ▼ an improvement: a change beyond the noise of both commits, as ", h("code", {}, "perf compare"), " reckons it."),
    group ? [field, historyPlot(title, group)] : NOTHING, h("h2", {}, `Changes (${changes.length})`), verdictField, changesTable(changes)];
}

/** All that is known of one case. */
function caseView() {
  const things = THINGS.filter((t) => t.caseId === params.get("case"));
  if (!things.length) return missing("case");
  const error = (t) => (t.error === 0 ? "exact" : t.error?.toExponential(1));
  const rows = things.sort((a, b) => natural(a.where, b.where) || natural(a.measure, b.measure) || a.value - b.value).map((t) => [
    [t.contender, small(t.format)], [t.measure, small(t.where)], h("span", { title: t.value }, amount(t.value, t.unit), small(plusMinus(t))), t.tbs && short(t.tbs),
    t.tflops && short(t.tflops), error(t), t.repeats, t.commit, t.time.slice(0, 10), t.with]);
  return [`${things[0].suite}: ${caseText(things[0])}`, [...historyGroups(things.filter((t) => isChosen(t) && t.isRace))].slice(0, 1).map(([title, group]) => historyPlot(title, group)),
    tableOf("Records", ["contender", "quantity", "value", "TB/s", "TFLOP/s", "error", "repeats", "commit", "day", "with"], rows)];
}

/** Quantities of grouped.inspect.inspect_quantization: titles and how their numbers are written. */
const QUANTITIES = {
  snr_db: ["signal over noise, dB", (v) => v.toFixed(1)], saturated: ["share saturated", percent], underflow: ["share that underflows to zero", percent],
  amax: ["amax", short], rows: ["rows: load of an expert", short], second_level: ["second-level scale", (v) => v.toPrecision(3)], nonfinite: ["NaN and infinite", short],
};

/** What quantization does to the numbers of a model: records of grouped.inspect.inspect_quantization. */
function numericsView() {
  const operandOf = (r) => `${r.layer}, ${r.role}, ${r.direction}, ${r.format}`;
  const [, ofRun, runField] = pick("run", "Run", Map.groupBy(DATA.numerics, (r) => r.run || "unnamed"));
  const [label, [key, format], field] = pick("quantity", "Quantity", new Map(Object.entries(QUANTITIES)
    .filter(([key]) => ofRun.some((r) => r[key].some((v) => v !== null))).map(([key, [title, format]]) => [title, [key, format]])));
  const found = ofRun.sort((a, b) => a.step - b.step);
  const [operand, records, operandField] = pick("operand", "Operand", Map.groupBy(found, operandOf));
  const [step, ofStep, stepField] = pick("step", "Step", Map.groupBy(found.toReversed(), (r) => String(r.step)));
  const series = records[0][key].map((_, expert) => ({
    name: `expert ${expert}`, line: true, points: records.filter((r) => r[key][expert] !== null).map((r) => ({
      x: r.step, y: r[key][expert], label: `step ${r.step}`, text: format(r[key][expert]), href: `#${new URLSearchParams({ ...Object.fromEntries(params), step: r.step })}`,
    })),
  }));
  const z = ofStep.map((r) => r[key]);
  const experts = Array.from({ length: Math.max(...z.map((row) => row.length)) }, (_, expert) => expert);
  const map = { type: "heatmap", z, x: experts, y: ofStep.map(operandOf), text: z.map((row) => row.map((v) => (v === null ? "unknown" : format(v)))), texttemplate: "%{text}", colorscale: "Blues", reversescale: true };
  return ["Numerics", p("What quantization does to the operands of each layer, as ", h("code", {}, "grouped.inspect.inspect_quantization"), " saw it."), fields(operandField, field, runField),
    figure(`${operand}: ${label}`, series, ["step", label], { label: "step" }, { label }), stepField,
    plotOf(`${label}, step ${step}`, [map], { isMap: true, xaxis: { label: "expert", type: "category" } })];
}

const VIEWS = { latest: latestView, tokens: tokensView, rooflines: rooflineView, history: historyView, ...(DATA.numerics.length && { numerics: numericsView }), case: caseView };

/** Draw the view of the address. */
function render() {
  const [main, status] = ["main", "[role=status]"].map((name) => document.querySelector(name));
  const focused = document.activeElement.id;
  const name = params.get("view") || "latest";
  const things = THINGS.filter(isChosen);
  document.querySelectorAll(".plot").forEach((plot) => window.Plotly?.purge(plot));
  const [title, ...body] = Object.hasOwn(VIEWS, name) ? VIEWS[name](things) : missing("page");
  main.replaceChildren(h("h1", {}, title), ...body.flat(Infinity).filter(Boolean));
  document.title = `${title} · grouped-kernels`;
  document.querySelector("nav").replaceChildren("grouped-kernels", ...Object.keys(VIEWS).slice(0, -1).map((view) => Object.assign(link({ view }, view), { ariaCurrent: view === name ? "page" : null })));
  for (const id in FILTERS) document.getElementById(id).value = params.get(id) || "";
  status.textContent = `${things.length} of ${THINGS.length} measured things are shown.`;
  document.getElementById(focused)?.focus();
}

function go() {
  params = new URLSearchParams(location.hash.slice(1));
  render();
}

const { text, ...selects } = FILTERS;
document.querySelector("form").append(...Object.entries(selects).map(([id, label]) => selectOf(id, label, ["", ...unique(THINGS.flatMap((t) => t[id])).filter(Boolean).sort(natural)])),
  h("label", {}, text, h("input", { id: "text", type: "search", placeholder: "DeepSeek wgrad", oninput: choose })), h("a", { href: "#" }, "Clear"));
addEventListener("hashchange", go);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
go();
