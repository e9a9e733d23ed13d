// The page: one view at a time, by the address.

const THEMES = { system: "Theme: system", dark: "Theme: dark", light: "Theme: light" };

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = THEMES[theme];
  $("theme").dataset.theme = theme;
  try {
    localStorage.setItem("perf-theme", theme);
  } catch {
    // A page from a file may have no storage: the choice lasts as long as the page.
  }
  for (const plot of PLOTS.values()) plot.redraw();
}

function storedTheme() {
  try {
    return localStorage.getItem("perf-theme") in THEMES ? localStorage.getItem("perf-theme") : "system";
  } catch {
    return "system";
  }
}

function showNavigation() {
  const current = { kernel: "kernels", case: "latest" }[route[0]] || route[0];
  $("nav").replaceChildren(...Object.entries(VIEWS).filter(([, [title]]) => title).map(([path, [title]]) =>
    h("li", null, h("a", { href: address(path), "aria-current": path === current ? "page" : null }, title))));
}

/** Draw the view of the address; a new one takes the focus, so that it is read from its title. */
function render(isNew) {
  const content = $("content");
  const open = new Set([...content.querySelectorAll("details[open]")].map((d) => d.id));
  const focused = document.activeElement && content.contains(document.activeElement) ? document.activeElement.id : "";
  for (const plot of PLOTS.values()) if (plot.u) plot.u.destroy();
  PLOTS.clear();
  const [, view] = VIEWS[route[0]] || [null, () => ["No such page", h("p", null, h("a", { href: "#/" }, "Overview"))]];
  const [title, body] = view(...route.slice(1));
  const heading = h("h1", { tabindex: "-1" }, title);
  content.replaceChildren(heading, ...[body].flat(3).filter(Boolean));
  document.title = `${title} · grouped-kernels`;
  showNavigation();
  showFilters();
  if (isNew) {
    scrollTo(0, 0);
    heading.focus({ preventScroll: true });
  } else {
    for (const id of open) if (id && $(id)) $(id).open = true;
    if (focused && $(focused)) $(focused).focus();
  }
}

addEventListener("hashchange", () => {
  readAddress();
  render(true);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const plot of PLOTS.values()) plot.redraw();
});
// The first letter of a hash is not one of an element: the skip link is not an address of a view.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  $("content").focus();
});
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf($("theme").dataset.theme) + 1) % names.length]);
});

readAddress();
buildFilters();
if (innerWidth < 700) $("filter-box").open = false;
setTheme(storedTheme());
render(false);
window.perfDashboard = { plots: PLOTS };
