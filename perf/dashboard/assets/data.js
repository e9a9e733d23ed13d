// The records, as perf/dashboard/entries.py makes them, and their texts.

/** The packed contents of an element of the page. */
const unpacked = (id) => new Response(new Response(Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0)))
  .body.pipeThrough(new DecompressionStream("gzip")));
const DATA = await unpacked("records").json();

/** An element with properties and children; empty children are left out. */
function h(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.flat(Infinity).filter((child) => child || child === 0));
  return element;
}

const unique = (list) => [...new Set(list)];

/** Order by the numbers in texts, so that 16 comes before 128. */
const natural = new Intl.Collator("en", { numeric: true }).compare;

/** A number with three digits, or all digits before the point. */
const short = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3, maximumFractionDigits: 0, roundingPriority: "morePrecision" });

function amount(value, unit) {
  const suffix = { 1: "", byte: "B", us: "µs" }[unit] ?? unit;
  const [divisor, prefix] = (suffix === "" || suffix === "B") && [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]
    .find(([limit]) => value >= limit && value >= 1e4) || [1, ""];
  return `${short(value / divisor)} ${prefix}${suffix}`.trim();
}

const percent = (share) => `${(100 * share).toFixed(Math.abs(share) < 0.0995 ? 1 : 0)} %`;

/** Fields of a case in the order of texts; other fields come last. */
const CASE_FIELDS = "op task call product model layer pass directions amax experts n k hidden intermediate groups cols dtype rows tokens routing".split(" ");
const rank = (name) => CASE_FIELDS.indexOf(name) + 1 || 99;

const tokensText = (t) => `${short(t.tokens)} token${t.tokens === 1 ? "" : "s"} per expert`;

/** A case in words: all of its fields, or the included ones. */
const caseText = (t, isIncluded = () => true) => Object.entries(t.case).filter(([name]) => isIncluded(name)).sort(([a], [b]) => rank(a) - rank(b) || natural(a, b))
  .map(([name, value]) => (name === "rows" && t.case.experts ? tokensText(t) : name !== "amax" && typeof value === "string" ? value : `${name.replace(/_/g, " ")} ${value}`)).join(", ");

const contenderRank = (t) => (t.contender === "ours" ? 0 : t.contender.startsWith("ours") ? 1 : 2);
const contenderOrder = (a, b) => contenderRank(a) - contenderRank(b) || natural(a.series, b.series);


/** An entry per measured thing, with its newest record. */
const ENTRIES = DATA.entries;
for (const entry of ENTRIES) {
  entry.series = [entry.contender, entry.format].filter(Boolean).join(" · ");
  entry.section = `${{ gpu: "GPU times", cpu: "CPU", emulator: "Emulator counts" }[entry.kind]}: ${entry.device || "unknown machine"}`;
  entry.measure = [entry.quantity, entry.protocol].filter(Boolean).join(", ");
  entry.isRace = Boolean(entry.us) && /^(host )?time$/.test(entry.quantity);
  // Mean rows per expert, if a case has groups.
  entry.tokens = entry.case.rows / (entry.case.experts || entry.case.groups) || 0;
  entry.text = JSON.stringify([entry.suite, entry.series, entry.measure, entry.device, entry.case]).toLowerCase();
}

/** The kernels of peers are those of this package that compete with them. */
const races = Map.groupBy(ENTRIES.filter((t) => t.kernel), (t) => t.section + t.caseId);
for (const peer of ENTRIES.filter((t) => contenderRank(t) === 2)) peer.kernel = unique((races.get(peer.section + peer.caseId) || []).map((t) => t.kernel));
