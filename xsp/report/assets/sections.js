"use strict";
// Sections that other commands wrote into the run directory (xsp/sections.py): text, tables, charts and trees.

function drawSections() {
  const tablesLink = document.querySelector('nav a[href="#tables"]');
  for (const content of pageData.sections) {
    const section = make("section"), link = make("a", content.title.toLowerCase());
    section.id = "section-" + content.name;
    link.href = "#" + section.id;
    tablesLink.before(link);
    section.append(make("h2", content.title), ...content.parts.map(partOf));
    byId("others").append(section);
  }
  if (pageData.damaged.length) byId("others").append(...folded(`${counted(pageData.damaged.length, "section")} of the run directory cannot be shown`, pageData.damaged.map((line) => make("p", line, "warning"))));
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

const MOST_DESCRIBED = 24;

function sectionChart(chart) {
  const element = titled(chart.title, "card"), holder = make("div", null, "chart"), isUpright = ["lines", "points"].includes(chart.kind);
  const missing = chart.series.length ? chart.at.filter((_, place) => isMissing(chart, place)).length : 0;
  const about = [chart.unit, chart.over ? `over ${chart.over}` : null, chart.log.length ? "logarithmic" : null, missing ? `${number(missing)} of ${number(chart.at.length)} without a figure` : null].filter((part) => part).join(", ");
  holder.setAttribute("role", "img");
  holder.setAttribute("aria-label", `${chart.title}, ${about}. ${description(chart)}`);
  if (!isUpright) holder.style.height = Math.max(130, 90 + Math.max(24, chart.kind === "bars" ? 16 * chart.series.length : 0) * Math.min(40, chart.at.length)) + "px";
  element.append(make("p", about, "quiet"), holder);
  if (chart.kind === "grid") holder.style.height = Math.max(240, 110 + 14 * chart.series.length) + "px";
  plot(holder, () => (isUpright ? overNumbers(chart) : chart.kind === "grid" ? squares(chart) : horizontalBars(chart)));
  return element;
}

// Whether no series has a figure at a position; if some have, the others were not meant to have one there.
function isMissing(chart, place) { return chart.series.every((series) => series.values[place] === null); }

// A chart in words: all figures of a small chart; for a large one the number of figures and their range.
function description(chart) {
  const withUnit = (value) => `${number(value)} ${chart.unit}`, labelAt = (place) => chart.labels[place] ?? number(chart.at[place]);
  if (chart.kind === "grid") return `${counted(chart.series.length, "row")}, ${counted(chart.at.length, "column")}`;
  return chart.series.map((series) => {
    if (chart.at.length * chart.series.length <= MOST_DESCRIBED) return `${series.name}: ` + series.values.map((value, place) => `${labelAt(place)} ${value === null ? "–" : withUnit(value)}`).join(", ");
    const present = series.values.filter((value) => value !== null), [low, high] = present.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
    return `${series.name}: ` + (present.length ? `${counted(present.length, "figure")} from ${withUnit(low)} to ${withUnit(high)}` : "no figure");
  }).join("; ");
}

function figure(chart, series, place) {
  const interval = series.low.length && series.low[place] !== null && series.high[place] !== null ? ` (${number(series.low[place])} … ${number(series.high[place])})` : "";
  return `${plain(series.name)} ${number(series.values[place])} ${plain(chart.unit)}${interval}`;
}

function axis(chart, dimension, name) {
  const logarithmic = chart.log.includes(dimension);
  return { type: logarithmic ? "log" : "value", scale: dimension === "at", name, nameLocation: "middle", nameGap: dimension === "at" ? 24 : 44, axisLabel: { formatter: compact } };
}

// A logarithmic axis cannot show zero or negative values.
function plottable(chart, dimension, value) { return value === null || (chart.log.includes(dimension) && value <= 0) ? null : value; }

function horizontalBars(chart) {
  const names = chart.at.map((value) => (value === null ? "–" : String(value)));
  return {
    grid: { ...labelMargin(names), right: 24, top: 34, bottom: 44 }, legend: { ...LEGEND, show: chart.series.length > 1 },
    xAxis: { ...axis(chart, "values", chart.unit), nameGap: 24 }, yAxis: { type: "category", inverse: true, data: names, axisLabel: { formatter: labelOf } },
    tooltip: { trigger: "axis", axisPointer: { type: "shadow" }, confine: true, formatter: (items) => tip([`<b>${plain(names[items[0].dataIndex])}</b>`, ...chart.series.map((series) => figure(chart, series, items[0].dataIndex))]) },
    series: [
      ...chart.series.map((series) => ({ type: "bar", name: series.name, stack: chart.kind === "stacked" ? "all" : undefined, barMaxWidth: 22, data: series.values.map((value) => plottable(chart, "values", value)) })),
      ...(chart.kind === "bars" && chart.series.length === 1 ? chart.series.filter((series) => series.low.length).map((series) => whiskers(series, true)) : []),
    ],
  };
}

// A square for each value, darker for larger values; rows and columns have names if there is room for them.
function squares(chart) {
  const names = chart.at.map((value) => String(value)), rows = chart.series.map((series) => series.name), hasLabels = names.length <= 60;
  const values = chart.series.flatMap((series, y) => series.values.flatMap((value, x) => (value === null ? [] : [[x, y, value]])));
  const range = values.reduce(([low, high], [, , value]) => [Math.min(low, value), Math.max(high, value)], [0, 1e-9]);
  const label = { show: hasLabels, interval: 0, formatter: labelOf };
  return {
    grid: { ...(hasLabels ? labelMargin(rows) : { left: 24 }), right: 24, top: 12, bottom: hasLabels ? 110 : 60 },
    xAxis: { type: "category", data: names, axisLabel: { ...label, rotate: 60 }, axisTick: { show: false } },
    yAxis: { type: "category", data: rows, inverse: true, axisLabel: label, axisTick: { show: false } },
    visualMap: { min: range[0], max: range[1], orient: "horizontal", left: "center", bottom: 0, itemHeight: 120, calculable: true, inRange: { color: scheme.matches ? ["#1c2430", "#4c78d8", "#d6e4ff"] : ["#f4f6fa", "#4c78d8", "#14264d"] } },
    tooltip: { confine: true, formatter: ({ value: [x, y, value] }) => tip([`<b>${plain(rows[y])}</b>`, `<b>${plain(names[x])}</b>`, `${number(value)} ${plain(chart.unit)}`]) },
    series: [{ type: "heatmap", data: values, progressive: 0, emphasis: { itemStyle: { borderColor: OTHER_COLOUR, borderWidth: 1 } } }],
  };
}

// A thin line for each interval, from its lower to its upper end.
function whiskers(series, isHorizontal, at) {
  return {
    type: "custom", name: series.name, silent: true, z: 4,
    data: series.low.flatMap((low, place) => (low === null || series.high[place] === null ? [] : [[at ? at[place] : place, low, series.high[place]]])),
    encode: isHorizontal ? { x: [1, 2], y: 0 } : { x: 0, y: [1, 2] },
    renderItem: (params, api) => {
      const corners = [1, 2].map((column) => api.coord(isHorizontal ? [api.value(column), api.value(0)] : [api.value(0), api.value(column)]));
      return { type: "line", shape: { x1: corners[0][0], y1: corners[0][1], x2: corners[1][0], y2: corners[1][1] }, style: { stroke: OTHER_COLOUR, lineWidth: 2 } };
    },
  };
}

function overNumbers(chart) {
  const describe = ({ seriesIndex, dataIndex, value }) => {
    const place = value[2] ?? dataIndex, label = chart.labels.length ? chart.labels[place] : `${chart.over} ${number(chart.at[place])}`;
    return tip([`<b>${plain(label)}</b>`, chart.labels.length ? plain(`${chart.over} ${number(chart.at[place])}`) : null, figure(chart, chart.series[seriesIndex], place)]);
  };
  return {
    grid: { left: 62, right: 24, top: 34, bottom: 44 }, legend: { ...LEGEND, show: chart.series.length > 1 },
    xAxis: axis(chart, "at", chart.over), yAxis: axis(chart, "values", chart.unit), tooltip: { confine: true, formatter: describe },
    series: [
      ...chart.series.map((series) => ({
        type: chart.kind === "lines" ? "line" : "scatter", name: series.name, symbolSize: 7, itemStyle: { opacity: 0.8 },
        data: chart.at.flatMap((position, place) => pointAt(chart, series, plottable(chart, "at", position), place)),
      })),
      ...chart.series.filter((series) => series.low.length).map((series) => whiskers(series, false, chart.at)),
    ],
  };
}

// The point of a series at a position, in a list. A position without a figure of any series, and a figure that the axis
// cannot show, interrupt the line; a position where only other series have a figure does not.
function pointAt(chart, series, x, place) {
  const value = series.values[place], y = plottable(chart, "values", value);
  if (x === null) return [];
  if (y !== null) return [[x, y, place]];
  return value !== null || isMissing(chart, place) ? [[x, null, place]] : [];
}

// --- trees --------------------------------------------------------------------------------------------------------------

function sectionTree(tree) {
  const element = titled(tree.title, "card"), columns = tree.columns.map((column) => heading(column).filter((word) => word).join(" ")).join(" · ");
  element.append(make("p", [columns, tree.mark ? `a red line: ${tree.mark}` : null].filter((word) => word).join("; "), "quiet"));
  element.append(...tree.branches.map((branch) => branchOf(branch, tree.branches.length === 1, tree.mark)));
  return element;
}

// The children of a branch are created when it is first opened, so thousands of rows cost nothing before.
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
  details.addEventListener("toggle", () => { if (details.open && details.children.length === 1) details.append(...branch.inside.map((child) => branchOf(child, false, mark))); });
  details.open = open;
  return details;
}
