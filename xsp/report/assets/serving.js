"use strict";
// An engine over time: its steps, as high as the requests that they serve, and the lives of the longest requests.

const STEP_KINDS = { prefill: "#e0823d", decode: "#4c78d8", mixed: "#8a63c9", idle: "#c3cad8" };
const LIFE_PARTS = { queue: "#d8cb8f", prefill: "#e0823d", decode: "#4c78d8", "left out": "#c9506b", waiting: "#c3cad8" };

function rectangle(from, to, top, bottom, params, api) {
  const [left, high] = api.coord([from, top]), [right, low] = api.coord([to, bottom]);
  const shape = echarts.graphic.clipRectByRect({ x: left, y: high, width: Math.max(right - left, 1), height: low - high }, params.coordSys);
  return shape && { type: "rect", shape, style: { fill: api.visual("color") } };
}

// The values of a datum are from, to, and its place.
function barsOf(name, color, data, edges) {
  return {
    type: "custom", name, itemStyle: { color }, encode: { x: [0, 1], y: 3 }, data,
    renderItem: (params, api) => rectangle(api.value(0), api.value(1), ...edges(params, api), params, api),
  };
}

function servingAxes(end) {
  return {
    grid: { left: 90, right: 20, top: 34, bottom: 62 }, legend: { ...LEGEND, icon: "rect" },
    dataZoom: sliders.map((slider) => ({ ...slider, filterMode: "weakFilter" })),
    xAxis: { type: "value", min: 0, max: end, name: "seconds since the first request or step", nameLocation: "middle", nameGap: 22, axisLine: { onZero: false } },
  };
}

function drawEngineSteps(steps, end) {
  const series = Object.entries(STEP_KINDS).flatMap(([kind, color]) => {
    const data = steps.flatMap((step, place) => (step.kind === kind ? [[step.start, step.end, place, step.requests]] : []));
    return data.length ? [barsOf(kind, color, data, (params, api) => [api.value(3), 0])] : [];
  });
  const told = ({ value }) => {
    const step = steps[value[2]];
    return tip([
      `<b>step ${number(step.number)}</b> ${plain(step.kind)}, ${plain(step.engine)}`, `${number(1e3 * (step.end - step.start))} ms`,
      `${number(step.requests)} requests`, `${number(step.prefill)} tokens of prompts, ${number(step.decode)} new ones`,
    ]);
  };
  plot(byId("serving-steps"), () => ({ ...servingAxes(end), yAxis: { type: "value", minInterval: 1 }, tooltip: { confine: true, formatter: told }, series }), "serving");
}

function drawLives(requests, end) {
  const series = Object.entries(LIFE_PARTS).flatMap(([name, color]) => {
    const data = requests.flatMap(({ life }, lane) => life.flatMap((part, place) => (part[0] === name ? [[part[1], part[2], place, lane]] : [])));
    return data.length ? [barsOf(name, color, data, (params, api) => [api.value(3) - 0.35, api.value(3) + 0.35])] : [];
  });
  const told = ({ value }) => {
    const request = requests[value[3]], [name, from, to, steps, tokens] = request.life[value[2]];
    return tip([
      `<b>${plain(request.name)}</b> ${plain(request.status)}, ${number(request.ms)} ms, ${number(request.prompt)} tokens of its prompt, ${number(request.output)} answered`,
      `${name}: ${number(1e3 * (to - from))} ms${steps ? `, ${number(steps)} steps, ${number(tokens)} tokens` : ""}`, request.slow_by ? `slow by: ${plain(request.slow_by)}` : null,
    ]);
  };
  const holder = byId("serving-lives");
  holder.style.height = `${140 + 14 * requests.length}px`;
  const lane = (value) => (Number.isInteger(value) && requests[value] ? labelOf(requests[value].name) : "");
  plot(holder, () => ({
    ...servingAxes(end), tooltip: { confine: true, formatter: told }, series,
    yAxis: { type: "value", min: -1, max: requests.length, interval: 1, inverse: true, splitLine: { show: false }, axisLabel: { formatter: lane, fontSize: 10 }, axisTick: { show: false } },
  }), "serving");
}

function drawServing() {
  const { serving } = pageData;
  byId("serving").hidden = document.querySelector('nav a[href="#serving"]').hidden = !serving;
  if (!serving) return;
  const { steps, requests, left_out: [stepsLeft, requestsLeft] } = serving;
  const end = Math.max(...steps.map((step) => step.end), ...requests.map(({ life }) => (life.length ? life.at(-1)[2] : 0)));
  byId("serving-note").textContent = [
    stepsLeft ? `The longest ${number(steps.length)} of ${number(steps.length + stepsLeft)} steps are drawn.` : "",
    requestsLeft ? `The longest ${number(requests.length)} of ${number(requests.length + requestsLeft)} requests are drawn.` : "",
  ].join(" ");
  drawEngineSteps(steps, end);
  drawLives(requests, end);
}
