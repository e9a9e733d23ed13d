// What is looked at: it is kept in the address, so that a view can be sent to somebody.

const FILTERS = ["suite", "place", "format", "contender", "text", "variants"];
let route = [];
let params = new URLSearchParams();

function readAddress() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  route = path.split("/").map(decodeURIComponent);
  params = new URLSearchParams(query || "");
}

/** The address of a view, with the filters as they are and other parameters given. */
function address(path, more = {}) {
  const kept = new URLSearchParams();
  for (const name of FILTERS) if (params.get(name)) kept.set(name, params.get(name));
  for (const [name, value] of Object.entries(more)) {
    if (value === null || value === "") kept.delete(name);
    else kept.set(name, value);
  }
  return `#/${path}${kept.size ? `?${kept}` : ""}`;
}

/** Change a parameter of this view. */
function choose(name, value) {
  if (value) params.set(name, value);
  else params.delete(name);
  history.replaceState(null, "", `#/${route.join("/")}${params.size ? `?${params}` : ""}`);
  render(false);
}

function isChosen(thing) {
  const is = (name, value) => !params.get(name) || params.get(name) === value;
  if (thing.variant && !params.get("variants") && params.get("contender") !== thing.contender) return false;
  if (!is("suite", thing.suite) || !is("place", thing.where)) return false;
  if (!is("format", thing.format) || !is("contender", thing.contender)) return false;
  const words = (params.get("text") || "").toLowerCase().split(/\s+/).filter(Boolean);
  return words.every((word) => thing.text.includes(word));
}

const chosen = (things = THINGS) => things.filter(isChosen);

function selectField(name, label, groups, all) {
  const option = (value, text) => h("option", { value }, text);
  const select = h("select", { id: `filter-${name}`, onchange: (e) => choose(name, e.target.value) }, option("", all));
  for (const [title, options] of groups) {
    const made = options.map(([value, text]) => option(value, text));
    select.append(...(title ? [h("optgroup", { label: title }, made)] : made));
  }
  return h("div", { class: "field" }, h("label", { for: `filter-${name}` }, label), select);
}

const pairs = (values) => unique(values).filter(Boolean).sort(natural).map((v) => [v, v]);

function buildFilters() {
  const places = Object.entries(KINDS).map(([kind, title]) => {
    const found = unique(THINGS.filter((t) => t.kind === kind).map((t) => t.place)).sort(natural);
    return [title, found.map((place) => [`${kind}:${place}`, place || "unknown"])];
  });
  let timer = 0;
  const typed = (e) => {
    clearTimeout(timer);
    timer = setTimeout(() => choose("text", e.target.value.trim()), 120);
  };
  $("filter-form").replaceChildren(
    selectField("suite", "Suite", [["", pairs(THINGS.map((t) => t.suite))]], "All suites"),
    selectField("place", "GPU or machine", places.filter(([, options]) => options.length), "All machines"),
    selectField("format", "Format", [["", pairs(THINGS.map((t) => t.format))]], "All formats"),
    selectField("contender", "Contender", [
      ["Contenders", pairs(THINGS.filter((t) => !t.variant).map((t) => t.contender))],
      ["Our variants", pairs(THINGS.filter((t) => t.variant).map((t) => t.contender))],
    ], "All contenders"),
    h("div", { class: "field" }, h("label", { for: "filter-text" }, "Text"),
      h("input", { id: "filter-text", type: "search", placeholder: "DeepSeek wgrad", autocomplete: "off", oninput: typed })),
    h("div", { class: "field check" },
      h("input", { id: "filter-variants", type: "checkbox", onchange: (e) => choose("variants", e.target.checked ? "1" : "") }),
      h("label", { for: "filter-variants" }, "Our tuning variants")),
    h("button", { type: "button", id: "filter-clear", onclick: clearFilters }, "Clear"),
  );
  $("filter-form").addEventListener("submit", (e) => e.preventDefault());
}

function clearFilters() {
  for (const name of FILTERS) params.delete(name);
  choose("text", "");
}

/** Make the controls and the count agree with the address. */
function showFilters() {
  for (const name of FILTERS) {
    const control = $(`filter-${name}`);
    if (control.type === "checkbox") control.checked = Boolean(params.get(name));
    else if (control !== document.activeElement || control.tagName === "SELECT") control.value = params.get(name) || "";
  }
  const active = FILTERS.filter((name) => params.get(name)).length;
  $("filter-count").textContent = active ? `(${active} active)` : "";
  $("filter-clear").disabled = !active;
  const text = `${chosen().length} of ${THINGS.length} measured things are shown.`;
  if ($("status").textContent !== text) $("status").textContent = text;
}
