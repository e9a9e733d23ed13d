// Which points the plots have.

const shortPlace = (t) => t.place.replace("NVIDIA ", "");

/** Lines that can be drawn over tokens per expert: cases alike but for their rows. */
function tokenGroups(things) {
	const groups = groupBy(things.filter((t) => t.isRace && t.tokens), (t) =>
		[`${t.suite} on ${shortPlace(t)}: ${caseText(t, Object.keys(t.case).filter((name) => name !== "rows"))}`, t.protocol].filter(Boolean).join(": "));
	return [...groups].map(([key, things]) => ({ key, things })).filter((g) => unique(g.things.map((t) => t.case.rows)).length > 1)
		.sort((a, b) => (b.things[0].kind === "gpu") - (a.things[0].kind === "gpu") || b.things.length - a.things.length || natural(a.key, b.key));
}

const baseOf = (t, group) => group.things.find((o) => o.contender === "torch" && /^(bf16|bfloat16)$/i.test(o.format) && o.caseId === t.caseId);

const RATES = {
	time: { label: "time, µs", unit: "us", of: (t) => t.us, note: remark },
	speed: {
		label: "speed relative to torch in bf16", unit: "×", of: (t, group) => baseOf(t, group)?.us / t.us,
		note: (t, group) => `measured at ${t.commit}, torch at ${baseOf(t, group).commit}`,
	},
};

/** Series of things, a point for each. */
const seriesOf = (things, line, pointOf) => [...groupBy([...things].sort(contenderOrder), (t) => t.series)].map(([name, group]) => ({
	name, line, points: group.map((t) => ({ href: address(`case/${t.caseId}`), ...pointOf(t) })).sort((a, b) => a.x - b.x),
}));

function tokensPlot(name, group, metric = "time") {
	const { label, unit, of, note } = RATES[metric];
	const things = group.things.filter((t) => of(t, group));
	const series = seriesOf(things, true, (t) => ({
		x: t.tokens, y: of(t, group), half: metric === "time" ? (t.spread || 0) / 2 * (t.us / t.value) : 0,
		label: tokensText(t), text: amount(of(t, group), unit), note: note(t, group),
	}));
	const ticks = unique(things.map((t) => t.tokens)).sort((a, b) => a - b);
	return plotFigure({
		name, title: `${group.key}: ${label}`, series, columns: ["tokens an expert", label],
		x: { label: "tokens an expert", log: true, ticks, room: 34 }, y: { label, log: metric !== "speed", zero: metric === "speed" },
	});
}

const roofLine = ([, name, rate, measured], unit, points) => ({
	name: `${name} ${short(rate)} ${unit}, ${measured ? "measured" : "published"}`, roof: true, measured, points: points.map(([x, y]) => ({ x, y })),
});

/** Rates of products over their arithmetic intensity under the roofs of a GPU, and of what only moves bytes under that of a copy. */
function rooflinePlots(gpu, things) {
	const [products, moves] = [things.filter((t) => t.tflops), things.filter((t) => !t.flops)];
	const [intensity, size] = [(t) => t.flops / t.bytes, (t) => t.bytes / 1e6];
	const memory = DATA.roofs[gpu].find(([kind]) => kind === "copy");
	const dense = DATA.roofs[gpu].filter(([kind]) => kind !== "copy");
	const share = (t) => (t.ceilings?.copy ? `, ${percent(t.tbs / t.ceilings.copy)} of a copy in the same run` : "");
	const point = (t) => ({ label: caseText(t), note: amount(t.value, t.unit) });
	const roofline = seriesOf(products, false, (t) => ({ ...point(t), x: intensity(t), y: t.tflops, text: `${short(t.tflops)} TFLOP/s at ${short(intensity(t))} FLOP/B` }));
	const bandwidth = seriesOf(moves, false, (t) => ({ ...point(t), x: size(t), y: t.tbs, text: `${short(t.tbs)} TB/s${share(t)}` }));
	if (products.length && memory && dense.length) {
		const ridge = ([, , rate]) => rate / memory[2];
		const [low, top] = [Math.min(...products.map(intensity)), Math.max(...dense.map(ridge))];
		const high = 1.5 * Math.max(top, ...products.map(intensity));
		roofline.push(roofLine(memory, "TB/s", [low, top].map((x) => [x, x * memory[2]])), ...dense.map((roof) => roofLine(roof, "TFLOP/s", [ridge(roof), high].map((x) => [x, roof[2]]))));
	}
	if (moves.length && memory) bandwidth.push(roofLine(memory, "TB/s", [Math.min(...moves.map(size)) / 1.05, Math.max(...moves.map(size)) * 1.05].map((x) => [x, memory[2]])));
	const columns = ["case", "rate"];
	return [
		plotFigure({ name: "roofline", title: `Products on ${gpu}: TFLOP/s over FLOP a byte`, series: roofline, columns, x: { label: "useful FLOP / least byte", log: true }, y: { label: "TFLOP/s", log: true } }),
		plotFigure({ name: "bandwidth", title: `Memory-bound kernels on ${gpu}: TB/s of the least bytes`, series: bandwidth, columns, x: { label: "least bytes, MB", log: true, pad: 1.15 }, y: { label: "TB/s", zero: true } }),
	];
}

const stepsOf = (t) => t.history.map(([commit, value, sign, worseBy, noise, spread]) => ({ commit, value, sign, worseBy, noise, spread }));

/** Histories that can share a plot: contenders of one case and quantity. */
function historyGroups(things) {
	const groups = groupBy(things.filter((t) => t.history), (t) => `${t.suite} on ${shortPlace(t)}: ${caseText(t)}: ${t.quantity}`);
	const longest = (group) => Math.max(...group.map((t) => t.history.length));
	return [...groups].sort((a, b) => b[1][0].isRace - a[1][0].isRace || longest(b[1]) - longest(a[1]) || natural(a[0], b[0])).map(([key, things]) => ({ key, things }));
}

function historyPlot(name, group) {
	const commits = unique(group.things.flatMap((t) => t.history.map(([commit]) => commit))).sort((a, b) => a - b);
	const [{ unit, what }] = group.things;
	const series = [...group.things].sort(contenderOrder).map((t) => ({
		name: t.series, line: true,
		points: stepsOf(t).map((step) => ({
			x: commits.indexOf(step.commit), y: step.value, half: (step.spread || 0) / 2, mark: step.sign,
			label: `${commitName(step.commit)}, ${dayOf(DATA.commits[step.commit][1])}`, text: amount(step.value, unit), href: address(`case/${t.caseId}`),
			note: step.sign ? `${VERDICTS[step.sign]} by ${percent(Math.abs(step.worseBy))}, noise ${percent(step.noise)}` : "",
		})),
	}));
	const label = unit === "1" ? what : `${what}, ${unit === "us" ? "µs" : unit}`;
	return plotFigure({
		name, title: group.key, series, columns: ["commit", label],
		x: { label: "commit", ticks: commits.map((_, i) => i), format: (i) => (i in commits ? commitName(commits[i]) : ""), room: 64, pad: 0.4 },
		y: { label, log: series.every((s) => s.points.every((p) => p.y > p.half)) },
	});
}

/** Steps that are worse or better, the newest first; "open" if none came after. */
const changesOf = (things) => things.filter((t) => t.history).flatMap((thing) => stepsOf(thing).map((step, i, steps) => ({
	thing, step, before: steps[i - 1], open: step.sign > 0 && i + 1 === steps.length,
}))).filter((c) => c.step.sign).sort((a, b) => b.step.commit - a.step.commit || Math.abs(b.step.worseBy) - Math.abs(a.step.worseBy));
