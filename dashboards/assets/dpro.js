// What only the browser can do: change the link, keys. Everything that is shown follows from the link.
(() => {
  "use strict";

  // Change parts of the link; null or "" removes one. Nothing happens where nothing changes.
  function go(changes) {
    const query = new URLSearchParams(location.search);
    for (const [key, value] of Object.entries(changes)) {
      if (value === null || value === undefined || value === "") query.delete(key);
      else query.set(key, value);
    }
    query.sort();
    const now = new URLSearchParams(location.search);
    now.sort();
    if (query.toString() !== now.toString()) {
      dash_clientside.set_props("url", { search: "?" + query });
    }
  }

  function themed() {
    const dark = new URLSearchParams(location.search).get("theme") === "dark";
    document.documentElement.dataset.theme = dark ? "dark" : "light";
  }

  function toggleTheme() {
    const dark = document.documentElement.dataset.theme === "dark";
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    go({ theme: dark ? "light" : "dark" });
  }

  function toggleHelp() {
    const keys = document.getElementById("keys");
    if (keys.open) keys.close();
    else keys.showModal();
  }

  const clear = () => go({ steps: null, ranks: null, time: null, node: null });

  // A number, or a stretch of numbers, as the link has it.
  const stretch = (first, last) => (first === last ? `${first}` : `${first}-${last}`);

  // A click on a cell of steps and ranks selects it.
  function cell(click, figure) {
    if (!click || !click.points.length) return;
    const point = click.points[0];
    go({ steps: stretch(point.x, point.x + figure.layout.meta.every - 1), ranks: point.y, time: null });
  }

  // A rectangle dragged over cells of steps and ranks selects them.
  function cells(moved, figure) {
    const drawn = moved && moved.selections && moved.selections[moved.selections.length - 1];
    if (!drawn) return;
    const { every, first } = figure.layout.meta;
    const inside = (a, b) => [Math.ceil(Math.min(a, b) - 0.5), Math.floor(Math.max(a, b) + 0.5)]
      .map((number) => Math.max(number, 0));
    const at = (x) => (x - first) / every;
    const [from, to] = inside(at(drawn.x0), at(drawn.x1));
    const steps = stretch(first + from * every, first + (to + 1) * every - 1);
    go({ steps, ranks: stretch(...inside(drawn.y0, drawn.y1)), time: null });
  }

  // A click on a bar selects its rank or step.
  function bar(click, figure) {
    if (!click || !click.points.length) return;
    go({ [`${figure.layout.meta.by}s`]: click.points[0].x, time: null });
  }

  // The timeline: a zoom changes the link, once it has come to rest.
  let resting = null;
  function zoomed(moved) {
    if (!moved) return;
    const begin = moved["xaxis.range[0]"] ?? (moved["xaxis.range"] || [])[0];
    const end = moved["xaxis.range[1]"] ?? (moved["xaxis.range"] || [])[1];
    if (!moved["xaxis.autorange"] && begin === undefined) return;  // its size has changed, not what is seen
    clearTimeout(resting);
    if (moved["xaxis.autorange"]) go({ time: null });
    else if (begin !== undefined) {
      resting = setTimeout(() => go({ time: `${(+begin).toFixed(6)}~${(+end).toFixed(6)}` }), 120);
    }
  }

  const plot = () => document.querySelector("#timeline-figure .js-plotly-plot");

  // Zoom by a factor about the middle, or move by a share of what is seen.
  function look(factor, by) {
    const gd = plot();
    if (!gd || !gd.layout) return;
    const [begin, end] = gd.layout.xaxis.range.map(Number);
    const half = ((end - begin) / 2) * factor;
    const middle = (begin + end) / 2 + by * (end - begin);
    Plotly.relayout(gd, { "xaxis.range": [middle - half, middle + half] });
  }

  // Where the pointer is in the figure, in its units; null outside of its axes.
  function place(event) {
    const gd = plot();
    if (!gd || !gd._fullLayout || !gd._fullLayout.xaxis || !gd.contains(event.target)) return null;
    const { xaxis, yaxis } = gd._fullLayout;
    const box = gd.getBoundingClientRect();
    const [across, down] = [event.clientX - box.left - xaxis._offset, event.clientY - box.top - yaxis._offset];
    if (across < 0 || down < 0 || across > xaxis._length || down > yaxis._length) return null;
    const near = (4 * (xaxis.range[1] - xaxis.range[0])) / xaxis._length;
    return { x: xaxis.p2d(across), y: yaxis.p2d(down), near };
  }

  let asked = 0;
  async function spanAt(event) {
    const where = place(event);
    if (!where) return null;
    const query = new URLSearchParams(location.search);
    for (const [key, value] of Object.entries(where)) query.set(key, value);
    const mine = ++asked;
    const answer = await fetch("span?" + query);
    const span = answer.ok ? await answer.json() : null;
    return mine === asked ? span : undefined;
  }

  // Facts are put in as text, never as HTML.
  function tip(span, event) {
    const box = document.getElementById("tip");
    if (!box) return;
    box.style.display = span ? "block" : "none";
    if (!span) return;
    const list = document.createElement("dl");
    for (const [name, value] of span.facts) {
      list.appendChild(document.createElement("dt")).textContent = name;
      list.appendChild(document.createElement("dd")).textContent = value;
    }
    box.replaceChildren(list);
    const left = event.clientX + 16 + box.offsetWidth > innerWidth ? event.clientX - 16 - box.offsetWidth
      : event.clientX + 16;
    const top = Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 8);
    box.style.left = `${Math.max(left, 4)}px`;
    box.style.top = `${Math.max(top, 4)}px`;
  }

  let hovering = null;
  document.addEventListener("mousemove", (event) => {
    clearTimeout(hovering);
    if (event.buttons || !place(event)) {
      asked += 1;
      tip(null);
      return;
    }
    hovering = setTimeout(async () => {
      const span = await spanAt(event);
      if (span !== undefined) tip(span, event);
    }, 40);
  });

  let pressed = null;
  document.addEventListener("mousedown", (event) => { pressed = place(event) && event; }, true);
  document.addEventListener("mouseup", async (event) => {
    const from = pressed;
    pressed = null;
    if (!from || Math.hypot(event.clientX - from.clientX, event.clientY - from.clientY) > 3) return;
    const span = await spanAt(from);
    if (span) go({ node: span.node });
  }, true);

  const nothing = () => dash_clientside.no_update;
  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    dpro: {
      steps: (value) => { go({ steps: (value || "").trim() }); return nothing(); },
      ranks: (value) => { go({ ranks: (value || "").trim() }); return nothing(); },
      cell: (click, figure) => { cell(click, figure); return nothing(); },
      cells: (moved, figure) => { cells(moved, figure); return nothing(); },
      bar: (click, figure) => { bar(click, figure); return nothing(); },
      zoomed: (moved) => { zoomed(moved); return nothing(); },
      filter: (value) => { go({ filter: (value || "").trim() }); return nothing(); },
      predict: (clicks, text) => { if (clicks) go({ edit: (text || "").trim() }); return nothing(); },
      unedited: (clicks) => { if (clicks) go({ edit: null }); return nothing(); },
      clear: () => { clear(); return nothing(); },
      theme: () => { toggleTheme(); return nothing(); },
      help: () => { toggleHelp(); return nothing(); },
    },
  });

  // The view so many places on, around the ends.
  function step(by) {
    const views = [...document.querySelectorAll("nav a")];
    const at = views.findIndex((link) => link.classList.contains("current"));
    if (at >= 0) views[(at + by + views.length) % views.length].click();
  }

  const keys = {
    n: () => step(1),
    p: () => step(-1),
    t: toggleTheme,
    w: () => look(0.5, 0),
    s: () => look(2, 0),
    a: () => look(1, -0.25),
    d: () => look(1, 0.25),
    x: clear,
    "?": toggleHelp,
    "/": () => (document.getElementById("filter") || document.getElementById("steps")).focus(),
  };

  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, textarea, select");
    if (event.key === "Escape" && typing) event.target.blur();
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const views = [...document.querySelectorAll("nav a")];
    const named = views.find((link) => link.querySelector("kbd").textContent === event.key);
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

  window.addEventListener("popstate", themed);
  window.dpro = { go, keys };
})();
