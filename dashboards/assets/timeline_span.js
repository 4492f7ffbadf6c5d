// The chosen span in words: its facts, the spans around it, and the ends of its arrows; or the totals of the marked
// area.
(() => {
  "use strict";

  const T = window.dproTimeline;

  let latest = 0;  // number of the latest choice: an answer about an earlier choice is dropped

  // Choose a span by the link's word: `3.1182` is span 1182 of rank 3, `r3.77` node 77 of its replay, `o3.5` span 5
  // of rank 3 of the other run.
  T.choose = async (key, again = false, item = null) => {
    if (key === T.chosen && !again) return;
    T.chosen = key || undefined;
    latest++;
    if (!key) { T.span = null; T.facts(); T.paint(); dpro.go({ span: null }); return; }
    const [, side, rank, id] = /^([ro]?)(-?\d+)\.(\d+)$/.exec(key) || [];
    if (id === undefined) return;
    dpro.go({ span: key });
    await load(side || "m", rank, item === null ? { id } : { item });
  };

  T.chooseItem = (side, rank, item) => load(side, rank, { item });

  // Return whether it is chosen now.
  async function load(side, rank, which) {
    const mine = ++latest;
    const known = await T.get("span", { side, rank, ...which }).catch(() => null);
    if (!known || known.error || mine !== latest) return false;
    const word = `${side === "m" ? "" : side}${known.place.rank}.${known.place.id}`;
    T.span = { ...known, side, key: word };
    T.chosen = word;
    T.facts();
    T.paint();
    dpro.go({ span: word });
    return true;
  }

  // The span after or before the chosen one in its row.
  T.step = async (by) => {
    const from = T.span;
    if (!from) return;
    const { rank, item, row } = from.place, next = item + by;
    const known = await T.get("span", { side: from.side, rank, item: next, brief: 1 }).catch(() => null);
    if (!known || known.error || known.row !== row || T.span?.key !== from.key) return;
    if (await load(from.side, rank, { item: next })) T.show(T.span.place, T.span.side, true);
  };

  // Go to a measured span: show it at once; its facts follow.
  T.jump = (place) => {
    const side = place.side || "m", key = `${side === "m" ? "" : side}${place.rank}.${place.id}`;
    if (T.range) T.mark(null);
    if (key !== T.chosen) T.span = { place, side, key, facts: [["name", place.name]], stack: [], arrows: [] };
    T.show(place, side);
    T.facts();
    T.choose(key, false, place.item);
  };

  function jumpTo(place) {
    const button = T.make("button", { type: "button", className: "jump", textContent: T.short(place.name), title: place.name });
    button.onclick = () => T.jump(place);
    return button;
  }

  T.facts = () => {
    const box = document.getElementById("timeline-facts");
    if (!box) return;
    const { make } = T, shown = T.totals || T.span;
    if (!shown) { box.replaceChildren(); return; }
    const close = make("button", { type: "button", className: "close", textContent: "×", title: "Close (Esc)" });
    close.setAttribute("aria-label", "Close");
    close.onclick = () => { if (T.totals) T.setRuler(false); else T.choose(null); };
    const heading = make("h2", { textContent: T.totals ? `Area of ${T.duration(shown.end - shown.begin)}` : "Span" });
    const panel = make("section", { className: "panel" }, heading, close, ...(T.totals ? totals(shown) : []));
    panel.setAttribute("aria-live", "polite");
    box.replaceChildren(panel);
    if (T.totals) return;
    panel.append(make("dl", {}, ...shown.facts.flatMap(([name, value]) => [make("dt", { textContent: name }), make("dd", { textContent: value })])));
    if (T.span.stack.length) {
      const names = T.span.stack.map((name) => T.short(name)).reverse();
      panel.append(make("p", { className: "stack-of" }, make("b", { textContent: "within " }), names.join(" › ")));
    }
    const arrows = T.span.arrows.map(({ place, out, why }) =>
      [out ? "to →" : "← from", jumpTo(place), `rank ${place.rank}`, T.duration(place.end - place.start), why]);
    if (arrows.length) panel.append(table("What it waited for, and what waited for it", ["", "span", "where", "takes", "why"], arrows));
  };

  function totals({ begin, end, names, more, lanes, counters }) {
    const left = more ? ` (${more.toLocaleString("en")} more names)` : "";
    const named = names.map(([name, kind, spans, ...ns]) => [T.make("span", { textContent: T.short(name), title: name }), kind, spans.toLocaleString("en"), ...ns.map(T.duration)]);
    const busy = lanes.map(([rank, lane, spans, ns]) =>
      [`rank ${rank} ${lane}`, spans.toLocaleString("en"), T.duration(ns), `${(100 * ns / (end - begin)).toFixed(1)}%`]);
    const which = T.range?.rows ? "of its marked rows alone" : "all rows";
    const counted = counters.map(([rank, label, unit, ...values]) =>
      [rank < 0 ? label : `rank ${rank} ${label}`, ...values.map((value) => String(Number(value.toPrecision(4)))), unit]);
    return [T.make("div", { className: "totals" },
      table(`By name${left}`, ["span", "kind", "spans", "takes", "mean", "longest"], named),
      table(`By lane, ${which}: while a span runs that does not wait for peers`, ["lane", "spans", "time", "of the area"], busy),
      ...(counted.length ? [table("Counters", ["counter", "mean", "least", "most", ""], counted)] : []))];
  }

  function table(caption, heads, rows) {
    const { make } = T;
    const cells = (tag, values) => make("tr", {}, ...values.map((value) => {
      const cell = make(tag);
      cell.append(value);
      return cell;
    }));
    return make("table", {}, make("caption", { textContent: caption }), make("thead", {}, cells("th", heads)),
      make("tbody", {}, ...rows.map((values) => cells("td", values))));
  }
})();
