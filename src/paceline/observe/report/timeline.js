// The timeline of the last steps. One row is one place for a rollout on an engine (or one rollout, by group).
// lane: [env, split, group, member, attempt, engine, version, start, end, ending, cause, reward, task, turns]
// turn: [asked, granted, ended, tokens, context, cached, version, goes on with the call before]; times are seconds from `since`; null: not yet.
const LANE = { env: 0, split: 1, group: 2, member: 3, attempt: 4, engine: 5, version: 6, start: 7, end: 8, ending: 9, cause: 10, reward: 11, task: 12, turns: 13 };
const STRIP = 64, AXIS = 24, LEFT = 92, LABELS = 18;

function timeline(data) {
  const canvas = el("canvas", { tabindex: "0", "aria-label": "timeline of rollouts" });
  const full = [0, Math.max(data.span, 1e-3)];
  const state = { view: [...full], order: "places", hover: null, drag: null };
  const set = (from, to) => {
    const wide = Math.min(Math.max(to - from, 0.01), full[1]);
    const start = Math.min(Math.max(from, 0), full[1] - wide);
    state.view = [start, start + wide];
    draw();
  };
  const zoom = (by, at) => {
    const [from, to] = state.view, middle = at ?? (from + to) / 2;
    set(middle - (middle - from) * by, middle + (to - middle) * by);
  };
  const pan = (by) => set(state.view[0] + by * (state.view[1] - state.view[0]), state.view[1] + by * (state.view[1] - state.view[0]));
  const order = el("select", { "aria-label": "order of rows", onchange: () => { state.order = order.value; layout(); draw(); } },
    el("option", { value: "places" }, "one row a place"), el("option", { value: "groups" }, "one row a rollout, by group"));
  const button = (text, label, act) => el("button", { type: "button", title: label, "aria-label": label, onclick: act }, text);
  const key = (name, tint) => { const i = el("i", { class: "swatch" }); i.style.background = `var(--${tint})`; return el("span", {}, i, name); };
  const controls = el("div", { class: "bar-line" },
    el("div", { class: "legend" }, key("model call (shade: version)", "model0"), key("eval", "eval0"), key("gate wait", "gate"), key("environment", "env"),
      key("weights load", "amber"), key("batch cut", "green"), key("failed", "red"), key("cancelled", "ink"), key("truncated", "purple")),
    el("span", { class: "spacer" }),
    order,
    button("◀", "earlier", () => pan(-0.3)), button("▶", "later", () => pan(0.3)),
    button("+", "closer", () => zoom(0.5)), button("−", "wider", () => zoom(2)), button("all", "the whole timeline", () => set(...full)));
  let rows = [], blocks = [], rowHeight = 8, height = 300;

  function layout() {
    rows = [];
    blocks = [];
    const engines = [...new Set(data.lanes.map((lane) => lane[LANE.engine]))].sort();
    for (const engine of engines) {
      const mine = data.lanes.filter((lane) => lane[LANE.engine] === engine);
      const first = rows.length;
      if (state.order === "groups") {
        mine.sort((a, b) => a[LANE.group] - b[LANE.group] || a[LANE.member] - b[LANE.member] || a[LANE.attempt] - b[LANE.attempt]);
        for (const lane of mine) rows.push([lane]);
      } else {
        const ends = [];
        for (const lane of mine) {
          let place = ends.findIndex((end) => end <= lane[LANE.start] + 1e-9);
          if (place < 0) place = ends.push(0) - 1;
          ends[place] = lane[LANE.end];
          (rows[first + place] ||= []).push(lane);
        }
      }
      blocks.push({ engine, first, count: rows.length - first });
    }
    rowHeight = state.order === "groups" ? 7 : Math.max(3, Math.min(13, 400 / Math.max(1, rows.length)));
    height = LABELS + STRIP + AXIS + rows.length * rowHeight + blocks.length * 8;
    canvas.style.height = height + "px";
  }

  const top = LABELS + STRIP + AXIS;
  const rowY = (row) => top + row * rowHeight + blocks.findIndex((b) => row < b.first + b.count) * 8;
  const width = () => canvas.clientWidth;
  const X = (t) => LEFT + ((t - state.view[0]) / (state.view[1] - state.view[0])) * (width() - LEFT - 8);
  const T = (x) => state.view[0] + ((x - LEFT) / (width() - LEFT - 8)) * (state.view[1] - state.view[0]);

  function draw() {
    if (!width()) return;
    const scale = devicePixelRatio || 1;
    canvas.width = width() * scale;
    canvas.height = height * scale;
    const g = canvas.getContext("2d");
    g.scale(scale, scale);
    g.font = "11.5px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif";
    const tints = Object.fromEntries(["model0", "model1", "eval0", "eval1", "gate", "env", "green", "amber", "red", "ink", "purple", "muted", "line", "grid", "text", "blue"].map((name) => [name, color(name)]));
    drawAxis(g, tints);
    g.save();
    g.beginPath();
    g.rect(LEFT, 0, width() - LEFT - 8, height);
    g.clip();
    drawInFlight(g, tints);
    drawLoads(g, tints);
    rows.forEach((lanes, row) => { for (const lane of lanes) drawLane(g, tints, lane, rowY(row)); });
    drawCuts(g, tints);
    if (state.drag) {
      g.fillStyle = tints.blue;
      g.globalAlpha = 0.15;
      g.fillRect(Math.min(state.drag.from, state.drag.to), 0, Math.abs(state.drag.to - state.drag.from), height);
      g.globalAlpha = 1;
    }
    g.restore();
    drawNames(g, tints);
  }

  function drawAxis(g, tints) {
    g.fillStyle = tints.muted;
    g.textAlign = "center";
    for (const tick of ticks(state.view[0] + data.since, state.view[1] + data.since, Math.max(3, Math.floor(width() / 110)))) {
      const x = X(tick - data.since);
      g.fillStyle = tints.grid;
      g.fillRect(x, LABELS, 1, height - LABELS);
      g.fillStyle = tints.muted;
      g.fillText(trim(tick.toFixed(state.view[1] - state.view[0] < 3 ? 2 : 1)) + " s", x, LABELS + STRIP + 16);
    }
  }

  function drawInFlight(g, tints) {
    const base = LABELS + STRIP, high = Math.max(1, data.in_flight.reduce((m, p) => Math.max(m, p[1]), 0));
    g.beginPath();
    let last = 0;
    g.moveTo(LEFT, base);
    for (const [t, n] of data.in_flight) {
      g.lineTo(X(t), base - (last / high) * (STRIP - 8));
      g.lineTo(X(t), base - (n / high) * (STRIP - 8));
      last = n;
    }
    g.lineTo(X(data.span), base - (last / high) * (STRIP - 8));
    g.lineTo(X(data.span), base);
    g.closePath();
    g.globalAlpha = 0.22;
    g.fillStyle = tints.blue;
    g.fill();
    g.globalAlpha = 1;
  }

  function drawLoads(g, tints) {
    g.fillStyle = tints.amber;
    for (const update of data.updates) {
      const block = blocks.find((b) => b.engine === update.engine);
      const x = X(update.start), wide = Math.max(1.5, X(update.end) - x);
      g.globalAlpha = 0.26;
      if (block) g.fillRect(x, rowY(block.first) - 2, wide, block.count * rowHeight + 4);
      g.globalAlpha = 0.9;
      g.fillRect(x, LABELS, 1, STRIP);
      g.globalAlpha = 1;
    }
  }

  function drawLane(g, tints, lane, y) {
    const from = lane[LANE.start], to = lane[LANE.end];
    if (to < state.view[0] || from > state.view[1]) return;
    const gap = rowHeight > 5 ? 1 : 0, high = rowHeight - gap;
    const box = (a, b, tint) => { g.fillStyle = tint; const x = X(a); g.fillRect(x, y, Math.max(0.7, X(b) - x), high); };
    const dim = state.hover && state.hover[LANE.group] !== lane[LANE.group];
    g.globalAlpha = dim ? 0.28 : 1;
    box(from, to, tints.env);
    const kind = lane[LANE.split] === "eval" ? "eval" : "model";
    for (const [asked, granted, ended, , , , version] of lane[LANE.turns]) {
      const open = granted ?? to;
      if (open - asked > 0.0015) box(asked, open, tints.gate);
      if (granted !== null) box(granted, ended ?? to, tints[kind + ((version ?? lane[LANE.version]) % 2)]);
    }
    const mark = { failed: tints.red, cancelled: tints.ink, truncated: tints.purple }[lane[LANE.ending]];
    if (mark) { g.fillStyle = mark; g.fillRect(X(to) - 3, y, 3, high); }
    g.globalAlpha = 1;
  }

  function drawCuts(g, tints) {
    g.textAlign = "left";
    let taken = -Infinity;
    for (const step of data.steps) {
      const x = X(step.cut);
      g.strokeStyle = g.fillStyle = tints.green;
      g.lineWidth = 1.4;
      g.setLineDash([4, 3]);
      g.beginPath();
      g.moveTo(x, LABELS - 4);
      g.lineTo(x, height);
      g.stroke();
      g.setLineDash([]);
      if (x > taken) { const text = `step ${step.step}`; g.fillText(text, x + 3, 12); taken = x + g.measureText(text).width + 8; }
    }
  }

  function drawNames(g, tints) {
    g.textAlign = "left";
    g.fillStyle = tints.muted;
    const peak = data.in_flight.reduce((m, p) => Math.max(m, p[1]), 0);
    g.fillText("in flight", 0, LABELS + 30);
    g.fillText(`max ${peak}`, 0, LABELS + 46);
    for (const block of blocks) {
      const y = rowY(block.first);
      g.fillText(block.engine.length > 13 ? block.engine.slice(0, 12) + "…" : block.engine, 0, y + 12);
      g.fillText(`${block.count} ${state.order === "groups" ? "rollouts" : "places"}`, 0, y + 27);
      g.fillStyle = tints.line;
      g.fillRect(0, y - 4, width(), 1);
      g.fillStyle = tints.muted;
    }
  }

  function find(event) {
    const place = canvas.getBoundingClientRect();
    const x = event.clientX - place.left, y = event.clientY - place.top, t = T(x);
    if (x < LEFT) return null;
    const row = rows.findIndex((_, i) => y >= rowY(i) && y < rowY(i) + rowHeight);
    const lane = row < 0 ? null : rows[row].find((l) => t >= l[LANE.start] && t <= l[LANE.end]);
    return lane ? [lane, t] : null;
  }

  canvas.addEventListener("mousemove", (event) => {
    const place = canvas.getBoundingClientRect();
    if (state.drag) { state.drag.to = event.clientX - place.left; hideTip(); draw(); return; }
    const found = find(event);
    const hovered = found ? found[0] : null;
    if (hovered !== state.hover) { state.hover = hovered; draw(); }
    if (found) showTip(event, `${found[0][LANE.env]} g${found[0][LANE.group]}.m${found[0][LANE.member]}.a${found[0][LANE.attempt]}`, laneRows(...found));
    else hideTip();
  });
  canvas.addEventListener("mouseleave", () => { state.hover = null; hideTip(); draw(); });
  canvas.addEventListener("mousedown", (event) => {
    const x = event.clientX - canvas.getBoundingClientRect().left;
    if (x >= LEFT) state.drag = { from: x, to: x };
  });
  addEventListener("mouseup", () => {
    if (!state.drag) return;
    const { from, to } = state.drag;
    state.drag = null;
    if (Math.abs(to - from) > 5) set(Math.min(T(from), T(to)), Math.max(T(from), T(to)));
    else draw();
  });
  canvas.addEventListener("dblclick", () => set(...full));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;  // a plain wheel scrolls the page
    event.preventDefault();
    zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, T(event.clientX - canvas.getBoundingClientRect().left));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const act = { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.6), 0: () => set(...full) }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  layout();
  new ResizeObserver(draw).observe(canvas);
  REDRAW.push(draw);
  return card("s12", null, null, controls, canvas);
}

function laneRows(lane, t) {
  const rows = [["task", `${lane[LANE.split]} ${lane[LANE.task]}`], ["lasted", seconds(lane[LANE.end] - lane[LANE.start])],
    ["ended", (lane[LANE.ending] || "in flight") + (lane[LANE.cause] ? ` (${lane[LANE.cause]})` : "")], ["reward", fmt(lane[LANE.reward])],
    ["turns", String(lane[LANE.turns].filter((turn) => !turn[7]).length)]];
  const at = lane[LANE.turns].findLastIndex((turn) => turn[0] <= t);
  const turn = lane[LANE.turns][at];
  const number = Math.max(1, lane[LANE.turns].slice(0, at + 1).filter((turn) => !turn[7]).length);
  if (!turn || (turn[2] !== null && t > turn[2])) return [...rows, ["now", "environment"]];
  if (turn[1] === null || t < turn[1]) return [...rows, ["now", `turn ${number} waits at the gate`]];
  const [, granted, ended, tokens, context, cached, version] = turn;
  const lasted = ended === null ? "" : `, ${seconds(ended - granted)}`;
  return [...rows, ["now", `turn ${number}, model call${lasted}`], ["sampled", `${tokens} tokens by v${version ?? "?"}`], ["context", `${context} tokens, ${cached} cached`]];
}
