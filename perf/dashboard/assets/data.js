// The records, as perf/dashboard/things.py makes them.

const packed = Uint8Array.from(atob($("records").textContent), (letter) => letter.charCodeAt(0));
const DATA = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();

const KINDS = { gpu: "GPU times", cpu: "CPU", emulator: "Emulator counts" };

/** What was measured, each with its newest record. */
const THINGS = DATA.things;
for (const thing of THINGS) {
	for (const name of ["format", "protocol", "place"]) thing[name] ??= "";
	thing.case ??= {};
	thing.series = thing.format ? `${thing.contender} · ${thing.format}` : thing.contender;
	thing.where = `${thing.kind}:${thing.place}`;
	thing.quantity = thing.protocol ? `${thing.what}, ${thing.protocol}` : thing.what;
	thing.isRace = Boolean(thing.us) && (thing.what === "time" || thing.what === "host time");
	// Rows of an expert on the average, where a case has groups.
	thing.tokens = thing.case.rows / (thing.case.experts || thing.case.groups) || 0;
	const entries = Object.entries(thing.case).map(([name, value]) => `${name}=${value} ${value}`);
	thing.text = [thing.suite, thing.series, thing.quantity, thing.place, ...entries].join(" ").toLowerCase();
}

/** Things of each kernel of ours, by its name in addresses. */
const KERNELS = groupBy(THINGS.filter((t) => t.slug), (t) => t.slug);

const tokensText = (t) => `${short(t.tokens)} token${t.tokens === 1 ? "" : "s"} an expert`;

/** How entries of a case are said, in this order: "%" is the value. Others follow with their names. */
const CASE_TEXTS = {
	op: "%", task: "%", call: "%", product: "%", model: "%", layer: "%", pass: "%", directions: "%", amax: "amax %", experts: "% experts", n: "N %", k: "K %",
	hidden: "hidden %", intermediate: "intermediate %", groups: "% groups", cols: "% columns", dtype: "%", rows: "% rows", routing: "%",
};

/** A case in words: all of it, or the entries that are asked for. */
function caseText(t, names = Object.keys(t.case)) {
	const known = [...Object.keys(CASE_TEXTS), ...Object.keys(t.case).filter((name) => !(name in CASE_TEXTS))];
	return known.filter((name) => name in t.case && names.includes(name)).map((name) => (name === "rows" && t.case.experts ? tokensText(t)
		: (CASE_TEXTS[name] || `${name.replace(/_/g, " ")} %`).replace("%", t.case[name]))).join(", ");
}

/** Suites where contenders race, with the entries of which a row of a table tells cases apart; of other suites each has many numbers. */
const RACES = { gemm: ["rows", "routing"], quantize: ["op", "directions", "amax"], layer: ["rows", "routing"], host: null };

const rank = (list, item) => (list.indexOf(item) + 1 || 99);
const suiteOrder = (a, b) => rank(Object.keys(RACES), a) - rank(Object.keys(RACES), b) || natural(a, b);
const whoRank = (t) => (t.contender === "ours" ? 0 : t.contender.startsWith("ours") ? 1 : 2);
const contenderOrder = (a, b) => whoRank(a) - whoRank(b) || natural(a.series, b.series);

/** What comes first where there is a choice: times, then what most of ours have. */
function quantityOrder([, as], [, bs]) {
	const place = ([t]) => rank(["time", "host time"], t.what) + (t.unit === "1" ? 99 : 0);
	const ours = (things) => things.filter((t) => whoRank(t) < 2).length;
	return place(as) - place(bs) || ours(bs) - ours(as) || bs.length - as.length;
}

const commitName = (index) => DATA.commits[index][0];
const dayOf = (time) => (time || "").slice(0, 10);
