// What quantization does to the numbers of a model: records of grouped.debug.inspect.

const QUANTITIES = {
	snr_db: ["signal over noise, dB", (v) => v.toFixed(1)], saturated: ["share saturated", percent], underflow: ["share that underflows to zero", percent],
	amax: ["amax", short], rows: ["rows: load of an expert", short], second_level: ["second-level scale", (v) => v.toPrecision(3)], nonfinite: ["NaN and infinite", short],
};
/** As many experts have a line each; of more the least, the middle and the most are drawn. */
const MOST_LINES = 12;

const known = (list) => list.filter((v) => v !== null).sort((a, b) => a - b);
const operandOf = (r) => `${r.layer}, ${r.role}, ${r.direction}, ${r.format}`;

/** Lines over steps: of each expert, or of their range. */
function stepsPlot(title, records, quantity) {
	const [label, format] = QUANTITIES[quantity];
	const experts = records[0][quantity].length;
	const range = { least: (list) => list[0], middle: (list) => list[list.length >> 1], most: (list) => list.at(-1) };
	const lines = experts > MOST_LINES ? Object.entries(range).map(([name, of]) => [`${name} of ${experts} experts`, (r) => of(known(r[quantity]))])
		: records[0][quantity].map((_, expert) => [`expert ${expert}`, (r) => r[quantity][expert]]);
	const series = lines.map(([name, of], i) => ({
		name, line: true, look: { color: `--c${i % 10}`, dash: DASHES[Math.floor(i / 10)], shape: "circle" },
		points: records.map((r) => [r.step, of(r)]).filter(([, y]) => y !== null).map(([x, y]) => ({
			x, y, label: `step ${x}`, text: format(y), href: hashOf("numerics", new URLSearchParams({ ...Object.fromEntries(params), step: x })),
		})),
	}));
	return plotFigure({ name: "numerics", title: `${title}: ${label}`, series, columns: ["step", label], x: { label: "step", ticks: records.map((r) => r.step), room: 34 }, y: { label, format } });
}

/** One step: operands in rows, experts in columns; the higher a number, the stronger its colour. */
function heatTable(step, records, quantity) {
	const [label, format] = QUANTITIES[quantity];
	const all = known(records.flatMap((r) => r[quantity]));
	const [low, high] = [all[0], all.at(-1)];
	const cell = (v) => (v === null ? h("td", { class: "number none" }, "–", said("unknown"))
		: h("td", { class: "number heat", style: `--heat: ${high > low ? (60 * (v - low)) / (high - low) : 0}%`, title: v }, format(v)));
	const experts = Math.max(...records.map((r) => r[quantity].length));
	return tableOf(`${label}, step ${step}, by expert`, ["operand", ...Array.from({ length: experts }, (_, expert) => String(expert))],
		records.map((r) => tr(head(operandOf(r)), r[quantity].map(cell))), "numeric profile");
}

function numericsView() {
	const choices = (list) => unique(list).map((key) => ({ key: String(key), title: String(key) || "unnamed" }));
	const [run, runField] = picker("run", "Run", choices(DATA.numerics.map((r) => r.run)));
	const ofRun = DATA.numerics.filter((r) => r.run === run.key).sort((a, b) => a.step - b.step);
	const [quantity, quantityField] = picker("quantity", "Quantity", Object.entries(QUANTITIES)
		.filter(([key]) => ofRun.some((r) => known(r[key]).length)).map(([key, [title]]) => ({ key, title })));
	const found = ofRun.filter((r) => known(r[quantity.key]).length);
	const [operand, operandField] = picker("operand", "Operand", choices(found.map(operandOf)));
	const [step, stepField] = picker("step", "Step", choices(found.map((r) => r.step)).reverse());
	return ["Numerics", p("What quantization does to the operands of each layer, as ", h("code", null, "grouped.debug.inspect"), " saw it."),
		h("div", { class: "fields" }, operandField, quantityField, runField), stepsPlot(operand.title, found.filter((r) => operandOf(r) === operand.key), quantity.key),
		section("By expert", stepField, heatTable(step.key, found.filter((r) => String(r.step) === step.key), quantity.key))];
}

if (DATA.numerics.length) VIEWS.numerics = ["Numerics", numericsView];
