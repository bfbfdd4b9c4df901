"use strict";
// What all pages need: asking the server, tables with links, errors. Text of results reaches a page as text only.
const timeline = { redraw() {} };
const main = byId("main");

async function ask(path, options) {
  const answer = await fetch(path, options), text = await answer.text();
  let said = null;
  try { said = JSON.parse(text); } catch { said = { error: text.trim() }; }
  if (!answer.ok) throw new Error(said.error || `the server answered ${answer.status}`);
  return said;
}

function send(path, body) {
  return ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

function link(text, href, className) {
  const made = make("a", text, className);
  made.href = href;
  return made;
}

function ofResult(name) { return "/evaluations/" + encodeURIComponent(name); }

function button(text, className, act) {
  const made = make("button", text, className);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

function title(text) {
  document.title = `${text} · xsp evaluate`;
  return make("h1", text);
}

// Cells are text, numbers or elements; columns that hold a number somewhere are to the right.
function rows(columns, lines, label) {
  const holder = make("div", null, "list"), table = make("table"), head = make("thead"), top = make("tr"), body = make("tbody");
  const right = columns.map((_, place) => lines.some((line) => typeof line[place] === "number" || /^[\d.,?]+( to [\d.,?]+)?( \*)?$/.test(line[place])));
  table.setAttribute("aria-label", label);
  columns.forEach((column, place) => {
    const cell = make("th", column, right[place] ? "number" : "");
    cell.scope = "col";
    top.append(cell);
  });
  for (const line of lines) {
    const row = make("tr");
    line.forEach((cell, place) => {
      const box = make("td", null, right[place] ? "number" : "");
      if (cell instanceof Node) box.append(cell);
      else {
        box.textContent = number(cell);
        if (typeof cell === "string") box.title = cell;
      }
      row.append(box);
    });
    body.append(row);
  }
  head.append(top);
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
  const made = make("div", null, "tile");
  made.append(make("b", value), make("span", text, "quiet"));
  return made;
}

function pages(total, offset, limit, go) {
  const bar = make("div", null, "bar");
  const before = button("newer", "other", () => go(Math.max(0, offset - limit))), after = button("older", "other", () => go(offset + limit));
  before.disabled = offset === 0;
  after.disabled = offset + limit >= total;
  bar.append(make("span", total ? `${number(offset + 1)} to ${number(Math.min(total, offset + limit))} of ${number(total)}` : "none", "quiet"));
  if (total > limit) bar.append(before, after);
  return bar;
}

function failed(error) { main.append(make("p", error.message, "error")); }
