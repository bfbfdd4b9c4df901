"use strict";
// Charts: one function for each kind of chart in xsp/report/charts.py. The data of a chart are columns of an analysis,
// under the names of their roles.
const scheme = matchMedia("(prefers-color-scheme: dark)");
const palette = ["#4c78d8", "#e0823d", "#3fa66a", "#c9506b", "#8a63c9", "#2ba5b5", "#a08a2c", "#7d8794"];
const PHASES = { forward: "#4c78d8", backward: "#3fa66a", optimizer: "#8a63c9", "waiting for data": "#e0823d", "outside the phases": "#8d97a8", "between steps": "#c3cad8", "waiting for the device": "#2ba5b5", other: "#c3cad8" };
const DEVICE_PARTS = { computation: "#4c78d8", "exposed communication": "#8f9bf5", "exposed copies": "#62c4cc", "launched before the recording": "#8a63c9", other: "#d9deea" };
const IDLE = ["#e3b58f", "#d8cb8f", "#b9c1d0", "#cfa9b8", "#a3bdb0"];
const PARTS = { ...PHASES, idle: "#c3cad8", "exposed communication": "#8f9bf5", "exposed copies": "#62c4cc", exposed: "#8f9bf5", "not known from the name": "#c3cad8", other: "#c3cad8" };
const OTHER_COLOUR = "#9aa3b2", MOST_BARS = 12, MOST_GROUPS = 6, LABEL_LETTERS = 30;
const plots = [];

// A chart is drawn when it comes near the screen, so that a page with many charts opens fast.
class Plot {
  constructor(holder, option, group) {
    Object.assign(this, { holder, option, group, chart: null });
    observer.observe(holder);
    plots.push(this);
  }

  draw() {
    if (this.chart) return;
    this.chart = echarts.init(this.holder, scheme.matches ? "dark" : null);
    if (this.group) {
      this.chart.group = this.group;
      echarts.connect(this.group);
    }
    const option = this.option();
    for (const axis of [option.xAxis, option.yAxis]) if (axis && axis.type !== "category") axis.axisLabel = { formatter: compact, ...axis.axisLabel };
    this.chart.setOption({ animation: false, backgroundColor: "transparent", color: palette, textStyle: { fontFamily: "system-ui, sans-serif" }, ...option });
  }

  remove() {
    observer.unobserve(this.holder);
    if (this.chart) this.chart.dispose();
    plots.splice(plots.indexOf(this), 1);
  }

  redraw() {
    if (!this.chart) return;
    this.chart.dispose();
    this.chart = null;
    this.draw();
  }
}

const observer = new IntersectionObserver((entries) => {
  for (const { target } of entries.filter((entry) => entry.isIntersecting)) {
    observer.unobserve(target);
    const match = plots.find((entry) => entry.holder === target);
    if (match) match.draw();
  }
}, { rootMargin: "600px" });

// Removes the charts whose elements are no longer in the page.
function dropPlots() {
  plots.filter((entry) => !entry.holder.isConnected).forEach((stale) => stale.remove());
}

// Charts of one group zoom together.
function plot(holder, option, group) { return new Plot(holder, option, group); }

addEventListener("resize", () => plots.forEach((entry) => entry.chart && entry.chart.resize()));
addEventListener("beforeprint", () => plots.forEach((entry) => entry.draw()));
scheme.addEventListener("change", () => { plots.forEach((entry) => entry.redraw()); timeline.redraw(); });

function card(chart, about) {
  const element = make("div", null, "card"), holder = make("div", null, "chart");
  holder.setAttribute("role", "img");
  holder.setAttribute("aria-label", `${chart.title}, ${about}; the table ${chart.id} has the figures`);
  const title = make("h3", chart.title + " "), table = make("a", chart.id, "table");
  table.href = "#table-" + chart.id;
  table.title = "its table, below";
  table.addEventListener("click", () => { byId("table-" + chart.id).open = true; });
  title.append(table);
  element.append(title, make("p", about, "quiet"), holder);
  if (chart.left_out) element.append(make("p", `${number(chart.left_out)} rows are not drawn; the table shows how to list them.`, "quiet"));
  document.querySelector(`#${chart.section} .grid`).append(element);
  return holder;
}

const LEGEND = { top: 0, type: "scroll", itemWidth: 12, itemHeight: 12, icon: "rect" };
const sliders = [{ type: "inside", zoomOnMouseWheel: "ctrl" }, { type: "slider", height: 16, bottom: 6, brushSelect: false, showDataShadow: false }];

// Axes of charts with a bar per layer, in execution order.
function layerAxes(indices) {
  return {
    grid: { left: 52, right: 12, top: 34, bottom: 56 }, legend: LEGEND, dataZoom: sliders,
    xAxis: { type: "category", data: indices.map((index) => (index === null ? "none" : index)), name: "layer", nameLocation: "middle", nameGap: 22 }, yAxis: { type: "value" },
  };
}

// The label for a name; a kernel's name is shown without its result, namespaces and arguments.
function labelOf(name) {
  const short = name.replace(/^void /, "").replaceAll("(anonymous namespace)::", "").replace(/(\w+::)+/g, "").replace(/\(.*$/, "");
  return shortened(name.length <= LABEL_LETTERS || !short ? name : short, LABEL_LETTERS);
}

function labelMargin(names) { return { left: 18 + 6.3 * Math.max(4, ...names.map((name) => labelOf(name).length)) }; }

// The label of a value on an axis: at most four digits, however the axis was divided.
function compact(value) { return value.toLocaleString("en", { maximumSignificantDigits: 4, notation: Math.abs(value) >= 1e4 ? "compact" : "standard" }); }

function tip(lines) { return lines.filter((line) => line !== null).join("<br>"); }

// --- a bar for each layer, coloured by its type ---------------------------------------------------------------------

function largestGroups(names, values) {
  const sums = new Map();
  names.forEach((name, place) => sums.set(name, (sums.get(name) || 0) + (values[place] || 0)));
  return [...sums].sort((a, b) => b[1] - a[1]).slice(0, MOST_GROUPS).map(([name]) => name);
}

function layers(chart) {
  const { at, name, value, whole, low, high } = chart.data, group = chart.data.group || name.map(() => "layer");
  const groups = largestGroups(group, value), hasOthers = group.some((type) => !groups.includes(type));
  const bars = (title, color, isDrawn) => ({
    type: "bar", name: title, barGap: "-100%", barCategoryGap: "8%", itemStyle: { color }, large: at.length > 3000,
    data: group.flatMap((type, place) => (isDrawn(type) ? [[place, value[place]]] : [])),
  });
  const about = (place) => tip([
    `<b>${plain(name[place] ?? "in no layer")}</b> ${plain(group[place])}`, `${number(value[place])} ${chart.unit}`,
    whole ? `${number(whole[place])} ${chart.unit} with the layers inside` : null,
    low && low[place] !== null ? `95 % interval ${number(low[place])} … ${number(high[place])}` : null,
  ]);
  plot(card(chart, `in execution order, without the layers inside, ${chart.unit}`), () => ({
    ...layerAxes(at), legend: { ...LEGEND, show: groups.length > 1 },
    tooltip: { trigger: "axis", axisPointer: { type: "shadow" }, confine: true, formatter: (items) => (items.length ? about(items[0].value[0]) : "") },
    series: [
      ...groups.map((type, number) => bars(type === null ? "no type" : String(type), palette[number], (candidate) => candidate === type)),
      ...(hasOthers ? [bars("other types", OTHER_COLOUR, (candidate) => !groups.includes(candidate))] : []),
    ],
  }));
}

// --- bars by name, the longest first --------------------------------------------------------------------------------

function shares(chart) {
  const { name, value, about, label } = chart.data;  // the label of a kernel is its name in readable form
  const rows = name.map((element, place) => [String(element === null ? "none" : element), value[place], about ? about[place] : null, (label && label[place]) || null]);
  const sorted = rows.filter(([, element]) => element !== null).sort((a, b) => b[1] - a[1]);
  const total = sorted.reduce((sum, [, element]) => sum + element, 0), remainder = sorted.slice(MOST_BARS);
  const remainderRows = remainder.length ? [[`${remainder.length} others`, remainder.reduce((sum, [, element]) => sum + element, 0), null]] : [];
  const rowsShown = [...sorted.slice(0, MOST_BARS), ...remainderRows].reverse(), labels = rowsShown.map(([element, , , readable]) => readable || element);
  const holder = card(chart, `${chart.unit}, and percent of their sum`);
  holder.style.height = Math.max(120, 34 + 22 * rowsShown.length) + "px";
  plot(holder, () => ({
    grid: { ...labelMargin(labels), right: 110, top: 4, bottom: 24 },
    xAxis: { type: "value", splitNumber: 4 },
    yAxis: { type: "category", data: labels, axisLabel: { interval: 0, formatter: labelOf } },
    tooltip: { confine: true, formatter: ({ dataIndex }) => tip([`<b>${plain(rowsShown[dataIndex][0])}</b>`, `${number(rowsShown[dataIndex][1])} ${chart.unit} (${share(rowsShown[dataIndex][1], total)})`, rowsShown[dataIndex][2] === null ? null : plain(rowsShown[dataIndex][2])]), extraCssText: "max-width: 420px; white-space: normal; overflow-wrap: anywhere" },
    series: [{ type: "bar", barMaxWidth: 22, data: rowsShown.map(([, element]) => element), itemStyle: { color: palette[0] }, label: { show: true, position: "right", formatter: (item) => `${number(item.value)} (${share(item.value, total)})` } }],
  }));
}

// --- parts of a whole: vertical bars for layers, horizontal bars for devices or steps ----------------------------------

function parts(chart, about, place) {
  const total = chart.series.reduce((sum, { values }) => sum + Math.max(0, values[place] || 0), 0);
  const lines = chart.series.map(({ name, values }) => `${plain(name)} ${number(values[place])} ${plain(chart.unit)} (${share(values[place] || 0, total)})`);
  return tip([`<b>${plain(about)}</b>`, ...lines]);
}

// Values below zero (kernels that outlast their layer) are not stacked; the tooltip and the table show them.
function normalised(chart) {
  const totals = chart.data.name.map((_, place) => chart.series.reduce((sum, { values }) => sum + Math.max(0, values[place] || 0), 0));
  return chart.series.map(({ values }) => values.map((value, place) => (totals[place] ? (100 * Math.max(0, value || 0)) / totals[place] : 0)));
}

function stack(chart) {
  const { at, name } = chart.data, values = normalised(chart);
  plot(card(chart, "per layer in execution order, % of the layer"), () => ({
    ...layerAxes(at), yAxis: { type: "value", max: 100, axisLabel: { formatter: "{value} %" } },
    tooltip: { trigger: "axis", axisPointer: { type: "shadow" }, confine: true, formatter: (items) => parts(chart, name[items[0].dataIndex], items[0].dataIndex) },
    series: chart.series.map(({ name: title }, place) => ({ type: "bar", name: title, stack: "all", barCategoryGap: "8%", itemStyle: { color: PARTS[title] }, data: values[place] })),
  }));
}

function horizontal(chart) {
  const names = chart.data.name.map((layer) => String(layer === null ? "no layer" : layer));
  const values = normalised(chart), holder = card(chart, `percent of the ${chart.unit} of each bar`);
  holder.style.height = Math.max(110, 70 + 24 * Math.min(24, names.length)) + "px";
  plot(holder, () => ({
    grid: { ...labelMargin(names), right: 24, top: 34, bottom: 24 }, legend: LEGEND,
    xAxis: { type: "value", max: 100, axisLabel: { formatter: "{value} %" } },
    yAxis: { type: "category", inverse: true, data: names, axisLabel: { formatter: labelOf } },
    tooltip: { trigger: "axis", axisPointer: { type: "shadow" }, confine: true, formatter: (items) => parts(chart, names[items[0].dataIndex], items[0].dataIndex) },
    series: chart.series.map(({ name }, place) => ({ type: "bar", name, stack: "all", barMaxWidth: 22, itemStyle: { color: PARTS[name] }, data: values[place] })),
  }));
}

// --- one line of segments that follow each other in time --------------------------------------------------------------

function segment(params, api) {
  const [left, top] = api.coord([api.value(0), 0]), [right] = api.coord([api.value(1), 0]), frame = params.coordSys;
  const shape = echarts.graphic.clipRectByRect(
    { x: left, y: top - 22, width: Math.max(right - left, 0.5), height: 44 }, { x: frame.x, y: frame.y, width: frame.width, height: frame.height });
  return shape && { type: "rect", shape, style: { fill: api.visual("color") } };
}

function strip(chart) {
  const { start, value, name, category, layer } = chart.data, kinds = largestGroups(category, value), groups = [...kinds, ...new Set(category.filter((element) => !kinds.includes(element)))];
  const about = (place) => tip([`<b>${plain(name[place])}</b> ${plain(category[place])}`, `${number(value[place])} ms, from ${number(start[place])} ms on`, layer[place] === null ? null : `in ${plain(layer[place])}`]);
  const holder = card(chart, `${number(start.length)} segments that follow each other; their durations add up to the step`);
  holder.style.height = "190px";
  holder.parentNode.classList.add("wide");
  plot(holder, () => ({
    grid: { left: 20, right: 20, top: 36, bottom: 66 }, legend: LEGEND, dataZoom: [{ type: "inside", filterMode: "weakFilter", zoomOnMouseWheel: "ctrl" }, { ...sliders[1], filterMode: "weakFilter" }],
    xAxis: { type: "value", max: "dataMax", name: "ms", nameLocation: "middle", nameGap: 20 }, yAxis: { type: "category", data: [""], show: false },
    tooltip: { confine: true, formatter: (item) => about(item.value[2]) },
    series: groups.map((group, number) => ({
      type: "custom", name: String(group), renderItem: segment, encode: { x: [0, 1] }, itemStyle: { color: number < palette.length ? palette[number] : OTHER_COLOUR },
      data: category.flatMap((element, place) => (element === group ? [[start[place], start[place] + value[place], place]] : [])),
    })),
  }));
}

// --- lines over layers or steps -----------------------------------------------------------------------------------------

function lines(chart) {
  const { at, name } = chart.data;
  plot(card(chart, chart.unit), () => ({
    ...layerAxes(at),
    tooltip: { trigger: "axis", confine: true, formatter: (items) => tip([`<b>${plain(name ? name[items[0].dataIndex] : at[items[0].dataIndex])}</b>`, ...items.map((item) => `${plain(item.seriesName)} ${number(item.value)} ${chart.unit}`)]) },
    series: chart.series.map(({ name: title, values }) => ({ type: "line", name: title, step: "middle", showSymbol: at.length < 30, data: values })),
  }));
}

// --- sampled figures over the time of the run -----------------------------------------------------------------------------

function readings(chart) {
  const { at, value, highest, step, device, rank } = chart.data;
  const labelled = [["device", device], ["rank", rank]].filter(([, column]) => new Set(column).size > 1);
  const name = chart.data.name.map((text, place) => text + labelled.map(([word, column]) => `, ${word} ${column[place]}`).join("")), names = [...new Set(name)];
  const about = (items) => tip([`<b>${number(items[0].value[0])} s</b>`, ...items.map(({ seriesName, value: [, mean, place] }) =>
    `${plain(seriesName)} ${number(mean)} ${chart.unit}${highest[place] > mean ? `, at most ${number(highest[place])}` : ""}${step[place] === null ? "" : `, step ${step[place]}`}`)]);
  plot(card(chart, `${chart.unit} over the time of the run`), () => ({
    grid: { left: 62, right: 24, top: 34, bottom: 44 }, legend: LEGEND,
    xAxis: { type: "value", name: "s", nameLocation: "middle", nameGap: 22, max: "dataMax" }, yAxis: { type: "value" },
    tooltip: { trigger: "axis", confine: true, formatter: about },
    series: names.map((title) => ({ type: "line", name: title, showSymbol: false, data: name.flatMap((text, place) => (text === title ? [[at[place], value[place], place]] : [])) })),
  }));
}

// --- rooflines: operations per second over operations per byte, both logarithmic ----------------------------------------

// The line of a roof: the slope of the memory bandwidth up to the peak, then horizontal.
function roof(peak, bytesPerSecond, [left, right]) {
  const slope = bytesPerSecond / 1e9, ridge = peak / slope;
  return [[left, Math.min(peak, left * slope)], ...(ridge > left && ridge < right ? [[ridge, peak]] : []), [right, Math.min(peak, right * slope)]];
}

function roofSeries(roofs, range) {
  if (!roofs) return [];
  return roofs.peaks.map(({ name, gflop_per_s: peak }, place) => ({
    type: "line", name: `roof, ${name}`, data: roof(peak, roofs.bytes_per_s, range), symbol: "none", silent: true, z: 1,
    lineStyle: { color: OTHER_COLOUR, width: place ? 1 : 2, type: place ? "dashed" : "solid" },
    endLabel: { show: true, formatter: `${name} ${number(peak / 1000)} TFLOP/s`, color: OTHER_COLOUR, fontSize: 11, align: "right", verticalAlign: "bottom", offset: [-6, -3] },
  }));
}

function roofline(chart) {
  const { name, value, intensity, bound } = chart.data;
  const points = name.map((_, place) => place).filter((place) => value[place] > 0 && intensity[place] > 0);
  const xs = points.map((place) => intensity[place]), ridge = chart.roofs && chart.roofs.peaks.length ? (chart.roofs.peaks[0].gflop_per_s * 1e9) / chart.roofs.bytes_per_s : 1;
  const range = [floorToPowerOf10(xs.concat(ridge)), ceilToPowerOf10(xs.concat(ridge * 10))];
  const about = chart.roofs ? `GFLOP/s over FLOP per byte; the roof of ${chart.roofs.device}: ${number(chart.roofs.bytes_per_s / 1e9)} GB/s` : `GFLOP/s over FLOP per byte; ${chart.roofless}`;
  const kinds = [["memory-bound", true, palette[1]], ["compute-bound", false, palette[0]], ["unknown", null, OTHER_COLOUR]];
  const describe = (place) => tip([`<b>${plain(name[place])}</b>`, `${number(value[place])} GFLOP/s`, `${number(intensity[place])} FLOP/byte`, bound[place] === null ? null : bound[place] ? "memory-bound" : "compute-bound"]);
  const holder = card(chart, about);
  holder.style.height = "340px";
  plot(holder, () => ({
    grid: { left: 62, right: 24, top: 34, bottom: 44 }, legend: { ...LEGEND, icon: "circle", data: kinds.map(([kind]) => kind) },
    xAxis: { type: "log", min: range[0], max: range[1], name: "FLOP / byte", nameLocation: "middle", nameGap: 24 },
    yAxis: { type: "log", name: "GFLOP/s", min: floorToPowerOf10([...points.map((place) => value[place]), ...(chart.roofs ? chart.roofs.peaks.map((peak) => peak.gflop_per_s) : [])]) },
    tooltip: { confine: true, formatter: (item) => describe(item.value[2]), extraCssText: "max-width: 420px; white-space: normal; overflow-wrap: anywhere" },
    series: [
      ...roofSeries(chart.roofs, range),
      ...kinds.map(([kind, isMemoryBound, color]) => ({ type: "scatter", name: kind, symbolSize: 7, itemStyle: { color, opacity: 0.75 }, z: 3, data: points.filter((place) => bound[place] === isMemoryBound).map((place) => [intensity[place], value[place], place]) })),
    ],
  }));
}

// The powers of ten below and above some numbers.
function floorToPowerOf10(values) { return Math.pow(10, Math.floor(Math.log10(Math.min(1e9, ...values)))); }
function ceilToPowerOf10(values) { return Math.pow(10, Math.ceil(Math.log10(Math.max(1e-9, ...values)))); }

const DRAWINGS = { layers, shares, stack, horizontal, strip, lines, readings, roofline };

// A section without a chart is hidden, and so is the link to it.
function drawCharts() {
  for (const grid of document.querySelectorAll("main .grid")) grid.replaceChildren();
  for (const chart of data.charts) if (chart.missing === undefined) DRAWINGS[chart.kind](chart);
  for (const section of document.querySelectorAll("main section:has(.grid)")) {
    section.hidden = !section.querySelector(".card");
    document.querySelector(`nav a[href="#${section.id}"]`).hidden = section.hidden;
  }
}

// One line with the number of charts and tables for which the trace lacks data; opened, it shows each reason once.
function drawMissing() {
  const charts = data.charts.filter((chart) => chart.missing !== undefined), reasons = new Set(charts.map((chart) => chart.missing));
  for (const [id, reason] of data.refused) reasons.add(reason.startsWith(id) ? reason : `${id}: ${reason}`);
  const parts = [charts.length ? counted(charts.length, "chart") : null, data.refused.length ? counted(data.refused.length, "table") : null].filter((part) => part);
  byId("missing").replaceChildren(...folded(`Not on this page, because the trace lacks the data: ${parts.join(" and ")}`, [...reasons].map((reason) => make("p", reason, "quiet"))));
}
