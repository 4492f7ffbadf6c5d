// Drawing the timeline: bars, names, axis, steps, selection, arrows. Sends no requests.
(() => {
  "use strict";

  const T = window.dproTimeline;
  const { ROW, AXIS } = T;
  const VARIABLES = {
    kernel: "compute", transfer: "exposed-comm", wait: "wait", copy: "copy", cpu: "cpu", runtime: "runtime",
    host: "host-bound", gap: "idle", delay: "idle",
  };
  const PHASES = { forward: "compute", backward: "copy", optimizer: "host-bound", unknown: "idle" };
  // In a rank's single line, compute covers communication: its visible part is exposed.
  const ABOVE = { gap: 0, wait: 1, transfer: 2, host: 3, cpu: 3, runtime: 4, delay: 4, copy: 5, kernel: 6 };
  const FONT = "11px system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif";
  const SPAN = 0, MATCH = 1, ON_PATH = 2;
  const NARROWEST = 22;  // pixels: least width of a bar with a name

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  let palette = null, theme = null;
  const inks = new Map();

  function colours() {
    const now = document.documentElement.dataset.theme;
    if (palette && theme === now) return palette;
    theme = now;
    inks.clear();
    const kinds = T.info.kinds.map((kind) => css(VARIABLES[kind]));
    const phases = T.info.phases.map((phase) => css(PHASES[phase]));
    const named = Object.fromEntries(["ink", "soft", "line", "page", "panel", "accent", "bad", "idle"].map((name) => [name, css(name)]));
    palette = { ...named, kinds, phases, dark: now === "dark" };
    return palette;
  }

  const hue = (number, dark) => `hsl(${(number * 137.508) % 360} ${dark ? "38% 52%" : "52% 66%"})`;

  function colourOf(data, at, mode, look) {
    if (mode === "phase") return look.phases[data.phase[at]];
    if (mode === "micro") return data.micro[at] < 0 ? look.idle : hue(data.micro[at] + 1, look.dark);
    if (mode === "name" && data.count[at] === 1) return hue(data.name[at] + 1, look.dark);
    return look.kinds[data.kind[at]];
  }

  // Black or white, whichever contrasts more with a colour.
  function inkOn(colour) {
    if (!inks.has(colour)) {
      const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
      context.fillStyle = colour;
      context.fillRect(0, 0, 1, 1);
      const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].map((value) => {
        const part = value / 255;
        return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
      });
      inks.set(colour, 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.2 ? "#10151b" : "#ffffff");
    }
    return inks.get(colour);
  }

  // The drawing order of segments: merged ones at the bottom, then by which kind covers which.
  T.sort = (data) => {
    const above = T.info.kinds.map((kind) => ABOVE[kind]);
    const key = new Float64Array(data.size), room = 2 ** 22;  // numbers sort faster than by a comparison function
    for (let at = 0; at < data.size; at++) {
      key[at] = data.layer[at] * 4096 + (data.count[at] === 1 ? 1024 : 0) + above[data.kind[at]] * 64 + data.kind[at];
    }
    for (let at = 0; at < data.size; at++) key[at] = key[at] * room + at;
    data.order = Uint32Array.from(key.sort(), (each) => each % room);
  };

  T.gutter = () => (T.frame && T.frame.clientWidth < 560 ? 92 : 168);
  T.width = () => T.frame.clientWidth - T.gutter();
  T.xOf = (ns) => T.gutter() + (ns - T.view.begin) / (T.view.end - T.view.begin) * T.width();
  // Pinned rows stay below the axis while the others scroll: y of a row in the frame, and back.
  T.yOf = (row) => row.y + AXIS - (row.pinned ? 0 : T.frame.scrollTop);
  T.heightAt = (y) => y - AXIS + (y - AXIS < T.pinned ? 0 : T.frame.scrollTop);
  T.timeAt = (x) => T.view.begin + (x - T.gutter()) / T.width() * (T.view.end - T.view.begin);

  // Like `short_name` in dpro/words.py: C++ names without namespaces and arguments.
  T.short = (name) => {
    if (name.startsWith("autograd::engine::evaluate_function: ")) return name.replace(/^.*?: /, "evaluate ");
    if (!/^void |^nccl\w+\(|\w::.*[<(]|\(anonymous namespace\)/.test(name)) return name;
    const plain = name.replace(/\(anonymous namespace\)::|<unnamed>::|void /g, "").replace(/\b(?:\w+::)+(?=\w)/g, "");
    let depth = 0;
    for (let place = 0; place < plain.length; place++) {
      depth += { "<": 1, ">": -1 }[plain[place]] || 0;
      if (plain[place] === "(" && depth <= 0 && place) return plain.slice(0, place);
    }
    return plain;
  };

  T.duration = (ns) => {
    const size = Math.abs(ns);
    const [unit, per] = size >= 120e9 ? ["min", 60e9] : size >= 1e9 ? ["s", 1e9] : size >= 1e6 ? ["ms", 1e6]
      : size >= 1e3 ? ["us", 1e3] : ["ns", 1];
    return `${per === 1 ? Math.round(ns) : (ns / per).toPrecision(4)} ${unit}`;
  };

  let painting = false;
  T.paint = () => {
    if (painting || !T.root) return;
    painting = true;
    requestAnimationFrame(() => { painting = false; if (T.root && T.frame) draw(); });
  };

  function draw() {
    const canvas = T.canvas, ratio = window.devicePixelRatio || 1;
    const [width, height] = [T.frame.clientWidth, T.frame.clientHeight];
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    // Drawn by the CPU: it draws thousands of small bars in some ms, while passing them to a GPU, or to its software
    // substitute, takes longer.
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    T.labels();
    if (!T.info || !T.view) return;
    const look = colours();
    for (const pinned of T.pinned ? [false, true] : [false]) {
      const top = AXIS + (pinned ? 0 : T.pinned);
      context.save();
      context.beginPath();
      context.rect(T.gutter(), top, width - T.gutter(), pinned ? T.pinned : height - top);
      context.clip();
      backdrop(context, look, width, height, pinned);
      if (T.data) { bars(context, look, pinned); counters(context, look, pinned); }
      if (T.span) selection(context, look);
      context.restore();
    }
    if (T.pinned) {
      context.fillStyle = look.soft;
      context.fillRect(0, AXIS + T.pinned - 1, width, 1);
    }
    axis(context, look, width);
    if (T.range) range(context, look, height);
  }

  function backdrop(context, look, width, height, pinned) {
    const known = new Set(T.data?.ask.from);
    for (const row of T.rows) {
      const y = T.yOf(row);
      if (!!row.pinned !== pinned || y + row.height < AXIS || y > height) continue;
      if (row.type === "lane" && row.from.length && row.height && !known.has(row)) {  // its data are still to come
        context.fillStyle = look.page;
        context.fillRect(0, y + 1, width, row.height - 3);
      }
      if (row.type === "group" || (row.type === "rank" && row.open)) {
        context.fillStyle = look.page;
        context.fillRect(0, y, width, row.height);
      }
      if (row.type !== "lane") {
        context.fillStyle = look.line;
        context.fillRect(0, Math.round(y), width, 1);
      }
    }
    context.strokeStyle = look.line;
    context.lineWidth = 1;
    context.setLineDash([2, 3]);
    context.beginPath();
    for (const [top, bottom, steps] of stretches(height)) {
      for (const [, , begin, end] of steps) {
        for (const ms of [begin, end]) {
          const x = Math.round(T.xOf(ms * 1e6)) + 0.5;
          if (x > 0 && x < width) { context.moveTo(x, top); context.lineTo(x, bottom); }
        }
      }
    }
    context.stroke();
    context.setLineDash([]);
  }

  // The steps of the axis: replayed ones where all lanes are replayed.
  const axisSteps = () => (T.replayedAlone() ? T.info.replay.steps : T.info.steps);

  // Bands of the frame, with the steps marked in them: top, bottom, steps.
  function stretches(height) {
    const { beside, steps, replay } = T.info, rows = T.link.show === "both" && replay.steps;
    if (!beside && !rows) return [[AXIS, height, axisSteps()]];
    const of = (row) => ({ o: beside?.steps, r: row.rank >= 0 && replay.steps }[row.side] || steps);
    return T.rows.map((row) => [T.yOf(row), T.yOf(row) + row.height, of(row)]).filter(([top, bottom]) => bottom > AXIS && top < height);
  }

  // Top and height of a source's bars in its row: a folded lane has a strip for each depth.
  T.strip = (row, depth) => {
    const height = row.type === "rank" ? row.height - 5 : ROW - 3, part = height / row.from.length;
    return row.folded ? [1 + (depth - row.from[0].row) * part, part] : [1, height];
  };

  function bars(context, look, pinned) {
    const data = T.data, mode = T.link.colour || "kind", left = T.gutter(), right = T.frame.clientWidth;
    const scale = data.nsPerPixel / (T.view.end - T.view.begin) * T.width(), shift = T.xOf(data.ask.begin);
    const height = T.frame.clientHeight, dimmed = !!data.ask.find;
    const texts = [], covers = new Map();  // in one line per rank later bars cover earlier ones
    let style = null;
    for (const at of data.order) {
      const row = data.ask.from[data.row[at]];
      if (!row || !row.height || !!row.pinned !== pinned) continue;
      const y = T.yOf(row);
      if (y + row.height < AXIS || y > height) continue;
      const from = shift + data.x[at] * scale, full = data.width[at] * scale;
      if (from + full < left || from > right) continue;
      const layer = data.layer[at], [down, bar] = T.strip(row, T.source(at).row);
      let begin = Math.max(from, left - 4), stop = Math.min(from + full, right + 4);
      if (layer === ON_PATH) {
        context.globalAlpha = 1;
        if (style !== look.ink) context.fillStyle = style = look.ink;
        context.fillRect(begin, y + (row.type === "rank" ? row.height - 4 : ROW - 2), Math.max(stop - begin, 1), 2);
        continue;
      }
      const colour = colourOf(data, at, mode, look);
      if (style !== colour) context.fillStyle = style = colour;
      const one = data.count[at] === 1;
      context.globalAlpha = (one ? 1 : 0.35 + 0.65 * data.density[at]) * (dimmed && layer === SPAN ? 0.2 : 1);
      if (one && full >= 3) {  // crisp edges, and a border before the next bar
        begin = Math.round(begin);
        stop = Math.max(Math.round(stop) - 1, begin + 1);
      }
      context.fillRect(begin, y + down, Math.max(stop - begin, one ? 0.6 : 1), bar);
      if (row.type === "rank") {
        if (!covers.has(y)) covers.set(y, []);
        covers.get(y).push([begin, stop]);
      }
      if (one && !row.folded && stop - begin >= NARROWEST && (!dimmed || layer === MATCH)) {
        texts.push([at, Math.max(begin, left), stop, y, bar, colour, row.type === "rank" ? covers.get(y).length : 0]);
      }
    }
    context.globalAlpha = 1;
    context.font = FONT;
    context.textBaseline = "middle";
    context.textAlign = "left";
    for (const [segment, from, until, y, bar, colour, drawn] of texts) {
      let [begin, stop] = [from, until];
      if (drawn) [begin, stop] = uncovered(begin, stop, covers.get(y).slice(drawn));
      if (stop - begin < NARROWEST) continue;
      const words = fitted(context, T.short(T.names.get(data.name[segment]) || ""), stop - begin - 7);
      if (!words) continue;
      context.fillStyle = inkOn(colour);
      context.fillText(words, begin + 4, y + 1 + bar / 2 + 0.5);
    }
  }

  // A value is valid until the next one; a row's height is the largest value of the whole run.
  function counters(context, look, pinned) {
    const { ask, counters: values } = T.data;
    context.fillStyle = context.strokeStyle = look.accent;
    context.lineWidth = 1;
    for (const row of T.rows) {
      const base = T.yOf(row) + row.height - 2;
      if (row.type !== "counter" || !!row.pinned !== pinned || base < AXIS || T.yOf(row) > T.frame.clientHeight) continue;
      for (const { row: track } of row.from) {
        const [times, heights] = values[track] || [[], []], scale = (row.height - 5) / (T.info.counters[track][3] || 1);
        if (!times.length) continue;
        const line = new Path2D(), edge = T.xOf(ask.end);
        times.forEach((time, n) => {
          const height = base - Math.max(heights[n], 0) * scale;
          line.lineTo(T.xOf(time), height);
          line.lineTo(n + 1 < times.length ? T.xOf(times[n + 1]) : edge, height);
        });
        context.stroke(line);
        line.lineTo(edge, base);
        line.lineTo(T.xOf(times[0]), base);
        context.globalAlpha = 0.2;
        context.fill(line);
        context.globalAlpha = 1;
      }
    }
  }

  // The values of counters at a point, as names and values.
  T.valuesAt = (x, y) => {
    const at = T.heightAt(y), time = T.timeAt(x);
    const row = x >= T.gutter() && y >= AXIS && T.data && T.rows.find((each) => each.type === "counter" && each.y <= at && at < each.y + each.height);
    return (row ? row.from : []).flatMap(({ row: track }) => {
      const [, label, unit] = T.info.counters[track], [times, values] = T.data.counters[track] || [[], []];
      const place = times.findLastIndex((each) => each <= time);
      return place < 0 ? [] : [[label, `${Number(values[place].toPrecision(4))} ${unit}`]];
    });
  };

  // The first part of a bar, wide enough for a name, that later bars leave visible.
  function uncovered(begin, stop, later) {
    const over = later.filter(([a, b]) => a < stop && begin < b).sort((a, b) => a[0] - b[0]);
    for (const [a, b] of over) {
      if (a > begin + NARROWEST) return [begin, a];
      begin = Math.max(begin, b);
    }
    return [begin, stop];
  }

  const widths = new Map();
  function fitted(context, text, room) {
    if (!widths.has(text)) {
      if (widths.size > 20000) widths.clear();
      widths.set(text, context.measureText(text).width);
    }
    const width = widths.get(text);
    if (width <= room) return text;
    const fits = Math.floor(text.length * room / width) - 1;
    if (fits < 2) return "";
    let cut = `${text.slice(0, fits)}…`;
    return context.measureText(cut).width <= room ? cut : `${text.slice(0, Math.max(fits - 2, 1))}…`;
  }

  // A distance between ticks: 1, 2 or 5 times a power of ten.
  function tickStep(length, count) {
    const rough = length / count, power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  }

  function axis(context, look, width) {
    const left = T.gutter(), { begin, end } = T.view;
    context.fillStyle = look.panel;
    context.fillRect(0, 0, width, AXIS);
    context.fillStyle = look.line;
    context.fillRect(0, AXIS - 1, width, 1);
    context.save();
    context.beginPath();
    context.rect(left, 0, width - left, AXIS);
    context.clip();
    const step = tickStep(end - begin, Math.max((width - left) / 110, 2));
    const [unit, per] = step >= 1e9 ? ["s", 1e9] : step >= 1e5 ? ["ms", 1e6] : ["us", 1e3];
    const digits = Math.max(0, Math.ceil(Math.log10(per / step) - 1e-9));
    context.font = FONT;
    context.textBaseline = "middle";
    context.textAlign = "left";
    for (let tick = Math.ceil(begin / step) * step + 0; tick < end; tick += step) {
      const x = Math.round(T.xOf(tick));
      context.fillStyle = look.line;
      context.fillRect(x, 18, 1, AXIS - 18);
      context.fillStyle = look.soft;
      const words = `${(tick / per + 0).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${unit}`;
      if (x + 4 + context.measureText(words).width <= width) context.fillText(words, x + 4, 30);
    }
    let free = left;
    for (const [, number, from, to] of axisSteps()) {
      const x = Math.max(T.xOf(from * 1e6), left), stop = T.xOf(to * 1e6), words = `step ${number}`;
      const room = context.measureText(words).width + 10;
      if (stop < left || x > width || x < free || stop - x < 12) continue;
      context.fillStyle = look.soft;
      context.fillRect(Math.round(x), 4, 1, 12);
      context.fillStyle = look.ink;
      if (stop - x >= room || x + room < width) { context.fillText(words, x + 4, 10); free = x + room; }
    }
    context.restore();
    context.fillStyle = look.soft;
    context.font = FONT;
    const zero = T.info.began ? `0 = ${T.info.began}` : "0 is the first span's start";
    context.fillText(left > 100 ? zero : T.info.began ? T.info.began.replace(/\.\d+ UTC/, " UTC") : "0: first span", 8, 10);
    context.fillText(`${T.duration(end - begin)} wide`, 8, 30);
  }

  // Where a span is drawn: left, right, top and height of its bar; null if it has no row.
  T.boxOf = (side, place) => {
    const row = T.rowOf(side, place.rank, place.row);
    if (!row) return null;
    const [down, height] = T.strip(row, place.row);
    return { left: T.xOf(place.start), right: T.xOf(place.end), top: T.yOf(row) + down, height };
  };

  function selection(context, look) {
    const box = T.boxOf(T.span.side, T.span.place);
    if (!box) return;
    for (const arrow of T.span.arrows) {
      const other = T.boxOf(arrow.place.side || "m", arrow.place);
      if (other) curve(context, look, arrow.out ? box : other, arrow.out ? other : box, arrow.out);
    }
    const left = Math.max(box.left, T.gutter() - 4), right = Math.min(box.right, T.frame.clientWidth + 4);
    context.lineWidth = 4;
    context.strokeStyle = look.panel;
    context.strokeRect(left - 1, box.top - 1, Math.max(right - left, 2) + 2, box.height + 2);
    context.lineWidth = 2;
    context.strokeStyle = look.ink;
    context.strokeRect(left - 1, box.top - 1, Math.max(right - left, 2) + 2, box.height + 2);
  }

  // From the end of the awaited work to the begin of the work that waited; a launch points to the begin of what it
  // launches.
  function curve(context, look, source, target, out) {
    const from = [Math.min(source.right, Math.max(target.left, source.left)), source.top + source.height / 2];
    const to = [Math.max(target.left, Math.min(source.right, target.right)), target.top + target.height / 2];
    const bend = Math.max(Math.abs(to[0] - from[0]) / 2, 24);
    context.strokeStyle = context.fillStyle = out ? look.accent : look.bad;
    for (const [width, colour] of [[4, look.panel], [1.75, out ? look.accent : look.bad]]) {
      context.lineWidth = width;
      context.strokeStyle = colour;
      context.beginPath();
      context.moveTo(...from);
      context.bezierCurveTo(from[0] + bend, from[1], to[0] - bend, to[1], to[0] - 5, to[1]);
      context.stroke();
    }
    context.beginPath();
    context.moveTo(to[0], to[1]);
    context.lineTo(to[0] - 8, to[1] - 4.5);
    context.lineTo(to[0] - 8, to[1] + 4.5);
    context.fill();
    context.beginPath();
    context.arc(from[0], from[1], 3, 0, 7);
    context.fill();
  }

  function range(context, look, height) {
    const { a, b } = T.range, ends = (b === null ? [a] : [a, b]).map(T.xOf), left = T.gutter();
    context.save();
    context.beginPath();
    context.rect(left, 0, T.frame.clientWidth - left, height);
    context.clip();
    context.fillStyle = look.accent;
    if (b !== null) {
      const [x, width] = [Math.min(...ends), Math.abs(ends[1] - ends[0])];
      const parts = [...(T.range.rows || "").matchAll(/(.-?\d+)\.(\d+)-(\d+)/g)].map((part) => part.slice(1));
      const within = (row) => row.from.some((each) => parts.some(([whose, low, high]) =>
        whose === `${each.side}${each.rank}` && each.row >= low && each.row < high));
      const boxes = [[0, T.range.rows ? AXIS : height]];  // top and bottom
      for (const row of T.range.rows ? T.rows : []) {
        // Height of the part that has scrolled away.
        const cut = Math.max(AXIS + (row.pinned ? 0 : T.pinned) - T.yOf(row), 0);
        if (cut >= row.height || !within(row)) continue;
        const last = boxes.at(-1), from = T.yOf(row) + cut;
        if (boxes.length > 1 && Math.abs(last[1] - from) < 1) last[1] = from + row.height - cut;
        else boxes.push([from, from + row.height - cut]);
      }
      T.marks = boxes;
      for (const [top, bottom] of boxes) {
        context.globalAlpha = 0.13;
        context.fillRect(x, top, width, bottom - top);
        context.globalAlpha = 1;
        for (const end of ends) context.fillRect(Math.round(end), top, 1, bottom - top);
        if (top) for (const edge of [top, bottom - 1]) context.fillRect(x, Math.round(edge), width, 1);
      }
    } else for (const x of ends) context.fillRect(Math.round(x), 0, 1, height);
    if (b !== null) {
      const words = T.duration(Math.abs(b - a));
      context.font = `600 ${FONT}`;
      const room = context.measureText(words).width + 12;
      const low = Math.max(Math.min(...ends), left), high = Math.min(Math.max(...ends), T.frame.clientWidth);
      const x = Math.min(Math.max((low + high - room) / 2, left + 2), T.frame.clientWidth - room - 2);
      context.fillRect(x, 2, room, 16);
      context.fillStyle = look.panel;
      context.textBaseline = "middle";
      context.fillText(words, x + 6, 10.5);
    }
    context.restore();
  }

  // The topmost segment at a point; -1 if there is none within some pixels.
  T.segmentAt = (x, y) => {
    const data = T.data;
    if (!data || x < T.gutter() || y < AXIS) return -1;
    const scale = data.nsPerPixel / (T.view.end - T.view.begin) * T.width(), shift = T.xOf(data.ask.begin);
    const at = T.heightAt(y);
    let found = -1, nearest = 5;
    for (let place = data.order.length - 1; place >= 0; place--) {
      const each = data.order[place], row = data.ask.from[data.row[each]];
      if (data.layer[each] !== SPAN || !row || at < row.y || at >= row.y + row.height) continue;
      const [down, height] = T.strip(row, T.source(each).row);
      if (row.folded && (at < row.y + down || at >= row.y + down + height)) continue;
      const from = shift + data.x[each] * scale, stop = from + data.width[each] * scale;
      const away = Math.max(from - x, x - stop, 0);
      if (away < nearest) [found, nearest] = [each, away];
      if (!away) break;
    }
    return found;
  };
})();
