"use strict";
// Tables that sort and filter. One is made when it is first opened: thousands of rows cost nothing until somebody looks.

const UNITS = { ms: "ms", us: "µs", ns: "ns", mib: "MiB", bytes: "bytes", percent: "%" };
const OPEN = ["A1"];

function heading(column) {
  const [, rate, per] = column.match(/^(.+)_per_(.+)$/) || [];
  if (rate) return [rate === "gflop" ? "GFLOP" : rate.replaceAll("_", " "), "/ " + per.replaceAll("_", " ")];
  const [, name, unit] = column.match(/^(.+)_(ms|us|ns|mib|bytes|percent)$/) || [null, column, null];
  return [name.replaceAll("_", " "), unit && UNITS[unit]];
}

// Sorts rows by a column, what is missing last.
function order(place, way) {
  return ({ [place]: a }, { [place]: b }) => (a === null) - (b === null) || way * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
}

class Grid {
  constructor(found) {
    this.rows = found.rows.slice();
    this.numeric = found.columns.map((_, place) => found.rows.some((row) => typeof row[place] === "number"));
    this.sorted = [-1, 1];
    [this.search, this.count, this.head, this.body] = [make("input"), make("output", null, "quiet"), make("tr"), make("tbody")];
    this.search.type = "search";
    this.search.placeholder = "filter";
    this.search.setAttribute("aria-label", `filter ${found.id} ${found.title}`);
    this.search.addEventListener("input", () => this.fill());
    found.columns.forEach((column, place) => this.head.append(this.title(column, place)));
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
    this.head.querySelectorAll("th").forEach((each) => each.removeAttribute("aria-sort"));
    cell.setAttribute("aria-sort", this.sorted[1] > 0 ? "ascending" : "descending");
    this.fill();
  }

  fill() {
    const wanted = this.search.value.toLowerCase(), all = this.rows.length;
    const says = (row) => row.some((cell) => cell !== null && String(cell).toLowerCase().includes(wanted));
    const kept = wanted ? this.rows.filter(says) : this.rows;
    this.count.textContent = wanted ? `${number(kept.length)} of ${number(all)} rows` : `${number(all)} row${all === 1 ? "" : "s"}`;
    this.body.replaceChildren(...kept.map((row) => this.line(row)));
  }

  line(row) {
    const made = make("tr");
    row.forEach((cell, place) => {
      const box = make("td", number(cell), this.numeric[place] ? "number" : "name");
      if (!this.numeric[place] && cell !== null) box.title = cell;
      made.append(box);
    });
    return made;
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

function tableOf(found) {
  const whole = make("div", null, "inside"), bar = make("div", null, "bar"), grid = new Grid(found);
  bar.append(grid.search, grid.count);
  whole.append(make("p", found.about.replaceAll("`", ""), "quiet"), bar, grid.element(`${found.id} ${found.title}`));
  if (found.total > found.rows.length) {
    const more = make("p", `${number(found.total - found.rows.length)} of ${number(found.total)} rows are not shown; these are ${found.chosen.replaceAll("_", " ")}. All of them: `, "quiet");
    more.append(make("code", found.command));
    whole.append(more);
  }
  if (found.empty.length) whole.append(make("p", "not measured in this trace: " + found.empty.join(", ").replaceAll("_", " "), "quiet"));
  return whole;
}

// Where a table stands: operators come first where a GPU took their time.
function homeOf(found) {
  if (found.id === "ops" && found.columns.includes("device_ms")) return document.querySelector("#operators .holder");
  return document.querySelector(found.id.startsWith("ledger") ? "#ledger .holder" : "#tables .holder");
}

function drawTables() {
  for (const holder of document.querySelectorAll(".holder")) holder.replaceChildren();
  for (const found of data.tables) {
    const details = make("details"), summary = make("summary", found.title);
    details.id = "table-" + found.id;
    const home = homeOf(found), first = home.parentNode.id === "operators";
    details.open = OPEN.includes(found.id) || found.id === "ledger" || first;
    summary.append(make("span", ` ${found.id}, ${number(found.total)} row${found.total === 1 ? "" : "s"}`, "quiet"));
    details.append(summary);
    const build = () => { if (details.open && !details.querySelector(".inside")) details.append(tableOf(found)); };
    details.addEventListener("toggle", build);
    build();
    home.append(details);
  }
  const operators = document.querySelector("#operators");
  operators.hidden = !operators.querySelector("details");
  document.querySelector('nav a[href="#operators"]').hidden = operators.hidden;
}
