// The views: each gives a title and what stands below it.

function picker(id, label, groups, name = id) {
  const wanted = groups.find((g) => g.key === params.get(name)) || groups[0];
  const options = groups.map((g) => h("option", { value: g.key, selected: g === wanted }, g.title));
  const field = h("div", { class: "field wide-field" }, h("label", { for: id }, label),
    h("select", { id, onchange: (e) => choose(name, e.target.value) }, options));
  return [wanted, field];
}

const nothing = () => h("p", { class: "empty" }, "Nothing that was measured passes the filters.");

function tile(value, label, href) {
  return h("li", null, h("a", { href }, h("strong", null, String(value)), h("span", null, label)));
}

function overview() {
  const things = chosen();
  const gpus = unique(THINGS.filter((t) => t.kind === "gpu").map((t) => t.place));
  const [group] = tokenGroups(things.filter((t) => t.kind === "gpu"));
  const open = changesOf(things, 1).filter((c) => c.open);
  const suites = [...groupBy(things, (t) => `${t.where}|${t.suite}`).values()].sort((a, b) => natural(b[0].kind, a[0].kind) || natural(a[0].place, b[0].place) || suiteOrder(a[0].suite, b[0].suite));
  const rows = suites.map((group) => {
    const newest = group.reduce((a, b) => (a.latest.run.time > b.latest.run.time ? a : b)).latest.run;
    return h("tr", null, h("th", { scope: "row" }, h("a", { href: address("latest", { suite: group[0].suite, place: group[0].where }) }, group[0].suite)),
      h("td", null, group[0].place), h("td", null, KINDS[group[0].kind]), h("td", { class: "number" }, group.length),
      h("td", null, newest.commit), h("td", { class: "day" }, dayOf(newest.time)));
  });
  return ["Measurements", [
    h("ul", { class: "tiles" },
      tile(DATA.count, "records", address("latest")),
      tile(KERNELS.length, "kernels of ours", address("kernels")),
      tile(gpus.length, gpus.length === 1 ? gpus[0] : "GPUs", address("roofline")),
      tile(DATA.commits.length, "commits", address("history")),
      tile(open.length, "regressions not mended since", address("history", { verdict: "open" }))),
    group ? [h("h2", null, "Over tokens an expert"), tokensPlot("overview-tokens", group, group.things.some((t) => speedOf(t, group)) ? "speed" : "time"),
      h("p", null, h("a", { href: address("tokens") }, "Times, other models and layers"))] : nothing(),
    h("h2", null, "What was measured"),
    tableOf("Suites on each machine", ["suite", "on", "kind", "things", "newest commit", "on the day"], rows),
  ]];
}

function latestView() {
  const things = chosen();
  const made = [];
  for (const [kind, title] of Object.entries(KINDS)) {
    for (const [place, here] of groupBy(things.filter((t) => t.kind === kind), (t) => t.place)) {
      made.push(h("h2", null, `${title}: ${place || "unknown machine"}`));
      for (const [suite, group] of [...groupBy(here, (t) => t.suite)].sort(([a], [b]) => suiteOrder(a, b))) {
        const id = `quantity-${kind}-${place}-${suite}`.replace(/[^\w]+/g, "-");
        made.push(h("section", { "aria-label": `${suite} on ${place}`, class: "suite" }, h("h3", null, suite),
          RACES.has(suite) ? raceTables(group, id) : profileTables(group)));
      }
    }
  }
  return ["Latest numbers", [
    h("p", null, "Medians, ± half of the range of the repeats where it was kept. Of each row the fastest is bold; bars are relative to it."),
    made.length ? made : nothing(),
  ]];
}

function rooflineView() {
  const things = chosen().filter((t) => t.kind === "gpu");
  const gpus = unique(things.map((t) => t.place)).sort(natural).map((place) => ({ key: place, title: place }));
  if (!gpus.length) return ["Rooflines", nothing()];
  const [gpu, field] = picker("gpu", "GPU", gpus);
  return ["Rooflines", [
    h("p", null, "How near kernels come to what the GPU can do. Bytes are the least that a task must move, operations the useful ones. Roofs are the highest that runs measured, or else those of the data sheet (dashed). Memory is the rate of a copy: what only reads may pass it a little."),
    gpus.length > 1 ? field : null, rooflinePlot(gpu.key, things), bandwidthPlot(gpu.key, things),
  ]];
}

function tokensView() {
  const groups = tokenGroups(chosen());
  if (!groups.length) return ["Time against tokens", nothing()];
  const [group, field] = picker("case", "Case", groups);
  const metrics = Object.entries(RATES).filter(([, rate]) => group.things.some((t) => rate.of(t, group))).map(([key, rate]) => ({ key, title: rate.label }));
  const [metric, metricField] = picker("rate", "Rate", metrics);
  return ["Time against tokens", [h("div", { class: "fields" }, field, metricField), tokensPlot("tokens", group, metric.key),
    h("h2", null, "As a table"), raceTable(group.title, group.things)]];
}

function historyView() {
  const things = chosen();
  const groups = historyGroups(things);
  if (!groups.length) return ["History", nothing()];
  const [group, field] = picker("thing", "What", groups);
  const verdicts = [["", "worse and better"], ["worse", "worse"], ["better", "better"], ["open", "worse, not mended since"]];
  const [verdict, verdictField] = picker("verdict", "Changes", verdicts.map(([key, title]) => ({ key, title })));
  const sign = { worse: 1, open: 1, better: -1 }[verdict.key] || 0;
  const changes = changesOf(things, sign).filter((c) => verdict.key !== "open" || c.open);
  const most = 200;
  return ["History", [
    h("p", null, "Medians of each commit. ▲ marks a regression, ▼ an improvement: a change beyond the noise of both commits, as ", h("code", null, "perf compare"), " reckons it."),
    field, historyPlot("history", group),
    h("h2", null, `Changes (${changes.length})`), verdictField,
    changes.length ? changesTable("Changes from commit to commit", changes.slice(0, most)) : h("p", { class: "empty" }, "None."),
    changes.length > most ? h("p", null, `The ${most} newest of ${changes.length} are shown. Filters choose.`) : null,
  ]];
}

function kernelsView() {
  const kernels = KERNELS.map((kernel) => ({ kernel, things: chosen(kernel.things) })).filter((k) => k.things.length);
  const rows = kernels.sort((a, b) => natural(a.kernel.title, b.kernel.title)).map(({ kernel, things }) => {
    const places = (kind) => unique(things.filter((t) => t.kind === kind).map((t) => t.place)).sort(natural).join("; ") || "–";
    return h("tr", null, h("th", { scope: "row" }, h("a", { href: address(`kernel/${kernel.slug}`) }, kernel.title)),
      h("td", null, places("emulator")), h("td", null, places("gpu")), h("td", { class: "number" }, things.length));
  });
  return ["Kernels", rows.length ? tableOf("Kernels", ["kernel", "counted for", "timed on", "things"], rows) : nothing()];
}

/** A count, and beside it what it is of an element or of the least. */
function countCell(thing) {
  if (!thing) return h("td", { class: "number none" }, "–", said("not counted"));
  const { value, bytes, flops } = thing.latest;
  const elements = thing.case.op ? thing.case.rows * thing.case.cols : 0;
  let beside = "";
  if (thing.what === "MMA operations" && flops) beside = `${short(value / flops)} × useful`;
  else if (/^bytes /.test(thing.what) && bytes && value) beside = `${percent(value / bytes)} of the least bytes`;
  else if (elements && value) beside = `${short(value / elements)} an element`;
  return h("td", { class: "number", title: value }, compact(value), h("small", null, beside));
}

/** Counts of a kernel, and of peers in the same cases: a column for each. */
function countsTable(things) {
  const columns = [...groupBy(things, (t) => `${t.place}|${t.caseId}|${t.series}`).values()];
  columns.sort(([a], [b]) => natural(a.place, b.place) || natural(caseText(a.case), caseText(b.case)) || contenderOrder(a, b));
  const whats = unique(things.map((t) => t.what)).sort(whatOrder);
  const heads = columns.map(([t]) => [t.contender, h("small", null, `${t.place}; ${caseText(t.case, Object.keys(t.case).filter((n) => !["op", "product", "directions", "amax", "model", "layer"].includes(n)))}`)]);
  const rows = whats.map((what) => h("tr", null, h("th", { scope: "row" }, what), columns.map((c) => countCell(c.find((t) => t.what === what)))));
  return tableOf("Counts of the emulator", ["", ...heads], rows, { class: "wide numeric" });
}

function kernelView(slug) {
  const kernel = KERNELS.find((k) => k.slug === slug);
  if (!kernel) return ["No such kernel", h("p", null, h("a", { href: address("kernels") }, "All kernels"))];
  const own = new Set(kernel.things);
  const cases = new Set(kernel.things.map((t) => `${t.where}|${t.caseId}`));
  const rivals = THINGS.filter((t) => !t.contender.startsWith("ours") && cases.has(`${t.where}|${t.caseId}`));
  const things = chosen([...kernel.things, ...rivals]);
  const counted = things.filter((t) => t.kind === "emulator");
  const [group] = tokenGroups(things.filter((t) => t.kind === "gpu"));
  const changes = changesOf(things.filter((t) => own.has(t)));
  const sections = [];
  if (counted.length) {
    sections.push(h("h2", null, "Counts of the emulator"), h("p", null, "Instructions are of PTX. They do not vary between runs, and CI fails if one grows by more than 2 %."), countsTable(counted));
  }
  if (group) sections.push(h("h2", null, "Time against tokens"), tokensPlot("kernel-tokens", group));
  for (const kind of ["gpu", "cpu"]) {
    for (const [where, timed] of groupBy(things.filter((t) => t.kind === kind && isRace(t)), (t) => `${t.suite} on ${t.place}`)) {
      sections.push(h("h2", null, `${KINDS[kind]}: ${where}`), raceTables(timed, `quantity-${kind}-${where}`.replace(/[^\w]+/g, "-")));
    }
  }
  if (changes.length) sections.push(h("h2", null, "Changes"), changesTable("Changes of this kernel from commit to commit", changes.slice(0, 50)));
  return [kernel.title, [h("p", null, h("a", { href: address("kernels") }, "All kernels")), sections.length ? sections : nothing()]];
}

function provenance(thing) {
  const { run, sm, draw } = thing.latest;
  const versions = Object.entries(run.versions || {}).map(([name, version]) => `${name} ${version}`);
  const gpu = [run.driver && `driver ${run.driver}`, sm && `${Math.round(sm)} MHz`, draw && `${Math.round(draw)} W`];
  return [...versions, ...gpu, run.origin !== "run" && run.origin, run.note].filter(Boolean).join(", ");
}

function caseView(id) {
  const all = THINGS.filter((t) => t.caseId === Number(id));
  if (!all.length) return ["No such case", h("p", null, h("a", { href: address("latest") }, "Latest numbers"))];
  const sections = [];
  const groups = [...groupBy(all, (t) => `${KINDS[t.kind]}: ${t.suite} on ${t.place}: ${quantityOf(t)}`)];
  groups.sort((a, b) => quantityRank(a[1][0]) - quantityRank(b[1][0]));
  for (const [title, things] of groups) {
    const rows = things.sort((a, b) => a.latest.value - b.latest.value).map((t) => h("tr", null,
      h("th", { scope: "row" }, t.contender, h("small", null, t.format)),
      h("td", { class: "number", title: t.latest.value }, amount(t.latest.value, t.unit), h("small", null, plusMinus(t))),
      h("td", { class: "number" }, t.latest.tbs ? short(t.latest.tbs) : ""), h("td", { class: "number" }, t.latest.tflops ? short(t.latest.tflops) : ""),
      h("td", { class: "number" }, t.latest.error === null || t.latest.error === undefined ? "" : t.latest.error === 0 ? "exact" : t.latest.error.toExponential(1)),
      h("td", { class: "number" }, t.latest.repeats || ""), h("td", null, t.latest.run.commit), h("td", { class: "day" }, dayOf(t.latest.run.time)),
      h("td", { class: "note" }, provenance(t))));
    sections.push(h("h2", null, title), tableOf(title, ["contender", "value", "TB/s", "TFLOP/s", "error", "repeats", "commit", "day", "with"], rows, { class: "wide" }));
  }
  const [group] = historyGroups(all.filter((t) => isChosen(t) && isRace(t)));
  return [`${all[0].suite}: ${caseText(all[0].case)}`, [group ? [h("h2", null, "History"), historyPlot("case-history", group)] : null, sections]];
}

const VIEWS = {
  "": ["Overview", overview],
  latest: ["Latest", latestView],
  tokens: ["Tokens", tokensView],
  roofline: ["Rooflines", rooflineView],
  history: ["History", historyView],
  kernels: ["Kernels", kernelsView],
  kernel: [null, kernelView],
  case: [null, caseView],
};
