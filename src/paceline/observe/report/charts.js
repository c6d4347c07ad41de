// A chart: {title, unit, x: [...], series: [{name, tint, y, x?, dots?, smooth?, dash?}], kind, percent, low, high, height}
// kind "line" (the default), or "stack": bars of one x, one upon the other.
const MARGIN = { left: 46, right: 12, top: 8, bottom: 34 };

function chart(span, spec) {
  const series = spec.series.filter((s) => s.y.some((v) => v !== null));
  const holder = el("div", {});
  const node = card(span, spec.title, spec.unit, legend(series, spec), holder);
  if (!series.length) {
    holder.append(el("p", { class: "muted" }, "Nothing was recorded."));
    return node;
  }
  const draw = () => {
    const width = holder.clientWidth;
    if (width > 0) holder.replaceChildren(drawChart(width, spec.height || 176, { ...spec, series }));
  };
  new ResizeObserver(draw).observe(holder);
  REDRAW.push(draw);
  return node;
}

function legend(series, spec) {
  return el("div", { class: "legend" }, ...series.map((s) => {
    const known = s.y.filter((v) => v !== null);
    const swatch = el("i", { class: "swatch" });
    swatch.style.background = `var(--${s.tint})`;
    const value = spec.kind === "stack" ? "" : fmt(known[known.length - 1], spec.percent);
    return el("span", {}, swatch, term(s.name), " ", el("b", {}, value));
  }));
}

function drawChart(width, height, spec) {
  const { left, right, top, bottom } = MARGIN;
  const inner = { w: width - left - right, h: height - top - bottom };
  const stacked = spec.kind === "stack";
  const xs = [...new Set(spec.series.flatMap((s) => s.x || spec.x))].sort((a, b) => a - b);
  const pad = stacked ? 0.5 : 0;
  let x0 = xs[0] - pad, x1 = xs[xs.length - 1] + pad;
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  const [low, high] = bounds(spec, stacked);
  const X = (v) => left + ((v - x0) / (x1 - x0)) * inner.w;
  const Y = (v) => top + (1 - (v - low) / (high - low)) * inner.h;
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${spec.title} ${spec.unit || ""}` });
  for (const tick of ticks(low, high, 4)) {
    root.append(svg("line", { class: "grid-line", x1: left, x2: width - right, y1: Y(tick), y2: Y(tick) }));
    root.append(svg("text", { x: left - 7, y: Y(tick) + 4, "text-anchor": "end" }, fmt(tick, spec.percent)));
  }
  for (const tick of ticks(x0, x1, Math.max(2, Math.floor(inner.w / 70)))) {
    if (!Number.isInteger(tick)) continue;
    root.append(svg("text", { x: X(tick), y: height - bottom + 16, "text-anchor": "middle" }, fmt(tick)));
  }
  root.append(svg("line", { class: "axis-line", x1: left, x2: width - right, y1: top + inner.h, y2: top + inner.h }));
  root.append(svg("text", { x: left + inner.w / 2, y: height - 3, "text-anchor": "middle" }, spec.xlabel || "optimizer step"));
  if (stacked) drawStack(root, spec, X, Y, Math.max(0.6, (inner.w / (x1 - x0)) * 0.82));
  else for (const s of spec.series) drawLine(root, s, s.x || spec.x, X, Y);
  hover(root, spec, xs, X, Y, { left, top, inner, width });
  return root;
}

function bounds(spec, stacked) {
  let low = spec.low ?? Infinity, high = spec.high ?? -Infinity;
  if (stacked) {
    low = 0;
    spec.x.forEach((_, i) => { high = Math.max(high, spec.series.reduce((sum, s) => sum + (s.y[i] || 0), 0)); });
  } else {
    for (const s of spec.series) for (const v of s.y) if (v !== null) { low = Math.min(low, v); high = Math.max(high, v); }
    if (spec.low === undefined && low > 0 && low < 0.35 * high) low = 0;
  }
  if (!(high > low)) { const by = Math.abs(high) * 0.1 || 1; high += by; if (spec.low === undefined && low !== 0) low -= by; }
  const room = (high - low) * 0.04;
  return [spec.low === undefined && low !== 0 ? low - room : low, spec.high === undefined ? high + room : high];
}

function smoothed(values) {
  let sum = 0, weight = 0;
  return values.map((v) => {
    if (v === null) return null;
    sum = sum * 0.8 + v * 0.2;
    weight = weight * 0.8 + 0.2;
    return sum / weight;
  });
}

function drawLine(root, s, xs, X, Y) {
  const stroke = `var(--${s.tint})`;
  const bold = s.smooth && s.y.length > 24;
  const style = { fill: "none", stroke, "stroke-width": s.width || 2, "stroke-linejoin": "round", "stroke-linecap": "round" };
  if (s.dash) style["stroke-dasharray"] = "5 4";
  if (bold) root.append(svg("path", { ...style, "stroke-width": 1, opacity: 0.38, d: path(xs, s.y, X, Y) }));
  root.append(svg("path", { ...style, d: path(xs, bold ? smoothed(s.y) : s.y, X, Y) }));
  const known = s.y.filter((v) => v !== null).length;
  if (s.dots || known === 1) {
    s.y.forEach((v, i) => { if (v !== null) root.append(svg("circle", { cx: X(xs[i]), cy: Y(v), r: 3.6, fill: stroke, stroke: "var(--panel)", "stroke-width": 1.5 })); });
  }
}

function path(xs, ys, X, Y) {
  let d = "", pen = false;
  ys.forEach((v, i) => {
    if (v === null) { pen = pen && false; return; }
    d += (pen ? "L" : "M") + X(xs[i]).toFixed(1) + " " + Y(v).toFixed(1);
    pen = true;
  });
  return d;
}

function drawStack(root, spec, X, Y, wide) {
  spec.x.forEach((x, i) => {
    let base = 0;
    for (const s of spec.series) {
      const v = s.y[i] || 0;
      if (v <= 0) continue;
      root.append(svg("rect", { x: X(x) - wide / 2, width: wide, y: Y(base + v), height: Math.max(0, Y(base) - Y(base + v)), fill: `var(--${s.tint})` }));
      base += v;
    }
  });
}

function hover(root, spec, xs, X, Y, box) {
  const cross = svg("line", { class: "cross", y1: box.top, y2: box.top + box.inner.h, visibility: "hidden" });
  const marks = svg("g", {});
  root.append(cross, marks);
  root.addEventListener("mousemove", (event) => {
    const place = root.getBoundingClientRect();
    const at = ((event.clientX - place.left) / place.width) * box.width;
    const x = xs.reduce((best, v) => (Math.abs(X(v) - at) < Math.abs(X(best) - at) ? v : best), xs[0]);
    cross.setAttribute("x1", X(x));
    cross.setAttribute("x2", X(x));
    cross.setAttribute("visibility", "visible");
    marks.replaceChildren();
    const rows = [];
    for (const s of spec.series) {
      const i = (s.x || spec.x).indexOf(x);
      const v = i < 0 ? null : s.y[i];
      if (v === null || v === undefined || (spec.kind === "stack" && !v)) continue;
      rows.push([s.name, fmt(v, spec.percent), `var(--${s.tint})`]);
      if (spec.kind !== "stack") marks.append(svg("circle", { cx: X(x), cy: Y(v), r: 3.5, fill: `var(--${s.tint})` }));
    }
    showTip(event, `${spec.xname || "step"} ${x}`, rows);
  });
  root.addEventListener("mouseleave", () => { cross.setAttribute("visibility", "hidden"); marks.replaceChildren(); hideTip(); });
}

// Paired bars over named categories: {title, unit, names, series: [{name, tint, y}]}
function bars(span, spec) {
  const holder = el("div", {});
  const draw = () => {
    const width = holder.clientWidth, height = spec.height || 176;
    if (!width) return;
    const { left, right, top, bottom } = MARGIN;
    const inner = { w: width - left - right, h: height - top - bottom };
    const high = Math.max(...spec.series.flatMap((s) => s.y), 0.01) * 1.05;
    const Y = (v) => top + (1 - v / high) * inner.h;
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": spec.title });
    for (const tick of ticks(0, high, 4)) {
      root.append(svg("line", { class: "grid-line", x1: left, x2: width - right, y1: Y(tick), y2: Y(tick) }));
      root.append(svg("text", { x: left - 7, y: Y(tick) + 4, "text-anchor": "end" }, fmt(tick, spec.percent)));
    }
    const slot = inner.w / spec.names.length, wide = Math.min(34, (slot * 0.7) / spec.series.length);
    spec.names.forEach((name, i) => {
      const middle = left + slot * (i + 0.5);
      root.append(svg("text", { x: middle, y: height - bottom + 16, "text-anchor": "middle" }, name));
      spec.series.forEach((s, k) => {
        const x = middle + (k - spec.series.length / 2) * wide;
        const bar = svg("rect", { x: x + 0.5, width: wide - 1, y: Y(s.y[i]), height: Math.max(0, Y(0) - Y(s.y[i])), rx: 2, fill: `var(--${s.tint})` });
        bar.addEventListener("mousemove", (event) => showTip(event, `${name} ${spec.xname}`, spec.series.map((t) => [t.name, fmt(t.y[i], spec.percent), `var(--${t.tint})`])));
        bar.addEventListener("mouseleave", hideTip);
        root.append(bar);
      });
    });
    root.append(svg("text", { x: left + inner.w / 2, y: height - 3, "text-anchor": "middle" }, spec.xlabel));
    holder.replaceChildren(root);
  };
  new ResizeObserver(draw).observe(holder);
  REDRAW.push(draw);
  return card(span, spec.title, spec.unit, legend(spec.series, { kind: "stack" }), holder);
}
