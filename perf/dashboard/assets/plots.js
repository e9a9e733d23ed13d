// Which points the plots have.

const isRace = (t) => t.unit in FACTORS && (t.what === "time" || t.what === "host time");

/** Lines that can be drawn over tokens per expert: cases alike but for their rows. */
function tokenGroups(things) {
  const found = things.filter((t) => isRace(t) && tokensOf(t.case));
  const names = (t) => Object.keys(t.case).filter((name) => name !== "rows");
  const groups = groupBy(found, (t) => [t.suite, t.kind, t.place, t.protocol, caseText(t.case, names(t))].join("|"));
  return [...groups.values()].filter((group) => unique(group.map((t) => t.case.rows)).length > 1).map((group) => {
    const [first] = group;
    const place = first.place.replace("NVIDIA ", "");
    return { things: group, kind: first.kind, title: `${first.suite} on ${place}: ${caseText(first.case, names(first))}`, key: `${first.suite}-${first.where}-${first.protocol}-${caseText(first.case, names(first))}` };
  }).sort((a, b) => b.things.length - a.things.length || natural(a.title, b.title));
}

const RATES = {
  time: { label: "time, µs", of: (t) => t.latest.value * FACTORS[t.unit], half: (t) => ((t.latest.spread || 0) / 2) * FACTORS[t.unit], unit: "us" },
  tflops: { label: "useful TFLOP/s", of: (t) => t.latest.tflops, half: () => 0, unit: "TFLOP/s" },
  tbs: { label: "least bytes, TB/s", of: (t) => t.latest.tbs, half: () => 0, unit: "TB/s" },
  speed: { label: "speed relative to torch in bf16", of: speedOf, half: () => 0, unit: "×", linear: true },
};

/** How many times faster than torch in bf16 in the same case; null where that was not measured. */
function speedOf(t, group) {
  const base = baseOf(t, group);
  return base ? base.latest.value / t.latest.value : null;
}

const baseOf = (t, group) => group.things.find((o) => o.contender === "torch" && /^(bf16|bfloat16)$/i.test(o.format) && o.caseId === t.caseId);

/** Said where the two were not measured together. */
function besideWhat(t, group) {
  const [own, base] = [t.latest.run.commit, baseOf(t, group).latest.run.commit];
  return own === base ? `both at ${own}` : `measured at ${own}, torch at ${base}`;
}

function tokensPlot(name, group, metric = "time") {
  const rate = RATES[metric];
  const series = [...groupBy(group.things.filter((t) => rate.of(t, group)), (t) => t.series)].map(([title, things]) => ({
    name: title, line: true,
    points: things.sort((a, b) => a.case.rows - b.case.rows).map((t) => ({
      x: tokensOf(t.case), y: rate.of(t, group), half: rate.half(t), label: `${tokensText(t.case)} an expert`,
      text: amount(rate.of(t, group), rate.unit), href: address(`case/${t.caseId}`), note: metric === "speed" ? besideWhat(t, group) : remark(t), thing: t.id,
    })),
  }));
  series.sort((a, b) => contenderOrder(THINGS[a.points[0].thing], THINGS[b.points[0].thing]));
  const ticks = unique(series.flatMap((s) => s.points.map((p) => p.x))).sort((a, b) => a - b);
  return plotFigure({
    name, title: `${group.title}: ${rate.label}`, series, columns: ["tokens an expert", rate.label],
    x: { label: "tokens an expert", log: true, ticks, room: 34 }, y: { label: rate.label, log: !rate.linear, zero: rate.linear },
  });
}

/** Rates of products over their arithmetic intensity, under the roofs of a GPU. */
function rooflinePlot(gpu, things) {
  const found = things.filter((t) => isRace(t) && t.latest.tflops && t.latest.bytes && t.place === gpu);
  const series = scatter(found, (t) => t.latest.flops / t.latest.bytes, (t) => t.latest.tflops, (t) =>
    `${short(t.latest.tflops)} TFLOP/s at ${short(t.latest.flops / t.latest.bytes)} FLOP/B`);
  if (series.length) series.push(...roofLines(gpu, series.flatMap((s) => s.points.map((p) => p.x))));
  return plotFigure({
    name: "roofline", title: `Products on ${gpu}: TFLOP/s over FLOP a byte`, series, columns: ["case", "rate"],
    x: { label: "useful FLOP / least byte", log: true }, y: { label: "TFLOP/s", log: true },
  });
}

function scatter(things, x, y, text) {
  return [...groupBy([...things].sort(contenderOrder), (t) => t.series)].map(([name, group]) => ({
    name, line: false,
    points: group.map((t) => ({
      x: x(t), y: y(t), label: caseText(t.case), text: text(t), href: address(`case/${t.caseId}`), note: amount(t.latest.value, t.unit), thing: t.id,
    })).sort((a, b) => a.x - b.x),
  }));
}

function roofLines(gpu, xs) {
  const roofs = DATA.roofs[gpu].map(([kind, name, rate, measured]) => ({ kind, name, rate, measured }));
  const memory = roofs.find((roof) => roof.kind === "copy");
  const products = roofs.filter((roof) => roof.kind !== "copy");
  if (!memory || !products.length) return [];
  const said = (roof, unit) => `${roof.name} ${short(roof.rate)} ${unit}, ${roof.measured ? "measured" : "published"}`;
  const ridge = (roof) => roof.rate / memory.rate;
  const top = Math.max(...products.map(ridge));
  const [low, high] = [Math.min(...xs), Math.max(...xs, top) * 1.5];
  const line = (roof, name, points) => ({ name, roof: true, measured: roof.measured, points: points.map(([x, y]) => ({ x, y })) });
  return [
    line(memory, said(memory, "TB/s"), [[low, low * memory.rate], [top, top * memory.rate]]),
    ...products.map((roof) => line(roof, said(roof, "TFLOP/s"), [[ridge(roof), roof.rate], [high, roof.rate]])),
  ];
}

/** Rates of what only moves bytes, under the rate of a copy. */
function bandwidthPlot(gpu, things) {
  const found = things.filter((t) => isRace(t) && t.latest.tbs && !t.latest.flops && t.place === gpu);
  const share = (t) => (t.latest.ceilings.copy ? `, ${percent(t.latest.tbs / t.latest.ceilings.copy)} of a copy in the same run` : "");
  const series = scatter(found, (t) => t.latest.bytes / 1e6, (t) => t.latest.tbs, (t) => `${short(t.latest.tbs)} TB/s${share(t)}`);
  const copy = DATA.roofs[gpu].find(([kind]) => kind === "copy");
  if (series.length && copy) {
    const xs = series.flatMap((s) => s.points.map((p) => p.x));
    const name = `copy ${short(copy[2])} TB/s, ${copy[3] ? "measured" : "published"}`;
    series.push({ name, roof: true, measured: copy[3], points: [Math.min(...xs) / 1.05, Math.max(...xs) * 1.05].map((x) => ({ x, y: copy[2] })) });
  }
  return plotFigure({
    name: "bandwidth", title: `Memory-bound kernels on ${gpu}: TB/s of the least bytes`, series, columns: ["case", "rate"],
    x: { label: "least bytes, MB", log: true, pad: 1.15 }, y: { label: "TB/s", zero: true },
  });
}

/** Histories that can share a plot: contenders of one case and quantity. */
function historyGroups(things) {
  const groups = groupBy(things.filter((t) => t.history), (t) => [t.suite, t.where, t.caseId, t.what, t.protocol].join("|"));
  return [...groups.values()].map((group) => {
    const [t] = group;
    const title = `${t.suite} on ${t.place.replace("NVIDIA ", "")}: ${caseText(t.case)}: ${quantityOf(t)}`;
    return { things: group, title, key: `${t.caseId}-${t.where}-${t.what}-${t.protocol}`, size: Math.max(...group.map((x) => x.history.length)) };
  }).sort((a, b) => quantityRank(a.things[0]) - quantityRank(b.things[0]) || b.size - a.size || natural(a.title, b.title));
}

function historyPlot(name, group) {
  const commits = unique(group.things.flatMap((t) => t.history.map((s) => s.commit))).sort((a, b) => a - b);
  const place = new Map(commits.map((commit, i) => [commit, i]));
  const { unit } = group.things[0];
  const series = [...group.things].sort(contenderOrder).map((t) => ({
    name: t.series, line: true,
    points: t.history.map((step, i) => ({
      x: place.get(step.commit), y: step.value, half: (step.spread || 0) / 2, mark: step.sign,
      label: `${commitName(step.commit)}, ${dayOf(DATA.commits[step.commit][1])}`, text: amount(step.value, unit),
      note: i && step.sign ? `${VERDICTS[step.sign][0]} by ${percent(Math.abs(step.worseBy))}, noise ${percent(step.threshold)}` : "",
      href: address(`case/${t.caseId}`), thing: t.id,
    })),
  }));
  const label = `${group.things[0].what}${unit === "1" ? "" : `, ${unit === "us" ? "µs" : unit}`}`;
  return plotFigure({
    name, title: group.title, series, columns: ["commit", label],
    x: { label: "commit", ticks: commits.map((_, i) => i), format: (i) => (commits[i] === undefined ? "" : commitName(commits[i])), room: 64, pad: 0.4 },
    y: { label, log: series.every((s) => s.points.every((p) => p.y - p.half > 0)) },
  });
}

/** Steps that are worse or better, the newest first. */
function changesOf(things, sign = 0) {
  const changes = things.filter((t) => t.history).flatMap((thing) => thing.history.slice(1).map((step, i) => ({
    thing, step, before: thing.history[i], open: i + 2 === thing.history.length,
  })));
  return changes.filter((c) => (sign ? c.step.sign === sign : c.step.sign))
    .sort((a, b) => b.step.commit - a.step.commit || Math.abs(b.step.worseBy) - Math.abs(a.step.worseBy));
}
