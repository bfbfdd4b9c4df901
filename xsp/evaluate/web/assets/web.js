"use strict";
// Shared by all pages: requests to the server, tables with links, errors. Results enter a page as text, never as HTML.
const timeline = { redraw() {} };
const main = byId("main");

async function ask(path, options) {
  const response = await fetch(path, options), text = await response.text();
  let reply = null;
  try { reply = JSON.parse(text); } catch { reply = { error: text.trim() }; }
  if (!response.ok) throw new Error(reply.error || `the server answered ${response.status}`);
  return reply;
}

function send(path, body) {
  return ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

function link(text, href, className) {
  const anchor = make("a", text, className);
  anchor.href = href;
  return anchor;
}

function resultPath(name) { return "/evaluations/" + encodeURIComponent(name); }

function button(text, className, action) {
  const element = make("button", text, className);
  element.type = "button";
  element.addEventListener("click", action);
  return element;
}

function title(text) {
  document.title = `${text} · xsp evaluate`;
  return make("h1", text);
}

// Cells are text, numbers or elements; columns with a number in any line are right-aligned.
function rows(columns, lines, label) {
  const holder = make("div", null, "list"), table = make("table"), head = make("thead"), headRow = make("tr"), body = make("tbody");
  const right = columns.map((_, index) => lines.some((line) => typeof line[index] === "number" || /^[\d.,?]+( to [\d.,?]+)?( \*)?$/.test(line[index])));
  table.setAttribute("aria-label", label);
  columns.forEach((column, index) => {
    const cell = make("th", column, right[index] ? "number" : "");
    cell.scope = "col";
    headRow.append(cell);
  });
  for (const line of lines) {
    const row = make("tr");
    line.forEach((cell, index) => {
      const box = make("td", null, right[index] ? "number" : "");
      if (cell instanceof Node) box.append(cell);
      else {
        box.textContent = number(cell);
        if (typeof cell === "string") box.title = cell;
      }
      row.append(box);
    });
    body.append(row);
  }
  head.append(headRow);
  table.append(head, body);
  holder.append(table);
  return holder;
}

function facts(pairs) {
  const list = make("dl");
  list.id = "facts";
  for (const [name, value] of pairs) if (value !== null && value !== undefined && value !== "") {
    const box = make("dd");
    if (value instanceof Node) box.append(value);
    else box.textContent = number(value);
    list.append(make("dt", name), box);
  }
  return list;
}

function tile(value, text) {
  const box = make("div", null, "tile");
  box.append(make("b", value), make("span", text, "quiet"));
  return box;
}

function pager(total, offset, limit, goTo) {
  const bar = make("div", null, "bar");
  const newer = button("newer", "other", () => goTo(Math.max(0, offset - limit))), older = button("older", "other", () => goTo(offset + limit));
  newer.disabled = offset === 0;
  older.disabled = offset + limit >= total;
  bar.append(make("span", total ? `${number(offset + 1)} to ${number(Math.min(total, offset + limit))} of ${number(total)}` : "none", "quiet"));
  if (total > limit) bar.append(newer, older);
  return bar;
}

function showError(error) { main.append(make("p", error.message, "error")); }
