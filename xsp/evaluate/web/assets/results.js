"use strict";
// Pages of results: the list with the leaderboard, one result, and several side by side.

const LIMIT = 50;

// Top-k accuracy in percent; null if it is unknown.
function percent(accuracy, k) { return accuracy && typeof accuracy[`top${k}`] === "number" ? 100 * accuracy[`top${k}`] : null; }

function mark(part) { return part.late || part.stopped ? " *" : ""; }
function ms(value, part) { return value === null || value === undefined ? "–" : number(value) + (part ? mark(part) : ""); }
// Of a search for the highest rate, in requests a second: the rate that held the limit, to one that did not.
function between(part) { return part.rate_low === undefined ? null : [part.rate_low, part.rate_high].map((end) => (end === null ? "?" : number(end))).join(" to "); }
function option(value, text) { const made = make("option", text); made.value = value; return made; }

// --- the list and the leaderboard -------------------------------------------------------------------------------------

async function home() {
  const chosen = new Set(), bar = make("div", null, "bar"), list = make("div"), board = make("div"), search = make("input"), task = make("select"), by = make("select");
  const compare = button("compare", "do", () => { location.href = "/compare?" + [...chosen].map((name) => "name=" + encodeURIComponent(name)).join("&"); });
  const say = () => { compare.disabled = chosen.size < 2; compare.textContent = chosen.size ? `compare ${chosen.size}` : "compare"; };
  Object.assign(compare, { id: "compare" });
  Object.assign(search, { type: "search", placeholder: "filter", maxLength: 200 });
  search.setAttribute("aria-label", "filter evaluations");
  task.setAttribute("aria-label", "task");
  by.setAttribute("aria-label", "order of the leaderboard");
  task.append(option("", "all tasks"));
  for (const [value, text] of [["inputs_per_s", "highest inputs/s"], ["p50_ms", "lowest p50"], ["p90_ms", "lowest p90"], ["p99_ms", "lowest p99"], ["rate", "highest rate within a limit"], ["top1", "highest accuracy"]]) by.append(option(value, text));
  bar.append(search, task, compare);
  const ranking = make("div", null, "bar");
  ranking.append(by);
  main.append(title("Evaluations"), bar, list, make("h2", "Leaderboard"), make("p", "One row per manifest, batch size, software and machine.", "quiet"), ranking, board);
  say();
  const picked = (name) => {
    const box = make("input");
    box.type = "checkbox";
    box.checked = chosen.has(name);
    box.setAttribute("aria-label", `choose ${name}`);
    box.addEventListener("change", () => { if (box.checked) chosen.add(name); else chosen.delete(name); say(); });
    return box;
  };
  let turn = 0;
  const show = async (offset) => {
    const mine = (turn += 1), wanted = new URLSearchParams({ offset, limit: LIMIT, text: search.value });
    if (task.value) wanted.set("task", task.value);
    const found = await ask("/api/evaluations?" + wanted);
    if (mine !== turn) return;
    if (task.length === 1) task.append(...found.tasks.map((each) => option(each, each)));
    const lines = found.evaluations.map((each) => {
      const [first] = each.parts, sizes = each.parts.map((part) => part.batch), most = each.parts.map((part) => part.inputs_per_s).filter((value) => value !== null);
      return [picked(each.result), link(each.result, ofResult(each.result)), each.name, each.kind, sizes.join(", "), ms(first.p50_ms), ms(first.p99_ms, first), most.length ? Math.max(...most) : null, percent(each.accuracy, 1), each.started.replace("T", " ").replace("+00:00", "")];
    });
    const empty = make("p", found.total || search.value ? "No evaluation matches." : "There are no evaluations yet. ");
    if (!found.total && !search.value) empty.append(link("Start one.", "/new"));
    list.replaceChildren(found.total ? rows(["", "result", "name", "load", "batch", "p50 ms", "p99 ms", "highest inputs/s", "top-1 %", "started (UTC)"], lines, "evaluations") : empty, pages(found.total, offset, LIMIT, show));
    if (found.evaluations.some((each) => each.parts.some((part) => mark(part)))) list.append(make("p", "* the load was not as requested: the run was stopped early, or the generator was late (99th percentile of lateness above 1 % of the median latency)", "quiet"));
    if (found.damaged.length) list.append(...folded(`${counted(found.damaged.length, "result")} damaged`, found.damaged.map((line) => make("p", line, "warning"))));
  };
  const rank = async () => {
    const wanted = new URLSearchParams({ by: by.value, limit: LIMIT });
    if (task.value) wanted.set("task", task.value);
    const found = await ask("/api/leaderboard?" + wanted);
    const always = ["p50 ms", "p99 ms", "inputs/s", "top-1 %"], more = always.includes(found.column) ? [] : [found.column]; // what orders it is shown
    const lines = found.rows.map((row, place) => [place + 1, row.model, row.kind, row.batch, ...more.map(() => row.ordered), row.p50_ms, row.p99_ms, row.inputs_per_s, percent(row.accuracy, 1), row.software, row.machine, link(row.result, ofResult(row.result))]);
    board.replaceChildren(rows(["", "model", "load", "batch", ...more, ...always, "software", "machine", "newest result"], lines, "leaderboard"));
    if (found.total > LIMIT) board.append(make("p", `The first ${LIMIT} of ${number(found.total)} rows.`, "quiet"));
  };
  search.addEventListener("input", () => show(0).catch(failed));
  task.addEventListener("change", () => Promise.all([show(0), rank()]).catch(failed));
  by.addEventListener("change", () => rank().catch(failed));
  await Promise.all([show(0), rank()]);
}

// --- one result -------------------------------------------------------------------------------------------------------

function percentileChart(found, names) {
  const at = found[0].percentiles.at;
  return sectionChart({ kind: "lines", title: "Latency by percentile", unit: "ms", over: "percentile (nearest rank)", at, log: [], labels: [],
    series: found.map((each, place) => ({ name: names[place], values: each.percentiles.ms, low: [], high: [] })) });
}

function timeChart(found, text) {
  return sectionChart({ kind: "points", title: "Latency over time", unit: "ms", over: "seconds since the first request was due", at: found.due_ms.map((each) => each / 1000), log: [], labels: [],
    series: [{ name: text, values: found.latency_ms, low: [], high: [] }] });
}

function batchChart(parts) {
  return sectionChart({ kind: "lines", title: "Throughput by batch size", unit: "inputs/s", over: "batch size", at: parts.map((each) => each.batch), log: ["at"], labels: [],
    series: [{ name: "inputs/s", values: parts.map((each) => each.inputs_per_s), low: [], high: [] }] });
}

async function result(name) {
  const path = "/api" + ofResult(name), found = await ask(path), agent = found.agent;
  const open = make("p"), place = ofResult(name);
  main.append(title(found.name), facts([
    ["result", found.result], ["identity", found.identity], ["load", found.kind], ["started", found.started.replace("T", " ")],
    ["agent", `${agent.name}: ${agent.cpu}, ${agent.cores} cores${agent.gpus.length ? ", " + agent.gpus.join(", ") : ""}`],
    ["software", `Python ${agent.python}, ` + Object.entries(agent.packages).map((each) => each.join(" ")).join(", ")],
    ["threads", found.threads], ["samples", `${number(found.samples.count)} (outputs of ${number(found.outputs.samples)} are stored)`], ["opening the model", `${number(found.open_ms)} ms`],
  ]));
  if (found.trace) open.append(link("open its trace", place + "/report"), " · ");
  if (found.advice) open.append(link("its advice", path + "/advice"), " · ");
  if (found.bound) open.append(link("its bound", path + "/bound"), " · ");
  open.append(link("its manifest", path + "/manifest"), " · ", link("new evaluation from it", "/new?from=" + encodeURIComponent(name)));
  main.append(open);
  if (!found.trace) main.append(make("p", "No trace was requested.", "quiet"));
  for (const note of found.notes || []) main.append(make("p", note, "warning"));
  if (found.simulated) main.append(make("p", "The times were reported by a simulator.", "note"));
  const first = found.parts[0], tiles = make("div", null, "tiles");
  tiles.append(tile(`${ms(first.p50_ms, first)} ms`, `median latency, batch ${first.batch}`), tile(`${ms(first.p99_ms, first)} ms`, `99th percentile of ${number(first.requests)} requests`), tile(number(first.inputs_per_s), "inputs per second"));
  for (const k of [1, 5]) {
    const share = percent(found.accuracy, k);
    if (share !== null) tiles.append(tile(`${number(share)} %`, `top-${k} of ${number(found.accuracy.samples)} samples, ${found.accuracy[`top${k}_interval`].map((end) => number(100 * end)).join(" … ")}`));
  }
  main.append(tiles);
  if (found.accuracy && found.accuracy.error) main.append(make("p", `No accuracy: ${found.accuracy.error}`, "warning"));
  const within = (part, each) => (part.intervals_ms && part.intervals_ms[each] ? part.intervals_ms[each].map((end) => (end === null ? "?" : number(end))).join(" … ") : "–");
  main.append(rows(["batch", "requests", "p50 ms", "95 % interval", "p90 ms", "p99 ms", "trimmed mean ms", "inputs/s", "busy %", "load"],
    found.parts.map((part) => [part.batch, part.requests, part.p50_ms, within(part, "p50"), part.p90_ms, part.p99_ms, part.trimmed_mean_ms, part.inputs_per_s, part.utilisation === null ? null : 100 * part.utilisation,
      part.stopped || (part.late ? "the generator was late" : "as requested")]), "figures"));
  for (const part of found.parts.filter((each) => each.rate_low !== undefined))
    main.append(make("p", `Highest rate within the limit, batch ${part.batch}: from ${number(part.rate_low)} to ${number(part.rate_high)} requests per second.`));
  const choice = make("select"), charts = make("div", null, "grid"), bar = make("div", null, "bar");
  choice.setAttribute("aria-label", "batch size");
  choice.append(...found.parts.map((part) => option(part.batch, `batch ${part.batch}`)));
  if (found.parts.length > 1) bar.append(choice);
  main.append(make("h2", "Requests"), bar, charts);
  const show = async () => {
    const all = await ask(`${path}/requests?batch=${choice.value}`);
    charts.replaceChildren(timeChart(all, `batch ${choice.value}`), percentileChart([all], [`batch ${choice.value}`]));
    if (found.parts.length > 1) charts.append(batchChart(found.parts));
    dropPlots();
    if (all.total > all.latency_ms.length) charts.append(make("p", `Over time: the first ${number(all.latency_ms.length)} of ${number(all.total)} requests; percentiles are of all requests.`, "quiet"));
  };
  choice.addEventListener("change", () => show().catch(failed));
  await show();
}

// --- several side by side ---------------------------------------------------------------------------------------------

async function comparison() {
  const names = new URLSearchParams(location.search).getAll("name");
  main.append(title("Comparison"));
  const asked = names.map((name) => "name=" + encodeURIComponent(name)).join("&");
  const found = await ask("/api/compare?" + asked), all = await Promise.all(names.map((name) => ask("/api" + ofResult(name))));
  const requests = await Promise.all(names.map((name) => ask(`/api${ofResult(name)}/requests?limit=1`)));
  const wanted = [["p50_ms", "p50 ms"], ["p90_ms", "p90 ms"], ["p99_ms", "p99 ms"], ["trimmed_mean_ms", "trimmed mean ms"], ["inputs_per_s", "inputs/s"]];
  const rated = all.some((each) => each.parts.some((part) => part.rate_low !== undefined));
  const lines = all.flatMap((each) => each.parts.map((part) => {
    const before = all[0].parts.find((other) => other.batch === part.batch);
    const change = each !== all[0] && before && before.p50_ms ? signed((100 * part.p50_ms) / before.p50_ms - 100) + " %" : "";
    return [link(each.result, ofResult(each.result)), each.name, part.batch, ...wanted.map(([name]) => part[name]), ...(rated ? [between(part)] : []), percent(each.accuracy, 1), change];
  }));
  main.append(make("p", `Each result is compared with the first, ${names[0]}.`, "quiet"), rows(["result", "name", "batch", ...wanted.map(([, text]) => text), ...(rated ? ["requests/s"] : []), "top-1 %", "p50, change"], lines, "figures"));
  const charts = make("div", null, "grid"), told = all.map((each, place) => `${names[place]} ${each.name}, batch ${requests[place].batch}`);
  charts.append(percentileChart(requests, told));
  charts.firstChild.classList.add("wide");
  main.append(make("h2", "Latencies"), charts);
  for (const each of found) {
    const verdict = make("p"), said = make("b", each.verdict, each.verdict === "same" ? "same" : each.verdict === "different" ? "different" : "");
    verdict.append(said, `; outputs: ${each.outputs}`);
    main.append(make("h2", `${each.before} and ${each.after}`), verdict, rows(["subject", "verdict", "why"], each.reasons.map((one) => [one.subject, one.verdict, wrapped(one.text)]), "reasons"));
    const apart = Object.entries(each.divergences);
    if (!each.equal_outputs && apart.length) {
      const measures = Object.keys(apart[0][1]);
      main.append(make("h3", "Outputs"), rows(["measure", ...apart.map(([name]) => name)], measures.map((one) => [one.replaceAll("_", " "), ...apart.map(([, values]) => values[one] ?? null)]), "outputs"));
    }
    if (each.by_layer) main.append(...layers(each));
    const differing = Object.entries(each.differing).map(([name, [before, after]]) => [name, wrapped(before), wrapped(after)]);
    main.append(make("h3", differing.length ? "What differs" : "Nothing differs in manifest, software and machine."));
    if (differing.length) main.append(rows(["", each.before, each.after], differing, "what differs"));
  }
}

// Comparison of both traces: its conclusion, and the layers whose time changed most.
function layers(each) {
  const found = each.by_layer, head = make("h3", "By layer");
  if (found.error) return [head, make("p", found.error, "warning")];
  const changed = found.rows.filter((row) => row.section === "layer").sort((a, b) => Math.abs(b.change_ms || 0) - Math.abs(a.change_ms || 0));
  const lines = changed.slice(0, LIMIT).map((row) => [row.name, row.a_ms, row.b_ms, row.change_percent === null ? null : signed(row.change_percent) + " %", row.verdict || ""]);
  const told = changed.length > LIMIT ? [make("p", `and ${number(changed.length - LIMIT)} more, with smaller changes`, "quiet")] : [];
  return [head, ...found.conclusion.map((line) => make("p", line)), ...(lines.length ? [rows(["layer", each.before + " ms", each.after + " ms", "change", "verdict"], lines, "layers")] : []), ...told];
}

function wrapped(text) {
  const box = make("span", text === null ? "–" : text);
  box.style.whiteSpace = "normal";
  return box;
}
