// The records, as perf/dashboard/things.py makes them, and how they are said.

/** What is packed into an element of the page. */
const unpacked = (id) => new Response(new Response(Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0)))
  .body.pipeThrough(new DecompressionStream("gzip")));
const DATA = await unpacked("records").json();

/** An element: its properties, and children, of which those that are nothing are left out. */
function h(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.flat(Infinity).filter((child) => child || child === 0));
  return element;
}

const unique = (list) => [...new Set(list)];

/** By numbers inside, so that 16 comes before 128. */
const natural = new Intl.Collator("en", { numeric: true }).compare;

/** A number with three digits, or all before the point. */
const short = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3, maximumFractionDigits: 0, roundingPriority: "morePrecision" });

function amount(value, unit) {
  const suffix = { 1: "", byte: "B", us: "µs" }[unit] ?? unit;
  const [by, prefix] = (suffix === "" || suffix === "B") && [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]
    .find(([least]) => value >= least && value >= 1e4) || [1, ""];
  return `${short(value / by)} ${prefix}${suffix}`.trim();
}

const percent = (share) => `${(100 * share).toFixed(Math.abs(share) < 0.0995 ? 1 : 0)} %`;

/** In this order entries of a case are said, others after them. */
const ENTRIES = "op task call product model layer pass directions amax experts n k hidden intermediate groups cols dtype rows tokens routing".split(" ");
const rank = (name) => ENTRIES.indexOf(name) + 1 || 99;

const tokensText = (t) => `${short(t.tokens)} token${t.tokens === 1 ? "" : "s"} an expert`;

/** A case in words: all of it, or the entries that are asked for. */
const caseText = (t, isAsked = () => true) => Object.entries(t.case).filter(([name]) => isAsked(name)).sort(([a], [b]) => rank(a) - rank(b) || natural(a, b))
  .map(([name, value]) => (name === "rows" && t.case.experts ? tokensText(t) : name !== "amax" && typeof value === "string" ? value : `${name.replace(/_/g, " ")} ${value}`)).join(", ");

const whoRank = (t) => (t.contender === "ours" ? 0 : t.contender.startsWith("ours") ? 1 : 2);
const contenderOrder = (a, b) => whoRank(a) - whoRank(b) || natural(a.series, b.series);


/** What was measured, each with its newest record. */
const THINGS = DATA.things;
for (const thing of THINGS) {
  thing.series = [thing.contender, thing.format].filter(Boolean).join(" · ");
  thing.where = `${{ gpu: "GPU times", cpu: "CPU", emulator: "Emulator counts" }[thing.kind]}: ${thing.place || "unknown machine"}`;
  thing.measure = [thing.quantity, thing.protocol].filter(Boolean).join(", ");
  thing.isRace = Boolean(thing.us) && /^(host )?time$/.test(thing.quantity);
  // Rows of an expert on the average, where a case has groups.
  thing.tokens = thing.case.rows / (thing.case.experts || thing.case.groups) || 0;
  thing.text = JSON.stringify([thing.suite, thing.series, thing.measure, thing.place, thing.case]).toLowerCase();
}

/** Peers belong to the kernels of ours that race with them. */
const races = Map.groupBy(THINGS.filter((t) => t.kernel), (t) => t.where + t.caseId);
for (const peer of THINGS.filter((t) => whoRank(t) === 2)) peer.kernel = unique((races.get(peer.where + peer.caseId) || []).map((t) => t.kernel));
