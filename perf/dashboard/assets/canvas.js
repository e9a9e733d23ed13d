// What a plot draws, in CSS pixels: axes, lines and points.

/** Room for the axes with their labels, around what is drawn. */
const EDGE = { left: 84, right: 16, top: 16, bottom: 58 };

function stamp(context, shape, color, [x, y], edge) {
	context.save();
	context.translate(x, y);
	const path = new Path2D(SHAPES[shape]);
	context.fillStyle = color;
	context.fill(path);
	// An edge in the colour of the page tells points apart that lie on each other.
	context.strokeStyle = edge;
	context.lineWidth = 1;
	context.stroke(path);
	context.restore();
}

function drawLine(context, points, dash) {
	context.setLineDash(dash);
	context.lineWidth = 2;
	context.beginPath();
	for (const point of points) context.lineTo(...point);
	context.stroke();
}

function nameRoof(context, name, [first, last]) {
	const isFlat = first[1] === last[1];
	const [x, y] = isFlat ? last : first;
	[context.textAlign, context.textBaseline] = isFlat ? ["right", "bottom"] : ["left", "top"];
	context.fillText(name, x + (isFlat ? -4 : 12), y + (isFlat ? -4 : 6));
}

function drawSeries(context, series, at) {
	const edge = css("--back");
	const drawn = series.filter((s) => !s.hidden).map((one) => ({ ...one, color: css(one.color), places: one.points.map((p) => at(p.x, p.y)) }));
	for (const one of drawn.filter((s) => s.line || s.roof)) {
		context.strokeStyle = one.color;
		drawLine(context, one.places, one.dash);
	}
	context.setLineDash([]);
	for (const { roof, name, color, shape, points, places } of drawn) {
		context.fillStyle = color;
		if (roof) nameRoof(context, name, places);
		else points.forEach(({ x, y, half, mark }, i) => {
			const [[left, low], [, high]] = [at(x, y - (half || 0)), at(x, y + (half || 0))];
			if (half) context.fillRect(left - 0.5, high, 1, low - high);
			stamp(context, shape, color, places[i], edge);
			const verdict = { 1: "worse", "-1": "better" }[mark];
			if (verdict) stamp(context, verdict, css(`--${verdict}`), places[i], edge);
		});
	}
}

/** Round numbers of a logarithmic axis, fewer of them over many decades. */
function logTicks(min, max) {
	const decades = Math.log10(max / min);
	const steps = decades > 4.2 ? [1] : decades > 1.2 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8];
	const powers = Array.from({ length: decades + 3 }, (_, i) => 10 ** (Math.floor(Math.log10(min)) + i));
	return powers.flatMap((power) => steps.map((step) => Number((step * power).toPrecision(3)))).filter((tick) => tick >= min && tick <= max);
}

/** At most so many round numbers of a linear axis. */
function linearTicks(min, max, most) {
	const power = 10 ** Math.floor(Math.log10((max - min) / most));
	const step = power * [1, 2, 5, 10].find((n) => n * power * most >= max - min);
	const first = Math.ceil(min / step);
	return Array.from({ length: Math.floor(max / step) - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

/** Of ticks at given places those that have room; the last stays. */
function thinned(ticks, at, room) {
	let next = Infinity;
	const hasRoom = (tick) => next - at(tick) >= room && ((next = at(tick)), true);
	return ticks.toReversed().filter(hasRoom).reverse();
}

function rangeOf(values, axis) {
	const [low, high] = [Math.min(...values), Math.max(...values)];
	if (axis.log) return [low / (axis.pad || 1.3), high * (axis.pad || 1.3)];
	const margin = axis.pad ?? ((high - low) * 0.08 || Math.abs(high) * 0.1 || 1);
	return [axis.zero ? 0 : low - margin, high + margin];
}

/** Where values of an axis lie from one pixel to another, and its ticks: [place, text]. */
function scaleOf(axis, values, from, to) {
	const [min, max] = rangeOf(values, axis);
	const by = axis.log ? Math.log : Number;
	const at = (value) => from + ((to - from) * (by(value) - by(min))) / (by(max) - by(min));
	const ticks = axis.ticks ? thinned(axis.ticks, at, axis.room) : axis.log ? logTicks(min, max) : linearTicks(min, max, Math.abs(to - from) / 40);
	const format = axis.format || ((v) => v.toLocaleString("en", { maximumSignificantDigits: 4 }));
	return { at, ticks: ticks.map((tick) => [Math.round(at(tick)) + 0.5, format(tick)]) };
}

function drawAxes(context, spec, x, y, right, bottom) {
	const { left, top } = EDGE;
	[context.strokeStyle, context.fillStyle] = [css("--grid"), css("--muted")];
	context.beginPath();
	[context.textAlign, context.textBaseline] = ["center", "top"];
	for (const [place, text] of x.ticks) {
		context.moveTo(place, top);
		context.lineTo(place, bottom + 4);
		context.fillText(text, place, bottom + 8);
	}
	context.fillText(spec.x.label, (left + right) / 2, bottom + 36);
	[context.textAlign, context.textBaseline] = ["right", "middle"];
	for (const [place, text] of y.ticks) {
		context.moveTo(left - 4, place);
		context.lineTo(right, place);
		context.fillText(text, left - 8, place);
	}
	context.stroke();
	context.save();
	context.translate(12, (top + bottom) / 2);
	context.rotate(-Math.PI / 2);
	context.textAlign = "center";
	context.fillText(spec.y.label, 0, 0);
	context.restore();
}

/** Draw a plot anew: its context, and where a point of it lies. */
function drawPlot(spec, holder) {
	const { clientWidth: width, clientHeight: height } = holder;
	const [right, bottom] = [width - EDGE.right, height - EDGE.bottom];
	const canvas = h("canvas", { width: Math.round(width * devicePixelRatio), height: Math.round(height * devicePixelRatio) });
	holder.replaceChildren(canvas);
	const context = canvas.getContext("2d");
	context.scale(devicePixelRatio, devicePixelRatio);
	context.font = "12px system-ui, sans-serif";
	const points = spec.series.flatMap((one) => one.points);
	const x = scaleOf(spec.x, points.map((p) => p.x), EDGE.left, right);
	const y = scaleOf(spec.y, points.flatMap((p) => [p.y - (p.half || 0), p.y + (p.half || 0)]), bottom, EDGE.top);
	const at = (px, py) => [x.at(px), y.at(py)];
	drawAxes(context, spec, x, y, right, bottom);
	drawSeries(context, spec.series, at);
	return { context, at };
}
