"use strict";
// The overhead ledger: what each rung of profiling adds to the true time of a step.

function whisker(params, api) {
  const [row, low, high] = [0, 1, 2].map((at) => api.value(at));
  const left = api.coord([low, row]), right = api.coord([high, row]), stroke = shade("--text");
  const line = (x1, y1, x2, y2) => ({ type: "line", shape: { x1, y1, x2, y2 }, style: { stroke, lineWidth: 1.5 } });
  return { type: "group", children: [line(left[0], left[1], right[0], right[1]), ...[left, right].map(([x, y]) => line(x, y - 6, x, y + 6))] };
}

function ledgerSum(first, rungs, last) {
  const sum = rungs.reduce((total, row) => total + row.added_ms, first.step_ms);
  const added = rungs.map((row) => `${signed(row.added_ms)} ms (${row.records})`).join(" ");
  const below = rungs.some((row) => row.added_ms < 0) ? " Negative values are not stacked." : "";
  return `${number(first.step_ms)} ms true ${added} = ${number(sum)} ms; with all levels recorded, ${number(last.step_ms)} ms were measured.${below}`;
}

function ledgerTip(row) {
  const interval = row.low_ms === null || row.low_ms === undefined ? "no interval" : `95 % interval ${number(row.low_ms)} … ${number(row.high_ms)} ms`;
  return tip([`<b>${plain(row.records)}</b> add ${number(row.added_ms)} ms`, interval]);
}

// Above: the parts of the measured step; below: what each rung adds.
function ledgerAxes(names) {
  const value = (gridIndex) => ({ type: "value", gridIndex, axisLabel: { formatter: "{value} ms" } });
  return {
    legend: { ...LEGEND, type: "plain", data: ["true", ...names] },
    grid: [{ left: 110, right: 30, top: 42, height: 40 }, { left: 110, right: 30, top: 132, bottom: 24 }],
    title: { text: "what each level set adds, with its 95 % interval", left: 110, top: 108, textStyle: { fontSize: 12, fontWeight: "normal" } },
    xAxis: [value(0), value(1)],
    yAxis: [{ type: "category", gridIndex: 0, data: ["true + added"] }, { type: "category", gridIndex: 1, inverse: true, data: names, axisLine: { onZero: false } }],
  };
}

function ledgerSeries(first, rungs, names, measured) {
  const below = { xAxisIndex: 1, yAxisIndex: 1 }, colour = (place) => ({ color: palette[place + 1] });
  const mark = { symbol: "none", silent: true, data: [{ xAxis: measured }], label: { formatter: "measured", fontSize: 11 }, lineStyle: { color: "#7d8794", type: "dashed", width: 1.5 } };
  const intervals = rungs.flatMap((row, place) => (row.low_ms === null || row.low_ms === undefined ? [] : [[place, row.low_ms, row.high_ms]]));
  return [
    { type: "bar", stack: "all", name: "true", data: [first.step_ms], itemStyle: { color: palette[0] }, markLine: mark },
    ...rungs.map((row, place) => ({ type: "bar", stack: "all", name: names[place], data: [Math.max(0, row.added_ms)], itemStyle: colour(place) })),
    { type: "bar", ...below, barMaxWidth: 16, data: rungs.map((row, place) => ({ value: row.added_ms, itemStyle: colour(place) })) },
    { type: "custom", ...below, renderItem: whisker, encode: { x: [1, 2], y: 0 }, z: 5, data: intervals },
  ];
}

function drawLedger() {
  const rows = data.ledger, place = byId("ledger-card"), holder = make("div", null, "chart");
  byId("rungs").textContent = data.rungs;
  place.replaceChildren(holder);
  place.hidden = rows.length < 2;
  if (rows.length < 2) {
    byId("ledger-sum").textContent = "One level set alone does not show what recording adds: record with --levels M/L/G.";
    return;
  }
  holder.setAttribute("role", "img");
  holder.setAttribute("aria-label", "true time of a step, and what each level set adds to it; the table below has the figures");
  const rungs = rows.slice(1).filter((row) => row.added_ms !== null), names = rungs.map((row) => `${row.records} add`);
  const [first, last] = [rows[0], rows[rows.length - 1]];
  byId("ledger-sum").textContent = ledgerSum(first, rungs, last);
  holder.style.height = 184 + 34 * rungs.length + "px";
  const rowOf = (item) => rungs[item.seriesIndex <= rungs.length ? item.seriesIndex - 1 : item.dataIndex];
  plot(holder, () => ({
    ...ledgerAxes(names),
    tooltip: { confine: true, formatter: (item) => (item.seriesName === "true" ? `true: ${number(first.step_ms)} ms` : ledgerTip(rowOf(item))) },
    series: ledgerSeries(first, rungs, names, last.step_ms),
  }));
}
