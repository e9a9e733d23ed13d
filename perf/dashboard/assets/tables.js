// The choices of a view, which are in its address so that it can be shared; and tables.

/** Filters: a field of an entry, and its label. */
const FILTERS = { suite: "Suite", section: "GPU or machine", kernel: "Kernel, and its peers", format: "Format", contender: "Contender", text: "Text" };
let params = new URLSearchParams();

/** The address of a view with the current filters and other parameters. */
const address = (more) => `#${new URLSearchParams({ ...Object.fromEntries([...params].filter(([name]) => name in FILTERS)), ...more })}`;

const link = (more, text) => h("a", { href: address(more) }, text);
const caseLink = (t, text = caseText(t)) => link({ view: "case", case: t.caseId }, text);

function isChosen(entry) {
  // Variants with settings that the op would choose itself are hidden until they are selected.
  if (entry.variant && params.get("contender") !== entry.contender) return false;
  return Object.keys(FILTERS).filter((name) => params.get(name)).every((name) => (name === "text"
    ? params.get(name).toLowerCase().split(/\s+/).every((word) => entry.text.includes(word)) : [entry[name]].flat().includes(params.get(name))));
}

/** Change a parameter of this view. */
function choose({ target: { id, value } }) {
  if (value) params.set(id, value);
  else params.delete(id);
  history.replaceState(null, "", `#${params}`);
  render();
}

/** A labelled select; the option "" means all. */
const selectOf = (id, label, options) => h("label", {}, label, h("select", { id, oninput: choose },
  options.map((value) => h("option", { value, selected: value === params.get(id) }, value || "all"))));

/** A choice of this view among the keys of a map: the chosen key, its value, and the control. */
function pick(id, label, map) {
  const key = map.has(params.get(id)) ? params.get(id) : map.keys().next().value;
  return [key, map.get(key), selectOf(id, label, [...map.keys()])];
}

const small = (...children) => h("small", {}, children);

/** A table that scrolls in a narrow window; the first cell of a row is its head. */
function tableOf(caption, heads, rows, className = "") {
  const row = ([head, ...cells]) => h("tr", {}, h("th", { scope: "row" }, head), cells.map((cell) => h("td", {}, cell)));
  return h("div", { className: "scroll" }, h("table", { className }, h("caption", {}, caption),
    h("thead", {}, h("tr", {}, heads.map((title) => h("th", { scope: "col" }, title)))), h("tbody", {}, rows.map(row))));
}

const plusMinus = (t) => (t.spread ? ` ± ${(t.spread / 2).toLocaleString("en", { maximumSignificantDigits: 2 })}` : "");

/** A number relative to its ceiling or its minimum. */
function remark(t) {
  const elements = t.case.op && t.kind === "emulator" ? t.case.rows * t.case.cols : 0;
  if (t.tbs && t.ceilings?.copy && !t.tflops) return `${percent(t.tbs / t.ceilings.copy)} of copy`;
  if (t.tflops) return `${short(t.tflops)} TFLOP/s`;
  if (t.tbs) return `${short(t.tbs)} TB/s`;
  if (t.quantity === "MMA operations" && t.flops) return `${short(t.value / t.flops)} × useful`;
  if (/^bytes /.test(t.quantity) && t.bytes && t.value) return `${percent(t.value / t.bytes)} of the least bytes`;
  return elements && t.value ? `${short(t.value / elements)} per element` : "";
}

/** A number of a table; the number of the fastest contender is bold. */
const valueCell = (t, best) => (t ? h("span", { title: `${t.value} ${t.unit}, ${t.commit}` },
  h(t.value === best ? "b" : "span", {}, t.us ? short(t.value) : amount(t.value, t.unit)), plusMinus(t), small(remark(t))) : "–");

/** Fields of cases that distinguish rows of a table of times; other fields distinguish tables. */
const ROW_FIELDS = ["rows", "tokens", "routing", "op", "directions", "amax", "call"];

/** Tables of a suite on a machine. Rows are cases; columns are contenders for times, else quantities. */
function pivots(entries) {
  const groups = Map.groupBy(entries, (t) => (t.us ? `${t.unit}, ${t.measure}: ${caseText(t, (name) => !ROW_FIELDS.includes(name))}` : t.case.op || t.case.product || ""));
  return [...groups.values()].sort((a, b) => b.length - a.length).map((group) => {
    const [{ us, unit, measure, case: sample }] = group;
    // Every row shows its number of rows, even if all are equal.
    const isCommon = (name) => name !== "rows" && group.every((t) => t.case[name] === sample[name]);
    const columnOf = (t) => (us ? t.series : t.quantity);
    const titleOf = (t) => caseText(t, (name) => !isCommon(name)) || "details";
    const rows = Map.groupBy(group.toSorted((a, b) => natural(a.case.routing, b.case.routing) || a.tokens - b.tokens || natural(titleOf(a), titleOf(b)) || contenderOrder(a, b)),
      (t) => t.caseId + (us ? "" : t.series));
    const columns = unique(group.toSorted(us ? contenderOrder : (a, b) => natural(a.quantity, b.quantity)).map(columnOf));
    const body = [...rows.values()].map((row) => {
      const best = us && row.length > 1 ? Math.min(...row.map((t) => t.value)) : NaN;
      const title = caseLink(row[0], titleOf(row[0]));
      return [us ? title : [link({ kernel: row[0].kernel }, row[0].series), small(title)], ...columns.map((name) => valueCell(row.find((t) => columnOf(t) === name), best))];
    });
    const heads = columns.map((name) => name.split(" · ")).map(([contender, format]) => [contender, format && small(format)]);
    return tableOf([us && measure, caseText(group[0], isCommon)].filter(Boolean).join(": "), [us ? unit.replace("us", "µs") : "", ...heads], body, "pivot");
  });
}

/** Steps of histories as rows. */
const changesTable = (changes) => tableOf("Changes from commit to commit", ["contender", "verdict", "change", "quantity", "values", "commits"], changes.map(({ entry: t, before, step }) => [
  [t.series, small(caseLink(t))], h("b", { className: step.verdict }, `${step.verdict === "worse" ? "▲" : "▼"} ${step.verdict}`),
  [step.worse_by > 1e6 ? "from 0" : `${step.value > before.value ? "+" : "−"}${percent(Math.abs(step.worse_by))}`, small(`noise ${percent(step.noise)}`)],
  [t.measure, small(t.device)], `${amount(before.value, t.unit)} → ${amount(step.value, t.unit)}`, `${before.commit} → ${step.commit}`,
]));
