"use strict";
// Formatting of texts and figures. The data are untrusted text: they reach the page through textContent, and charts
// through plain().
const pageData = JSON.parse(document.getElementById("data").textContent);
// The data of the selected kind of step; those of the first kind are stored together with those of the whole run.
let data = pageData;

// The figures of other kinds of steps are parsed when they are first selected.
const parsedKinds = new Map([[0, pageData]]);
function kindOf(number) {
  if (!parsedKinds.has(number)) parsedKinds.set(number, JSON.parse(document.getElementById(`kind-${number}`).textContent));
  return parsedKinds.get(number);
}

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function byId(id) { return document.getElementById(id); }

// ECharts reads a tooltip as HTML.
function plain(text) {
  return echarts.format.encodeHTML(String(text === null || text === undefined ? "–" : text));
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size < 0.001 || size >= 1e6) return value.toExponential(2);
  const digits = Math.max(0, Math.min(4, 3 - Math.floor(Math.log10(size))));
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function time(ns) {
  if (ns === null || ns === undefined) return "–";
  const size = Math.abs(ns);
  if (size >= 1e9) return number(ns / 1e9) + " s";
  if (size >= 1e6) return number(ns / 1e6) + " ms";
  return size >= 1e3 ? number(ns / 1e3) + " µs" : Math.round(ns) + " ns";
}

function bytes(count) {
  if (count < 1024) return count + " B";
  return count < 1048576 ? number(count / 1024) + " KiB" : number(count / 1048576) + " MiB";
}

function signed(value) { return (value < 0 ? "− " : "+ ") + number(Math.abs(value)); }

function share(part, total) { return total ? `${((100 * part) / total).toFixed(1)} %` : "–"; }

function shortened(text, letters) {
  const sideLength = Math.floor((letters - 1) / 2);
  return text.length <= letters ? text : text.slice(0, sideLength) + "…" + text.slice(text.length - sideLength);
}

// A long list behind one line, closed at first; nothing if the list is empty.
function folded(title, lines) {
  if (!lines.length) return [];
  const details = make("details", null, "folded"), inside = make("div", null, "inside");
  inside.append(...lines);
  details.append(make("summary", title), inside);
  return [details];
}

function counted(count, noun) { return `${number(count)} ${noun}${count === 1 ? "" : "s"}`; }

function legendItem(text, colour, className) {
  const item = make("span"), box = make("i", null, className);
  if (colour) box.style.background = colour;
  item.append(box, text);
  return item;
}
