// The timeline: what it shows, where its data come from, and the link. Drawing is in timeline_draw.js, pointer and
// keys are in timeline_input.js, and facts of a span are in timeline_span.js.
(() => {
  "use strict";

  // Pixels: row of bars, line of a rank, line of a group, counter, axis.
  const ROW = 17, HEAD = 22, GROUP = 24, COUNTER = 26, AXIS = 40;
  const PATH = -1, REPLAYED_PATH = -2;  // in place of a rank: the critical path, as measured and replayed
  const MANY_RANKS = 8, MANY_ROWS = 70, ROOM = 0.01;
  const CALLS = "last calls";  // lane of the calls at which a job stopped
  const REST_MS = 800;  // from the last movement to the change of the link, which the whole page follows
  // Fetched on each side, as a share of the visible time; and above and below, in pixels.
  const AHEAD = 0.15, AHEAD_ROWS = 200;

  const T = window.dproTimeline = {
    ROW, HEAD, GROUP, AXIS,
    root: null,  // element that contains the timeline
    info: null,  // lanes, as sent by the server
    rows: [], height: 0, pinned: 0, place: new Map(),  // pixels: height of all rows, of the pinned rows
    fitting: null,  // the ranks that are unfolded at first, and the state that they were chosen for
    view: null,  // {begin, end}, ns
    data: null,  // segments of the last fetched viewport
    names: new Map(),
    link: {},
    span: null,  // facts of the chosen span
    empty: new Set(),  // rows without spans in the visible time
    range: null, ruler: false,  // the marked area: times a and b, ns; rows as in requests, null for all
    marks: [],  // heights of its top and bottom
    totals: null,  // of the marked area
    waits: [],  // ms from a change of the view until it is drawn in full detail: for the benchmark
  };

  const query = () => Object.fromEntries(new URLSearchParams(location.search));
  // The side that the link shows, and the run beside the first one with the steps that begin together; empty for
  // none.
  const shown = (link) => link.show || (link.against ? "other" : "measured");
  const besides = (link) => (shown(link) === "other" && link.against ? { against: link.against, align: link.align || "" } : {});
  T.replayedAlone = () => shown(T.link) === "replayed" && T.info.replay.state === "ready";
  const whose = (link) => JSON.stringify([link.run || "", besides(link)]);
  // Ask the server about the runs that the link names.
  const ask = (path, values) => fetch(`timeline/${path}?${new URLSearchParams({ ...values, run: T.link.run || "", ...besides(T.link) })}`);
  const get = async (path, values) => (await ask(path, values)).json();
  T.get = get;

  // The page has an element for the timeline: fill it.
  T.attach = (root) => {
    T.root = root;
    T.forget();
    T.link = query();
    T.build(root);
    T.loads(true);
    T.poll();
  };

  // Forget everything about the run.
  T.forget = () => {
    Object.assign(T, {
      info: null, rows: [], view: null, data: null, span: null, range: null, totals: null, chosen: undefined, counted: undefined,
      wantsReplay: false, jumped: false, fitting: null, empty: new Set(),
    });
    T.names.clear();
  };

  // Whether visible data are still to come, in part or in finer detail, so that the page says so.
  T.loads = (still) => { if (T.root) T.root.toggleAttribute("data-loading", still); };

  T.detach = () => { T.root = null; clearTimeout(T.polling); };

  T.poll = async () => {
    clearTimeout(T.polling);
    const root = T.root;
    const ranks = (T.link.ranks || "").split(/[,-]/).join(",");
    const tracks = T.link.tracks || "";
    const asked = { first: ranks, ...(T.wantsReplay ? { replay: 1 } : {}), ...(tracks ? { tracks } : {}) };
    const run = whose(T.link), info = await get("lanes", asked).catch(() => null);
    if (!info || root !== T.root || !root || run !== whose(T.link) || tracks !== (T.link.tracks || "")) return;
    if (info.error) { T.loads(false); T.say(info.error); return; }
    const before = T.info;
    T.info = info;
    T.arrange();
    if (!T.view && info.ranks.length) T.follow();
    T.changed();
    if (info.complete && info.replay.state === "idle" && info.replay.automatic && info.spans) T.wantsReplay = true;
    const readied = before && before.replay.state !== "ready" && info.replay.state === "ready";
    if (readied && T.span) T.choose(T.span.key, true);
    if (info.complete && !before?.complete) T.total();
    if (info.complete && !info.spans) { T.loads(false); T.say("The run holds no spans."); }
    if (!info.complete || info.replay.state === "working") T.polling = setTimeout(T.poll, info.complete ? 700 : 200);
    else if (T.wantsReplay && info.replay.state === "idle") T.polling = setTimeout(T.poll, 50);
    else if (T.link.find && !T.link.span && !T.link.time && !T.jumped) { T.jumped = true; T.search("first"); }
    T.status();
  };

  // A later copy of a run that is being recorded: load it again, and keep the view.
  T.reload = () => { if (T.root) { Object.assign(T, { wantsReplay: false, info: null, data: null }); T.names.clear(); T.poll(); } };

  // ---- rows -------------------------------------------------------------------------------------------

  const keyOf = (side, rank) => `${side === "m" ? "" : side}${rank}`;
  const listed = (list) => new Set((T.link[list] || "").split(",").filter(Boolean));
  // Whether the link lists a key as unfolded, or after a minus as folded; otherwise the usual state, which depends on
  // the window.
  const unfolded = (key, usually) => {
    const keys = listed("open");
    return keys.has(key) || (usually && !keys.has(`-${key}`));
  };
  T.fold = (rows, open) => {
    const keys = listed("open");
    for (const { key } of rows) {
      keys.delete(open ? `-${key}` : key);
      keys.add(open ? key : `-${key}`);
    }
    change("open", keys);
  };
  T.togglePin = (key) => {
    const keys = listed("pin");
    if (!keys.delete(key)) keys.add(key);
    change("pin", keys);
  };
  function change(list, keys) {
    T.link[list] = [...keys].join(",");
    T.arrange();
    T.changed();
    dpro.go({ [list]: T.link[list] });
  }

  function chosenRanks() {
    const found = new Set();
    for (const part of (T.link.ranks || "").split(",").filter(Boolean)) {
      const [low, high] = part.split("-").map(Number);
      for (let rank = low; rank <= (high ?? low) && found.size < 4096; rank++) found.add(rank);
    }
    return found;
  }

  // A rank with its lanes that match the link's expression, and its pinned lanes.
  function filtered(rank, pins) {
    const key = keyOf(rank.side, rank.rank);
    return { ...rank, lanes: rank.lanes?.filter(([, , , , , number, kept]) => kept || pins.includes(`${key}.${number}`)) };
  }

  function ordered(pins) {
    const only = chosenRanks();
    const wanted = { replayed: "r", both: "mr", other: "mo" }[shown(T.link)] || "m";
    const all = T.info.ranks.filter((each) => wanted.includes(each.side) && each.rank >= 0 && (!only.size || only.has(each.rank)));
    T.sayTracks(all.flatMap(({ lanes }) => lanes || []));
    const ranks = all.map((each) => filtered(each, pins)).filter(({ lanes }) => !lanes || lanes.length);
    const order = T.link.order;
    const by = order === "late" ? (each) => -(each.late ?? -1) : (each) => (Object.hasOwn(each.place, order) ? each.place[order] : -1);
    ranks.sort((a, b) => by(a) - by(b) || a.rank - b.rank || (a.side < b.side ? -1 : 1));
    const path = T.info.ranks.find((each) => each.rank === (shown(T.link) === "replayed" ? REPLAYED_PATH : PATH));
    return { ranks, path };
  }

  // The rows shown in the single line of a rank: its streams, or without any its main thread and communication.
  function summary(rank) {
    const streams = rank.lanes.filter(([label, gpu]) => label === CALLS || (gpu && !label.endsWith("ranges")));
    const lanes = streams.length ? streams : rank.lanes;
    return lanes.flatMap(([, , low, high]) => Array.from({ length: streams.length ? high - low : 1 }, (_, n) =>
      ({ side: rank.side, rank: rank.rank, row: low + n })));
  }

  // The height in pixels of an unfolded rank's lanes and counters.
  function unfoldedHeight(rank, lanesOpen) {
    const lanes = (rank.lanes || []).map(([label, gpu, low, high]) =>
      (foldable([label, gpu, low, high]) && !usuallyOpen(label, lanesOpen) ? 1 : high - low));
    return ROW * lanes.reduce((sum, rows) => sum + rows, 0) + COUNTER * countersOf(rank.rank, lanesOpen);
  }
  const usuallyOpen = (label, lanesOpen) => label === CALLS || (lanesOpen && !label.endsWith("ranges"));
  const foldable = ([label, gpu, low, high]) => high - low > 1 && (!gpu || label.endsWith("ranges"));
  const countersOf = (rank, lanesOpen) => {
    const count = T.info.counters.filter(([of, , , , , kept]) => of === rank && kept).length;
    return lanesOpen ? count : Math.min(count, 1);
  };

  // The ranks that are unfolded at first: as many as the frame has room for, assuming that all are as high as the
  // first one; ranks named by findings come first. The choice stays until other ranks are shown. Null: not known yet.
  function fitting(ranks, lanesOpen) {
    const what = JSON.stringify([lanesOpen, T.link.tracks || "", ...ranks.map((each) => each.side + each.rank)]);
    if (T.fitting?.what !== what) {
      const room = T.mostHeight() - AXIS - 2 - ROW - ranks.length * HEAD - COUNTER * countersOf(-1, lanesOpen);
      const least = ranks.length <= MANY_RANKS || chosenRanks().size ? 1 : 0;
      if (!T.surrounded() || (!ranks[0].lanes && (least || room > 0))) return null;
      const fit = Math.floor(room / Math.max(unfoldedHeight(ranks[0], lanesOpen), ROW));
      const guilt = (each) => (T.info.fault.includes(each.rank) ? T.info.fault.indexOf(each.rank) : Infinity);
      const first = [...ranks].sort((a, b) => (guilt(a) === guilt(b) ? 0 : guilt(a) - guilt(b)));
      T.fitting = { what, keys: new Set(first.slice(0, Math.max(fit, least)).map((each) => keyOf(each.side, each.rank))) };
    }
    return T.fitting.keys;
  }

  // A row exists once its position is final: everything that unfolds above it has been read, and what is folded
  // depends on the number of ranks to come, the lanes of the first one and the height of the frame.
  T.arrange = () => {
    if (!T.info) return;
    const pins = (T.link.pin || "").split(",").filter(Boolean);
    const { ranks, path } = ordered(pins), { replay, spans } = T.info;
    const axis = ranks.some((each) => Object.hasOwn(each.place, T.link.order ?? "")) ? T.link.order : null;
    const lanesOpen = !T.info.stop && ranks.length * (ranks[0]?.lanes?.at(-1)?.[3] ?? 0) <= MANY_ROWS;
    const usually = ranks.length ? fitting(ranks, lanesOpen) : null;
    const rows = [], pinned = [];
    let group = null, whole = true;
    const add = (row) => {
      if (!pins.includes(row.pin)) rows.push(row);
      else pinned.push({ ...row, pinned: true, label: row.label && row.rank >= 0 ? `${keyOf(row.side ?? "m", row.rank)}: ${row.label}` : row.label });
    };
    if (path || (spans && replay.automatic && replay.state !== "refused")) {
      const from = Array.from({ length: path?.lanes[0]?.[3] ?? 0 }, (_, row) => ({ side: "r", rank: path.rank, row }));
      add({ type: "lane", label: "critical path", rank: -1, height: ROW, from, key: null });
    }
    // Counters are below the lanes of their rank, those of hosts below everything; if folded, or below a folded rank,
    // in one row.
    const count = (side, of, key, usually = lanesOpen) => {
      const tracks = T.info.counters.flatMap(([rank, label, unit, most, whose, kept], row) => (rank === of && whose === side
        && (kept || pins.includes(`c${row}`))
        ? [{ label: side === "o" && of < 0 ? `${T.info.beside.name}: ${label}` : label, pin: `c${row}`, note: `${Number(most.toPrecision(3)).toLocaleString("en")} ${unit}`, from: [{ side: "c", rank, row }] }] : []));
      const open = unfolded(`${key}.c`, usually);
      const listed = open || !tracks.length ? tracks : [{ label: "counters", from: tracks.flatMap((each) => each.from) }];
      listed.forEach((each, n) => add({ ...each, type: "counter", height: COUNTER, key: n ? null : `${key}.c`, open, rank: of }));
    };
    for (const rank of ranks) {
      const key = keyOf(rank.side, rank.rank);
      const open = usually && unfolded(key, usually.has(key));
      if (!usually || (open && !(rank.lanes && ranks[0].lanes))) { whole = false; break; }
      if (axis && rank.place[axis] !== group) {
        group = rank.place[axis];
        add({ type: "group", label: `${axis} ${group ?? "unknown"}`, height: GROUP, from: [], key: null });
      }
      const note = !rank.lanes ? "reading" : T.link.order === "late" && rank.late !== null ? `+${T.duration(rank.late * 1e6)}` : "";
      const words = `rank ${rank.rank}${{ r: " (replayed)", o: ` of ${T.info.beside?.name}` }[rank.side] ?? ""}`;
      const title = note && rank.lanes ? `${words}: comes ${note} later than the first, on average` : words;
      add({ type: "rank", label: words, note, title, height: HEAD, from: open || !rank.lanes ? [] : summary(rank), key, open, side: rank.side, rank: rank.rank, lanes: rank.lanes });
      if (open) rank.lanes.forEach(([label, gpu, low, high, , number]) => {
        const own = `${key}.${number}`, folds = foldable([label, gpu, low, high]);
        const folded = folds && !unfolded(own, usuallyOpen(label, lanesOpen));
        const from = Array.from({ length: high - low }, (_, n) => ({ side: rank.side, rank: rank.rank, row: low + n }));
        (folded ? [from] : from.map((each) => [each])).forEach((of, row) => add({
          type: "lane", label: row ? "" : label, height: row && T.empty.has(`${key}.${low + row}`) ? 0 : ROW, key: folds && !row ? own : null, open: !folded,
          side: rank.side, rank: rank.rank, from: of, folded, pin: own,
        }));
      });
      if (rank.side !== "r") count(rank.side, rank.rank, key, open && lanesOpen);
    }
    if (whole) for (const side of ["m", "o"]) count(side, -1, `${side === "m" ? "" : side}hosts`);
    T.rows = [...pinned, ...rows];
    T.height = 0;
    for (const row of T.rows) { row.y = T.height; T.height += row.height; }
    T.pinned = pinned.reduce((sum, row) => sum + row.height, 0);
    T.place = new Map();
    for (const row of T.rows) for (const each of row.from) T.place.set(`${each.side}${each.rank}.${each.row}`, row);
    if (T.data) placed(T.data.ask);
    T.resized();
  };

  // Where the rows of an answer are drawn now, since lanes may have been read or folded after the request.
  const placed = (ask) => { ask.from = ask.sources.map(({ side, rank, row }) => T.place.get(`${side}${rank}.${row}`)); };

  // The row of a span; that of its rank if the rank is folded.
  T.rowOf = (side, rank, row) => T.place.get(`${side}${rank}.${row}`)
    || T.rows.find((each) => each.type === "rank" && each.key === keyOf(side, rank) && !each.open
      && (each.lanes || []).some(([, , low, high]) => low <= row && row < high));

  // While a part of the time is shown, rows of nested spans without spans in it take no room; they reappear at once
  // where there are some. Rows already visible stay in place.
  T.collapse = (more = true) => {
    if (!T.data || !T.info || (!more && !T.empty.size)) return;
    const empty = new Set();
    if (T.link.time) {
      const { sources, begin } = T.data.ask, filled = new Set(), per = T.data.nsPerPixel;
      for (let at = 0; at < T.data.size; at++) {
        const from = begin + T.data.x[at] * per;
        if (from < T.view.end && from + T.data.width[at] * per > T.view.begin) filled.add(T.data.row[at]);
      }
      const read = new Set();
      sources.forEach(({ side, rank, row }, n) => {
        const key = `${keyOf(side, rank)}.${row}`;
        read.add(key);
        if (side !== "c" && !filled.has(n) && (more || T.empty.has(key))) empty.add(key);
      });
      for (const key of T.empty) if (!read.has(key)) empty.add(key);
    }
    if (empty.size === T.empty.size && [...empty].every((key) => T.empty.has(key))) return;
    const top = T.frame.scrollTop, seen = T.rows.find((row) => !row.pinned && row.height && row.y >= top + T.pinned);
    T.empty = empty;
    T.arrange();
    const now = seen && T.place.get(seen.from.map((each) => `${each.side}${each.rank}.${each.row}`)[0]);
    if (now && top) T.frame.scrollTop += now.y - seen.y;
    T.changed();
  };

  // Unfold what hides a span: its rank, then its lane.
  T.reveal = (side, rank, row) => {
    for (let times = 0; times < 2; times++) {
      const hiding = T.rowOf(side, rank, row);
      if (hiding && hiding.key && !hiding.open) T.fold([hiding], true);
    }
  };

  // ---- what is seen -------------------------------------------------------------------------------------

  // The time range of the link, else of the selected steps, else of the steps of two runs that begin together, else
  // around where the job stopped, else of the first deep window.
  T.home = () => {
    const { steps, end, beside, stop: stopped } = T.info;
    if (beside && !T.link.steps) {
      const room = (beside.end - beside.begin) * ROOM || 1000;
      return { begin: beside.begin - room, end: beside.end + room };
    }
    if (stopped && !T.link.steps) {
      const [begin, at] = stopped, length = Math.max(at - begin, 1e6);
      return { begin: begin - 0.5 * length, end: at + length };
    }
    const wanted = (T.link.steps || "").split(",").filter(Boolean).map((part) => part.split("-").map(Number));
    let seen = steps.filter(([, step]) => !wanted.length || wanted.some(([first, last]) => step >= first && step <= (last ?? first)));
    if (!T.link.steps && steps.length) seen = steps.filter(([window]) => window === steps[0][0]);
    if (!seen.length) return { begin: -end * ROOM, end: end * (1 + ROOM) || 1e6 };
    const begin = Math.min(...seen.map((step) => step[2])) * 1e6, stop = Math.max(...seen.map((step) => step[3])) * 1e6;
    const room = Math.max(stop - begin, 1000) * ROOM;
    return { begin: begin - room, end: stop + room };
  };

  // The link has changed, by this script or another: show what it names.
  T.follow = () => {
    const before = T.link, link = T.link = query();
    if (T.root && whose(before) !== whose(link)) {
      T.forget();
      T.paint();
      T.poll();
    }
    if (!T.root || !T.info) return;
    if ((before.tracks || "") !== (link.tracks || "")) T.poll();
    const same = ["ranks", "order", "show", "open", "pin"].every((key) => before[key] === link[key]);
    if (!same) { T.arrange(); T.total(); }
    if ((before.area || "") !== (link.area || "") || (link.area && !T.range)) T.marked(link.area);
    const time = (link.time || "").split("~").map((ms) => Number(ms) * 1e6);
    if (link.time && time[1] > time[0]) {
      const moved = !T.view || Math.abs(time[0] - T.view.begin) > 2 || Math.abs(time[1] - T.view.end) > 2;
      if (moved && !T.resting) T.view = { begin: time[0], end: time[1] };
    } else if (!T.resting && (!T.view || before.time || before.steps !== link.steps)) T.view = T.home();
    if (link.span !== T.chosen) T.choose(link.span || null);
    if (before.find !== link.find || before.ranks !== link.ranks || T.counted !== link.find) T.count();
    T.changed();
  };

  // Show another time range; the link follows once the view has come to rest.
  T.look = (begin, end) => {
    const least = 50, most = Math.max(T.info.end * 4, 1e6);
    const length = Math.min(Math.max(end - begin, least), most);
    const middle = Math.min(Math.max((begin + end) / 2, -most / 4), T.info.end + most / 4);
    T.view = { begin: middle - length / 2, end: middle + length / 2 };
    clearTimeout(T.resting);
    T.resting = setTimeout(() => {
      T.resting = null;
      dpro.go({ time: `${(T.view.begin / 1e6).toFixed(6)}~${(T.view.end / 1e6).toFixed(6)}` });
    }, REST_MS);
    T.changed();
  };

  T.lookAtAll = () => {
    clearTimeout(T.resting);
    T.resting = null;
    T.view = T.home();
    T.changed();
    dpro.go({ time: null });
  };

  T.zoom = (factor, at = 0.5) => {
    if (!T.view) return;
    const { begin, end } = T.view, middle = begin + at * (end - begin);
    T.look(middle - (middle - begin) * factor, middle + (end - middle) * factor);
  };
  T.pan = (share) => {
    if (!T.view) return;
    const by = share * (T.view.end - T.view.begin);
    T.look(T.view.begin + by, T.view.end + by);
  };

  // Bring a span into view: its row and its time.
  T.show = (place, side = "m", keepsZoom = false) => {
    T.reveal(side, place.rank, place.row);
    const row = T.rowOf(side, place.rank, place.row);
    if (row) T.scrollTo(row);
    const { begin, end } = T.view, length = end - begin, lasts = place.end - place.start;
    const width = lasts / length * T.width();
    const wanted = width < 4 && !keepsZoom ? Math.max(lasts * 60, 1000) : lasts > length ? lasts * 1.2 : length;
    const outside = place.start < begin || place.end > end;
    if (outside || wanted !== length) {
      const from = Math.max((place.start + place.end - wanted) / 2, 0);
      T.look(from, from + wanted);
    }
  };

  T.toSelection = () => {
    const on = T.range && T.range.b !== null ? [Math.min(T.range.a, T.range.b), Math.max(T.range.a, T.range.b)]
      : T.span ? [T.span.place.start, T.span.place.end] : null;
    if (!on) return;
    const room = Math.max(on[1] - on[0], 10) * 0.05;
    T.look(on[0] - room, on[1] + room);
  };

  // ---- segments -----------------------------------------------------------------------------------------

  let inFlight = false, next = null;

  // The view or its options have changed: draw the segments at hand at once, and fetch missing ones.
  T.changed = () => {
    T.paint();
    if (!T.root || !T.view || !T.info) return;
    if (!T.since) { T.since = performance.now(); T.loads(true); }
    next = wanted();
    if (!inFlight) fetchNext();
  };

  function wanted() {
    const { begin, end } = T.view, length = end - begin, width = Math.max(Math.round(T.width()), 50);
    const top = T.frame.scrollTop - AHEAD_ROWS, bottom = top + T.frame.clientHeight + 2 * AHEAD_ROWS;
    const seen = T.rows.filter((row) => row.from.length && (row.pinned || (row.y + row.height > top && row.y < bottom)));
    const sources = seen.flatMap((row) => row.from).slice(0, 800), rows = asked(sources);
    return {
      begin: Math.floor(begin - AHEAD * length), end: Math.ceil(end + AHEAD * length),
      px: Math.round(width * (1 + 2 * AHEAD)), rows, sources, find: T.link.find || "",
      replay: T.info.replay.state,
    };
  }

  // Rows in the form of requests: side, rank, and rows of the rank.
  function asked(sources) {
    const rows = [];
    for (const each of sources) {
      const last = rows[rows.length - 1];
      if (last && last.side === each.side && last.rank === each.rank && last.high === each.row) last.high++;
      else rows.push({ ...each, low: each.row, high: each.row + 1 });
    }
    return rows.map(({ side, rank, low, high }) => `${side}${rank}.${low}-${high}`).join(";");
  }

  const same = (a, b) => a && b && ["begin", "end", "px", "rows", "find", "replay"].every((key) => a[key] === b[key]);

  async function fetchNext() {
    const want = next, root = T.root;
    next = null;
    if (!want || !root) return;
    if (same(want, T.data && T.data.ask)) { drawnAsItIs(); return; }
    if (!want.rows) { T.data = null; T.paint(); drawnAsItIs(); return; }
    inFlight = true;
    try {
      const { begin, end, px, rows, find } = want;
      const run = whose(T.link), version = T.version;
      const answer = await ask("view", { begin, end, px, rows, find });
      const content = answer.ok ? await answer.arrayBuffer() : await answer.json();
      if (root !== T.root || run !== whose(T.link) || version !== T.version || !T.info) return;
      if (answer.ok) {
        placed(want);
        T.data = T.unpack(content, want);
        T.collapse(false);
        T.paint();
        if (!next) drawnAsItIs();
      } else { T.loads(false); T.say(content.error || "not drawn"); }
    } catch (error) {
      T.loads(false);
      T.say("the dashboard does not answer: is it still running?");
    } finally {
      inFlight = false;
      if (next) fetchNext();
    }
  }

  function drawnAsItIs() {
    const since = T.since;
    if (!since) return;
    T.since = null;
    if (T.info?.complete) T.loads(false);
    if (!T.resting) T.collapse();
    requestAnimationFrame(() => {
      T.waits.push(performance.now() - since);
      if (T.waits.length > 500) T.waits.shift();
    });
  }

  const READ = { "<f4": [Float32Array, 4], "<i4": [Int32Array, 4], "<i2": [Int16Array, 2], u1: [Uint8Array, 1] };

  // Decode the server's response: see `packed` in routes.py.
  T.unpack = (buffer, ask) => {
    const size = new DataView(buffer).getInt32(0, true);
    const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
    const data = { ask, size: head.count, nsPerPixel: (ask.end - ask.begin) / ask.px, counters: head.counters };
    let at = 4 + size;
    for (const [name, type] of head.arrays) {
      const [Kind, bytes] = READ[type];
      data[name] = new Kind(buffer, at, head.count);  // `count` is the number of spans in each segment
      at += Math.ceil(head.count * bytes / 4) * 4;
    }
    for (const [code, name] of Object.entries(head.names)) T.names.set(Number(code), name);
    T.sort(data);
    return data;
  };

  // ---- a marked area ------------------------------------------------------------------------------------

  // The rows between two heights, in the form of requests.
  T.rowsBetween = (a, b) => {
    const rows = T.rows.filter((row) => row.y < Math.max(a, b) && row.y + row.height > Math.min(a, b));
    const all = rows.flatMap((row) => row.from), measured = all.filter((each) => each.side !== "r");
    return asked(measured.length ? measured : all);  // the path and the replay repeat the measured work
  };

  // Mark an area; the link and the panel follow once it has both ends.
  T.mark = (range) => {
    T.range = range;
    const ends = range && range.b !== null ? [range.a, range.b].sort((a, b) => a - b).map((ns) => (ns / 1e6).toFixed(6)) : null;
    const area = ends ? [...ends, ...(range.rows ? [range.rows] : [])].join("~") : "";
    if (ends || T.link.area) {
      T.link.area = area;
      dpro.go({ area });
      if (ends) T.choose(null);
      T.total();
    }
    T.paint();
  };

  // The link names an area.
  T.marked = (area) => {
    const [a, b, rows] = (area || "").split("~");
    T.range = b > "" ? { a: Number(a) * 1e6, b: Number(b) * 1e6, rows: rows || null } : null;
    T.total();
    T.paint();
  };

  T.total = async () => {
    const { range } = T, area = T.link.area;
    T.totals = null;
    if (range && range.b !== null && T.rows.length) {
      const [begin, end] = [range.a, range.b].sort((a, b) => a - b).map(Math.round);
      const rows = range.rows || T.rowsBetween(0, T.height);
      const found = end > begin && await get("area", { begin, end, rows }).catch(() => null);
      if (area !== T.link.area) return;
      T.totals = found && !found.error ? found : null;
    }
    T.facts();
  };

  // ---- search -------------------------------------------------------------------------------------------

  T.count = async () => {
    const find = T.link.find || "", ranks = T.link.ranks || "";
    T.counted = T.link.find;
    if (document.activeElement !== T.findBox) T.findBox.value = find;
    if (!find) { T.sayFound(""); return; }
    const found = await get("find", { find, ranks });
    if ((T.link.find || "") !== find || (T.link.ranks || "") !== ranks) return;
    T.sayFound(found.error || `${found.count.toLocaleString("en")} spans, ${T.duration(found.ms * 1e6)}`, !!found.error);
  };

  T.search = async (go) => {
    const find = T.link.find;
    if (!find || !T.info) return;
    const { rank = -1, item = -1 } = T.span && T.span.side === "m" ? T.span.place : {};
    const found = await get("find", { find, ranks: T.link.ranks || "", go, rank, item, begin: Math.round(T.view.begin) });
    if (found.error) { T.sayFound(found.error, true); return; }
    if (!found.place) { T.sayFound(found.complete ? "no span matches" : "none so far: still reading"); return; }
    T.sayFound(`${found.number.toLocaleString("en")} of ${found.count.toLocaleString("en")} spans`);
    T.jump(found.place);
  };

  // ---- attach to the page -------------------------------------------------------------------------------

  function watch() {
    const root = document.getElementById("timeline");
    if (root !== T.root) {
      if (T.root) T.detach();
      if (root) T.attach(root);
    }
  }
  new MutationObserver(watch).observe(document.documentElement, { childList: true, subtree: true });
  window.dash_clientside = Object.assign({}, window.dash_clientside);
  window.dash_clientside.dpro = Object.assign({}, window.dash_clientside.dpro, {
    timeline: (_search, version) => {
      if (version !== undefined && version !== T.version) { T.version = version; T.reload(); }
      T.follow();
      return dash_clientside.no_update;
    },
  });
})();
