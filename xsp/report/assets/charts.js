"use strict";
// Charts: one function for each way of drawing that xsp/report/charts.py names. What a chart shows has the columns of
// an analysis under the names of their roles.
const scheme = matchMedia("(prefers-color-scheme: dark)");
const palette = ["#4c78d8", "#e0823d", "#3fa66a", "#c9506b", "#8a63c9", "#2ba5b5", "#a08a2c", "#7d8794"];
const OTHER = "#9aa3b2", MOST_BARS = 12, MOST_GROUPS = 6, LETTERS = 30;
const plots = [];

function plot(holder, option) {
  const start = () => {
    const chart = echarts.init(holder, scheme.matches ? "dark" : null);
    chart.setOption({ animation: false, backgroundColor: "transparent", color: palette, textStyle: { fontFamily: "system-ui, sans-serif" }, ...option() });
    return chart;
  };
  const each = { chart: start(), again: () => { each.chart.dispose(); each.chart = start(); } };
  plots.push(each);
}

addEventListener("resize", () => plots.forEach((each) => each.chart.resize()));
scheme.addEventListener("change", () => { plots.forEach((each) => each.again()); timeline.redraw(); });

function card(chart, about) {
  const element = make("div", null, "card"), holder = make("div", null, "chart");
  holder.setAttribute("role", "img");
  holder.setAttribute("aria-label", `${chart.title}, ${about}; the table ${chart.id} has the figures`);
  element.append(make("h3", chart.title), make("p", about, "quiet"), holder);
  if (chart.left_out) element.append(make("p", `${number(chart.left_out)} rows are not drawn; the table says how to see them.`, "quiet"));
  document.querySelector(`#${chart.section} .grid`).append(element);
  return holder;
}

const LEGEND = { top: 0, type: "scroll", itemWidth: 12, itemHeight: 12, icon: "rect" };
const sliders = [{ type: "inside", zoomOnMouseWheel: "ctrl" }, { type: "slider", height: 16, bottom: 6, brushSelect: false, showDataShadow: false }];

// Axes of charts with a bar per layer, in execution order.
function inOrder(places) {
  return {
    grid: { left: 52, right: 12, top: 34, bottom: 56 }, legend: LEGEND, dataZoom: sliders,
    xAxis: { type: "category", data: places, name: "layer", nameLocation: "middle", nameGap: 22 }, yAxis: { type: "value" },
  };
}

// What a label says of a name: of a kernel without its result, its namespaces and its arguments.
function labelOf(name) {
  const short = name.replace(/^void /, "").replace(/(\w+::)+(\(anonymous namespace\)::)?/g, "").replace(/\(.*$/, "");
  return shortened(name.length <= LETTERS || !short ? name : short, LETTERS);
}

function beside(names) { return { left: 18 + 6.3 * Math.max(4, ...names.map((name) => labelOf(name).length)) }; }

function tip(lines) { return lines.filter((line) => line !== null).join("<br>"); }

// --- a bar for each layer, coloured by its type ---------------------------------------------------------------------

function dearest(names, values) {
  const sums = new Map();
  names.forEach((name, place) => sums.set(name, (sums.get(name) || 0) + (values[place] || 0)));
  return [...sums].sort((a, b) => b[1] - a[1]).slice(0, MOST_GROUPS).map(([name]) => name);
}

function layers(chart) {
  const { at, name, value, whole, low, high } = chart.data, group = chart.data.group || name.map(() => "layer");
  const groups = dearest(group, value), rest = group.some((each) => !groups.includes(each));
  const bars = (title, color, wanted) => ({
    type: "bar", name: title, barGap: "-100%", barCategoryGap: "8%", itemStyle: { color }, large: at.length > 3000,
    data: group.flatMap((each, place) => (wanted(each) ? [[place, value[place]]] : [])),
  });
  const about = (place) => tip([
    `<b>${plain(name[place])}</b> ${plain(group[place])}`, `${number(value[place])} ${chart.unit}`,
    whole ? `${number(whole[place])} ${chart.unit} with the layers inside` : null,
    low && low[place] !== null ? `95 % interval ${number(low[place])} … ${number(high[place])}` : null,
  ]);
  plot(card(chart, `in execution order, without the layers inside, ${chart.unit}`), () => ({
    ...inOrder(at),
    tooltip: { trigger: "axis", axisPointer: { type: "shadow" }, confine: true, formatter: (items) => (items.length ? about(items[0].value[0]) : "") },
    series: [
      ...groups.map((each, number) => bars(each === null ? "no type" : String(each), palette[number], (one) => one === each)),
      ...(rest ? [bars("other types", OTHER, (one) => !groups.includes(one))] : []),
    ],
  }));
}

// --- bars by name, the longest first --------------------------------------------------------------------------------

function shares(chart) {
  const { name, value, about } = chart.data;
  const rows = name.map((each, place) => [String(each === null ? "none" : each), value[place], about ? about[place] : null]);
  const found = rows.filter(([, each]) => each !== null).sort((a, b) => b[1] - a[1]);
  const whole = found.reduce((sum, [, each]) => sum + each, 0), rest = found.slice(MOST_BARS);
  const last = rest.length ? [[`${rest.length} others`, rest.reduce((sum, [, each]) => sum + each, 0), null]] : [];
  const shown = [...found.slice(0, MOST_BARS), ...last].reverse();
  const holder = card(chart, chart.unit);
  holder.style.height = Math.max(120, 34 + 22 * shown.length) + "px";
  plot(holder, () => ({
    grid: { ...beside(shown.map(([each]) => each)), right: 110, top: 4, bottom: 24 },
    xAxis: { type: "value", splitNumber: 4 },
    yAxis: { type: "category", data: shown.map(([each]) => each), axisLabel: { interval: 0, formatter: labelOf } },
    tooltip: { confine: true, formatter: ({ dataIndex }) => tip([`<b>${plain(shown[dataIndex][0])}</b>`, `${number(shown[dataIndex][1])} ${chart.unit} (${share(shown[dataIndex][1], whole)})`, shown[dataIndex][2] === null ? null : plain(shown[dataIndex][2])]), extraCssText: "max-width: 420px; white-space: normal; overflow-wrap: anywhere" },
    series: [{ type: "bar", barMaxWidth: 22, data: shown.map(([, each]) => each), itemStyle: { color: palette[0] }, label: { show: true, position: "right", formatter: (item) => `${number(item.value)} (${share(item.value, whole)})` } }],
  }));
}

// --- parts of a whole: for each layer upright, for each device or step lying --------------------------------------------

function parts(chart, about, place) {
  const whole = chart.series.reduce((sum, { values }) => sum + Math.max(0, values[place] || 0), 0);
  const lines = chart.series.map(({ name, values }) => `${plain(name)} ${number(values[place])} ${plain(chart.unit)} (${share(values[place] || 0, whole)})`);
  return tip([`<b>${plain(about)}</b>`, ...lines]);
}

// Values below zero (kernels that outlast their layer) are in the tooltip and the table, and not stacked.
function normalised(chart) {
  const wholes = chart.data.name.map((_, place) => chart.series.reduce((sum, { values }) => sum + Math.max(0, values[place] || 0), 0));
  return chart.series.map(({ values }) => values.map((value, place) => (wholes[place] ? (100 * Math.max(0, value || 0)) / wholes[place] : 0)));
}

function stack(chart) {
  const { at, name } = chart.data, values = normalised(chart);
  plot(card(chart, "per layer in execution order, % of the layer"), () => ({
    ...inOrder(at), yAxis: { type: "value", max: 100, axisLabel: { formatter: "{value} %" } },
    tooltip: { trigger: "axis", axisPointer: { type: "shadow" }, confine: true, formatter: (items) => parts(chart, name[items[0].dataIndex], items[0].dataIndex) },
    series: chart.series.map(({ name: title }, number) => ({ type: "bar", name: title, stack: "all", barCategoryGap: "8%", data: values[number] })),
  }));
}

function lying(chart) {
  const names = chart.data.name;
  const values = normalised(chart), holder = card(chart, `${chart.unit}, as shares`);
  holder.style.height = Math.max(110, 70 + 24 * Math.min(24, names.length)) + "px";
  plot(holder, () => ({
    grid: { ...beside(names), right: 24, top: 34, bottom: 24 }, legend: LEGEND,
    xAxis: { type: "value", max: 100, axisLabel: { formatter: "{value} %" } },
    yAxis: { type: "category", inverse: true, data: names, axisLabel: { formatter: labelOf } },
    tooltip: { trigger: "axis", axisPointer: { type: "shadow" }, confine: true, formatter: (items) => parts(chart, names[items[0].dataIndex], items[0].dataIndex) },
    series: chart.series.map(({ name }, number) => ({ type: "bar", name, stack: "all", barMaxWidth: 22, data: values[number] })),
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
  const { start, value, name, what, layer } = chart.data, kinds = dearest(what, value), groups = [...kinds, ...new Set(what.filter((each) => !kinds.includes(each)))];
  const about = (place) => tip([`<b>${plain(name[place])}</b> ${plain(what[place])}`, `${number(value[place])} ms, from ${number(start[place])} ms on`, layer[place] === null ? null : `in ${plain(layer[place])}`]);
  const holder = card(chart, `${number(start.length)} segments that follow each other; their durations add up to the step`);
  holder.style.height = "190px";
  holder.parentNode.classList.add("wide");
  plot(holder, () => ({
    grid: { left: 20, right: 20, top: 36, bottom: 66 }, legend: LEGEND, dataZoom: [{ type: "inside", filterMode: "weakFilter", zoomOnMouseWheel: "ctrl" }, { ...sliders[1], filterMode: "weakFilter" }],
    xAxis: { type: "value", max: "dataMax", name: "ms", nameLocation: "middle", nameGap: 20 }, yAxis: { type: "category", data: [""], show: false },
    tooltip: { confine: true, formatter: (item) => about(item.value[2]) },
    series: groups.map((group, number) => ({
      type: "custom", name: String(group), renderItem: segment, encode: { x: [0, 1] }, itemStyle: { color: number < palette.length ? palette[number] : OTHER },
      data: what.flatMap((each, place) => (each === group ? [[start[place], start[place] + value[place], place]] : [])),
    })),
  }));
}

const DRAWINGS = { layers, shares, stack, lying, strip };

function drawCharts() {
  const told = new Map();
  for (const chart of data.charts) {
    if (chart.missing === undefined) DRAWINGS[chart.kind](chart);
    else told.set(`${chart.section} ${chart.missing}`, chart);
  }
  for (const chart of told.values()) document.getElementById(chart.section).append(make("p", chart.missing, "quiet"));
  for (const section of ["time", "rooflines", "memory", "ranks"]) {
    if (document.getElementById(section).children.length === 2 && !document.querySelector(`#${section} .card`)) document.getElementById(section).remove();
  }
}
