"use strict";
// A new evaluation: fields from the JSON Schema of manifests, or YAML; the list of jobs; the progress of a job.

const FIELDS = {
  model: ["source", "name", "task", "seed", "precision", "sequence"],
  scenario: ["kind", "requests", "warmup", "batch", "batches", "rate", "latency_ms", "percentile", "streams", "seed"],
  dataset: ["source", "samples", "seed"],
  software: ["threads"],
  hardware: ["gpu", "cores"],
};
const HINTS = {
  "model.source": "torchvision:NAME, timm:NAME, transformers:NAME or micro:NAME; weights come from the seed", "model.name": "if empty: the name in the source",
  "model.task": "for example image-classification; the leaderboard can be limited to a task", "scenario.batches": "for batched and offline, for example 1, 2, 4", "scenario.rate": "requests per second, for poisson, constant, server and burst",
  "scenario.latency_ms": "for max-rate: the limit of the latency", "scenario.percentile": "for max-rate: the percentile of the latency that must stay within the limit",
  "scenario.warmup": "requests before the first one that counts", "dataset.source": "synthetic: values in the shapes of the model's inputs; with preprocessing steps (YAML): synthetic:images, synthetic:classes or synthetic:text", "software.threads": "if empty: PyTorch's default",
  "hardware.gpu": "any, or part of a device's name such as H200; if empty: the processor", "hardware.cores": "cores that the machine must have",
};
const PRESETS = { "model.source": "micro:depth-1", "scenario.requests": "50" };
const REQUIRED = { "model.source": true };

// Resolves a reference, and a choice between one type and null.
function schemaOf(schema, part) {
  if (part.$ref) return { ...schemaOf(schema, schema.$defs[part.$ref.split("/").pop()]), ...part, $ref: undefined };
  const choices = (part.anyOf || []).filter((choice) => choice.type !== "null");
  return choices.length === 1 ? { ...schemaOf(schema, choices[0]), default: part.default } : part;
}

function field(section, name, fieldSchema) {
  const path = `${section}.${name}`, row = make("div", null, "field"), label = make("label", name), isNumber = fieldSchema.type === "integer" || fieldSchema.type === "number";
  const input = make(fieldSchema.enum ? "select" : "input");
  input.id = input.name = path;
  label.htmlFor = path;
  if (fieldSchema.enum) input.append(...fieldSchema.enum.map((value) => option(value, value)));
  else if (isNumber) {
    Object.assign(input, { type: "number", step: fieldSchema.type === "integer" ? "1" : "any" });
    if (fieldSchema.minimum !== undefined) input.min = fieldSchema.minimum;
    if (fieldSchema.maximum !== undefined) input.max = fieldSchema.maximum;
  } else Object.assign(input, { type: "text", maxLength: fieldSchema.maxLength || 1000, autocomplete: "off" });
  if (fieldSchema.enum) input.value = fieldSchema.default;
  else if (fieldSchema.default !== null && fieldSchema.default !== undefined && !Array.isArray(fieldSchema.default)) input.placeholder = String(fieldSchema.default);
  if (PRESETS[path]) input.value = PRESETS[path];
  if (REQUIRED[path]) { input.required = true; label.append(make("span", " *", "required")); }
  row.append(label, input);
  if (HINTS[path]) row.append(make("span", HINTS[path], "hint"));
  return [row, () => {
    const text = input.value.trim();
    if (text === "") return undefined;
    if (isNumber) return Number(text);
    if (fieldSchema.type !== "array") return text;
    return text.split(/[\s,]+/).filter((word) => word).map((word) => (["integer", "number"].includes((fieldSchema.items || {}).type) ? Number(word) : word));
  }];
}

async function formPage() {
  const schema = await ask("/api/schema"), form = make("form", null, "fields"), readers = [], yaml = make("textarea"), messages = make("div"), bar = make("div", null, "bar");
  form.id = "form";
  for (const [section, names] of Object.entries(FIELDS)) {
    const sectionSchema = schemaOf(schema, schema.properties[section]), fieldset = make("fieldset");
    fieldset.append(make("legend", section));
    for (const name of names.filter((candidate) => sectionSchema.properties[candidate])) {
      const [row, read] = field(section, name, schemaOf(schema, sectionSchema.properties[name]));
      fieldset.append(row);
      readers.push([section, name, read]);
    }
    form.append(fieldset);
  }
  yaml.id = "yaml";
  yaml.hidden = true;
  yaml.spellcheck = false;
  yaml.setAttribute("aria-label", "manifest as YAML");
  const trace = make("select"), agent = make("select"), bound = make("input"), choices = make("div", null, "bar"), boundLabel = make("label");
  trace.id = "trace";
  trace.setAttribute("aria-label", "trace");
  trace.append(option("", "no trace"), option("M", "trace of the model (M)"), option("M/L", "trace with layers (M/L)"), option("M/L/G", "trace with operators and kernels (M/L/G)"));
  bound.type = "checkbox";
  boundLabel.append(bound, " compute the bound");
  const agentNames = (await ask("/api/agents")).map((facts) => facts.name);
  agent.id = "agent";
  agent.setAttribute("aria-label", "agent");
  agent.append(option("", "any agent that satisfies it"), ...agentNames.map((name) => option(name, "by " + name)));
  agent.hidden = agentNames.length < 2;
  choices.append(trace, agent, boundLabel);
  const body = () => {
    if (!yaml.hidden) return { yaml: yaml.value };
    const manifest = {};
    for (const [section, name, read] of readers) {
      const value = read();
      if (value !== undefined) (manifest[section] ||= {})[name] = value;
    }
    manifest.model ||= {};
    if (!manifest.model.name && manifest.model.source) manifest.model.name = manifest.model.source.replace(/^[a-z]+:/, "");
    return { manifest };
  };
  const reportingErrors = (action) => async () => {
    messages.replaceChildren();
    if (yaml.hidden && !form.reportValidity()) return;
    try { await action(); } catch (error) { messages.replaceChildren(make("p", error.message, "error")); }
  };
  const check = reportingErrors(async () => {
    const report = await send("/api/check", body());
    messages.append(make("p", report.refused.length || !report.agents.length ? "It cannot be evaluated here." : `It can be evaluated by ${report.agents.join(", ")}. Identity ${report.identity.slice(0, 12)}.`, report.refused.length || !report.agents.length ? "error" : "good"));
    for (const reason of [...report.refused, ...Object.entries(report.reasons).map(([name, misses]) => `${name}: ${misses.join("; ")}`)]) messages.append(make("p", reason, "error"));
    for (const note of report.notes) messages.append(make("p", note, "note"));
  });
  const start = reportingErrors(async () => {
    const job = await send("/api/jobs", { ...body(), trace: trace.value, agent: agent.value, bound: bound.checked });
    location.href = "/jobs/" + job.id;
  });
  const toggle = button("edit as YAML", "other", reportingErrors(async () => {
    if (yaml.hidden) yaml.value = (await send("/api/check", { ...body(), opens: false })).yaml;
    yaml.hidden = !yaml.hidden;
    form.hidden = !yaml.hidden;
    toggle.textContent = yaml.hidden ? "edit as YAML" : "back to the form";
  }));
  const run = button("evaluate", "do", start);
  run.id = "evaluate";
  bar.append(run, button("check", "other", check), toggle);
  form.addEventListener("submit", (event) => { event.preventDefault(); start(); });
  main.append(title("New evaluation"), make("p", "Empty fields have their default, shown in grey. As YAML, manifests of MLModelScope and DLSpec are accepted too. Models have weights from a seed, and data are synthetic; for files and programs use xsp evaluate run on the command line.", "quiet"), form, yaml, choices, bar, messages);
  const from = new URLSearchParams(location.search).get("from");
  if (from) {
    const response = await fetch(`/api${resultPath(from)}/manifest`);
    if (response.ok) [yaml.value, yaml.hidden, form.hidden, toggle.textContent] = [await response.text(), false, true, "back to the form"];
  }
}

// --- jobs -------------------------------------------------------------------------------------------------------------

async function jobsPage() {
  const jobs = await ask("/api/jobs");
  main.append(title("Jobs"));
  if (!jobs.length) return main.append(make("p", "No evaluation was requested since the server started."));
  return main.append(rows(["", "name", "state", "agent", "result"], jobs.map((job) => [link("progress", "/jobs/" + job.id), job.name, job.state, job.agent, job.result ? link(job.result, resultPath(job.result)) : job.error || ""]), "jobs"));
}

async function jobPage(id) {
  const bar = make("progress"), state = make("p"), outcome = make("div"), stop = button("cancel", "other", () => ask("/api/jobs/" + id, { method: "DELETE" }).catch(showError));
  const job = await ask("/api/jobs/" + encodeURIComponent(id));
  state.id = "state";
  state.setAttribute("role", "status");
  bar.setAttribute("aria-label", "progress");
  main.append(title(job.name), facts([["identity", job.identity], ["agent", job.agent]]), state, bar, outcome, stop);
  const show = (snapshot) => {
    const hasEnded = ["done", "failed", "cancelled"].includes(snapshot.state);
    state.textContent = snapshot.state + (hasEnded ? "" : snapshot.of ? `: ${snapshot.what}, ${number(snapshot.done)} of ${number(snapshot.of)}` : "");
    if (hasEnded) bar.value = snapshot.state === "done" ? 1 : 0;
    else if (snapshot.of) [bar.max, bar.value] = [snapshot.of, snapshot.done];
    if (hasEnded) [stop.hidden, bar.max] = [true, 1];
    if (snapshot.error) outcome.replaceChildren(make("p", snapshot.error, "error"));
    if (snapshot.result) {
      const resultLink = link("result", resultPath(snapshot.result));
      resultLink.id = "result";
      outcome.replaceChildren(resultLink);
    }
    return hasEnded;
  };
  if (show(job)) return;
  const events = new EventSource(`/api/jobs/${encodeURIComponent(id)}/events`);
  events.onmessage = ({ data: text }) => { if (show(JSON.parse(text))) events.close(); };
}

// --- the page ---------------------------------------------------------------------------------------------------------

const [, pageName, itemName] = location.pathname.split("/").map(decodeURIComponent);
const builders = { "": homePage, new: formPage, compare: comparisonPage, evaluations: () => resultPage(itemName), jobs: () => (itemName ? jobPage(itemName) : jobsPage()) };
builders[pageName]().catch(showError);
