// The views. Each returns a title and its contents.

const NOTHING = "No records pass the filters.";
const p = (...children) => h("p", {}, children);
const missing = (kind) => [`No such ${kind}`, link({}, "Latest numbers")];
const fields = (...children) => h("div", { className: "fields" }, children);

function latestView(entries) {
  if (!entries.length) return ["Latest numbers", NOTHING];
  return ["Latest numbers", p("Medians, ± half of the range of the repeats if it is known. The fastest number of each row is bold."),
    // In reverse order of their names, so that GPUs come first.
    [...Map.groupBy(entries, (t) => t.section)].sort(([a], [b]) => natural(b, a)).map(([section, rows]) => [h("h2", {}, section),
      [...Map.groupBy(rows, (t) => t.suite)].map(([suite, group]) => [h("h3", {}, suite), pivots(group)])])];
}

function rooflineView(entries) {
  const gpus = Map.groupBy(entries.filter((t) => t.kind === "gpu"), (t) => t.device);
  const [gpu, measured, field] = pick("gpu", "GPU", new Map([...gpus].sort(([, a], [, b]) => b.length - a.length)));
  return ["Rooflines",
    p("Rates of kernels under the roofs of the GPU. Bytes are the least that a contender must move, for operands in the form that it gets; operations are the useful ones. A roof is the highest measured rate, or else that of the data sheet (dashed). Memory is the rate of a copy: kernels that only read may pass it a little."),
    measured ? [field, rooflinePlots(gpu, measured.filter((t) => t.isRace && t.tbs))] : NOTHING];
}

function tokensView(entries) {
  const [title, group, field] = pick("group", "Case", tokenGroups(entries));
  if (!group) return ["Time against tokens", NOTHING];
  const [rate, , rateField] = pick("rate", "Rate", new Map([...RATES].filter(([, { valueOf }]) => group.some((t) => valueOf(t, group)))));
  return ["Time against tokens", fields(field, rateField), tokensPlot(title, group, rate), pivots(group)];
}

function historyView(entries) {
  const [title, group, field] = pick("entry", "Case and quantity", historyGroups(entries));
  const [, isWanted, verdictField] = pick("verdict", "Changes", new Map([["worse and better", () => true], ["worse", (c) => c.step.verdict === "worse"], ["worse, not fixed since", (c) => c.open]]));
  const changes = changesOf(entries).filter(isWanted);
  return ["History",
    p("Medians of each commit. ▲ marks a regression, ▼ an improvement: a change beyond the noise of both commits, by the rule of ", h("code", {}, "perf compare"), "."),
    group ? [field, historyPlot(title, group)] : NOTHING, h("h2", {}, `Changes (${changes.length})`), verdictField, changesTable(changes)];
}

/** All records of one case. */
function caseView() {
  const entries = ENTRIES.filter((t) => t.caseId === params.get("case"));
  if (!entries.length) return missing("case");
  const error = (t) => (t.error === 0 ? "exact" : t.error?.toExponential(1));
  const rows = entries.sort((a, b) => natural(a.section, b.section) || natural(a.measure, b.measure) || a.value - b.value).map((t) => [
    [t.contender, small(t.format)], [t.measure, small(t.section)], h("span", { title: t.value }, amount(t.value, t.unit), small(plusMinus(t))), t.tbs && short(t.tbs),
    t.tflops && short(t.tflops), error(t), t.repeats, t.commit, t.time.slice(0, 10), t.environment]);
  return [`${entries[0].suite}: ${caseText(entries[0])}`, [...historyGroups(entries.filter((t) => isChosen(t) && t.isRace))].slice(0, 1).map(([title, group]) => historyPlot(title, group)),
    tableOf("Records", ["contender", "quantity", "value", "TB/s", "TFLOP/s", "error", "repeats", "commit", "day", "environment"], rows)];
}

/** Quantities of grouped.inspect: titles and formats of numbers. */
const QUANTITIES = {
  snr_db: ["signal over noise, dB", (v) => v.toFixed(1)], saturated: ["share saturated", percent], underflow: ["share underflowing to zero", percent],
  amax: ["amax", short], rows: ["rows per expert", short], global_scale: ["global scale", (v) => v.toPrecision(3)], nonfinite: ["NaN and infinite", short],
};

/** Effects of quantization on a model: records of grouped.inspect. */
function numericsView() {
  const operandOf = (r) => `${r.layer}, ${r.role}, ${r.direction}, ${r.format}`;
  const [, runRecords, runField] = pick("run", "Run", Map.groupBy(DATA.numerics, (r) => r.run || "unnamed"));
  const [label, [key, format], field] = pick("quantity", "Quantity", new Map(Object.entries(QUANTITIES)
    .filter(([key]) => runRecords.some((r) => r[key].some((v) => v !== null))).map(([key, [title, format]]) => [title, [key, format]])));
  const ordered = runRecords.sort((a, b) => a.step - b.step);
  const [operand, records, operandField] = pick("operand", "Operand", Map.groupBy(ordered, operandOf));
  const [step, stepRecords, stepField] = pick("step", "Step", Map.groupBy(ordered.toReversed(), (r) => String(r.step)));
  const series = records[0][key].map((_, expert) => ({
    name: `expert ${expert}`, line: true, points: records.filter((r) => r[key][expert] !== null).map((r) => ({
      x: r.step, y: r[key][expert], label: `step ${r.step}`, text: format(r[key][expert]), href: `#${new URLSearchParams({ ...Object.fromEntries(params), step: r.step })}`,
    })),
  }));
  const z = stepRecords.map((r) => r[key]);
  const experts = Array.from({ length: Math.max(...z.map((row) => row.length)) }, (_, expert) => expert);
  const map = { type: "heatmap", z, x: experts, y: stepRecords.map(operandOf), text: z.map((row) => row.map((v) => (v === null ? "unknown" : format(v)))), texttemplate: "%{text}", colorscale: "Blues", reversescale: true };
  return ["Numerics", p("Effects of quantization on the operands of each layer, recorded by ", h("code", {}, "grouped.inspect"), "."), fields(operandField, field, runField),
    figure(`${operand}: ${label}`, series, ["step", label], { label: "step" }, { label }), stepField,
    plotOf(`${label}, step ${step}`, [map], { isMap: true, xaxis: { label: "expert", type: "category" } })];
}

const VIEWS = { latest: latestView, tokens: tokensView, rooflines: rooflineView, history: historyView, ...(DATA.numerics.length && { numerics: numericsView }), case: caseView };

/** Draw the view of the address. */
function render() {
  const [main, status] = ["main", "[role=status]"].map((name) => document.querySelector(name));
  const focused = document.activeElement.id;
  const name = params.get("view") || "latest";
  const entries = ENTRIES.filter(isChosen);
  document.querySelectorAll(".plot").forEach((plot) => window.Plotly?.purge(plot));
  const [title, ...body] = Object.hasOwn(VIEWS, name) ? VIEWS[name](entries) : missing("page");
  main.replaceChildren(h("h1", {}, title), ...body.flat(Infinity).filter(Boolean));
  document.title = `${title} · grouped-kernels`;
  document.querySelector("nav").replaceChildren("grouped-kernels", ...Object.keys(VIEWS).slice(0, -1).map((view) => Object.assign(link({ view }, view), { ariaCurrent: view === name ? "page" : null })));
  for (const id in FILTERS) document.getElementById(id).value = params.get(id) || "";
  status.textContent = `${entries.length} of ${ENTRIES.length} entries are shown.`;
  document.getElementById(focused)?.focus();
}

function go() {
  params = new URLSearchParams(location.hash.slice(1));
  render();
}

const { text, ...selects } = FILTERS;
document.querySelector("form").append(...Object.entries(selects).map(([id, label]) => selectOf(id, label, ["", ...unique(ENTRIES.flatMap((t) => t[id])).filter(Boolean).sort(natural)])),
  h("label", {}, text, h("input", { id: "text", type: "search", placeholder: "DeepSeek wgrad", oninput: choose })), h("a", { href: "#" }, "Clear"));
addEventListener("hashchange", go);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
go();
