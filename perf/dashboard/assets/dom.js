// Elements, lists, and how numbers are written.

const $ = (id) => document.getElementById(id);

/** An element: attributes, "on..." handlers, and children, of which those that are nothing are left out. */
function h(tag, attributes, ...children) {
	const element = document.createElement(tag);
	for (const [name, value] of Object.entries(attributes || {})) {
		if (value === null || value === undefined || value === false) continue;
		if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
		else if (name === "style") element.style.cssText = value;
		else element.setAttribute(name, value === true ? "" : value);
	}
	element.append(...children.flat(3).filter((child) => child || child === 0));
	return element;
}

/** Elements without attributes. */
const [tr, td, p, small] = ["tr", "td", "p", "small"].map((tag) => (...children) => h(tag, null, ...children));
const said = (text) => h("span", { class: "said" }, text);
const unique = (list) => [...new Set(list)];

/** Lists of what has the same key, in the order of the first of each. */
function groupBy(list, key) {
	const groups = new Map();
	for (const item of list) {
		if (!groups.has(key(item))) groups.set(key(item), []);
		groups.get(key(item)).push(item);
	}
	return groups;
}

/** By numbers inside, so that 16 comes before 128. */
const natural = new Intl.Collator("en", { numeric: true }).compare;

/** A number with about three digits; all of them if it is to stand below others. */
function short(value, isPadded = false) {
	const size = Math.abs(value);
	const digits = size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
	const least = isPadded || !Number.isInteger(value) ? digits : 0;
	return value.toLocaleString("en", { minimumFractionDigits: least, maximumFractionDigits: digits });
}

function amount(value, unit) {
	const suffix = { 1: "", byte: "B", us: "µs" }[unit] ?? unit;
	const [by, prefix] = (suffix === "" || suffix === "B") && [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]
		.find(([least]) => Math.abs(value) >= least && Math.abs(value) >= 1e4) || [1, ""];
	return `${short(value / by)} ${prefix}${suffix}`.trim();
}

const percent = (share) => `${(100 * share).toFixed(Math.abs(share) < 0.0995 ? 1 : 0)} %`;
