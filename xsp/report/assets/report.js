"use strict";
// The page's data are somebody else's text: they reach the page through textContent, and charts through plain().
const data = JSON.parse(document.getElementById("data").textContent);
const scheme = matchMedia("(prefers-color-scheme: dark)");
const palette = ["#4c78d8", "#e0823d", "#3fa66a", "#c9506b", "#8a63c9", "#2ba5b5", "#a08a2c", "#7d8794"];

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  if (className) element.className = className;
  return element;
}

// ECharts reads a tooltip as HTML.
function plain(text) {
  return echarts.format.encodeHTML(String(text === null ? "–" : text));
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

function header() {
  document.getElementById("name").textContent = data.name;
  for (const [what, value, about] of data.headline) {
    const tile = make("div", null, "tile");
    tile.append(make("span", what, "quiet"), make("b", value), make("span", about, "quiet"));
    document.getElementById("headline").append(tile);
  }
  for (const [what, text] of data.facts) document.getElementById("facts").append(make("dt", what), make("dd", text));
  for (const [severity, subject, text] of data.health) {
    const item = make("li");
    item.append(make("span", severity, "severity " + severity), make("span", subject, "subject"), make("span", text));
    document.querySelector("#health ul").append(item);
  }
}

// --- the chosen span ------------------------------------------------------------------------------------------

const WORDS = {
  dur_ns: "recorded", raw_ns: "averaged", true_ns: "true", cause: "difference",
  input_shapes: "shapes", flops: "operations", median_ns: "median", p90_ns: "90th percentile", p99_ns: "99th percentile",
};
const FIRST = ["kind", "type", "phase", "dur_ns", "raw_ns", "true_ns", "interval", "cause", "input_shapes", "flops"];
const TOLD = ["name", "true_lo_ns", "true_hi_ns", "level", "parent_rule"];

function valueOf(column, place) {
  const value = timeline.get[column](place);
  if (value === null) return null;
  if (column.endsWith("_ns")) return time(value);
  return column.endsWith("_bytes") ? bytes(value) : typeof value === "number" && !/^(process|thread|correlation_id|sequence_nr|forward_thread)$/.test(column) ? number(value) : String(value);
}

function interval(place) {
  const [low, high] = [timeline.get.true_lo_ns(place), timeline.get.true_hi_ns(place)];
  return low === null || high === null ? null : `${time(low)} … ${time(high)}`;
}

function link(place) {
  const button = make("button", timeline.get.name(place), "link");
  button.type = "button";
  button.addEventListener("click", () => timeline.choose(place, true));
  return button;
}

function inside(place) {
  const found = [];
  for (let each = 0; each < timeline.start.length; each++) if (timeline.parent(each) === place) found.push(each);
  return found.sort((a, b) => timeline.get.dur_ns(b) - timeline.get.dur_ns(a));
}

function show(place) {
  const list = make("dl");
  const fact = (what, value, about) => {
    const term = make("dt", what), told = make("dd");
    if (about) term.title = about;
    told.append(value);
    list.append(term, told);
  };
  const columns = [...FIRST, ...Object.keys(timeline.get).filter((name) => !FIRST.includes(name) && !TOLD.includes(name))];
  fact("level", levelName(timeline.get.level(place)), data.timeline.about.level);
  fact("starts at", time(timeline.start[place]), "from the start of the step");
  for (const column of columns) {
    const value = column === "interval" ? interval(place) : valueOf(column, place);
    // What matters is said to be unknown where it is; the other columns are left away.
    if (value !== null || ["true_ns", "interval", "cause"].includes(column)) {
      fact(column === "interval" ? "95 % interval" : WORDS[column] || column.replace(/_(ns|bytes)$/, "").replaceAll("_", " "), value === null ? "–" : value, data.timeline.about[column]);
    }
  }
  const above = timeline.parent(place), children = inside(place);
  fact("parent", above === null ? "none" : link(above));
  fact("found by", number(timeline.get.parent_rule(place)), data.timeline.about.parent_rule);
  if (data.timeline.key[place] !== null) fact("key", data.timeline.key[place], "in Jaeger the spans with the tag xsp.key of this value are this one, of any step");
  if (children.length) {
    const links = make("div");
    for (const child of children.slice(0, 8)) {
      const line = make("div", null, "child");
      line.append(link(child), make("span", time(timeline.get.dur_ns(child)), "quiet"));
      links.append(line);
    }
    if (children.length > 8) links.append(make("span", `and ${number(children.length - 8)} shorter ones`, "quiet"));
    fact(`inside: ${number(children.length)}`, links);
  }
  document.getElementById("panel").replaceChildren(make("h3", timeline.get.name(place)), list);
}

// A span in Jaeger links to #key=…, the place in the structure of a step.
function follow() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key"), told = document.getElementById("linked");
  const place = data.timeline.key.indexOf(key);
  told.hidden = key === null || place >= 0;
  if (key === null) return;
  document.getElementById("timeline").scrollIntoView();
  if (place >= 0) timeline.visit(place);
  else told.textContent = `The link leads to a span with the key ${key}, and the merged step shows none: it is of another run, of a step of another kind, or among those that are left out here.`;
}

function legend() {
  const holder = document.getElementById("legend"), level = unpack(data.timeline.columns.level), phase = unpack(data.timeline.columns.phase);
  const places = [...data.timeline.start.keys()];
  for (const each of [...new Set(places.map(level))].sort((a, b) => a - b)) {
    const item = make("span"), box = make("i");
    box.style.background = levelColour(each);
    item.append(box, levelName(each));
    holder.append(item);
  }
  if (places.some((place) => phase(place) === "backward")) {
    const item = make("span"), box = make("i", null, "backward");
    item.append(box, "backward");
    holder.append(item);
  }
  document.getElementById("timeline-note").textContent = data.timeline.note;
  document.getElementById("panel").append(make("p", "Click a span to see what is known of it. Wheel: zoom. Drag: pan. Shift and wheel: scroll the lanes. Double click: zoom to the span. Keys: arrows, +, −, 0, N, P.", "quiet"));
}

// --- charts ---------------------------------------------------------------------------------------------------

const plots = [];

function plot(holder, option) {
  const start = () => {
    const chart = echarts.init(holder, scheme.matches ? "dark" : null);
    chart.setOption({ animation: false, backgroundColor: "transparent", color: palette, textStyle: { fontFamily: "system-ui, sans-serif" }, ...option });
    return chart;
  };
  const each = { chart: start(), again: () => { each.chart.dispose(); each.chart = start(); } };
  plots.push(each);
}

addEventListener("resize", () => plots.forEach((each) => each.chart.resize()));
scheme.addEventListener("change", () => { plots.forEach((each) => each.again()); timeline.redraw(); });

function card(title, about) {
  const element = make("div", null, "card"), holder = make("div", null, "chart");
  holder.setAttribute("role", "img");
  holder.setAttribute("aria-label", `${title}, ${about}; the table of the same number has the figures`);
  element.append(make("h3", title), make("p", about, "quiet"), holder);
  document.querySelector("#charts .grid").append(element);
  return holder;
}

// Returns a chart's columns; where there is nothing to draw, the page says why.
function columns(id, value) {
  const found = data.charts[id], told = data.refused.find(([name]) => name === id);
  if (found && found[value] && found[value].some((each) => each !== null)) return found;
  const reason = told ? told[1] : `${id}: ${value.replaceAll("_", " ")} was not measured`;
  document.querySelector("#charts .grid").after(make("p", reason, "quiet"));
  return null;
}

function dearestTypes(found, value) {
  const sums = new Map();
  found.type.forEach((type, place) => sums.set(type, (sums.get(type) || 0) + (found[value][place] || 0)));
  return [...sums].sort((a, b) => b[1] - a[1]).slice(0, 6).map(([type]) => type);
}

const sliders = [{ type: "inside", zoomOnMouseWheel: "ctrl" }, { type: "slider", height: 16, bottom: 6, brushSelect: false, showDataShadow: false }];

function perLayer(id, value, unit, title, tip) {
  const found = columns(id, value);
  if (!found) return;
  const types = dearestTypes(found, value), rest = found.type.some((type) => !types.includes(type));
  const series = [...types, ...(rest ? [null] : [])].map((type, place) => ({
    type: "bar", name: type === null ? rest && types.includes(null) ? "none" : "other types" : String(type), barGap: "-100%", barCategoryGap: "8%", itemStyle: { color: type === null ? "#9aa3b2" : palette[place] },
    data: found.type.flatMap((each, at) => ((type === null ? !types.includes(each) : each === type) ? [[at, found[value][at]]] : [])),
  }));
  plot(card(title, `in execution order, without the layers inside, ${unit}`), {
    grid: { left: 52, right: 12, top: 34, bottom: 56 }, legend: { top: 0, type: "scroll", itemWidth: 12, itemHeight: 12, icon: "rect" },
    xAxis: { type: "category", data: found.layer_index, name: "layer", nameLocation: "middle", nameGap: 22 },
    yAxis: { type: "value" }, dataZoom: sliders,
    tooltip: { trigger: "axis", axisPointer: { type: "shadow" }, confine: true, formatter: (items) => (items.length ? tip(found, items[0].dataIndex === undefined ? 0 : items[0].value[0]) : "") },
    series,
  });
}

function latencyTip(found, at) {
  const [low, high] = [found.latency_low_ms, found.latency_high_ms];
  const ends = !low || low[at] === null ? "" : `, 95 % interval ${number(low[at])} … ${number(high[at])}`;
  return `<b>${plain(found.name[at])}</b> ${plain(found.type[at])}<br>${number(found.self_ms[at])} ms itself<br>${number(found.latency_ms[at])} ms with the layers inside${ends}`;
}

function memoryTip(found, at) {
  return `<b>${plain(found.name[at])}</b> ${plain(found.type[at])}<br>${number(found.alloc_mib[at])} MiB`;
}

function byType(id, value, unit, title) {
  const found = columns(id, value);
  if (!found) return;
  const pairs = found.type.map((type, place) => [String(type), found[value][place]]).filter(([, each]) => each !== null).sort((a, b) => b[1] - a[1]);
  const whole = pairs.reduce((sum, [, each]) => sum + each, 0), rest = pairs.slice(10);
  const shown = pairs.slice(0, 10).concat(rest.length ? [[`${rest.length} other types`, rest.reduce((sum, [, each]) => sum + each, 0)]] : []).reverse();
  const share = (each) => (whole ? ` (${((100 * each) / whole).toFixed(1)} %)` : "");
  plot(card(title, unit), {
    grid: { left: 130, right: 110, top: 4, bottom: 24 },
    xAxis: { type: "value", splitNumber: 4 }, yAxis: { type: "category", data: shown.map(([type]) => type), axisLabel: { width: 115, overflow: "truncate", interval: 0 } },
    tooltip: { confine: true, formatter: (item) => `<b>${plain(item.name)}</b><br>${number(item.value)} ${unit}${share(item.value)}` },
    series: [{ type: "bar", barMaxWidth: 22, data: shown.map(([, each]) => each), itemStyle: { color: palette[0] }, label: { show: true, position: "right", formatter: (item) => number(item.value) + share(item.value) } }],
  });
}

function kernelShare() {
  const found = columns("A13", "kernel_ms");
  if (!found) return;
  plot(card("A13 Kernel against other latency", "per layer in execution order, ms"), {
    grid: { left: 52, right: 12, top: 34, bottom: 56 }, legend: { top: 0, itemWidth: 12, itemHeight: 12, icon: "rect" },
    xAxis: { type: "category", data: found.layer_index, name: "layer", nameLocation: "middle", nameGap: 22 }, yAxis: { type: "value" }, dataZoom: sliders,
    tooltip: { trigger: "axis", axisPointer: { type: "shadow" }, confine: true, formatter: (items) => `<b>${plain(found.layer_name[items[0].dataIndex])}</b><br>` + items.map((item) => `${plain(item.seriesName)} ${number(item.value)} ms`).join("<br>") },
    series: [["kernels", found.kernel_ms, palette[0]], ["other", found.other_ms, palette[1]]].map(([name, values, color]) => ({ type: "bar", name, stack: "all", barCategoryGap: "8%", itemStyle: { color }, data: values })),
  });
}

// --- overhead ledger ------------------------------------------------------------------------------------------

function signed(value) { return (value < 0 ? "− " : "+ ") + number(Math.abs(value)); }

function whisker(params, api) {
  const [row, low, high] = [0, 1, 2].map((at) => api.value(at));
  const left = api.coord([low, row]), right = api.coord([high, row]);
  const stroke = getComputedStyle(document.documentElement).getPropertyValue("--text").trim();
  const line = (x1, y1, x2, y2) => ({ type: "line", shape: { x1, y1, x2, y2 }, style: { stroke, lineWidth: 1.5 } });
  return { type: "group", children: [line(left[0], left[1], right[0], right[1]), ...[left, right].map(([x, y]) => line(x, y - 6, x, y + 6))] };
}

function ledger() {
  const holder = document.getElementById("ledger-chart"), found = data.charts.ledger;
  if (!found || found.rung.length < 2) {
    holder.parentNode.remove();
    document.getElementById("ledger-sum").textContent = "One rung alone says nothing about what profiling adds: record with --levels M/L/G.";
    return;
  }
  const rungs = found.rung.map((name, at) => at).filter((at) => at > 0 && found.added_ms[at] !== null);
  const true_ms = found.step_ms[0], sum = rungs.reduce((all, at) => all + found.added_ms[at], true_ms), measured = found.step_ms[found.rung.length - 1];
  document.getElementById("ledger-sum").textContent =
    `${number(true_ms)} ms true ${rungs.map((at) => `${signed(found.added_ms[at])} ms (${found.rung[at]})`).join(" ")} = ${number(sum)} ms; with all on, ${number(measured)} ms were measured.` +
    (rungs.some((at) => found.added_ms[at] < 0) ? " What is below zero is not stacked." : "");
  const about = (at) => `<b>${plain(found.rung[at])}</b> adds ${number(found.added_ms[at])} ms` + (found.low_ms[at] === null ? ", no interval" : `<br>95 % interval ${number(found.low_ms[at])} … ${number(found.high_ms[at])} ms`);
  const names = rungs.map((at) => `${found.rung[at]} adds`);
  holder.style.height = 184 + 34 * rungs.length + "px";
  plot(holder, {
    legend: { top: 0, itemWidth: 12, itemHeight: 12, icon: "rect", data: ["true", ...names] },
    grid: [{ left: 110, right: 30, top: 42, height: 40 }, { left: 110, right: 30, top: 132, bottom: 24 }],
    title: { text: "what each rung adds, with its 95 % interval", left: 110, top: 108, textStyle: { fontSize: 12, fontWeight: "normal" } },
    xAxis: [{ type: "value", gridIndex: 0, axisLabel: { formatter: "{value} ms" } }, { type: "value", gridIndex: 1, axisLabel: { formatter: "{value} ms" } }],
    yAxis: [{ type: "category", gridIndex: 0, data: ["true + added"] }, { type: "category", gridIndex: 1, inverse: true, data: names, axisLine: { onZero: false } }],
    tooltip: { confine: true, formatter: (item) => (item.seriesName === "true" ? `true: ${number(true_ms)} ms` : about(item.seriesIndex <= rungs.length ? rungs[item.seriesIndex - 1] : rungs[item.dataIndex])) },
    series: [
      {
        type: "bar", stack: "all", name: "true", data: [true_ms], itemStyle: { color: palette[0] },
        markLine: { symbol: "none", silent: true, data: [{ xAxis: measured }], label: { formatter: "measured", fontSize: 11 }, lineStyle: { color: "#7d8794", type: "dashed", width: 1.5 } },
      },
      ...rungs.map((at, place) => ({ type: "bar", stack: "all", name: names[place], data: [Math.max(0, found.added_ms[at])], itemStyle: { color: palette[place + 1] } })),
      { type: "bar", xAxisIndex: 1, yAxisIndex: 1, barMaxWidth: 16, data: rungs.map((at, place) => ({ value: found.added_ms[at], itemStyle: { color: palette[place + 1] } })) },
      { type: "custom", xAxisIndex: 1, yAxisIndex: 1, renderItem: whisker, encode: { x: [1, 2], y: 0 }, z: 5, data: rungs.flatMap((at, place) => (found.low_ms[at] === null ? [] : [[place, found.low_ms[at], found.high_ms[at]]])) },
    ],
  });
}

// --- tables ---------------------------------------------------------------------------------------------------

const UNITS = { ms: "ms", us: "µs", ns: "ns", mib: "MiB", bytes: "bytes", percent: "%" };

function heading(column) {
  const [, rate, per] = column.match(/^(.+)_per_(.+)$/) || [];
  if (rate) return [rate === "gflop" ? "GFLOP" : rate.replaceAll("_", " "), "/ " + per.replaceAll("_", " ")];
  const [, name, unit] = column.match(/^(.+)_(ms|us|ns|mib|bytes|percent)$/) || [null, column, null];
  return [name.replaceAll("_", " "), unit && UNITS[unit]];
}

function order(place, way) {
  return ({ [place]: a }, { [place]: b }) => (a === null) - (b === null) || way * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
}

function tableOf(found) {
  const whole = make("div", null, "inside"), search = make("input"), count = make("output", null, "quiet");
  search.type = "search";
  search.placeholder = "filter";
  search.setAttribute("aria-label", `filter ${found.id} ${found.title}`);
  const holder = make("div", null, "scroll"), grid = make("table"), head = make("tr"), body = make("tbody");
  holder.tabIndex = 0;
  holder.setAttribute("role", "region");
  holder.setAttribute("aria-label", `${found.id} ${found.title}`);
  const numeric = found.columns.map((_, place) => found.rows.some((row) => typeof row[place] === "number"));
  const rows = found.rows.slice();
  let sorted = [-1, 1];
  const line = (row) => {
    const made = make("tr");
    row.forEach((cell, place) => {
      const box = make("td", number(cell), numeric[place] ? "number" : "name");
      if (!numeric[place] && cell !== null) box.title = cell;
      made.append(box);
    });
    return made;
  };
  const fill = () => {
    const wanted = search.value.toLowerCase();
    const kept = rows.filter((row) => !wanted || row.some((cell) => cell !== null && String(cell).toLowerCase().includes(wanted)));
    count.textContent = wanted ? `${number(kept.length)} of ${number(rows.length)} rows` : `${number(rows.length)} row${rows.length === 1 ? "" : "s"}`;
    body.replaceChildren(...kept.map(line));
  };
  found.columns.forEach((column, place) => {
    const cell = make("th", null, numeric[place] ? "number" : ""), [name, unit] = heading(column), button = make("button", name);
    cell.scope = "col";
    cell.dataset.column = column;
    button.type = "button";
    if (unit) button.append(make("span", " " + unit, "unit"));
    button.addEventListener("click", () => {
      sorted = [place, sorted[0] === place ? -sorted[1] : numeric[place] ? -1 : 1];
      rows.sort(order(...sorted));
      head.querySelectorAll("th").forEach((each) => each.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", sorted[1] > 0 ? "ascending" : "descending");
      fill();
    });
    cell.append(button);
    head.append(cell);
  });
  search.addEventListener("input", fill);
  const top = make("thead");
  top.append(head);
  grid.append(top, body);
  holder.append(grid);
  const bar = make("div", null, "bar");
  bar.append(search, count);
  whole.append(make("p", found.about.replaceAll("`", ""), "quiet"), bar, holder);
  if (found.total > found.rows.length) {
    const more = make("p", `${number(found.total - found.rows.length)} of ${number(found.total)} rows are not shown; these are ${found.chosen.replaceAll("_", " ")}. All of them: `, "quiet");
    more.append(make("code", found.command));
    whole.append(more);
  }
  if (found.empty.length) whole.append(make("p", "not measured in this trace: " + found.empty.join(", ").replaceAll("_", " "), "quiet"));
  fill();
  return whole;
}

function tables() {
  for (const found of data.tables) {
    const details = make("details"), summary = make("summary", `${found.id} ${found.title}`);
    details.id = "table-" + found.id;
    details.open = ["A1", "A2", "A6", "ledger"].includes(found.id);
    summary.append(make("span", ` ${number(found.total)} row${found.total === 1 ? "" : "s"}`, "quiet"));
    details.append(summary);
    // A table is made when it is first opened: thousands of rows cost nothing until somebody looks.
    const build = () => { if (details.open && !details.querySelector(".inside")) details.append(tableOf(found)); };
    details.addEventListener("toggle", build);
    build();
    document.querySelector(found.id.startsWith("ledger") ? "#ledger .holder" : "#tables .holder").append(details);
  }
  for (const [id, reason] of data.refused) {
    document.querySelector(id.startsWith("ledger") ? "#ledger .holder" : "#tables .holder").append(make("p", reason.startsWith(id) ? reason : `${id}: ${reason}`, "quiet"));
  }
}

header();
legend();
const timeline = Timeline(data.timeline, show);
perLayer("A2", "self_ms", "ms", "A2, A3 Layer latency", latencyTip);
perLayer("A4", "alloc_mib", "MiB", "A4 Layer memory allocation", memoryTip);
byType("A5", "layers", "layers", "A5 Layer type distribution");
byType("A6", "latency_ms", "ms", "A6 Layer latency by type");
byType("A7", "alloc_mib", "MiB", "A7 Layer memory allocation by type");
kernelShare();
ledger();
tables();
follow();
addEventListener("hashchange", follow);
