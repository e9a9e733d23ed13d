// Tables.

/** A table that scrolls by itself where the window is narrow. */
function tableOf(caption, heads, rows, look = null) {
	return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
		h("table", { class: look }, h("caption", { class: look?.includes("numeric") ? null : "said" }, caption),
			h("thead", null, tr(heads.map((title) => h("th", { scope: "col" }, title)))), h("tbody", null, rows)));
}

const head = (...children) => h("th", { scope: "row" }, children);
const number = (text, ...more) => h("td", { class: "number" }, text, more.length ? small(more) : null);
const link = (path, text, more) => h("a", { href: address(path, more) }, text);
const caseLink = (t, text = caseText(t)) => link(`case/${t.caseId}`, text);
const plusMinus = (t) => (t.spread ? ` ± ${(t.spread / 2).toLocaleString("en", { maximumSignificantDigits: 2 })}` : "");

/** What a number is beside what it could be, or must be. */
function remark(t) {
	const elements = t.case.op && t.kind === "emulator" ? t.case.rows * t.case.cols : 0;
	if (t.tbs && t.ceilings?.copy && !t.tflops) return `${percent(t.tbs / t.ceilings.copy)} of copy`;
	if (t.tflops) return `${short(t.tflops)} TFLOP/s`;
	if (t.tbs) return `${short(t.tbs)} TB/s`;
	if (t.what === "MMA operations" && t.flops) return `${short(t.value / t.flops)} × useful`;
	if (/^bytes /.test(t.what) && t.bytes && t.value) return `${percent(t.value / t.bytes)} of the least bytes`;
	return elements && t.value ? `${short(t.value / elements)} an element` : "";
}

/** A number of a table; that of the fastest contender is bold. */
function valueCell(t, best, text) {
	if (!t) return h("td", { class: "number none" }, "–", said("not measured"));
	return h("td", { class: `number${t.value === best ? " best" : ""}`, title: `${t.value} ${t.unit}, ${t.commit}` },
		h("span", { class: "value" }, text || short(t.value, t.unit !== "1"), small(plusMinus(t))), t.value === best ? said(" fastest") : null,
		small(remark(t)));
}

/** Contenders in columns, cases in rows. All have one quantity, and one of the kinds. */
function raceTable(caption, things) {
	const columns = unique([...things].sort(contenderOrder).map((t) => t.series));
	const rows = [...groupBy(things, (t) => t.caseId).values()];
	const names = RACES[things[0].suite] || Object.keys(things[0].case);
	const varying = names.filter((name) => unique(rows.map(([t]) => t.case[name])).length > 1);
	const routing = (t) => (t.case.routing === "balanced" ? "" : t.case.routing || "");
	rows.sort(([a], [b]) => natural(routing(a), routing(b)) || a.tokens - b.tokens || natural(caseText(a), caseText(b)));
	const byTokens = varying.every((name) => name === "rows" || name === "routing") && things[0].tokens;
	const title = (t) => (byTokens ? [short(t.tokens), said(" tokens an expert"), ` ${routing(t)}`] : caseText(t, varying.length ? varying : names));
	const made = rows.map((row) => {
		const best = row.length > 1 ? Math.min(...row.map((t) => t.value)) : NaN;
		return tr(head(caseLink(row[0], title(row[0]))), columns.map((name) => valueCell(row.find((t) => t.series === name), best)));
	});
	const unit = { us: "µs", 1: "number" }[things[0].unit] || things[0].unit;
	const heads = columns.map((name) => name.split(" · ")).map(([who, format]) => [who, format ? small(format) : null]);
	return tableOf(caption, [byTokens ? ["tokens an expert", small(unit)] : unit, ...heads], made, "wide numeric");
}

/** Tables of a suite on one machine, with a choice of the quantity if there are several. */
function raceTables(things, name) {
	const id = `quantity-${name}`.replace(/\W+/g, "-");
	const groups = new Map([...groupBy(things, (t) => t.quantity)].sort(quantityOrder));
	const names = [...groups.keys()];
	const wanted = groups.has(params.get(id)) ? params.get(id) : names[0];
	const field = names.length > 1 ? selectField(id, "Quantity", { "": names.map((n) => [n, n]) }, wanted, (value) => choose(id, value)) : h("p", { class: "quantity" }, wanted);
	const tables = groupBy(groups.get(wanted), (t) => caseText(t, Object.keys(t.case).filter((n) => RACES[t.suite] && !RACES[t.suite].includes(n))));
	return [field, [...tables].sort((a, b) => b[1].length - a[1].length).map(([title, group]) => raceTable(title || wanted, group))];
}

const COUNT_ORDER = ["warp instructions", "thread instructions", "bytes read", "bytes read by TMA", "bytes written", "bytes written by TMA",
	"sectors written", "shared accesses", "shared wavefronts", "MMA operations"];

/** Quantities in columns; what is measured in rows. A table for each op. */
function profileTables(things) {
	return [...groupBy(things, (t) => t.case.op || (t.case.product ? `gemm, ${t.case.product}` : t.suite))].map(([title, group]) => {
		const whats = unique(group.filter((t) => t.value).map((t) => t.what)).sort((a, b) => rank(COUNT_ORDER, a) - rank(COUNT_ORDER, b) || natural(a, b));
		const rows = [...groupBy(group, (t) => `${t.where} ${t.caseId} ${t.series}`).values()];
		rows.sort(([a], [b]) => natural(a.place, b.place) || natural(caseText(a), caseText(b)) || contenderOrder(a, b));
		const names = unique(group.flatMap((t) => Object.keys(t.case)));
		const common = names.filter((name) => group.every((t) => t.case[name] === group[0].case[name]));
		const isOne = group.every((t) => t.where === group[0].where);
		const made = rows.map((row) => {
			const [first] = row;
			const what = [isOne ? "" : first.place, caseText(first, names.filter((name) => !common.includes(name))) || "details"].filter(Boolean).join("; ");
			const cells = whats.map((name) => row.find((t) => t.what === name)).map((t) => valueCell(t, NaN, t && amount(t.value, t.unit)));
			return tr(head(first.slug ? link(`kernel/${first.slug}`, first.series) : first.series, small(caseLink(first, what))), cells);
		});
		return tableOf([isOne ? `${title} on ${group[0].place}` : title, caseText(group[0], common)].filter(Boolean).join(": "), ["", ...whats], made, "wide numeric profile");
	});
}

const VERDICTS = { 1: "worse", "-1": "better" };

/** Steps of histories as rows. */
function changesTable(caption, changes) {
	const rows = changes.map(({ thing: t, before, step }) => tr(
		h("td", { class: `verdict ${VERDICTS[step.sign]}` }, { 1: "▲ worse", "-1": "▼ better" }[step.sign]),
		number(step.worseBy > 1e6 ? "from 0" : `${step.value > before.value ? "+" : "−"}${percent(Math.abs(step.worseBy))}`, `noise ${percent(step.noise)}`),
		head(t.series, small(caseLink(t))),
		td(t.what, small([t.place, t.protocol].filter(Boolean).join(", "))),
		number(`${amount(before.value, t.unit)} → ${amount(step.value, t.unit)}`),
		td(`${commitName(before.commit)} → ${commitName(step.commit)}`)));
	return tableOf(caption, ["verdict", "change", "what", "quantity", "values", "commits"], rows, "wide");
}
