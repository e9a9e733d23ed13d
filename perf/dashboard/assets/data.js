// The records, as perf/dashboard/payload.py packs them.

const DATA = JSON.parse($("records").textContent);

const KINDS = { gpu: "GPU times", cpu: "CPU", emulator: "Emulator counts" };

const KERNELS = DATA.kernels.map(([slug, title, op]) => ({ slug, title, op, things: [] }));

const FACTORS = { us: 1, ms: 1e3, s: 1e6 };

/** What was measured, each with its newest record. */
const THINGS = DATA.things.map((row, id) => {
  const [measure, contenderAt, formatAt, caseId, variant, kernel, run, value, spread, repeats, error, work, ceilings, sm, draw] = row;
  const [suite, what, unit, protocol, kind, place] = DATA.measures[measure];
  const [contender, format] = [DATA.texts[contenderAt], DATA.texts[formatAt]];
  const [bytes, flops] = DATA.works[work] || [];
  const us = value * FACTORS[unit];
  const thing = {
    id, suite, contender, format, what, unit, protocol, kind, place, caseId,
    case: DATA.cases[caseId],
    variant: variant === 1,
    kernel: KERNELS[kernel] || null,
    series: format ? `${contender} · ${format}` : contender,
    where: `${kind}:${place}`,
    latest: {
      value, spread, repeats, error, bytes, flops, sm, draw,
      run: DATA.runs[run],
      ceilings: DATA.ceilings[ceilings] || {},
      tbs: us && bytes ? (bytes / us) * 1e-6 : null,
      tflops: us && flops ? (flops / us) * 1e-6 : null,
    },
    history: null,
  };
  const entries = Object.entries(thing.case).map(([name, entry]) => `${name}=${entry} ${entry}`);
  thing.text = [suite, contender, format, what, protocol, place, ...entries].join(" ").toLowerCase();
  if (thing.kernel) thing.kernel.things.push(thing);
  return thing;
});

for (const [thing, steps] of DATA.history) {
  THINGS[thing].history = steps.map(([commit, value, sign, worseBy, threshold, spread]) => ({
    commit, value, sign, worseBy, threshold, spread,
  }));
}

/** Rows of an expert on the average; null where a case has no groups. */
function tokensOf(c) {
  const groups = c.experts || c.groups;
  return c.rows && groups ? c.rows / groups : null;
}

const tokensText = (c) => `${short(tokensOf(c))} token${tokensOf(c) === 1 ? "" : "s"}`;

const CASE_TEXTS = {
  experts: (v) => `${v} expert${v === 1 ? "" : "s"}`,
  groups: (v) => `${v} group${v === 1 ? "" : "s"}`,
  rows: (v, c) => (c.experts ? `${tokensText(c)} an expert` : `${v} rows`),
  cols: (v) => `${v} columns`,
  n: (v) => `N ${v}`,
  k: (v) => `K ${v}`,
  hidden: (v) => `hidden ${v}`,
  intermediate: (v) => `intermediate ${v}`,
  amax: (v) => `amax ${v}`,
};
const CASE_ORDER = ["op", "call", "product", "model", "layer", "pass", "directions", "amax", "experts", "n", "k", "hidden",
  "intermediate", "groups", "cols", "dtype", "rows", "routing"];

/** A case in words: all of it, or the entries that are asked for. */
function caseText(c, names = Object.keys(c)) {
  const place = (name) => (CASE_ORDER.indexOf(name) + 1 || 99);
  const known = names.filter((name) => name in c).sort((a, b) => place(a) - place(b));
  return known.map((name) => (CASE_TEXTS[name] ? CASE_TEXTS[name](c[name], c)
    : CASE_ORDER.includes(name) || name === "task" ? String(c[name]) : `${name.replace(/_/g, " ")} ${c[name]}`)).join(", ");
}

/** Entries of which a row of a table tells the cases of a group apart; of other suites all. */
const ROW_NAMES = { gemm: ["rows", "routing"], layer: ["rows", "routing"], quantize: ["op", "directions", "amax"] };

function splitCase(suite, c) {
  const row = ROW_NAMES[suite] || Object.keys(c);
  return [Object.keys(c).filter((name) => !row.includes(name)), row];
}

/** Suites where contenders race; of the others each has many numbers. */
const RACES = new Set(["quantize", "gemm", "layer", "host"]);

function suiteOrder(a, b) {
  const place = (suite) => (["gemm", "quantize", "layer", "host"].indexOf(suite) + 1 || 9);
  return place(a) - place(b) || natural(a, b);
}

/** What comes first where there is a choice. */
function quantityRank(thing) {
  return (["time", "host time"].indexOf(thing.what) + 1 || 9) + (thing.unit === "1" ? 9 : 0);
}

const quantityOf = (thing) => (thing.protocol ? `${thing.what}, ${thing.protocol}` : thing.what);

/** Names of quantities, the one that is looked at most first. */
function quantitiesOf(things) {
  const groups = [...groupBy(things, quantityOf)];
  const ours = (group) => group.filter((t) => t.contender.startsWith("ours")).length;
  groups.sort(([, a], [, b]) => quantityRank(a[0]) - quantityRank(b[0]) || ours(b) - ours(a) || b.length - a.length);
  return groups.map(([name]) => name);
}

function contenderOrder(a, b) {
  const rank = (t) => (t.contender === "ours" ? 0 : t.contender.startsWith("ours") ? 1 : 2);
  return rank(a) - rank(b) || natural(a.series, b.series);
}

const commitName = (index) => DATA.commits[index][0];
const dayOf = (time) => (time || "").slice(0, 10);
