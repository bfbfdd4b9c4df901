"use strict";
// The run over time: the duration of each step, recorded or not, and the parts of an iteration of the loop.

const PIECES = [["self_ms", "the step itself", "#4c78d8"], ["data_ms", "waiting for data", "#e0823d"], ["between_ms", "other time between steps", "#c3cad8"]];
const FAILED = "#d03050", LOG_RATIO = 30;

// The axis is logarithmic if the sizes differ so much that a linear one would show only the largest.
function axisOf(values) {
  const sizes = values.filter((value) => value > 0), smallest = sizes.reduce((a, b) => Math.min(a, b), Infinity), largest = sizes.reduce((a, b) => Math.max(a, b), 0);
  return { type: largest > LOG_RATIO * smallest ? "log" : "value" };
}

function runAxes(by, values, note) {
  return {
    grid: { left: 62, right: 20, top: 34, bottom: 62 }, legend: LEGEND,
    dataZoom: sliders.map((slider) => ({ ...slider, filterMode: "none" })),
    xAxis: { type: "value", min: by === "step" ? "dataMin" : 0, max: "dataMax", name: note, nameLocation: "middle", nameGap: 22, axisLabel: { ...(by === "step" ? { formatter: (value) => number(Math.round(value)) } : {}), hideOverlap: true } },
    yAxis: axisOf(values),
  };
}

function runWords(by) { return by === "step" ? "number of the step" : "seconds since the first step"; }

function stepTip(points, kinds, place) {
  const several = points.steps[place];
  return tip([
    `<b>step ${number(points.step[place])}${several > 1 ? ` and ${number(several - 1)} more, their mean` : ""}</b> ${plain(kinds[points.colour[place]])}`,
    `${number(points.ms[place])} ms, ${points.recorded[place] ? "recorded" : "not recorded"}`,
    points.data_ms[place] ? `${number(points.data_ms[place])} ms waiting for data` : null,
    points.between_ms[place] ? `${number(points.between_ms[place])} ms other time since the step before` : null,
    points.failed[place] === null ? null : `ended with ${plain(points.failed[place])}`,
    `${number(points.at_s[place])} s after the first step`,
  ]);
}

function drawSteps(by) {
  const { points, kinds } = pageData.loop, small = points.step.length > 1500 ? 4 : 6;
  const pointsWhere = (isDrawn) => points.step.flatMap((_, place) => (isDrawn(place) ? [[points[by][place], points.ms[place], place]] : []));
  const series = kinds.flatMap((name, kind) => {
    const color = kind < palette.length ? palette[kind] : OTHER_COLOUR, pointsOf = (recorded) => pointsWhere((place) => points.colour[place] === kind && points.recorded[place] === recorded && points.failed[place] === null);
    return [
      { type: "scatter", name, symbolSize: small, itemStyle: { color, opacity: 0.75 }, data: pointsOf(false) },
      { type: "scatter", name, symbol: "diamond", symbolSize: small + 5, z: 3, itemStyle: { color: "transparent", borderColor: color, borderWidth: 1.5 }, data: pointsOf(true) },
    ];
  });
  const failed = { type: "scatter", name: "failed", symbol: "triangle", symbolSize: 10, z: 4, itemStyle: { color: FAILED }, data: pointsWhere((place) => points.failed[place] !== null) };
  if (failed.data.length) series.push(failed);
  plot(byId("run-steps"), () => ({
    ...runAxes(by, points.ms, runWords(by)), legend: { ...LEGEND, icon: "circle" },
    tooltip: { confine: true, formatter: (item) => stepTip(points, kinds, item.value[2]), extraCssText: "max-width: 420px; white-space: normal; overflow-wrap: anywhere" },
    series,
  }), "run");
}

function drawParts(by) {
  const { parts } = pageData.loop, totals = parts.step.map((_, place) => PIECES.reduce((sum, [piece]) => sum + parts[piece][place], 0));
  const lines = (place) => PIECES.map(([piece, name]) => `${name} ${number(parts[piece][place])} ms (${share(parts[piece][place], totals[place])})`);
  plot(byId("run-parts"), () => ({
    ...runAxes(by, [], runWords(by)),
    tooltip: { trigger: "axis", confine: true, formatter: (items) => tip([`<b>from step ${number(parts.step[items[0].dataIndex])} on: ${number(totals[items[0].dataIndex])} ms an iteration</b>`, ...lines(items[0].dataIndex)]) },
    series: PIECES.map(([piece, name, color]) => ({
      type: "line", name, stack: "all", step: "end", symbol: parts.step.length > 1 ? "none" : "circle", lineStyle: { width: 0.5 }, itemStyle: { color }, areaStyle: { color, opacity: 0.85 },
      data: parts.step.map((_, place) => [parts[by][place], parts[piece][place]]),
    })),
  }), "run");
}

function drawLoop() {
  const { loop } = pageData;
  byId("run").hidden = document.querySelector('nav a[href="#run"]').hidden = !loop;
  if (!loop) return;
  byId("run-notes").textContent = loop.notes.join(" ");
  const thinned = loop.left_out ? ` ${number(loop.points.step.length)} of ${number(loop.points.step.length + loop.left_out)} steps are drawn: of neighbours of one kind the shortest, the longest and the one with the longest wait.` : "";
  byId("run-note").textContent = `● not recorded, ◇ recorded.${thinned}`;
  byId("run-parts").previousElementSibling.append(make("span", ` means over ${loop.basis}`, "quiet table"));
  const draw = () => {
    const by = byId("run-by").value;
    for (const id of ["run-steps", "run-parts"]) plots.filter((entry) => entry.holder === byId(id)).forEach((entry) => entry.remove());
    drawSteps(by);
    drawParts(by);
  };
  byId("run-by").addEventListener("change", draw);
  draw();
}
