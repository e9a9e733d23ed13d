// Elements, and how numbers are written.

const $ = (id) => document.getElementById(id);

/** An element: attributes, "on..." handlers, and children, of which null and false are left out. */
function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") element.style.cssText = value; // setAttribute would need more CSP
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(2).filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

const said = (text) => h("span", { class: "said" }, text);

const unique = (list) => [...new Set(list)];

/** Lists of what has the same key, in the order of the first of each. */
function groupBy(list, key) {
  const groups = new Map();
  for (const item of list) {
    const k = key(item);
    if (groups.has(k)) groups.get(k).push(item);
    else groups.set(k, [item]);
  }
  return groups;
}

/** By numbers inside, so that 16 comes before 128. */
const natural = new Intl.Collator("en", { numeric: true }).compare;

function digitsOf(size) {
  return size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
}

/** A number with about three digits. */
function short(value) {
  if (value === 0) return "0";
  const digits = digitsOf(Math.abs(value));
  return value.toLocaleString("en", { minimumFractionDigits: Number.isInteger(value) ? 0 : digits, maximumFractionDigits: digits });
}

/** The same with all of the digits, to stand below others. */
function fixed(value) {
  const digits = digitsOf(Math.abs(value));
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

const PREFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k", 1e3]];

/** A count or a size, by powers of a thousand. */
function compact(value, unit = "") {
  for (const [least, prefix, by] of PREFIXES) {
    if (Math.abs(value) >= least) return `${short(value / (by || least))} ${prefix}${unit}`;
  }
  return unit ? `${short(value)} ${unit}` : short(value);
}

function amount(value, unit) {
  if (unit === "1") return compact(value);
  if (unit === "byte") return compact(value, "B");
  return `${short(value)} ${unit === "us" ? "µs" : unit}`;
}

const percent = (share) => `${(100 * share).toFixed(Math.abs(share) < 0.0995 ? 1 : 0)} %`;

const signed = (share) => `${share > 0 ? "+" : "−"}${percent(Math.abs(share))}`;
