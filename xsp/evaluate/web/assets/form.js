"use strict";
// A new evaluation: fields from the JSON Schema of manifests, or YAML; the list of jobs; the progress of a job.

const FIELDS = {
  model: ["source", "name", "task", "seed", "precision", "sequence"],
  scenario: ["kind", "requests", "warmup", "batch", "batches", "rate", "latency_ms", "percentile", "streams", "seed"],
  dataset: ["source", "samples", "seed"],
  software: ["threads"],
};
const HINTS = {
  "model.source": "torchvision:NAME, timm:NAME, transformers:NAME or micro:NAME; weights come from the seed", "model.name": "if empty: the name in the source",
  "model.task": "for example image-classification; the leaderboard can be limited to a task", "scenario.batches": "for batched and offline, for example 1, 2, 4", "scenario.rate": "requests per second, for poisson, constant, server and burst",
  "scenario.latency_ms": "for max-rate: the limit of the latency", "scenario.percentile": "for max-rate: the percentile of the latency that must stay within the limit",
  "scenario.warmup": "requests before the first one that counts", "dataset.source": "synthetic: values in the shapes of the model's inputs; with preprocessing steps (YAML): synthetic:images, synthetic:classes or synthetic:text", "software.threads": "if empty: PyTorch's default",
};
const USUAL = { "model.source": "micro:depth-1", "scenario.requests": "50" };
const FIRST = { "model.source": true };

// Follows a reference, and takes what is not null of a choice.
function schemaOf(schema, found) {
  if (found.$ref) return { ...schemaOf(schema, schema.$defs[found.$ref.split("/").pop()]), ...found, $ref: undefined };
  const some = (found.anyOf || []).filter((each) => each.type !== "null");
  return some.length === 1 ? { ...schemaOf(schema, some[0]), default: found.default } : found;
}

function field(section, name, about) {
  const place = `${section}.${name}`, row = make("div", null, "field"), label = make("label", name), simple = about.type === "integer" || about.type === "number";
  const input = make(about.enum ? "select" : "input");
  input.id = input.name = place;
  label.htmlFor = place;
  if (about.enum) input.append(...about.enum.map((each) => option(each, each)));
  else if (simple) {
    Object.assign(input, { type: "number", step: about.type === "integer" ? "1" : "any" });
    if (about.minimum !== undefined) input.min = about.minimum;
    if (about.maximum !== undefined) input.max = about.maximum;
  } else Object.assign(input, { type: "text", maxLength: about.maxLength || 1000, autocomplete: "off" });
  if (about.enum) input.value = about.default;
  else if (about.default !== null && about.default !== undefined && !Array.isArray(about.default)) input.placeholder = String(about.default);
  if (USUAL[place]) input.value = USUAL[place];
  if (FIRST[place]) { input.required = true; label.append(make("span", " *", "required")); }
  row.append(label, input);
  if (HINTS[place]) row.append(make("span", HINTS[place], "hint"));
  return [row, () => {
    const text = input.value.trim();
    if (text === "") return undefined;
    if (simple) return Number(text);
    if (about.type !== "array") return text;
    return text.split(/[\s,]+/).filter((each) => each).map((each) => (["integer", "number"].includes((about.items || {}).type) ? Number(each) : each));
  }];
}

async function creation() {
  const schema = await ask("/api/schema"), form = make("form", null, "fields"), readers = [], yaml = make("textarea"), said = make("div"), bar = make("div", null, "bar");
  form.id = "form";
  for (const [section, names] of Object.entries(FIELDS)) {
    const about = schemaOf(schema, schema.properties[section]), set = make("fieldset");
    set.append(make("legend", section));
    for (const name of names.filter((each) => about.properties[each])) {
      const [row, read] = field(section, name, schemaOf(schema, about.properties[name]));
      set.append(row);
      readers.push([section, name, read]);
    }
    form.append(set);
  }
  yaml.id = "yaml";
  yaml.hidden = true;
  yaml.spellcheck = false;
  yaml.setAttribute("aria-label", "manifest as YAML");
  const trace = make("select"), agent = make("select"), bound = make("input"), asked = make("div", null, "bar"), boxed = make("label");
  trace.id = "trace";
  trace.setAttribute("aria-label", "trace");
  trace.append(option("", "no trace"), option("M", "trace of the model (M)"), option("M/L", "trace with layers (M/L)"), option("M/L/G", "trace with operators and kernels (M/L/G)"));
  bound.type = "checkbox";
  boxed.append(bound, " compute the bound");
  const there = (await ask("/api/agents")).map((each) => each.name);
  agent.id = "agent";
  agent.setAttribute("aria-label", "agent");
  agent.append(option("", "any agent that satisfies it"), ...there.map((each) => option(each, "by " + each)));
  agent.hidden = there.length < 2;
  asked.append(trace, agent, boxed);
  const body = () => {
    if (!yaml.hidden) return { yaml: yaml.value };
    const made = {};
    for (const [section, name, read] of readers) {
      const value = read();
      if (value !== undefined) (made[section] ||= {})[name] = value;
    }
    made.model ||= {};
    if (!made.model.name && made.model.source) made.model.name = made.model.source.replace(/^[a-z]+:/, "");
    return { manifest: made };
  };
  const guarded = (act) => async () => {
    said.replaceChildren();
    if (yaml.hidden && !form.reportValidity()) return;
    try { await act(); } catch (error) { said.replaceChildren(make("p", error.message, "error")); }
  };
  const check = guarded(async () => {
    const found = await send("/api/check", body());
    said.append(make("p", found.refused.length || !found.agents.length ? "It cannot be evaluated here." : `It can be evaluated by ${found.agents.join(", ")}. Identity ${found.identity.slice(0, 12)}.`, found.refused.length || !found.agents.length ? "error" : "good"));
    for (const why of [...found.refused, ...Object.entries(found.reasons).map(([name, all]) => `${name}: ${all.join("; ")}`)]) said.append(make("p", why, "error"));
    for (const note of found.notes) said.append(make("p", note, "note"));
  });
  const start = guarded(async () => {
    const job = await send("/api/jobs", { ...body(), trace: trace.value, agent: agent.value, bound: bound.checked });
    location.href = "/jobs/" + job.id;
  });
  const other = button("edit as YAML", "other", guarded(async () => {
    if (yaml.hidden) yaml.value = (await send("/api/check", body())).yaml;
    yaml.hidden = !yaml.hidden;
    form.hidden = !yaml.hidden;
    other.textContent = yaml.hidden ? "edit as YAML" : "back to the form";
  }));
  const run = button("evaluate", "do", start);
  run.id = "evaluate";
  bar.append(run, button("check", "other", check), other);
  form.addEventListener("submit", (event) => { event.preventDefault(); start(); });
  main.append(title("New evaluation"), make("p", "Empty fields have their default, shown in grey. As YAML, manifests of MLModelScope and DLSpec are accepted too. Models have weights from a seed, and data are synthetic; for files and programs use xsp evaluate run on the command line.", "quiet"), form, yaml, asked, bar, said);
  const from = new URLSearchParams(location.search).get("from");
  if (from) {
    const answer = await fetch(`/api${ofResult(from)}/manifest`);
    if (answer.ok) [yaml.value, yaml.hidden, form.hidden, other.textContent] = [await answer.text(), false, true, "back to the form"];
  }
}

// --- jobs -------------------------------------------------------------------------------------------------------------

async function asked() {
  const found = await ask("/api/jobs");
  main.append(title("Jobs"));
  if (!found.length) return main.append(make("p", "No evaluation was requested since the server started."));
  return main.append(rows(["", "name", "state", "agent", "result"], found.map((each) => [link("progress", "/jobs/" + each.id), each.name, each.state, each.agent, each.result ? link(each.result, ofResult(each.result)) : each.error || ""]), "jobs"));
}

async function watch(id) {
  const bar = make("progress"), state = make("p"), said = make("div"), stop = button("cancel", "other", () => ask("/api/jobs/" + id, { method: "DELETE" }).catch(failed));
  const job = await ask("/api/jobs/" + encodeURIComponent(id));
  state.id = "state";
  state.setAttribute("role", "status");
  bar.setAttribute("aria-label", "progress");
  main.append(title(job.name), facts([["identity", job.identity], ["agent", job.agent]]), state, bar, said, stop);
  const show = (now) => {
    const over = ["done", "failed", "cancelled"].includes(now.state);
    state.textContent = now.state + (over ? "" : now.of ? `: ${now.what}, ${number(now.done)} of ${number(now.of)}` : "");
    if (over) bar.value = now.state === "done" ? 1 : 0;
    else if (now.of) [bar.max, bar.value] = [now.of, now.done];
    if (over) [stop.hidden, bar.max] = [true, 1];
    if (now.error) said.replaceChildren(make("p", now.error, "error"));
    if (now.result) {
      const done = link("result", ofResult(now.result));
      done.id = "result";
      said.replaceChildren(done);
    }
    return over;
  };
  if (show(job)) return;
  const events = new EventSource(`/api/jobs/${encodeURIComponent(id)}/events`);
  events.onmessage = ({ data: text }) => { if (show(JSON.parse(text))) events.close(); };
}

// --- which page -------------------------------------------------------------------------------------------------------

const [, where, which] = location.pathname.split("/").map(decodeURIComponent);
const shown = { "": home, new: creation, compare: comparison, evaluations: () => result(which), jobs: () => (which ? watch(which) : asked()) };
shown[where]().catch(failed);
