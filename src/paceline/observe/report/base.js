"use strict";
// Everything below draws with textContent and DOM nodes only: no string of the data is ever parsed as markup.
const DATA = JSON.parse(document.getElementById("data").textContent);
const PAGE = document.getElementById("page");
const TIP = document.getElementById("tip");
const SVG = "http://www.w3.org/2000/svg";
const REDRAW = [];  // functions to call when the theme or the width changes

function el(tag, props, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (key === "class") node.className = value;
    else if (key === "style") Object.assign(node.style, value);
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim() || "#888";
}

function fmt(value, percent) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (percent) return trim((value * 100).toPrecision(value > 0.0995 ? 3 : 2)) + "%";
  const size = Math.abs(value);
  if (size >= 1e9) return trim((value / 1e9).toPrecision(3)) + "B";
  if (size >= 1e6) return trim((value / 1e6).toPrecision(3)) + "M";
  if (size >= 1e4) return trim((value / 1e3).toPrecision(3)) + "k";
  if (Number.isInteger(value)) return String(value);
  if (size >= 999.5) return String(Math.round(value));
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return trim(value.toPrecision(3));
}

function trim(text) {
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}

function count(value) {
  return value.toLocaleString("en-US");
}

function seconds(value) {
  if (value < 0.9995) return Math.round(value * 1000) + " ms";
  if (value < 100) return trim(value.toFixed(value < 10 ? 2 : 1)) + " s";
  const whole = Math.round(value);
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours} h ${String(minutes).padStart(2, "0")} min` : `${minutes} min ${String(whole % 60).padStart(2, "0")} s`;
}

function words(name) {
  return name.replaceAll("_", " ");
}

function ticks(low, high, wanted) {
  const span = high - low || 1;
  const raw = span / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => span / s <= wanted + 0.01) || raw;
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-6; tick += step) found.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  return found;
}

function showTip(event, head, rows, text) {
  TIP.replaceChildren(el("div", { class: "head" }, head));
  if (text) TIP.append(el("div", {}, text));
  for (const [name, value, tint] of rows) {
    const label = el("span", {}, name);
    if (tint) label.prepend(el("i", { class: "swatch", style: { background: tint } }));
    TIP.append(el("div", { class: "row" }, label, el("span", {}, value)));
  }
  TIP.hidden = false;
  const wide = TIP.offsetWidth, high = TIP.offsetHeight;
  const left = event.pageX + 16 + wide > document.documentElement.clientWidth + scrollX ? event.pageX - wide - 14 : event.pageX + 16;
  TIP.style.left = Math.max(4, left) + "px";
  TIP.style.top = Math.max(scrollY + 4, Math.min(event.pageY + 14, scrollY + innerHeight - high - 8)) + "px";
}

function hideTip() {
  TIP.hidden = true;
}

// A word with its meaning, shown to whoever points at it or reaches it with the keyboard.
function term(text) {
  const meaning = DATA.terms[String(text).toLowerCase()];
  if (!meaning) return text;
  const node = el("span", { class: "term", tabindex: "0", "aria-description": meaning }, text);
  const show = (event) => showTip(event.pageX === undefined ? place(node) : event, text, [], meaning);
  for (const begins of ["mouseenter", "focus"]) node.addEventListener(begins, show);
  for (const ends of ["mouseleave", "blur"]) node.addEventListener(ends, hideTip);
  return node;
}

function place(node) {
  const box = node.getBoundingClientRect();
  return { pageX: box.left + scrollX, pageY: box.bottom + scrollY };
}

function card(span, title, unit, ...children) {
  const head = title ? el("h3", {}, term(title), unit ? el("span", { class: "unit" }, unit) : null) : null;
  return el("section", { class: "card " + span }, head, ...children);
}
