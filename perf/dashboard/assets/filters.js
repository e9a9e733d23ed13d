// What is looked at: it is kept in the address, so that a view can be sent to somebody.

const FILTERS = ["suite", "place", "format", "contender", "text"];
let route = [];
let params = new URLSearchParams();

function readAddress() {
	const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
	route = path.split("/").map(decodeURIComponent);
	params = new URLSearchParams(query || "");
}

const hashOf = (path, query) => `#/${path}${query.size ? `?${query}` : ""}`;

/** The address of a view, with the filters as they are and other parameters given. */
function address(path, more = {}) {
	const kept = FILTERS.filter((name) => params.get(name)).map((name) => [name, params.get(name)]);
	return hashOf(path, new URLSearchParams({ ...Object.fromEntries(kept), ...more }));
}

/** Change a parameter of this view. */
function choose(name, value) {
	if (value) params.set(name, value);
	else params.delete(name);
	history.replaceState(null, "", hashOf(route.join("/"), params));
	render(false);
}

function isChosen(thing) {
	const is = (name, value) => !params.get(name) || params.get(name) === value;
	if (thing.variant && params.get("contender") !== thing.contender) return false;
	const words = (params.get("text") || "").toLowerCase().split(/\s+/);
	return is("suite", thing.suite) && is("place", thing.where) && is("format", thing.format) && is("contender", thing.contender)
		&& words.every((word) => thing.text.includes(word));
}

const chosen = (things = THINGS) => things.filter(isChosen);

const field = (id, label, control) => h("div", { class: "field" }, h("label", { for: id }, label), control);

/** A labelled select: options by [value, text], in groups by title. */
function selectField(id, label, groups, selected, change) {
	const made = Object.entries(groups).filter(([, options]) => options.length).map(([title, options]) => {
		const own = options.map(([value, text]) => h("option", { value, selected: value === selected }, text));
		return title ? h("optgroup", { label: title }, own) : own;
	});
	return field(id, label, h("select", { id, onchange: (e) => change(e.target.value) }, made));
}

function buildFilters() {
	const select = (name, label, all, groups) => selectField(`filter-${name}`, label, { "": [["", all]], ...groups }, "", (value) => choose(name, value));
	const of = (of, things = THINGS) => unique(things.map(of)).filter(Boolean).sort(natural).map((value) => [value, value.replace(/^(gpu|cpu|emulator):/, "")]);
	const places = Object.entries(KINDS).map(([kind, title]) => [title, of((t) => t.where, THINGS.filter((t) => t.kind === kind))]);
	let timer = 0;
	const typed = (event) => {
		clearTimeout(timer);
		timer = setTimeout(() => choose("text", event.target.value.trim()), 120);
	};
	$("filter-form").replaceChildren(
		select("suite", "Suite", "All suites", { Suites: of((t) => t.suite) }),
		select("place", "GPU or machine", "All machines", Object.fromEntries(places)),
		select("format", "Format", "All formats", { Formats: of((t) => t.format) }),
		select("contender", "Contender", "All contenders",
			{ Contenders: of((t) => !t.variant && t.contender), "Our tuning variants": of((t) => t.variant && t.contender) }),
		field("filter-text", "Text", h("input", { id: "filter-text", type: "search", placeholder: "DeepSeek wgrad", autocomplete: "off", oninput: typed })),
		h("button", { type: "button", id: "filter-clear", onclick: clearFilters }, "Clear"),
	);
	$("filter-form").addEventListener("submit", (event) => event.preventDefault());
}

function clearFilters() {
	for (const name of FILTERS) params.delete(name);
	choose("text", "");
}

/** Make the controls and the count agree with the address. */
function showFilters() {
	for (const name of FILTERS) {
		const control = $(`filter-${name}`);
		// What is being typed is newer than the address.
		if (control !== document.activeElement || control.tagName === "SELECT") control.value = params.get(name) || "";
	}
	const active = FILTERS.filter((name) => params.get(name)).length;
	$("filter-count").textContent = active ? `(${active} active)` : "";
	const text = `${chosen().length} of ${THINGS.length} measured things are shown.`;
	if ($("status").textContent !== text) $("status").textContent = text;
}
