"use strict";
// The page's data are somebody else's text: they reach the page through textContent, and tooltips through escape().
const data = JSON.parse(document.getElementById("data").textContent);
const spans = data.spans;
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const palette = ["#4c78d8", "#e0823d", "#3fa66a", "#c9506b", "#8a63c9", "#2ba5b5", "#a08a2c", "#7d8794"];
const levels = { 10: ["application", 7], 20: ["model", 0], 30: ["layer", 2], 40: ["op", 1], 50: ["library", 4], 60: ["runtime", 6], 70: ["kernel", 3] };
const colour = (level) => palette[(levels[level] || ["", 7])[1]];

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function escape(text) {
  return echarts.format.encodeHTML(String(text));
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(2);
  return value.toFixed(Math.max(0, Math.min(4, 3 - Math.floor(Math.log10(size || 1)))));
}

function time(ns) {
  if (ns === null || ns === undefined) return "–";
  const size = Math.abs(ns);
  if (size >= 1e9) return number(ns / 1e9) + " s";
  if (size >= 1e6) return number(ns / 1e6) + " ms";
  return size >= 1e3 ? number(ns / 1e3) + " µs" : number(ns) + " ns";
}

function header() {
  document.getElementById("name").textContent = data.name;
  document.getElementById("headline").textContent = data.headline;
  document.getElementById("machine").textContent = data.machine;
  const list = document.querySelector("#health ul");
  for (const [severity, subject, text] of data.health) {
    const item = make("li");
    item.append(make("span", severity, "severity " + severity), make("span", subject, "subject"), make("span", text));
    list.append(item);
  }
}

// --- timeline -------------------------------------------------------------------------------------------------

// Spans stand by lane, each lane by start. Those narrower than a pixel are drawn together, with their number.
function visible(from, to, width) {
  const pixel = (to - from) / Math.max(width, 1);
  const boxes = [];
  data.lanes.forEach(([, first, last], lane) => {
    let low = first, high = last;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans.start[middle] + spans.dur[middle] < from) low = middle + 1; else high = middle;
    }
    let open = null;
    for (let place = low; place < last && spans.start[place] <= to; place++) {
      const start = spans.start[place], end = start + spans.dur[place];
      if (end - start >= pixel) {
        if (open) boxes.push(open);
        open = null;
        boxes.push({ lane, start, end, place, count: 1 });
      } else if (open && start - open.end < pixel) {
        open.end = Math.max(open.end, end);
        open.count += 1;
      } else {
        if (open) boxes.push(open);
        open = { lane, start, end: Math.max(end, start + pixel), place, count: 1 };
      }
    }
    if (open) boxes.push(open);
  });
  return boxes;
}

function timeline() {
  const holder = document.getElementById("timeline-chart");
  holder.style.height = Math.min(900, Math.max(220, 90 + 22 * data.lanes.length)) + "px";
  document.getElementById("timeline-note").textContent = data.timeline_note;
  for (const level of [...new Set(spans.level)].sort((a, b) => a - b)) {
    const item = make("span");
    const box = make("i");
    box.style.background = colour(level);
    item.append(box, document.createTextNode((levels[level] || [level])[0]));
    document.getElementById("legend").append(item);
  }
  if (!spans.start.length) return;
  const chart = echarts.init(holder, dark ? "dark" : null);
  const [least, most] = data.range;
  let boxes = [];
  const plot = () => Math.max(100, holder.clientWidth - 170);
  const draw = (from, to) => {
    boxes = visible(from, to, plot());
    window.xspTimeline = { boxes: boxes.length, from, to };
    chart.setOption({ series: [{ id: "spans", data: boxes.map((b) => [b.lane, b.start, b.end, b.place, b.count]) }] });
  };
  const renderItem = (params, api) => {
    const from = api.coord([api.value(1), api.value(0)]), to = api.coord([api.value(2), api.value(0)]);
    const height = api.size([0, 1])[1] * 0.86;
    const frame = { x: params.coordSys.x, y: params.coordSys.y, width: params.coordSys.width, height: params.coordSys.height };
    const box = echarts.graphic.clipRectByRect({ x: from[0], y: from[1] - height / 2, width: Math.max(1, to[0] - from[0]), height }, frame);
    if (!box) return undefined;
    const place = api.value(3), many = api.value(4) > 1;
    const label = box.width > 34 && !many ? spans.name[place] : "";
    return {
      type: "rect", shape: box,
      style: { fill: colour(spans.level[place]), opacity: many ? 0.55 : spans.phase[place] === "backward" ? 0.72 : 0.92, stroke: css("--ground"), lineWidth: box.width > 3 ? 0.6 : 0 },
      textContent: label ? { style: { text: label, fill: "#fff", width: box.width - 6, overflow: "truncate", fontSize: 11 } } : undefined,
      textConfig: { position: "insideLeft" },
    };
  };
  chart.setOption({
    animation: false, backgroundColor: "transparent",
    grid: { left: 120, right: 20, top: 10, bottom: 70 },
    xAxis: { type: "value", min: least, max: most, axisLabel: { formatter: (ns) => time(ns) }, splitLine: { lineStyle: { opacity: 0.3 } } },
    yAxis: { type: "category", inverse: true, data: data.lanes.map((lane) => lane[0]), axisLabel: { width: 105, overflow: "truncate" } },
    dataZoom: [{ type: "inside", filterMode: "none" }, { type: "slider", filterMode: "none", height: 22, bottom: 12, labelFormatter: (ns) => time(ns) }],
    tooltip: {
      formatter: (item) => {
        const [, start, end, place, count] = item.value;
        if (count > 1) return `${count} spans in ${time(end - start)}: zoom in`;
        return `<b>${escape(spans.name[place])}</b><br>${escape(spans.kind[place])}, ${time(spans.dur[place])} recorded, ${time(spans.true_ns[place])} true`;
      },
    },
    series: [{ id: "spans", type: "custom", renderItem, encode: { x: [1, 2], y: 0 }, clip: true, data: [] }],
  });
  draw(least, most);
  chart.on("datazoom", () => {
    const zoom = chart.getOption().dataZoom[0];
    draw(least + ((most - least) * zoom.start) / 100, least + ((most - least) * zoom.end) / 100);
  });
  chart.on("click", (item) => {
    if (item.value[4] > 1) chart.dispatchAction({ type: "dataZoom", startValue: item.value[1], endValue: item.value[2] });
    else show(item.value[3]);
  });
  chart.getZr().on("dblclick", () => chart.dispatchAction({ type: "dataZoom", start: 0, end: 100 }));
  window.xspZoom = (start, end) => chart.dispatchAction({ type: "dataZoom", start, end });
  window.xspShow = show;
  addEventListener("resize", () => chart.resize());
}

function show(place) {
  const panel = document.getElementById("panel");
  panel.replaceChildren(make("h3", spans.name[place]));
  const list = make("dl");
  const facts = [
    ["kind", spans.kind[place]], ["type", spans.type[place]], ["phase", spans.phase[place]], ["starts at", time(spans.start[place])],
    ["recorded", time(spans.dur[place])], ["averaged", time(spans.raw_ns[place])], ["true", time(spans.true_ns[place])],
    ["95 % interval", spans.lo[place] === null ? null : `${time(spans.lo[place])} … ${time(spans.hi[place])}`],
    ["difference", spans.cause[place]], ["shapes", spans.shape[place]], ["operations", spans.flops[place] === null ? null : number(spans.flops[place])],
    ["parent", spans.parent[place] === null ? "none" : spans.name[spans.parent[place]] + (spans.rule[place] ? `, by ${spans.rule[place]}` : "")],
    ["thread", spans.thread[place]], ["status", spans.status[place]],
  ];
  for (const [what, value] of facts) if (value !== null && value !== undefined) list.append(make("dt", what), make("dd", value));
  panel.append(list);
}

// --- charts ---------------------------------------------------------------------------------------------------

const table = (id) => data.tables.find((each) => each.id === id);

function columns(id, ...names) {
  const found = table(id);
  return found && found.rows.length ? names.map((name) => found.rows.map((row) => row[found.columns.indexOf(name)])) : null;
}

function card(title, about) {
  const element = make("div", null, "card");
  const holder = make("div", null, "chart");
  holder.setAttribute("role", "img");
  holder.setAttribute("aria-label", title);
  element.append(make("h3", title), make("p", about, "quiet"), holder);
  document.querySelector("#charts .grid").append(element);
  return holder;
}

function plot(holder, option) {
  const chart = echarts.init(holder, dark ? "dark" : null);
  chart.setOption({ animation: false, backgroundColor: "transparent", color: palette, ...option });
  addEventListener("resize", () => chart.resize());
}

function perLayer(id, column, unit, title) {
  const found = columns(id, "layer_index", "name", "type", column);
  if (!found || found[3].every((value) => value === null)) return;
  const [index, name, type, value] = found;
  plot(card(title, "in execution order, without the layers inside; " + unit), {
    grid: { left: 60, right: 16, top: 16, bottom: 60 },
    xAxis: { type: "category", data: index, name: "layer", nameLocation: "middle", nameGap: 24 },
    yAxis: { type: "value" }, dataZoom: [{ type: "inside" }, { type: "slider", height: 16, bottom: 6 }],
    tooltip: { trigger: "axis", formatter: ([item]) => `${escape(name[item.dataIndex])} (${escape(type[item.dataIndex])})<br>${number(item.value)} ${unit}` },
    series: [{ type: "bar", data: value, barCategoryGap: 0, large: true, itemStyle: { color: colour(30) } }],
  });
}

function byType(id, column, unit, title) {
  const found = columns(id, "type", column);
  if (!found || found[1].every((value) => value === null)) return;
  const pairs = found[0].map((type, place) => [type, found[1][place] || 0]).sort((a, b) => b[1] - a[1]);
  const rest = pairs.slice(10).reduce((sum, [, value]) => sum + value, 0);
  const shown = pairs.slice(0, 10).concat(rest ? [[`${pairs.length - 10} others`, rest]] : []).reverse();
  plot(card(title, unit), {
    grid: { left: 150, right: 60, top: 8, bottom: 24 },
    xAxis: { type: "value" }, yAxis: { type: "category", data: shown.map(([type]) => type), axisLabel: { width: 135, overflow: "truncate" } },
    tooltip: { formatter: (item) => `${escape(item.name)}: ${number(item.value)} ${unit}` },
    series: [{ type: "bar", data: shown.map(([, value]) => value), itemStyle: { color: colour(30) }, label: { show: true, position: "right", formatter: (item) => number(item.value) } }],
  });
}

function kernelShare() {
  const found = columns("A13", "layer_index", "layer_name", "kernel_ms", "other_ms");
  if (!found) return;
  const [index, name, kernel, other] = found;
  plot(card("A13 Kernel against other latency", "per layer, ms"), {
    grid: { left: 60, right: 16, top: 30, bottom: 60 }, legend: { top: 0 },
    xAxis: { type: "category", data: index }, yAxis: { type: "value" },
    dataZoom: [{ type: "inside" }, { type: "slider", height: 16, bottom: 6 }],
    tooltip: { trigger: "axis", formatter: (items) => `${escape(name[items[0].dataIndex])}<br>` + items.map((item) => `${escape(item.seriesName)} ${number(item.value)} ms`).join("<br>") },
    series: [["kernels", kernel], ["other", other]].map(([title, values]) => ({ type: "bar", name: title, stack: "all", barCategoryGap: 0, data: values })),
  });
}

function ledger() {
  const holder = document.getElementById("ledger-chart");
  const found = columns("ledger", "rung", "step_ms", "added_ms", "low_ms", "high_ms");
  if (!found || found[0].length < 2) { holder.remove(); return; }
  const [rung, step, added, low, high] = found;
  holder.style.height = "150px";
  plot(holder, {
    grid: { left: 80, right: 30, top: 30, bottom: 24 }, legend: { top: 0 },
    xAxis: { type: "value", axisLabel: { formatter: "{value} ms" } }, yAxis: { type: "category", data: ["step"] },
    tooltip: { formatter: (item) => `${escape(item.seriesName)}: ${number(item.value)} ms` + (low[item.seriesIndex] === null ? "" : `<br>95 % interval of what it adds: ${number(low[item.seriesIndex])} … ${number(high[item.seriesIndex])} ms`) },
    series: rung.map((name, place) => ({ type: "bar", stack: "all", name: place ? `${name} adds` : "true", data: [place ? Math.max(0, added[place]) : step[0]], barWidth: 34 })),
  });
}

// --- tables ---------------------------------------------------------------------------------------------------

function tableOf(found) {
  const inside = make("div", null, "inside");
  inside.append(make("p", found.about, "quiet"));
  const search = make("input");
  search.type = "search";
  search.placeholder = "filter";
  search.setAttribute("aria-label", "filter " + found.id);
  const holder = make("div", null, "scroll");
  const grid = make("table");
  const head = make("tr"), body = make("tbody");
  const numeric = found.columns.map((_, place) => found.rows.some((row) => typeof row[place] === "number"));
  let rows = found.rows.slice(), sorted = [-1, 1];
  const fill = () => {
    const wanted = search.value.toLowerCase();
    body.replaceChildren(...rows.filter((row) => !wanted || row.some((cell) => String(cell).toLowerCase().includes(wanted))).map((row) => {
      const line = make("tr");
      row.forEach((cell, place) => {
        const box = make("td", number(cell), numeric[place] ? "number" : "name");
        if (!numeric[place] && cell !== null) box.title = cell;
        line.append(box);
      });
      return line;
    }));
  };
  found.columns.forEach((name, place) => {
    const cell = make("th", null, numeric[place] ? "number" : "");
    cell.scope = "col";
    const button = make("button", name);
    button.addEventListener("click", () => {
      sorted = [place, sorted[0] === place ? -sorted[1] : numeric[place] ? -1 : 1];
      const [, way] = sorted;
      rows.sort(({ [place]: a }, { [place]: b }) => (a === null) - (b === null) || way * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b))));
      head.querySelectorAll("th").forEach((each) => each.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
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
  inside.append(search, holder);
  if (found.total > found.rows.length) inside.append(make("p", `${(found.total - found.rows.length).toLocaleString("en")} more rows: ${found.command}`, "quiet"));
  fill();
  return inside;
}

function tables() {
  for (const found of data.tables) {
    const details = make("details");
    details.id = "table-" + found.id;
    details.open = found.id === "A1" || found.id === "ledger";
    details.append(make("summary", `${found.id} ${found.title}`));
    // A table is made when it is first opened: thousands of rows cost nothing until somebody looks.
    const build = () => { if (details.open && !details.querySelector(".inside")) details.append(tableOf(found)); };
    details.addEventListener("toggle", build);
    build();
    document.querySelector(found.id.startsWith("ledger") ? "#ledger .holder" : "#tables .holder").append(details);
  }
  for (const [id, reason] of data.refused) document.querySelector("#tables .holder").append(make("p", `${id}: ${reason}`, "quiet"));
}

header();
timeline();
perLayer("A3", "latency_ms", "ms", "A3 Layer latency");
perLayer("A4", "alloc_mib", "MiB", "A4 Layer memory allocation");
byType("A5", "layers", "layers", "A5 Layer type distribution");
byType("A6", "latency_ms", "ms", "A6 Layer latency by type");
byType("A7", "alloc_mib", "MiB", "A7 Layer memory allocation by type");
kernelShare();
ledger();
tables();
