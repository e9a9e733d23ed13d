// A plot, whose points are reachable without a mouse.

/** Plots of the page by their names. */
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

/** Lets the pointer and the keyboard choose a point, and says what it is; returns what shows it again. */
function makePointer(spec, holder, readout) {
	const ring = h("div", { class: "ring", hidden: true });
	let current = null;
	const shown = () => spec.series.filter((s) => !s.roof && !s.hidden);
	const place = (point) => spec.drawn.at(point.x, point.y);
	const show = (one, point) => {
		current = { one, point };
		holder.append(ring);
		ring.hidden = false;
		ring.style.translate = place(point).map((v) => `${v}px`).join(" ");
		const note = point.note ? ` (${point.note})` : "";
		readout.replaceChildren(h("strong", null, one.name), ` ${point.label}: ${point.text}${note} `, h("a", { href: point.href }, "details"));
	};
	const near = (event) => {
		const box = holder.getBoundingClientRect();
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
		spec.drawn = drawPlot(spec, holder);
		again();
	};
	new ResizeObserver(spec.redraw).observe(holder);
	PLOTS.set(spec.name, spec);
	const rows = shown.flatMap((one) => one.points.map((point) => tr(
		head(one.name), td(point.href ? h("a", { href: point.href }, point.label) : point.label), number(point.text), td(point.note))));
	const table = tableOf(`Data: ${spec.title}`, ["series", ...spec.columns, "remark"], rows);
	return h("figure", { id: spec.name }, h("figcaption", null, spec.title), holder, readout, makeLegend(spec.series, spec.redraw),
		h("details", { id: `${spec.name}-data` }, h("summary", null, `Table of the ${count} points`), table));
}
