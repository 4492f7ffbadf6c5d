// Client-side code: changes of the link, and keys. Everything on the page follows from the link.
(() => {
  "use strict";

  // The link is the address of the page. It changes only here, and at once, so that two changes in a row both take
  // effect; Dash then follows the address, as it does for its own links.
  function goTo(search) {
    history.pushState({}, "", search);
    dispatchEvent(new CustomEvent("_dashprivate_pushstate"));
  }

  // Change parameters of the link; null or "" removes one. An unchanged link triggers nothing.
  function go(changes) {
    const query = new URLSearchParams(location.search), now = new URLSearchParams(location.search);
    for (const [key, value] of Object.entries(changes)) {
      if (value === null || value === undefined || value === "") query.delete(key);
      else query.set(key, value);
    }
    query.sort();
    now.sort();
    if (query.toString() !== now.toString()) goTo("?" + query);
  }

  function themed() {
    const dark = new URLSearchParams(location.search).get("theme") === "dark";
    document.documentElement.dataset.theme = dark ? "dark" : "light";
  }

  function toggleTheme() {
    const dark = document.documentElement.dataset.theme === "dark";
    const theme = dark ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try { localStorage.setItem("dpro-theme", theme); } catch { /* storage is off: of this page alone */ }
    go({ theme });
  }

  function toggle(name) {
    const dialog = document.getElementById(name);
    if (dialog.open) dialog.close();
    else dialog.showModal();
  }

  // The tabs of the views, and all links to views; views without data are in the menu.
  const tabs = () => [...document.querySelectorAll("#nav a")];
  const links = () => [...document.querySelectorAll("#nav a, #more a")];
  const SHARED = ["run", "against", "steps", "ranks", "time", "theme"];

  // The link to a view keeps the run, the selection and the theme, and drops the parameters of the current view.
  function addressOf(view, search) {
    const query = new URLSearchParams(search);
    for (const key of [...query.keys()]) if (!SHARED.includes(key)) query.delete(key);
    query.set("view", view);
    return "?" + query;
  }

  // The link without selection and filter: sections about the whole run change only if this link does.
  const SELECTION = ["steps", "ranks", "time"];
  function wholeOf(search) {
    const query = new URLSearchParams(search);
    for (const key of [...SELECTION, "filter"]) query.delete(key);
    return "?" + query;
  }

  // Going back changes the filter, too, but not under the hands of someone who types.
  function refilter(search) {
    const box = document.getElementById("filter"), value = new URLSearchParams(search).get("filter") || "";
    if (box && box !== document.activeElement && box.value !== value) dash_clientside.set_props("filter", { value });
  }

  let whole = wholeOf(location.search);

  // The shown run and the one compared with it, as in `named_runs`.
  function runsOf(search) {
    const query = new URLSearchParams(search);
    return ["run", "against"].map((key) => query.get(key) || "");
  }

  // Until the page of another run, or of another comparison, arrives, say so in place of the earlier answers.
  function replaced(search, shown) {
    const [run, against] = runsOf(search), changing = document.getElementById("changing");
    const stays = shown.of.join("\n") === [run, against].join("\n");
    const offered = [...document.querySelectorAll("#pick-run option")].find((option) => option.value === run);
    const name = offered ? offered.textContent : run || document.getElementById("run").textContent;
    if (!stays) changing.textContent = `working out the answers for ${name}${against ? ` compared with ${against}` : ""} …`;
    changing.hidden = stays;
    changing.className = stays ? "" : "pending";
    document.querySelector("main").classList.toggle("changing", !stays);
    return !stays;
  }

  // A link in a section about the whole run keeps the selection, unless it brings another.
  function withSelection(search) {
    const query = new URLSearchParams(search), now = new URLSearchParams(location.search);
    for (const key of SELECTION) if (now.get(key) && !query.get(key)) query.set(key, now.get(key));
    return "?" + query;
  }

  function address(search) {
    const query = new URLSearchParams(search);
    document.documentElement.classList.toggle("selected", query.has("steps") || query.has("ranks"));
    for (const link of links()) link.href = addressOf(link.dataset.view, search);
  }

  // Mark the shown view, and set the title of the page: the view comes first, since tabs are narrow.
  function titled(view) {
    address(location.search);
    for (const link of links()) link.classList.toggle("current", link.dataset.view === view);
    const title = document.getElementById("title").textContent, run = document.getElementById("run").title;
    document.title = title ? `${title} · dpro: ${run}` : `dpro: ${run}`;
    document.getElementById("more").close();
    const menu = document.getElementById("menu"), listed = document.querySelector("#more a.current");
    if (listed) menu.dataset.view = title;
    else delete menu.dataset.view;
    const current = document.querySelector("#nav a.current");
    if (current) current.scrollIntoView({ block: "nearest", inline: "center" });
  }

  const clear = () => go({ steps: null, ranks: null, time: null, span: null, area: null, find: null });

  // Format a range of numbers, or a single one, for the link.
  const stretch = (first, last) => (first === last ? `${first}` : `${first}-${last}`);

  // A click on a cell of steps and ranks selects it.
  function cell(click, figure) {
    if (!click || !click.points.length) return;
    const { firsts, lasts, ranks } = figure.layout.meta;
    const { x, y } = click.points[0];
    go({ steps: stretch(firsts[x], lasts[x]), ranks: ranks[y], time: null });
  }

  // A rectangle dragged over cells selects their steps and ranks.
  function cells(moved, figure) {
    const drawn = moved && moved.selections && moved.selections[moved.selections.length - 1];
    if (!drawn) return;
    const { firsts, lasts, ranks } = figure.layout.meta;
    const inside = (a, b, count) => [Math.ceil(Math.min(a, b) - 0.5), Math.floor(Math.max(a, b) + 0.5)]
      .map((number) => Math.min(Math.max(number, 0), count - 1));
    const [from, to] = inside(drawn.x0, drawn.x1, firsts.length);
    const [top, bottom] = inside(drawn.y0, drawn.y1, ranks.length);
    const chosen = ranks.slice(top, bottom + 1).join(",");
    go({ steps: stretch(firsts[from], lasts[to]), ranks: chosen, time: null });
  }

  // A click on a bar selects its rank or step.
  function bar(click, figure) {
    if (!click || !click.points.length || !/^\d+$/.test(click.points[0].x)) return;
    go({ [`${figure.layout.meta.by}s`]: click.points[0].x, time: null });
  }

  // A click on a run opens it, without the selection of steps and ranks made in another run.
  function openRun(click) {
    if (!click || !click.points.length) return;
    const shown = new URLSearchParams(location.search), query = new URLSearchParams();
    if (shown.get("theme")) query.set("theme", shown.get("theme"));
    query.set("run", click.points[0].customdata);
    goTo("?" + query);
  }

  // A click on a cell of the layout selects its rank.
  function place(click, figure) {
    if (!click || !click.points.length) return;
    const { x, y } = click.points[0];
    const rank = figure.layout.meta.ranks[y][x];
    if (rank >= 0) go({ ranks: rank, time: null });
  }

  const nothing = () => dash_clientside.no_update;
  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    dpro: {
      steps: (value) => { go({ steps: (value || "").trim() }); return nothing(); },
      ranks: (value) => { go({ ranks: (value || "").trim() }); return nothing(); },
      cell: (click, figure) => { cell(click, figure); return nothing(); },
      cells: (moved, figure) => { cells(moved, figure); return nothing(); },
      place: (click, figure) => { place(click, figure); return nothing(); },
      open_run: (click) => { openRun(click); return nothing(); },
      bar: (click, figure) => { bar(click, figure); return nothing(); },
      filter: (value) => { go({ filter: (value || "").trim() }); return nothing(); },
      predict: (clicks, text) => { if (clicks) go({ edit: (text || "").trim() }); return nothing(); },
      query: (clicks, text) => { if (clicks) go({ sql: (text || "").trim() }); return nothing(); },
      unedited: (clicks) => { if (clicks) go({ edit: null }); return nothing(); },
      clear: () => { clear(); return nothing(); },
      theme: () => { toggleTheme(); return nothing(); },
      menu: () => { toggle("more"); return nothing(); },
      titled: (shown) => { setTimeout(() => { titled(shown.view); replaced(location.search, shown); }); return nothing(); },
      // Refill the sections of the shown view; those of another view or run fill when they are created
      link: (search, shown) => {
        address(search);
        refilter(search);
        const asked = new URLSearchParams(search).get("view") || "", before = whole;
        whole = wholeOf(search);
        const other = shown && replaced(search, shown), stays = shown && !other && shown.asked === asked;
        return [stays ? search : nothing(), stays && whole !== before ? whole : nothing()];
      },
      help: () => { toggle("keys"); return nothing(); },
    },
  });

  // Go a number of tabs forward or back, cyclically; from a view in the menu, to the first or the last tab.
  function step(by) {
    const views = tabs(), at = views.findIndex((link) => link.classList.contains("current"));
    const from = at < 0 && by < 0 ? 0 : at;
    if (views.length) views[(from + by + views.length) % views.length].click();
  }

  const keys = {
    n: () => step(1),
    p: () => step(-1),
    t: toggleTheme,
    x: clear,
    "?": () => toggle("keys"),
    r: () => { const pick = document.getElementById("pick-run"); if (pick) pick.focus(); },
    "/": () => (document.getElementById("filter") || document.getElementById("steps")).focus(),
  };

  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, textarea, select");
    if (event.key === "Escape" && typing) event.target.blur();
    if (event.key === "Enter" && event.ctrlKey && event.target.id === "sql") document.getElementById("run-query").click();
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const named = links().find((link) => link.dataset.press === event.key);
    if (named) {
      named.click();
      return;
    }
    const act = keys[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  });

  // Another run keeps the selection of steps and ranks, but not what depends on one run's clock and spans.
  document.addEventListener("change", ({ target }) => {
    if (target.id === "pick-run") {
      const shown = new URLSearchParams(location.search);
      const against = shown.get("against") === target.value ? null : shown.get("against");
      go({ run: target.value, against, time: null, span: null, area: null, open: null, pin: null, align: null });
    } else if (target.id === "pick-against") {
      // The difference of two runs has its own view; the timeline shows both runs.
      const stays = !target.value || new URLSearchParams(location.search).get("view") === "timeline";
      go({ against: target.value, align: null, ...(stays ? {} : { view: "difference" }) });
    }
    else if (target.closest(".align")) {
      const [here, there] = [...target.closest(".align").querySelectorAll("select")].map((each) => each.value);
      go({ align: `${here}~${there}`, time: null, area: null });
    }
  });

  // The address of the shown view and selection, for sharing. It names the run, also the opened one: a later
  // dashboard may open another one first.
  function shownAddress() {
    const query = new URLSearchParams(location.search), opened = document.getElementById("pick-run")?.dataset.opened;
    if (opened && !query.get("run")) query.set("run", opened);
    const current = links().find((link) => link.classList.contains("current"));
    if (current) query.set("view", current.dataset.view);
    return `${location.origin}${location.pathname}?${query}`;
  }

  // Copy a text, and confirm it on the button. Browsers offer the clipboard only to local pages or over TLS.
  async function copy(text, button) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const field = document.body.appendChild(document.createElement("textarea"));
      field.value = text;
      field.select();
      document.execCommand("copy");
      field.remove();
    }
    const before = button.dataset.says || button.textContent;
    button.dataset.says = before;
    button.textContent = button.dataset.copied || "copied";
    setTimeout(() => { button.textContent = before; }, 3000);
  }

  // The picture is a figure of a fixed size, drawn outside the visible page.
  function savePicture(figure) {
    const { width, height } = figure.layout, run = document.getElementById("run").textContent;
    Plotly.downloadImage(figure, { format: "png", width, height, scale: 2, filename: `dpro-${run}` });
  }

  document.addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    if (!button) return;
    if (button.id === "save-picture") savePicture(JSON.parse(button.dataset.figure));
    else if (button.id === "copy-link") copy(shownAddress(), button);
    else if (button.dataset.copies) copy(button.dataset.copies, button);
  });

  // A click on a link to a view, or to a state of it, changes the link of this page. A click outside a dialog, or on
  // a link in it, closes the dialog.
  document.addEventListener("click", (event) => {
    const { target } = event, view = target.closest("a[data-view]"), open = target.closest("dialog");
    const link = target.closest("a[href^='?']"), elsewhere = event.ctrlKey || event.metaKey || event.shiftKey;
    if (link && !elsewhere && !event.defaultPrevented) { // Dash's own links have handled theirs
      event.preventDefault();
      const search = link.getAttribute("href");
      goTo(view ? addressOf(view.dataset.view, location.search) : link.closest(".of-whole") ? withSelection(search) : search);
    }
    if (open && (target === open || target.closest("a"))) open.close();
  });

  // A large table: its rows arrive as one text, and become cells of text here.
  function rowsOf(body) {
    const first = Number(body.dataset.numbers);
    return JSON.parse(body.dataset.rows).map((values) => {
      const row = document.createElement("tr");
      values.forEach((value, column) => {
        const cell = row.insertCell();
        cell.textContent = value;
        if (column >= first) cell.className = "number";
      });
      return row;
    });
  }

  // Content without state arrives as [tag, properties, children], and becomes elements here.
  function grown(part) {
    if (typeof part === "string") return document.createTextNode(part);
    const [tag, { className, style, ...others }, children] = part, element = document.createElement(tag);
    if (className) element.className = className;
    Object.assign(element.style, style);
    for (const [name, value] of Object.entries(others)) if (value !== false) element.setAttribute(name, value === true ? "" : value);
    element.append(...children.map(grown));
    return element;
  }

  // Nodes written into an element replace those written before; elements made by Dash stay.
  const written = new WeakMap();
  function write(element) {
    const { rows, tree } = element.dataset, made = rows ? rowsOf(element) : tree ? JSON.parse(tree).map(grown) : [];
    for (const node of written.get(element) || []) node.remove();
    written.set(element, made);
    element.append(...made);
  }
  const WRITTEN = "[data-rows], [data-tree]";
  new MutationObserver((changes) => {
    const elements = new Set();
    for (const { type, target, addedNodes } of changes) {
      if (type === "attributes") elements.add(target);
      for (const node of addedNodes) {
        if (!node.matches) continue;
        if (node.matches(WRITTEN)) elements.add(node);
        node.querySelectorAll(WRITTEN).forEach((each) => elements.add(each));
      }
    }
    elements.forEach(write);
  }).observe(document.documentElement, { childList: true, subtree: true, attributes: true, attributeFilter: ["data-rows", "data-tree"] });

  window.addEventListener("popstate", themed);
  window.dpro = { go, keys };
})();
