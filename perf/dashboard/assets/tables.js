// What is looked at, which the address keeps, so that a view can be sent to somebody; and tables.

/** Filters: a field of what was measured, and its label. */
const FILTERS = { suite: "Suite", where: "GPU or machine", kernel: "Kernel, and its peers", format: "Format", contender: "Contender", text: "Text" };
let params = new URLSearchParams();

/** The address of a view, with the filters as they are and other parameters given. */
const address = (more) => `#${new URLSearchParams({ ...Object.fromEntries([...params].filter(([name]) => name in FILTERS)), ...more })}`;

const link = (more, text) => h("a", { href: address(more) }, text);
const caseLink = (t, text = caseText(t)) => link({ view: "case", case: t.caseId }, text);

function isChosen(thing) {
  // Ours with settings that the op would choose itself are shown where they are asked for.
  if (thing.variant && params.get("contender") !== thing.contender) return false;
  return Object.keys(FILTERS).filter((name) => params.get(name)).every((name) => (name === "text"
    ? params.get(name).toLowerCase().split(/\s+/).every((word) => thing.text.includes(word)) : [thing[name]].flat().includes(params.get(name))));
}

/** Change a parameter of this view. */
function choose({ target: { id, value } }) {
  if (value) params.set(id, value);
  else params.delete(id);
  history.replaceState(null, "", `#${params}`);
  render();
}

/** A labelled select among options, of which "" is all. */
const selectOf = (id, label, options) => h("label", {}, label, h("select", { id, oninput: choose },
  options.map((value) => h("option", { value, selected: value === params.get(id) }, value || "all"))));

/** A choice of this view among the entries of a map: the key and the value that were chosen, and the control. */
function pick(id, label, map) {
  const key = map.has(params.get(id)) ? params.get(id) : map.keys().next().value;
  return [key, map.get(key), selectOf(id, label, [...map.keys()])];
}

const small = (...children) => h("small", {}, children);

/** A table that scrolls by itself where the window is narrow; the first cell of a row is its head. */
function tableOf(caption, heads, rows, className = "") {
  const row = ([first, ...cells]) => h("tr", {}, h("th", { scope: "row" }, first), cells.map((cell) => h("td", {}, cell)));
  return h("div", { className: "scroll" }, h("table", { className }, h("caption", {}, caption),
    h("thead", {}, h("tr", {}, heads.map((title) => h("th", { scope: "col" }, title)))), h("tbody", {}, rows.map(row))));
}

const plusMinus = (t) => (t.spread ? ` ± ${(t.spread / 2).toLocaleString("en", { maximumSignificantDigits: 2 })}` : "");

/** What a number is beside what it could be, or must be. */
function remark(t) {
  const elements = t.case.op && t.kind === "emulator" ? t.case.rows * t.case.cols : 0;
  if (t.tbs && t.ceilings?.copy && !t.tflops) return `${percent(t.tbs / t.ceilings.copy)} of copy`;
  if (t.tflops) return `${short(t.tflops)} TFLOP/s`;
  if (t.tbs) return `${short(t.tbs)} TB/s`;
  if (t.quantity === "MMA operations" && t.flops) return `${short(t.value / t.flops)} × useful`;
  if (/^bytes /.test(t.quantity) && t.bytes && t.value) return `${percent(t.value / t.bytes)} of the least bytes`;
  return elements && t.value ? `${short(t.value / elements)} an element` : "";
}

/** A number of a table; that of the fastest contender is bold. */
const valueCell = (t, best) => (t ? h("span", { title: `${t.value} ${t.unit}, ${t.commit}` },
  h(t.value === best ? "b" : "span", {}, t.us ? short(t.value) : amount(t.value, t.unit)), plusMinus(t), small(remark(t))) : "–");

/** Entries of cases that tell rows of a table of times apart; others tell tables apart. */
const ROWS = ["rows", "tokens", "routing", "op", "directions", "amax", "call"];

/** Tables of a suite on a machine, cases in rows: times of contenders in columns, of anything else its quantities. */
function pivots(things) {
  const groups = Map.groupBy(things, (t) => (t.us ? `${t.unit}, ${t.measure}: ${caseText(t, (name) => !ROWS.includes(name))}` : t.case.op || t.case.product || ""));
  return [...groups.values()].sort((a, b) => b.length - a.length).map((group) => {
    const [{ us, unit, measure, case: first }] = group;
    // Rows are what tables are read by.
    const isCommon = (name) => name !== "rows" && group.every((t) => t.case[name] === first[name]);
    const columnOf = (t) => (us ? t.series : t.quantity);
    const titleOf = (t) => caseText(t, (name) => !isCommon(name)) || "details";
    const rows = Map.groupBy(group.toSorted((a, b) => natural(a.case.routing, b.case.routing) || a.tokens - b.tokens || natural(titleOf(a), titleOf(b)) || contenderOrder(a, b)),
      (t) => t.caseId + (us ? "" : t.series));
    const columns = unique(group.toSorted(us ? contenderOrder : (a, b) => natural(a.quantity, b.quantity)).map(columnOf));
    const made = [...rows.values()].map((row) => {
      const best = us && row.length > 1 ? Math.min(...row.map((t) => t.value)) : NaN;
      const title = caseLink(row[0], titleOf(row[0]));
      return [us ? title : [link({ kernel: row[0].kernel }, row[0].series), small(title)], ...columns.map((name) => valueCell(row.find((t) => columnOf(t) === name), best))];
    });
    const heads = columns.map((name) => name.split(" · ")).map(([who, format]) => [who, format && small(format)]);
    return tableOf([us && measure, caseText(group[0], isCommon)].filter(Boolean).join(": "), [us ? unit.replace("us", "µs") : "", ...heads], made, "pivot");
  });
}

/** Steps of histories as rows. */
const changesTable = (changes) => tableOf("Changes from commit to commit", ["what", "verdict", "change", "quantity", "values", "commits"], changes.map(({ thing: t, before, step }) => [
  [t.series, small(caseLink(t))], h("b", { className: step.verdict }, `${step.verdict === "worse" ? "▲" : "▼"} ${step.verdict}`),
  [step.worse_by > 1e6 ? "from 0" : `${step.value > before.value ? "+" : "−"}${percent(Math.abs(step.worse_by))}`, small(`noise ${percent(step.noise)}`)],
  [t.measure, small(t.place)], `${amount(before.value, t.unit)} → ${amount(step.value, t.unit)}`, `${before.commit} → ${step.commit}`,
]));
