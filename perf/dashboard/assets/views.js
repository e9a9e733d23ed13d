// The views: each gives a title and what stands below it.

/** A choice of this view among groups with a key, and a title if that is another: what was chosen, and the control. */
function picker(id, label, groups) {
	const wanted = groups.find((g) => g.key === params.get(id)) || groups[0];
	return [wanted, selectField(id, label, { "": groups.map((g) => [g.key, g.title ?? g.key]) }, wanted.key, (value) => choose(id, value))];
}

const nothing = () => h("p", { class: "empty" }, "Nothing that was measured passes the filters.");
const section = (title, ...content) => [h("h2", null, title), content];
const missing = (what, path, text) => [`No such ${what}`, p(link(path, text))];

function latestView() {
	const things = chosen();
	const places = Object.entries(KINDS).flatMap(([kind, title]) => [...groupBy(things.filter((t) => t.kind === kind), (t) => t.place)].map(([place, here]) =>
		section(`${title}: ${place || "unknown machine"}`, [...groupBy(here, (t) => t.suite)].sort(([a], [b]) => suiteOrder(a, b)).map(([suite, group]) =>
			h("section", { "aria-label": `${suite} on ${place}` }, h("h3", null, suite),
				suite in RACES ? raceTables(group, `${kind}-${place}-${suite}`) : profileTables(group))))));
	return ["Latest numbers", p("Medians, ± half of the range of the repeats where it was kept. Of each row the fastest is bold."),
		places.length ? places : nothing()];
}

function rooflineView() {
	const things = chosen().filter((t) => t.kind === "gpu");
	const gpus = [...groupBy(things, (t) => t.place)].sort((a, b) => b[1].length - a[1].length).map(([key]) => ({ key }));
	if (!gpus.length) return ["Rooflines", nothing()];
	const [gpu, field] = picker("gpu", "GPU", gpus);
	return ["Rooflines",
		p("How near kernels come to what the GPU can do. Bytes are the least that a task must move, operations the useful ones. Roofs are the highest that runs measured, or else those of the data sheet (dashed). Memory is the rate of a copy: what only reads may pass it a little."),
		gpus.length > 1 && field, rooflinePlots(gpu.key, things.filter((t) => t.isRace && t.tbs && t.place === gpu.key))];
}

function tokensView() {
	const groups = tokenGroups(chosen());
	if (!groups.length) return ["Time against tokens", nothing()];
	const [group, field] = picker("case", "Case", groups);
	const [metric, rate] = picker("rate", "Rate", Object.keys(RATES).filter((key) => group.things.some((t) => RATES[key].of(t, group))).map((key) => ({ key, title: RATES[key].label })));
	return ["Time against tokens", h("div", { class: "fields" }, field, rate), tokensPlot("tokens", group, metric.key),
		section("As a table", raceTable(group.key, group.things))];
}

function historyView() {
	const groups = historyGroups(chosen());
	if (!groups.length) return ["History", nothing()];
	const [group, field] = picker("thing", "What", groups);
	const wanted = { "worse and better": () => true, worse: (c) => c.step.sign > 0, "worse, not mended since": (c) => c.open };
	const [verdict, verdictField] = picker("verdict", "Changes", Object.keys(wanted).map((key) => ({ key })));
	const changes = changesOf(chosen()).filter(wanted[verdict.key]);
	const most = 200;
	return ["History",
		p("Medians of each commit. ▲ marks a regression, ▼ an improvement: a change beyond the noise of both commits, as ", h("code", null, "perf compare"), " reckons it."),
		field, historyPlot("history", group),
		section(`Changes (${changes.length})`, verdictField, changesTable(`Changes from commit to commit${changes.length > most ? `, the newest ${most}` : ""}`, changes.slice(0, most)))];
}

function kernelsView() {
	const rows = [...KERNELS.values()].map((things) => chosen(things)).filter((things) => things.length).sort(([a], [b]) => natural(a.kernel, b.kernel)).map((things) =>
		tr(head(link(`kernel/${things[0].slug}`, things[0].kernel)), td(unique(things.map((t) => t.place)).sort(natural).join("; ")), number(things.length)));
	return ["Kernels", rows.length ? tableOf("Kernels", ["kernel", "counted for, timed on", "things"], rows) : nothing()];
}

/** A kernel of ours: its counts and times, and those of peers in the same cases. */
function kernelView(slug) {
	if (!KERNELS.has(slug)) return missing("kernel", "kernels", "All kernels");
	const own = KERNELS.get(slug);
	const cases = new Set(own.map((t) => `${t.where}|${t.caseId}`));
	const things = chosen([...own, ...THINGS.filter((t) => whoRank(t) === 2 && cases.has(`${t.where}|${t.caseId}`))]);
	const counted = things.filter((t) => t.kind === "emulator");
	const [group] = tokenGroups(things.filter((t) => t.kind === "gpu"));
	const timed = groupBy(things.filter((t) => t.isRace), (t) => `${KINDS[t.kind]}: ${t.suite} on ${t.place}`);
	const changes = changesOf(chosen(own));
	return [own[0].kernel, p(link("kernels", "All kernels")), things.length ? null : nothing(),
		counted.length && section("Counts of the emulator", p("Instructions are of PTX. They do not vary between runs, and CI fails if one grows by more than 2 %."), profileTables(counted)),
		group && section("Time against tokens", tokensPlot("kernel-tokens", group)),
		[...timed].map(([title, found]) => section(title, raceTables(found, title))),
		changes.length && section("Changes", changesTable("Changes of this kernel from commit to commit", changes.slice(0, 50)))];
}

/** All that is known of one case. */
function caseView(id) {
	const all = THINGS.filter((t) => t.caseId === id);
	if (!all.length) return missing("case", "", "Latest numbers");
	const groups = [...groupBy(all, (t) => `${KINDS[t.kind]}: ${t.suite} on ${t.place}: ${t.quantity}`)].sort(quantityOrder);
	const [past] = historyGroups(all.filter((t) => isChosen(t) && t.isRace));
	const error = (t) => (t.error === 0 ? "exact" : t.error?.toExponential(1));
	const rowOf = (t) => tr(head(t.contender, small(t.format)), h("td", { class: "number", title: t.value }, amount(t.value, t.unit), small(plusMinus(t))),
		[t.tbs && short(t.tbs), t.tflops && short(t.tflops), error(t), t.repeats].map((text) => number(text)), td(t.commit),
		h("td", { class: "day" }, dayOf(t.time)), h("td", { class: "note" }, t.with));
	return [`${all[0].suite}: ${caseText(all[0])}`, past && section("History", historyPlot("case-history", past)),
		groups.map(([title, things]) => section(title, tableOf(title, ["contender", "value", "TB/s", "TFLOP/s", "error", "repeats", "commit", "day", "with"],
			things.sort((a, b) => a.value - b.value).map(rowOf), "wide")))];
}

const VIEWS = {
	"": ["Latest", latestView], tokens: ["Tokens", tokensView], roofline: ["Rooflines", rooflineView],
	history: ["History", historyView], kernels: ["Kernels", kernelsView], kernel: [null, kernelView], case: [null, caseView],
};
