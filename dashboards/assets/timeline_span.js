// What is known of the chosen span, in words: its facts, what is around it, and the ends of its arrows.
(() => {
  "use strict";

  const T = window.dproTimeline;

  // Choose a span by the link's word: `3.1182` is span 1182 of rank 3, `r3.77` node 77 of its replay.
  T.choose = async (key, again = false, item = null) => {
    if (key === T.chosen && !again) return;
    T.chosen = key || undefined;
    if (!key) { T.span = null; facts(); T.paint(); return; }
    const [, side, rank, id] = /^(r?)(-?\d+)\.(\d+)$/.exec(key) || [];
    if (id === undefined) return;
    await load(side || "m", rank, item === null ? { id } : { item }, key);
  };

  T.chooseItem = (side, rank, item) => load(side, rank, { item }, null);

  async function load(side, rank, which, key) {
    const known = await T.get("span", { side, rank, ...which }).catch(() => null);
    if (!known || known.error) return;
    if (key !== null && key !== T.chosen) return;
    const word = `${side === "r" ? "r" : ""}${known.place.rank}.${known.place.id}`;
    T.span = { ...known, side, key: word };
    T.chosen = word;
    facts();
    T.paint();
    T.go({ span: word });
  }

  // The span after or before the chosen one in its row.
  T.step = async (by) => {
    if (!T.span) return;
    const { rank, item, row } = T.span.place, next = item + by;
    const known = await T.get("span", { side: T.span.side, rank, item: next, brief: 1 }).catch(() => null);
    if (!known || known.error || known.row !== row) return;
    await load(T.span.side, rank, { item: next }, null);
    T.show(T.span.place, T.span.side);
  };

  function jump(place) {
    const button = T.make("button", { type: "button", className: "jump", textContent: T.short(place.name), title: place.name });
    button.onclick = () => {
      T.choose(`${place.rank}.${place.id}`, false, place.item);
      T.show(place);
    };
    return button;
  }

  function facts() {
    const box = document.getElementById("timeline-facts");
    if (!box) return;
    const { make } = T;
    if (!T.span) { box.replaceChildren(); return; }
    const pairs = T.span.facts.flatMap(([name, value]) => [make("dt", { textContent: name }), make("dd", { textContent: value })]);
    const heading = make("h2", { textContent: "Span" });
    const close = make("button", { type: "button", className: "close", textContent: "×", title: "Close (Esc)" });
    close.setAttribute("aria-label", "Close");
    close.onclick = () => { T.choose(null); T.go({ span: null }); };
    const panel = make("section", { className: "panel" }, heading, close, make("dl", {}, ...pairs));
    panel.setAttribute("aria-live", "polite");
    if (T.span.stack.length) {
      const names = T.span.stack.map((name) => T.short(name)).reverse();
      panel.append(make("p", { className: "stack-of" }, make("b", { textContent: "within " }), names.join(" › ")));
    }
    if (T.span.arrows.length) panel.append(table(T.span.arrows));
    box.replaceChildren(panel);
  }

  function table(arrows) {
    const { make } = T;
    const cells = (tag, values) => make("tr", {}, ...values.map((value) => {
      const cell = make(tag);
      cell.append(value);
      return cell;
    }));
    const rows = arrows.map(({ place, out, why }) =>
      cells("td", [out ? "to →" : "← from", jump(place), `rank ${place.rank}`, why, T.duration(place.end - place.start)]));
    const made = make("table", { className: "arrows" }, make("caption", { textContent: "What it waited for, and what waited for it" }),
      make("thead", {}, cells("th", ["", "span", "where", "why", "takes"])), make("tbody", {}, ...rows));
    return made;
  }
})();
