// The timeline's frame, labels and buttons; pointer, wheel and keys.
(() => {
  "use strict";

  const T = window.dproTimeline;
  const { AXIS, ROW } = T;
  const CLICK = 4, SNAP = 6;  // pixels: most movement during a click, distance at which a ruler's end snaps to a bar
  // Pixels: least height of the frame, its borders, from its panel to the window's end.
  const MIN_HEIGHT = 240, BORDERS = 2, BELOW = 8;

  const make = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  };
  T.make = make;

  T.build = (root) => {
    const button = (text, title, act, id) => {
      const made = make("button", { type: "button", textContent: text, title, onclick: act });
      made.setAttribute("aria-label", title);
      if (id) made.id = id;
      return made;
    };
    T.findBox = make("input", {
      id: "timeline-find", type: "search", placeholder: "names, a regular expression", autocomplete: "off",
      spellcheck: false,
    });
    T.findBox.setAttribute("aria-label", "Search spans by name, a regular expression");
    let typing = null;
    T.findBox.addEventListener("input", () => {
      clearTimeout(typing);
      typing = setTimeout(() => find(T.findBox.value), 250);
    });
    T.findBox.addEventListener("keydown", (event) => {
      if (event.key === "Escape") T.findBox.value = "";
      if (event.key !== "Enter" && event.key !== "Escape") return;
      clearTimeout(typing);
      find(T.findBox.value);
      if (event.key === "Enter") T.search(event.shiftKey ? "previous" : "next");
    });
    T.foundText = make("span", { className: "found" });
    T.foundText.setAttribute("role", "status");
    T.tracksBox = make("input", {
      id: "timeline-tracks", type: "search", placeholder: "only lanes: rank 0|NCCL", autocomplete: "off", spellcheck: false,
    });
    T.tracksBox.setAttribute("aria-label", "Show only lanes whose names fit a regular expression, as rank 0|NCCL");
    let naming = null;
    T.tracksBox.addEventListener("input", () => {
      clearTimeout(naming);
      naming = setTimeout(() => onlyTracks(T.tracksBox.value), 250);
    });
    T.tracksBox.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      clearTimeout(naming);
      T.tracksBox.value = "";
      onlyTracks("");
    });
    T.tracksText = make("span", { className: "found" });
    T.tracksText.setAttribute("role", "status");
    T.rulerButton = button("ruler", "Measure between two clicks (m)", () => T.setRuler(!T.ruler), "timeline-ruler");
    T.foldButton = button("fold", "Fold or unfold all (e)", () => T.foldAll(), "timeline-fold");
    const bar = make("div", { className: "timeline-bar" },
      make("div", { className: "search" }, T.findBox, button("‹", "Previous match (Shift+Enter)", () => T.search("previous"), "timeline-previous"),
        button("›", "Next match (Enter)", () => T.search("next"), "timeline-next"), T.foundText, T.tracksBox, T.tracksText),
      make("div", { className: "moves" }, button("−", "Zoom out (s)", () => T.zoom(2)), button("+", "Zoom in (w)", () => T.zoom(0.5)),
        button("◂", "Earlier (a)", () => T.pan(-0.3)), button("▸", "Later (d)", () => T.pan(0.3)),
        button("all", "All of the selected steps (0 in the link's words: no time)", () => T.lookAtAll(), "timeline-all"),
        button("fit", "Zoom to the marked area, or the chosen span (f)", () => T.toSelection(), "timeline-zoom"), T.rulerButton, T.foldButton));
    T.canvas = make("canvas");
    T.canvas.setAttribute("aria-hidden", "true");
    T.gutterBox = make("div", { className: "timeline-labels" });
    const sticky = make("div", { className: "timeline-sticky" }, T.canvas, T.gutterBox,
      make("span", { className: "loading", textContent: "loading the detail …" }));
    T.space = make("div");
    T.frame = make("div", { className: "timeline-frame", tabIndex: 0 }, sticky, T.space);
    T.frame.setAttribute("role", "application");
    T.frame.setAttribute("aria-label", "Timeline. w and s zoom, a and d or the arrows move, comma and full stop choose the span before and after, f zooms to it, slash searches.");
    T.statusText = make("p", { className: "note timeline-status" });
    T.statusText.setAttribute("role", "status");
    const facts = make("div", { id: "timeline-facts" });
    root.replaceChildren(bar, make("div", { className: "timeline-body" }, T.frame, facts), T.statusText);
    new ResizeObserver(refit).observe(T.frame);
    T.frame.addEventListener("scroll", () => T.changed());
    T.frame.addEventListener("wheel", wheel, { passive: false });
    T.frame.addEventListener("pointerdown", down);
    T.frame.addEventListener("pointermove", hover);
    T.frame.addEventListener("pointerleave", () => { tip(null); T.pointer = null; });
    T.frame.addEventListener("dblclick", () => T.toSelection());
    new ResizeObserver(refit).observe(root.closest(".panel") || root);
  };

  // The page around the frame has changed its size.
  function refit() {
    if (!T.root) return;
    if (T.info && !T.fitting) { T.arrange(); T.total(); } else T.resized();
    T.changed();
  }
  addEventListener("resize", refit);

  function find(text) {
    if (text === (T.link.find || "")) return;
    T.jumped = true;  // only opening a link, and Enter, go to a match
    T.link.find = text;
    T.count();
    T.changed();
    dpro.go({ find: text });
  }

  function onlyTracks(text) {
    if (text === (T.link.tracks || "")) return;
    T.link.tracks = text;
    T.poll();
    dpro.go({ tracks: text });
  }

  // Say how many of these lanes are kept, or why the expression is invalid; the box shows the link's expression,
  // unless the user is typing in it.
  T.sayTracks = (lanes) => {
    const { unfiltered } = T.info, kept = lanes.filter((lane) => lane.at(-1)).length;
    if (document.activeElement !== T.tracksBox) T.tracksBox.value = T.link.tracks || "";
    T.tracksText.textContent = !T.link.tracks ? "" : unfiltered || `${kept} of ${lanes.length} lanes`;
    T.tracksText.classList.toggle("bad", Boolean(T.link.tracks && (unfiltered || !kept)));
  };

  // The height of the frame: down to the end of the window, minus what is below it in its panel.
  T.mostHeight = () => {
    const [frame, panel] = [T.frame, T.root.closest(".panel") || T.root].map((each) => each.getBoundingClientRect());
    return Math.max(Math.floor(innerHeight - (frame.top + scrollY) - (panel.bottom - frame.bottom) - BELOW), MIN_HEIGHT);
  };

  // Whether the parts of the panel above and below the frame exist, so that its height is final.
  T.surrounded = () => {
    const legend = document.getElementById("timeline-legend");
    return !T.root.closest(".panel")?.querySelector(".pending") && (!legend || legend.childElementCount > 0);
  };

  T.resized = () => {
    if (!T.frame) return;
    const height = T.mostHeight();
    T.frame.style.height = `${height}px`;
    T.frame.parentElement.style.setProperty("--height", `${height}px`);
    T.space.style.height = `${Math.max(T.height + AXIS - height + BORDERS, 0)}px`;
    T.frame.querySelector(".timeline-sticky").style.height = `${height - BORDERS}px`;
  };

  T.scrollTo = (row) => {
    const top = T.frame.scrollTop, room = T.frame.clientHeight - AXIS;
    if (row.pinned) return;
    if (row.y < top + T.pinned || row.y + row.height > top + room) T.frame.scrollTop = Math.max(row.y - room / 2, 0);
  };

  // Labels beside the visible rows; those that fold are buttons.
  T.labels = () => {
    const top = (row) => (row.pinned ? AXIS : T.pinned ? AXIS + T.pinned : AXIS - row.height);
    const seen = T.rows.filter((row) => row.label && T.yOf(row) >= top(row) && T.yOf(row) < T.frame.clientHeight);
    const key = seen.map((row) => `${row.label}${row.note || ""}${row.open}${row.key}${row.pinned}`).join("|");
    const box = T.gutterBox;
    if (box.dataset.key !== key) {
      const focused = document.activeElement && document.activeElement.dataset.key;
      box.dataset.key = key;
      box.replaceChildren(...seen.flatMap((row) => {
        const words = T.gutter() > 100 ? row.label : row.label.replace(/^stream (\d+) \((.+?)\)/, "$2 $1");
        const made = make(row.key ? "button" : "span", { className: `label ${row.type}`, title: row.title || row.label });
        if (row.key) {
          made.type = "button";
          made.dataset.key = row.key;
          made.setAttribute("aria-expanded", String(!!row.open));
          made.onclick = () => T.fold([row], !row.open);
          made.append(make("i", { textContent: row.open ? "▾" : "▸" }));
        }
        made.append(make("span", { className: "words", textContent: words }));
        if (row.note) made.append(make("small", { textContent: row.note }));
        if (!row.pin) return [made];
        const title = row.pinned ? "Unpin" : "Pin to the top";
        const pin = make("button", { className: `pin${row.pinned ? " on" : ""}`, type: "button", textContent: row.pinned ? "×" : "↑", title });
        pin.setAttribute("aria-label", `${title}: ${row.label}`);
        pin.onclick = () => T.togglePin(row.pin);
        return [made, pin];
      }));
      const again = focused && [...box.children].find((each) => each.dataset.key === focused);
      if (again) again.focus({ preventScroll: true });
    }
    box.style.width = `${T.gutter()}px`;
    const rows = seen.flatMap((row) => (row.pin ? [row, row] : [row]));
    [...box.children].forEach((made, number) => {
      const row = rows[number];
      made.style.top = `${T.yOf(row) - AXIS}px`;
      made.style.height = `${row.height}px`;
    });
  };

  T.foldAll = () => {
    const many = T.rows.filter((row) => row.type === "rank").length > 1;
    const some = T.rows.filter((row) => row.key && (many ? row.type === "rank" || row.rank < 0 : row.type !== "rank"));
    const open = some.some((row) => row.open);
    T.fold(some.filter((row) => row.open === open), !open);
  };
  T.say = (text) => { if (T.statusText) T.statusText.textContent = text; };
  T.sayFound = (text, bad = false) => {
    T.foundText.textContent = text;
    T.foundText.classList.toggle("bad", bad);
  };

  T.status = () => {
    const { complete, failed, spans, expected, ranks, replay, beside } = T.info;
    const read = (of) => ranks.filter((each) => each.side === of && each.lanes).length;
    const said = (spans, ranks) => `${spans.toLocaleString("en")} spans of ${ranks} rank${ranks === 1 ? "" : "s"}`;
    const parts = [];
    if (failed) parts.push(failed);
    else if (!complete) parts.push(`reading: ${read("m") + read("o")} of ${expected + (beside?.expected ?? 0)} ranks`);
    else if (spans) parts.push(`${said(spans, read("m"))}${beside ? `, beside ${said(beside.spans, read("o"))} of ${beside.name}` : ""}.`);
    if (replay.state === "working") parts.push("Building and replaying the graph: the critical path follows.");
    if (replay.state === "refused") parts.push(`No replay: ${replay.why}`);
    const replayed = ["replayed", "both"].includes(T.link.show);
    if (replayed && replay.note) parts.push(replay.note);
    if (replayed && replay.state !== "ready") parts.push("The replayed lanes are not there yet.");
    T.say(parts.join(" "));
    if (complete && replay.state === "idle" && !replay.automatic && spans) {
      const ask = make("button", { type: "button", id: "timeline-replay", textContent: "replay it" });
      ask.onclick = () => { T.wantsReplay = true; T.poll(); };
      T.statusText.append(" The graph of that many spans takes minutes and gigabytes: ", ask, " for the critical path.");
    }
  };

  T.setRuler = (on) => {
    T.ruler = on;
    T.rulerButton.classList.toggle("chosen", on);
    T.rulerButton.setAttribute("aria-pressed", String(on));
    T.frame.classList.toggle("ruler", on);
    if (!on) T.mark(null);
  };

  // ---- pointer ------------------------------------------------------------------------------------------

  const where = (event) => {
    const box = T.frame.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };

  function wheel(event) {
    if (!T.view) return;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      const share = Math.min(Math.max((where(event).x - T.gutter()) / T.width(), 0), 1);
      T.zoom(Math.exp(Math.max(Math.min(event.deltaY, 120), -120) * 0.004), share);
      return;
    }
    const across = event.shiftKey && !event.deltaX ? event.deltaY : event.deltaX;
    if (Math.abs(across) > Math.abs(event.shiftKey ? 0 : event.deltaY)) {
      event.preventDefault();
      T.pan(across / T.width());
    }
  }

  // The time at the pointer, or of the end of a bar nearby.
  function snapped(x, y) {
    const at = T.segmentAt(x, y), data = T.data;
    if (at < 0 || data.count[at] !== 1) return T.timeAt(x);
    const begin = data.ask.begin + data.x[at] * data.nsPerPixel, end = begin + data.width[at] * data.nsPerPixel;
    const near = [begin, end].map((ns) => [Math.abs(T.xOf(ns) - x), ns]).sort((a, b) => a[0] - b[0])[0];
    return near[0] <= SNAP ? near[1] : T.timeAt(x);
  }

  function down(event) {
    if (event.button || event.target.closest(".timeline-labels > *") || !T.view) return;
    const from = where(event), view = T.view;
    if (from.x < T.gutter() || from.x > T.frame.clientWidth) return;
    const marks = event.shiftKey || from.y < AXIS || T.ruler;
    const scroll = T.frame.scrollTop;
    let moved = false;
    tip(null);
    const move = (next) => {
      const to = where(next);
      if (!moved && Math.hypot(to.x - from.x, to.y - from.y) < CLICK) return;
      if (!moved) { moved = true; T.frame.setPointerCapture(event.pointerId); }
      if (marks) {
        const heights = [from.y, Math.max(to.y, AXIS)].map(T.heightAt);
        T.range = { a: T.timeAt(from.x), b: T.timeAt(Math.max(to.x, T.gutter())), rows: from.y < AXIS ? null : T.rowsBetween(...heights) };
        T.paint();
      } else {
        const by = (from.x - to.x) / T.width() * (view.end - view.begin);
        T.look(view.begin + by, view.end + by);
        if (event.pointerType === "mouse") T.frame.scrollTop = scroll + from.y - to.y;
      }
    };
    const up = (last) => {
      T.frame.removeEventListener("pointermove", move);
      T.frame.removeEventListener("pointerup", up);
      T.frame.removeEventListener("pointercancel", up);
      if (moved && marks) T.mark(T.range);
      if (moved || last.type === "pointercancel") return;
      if (marks) mark(from); else pick(from);
    };
    T.frame.addEventListener("pointermove", move);
    T.frame.addEventListener("pointerup", up);
    T.frame.addEventListener("pointercancel", up);
  }

  // The first click begins a range, the second ends it, the next begins another.
  function mark({ x, y }) {
    const time = snapped(x, y);
    T.mark(T.range && T.range.b === null ? { a: T.range.a, b: time } : { a: time, b: null });
  }

  function pick({ x, y }) {
    const at = T.segmentAt(x, y);
    if (T.range) T.mark(null);
    if (at < 0) { T.choose(null); return; }
    const from = T.source(at);
    T.chooseItem(from.side, from.rank, T.data.item[at]);
  }

  // The side, rank and row of a segment.
  T.source = (at) => T.data.ask.sources[T.data.row[at]];

  let hovering = null, asked = 0;
  function hover(event) {
    T.pointer = where(event);
    clearTimeout(hovering);
    asked++;
    if (event.buttons || event.target.closest(".timeline-labels > *")) { tip(null); return; }
    if (T.ruler && T.range && T.range.b === null) T.paint();
    const mine = asked, at = T.segmentAt(T.pointer.x, T.pointer.y);
    if (at < 0) {
      const values = T.valuesAt(T.pointer.x, T.pointer.y);
      tip(values.length ? values : null, event);
      return;
    }
    const place = { clientX: event.clientX, clientY: event.clientY };
    hovering = setTimeout(async () => {
      const { side, rank } = T.source(at), data = T.data, item = data.item[at], count = data.count[at];
      const kind = T.info.words[data.kind[at]], lasts = data.width[at] * data.nsPerPixel * data.density[at];
      const name = T.names.get(data.name[at]) ?? (await T.get("span", { side, rank, item, brief: 1 })).name;
      if (mine !== asked) return;
      const facts = count === 1 ? [[kind, name || ""], ["takes", T.duration(lasts)]]
        : [["here", `${count.toLocaleString("en")} spans, ${T.duration(lasts)} together: zoom in to see them`], ["longest", name || ""]];
      tip(facts, place);
    }, 30);
  }

  // Facts are inserted as text, never as HTML.
  function tip(facts, at) {
    const box = document.getElementById("tip");
    if (!box) return;
    clearTimeout(hovering);
    box.style.display = facts ? "block" : "none";
    if (!facts) return;
    box.replaceChildren(make("dl", {}, ...facts.flatMap(([name, value]) =>
      [make("dt", { textContent: name }), make("dd", { textContent: value })])));
    const left = at.clientX + 16 + box.offsetWidth > innerWidth ? at.clientX - 16 - box.offsetWidth : at.clientX + 16;
    box.style.left = `${Math.max(left, 4)}px`;
    box.style.top = `${Math.max(Math.min(at.clientY + 14, innerHeight - box.offsetHeight - 8), 4)}px`;
  }

  // ---- keys ---------------------------------------------------------------------------------------------

  const middle = () => (T.pointer && T.pointer.x > T.gutter() ? (T.pointer.x - T.gutter()) / T.width() : 0.5);
  const keys = {
    w: () => T.zoom(0.5, middle()),
    s: () => T.zoom(2, middle()),
    a: () => T.pan(-0.25),
    d: () => T.pan(0.25),
    ArrowLeft: () => T.pan(-0.1),
    ArrowRight: () => T.pan(0.1),
    ArrowUp: () => T.frame.scrollBy(0, -3 * ROW),
    ArrowDown: () => T.frame.scrollBy(0, 3 * ROW),
    ".": () => T.step(1),
    ",": () => T.step(-1),
    f: () => T.toSelection(),
    m: () => T.setRuler(!T.ruler),
    e: () => T.foldAll(),
    "/": () => T.findBox.focus(),
    Escape: () => {
      if (T.range || T.ruler) T.setRuler(false);
      else if (T.chosen) T.choose(null);
      else if (T.link.find) { T.findBox.value = ""; find(""); }
      else if (T.link.tracks) { T.tracksBox.value = ""; onlyTracks(""); }
    },
  };

  document.addEventListener("keydown", (event) => {
    if (!T.root || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, textarea, select, dialog")) return;
    if (event.target.closest("button, a, summary") && event.key.startsWith("Arrow")) return;
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    act();
  }, true);
})();
