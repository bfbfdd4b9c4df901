"use strict";
// Sortable tables with a filter. A table is created when it is first opened, so thousands of rows cost nothing before.

const UNITS = { ms: "ms", us: "µs", ns: "ns", mib: "MiB", bytes: "bytes", percent: "%" };
const OPEN = ["A1"];

function heading(column) {
  const [, rate, per] = column.match(/^(.+)_per_(.+)$/) || [];
  if (rate) return [rate === "gflop" ? "GFLOP" : rate.replaceAll("_", " "), "/ " + per.replaceAll("_", " ")];
  const [, name, unit] = column.match(/^(.+)_(ms|us|ns|mib|bytes|percent)$/) || [null, column, null];
  return [name.replaceAll("_", " "), unit && UNITS[unit]];
}

// Compares rows by a column; missing values come last.
function order(column, direction) {
  return ({ [column]: a }, { [column]: b }) => (a === null) - (b === null) || direction * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
}

class Grid {
  constructor(content) {
    this.rows = content.rows.slice();
    this.numeric = content.columns.map((_, place) => content.rows.some((row) => typeof row[place] === "number"));
    this.sorted = [-1, 1];
    [this.search, this.count, this.head, this.body] = [make("input"), make("output", null, "quiet"), make("tr"), make("tbody")];
    this.search.type = "search";
    this.search.placeholder = "filter";
    this.search.setAttribute("aria-label", `filter ${content.id} ${content.title}`);
    this.search.addEventListener("input", () => this.fill());
    content.columns.forEach((column, place) => this.head.append(this.title(column, place)));
    this.fill();
  }

  title(column, place) {
    const cell = make("th", null, this.numeric[place] ? "number" : ""), [name, unit] = heading(column), button = make("button", name);
    cell.scope = "col";
    cell.dataset.column = column;
    button.type = "button";
    if (unit) button.append(make("span", " " + unit, "unit"));
    button.addEventListener("click", () => this.sort(place, cell));
    cell.append(button);
    return cell;
  }

  sort(place, cell) {
    this.sorted = [place, this.sorted[0] === place ? -this.sorted[1] : this.numeric[place] ? -1 : 1];
    this.rows.sort(order(...this.sorted));
    this.head.querySelectorAll("th").forEach((header) => header.removeAttribute("aria-sort"));
    cell.setAttribute("aria-sort", this.sorted[1] > 0 ? "ascending" : "descending");
    this.fill();
  }

  fill() {
    const query = this.search.value.toLowerCase(), total = this.rows.length;
    const isMatch = (row) => row.some((cell) => cell !== null && String(cell).toLowerCase().includes(query));
    const rows = query ? this.rows.filter(isMatch) : this.rows;
    this.count.textContent = query ? `${number(rows.length)} of ${number(total)} rows` : `${number(total)} row${total === 1 ? "" : "s"}`;
    this.body.replaceChildren(...rows.map((row) => this.line(row)));
  }

  line(row) {
    const line = make("tr");
    row.forEach((cell, place) => {
      const box = make("td", number(cell), this.numeric[place] ? "number" : "name");
      if (!this.numeric[place] && cell !== null) box.title = cell;
      line.append(box);
    });
    return line;
  }

  element(label) {
    const holder = make("div", null, "scroll"), table = make("table"), top = make("thead");
    holder.tabIndex = 0;
    holder.setAttribute("role", "region");
    holder.setAttribute("aria-label", label);
    top.append(this.head);
    table.append(top, this.body);
    holder.append(table);
    return holder;
  }
}

function tableOf(table) {
  const container = make("div", null, "inside"), bar = make("div", null, "bar"), grid = new Grid(table);
  bar.append(grid.search, grid.count);
  container.append(make("p", table.about.replaceAll("`", ""), "quiet"), bar, grid.element(`${table.id} ${table.title}`));
  if (table.total > table.rows.length) {
    const hint = make("p", `${number(table.total - table.rows.length)} of ${number(table.total)} rows are not shown; these are ${table.chosen.replaceAll("_", " ")}. All of them: `, "quiet");
    hint.append(make("code", table.command));
    container.append(hint);
  }
  if (table.empty.length) container.append(make("p", "not measured in this trace: " + table.empty.join(", ").replaceAll("_", " "), "quiet"));
  return container;
}

// The element for a table: operators come first if the trace has their time on a GPU.
function homeOf(table) {
  if (table.id === "ops" && table.columns.includes("device_ms")) return document.querySelector("#operators .holder");
  return document.querySelector(table.id.startsWith("ledger") ? "#ledger .holder" : "#tables .holder");
}

function drawTables() {
  for (const holder of document.querySelectorAll(".holder")) holder.replaceChildren();
  for (const table of data.tables) {
    const details = make("details"), summary = make("summary", table.title);
    details.id = "table-" + table.id;
    const container = homeOf(table), isOperators = container.parentNode.id === "operators";
    details.open = OPEN.includes(table.id) || table.id === "ledger" || isOperators;
    summary.append(make("span", ` ${table.id}, ${number(table.total)} row${table.total === 1 ? "" : "s"}`, "quiet"));
    details.append(summary);
    const build = () => { if (details.open && !details.querySelector(".inside")) details.append(tableOf(table)); };
    details.addEventListener("toggle", build);
    build();
    container.append(details);
  }
  const operators = document.querySelector("#operators");
  operators.hidden = !operators.querySelector("details");
  document.querySelector('nav a[href="#operators"]').hidden = operators.hidden;
}
