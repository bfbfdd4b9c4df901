"use strict";
// The page: its head, the reliability of the figures, the timeline's legend and panel; then it draws the other parts.

// --- head -----------------------------------------------------------------------------------------------------------

function drawHeader() {
  byId("name").textContent = pageData.name;
  for (const [label, text] of pageData.facts) byId("facts").append(make("dt", label), make("dd", text));
}

function drawFigures() {
  const { heading, sentences, advice } = data.screen;
  byId("heading").textContent = heading;
  byId("verdict").replaceChildren(...sentences.map((sentence) => make("p", sentence)));
  byId("advice").replaceChildren(...advice.map(([gain, what, todo]) => {
    const item = make("li");
    item.append(make("b", gain), make("span", `: ${what}`), make("div", `Do: ${todo}`, "quiet"));
    return item;
  }));
  byId("hint").textContent = pageData.sections.some(({ name }) => name === "advice") ? "" : "More advice, with timings of the calls: " + pageData.advise;
  byId("headline").replaceChildren(...data.headline.map(([label, value, about]) => {
    const tile = make("div", null, "tile");
    tile.append(make("span", label, "quiet"), make("b", value), make("span", about, "quiet"));
    return tile;
  }));
}

// --- the kind of step -----------------------------------------------------------------------------------------------

function drawKinds() {
  const { shown, others } = pageData.kinds, choice = byId("kind");
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
  const details = [steps === null || steps === undefined ? null : counted(steps, "step"), percent === null ? null : `${percent.toFixed(0)} % of the loop's time`];
  return [name, ...details.filter((detail) => detail)].join(", ");
}

// --- reliability ------------------------------------------------------------------------------------------------------

const GRADES = { exact: "var(--good)", inferred: "#d9a441", unknown: "#c9506b" };
const GRADE_MEANINGS = {
  exact: "found by ids, sequence numbers and containment", inferred: "found by weaker evidence, such as the replay of a graph, or an operator without a launch", unknown: "no layer is known",
};

const RUN_SUBJECTS = ["drift", "data", "loop"];
const PHASE_MEANINGS = {
  "outside the phases": "time of the step outside all phases: Python, moving data, losses outside the model", "between steps": "logging, evaluation and other work of the program between two steps",
  "waiting for the device": "calls that wait for a device, wherever they are, and the time after the step until it has finished",
};

// Both sides of the account, one bar each: the parts of a side add up to the iteration.
function drawPhases() {
  byId("phases").replaceChildren(...data.screen.sides.flatMap(({ name, total, parts }) => {
    let idle = 0;
    const colour = (part) => PHASES[part] || DEVICE_PARTS[part] || (part.startsWith("idle: ") ? IDLE[idle++ % IDLE.length] : OTHER_COLOUR);
    return sharesBar(`${name}: where the ${total} go`, parts.map(([part, ms, percent, text]) => ({ size: ms, colour: colour(part), title: PHASE_MEANINGS[part], text: `${part} ${text}, ${percent}` })));
  }));
}

function drawHealth() {
  const { grade, findings, absent, attributed } = data.health, reasons = grade.reasons.length ? grade.reasons : ["no finding lowers the grade"];
  byId("grade").hidden = false;
  byId("grade").replaceChildren(make("span", "grade, A to F", "quiet"), make("b", grade.letter, "grade-" + grade.letter), ...reasons.map((reason) => make("p", reason, "quiet")));
  byId("attributed").replaceChildren(...(attributed.length ? attribution(attributed) : []));
  byId("findings").replaceChildren(...findings.map(([severity, subject, text]) => {
    const item = make("li");
    item.append(make("span", severity, "severity " + severity), make("span", subject, "subject"), make("span", text));
    return item;
  }));
  byId("run-found").replaceChildren(...findings.filter(([, subject]) => RUN_SUBJECTS.includes(subject)).map(([severity, , text]) => make("p", text.replaceAll("`", ""), severity)));
  byId("absent").replaceChildren(...folded(`${counted(absent.length, "collector")} not used, with the reasons`, absent.map(([name, reason]) => make("p", `${name}: ${reason}`, "quiet"))));
}

// Device time by certainty of its layer, as one bar.
function attribution(rows) {
  const total = rows.reduce((sum, [, , ms]) => sum + ms, 0);
  return sharesBar("Device time by certainty of its layer, percent of that time", rows.map(([grade, count, ms]) => ({
    size: ms, colour: GRADES[grade], title: GRADE_MEANINGS[grade], text: `${grade} ${share(ms, total)}, ${number(count)} kernels and copies, ${number(ms)} ms`,
  })));
}

// Parts of a whole as one bar, with a legend below it.
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
const LEADING_COLUMNS = ["kind", "type", "work", "phase", "dur_ns", "raw_ns", "true_ns", "interval", "cause", "input_shapes", "flops"];
const HANDLED_COLUMNS = ["name", "true_lo_ns", "true_hi_ns", "level", "parent_rule", "parent", "layer", "launch", "start", "key", "grade", "attributes"];
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
  return [list, (label, value, about) => {
    const term = make("dt", label), definition = make("dd");
    if (about) term.title = about;
    definition.append(value);
    list.append(term, definition);
  }];
}

function show(place) {
  const [list, fact] = factList();
  fact("level", levelName(timeline.get.level(place)), data.timeline.about.level);
  fact("starts at", time(timeline.start[place]), "time since the start of the timeline");
  addColumns(place, fact);
  addLaunch(place, fact);
  addPosition(place, fact);
  addAttributes(place, fact);
  const children = timeline.spans.inside(place);
  if (children.length) fact(`inside: ${number(children.length)}`, links(children));
  byId("panel").replaceChildren(make("h3", timeline.get.name(place)), list);
}

// Unknown figures are left out, except for the main figures of a step that was measured several times.
function addColumns(place, fact) {
  const averaged = timeline.get.raw_ns && timeline.get.raw_ns(place) !== null;
  const columns = [...LEADING_COLUMNS, ...Object.keys(timeline.get).filter((name) => !LEADING_COLUMNS.includes(name) && !HANDLED_COLUMNS.includes(name))];
  for (const column of columns.filter((name) => name === "interval" || timeline.get[name])) {
    const value = column === "interval" ? interval(place) : valueOf(column, place);
    if (value === null && !(averaged && ["true_ns", "interval", "cause"].includes(column))) continue;
    const word = column === "interval" ? "95 % interval" : WORDS[column] || column.replace(/_(ns|bytes)$/, "").replaceAll("_", " ");
    fact(word, value === null ? "–" : value, data.timeline.about[column]);
  }
}

function addLaunch(place, fact) {
  const { get, spans, start } = timeline, launch = get.launch(place);
  if (launch !== null) {
    fact("launched by", link(launch));
    fact("after launch", time(start[place] - spans.end(launch)), "from the end of the launch to the start of the work; negative if the work began before the call returned");
  }
  const launched = get.level(place) === 60 ? spans.launched(place) : [];
  if (launched.length) fact(`launched: ${number(launched.length)}`, links(launched));
}

function addPosition(place, fact) {
  const { get } = timeline, parent = get.parent(place), layer = get.layer(place), grade = get.grade ? get.grade(place) : null;
  if (layer !== null && layer !== place) fact("layer", link(layer));
  if (grade !== null) fact("layer known", `${grade}: ${GRADE_MEANINGS[grade] || ""}`, data.timeline.about.grade);
  fact("parent", parent === null ? "none" : link(parent));
  fact("found by", number(get.parent_rule(place)), data.timeline.about.parent_rule);
  if (get.key(place) !== null) fact("key", get.key(place), "the place of the span in the structure of a step; a search in Jaeger for the tag xsp.key with this value finds it in every step");
}

// Attributes are untrusted JSON; anything but an object is shown as text.
function addAttributes(place, fact) {
  const text = timeline.get.attributes ? timeline.get.attributes(place) : null;
  if (text === null) return;
  let attributes = null;
  try { attributes = JSON.parse(text); } catch { /* shown as text */ }
  if (attributes === null || typeof attributes !== "object" || Array.isArray(attributes)) return fact("attributes", text);
  for (const [name, value] of Object.entries(attributes)) {
    const valueText = name === "bytes" || name.endsWith("_bytes") ? bytes(value) : typeof value === "string" ? value : JSON.stringify(value);
    fact(name.replace(/_bytes$/, "").replace(/^xsp\./, "").replaceAll("_", " "), valueText);
  }
}

// Searches the kinds of steps for a span, the shown kind first, and shows the kind that has it.
function placeOf(key) {
  const find = () => timeline.spans.places((place) => timeline.get.key(place) === key)[0];
  const current = Number(byId("kind").value || 0), candidates = [current, ...pageData.kinds.shown.keys()];
  for (const number of candidates) {
    if (kindOf(number) !== data) drawKind(number);
    const place = find();
    if (place !== undefined) return place;
  }
  drawKind(current);
  return undefined;
}

// A span in Jaeger links to #key=…, the place in the structure of a step.
function followLink() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key"), notice = byId("linked");
  const place = key === null ? undefined : placeOf(key);
  notice.hidden = key === null || place !== undefined;
  if (key === null) return;
  byId("timeline").scrollIntoView();
  if (place !== undefined) timeline.visit(place);
  else notice.textContent = `The link leads to a span with the key ${key}, but the timeline shows none: the span belongs to another run or to another kind of step, or it is left out here.`;
}

// --- legend -----------------------------------------------------------------------------------------------------------

function drawLegend() {
  const holder = byId("legend"), { get, spans } = timeline, colours = new Map();
  let hasBackward = false;
  for (let place = 0; place < spans.count; place++) {
    colours.set(timeline.meaning(place), timeline.colour(place));
    hasBackward = hasBackward || get.phase(place) === "backward";
  }
  const order = [...Object.values(LEVELS).map(([name]) => name), ...Object.keys(WORKS)];
  const place = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
  holder.replaceChildren();
  for (const name of [...colours.keys()].sort((a, b) => place(a) - place(b))) holder.append(legendItem(name, colours.get(name)));
  if (hasBackward) holder.append(legendItem("backward", null, "backward"));
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
  drawMissing();
  dropPlots();
}

const timeline = new Timeline(show);
drawHeader();
drawKinds();
drawLoop();
drawServing();
drawSections();
drawKind(0);
followLink();
addEventListener("hashchange", followLink);
