"use strict";
// Drawing of the timeline: lanes of spans on a canvas as high as its visible part. Spans narrower than two pixels are
// merged into boxes two pixels wide, as dark as they are full, so the cost of a frame depends on the screen and not on
// the size of the trace.

const LEVELS = {
  10: ["program", "#c9cfda", "program"], 20: ["model", "#8db7f2", "model"], 30: ["layer", "#86d0a3", "layers"],
  40: ["operator", "#f4c27a", "operators"], 50: ["library", "#c8abef", "libraries"],
  60: ["runtime", "#aeb8c6", "runtime"], 70: ["kernel", "#f29cab", "kernels"],
};
// Device work and waiting have separate colours; matrix products, convolutions and attention share one.
const WORKS = {
  "matrix kernel": "#e8798f", communication: "#8f9bf5", copy: "#62c4cc", sync: "#d9a08f", overhead: "#ef6f6f",
};
const MATRIX = ["gemm", "convolution", "attention"];
const BIN = 2, LETTER = 6.2, MOST_ARROWS = 40, MATCH_WIDTH = 4, FADED_ALPHA = 0.12;

function levelName(level) { return (LEVELS[level] || ["level " + level])[0]; }
// The levels of a lane in words: `layers`, `layers, operators`, `layers to libraries`.
function levelWords(levels) {
  const words = levels.map((level) => (LEVELS[level] || [null, null, "level " + level])[2]);
  return words.length > 2 ? `${words[0]} to ${words[words.length - 1]}` : words.join(", ");
}

function levelColour(level) { return (LEVELS[level] || [null, "#c9cfda"])[1]; }
function shade(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

// Ruler marks at steps of 1, 2 or 5, in the unit that gives short numbers.
function ticks(from, to, room) {
  const smallestStep = (to - from) / Math.max(1, room / 110);
  const magnitude = Math.pow(10, Math.floor(Math.log10(smallestStep)));
  const step = [1, 2, 5, 10].map((factor) => factor * magnitude).find((candidate) => candidate >= smallestStep);
  const size = Math.max(Math.abs(from), Math.abs(to));
  const [unit, name] = size >= 1e9 ? [1e9, "s"] : size >= 1e6 ? [1e6, "ms"] : size >= 1e3 ? [1e3, "µs"] : [1, "ns"];
  const digits = Math.max(0, Math.min(9, Math.ceil(-Math.log10(step / unit) - 1e-9)));
  // Multiplied, not added up: far from zero, adding a small step to a double may not change it.
  const first = Math.ceil(from / step) * step, marks = [];
  for (let number = 0; number <= (to - first) / step; number++) {
    const at = first + number * step;
    marks.push([at, (at / unit).toFixed(digits) + " " + name]);
  }
  return marks;
}

// Clears a canvas and sets its size in CSS pixels, with sharp lines on any screen.
function sized(element, wide, high) {
  const ratio = devicePixelRatio || 1;
  element.style.width = wide + "px";
  element.style.height = high + "px";
  if (element.width !== Math.round(wide * ratio) || element.height !== Math.round(high * ratio)) {
    element.width = Math.round(wide * ratio);
    element.height = Math.round(high * ratio);
  }
  const context = element.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, wide, high);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return context;
}

// The visible part of the spans, and its drawing. `Timeline` changes which part is visible.
class Lanes {
  get get() { return this.spans.get; }
  get start() { return this.spans.start; }

  // --- choice and position of lanes ---

  chooseLanes(selection) {
    const onDevice = ({ track }) => track.startsWith("device ");
    const isShown = (lane) => lane.first === lane.last || selection === "all" || onDevice(lane) === (selection === "devices");
    this.rows = this.spans.lanes.filter(isShown);
    // The fewer lanes there are, the higher they are; many lanes scroll.
    this.high = Math.max(18, Math.min(30, Math.floor(480 / Math.max(1, this.rows.length))));
    this.gutter = this.gutterFor(this.scroller.clientWidth);
    this.rowOf = new Map(this.rows.map((lane, row) => [lane, row]));
    this.floor.style.height = this.high * this.rows.length + 2 + "px";
    this.redraw();
  }

  // The width for the lanes' titles: as much as they need, but at most a part of a narrow screen.
  gutterFor(outer) {
    const letters = this.rows.map((_, row) => { const [left, right] = this.title(row); return left.length + right.length + (left && right ? 2 : 0); });
    return Math.round(Math.max(60, Math.min(14 + 6 * Math.max(0, ...letters), 0.36 * outer)));
  }

  // The title of a lane: its track, if it is the track's first lane, and its contents, unless the track's name is long.
  title(row) {
    const { track, contents, first, last } = this.rows[row], isFirst = row === 0 || this.rows[row - 1].track !== track;
    return [isFirst ? track : "", first < last && (!isFirst || track.length < 15) ? contents : ""];
  }

  row(place) { return this.rowOf.get(this.spans.lanes[this.spans.laneOf(place)]); }
  top(row) { return row * this.high - this.scroller.scrollTop; }
  timeAt(x) { return this.from + ((x - this.gutter) / this.width) * (this.to - this.from); }
  x(ns) { return this.gutter + ((ns - this.from) / (this.to - this.from)) * this.width; }

  // --- visible boxes ---

  visible() {
    const boxes = [], first = Math.floor(this.scroller.scrollTop / this.high);
    const last = Math.min(this.rows.length, first + Math.ceil(this.scroller.clientHeight / this.high) + 1);
    for (let row = first; row < last; row++) this.boxesOf(row, boxes);
    return boxes;
  }

  boxesOf(row, boxes) {
    const { spans, from, to } = this, { first, last } = this.rows[row], scale = this.width / (to - from);
    let at = spans.firstEndingAfter(from, first, last);
    while (at < last && spans.start[at] <= to) {
      const left = (spans.start[at] - from) * scale, wide = spans.dur[at] * scale;
      if (wide >= BIN) {
        boxes.push(this.box(row, Math.max(0, left), Math.min(this.width, left + wide), at, at + 1));
        at += 1;
        continue;
      }
      const pixel = Math.max(0, Math.floor(left / BIN) * BIN);
      let next = spans.firstStartingFrom(from + (pixel + BIN) / scale, at, last);
      if (next > at + 1 && spans.dur[next - 1] * scale >= BIN) next -= 1;
      boxes.push(this.box(row, pixel, pixel + BIN, at, Math.max(next, at + 1)));
      at = Math.max(next, at + 1);
    }
  }

  // One span, or neighbours that share two pixels, represented by the longest one, or in a search by the first match.
  box(row, left, right, first, last) {
    const hit = this.hits === null || this.hits[last] > this.hits[first];
    const place = last === first + 1 ? first : hit && this.hits ? this.firstMatch(first, last) : this.spans.longest(first, last);
    return { row, left, right, place, count: last - first, busy: this.spans.busy(first, last), hit };
  }

  firstMatch(first, last) { return lowerBound(first, last - 1, (place) => this.hits[place + 1] > this.hits[first]); }

  // The meaning of a span's colour: the class of device work, or the level.
  meaning(place) {
    const kind = this.get.kind(place), work = this.get.work(place);
    if (MATRIX.includes(work)) return "matrix kernel";
    if (Object.hasOwn(WORKS, work)) return work;
    return Object.hasOwn(WORKS, kind) ? kind : levelName(this.get.level(place));
  }

  colour(place) { return WORKS[this.meaning(place)] || levelColour(this.get.level(place)); }

  // A module's name begins with its parents' names, so a short label has only its end.
  label(place, room) {
    const letters = Math.floor((room - 8) / LETTER), name = String(this.get.name(place) === null ? "" : this.get.name(place));
    if (letters < 3) return "";
    if (name.length <= letters) return name;
    const short = this.get.kind(place) === "module" ? name.slice(name.lastIndexOf(".") + 1) : name.replace(/^(aten|autograd)::/, "").replace(/^void /, "");
    return short.length <= letters ? short : short.slice(0, letters - 1) + "…";
  }

  // --- drawing ---

  draw() {
    this.pending = false;
    const outer = this.scroller.clientWidth;
    this.gutter = this.gutterFor(outer);
    if (outer <= this.gutter + 40) return;
    this.width = outer - this.gutter - 4;
    this.boxes = this.visible();
    this.drawRuler(outer);
    this.drawLanes(outer, Math.min(this.scroller.clientHeight, this.high * this.rows.length + 2));
    this.drawStrip(outer);
  }

  redraw() {
    if (!this.pending) requestAnimationFrame(() => this.draw());
    this.pending = true;
  }

  drawRuler(outer) {
    const context = sized(this.ruler, outer, 22);
    context.fillStyle = shade("--quiet");
    context.textAlign = "center";
    for (const [at, text] of ticks(this.from, this.to, this.width)) {
      const middle = Math.min(this.gutter + this.width - 22, Math.max(this.gutter + 22, this.x(at)));
      context.fillText(text, middle, 9);
      context.fillRect(this.x(at), 17, 1, 5);
    }
  }

  drawLanes(outer, high) {
    const context = sized(this.canvas, outer, high);
    context.fillStyle = shade("--line");
    for (const [at] of ticks(this.from, this.to, this.width)) context.fillRect(this.x(at), 0, 1, high);
    this.drawTitles(context, outer);
    context.textAlign = "left";
    const text = shade("--text"), perPixel = (this.to - this.from) / this.width;
    for (const box of this.boxes) this.drawBox(context, box, text, perPixel);
    if (this.hits) for (const box of this.boxes) if (box.hit) this.drawMatch(context, box, text);
    context.globalAlpha = 1;
    if (this.chosen !== null) this.drawChosen(context, text);
  }

  drawTitles(context, outer) {
    const text = shade("--text"), quiet = shade("--quiet"), { high } = this;
    this.rows.forEach(({ first, last }, row) => {
      const top = this.top(row), [track, contents] = this.title(row), room = this.gutter - 10;
      if (top < -high || top > this.scroller.clientHeight) return;
      context.fillStyle = quiet;
      if (track && row) context.fillRect(0, top, outer, first === last ? 2 : 1);
      context.fillStyle = text;
      context.textAlign = "left";
      const left = first === last ? 0 : 2, trackWidth = track ? context.measureText(track).width + 8 : 0;
      if (track) context.fillText(track, left, top + high / 2, first === last ? outer : room);
      context.textAlign = "right";
      context.fillStyle = quiet;
      // If both do not fit, only the track is drawn, since nothing else shows it.
      if (contents && trackWidth + 20 < room) context.fillText(shortened(contents, Math.floor((room - trackWidth) / 5.6)), this.gutter - 8, top + high / 2, room - trackWidth);
    });
  }

  drawBox(context, box, text, perPixel) {
    const { left, place, count, hit } = box, wide = Math.max(1, box.right - left), isNarrow = wide <= BIN;
    const top = this.top(box.row), { gutter, high } = this;
    context.globalAlpha = (hit ? 1 : FADED_ALPHA) * (isNarrow && !(hit && this.hits) ? Math.max(0.25, Math.min(1, box.busy / (BIN * perPixel))) : 1);
    context.fillStyle = this.colour(place);
    context.fillRect(gutter + left, top + 2, isNarrow ? wide : wide - (wide > 4 ? 1 : 0.5), high - 3);
    if (this.get.phase(place) === "backward") {
      context.fillStyle = "#16202e";
      context.globalAlpha *= 0.5;
      context.fillRect(gutter + left, top + high - 4, wide - (wide > 4 ? 1 : 0), 3);
    }
    if (wide > 24 && count === 1) {
      context.globalAlpha = hit ? 1 : 0.3;
      context.fillStyle = hit ? "#16202e" : text;
      context.fillText(this.label(place, wide), gutter + left + 4, top + high / 2 + 0.5, wide - 6);
    }
  }

  // Matches are drawn over their neighbours, wide enough to be visible, with an edge if there is room for it.
  drawMatch(context, box, text) {
    const left = this.gutter + box.left, wide = Math.max(MATCH_WIDTH, box.right - box.left - 0.5), top = this.top(box.row) + 2;
    context.globalAlpha = 1;
    if (box.right - box.left < MATCH_WIDTH) {
      context.fillStyle = this.colour(box.place);
      context.fillRect(left, top, wide, this.high - 3);
    }
    if (wide < 2 * MATCH_WIDTH) return;
    context.strokeStyle = text;
    context.lineWidth = 1;
    context.strokeRect(left + 0.5, top + 0.5, Math.max(1, wide - 1), this.high - 4);
  }

  // A frame around the selected span, and lines from launches to the launched work.
  drawChosen(context, text) {
    this.drawFrame(context, text, this.chosen);
    context.lineWidth = 1.5;
    for (const [launch, work] of this.related) {
      const [launchRow, workRow] = [this.row(launch), this.row(work)];
      if (launchRow === undefined || workRow === undefined) continue;
      context.strokeStyle = text;
      context.beginPath();
      context.moveTo(Math.max(this.gutter, this.x(this.start[launch])), this.top(launchRow) + this.high - 2);
      context.lineTo(Math.max(this.gutter, this.x(this.start[work])), this.top(workRow) + 2);
      context.stroke();
    }
  }

  drawFrame(context, text, place) {
    const row = this.row(place), left = Math.max(this.gutter, this.x(this.start[place]));
    const right = Math.min(this.gutter + this.width, this.x(this.spans.end(place)));
    if (row === undefined || right < this.gutter || left > this.gutter + this.width) return;
    context.strokeStyle = text;
    context.lineWidth = 2;
    context.strokeRect(left, this.top(row) + 1.5, Math.max(3, right - left - 0.5), this.high - 2);
  }

  drawStrip(outer) {
    const context = sized(this.strip, outer, 14), duration = this.rangeEnd - this.rangeStart;
    context.fillStyle = shade("--line");
    context.fillRect(this.gutter, 4, this.width, 8);
    context.fillStyle = shade("--accent");
    context.fillRect(this.gutter + ((this.from - this.rangeStart) / duration) * this.width, 4, Math.max(3, ((this.to - this.from) / duration) * this.width), 8);
  }
}
