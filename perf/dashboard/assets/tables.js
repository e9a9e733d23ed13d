// Tables.

/** A table that scrolls by itself where the window is narrow. */
function tableOf(caption, heads, rows, options = {}) {
  const head = heads.map((title) => h("th", { scope: "col" }, title));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", options, h("caption", { class: options.caption ? null : "said" }, caption),
      h("thead", null, h("tr", null, head)), h("tbody", null, rows)));
}

const caseLink = (thing, text) => h("a", { href: address(`case/${thing.caseId}`) }, text);

/** Half of the spread, as an error. */
function plusMinus(thing) {
  const { spread } = thing.latest;
  return spread ? ` ± ${(spread / 2).toLocaleString("en", { maximumSignificantDigits: 2 })}` : "";
}

/** What a number is beside what it could be, if a ceiling says. */
function remark(thing) {
  const { tbs, tflops, ceilings } = thing.latest;
  if (tbs && ceilings.copy && !tflops) return `${percent(tbs / ceilings.copy)} of copy`;
  if (tflops) return `${short(tflops)} TFLOP/s`;
  return tbs ? `${short(tbs)} TB/s` : "";
}

function raceCell(thing, best) {
  if (!thing) return h("td", { class: "number none" }, "–", said("not measured"));
  const { unit, latest: { value } } = thing;
  const isBest = value === best;
  const bar = best > 0 && value > 0 ? `--speed:${((100 * best) / value).toFixed(1)}%` : null;
  return h("td", { class: `number race${isBest ? " best" : ""}`, style: bar, title: `${value} ${thing.unit}, ${thing.latest.run.commit}` },
    h("span", { class: "value" }, unit === "1" ? short(value) : fixed(value), h("small", null, plusMinus(thing))), isBest ? said(" fastest") : null,
    h("small", { class: "remark" }, remark(thing)));
}

/** Contenders in columns, cases in rows. All have one quantity, and one of the kinds. */
function raceTable(caption, things) {
  const columns = unique([...things].sort(contenderOrder).map((t) => t.series));
  const rows = [...groupBy(things, (t) => t.caseId).values()];
  const tokens = (t) => tokensOf(t.case) || 0;
  const [, names] = splitCase(things[0].suite, things[0].case);
  const varying = names.filter((name) => unique(rows.map((r) => r[0].case[name])).length > 1);
  const even = (t) => (t.case.routing && t.case.routing !== "balanced" ? 1 : 0);
  rows.sort(([a], [b]) => even(a) - even(b) || natural(a.case.routing || "", b.case.routing || "") || tokens(a) - tokens(b)
    || natural(caseText(a.case), caseText(b.case)));
  const byTokens = varying.every((name) => name === "rows" || name === "routing") && tokens(things[0]);
  const routing = (c) => (c.routing && c.routing !== "balanced" ? ` ${c.routing}` : "");
  const title = (c) => (byTokens ? [short(tokensOf(c)), said(tokensOf(c) === 1 ? " token an expert" : " tokens an expert"), routing(c)]
    : [caseText(c, varying.length ? varying : names)]);
  const made = rows.map((row) => {
    const best = Math.min(...row.map((t) => t.latest.value));
    const cells = columns.map((name) => raceCell(row.find((t) => t.series === name), row.length > 1 ? best : NaN));
    return h("tr", null, h("th", { scope: "row" }, caseLink(row[0], title(row[0].case))), cells);
  });
  const heads = columns.map((name) => name.split(" · ")).map(([who, format]) => [who, format ? h("small", null, format) : null]);
  const unit = { us: "µs", 1: "number" }[things[0].unit] || things[0].unit;
  return tableOf(caption, [byTokens ? ["tokens an expert", h("small", null, unit)] : unit, ...heads], made, { class: "wide numeric race", caption: true });
}

/** Tables of a suite on one machine, with a choice of the quantity if there are several. */
function raceTables(things, id) {
  const names = quantitiesOf(things);
  const wanted = names.includes(params.get(id)) ? params.get(id) : names[0];
  const select = names.length > 1 && h("p", { class: "field inline" }, h("label", { for: id }, "Quantity"),
    h("select", { id, onchange: (e) => choose(id, e.target.value) },
      names.map((name) => h("option", { value: name, selected: name === wanted }, name))));
  const found = things.filter((t) => quantityOf(t) === wanted);
  const groups = groupBy(found, (t) => caseText(t.case, splitCase(t.suite, t.case)[0]));
  const sorted = [...groups].sort((a, b) => b[1].length - a[1].length);
  const tables = sorted.map(([title, group]) => raceTable(title || wanted, group));
  return [select || h("p", { class: "quantity" }, wanted), tables];
}

const COUNT_ORDER = ["warp instructions", "thread instructions", "bytes read", "bytes read by TMA", "bytes written", "bytes written by TMA",
  "sectors written", "shared accesses", "shared wavefronts", "MMA operations"];

function whatOrder(a, b) {
  const place = (what) => (COUNT_ORDER.indexOf(what) + 1 || 99);
  return place(a) - place(b) || natural(a, b);
}

/** Quantities in columns; what is measured in rows. */
function profileTable(title, things) {
  const whats = unique(things.filter((t) => t.latest.value !== 0).map((t) => t.what)).sort(whatOrder);
  const rows = [...groupBy(things, (t) => `${t.caseId} ${t.series}`).values()];
  rows.sort(([a], [b]) => natural(caseText(a.case), caseText(b.case)) || contenderOrder(a, b));
  const [first] = things;
  const names = unique(things.flatMap((t) => Object.keys(t.case)));
  const common = names.filter((name) => things.every((t) => t.case[name] === first.case[name]));
  const others = names.filter((name) => !common.includes(name));
  const caption = [title, caseText(first.case, common)].filter(Boolean).join(": ");
  const made = rows.map((row) => {
    const cell = (what) => {
      const thing = row.find((t) => t.what === what);
      return thing ? h("td", { class: "number", title: thing.latest.value }, amount(thing.latest.value, thing.unit))
        : h("td", { class: "number none" }, "–", said("not measured"));
    };
    const page = row[0].kernel ? h("a", { href: address(`kernel/${row[0].kernel.slug}`) }, row[0].series) : row[0].series;
    return h("tr", null, h("th", { scope: "row" }, page, h("small", null, caseLink(row[0], caseText(row[0].case, others) || "details"))), whats.map(cell));
  });
  return tableOf(caption, ["", ...whats], made, { class: "wide numeric", caption: true });
}

function profileTables(things) {
  const groups = groupBy(things, (t) => t.case.op || (t.case.product ? `gemm, ${t.case.product}` : t.suite));
  return [...groups].map(([name, group]) => profileTable(groups.size > 1 ? `${name} on ${group[0].place}` : "", group));
}

const VERDICTS = { 1: ["worse", "▲ worse"], "-1": ["better", "▼ better"], 0: ["same", "same"] };

/** Steps of histories as rows. */
function changesTable(caption, changes) {
  const rows = changes.map(({ thing, before, step }) => {
    const [kind, text] = VERDICTS[step.sign];
    return h("tr", null,
      h("td", { class: `verdict ${kind}` }, text),
      h("td", { class: "number" }, step.worseBy > 1e6 ? "from 0" : signed(step.worseBy), h("small", null, `noise ${percent(step.threshold)}`)),
      h("th", { scope: "row" }, thing.series, h("small", null, caseLink(thing, caseText(thing.case)))),
      h("td", null, thing.what, h("small", null, `${thing.place}${thing.protocol ? `, ${thing.protocol}` : ""}`)),
      h("td", { class: "number" }, `${amount(before.value, thing.unit)} → ${amount(step.value, thing.unit)}`),
      h("td", null, `${commitName(before.commit)} → ${commitName(step.commit)}`));
  });
  return tableOf(caption, ["verdict", "change", "what", "quantity", "values", "commits"], rows, { class: "wide changes" });
}
