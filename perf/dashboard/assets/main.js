// The page: one view at a time, by the address.

/** Draw the view of the address; a new one takes the focus, so that it is read from its title. */
function render(isNew) {
	const content = $("content");
	const open = [...content.querySelectorAll("details[open]")].map((details) => details.id);
	const focused = content.contains(document.activeElement) && document.activeElement.id;
	PLOTS.clear();
	const [, view] = VIEWS[route[0]] || [null, () => missing("page", "", "Latest numbers")];
	const [title, ...body] = view(...route.slice(1));
	const heading = h("h1", { tabindex: "-1" }, title);
	content.replaceChildren(heading, ...body.flat(Infinity).filter(Boolean));
	document.title = `${title} · grouped-kernels`;
	const current = { kernel: "kernels", case: "" }[route[0]] ?? route[0];
	$("nav").replaceChildren(...Object.entries(VIEWS).filter(([, [name]]) => name).map(([path, [name]]) =>
		h("li", null, h("a", { href: address(path), "aria-current": path === current && "page" }, name))));
	showFilters();
	if (isNew) {
		scrollTo(0, 0);
		heading.focus({ preventScroll: true });
	} else {
		for (const id of open) if ($(id)) $(id).open = true;
		if (focused) $(focused)?.focus();
	}
}

addEventListener("hashchange", () => {
	readAddress();
	render(true);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => PLOTS.forEach((plot) => plot.redraw()));
// A hash is the address of a view, not an element: the skip link needs help.
document.querySelector(".skip").addEventListener("click", (event) => {
	event.preventDefault();
	$("content").focus();
});

readAddress();
buildFilters();
if (innerWidth < 700) $("filter-box").open = false;
render(false);
