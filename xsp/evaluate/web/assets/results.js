"use strict";
// Pages of results: the list with the leaderboard, one result, and several side by side.

const LIMIT = 50;

// Top-k accuracy in percent; null if it is unknown.
function percent(accuracy, k) { return accuracy && typeof accuracy[`top${k}`] === "number" ? 100 * accuracy[`top${k}`] : null; }

function mark(part) { return part.late || part.stopped ? " *" : ""; }
function ms(value, part) { return value === null || value === undefined ? "–" : number(value) + (part ? mark(part) : ""); }
// The interval of a search for the highest rate, in requests per second: from a rate that kept the limit to one that broke it.
function rateInterval(part) { return part.rate_low === undefined ? null : [part.rate_low, part.rate_high].map((end) => (end === null ? "?" : number(end))).join(" to "); }
function option(value, text) { const element = make("option", text); element.value = value; return element; }

// --- the list and the leaderboard -------------------------------------------------------------------------------------

async function homePage() {
  const selected = new Set(), bar = make("div", null, "bar"), list = make("div"), board = make("div"), search = make("input"), task = make("select"), order = make("select");
  const compare = button("compare", "do", () => { location.href = "/compare?" + [...selected].map((name) => "name=" + encodeURIComponent(name)).join("&"); });
  const updateButton = () => { compare.disabled = selected.size < 2; compare.textContent = selected.size ? `compare ${selected.size}` : "compare"; };
  Object.assign(compare, { id: "compare" });
  Object.assign(search, { type: "search", placeholder: "filter", maxLength: 200 });
  search.setAttribute("aria-label", "filter evaluations");
  task.setAttribute("aria-label", "task");
  order.setAttribute("aria-label", "order of the leaderboard");
  task.append(option("", "all tasks"));
  for (const [value, text] of [["inputs_per_s", "highest inputs/s"], ["p50_ms", "lowest p50"], ["p90_ms", "lowest p90"], ["p99_ms", "lowest p99"], ["rate", "highest rate within a limit"], ["top1", "highest accuracy"]]) order.append(option(value, text));
  bar.append(search, task, compare);
  const ranking = make("div", null, "bar");
  ranking.append(order);
  main.append(title("Evaluations"), bar, list, make("h2", "Leaderboard"), make("p", "One row per manifest, batch size, software and machine.", "quiet"), ranking, board);
  updateButton();
  const selectionBox = (name) => {
    const box = make("input");
    box.type = "checkbox";
    box.checked = selected.has(name);
    box.setAttribute("aria-label", `choose ${name}`);
    box.addEventListener("change", () => { if (box.checked) selected.add(name); else selected.delete(name); updateButton(); });
    return box;
  };
  let latest = 0;
  const show = async (offset) => {
    const request = (latest += 1), query = new URLSearchParams({ offset, limit: LIMIT, text: search.value });
    if (task.value) query.set("task", task.value);
    const listing = await ask("/api/evaluations?" + query);
    if (request !== latest) return;
    if (task.length === 1) task.append(...listing.tasks.map((name) => option(name, name)));
    const lines = listing.evaluations.map((result) => {
      const [firstPart] = result.parts, sizes = result.parts.map((part) => part.batch), throughputs = result.parts.map((part) => part.inputs_per_s).filter((value) => value !== null);
      return [selectionBox(result.result), link(result.result, resultPath(result.result)), result.name, result.kind, sizes.join(", "), ms(firstPart.p50_ms), ms(firstPart.p99_ms, firstPart), throughputs.length ? Math.max(...throughputs) : null, percent(result.accuracy, 1), result.started.replace("T", " ").replace("+00:00", "")];
    });
    const empty = make("p", listing.total || search.value ? "No evaluation matches." : "There are no evaluations yet. ");
    if (!listing.total && !search.value) empty.append(link("Start one.", "/new"));
    list.replaceChildren(listing.total ? rows(["", "result", "name", "load", "batch", "p50 ms", "p99 ms", "highest inputs/s", "top-1 %", "started (UTC)"], lines, "evaluations") : empty, pager(listing.total, offset, LIMIT, show));
    if (listing.evaluations.some((result) => result.parts.some((part) => mark(part)))) list.append(make("p", "* the load was not as requested: the run was stopped early, or the generator was late (99th percentile of lateness above 1 % of the median latency)", "quiet"));
    if (listing.damaged.length) list.append(...folded(`${counted(listing.damaged.length, "result")} damaged`, listing.damaged.map((line) => make("p", line, "warning"))));
  };
  const rank = async () => {
    const query = new URLSearchParams({ by: order.value, limit: LIMIT });
    if (task.value) query.set("task", task.value);
    const leaderboard = await ask("/api/leaderboard?" + query);
    const fixed = ["p50 ms", "p99 ms", "inputs/s", "top-1 %"], extra = fixed.includes(leaderboard.column) ? [] : [leaderboard.column]; // the ordering figure is always shown
    const lines = leaderboard.rows.map((row, index) => [index + 1, row.model, row.kind, row.batch, ...extra.map(() => row.ordered), row.p50_ms, row.p99_ms, row.inputs_per_s, percent(row.accuracy, 1), row.software, row.machine, link(row.result, resultPath(row.result))]);
    board.replaceChildren(rows(["", "model", "load", "batch", ...extra, ...fixed, "software", "machine", "newest result"], lines, "leaderboard"));
    if (leaderboard.total > LIMIT) board.append(make("p", `The first ${LIMIT} of ${number(leaderboard.total)} rows.`, "quiet"));
  };
  search.addEventListener("input", () => show(0).catch(showError));
  task.addEventListener("change", () => Promise.all([show(0), rank()]).catch(showError));
  order.addEventListener("change", () => rank().catch(showError));
  await Promise.all([show(0), rank()]);
}

// --- one result -------------------------------------------------------------------------------------------------------

function percentileChart(requests, names) {
  const at = requests[0].percentiles.at;
  return sectionChart({ kind: "lines", title: "Latency by percentile", unit: "ms", over: "percentile (nearest rank)", at, log: [], labels: [],
    series: requests.map((times, index) => ({ name: names[index], values: times.percentiles.ms, low: [], high: [] })) });
}

function timeChart(requests, text) {
  return sectionChart({ kind: "points", title: "Latency over time", unit: "ms", over: "seconds since the first request was due", at: requests.due_ms.map((dueMs) => dueMs / 1000), log: [], labels: [],
    series: [{ name: text, values: requests.latency_ms, low: [], high: [] }] });
}

function batchChart(parts) {
  return sectionChart({ kind: "lines", title: "Throughput by batch size", unit: "inputs/s", over: "batch size", at: parts.map((part) => part.batch), log: ["at"], labels: [],
    series: [{ name: "inputs/s", values: parts.map((part) => part.inputs_per_s), low: [], high: [] }] });
}

async function resultPage(name) {
  const apiPath = "/api" + resultPath(name), evaluation = await ask(apiPath), agent = evaluation.agent;
  const links = make("p"), pagePath = resultPath(name);
  main.append(title(evaluation.name), facts([
    ["result", evaluation.result], ["identity", evaluation.identity], ["load", evaluation.kind], ["started", evaluation.started.replace("T", " ")],
    ["agent", `${agent.name}: ${agent.cpu}, ${agent.cores} cores${agent.gpus.length ? ", " + agent.gpus.join(", ") : ""}`],
    ["software", `Python ${agent.python}, ` + Object.entries(agent.packages).map((pair) => pair.join(" ")).join(", ")],
    ["threads", evaluation.threads], ["samples", `${number(evaluation.samples.count)} (outputs of ${number(evaluation.outputs.samples)} are stored)`], ["opening the model", `${number(evaluation.open_ms)} ms`],
  ]));
  if (evaluation.trace) links.append(link("open its trace", pagePath + "/report"), " · ");
  if (evaluation.advice) links.append(link("its advice", apiPath + "/advice"), " · ");
  if (evaluation.bound) links.append(link("its bound", apiPath + "/bound"), " · ");
  links.append(link("its manifest", apiPath + "/manifest"), " · ", link("new evaluation from it", "/new?from=" + encodeURIComponent(name)));
  main.append(links);
  if (!evaluation.trace) main.append(make("p", "No trace was requested.", "quiet"));
  for (const note of evaluation.notes || []) main.append(make("p", note, "warning"));
  if (evaluation.simulated) main.append(make("p", "The times were reported by a simulator.", "note"));
  const firstPart = evaluation.parts[0], tiles = make("div", null, "tiles");
  tiles.append(tile(`${ms(firstPart.p50_ms, firstPart)} ms`, `median latency, batch ${firstPart.batch}`), tile(`${ms(firstPart.p99_ms, firstPart)} ms`, `99th percentile of ${number(firstPart.requests)} requests`), tile(number(firstPart.inputs_per_s), "inputs per second"));
  for (const k of [1, 5]) {
    const share = percent(evaluation.accuracy, k);
    if (share !== null) tiles.append(tile(`${number(share)} %`, `top-${k} of ${number(evaluation.accuracy.samples)} samples, ${evaluation.accuracy[`top${k}_interval`].map((end) => number(100 * end)).join(" … ")}`));
  }
  main.append(tiles);
  if (evaluation.accuracy && evaluation.accuracy.error) main.append(make("p", `No accuracy: ${evaluation.accuracy.error}`, "warning"));
  const intervalText = (part, name) => (part.intervals_ms && part.intervals_ms[name] ? part.intervals_ms[name].map((end) => (end === null ? "?" : number(end))).join(" … ") : "–");
  main.append(rows(["batch", "requests", "p50 ms", "95 % interval", "p90 ms", "p99 ms", "trimmed mean ms", "inputs/s", "busy %", "load"],
    evaluation.parts.map((part) => [part.batch, part.requests, part.p50_ms, intervalText(part, "p50"), part.p90_ms, part.p99_ms, part.trimmed_mean_ms, part.inputs_per_s, part.utilisation === null ? null : 100 * part.utilisation,
      part.stopped || (part.late ? "the generator was late" : "as requested")]), "figures"));
  for (const part of evaluation.parts.filter((candidate) => candidate.rate_low !== undefined))
    main.append(make("p", `Highest rate within the limit, batch ${part.batch}: from ${number(part.rate_low)} to ${number(part.rate_high)} requests per second.`));
  const choice = make("select"), charts = make("div", null, "grid"), bar = make("div", null, "bar");
  choice.setAttribute("aria-label", "batch size");
  choice.append(...evaluation.parts.map((part) => option(part.batch, `batch ${part.batch}`)));
  if (evaluation.parts.length > 1) bar.append(choice);
  main.append(make("h2", "Requests"), bar, charts);
  const show = async () => {
    const requests = await ask(`${apiPath}/requests?batch=${choice.value}`);
    charts.replaceChildren(timeChart(requests, `batch ${choice.value}`), percentileChart([requests], [`batch ${choice.value}`]));
    if (evaluation.parts.length > 1) charts.append(batchChart(evaluation.parts));
    dropPlots();
    if (requests.total > requests.latency_ms.length) charts.append(make("p", `Over time: the first ${number(requests.latency_ms.length)} of ${number(requests.total)} requests; percentiles are of all requests.`, "quiet"));
  };
  choice.addEventListener("change", () => show().catch(showError));
  await show();
}

// --- several side by side ---------------------------------------------------------------------------------------------

async function comparisonPage() {
  const names = new URLSearchParams(location.search).getAll("name");
  main.append(title("Comparison"));
  const query = names.map((name) => "name=" + encodeURIComponent(name)).join("&");
  const comparisons = await ask("/api/compare?" + query), results = await Promise.all(names.map((name) => ask("/api" + resultPath(name))));
  const requests = await Promise.all(names.map((name) => ask(`/api${resultPath(name)}/requests?limit=1`)));
  const figures = [["p50_ms", "p50 ms"], ["p90_ms", "p90 ms"], ["p99_ms", "p99 ms"], ["trimmed_mean_ms", "trimmed mean ms"], ["inputs_per_s", "inputs/s"]];
  const hasRates = results.some((result) => result.parts.some((part) => part.rate_low !== undefined));
  const lines = results.flatMap((result) => result.parts.map((part) => {
    const before = results[0].parts.find((candidate) => candidate.batch === part.batch);
    const change = result !== results[0] && before && before.p50_ms ? signed((100 * part.p50_ms) / before.p50_ms - 100) + " %" : "";
    return [link(result.result, resultPath(result.result)), result.name, part.batch, ...figures.map(([name]) => part[name]), ...(hasRates ? [rateInterval(part)] : []), percent(result.accuracy, 1), change];
  }));
  main.append(make("p", `Each result is compared with the first, ${names[0]}.`, "quiet"), rows(["result", "name", "batch", ...figures.map(([, text]) => text), ...(hasRates ? ["requests/s"] : []), "top-1 %", "p50, change"], lines, "figures"));
  const charts = make("div", null, "grid"), seriesNames = results.map((result, index) => `${names[index]} ${result.name}, batch ${requests[index].batch}`);
  charts.append(percentileChart(requests, seriesNames));
  charts.firstChild.classList.add("wide");
  main.append(make("h2", "Latencies"), charts);
  for (const comparison of comparisons) {
    const verdict = make("p"), verdictText = make("b", comparison.verdict, comparison.verdict === "same" ? "same" : comparison.verdict === "different" ? "different" : "");
    verdict.append(verdictText, `; outputs: ${comparison.outputs}`);
    main.append(make("h2", `${comparison.before} and ${comparison.after}`), verdict, rows(["subject", "verdict", "why"], comparison.reasons.map((reason) => [reason.subject, reason.verdict, wrappedText(reason.text)]), "reasons"));
    const divergences = Object.entries(comparison.divergences);
    if (!comparison.equal_outputs && divergences.length) {
      const measures = Object.keys(divergences[0][1]);
      main.append(make("h3", "Outputs"), rows(["measure", ...divergences.map(([name]) => name)], measures.map((measure) => [measure.replaceAll("_", " "), ...divergences.map(([, values]) => values[measure] ?? null)]), "outputs"));
    }
    if (comparison.by_layer) main.append(...layerComparison(comparison));
    const differences = Object.entries(comparison.differing).map(([name, [before, after]]) => [name, wrappedText(before), wrappedText(after)]);
    main.append(make("h3", differences.length ? "What differs" : "Nothing differs in manifest, software and machine."));
    if (differences.length) main.append(rows(["", comparison.before, comparison.after], differences, "what differs"));
  }
}

// Comparison of both traces: its conclusion, and the layers whose time changed most.
function layerComparison(comparison) {
  const byLayer = comparison.by_layer, head = make("h3", "By layer");
  if (byLayer.error) return [head, make("p", byLayer.error, "warning")];
  const changed = byLayer.rows.filter((row) => row.section === "layer").sort((a, b) => Math.abs(b.change_ms || 0) - Math.abs(a.change_ms || 0));
  const lines = changed.slice(0, LIMIT).map((row) => [row.name, row.a_ms, row.b_ms, row.change_percent === null ? null : signed(row.change_percent) + " %", row.verdict || ""]);
  const remainder = changed.length > LIMIT ? [make("p", `and ${number(changed.length - LIMIT)} more, with smaller changes`, "quiet")] : [];
  return [head, ...byLayer.conclusion.map((line) => make("p", line)), ...(lines.length ? [rows(["layer", comparison.before + " ms", comparison.after + " ms", "change", "verdict"], lines, "layers")] : []), ...remainder];
}

function wrappedText(text) {
  const box = make("span", text === null ? "–" : text);
  box.style.whiteSpace = "normal";
  return box;
}
