"use strict";
// Sections that others wrote into the run directory (xsp/sections.py): text, tables, charts and trees, drawn as they say.

function drawSections() {
  const before = document.querySelector('nav a[href="#tables"]');
  for (const found of whole.sections) {
    const section = make("section"), link = make("a", found.title.toLowerCase());
    section.id = "section-" + found.name;
    link.href = "#" + section.id;
    before.before(link);
    section.append(make("h2", found.title), ...found.parts.map(partOf));
    byId("others").append(section);
  }
  if (whole.damaged.length) byId("others").append(...folded(`${counted(whole.damaged.length, "section")} of the run directory cannot be shown`, whole.damaged.map((line) => make("p", line, "warning"))));
}

function partOf(part) {
  if (part.text !== undefined) return make("p", part.text);
  if (part.table) return sectionTable(part.table);
  return part.chart ? sectionChart(part.chart) : sectionTree(part.tree);
}

function titled(title, className) {
  const element = make("div", null, className);
  if (title) element.append(make("h3", title));
  return element;
}

function sectionTable(table) {
  const element = titled(table.title, "card"), bar = make("div", null, "bar"), grid = new Grid({ id: "", ...table });
  bar.append(grid.search, grid.count);
  element.append(bar, grid.element(table.title || "table"));
  return element;
}

// --- charts -----------------------------------------------------------------------------------------------------------

const MOST_SPOKEN = 24;

function sectionChart(chart) {
  const element = titled(chart.title, "card"), holder = make("div", null, "chart"), upright = ["lines", "points"].includes(chart.kind);
  const missing = chart.series.length ? chart.at.filter((_, place) => chart.series.every((series) => series.values[place] === null)).length : 0;
  const about = [chart.unit, chart.over ? `over ${chart.over}` : null, chart.log.length ? "logarithmic" : null, missing ? `${number(missing)} of ${number(chart.at.length)} without a figure` : null].filter((each) => each).join(", ");
  holder.setAttribute("role", "img");
  holder.setAttribute("aria-label", `${chart.title}, ${about}. ${spoken(chart)}`);
  if (!upright) holder.style.height = Math.max(130, 90 + Math.max(24, chart.kind === "bars" ? 16 * chart.series.length : 0) * Math.min(40, chart.at.length)) + "px";
  element.append(make("p", about, "quiet"), holder);
  if (chart.kind === "grid") holder.style.height = Math.max(240, 110 + 14 * chart.series.length) + "px";
  plot(holder, () => (upright ? overNumbers(chart) : chart.kind === "grid" ? squares(chart) : lyingBars(chart)));
  return element;
}

// What a chart shows, in words: all figures of a small one, how many there are and their ends of a large one.
function spoken(chart) {
  const say = (value) => `${number(value)} ${chart.unit}`, at = (place) => chart.labels[place] ?? number(chart.at[place]);
  if (chart.kind === "grid") return `${counted(chart.series.length, "row")}, ${counted(chart.at.length, "column")}`;
  return chart.series.map((series) => {
    if (chart.at.length * chart.series.length <= MOST_SPOKEN) return `${series.name}: ` + series.values.map((value, place) => `${at(place)} ${value === null ? "–" : say(value)}`).join(", ");
    const known = series.values.filter((value) => value !== null), [low, high] = known.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
    return `${series.name}: ` + (known.length ? `${counted(known.length, "figure")} from ${say(low)} to ${say(high)}` : "no figure");
  }).join("; ");
}

function figure(chart, series, place) {
  const interval = series.low.length && series.low[place] !== null && series.high[place] !== null ? ` (${number(series.low[place])} … ${number(series.high[place])})` : "";
  return `${plain(series.name)} ${number(series.values[place])} ${plain(chart.unit)}${interval}`;
}

function axis(chart, which, name) {
  const logarithmic = chart.log.includes(which);
  return { type: logarithmic ? "log" : "value", scale: which === "at", name, nameLocation: "middle", nameGap: which === "at" ? 24 : 44, axisLabel: { formatter: compact } };
}

// A logarithm has no place for nought.
function drawn(chart, which, value) { return value === null || (chart.log.includes(which) && value <= 0) ? null : value; }

function lyingBars(chart) {
  const names = chart.at.map((each) => (each === null ? "–" : String(each)));
  return {
    grid: { ...beside(names), right: 24, top: 34, bottom: 44 }, legend: { ...LEGEND, show: chart.series.length > 1 },
    xAxis: { ...axis(chart, "values", chart.unit), nameGap: 24 }, yAxis: { type: "category", inverse: true, data: names, axisLabel: { formatter: labelOf } },
    tooltip: { trigger: "axis", axisPointer: { type: "shadow" }, confine: true, formatter: (items) => tip([`<b>${plain(names[items[0].dataIndex])}</b>`, ...chart.series.map((series) => figure(chart, series, items[0].dataIndex))]) },
    series: [
      ...chart.series.map((series) => ({ type: "bar", name: series.name, stack: chart.kind === "stacked" ? "all" : undefined, barMaxWidth: 22, data: series.values.map((each) => drawn(chart, "values", each)) })),
      ...(chart.kind === "bars" && chart.series.length === 1 ? chart.series.filter((series) => series.low.length).map((series) => whiskers(series, true)) : []),
    ],
  };
}

// A square for each value, the darker the more; names of rows and columns where there is room for them.
function squares(chart) {
  const names = chart.at.map((each) => String(each)), rows = chart.series.map((series) => series.name), shown = names.length <= 60;
  const values = chart.series.flatMap((series, y) => series.values.flatMap((value, x) => (value === null ? [] : [[x, y, value]])));
  const ends = values.reduce(([low, high], [, , value]) => [Math.min(low, value), Math.max(high, value)], [0, 1e-9]);
  const label = { show: shown, interval: 0, formatter: labelOf };
  return {
    grid: { ...(shown ? beside(rows) : { left: 24 }), right: 24, top: 12, bottom: shown ? 110 : 60 },
    xAxis: { type: "category", data: names, axisLabel: { ...label, rotate: 60 }, axisTick: { show: false } },
    yAxis: { type: "category", data: rows, inverse: true, axisLabel: label, axisTick: { show: false } },
    visualMap: { min: ends[0], max: ends[1], orient: "horizontal", left: "center", bottom: 0, itemHeight: 120, calculable: true, inRange: { color: scheme.matches ? ["#1c2430", "#4c78d8", "#d6e4ff"] : ["#f4f6fa", "#4c78d8", "#14264d"] } },
    tooltip: { confine: true, formatter: ({ value: [x, y, value] }) => tip([`<b>${plain(rows[y])}</b>`, `<b>${plain(names[x])}</b>`, `${number(value)} ${plain(chart.unit)}`]) },
    series: [{ type: "heatmap", data: values, progressive: 0, emphasis: { itemStyle: { borderColor: OTHER, borderWidth: 1 } } }],
  };
}

// A thin line from the lower to the upper end of each interval.
function whiskers(series, lying, at) {
  return {
    type: "custom", name: series.name, silent: true, z: 4,
    data: series.low.flatMap((low, place) => (low === null || series.high[place] === null ? [] : [[at ? at[place] : place, low, series.high[place]]])),
    encode: lying ? { x: [1, 2], y: 0 } : { x: 0, y: [1, 2] },
    renderItem: (params, api) => {
      const ends = [1, 2].map((each) => api.coord(lying ? [api.value(each), api.value(0)] : [api.value(0), api.value(each)]));
      return { type: "line", shape: { x1: ends[0][0], y1: ends[0][1], x2: ends[1][0], y2: ends[1][1] }, style: { stroke: OTHER, lineWidth: 2 } };
    },
  };
}

function overNumbers(chart) {
  const told = ({ seriesIndex, dataIndex, value }) => {
    const place = value[2] ?? dataIndex, label = chart.labels.length ? chart.labels[place] : `${chart.over} ${number(chart.at[place])}`;
    return tip([`<b>${plain(label)}</b>`, chart.labels.length ? plain(`${chart.over} ${number(chart.at[place])}`) : null, figure(chart, chart.series[seriesIndex], place)]);
  };
  return {
    grid: { left: 62, right: 24, top: 34, bottom: 44 }, legend: { ...LEGEND, show: chart.series.length > 1 },
    xAxis: axis(chart, "at", chart.over), yAxis: axis(chart, "values", chart.unit), tooltip: { confine: true, formatter: told },
    series: [
      ...chart.series.map((series) => ({
        type: chart.kind === "lines" ? "line" : "scatter", name: series.name, symbolSize: 7, itemStyle: { opacity: 0.8 },
        data: chart.at.flatMap((each, place) => { const [x, y] = [drawn(chart, "at", each), drawn(chart, "values", series.values[place])]; return x === null || y === null ? [] : [[x, y, place]]; }),
      })),
      ...chart.series.filter((series) => series.low.length).map((series) => whiskers(series, false, chart.at)),
    ],
  };
}

// --- trees --------------------------------------------------------------------------------------------------------------

function sectionTree(tree) {
  const element = titled(tree.title, "card"), columns = tree.columns.map((column) => heading(column).filter((each) => each).join(" ")).join(" · ");
  element.append(make("p", [columns, tree.mark ? `a red line: ${tree.mark}` : null].filter((each) => each).join("; "), "quiet"));
  element.append(...tree.branches.map((branch) => branchOf(branch, tree.branches.length === 1, tree.mark)));
  return element;
}

// What is inside a branch is made when it is opened: thousands of rows cost nothing until somebody looks.
function branchOf(branch, open, mark) {
  const label = [make("span", branch.name), make("span", branch.cells.map(number).join(" · "), "cells")];
  if (!branch.inside.length) {
    const leaf = make("div", null, branch.marked ? "branch leaf marked" : "branch leaf");
    if (branch.marked) leaf.title = mark;
    leaf.append(...label);
    return leaf;
  }
  const details = make("details", null, "branch"), summary = make("summary", null, branch.marked ? "marked" : "");
  if (branch.marked) summary.title = mark;
  summary.append(...label);
  details.append(summary);
  details.addEventListener("toggle", () => { if (details.open && details.children.length === 1) details.append(...branch.inside.map((each) => branchOf(each, false, mark))); });
  details.open = open;
  return details;
}
