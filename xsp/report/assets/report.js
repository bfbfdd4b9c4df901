"use strict";
// The page: its head, the reliability of the figures, the timeline's legend and panel; then it draws the other parts.

// --- head -----------------------------------------------------------------------------------------------------------

function drawHeader() {
  byId("name").textContent = whole.name;
  for (const [what, text] of whole.facts) byId("facts").append(make("dt", what), make("dd", text));
}

function drawFigures() {
  byId("verdict").replaceChildren(...data.verdict.map((sentence) => make("li", sentence.replaceAll("`", ""))));
  byId("headline").replaceChildren(...data.headline.map(([what, value, about]) => {
    const tile = make("div", null, "tile");
    tile.append(make("span", what, "quiet"), make("b", value), make("span", about, "quiet"));
    return tile;
  }));
}

// --- the kind of step -----------------------------------------------------------------------------------------------

function drawKinds() {
  const { shown, others } = whole.kinds, choice = byId("kind");
  byId("kinds").hidden = !shown.length;
  shown.forEach((kind, number) => choice.append(new Option(nameOf(kind), number)));
  choice.parentNode.hidden = !shown.length;
  choice.addEventListener("change", () => drawKind(Number(choice.value)));
  if (!others.length) return;
  const lines = others.map((kind) => {
    const line = make("p", `${nameOf(kind)}: `, "quiet");
    line.append(make("code", kind.command));
    return line;
  });
  byId("kinds").append(...folded(`${counted(others.length, "more kind")} of step, and how to see ${others.length > 1 ? "them" : "it"}`, lines));
}

function nameOf({ name, steps, percent }) {
  const told = [steps === null || steps === undefined ? null : counted(steps, "step"), percent === null ? null : `${percent.toFixed(0)} % of the loop's time`];
  return [name, ...told.filter((each) => each)].join(", ");
}

// --- reliability ------------------------------------------------------------------------------------------------------

const GRADES = { exact: "var(--good)", inferred: "#d9a441", unknown: "#c9506b" };
const GRADES_MEAN = {
  exact: "found by ids, sequence numbers and containment", inferred: "found by weaker evidence, such as the replay of a graph, or an operator without a launch", unknown: "no layer is known",
};

const OF_THE_RUN = ["drift", "data", "loop"];
const PHASES_MEAN = { "rest of the step": "time outside all phases: Python, moving data, losses outside the model, waiting for a device", "between steps": "logging, evaluation and other work of the program between two steps" };

// The parts of an iteration as one bar. Without a loop the time between steps is unknown.
function drawPhases() {
  const rows = data.phases.map(([phase, ms]) => [phase === "data" ? "waiting for data" : phase, ms]), all = rows.reduce((sum, [, ms]) => sum + ms, 0);
  const what = rows.some(([phase]) => phase === "between steps") ? "an iteration of the loop" : "a step and its wait for data";
  byId("phases").replaceChildren(...(rows.length ? sharesBar(`Where the time of ${what} goes: ${number(all)} ms, percent of that`, rows.map(([phase, ms]) => ({
    size: ms, colour: PHASES[phase] || OTHER, title: PHASES_MEAN[phase], text: `${phase} ${share(ms, all)}, ${number(ms)} ms`,
  }))) : []));
}

function drawHealth() {
  const { grade, findings, absent, attributed } = data.health, why = grade.reasons.length ? grade.reasons : ["no finding lowers the grade"];
  byId("grade").hidden = false;
  byId("grade").replaceChildren(make("span", "grade, A to F", "quiet"), make("b", grade.letter, "grade-" + grade.letter), ...why.map((reason) => make("p", reason, "quiet")));
  byId("attributed").replaceChildren(...(attributed.length ? attribution(attributed) : []));
  byId("findings").replaceChildren(...findings.map(([severity, subject, text]) => {
    const item = make("li");
    item.append(make("span", severity, "severity " + severity), make("span", subject, "subject"), make("span", text));
    return item;
  }));
  byId("run-found").replaceChildren(...findings.filter(([, subject]) => OF_THE_RUN.includes(subject)).map(([severity, , text]) => make("p", text.replaceAll("`", ""), severity)));
  byId("absent").replaceChildren(...folded(`${counted(absent.length, "collector")} not used, with the reasons`, absent.map(([name, reason]) => make("p", `${name}: ${reason}`, "quiet"))));
}

// Device time by certainty of its layer, as one bar.
function attribution(rows) {
  const all = rows.reduce((sum, [, , ms]) => sum + ms, 0);
  return sharesBar("Device time by certainty of its layer, percent of that time", rows.map(([grade, count, ms]) => ({
    size: ms, colour: GRADES[grade], title: GRADES_MEAN[grade], text: `${grade} ${share(ms, all)}, ${number(count)} kernels and copies, ${number(ms)} ms`,
  })));
}

// Parts of a whole beside each other, with a legend below them.
function sharesBar(title, rows) {
  const bar = make("div", null, "shares"), keys = make("div", null, "legend");
  for (const { size, colour, title: about, text } of rows) {
    const part = make("span"), key = legendItem(text, colour);
    part.style.cssText = `flex: ${Math.max(0, size || 0)} 0 0; background: ${colour}`;
    part.title = key.title = about || text;
    bar.append(part);
    keys.append(key);
  }
  return [make("p", title, "quiet"), bar, keys];
}

// --- the selected span ------------------------------------------------------------------------------------------------

const WORDS = {
  dur_ns: "recorded", raw_ns: "averaged", true_ns: "true", cause: "difference", work: "class",
  input_shapes: "shapes", flops: "operations", median_ns: "median", p90_ns: "90th percentile", p99_ns: "99th percentile",
};
const FIRST = ["kind", "type", "work", "phase", "dur_ns", "raw_ns", "true_ns", "interval", "cause", "input_shapes", "flops"];
const TOLD = ["name", "true_lo_ns", "true_hi_ns", "level", "parent_rule", "parent", "layer", "launch", "start", "key", "grade", "attributes"];
const IDS = /^(process|thread|device|stream|step|correlation_id|sequence_nr|forward_thread|layer_index|depth)$/;
const MOST_LINKS = 8;

function valueOf(column, place) {
  const value = timeline.get[column](place);
  if (value === null) return null;
  if (column.endsWith("_ns")) return time(value);
  if (column.endsWith("_bytes")) return bytes(value);
  return typeof value === "number" && !IDS.test(column) ? number(value) : String(value);
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

function links(places) {
  const holder = make("div");
  for (const place of places.slice(0, MOST_LINKS)) {
    const line = make("div", null, "child");
    line.append(link(place), make("span", time(timeline.spans.dur[place]), "quiet"));
    holder.append(line);
  }
  if (places.length > MOST_LINKS) holder.append(make("span", `and ${number(places.length - MOST_LINKS)} more`, "quiet"));
  return holder;
}

// A list of facts, and the function that adds one.
function factList() {
  const list = make("dl");
  return [list, (what, value, about) => {
    const term = make("dt", what), told = make("dd");
    if (about) term.title = about;
    told.append(value);
    list.append(term, told);
  }];
}

function show(place) {
  const [list, fact] = factList();
  fact("level", levelName(timeline.get.level(place)), data.timeline.about.level);
  fact("starts at", time(timeline.start[place]), "time since the start of the timeline");
  tellColumns(place, fact);
  tellLaunch(place, fact);
  tellPlace(place, fact);
  tellAttributes(place, fact);
  const children = timeline.spans.inside(place);
  if (children.length) fact(`inside: ${number(children.length)}`, links(children));
  byId("panel").replaceChildren(make("h3", timeline.get.name(place)), list);
}

// Of a step that was measured several times, the main figures are shown as unknown if they are; other unknown figures are left out.
function tellColumns(place, fact) {
  const averaged = timeline.get.raw_ns && timeline.get.raw_ns(place) !== null;
  const columns = [...FIRST, ...Object.keys(timeline.get).filter((name) => !FIRST.includes(name) && !TOLD.includes(name))];
  for (const column of columns.filter((name) => name === "interval" || timeline.get[name])) {
    const value = column === "interval" ? interval(place) : valueOf(column, place);
    if (value === null && !(averaged && ["true_ns", "interval", "cause"].includes(column))) continue;
    const word = column === "interval" ? "95 % interval" : WORDS[column] || column.replace(/_(ns|bytes)$/, "").replaceAll("_", " ");
    fact(word, value === null ? "–" : value, data.timeline.about[column]);
  }
}

function tellLaunch(place, fact) {
  const { get, spans, start } = timeline, launch = get.launch(place);
  if (launch !== null) {
    fact("launched by", link(launch));
    fact("after launch", time(start[place] - spans.end(launch)), "from the end of the launch to the start of the work; negative if the work began before the call returned");
  }
  const launched = get.level(place) === 60 ? spans.launched(place) : [];
  if (launched.length) fact(`launched: ${number(launched.length)}`, links(launched));
}

function tellPlace(place, fact) {
  const { get } = timeline, above = get.parent(place), layer = get.layer(place), grade = get.grade ? get.grade(place) : null;
  if (layer !== null && layer !== place) fact("layer", link(layer));
  if (grade !== null) fact("layer known", `${grade}: ${GRADES_MEAN[grade] || ""}`, data.timeline.about.grade);
  fact("parent", above === null ? "none" : link(above));
  fact("found by", number(get.parent_rule(place)), data.timeline.about.parent_rule);
  if (get.key(place) !== null) fact("key", get.key(place), "the place of the span in the structure of a step; a search in Jaeger for the tag xsp.key with this value finds it in every step");
}

// Attributes are untrusted JSON; anything but an object is shown as text.
function tellAttributes(place, fact) {
  const text = timeline.get.attributes ? timeline.get.attributes(place) : null;
  if (text === null) return;
  let found = null;
  try { found = JSON.parse(text); } catch { /* shown as text */ }
  if (found === null || typeof found !== "object" || Array.isArray(found)) return fact("attributes", text);
  for (const [name, value] of Object.entries(found)) {
    const shown = name === "bytes" || name.endsWith("_bytes") ? bytes(value) : typeof value === "string" ? value : JSON.stringify(value);
    fact(name.replace(/_bytes$/, "").replace(/^xsp\./, "").replaceAll("_", " "), shown);
  }
}

// Searches the kinds of steps for a span, the shown kind first, and shows the kind that has it.
function placeOf(key) {
  const find = () => timeline.spans.places((each) => timeline.get.key(each) === key)[0];
  const shown = Number(byId("kind").value || 0), all = [shown, ...whole.kinds.shown.keys()];
  for (const number of all) {
    if (kindOf(number) !== data) drawKind(number);
    const place = find();
    if (place !== undefined) return place;
  }
  drawKind(shown);
  return undefined;
}

// A span in Jaeger links to #key=…, the place in the structure of a step.
function follow() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key"), told = byId("linked");
  const place = key === null ? undefined : placeOf(key);
  told.hidden = key === null || place !== undefined;
  if (key === null) return;
  byId("timeline").scrollIntoView();
  if (place !== undefined) timeline.visit(place);
  else told.textContent = `The link leads to a span with the key ${key}, but the timeline shows none: the span belongs to another run or to another kind of step, or it is left out here.`;
}

// --- legend -----------------------------------------------------------------------------------------------------------

function drawLegend() {
  const holder = byId("legend"), { get, spans } = timeline, seen = new Map();
  let backward = false;
  for (let place = 0; place < spans.count; place++) {
    seen.set(timeline.meaning(place), timeline.colour(place));
    backward = backward || get.phase(place) === "backward";
  }
  const order = [...Object.values(LEVELS).map(([name]) => name), ...Object.keys(WORKS)];
  const place = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
  holder.replaceChildren();
  for (const name of [...seen.keys()].sort((a, b) => place(a) - place(b))) holder.append(legendItem(name, seen.get(name)));
  if (backward) holder.append(legendItem("backward", null, "backward"));
  byId("timeline-note").textContent = data.timeline.note;
  byId("panel").replaceChildren(make("p", "Click a span to see its details. Wheel: zoom. Drag: pan. Shift and wheel: scroll the lanes. Double click: zoom to the span. Keys: arrows, +, −, 0, N, P.", "quiet"));
}

// --- the whole page -----------------------------------------------------------------------------------------------------

// Draws everything about one kind of step.
function drawKind(number) {
  data = kindOf(number);
  byId("kind").value = String(number);
  drawFigures();
  drawPhases();
  drawHealth();
  timeline.load(data.timeline);
  drawLegend();
  drawCharts();
  drawLedger();
  drawTables();
  tellMissing();
  dropPlots();
}

const timeline = new Timeline(show);
drawHeader();
drawKinds();
drawLoop();
drawSections();
drawKind(0);
follow();
addEventListener("hashchange", follow);
