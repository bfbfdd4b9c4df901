"use strict";
// Interaction with the timeline: zoom, pan, search, the selected span, mouse and keys.

class Timeline extends Lanes {
  constructor(show) {
    super();
    this.show = show;
    [this.holder, this.scroller, this.floor, this.ruler, this.canvas, this.strip, this.tip] =
      ["timeline-chart", "lanes", "floor", "ruler", "spans", "strip", "tip"].map((id) => byId(id));
    this.listen();
  }

  // Shows other spans.
  load(data) {
    this.spans = new Spans(data);
    const [first, last] = data.range[0] === null ? [0, 1] : data.range;
    [this.rangeStart, this.rangeEnd] = first < last ? [first, last] : [first, first + 1];
    [this.from, this.to] = [this.rangeStart, this.rangeEnd];
    Object.assign(this, { width: 1, boxes: [], chosen: null, related: [], hits: null, pending: false });
    byId("find").value = byId("found").textContent = "";
    this.showLanes("all");
    this.draw();
  }

  // --- moving ---

  look(left, right) {
    const shortest = Math.max(20, 1e-14 * this.rangeEnd);  // the resolution of a double
    const duration = Math.min(this.rangeEnd - this.rangeStart, Math.max(shortest, right - left));
    this.from = Math.max(this.rangeStart, Math.min(this.rangeEnd - duration, left));
    this.to = this.from + duration;
    this.tip.hidden = true;
    this.redraw();
  }

  zoom(factor, middle) {
    const at = middle === undefined ? (this.from + this.to) / 2 : middle;
    this.look(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  all() { this.look(this.rangeStart, this.rangeEnd); }

  pan(share) {
    const away = share * (this.to - this.from);
    this.look(this.from + away, this.to + away);
  }

  choose(place, reveal) {
    this.chosen = place;
    this.related = this.relations(place);
    if (reveal) this.reveal(place);
    this.redraw();
    this.show(place);
  }

  // Pairs of a launch and its work, one of which is the selected span.
  relations(place) {
    const launch = this.get.launch(place);
    if (launch !== null) return [[launch, place]];
    if (this.get.level(place) !== 60) return [];
    return this.spans.launched(place).slice(0, MOST_ARROWS).map((work) => [place, work]);
  }

  reveal(place) {
    if (this.row(place) === undefined) this.showLanes("all");
    const room = this.spans.dur[place], begin = this.start[place];
    if (begin + room < this.from || begin > this.to || room < (this.to - this.from) / 400) this.look(begin - room * 2, begin + room * 3);
    const top = this.row(place) * this.high, { scroller } = this;
    if (top < scroller.scrollTop || top + this.high > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = top - 40;
  }

  closeUp(place, margin) {
    const room = this.spans.dur[place] * margin;
    this.look(this.start[place] - room, this.spans.end(place) + room);
  }

  // Shows the target of a link from elsewhere: the span with its surroundings.
  visit(place) {
    this.choose(place, true);
    this.closeUp(place, 0.5);
  }

  neighbour(direction) {
    if (this.chosen === null) return;
    const { first, last } = this.spans.lanes[this.spans.laneOf(this.chosen)], place = this.chosen + direction;
    if (place >= first && place < last) this.choose(place, true);
  }

  // --- mouse and keys ---

  boxAt(mouse) {
    const bounds = this.canvas.getBoundingClientRect(), at = mouse.clientX - bounds.left - this.gutter;
    const row = Math.floor((mouse.clientY - bounds.top + this.scroller.scrollTop) / this.high);
    const candidates = this.boxes.filter((box) => box.row === row && at >= box.left - 1 && at <= box.right + 1);
    return candidates.sort((a, b) => Math.abs(2 * at - a.left - a.right) - Math.abs(2 * at - b.left - b.right))[0] || null;
  }

  hover(mouse) {
    const box = this.boxAt(mouse), { tip } = this;
    tip.hidden = box === null;
    this.canvas.style.cursor = box ? "pointer" : "grab";
    if (!box) return;
    const true_ns = this.get.true_ns(box.place), dur = time(this.spans.dur[box.place]);
    const about = box.count > 1
      ? `${this.hits && box.hit ? "found among" : "the longest of"} ${box.count.toLocaleString("en")} spans here, ${time(box.busy)} together; click to zoom in`
      : `${this.get.kind(box.place)}, ${dur} recorded` + (true_ns === null ? "" : `, ${time(true_ns)} true`);
    tip.replaceChildren(make("b", this.get.name(box.place)), make("div", about));
    const frame = this.holder.getBoundingClientRect(), left = mouse.clientX - frame.left;
    tip.style.left = Math.max(0, Math.min(left + 12, frame.width - tip.offsetWidth)) + "px";
    tip.style.top = mouse.clientY - frame.top + 18 + "px";
  }

  press(down) {
    if (down.button !== 0) return;
    const { from, to, width, scroller } = this, wasTop = scroller.scrollTop;
    let moved = false;
    const move = (now) => {
      const aside = now.clientX - down.clientX, below = now.clientY - down.clientY;
      moved = moved || Math.abs(aside) + Math.abs(below) > 4;
      if (!moved) return;
      this.canvas.style.cursor = "grabbing";
      const away = (aside / width) * (to - from);
      this.look(from - away, to - away);
      scroller.scrollTop = wasTop - below;
    };
    untilRelease(move, (up) => { if (!moved) this.click(up); });
  }

  click(mouse) {
    const box = this.boxAt(mouse);
    if (!box) return;
    if (box.count === 1) this.choose(box.place);
    else this.zoom(0.1, this.timeAt(mouse.clientX - this.canvas.getBoundingClientRect().left));
  }

  wheel(turn) {
    turn.preventDefault();
    if (turn.shiftKey) this.scroller.scrollTop += turn.deltaY || turn.deltaX;
    else if (Math.abs(turn.deltaX) > Math.abs(turn.deltaY)) this.pan(turn.deltaX / this.width);
    else this.zoom(Math.pow(1.002, Math.max(-240, Math.min(240, turn.deltaY))), this.timeAt(turn.clientX - this.canvas.getBoundingClientRect().left));
  }

  key(pressed) {
    const act = {
      ArrowLeft: () => this.pan(-1 / 8), ArrowRight: () => this.pan(1 / 8),
      ArrowUp: () => (this.scroller.scrollTop -= this.high), ArrowDown: () => (this.scroller.scrollTop += this.high),
      "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1 / 0.6), 0: () => this.all(),
      n: () => this.neighbour(1), p: () => this.neighbour(-1),
    }[pressed.key];
    if (!act || pressed.ctrlKey || pressed.metaKey) return;
    pressed.preventDefault();
    act();
  }

  dragStrip(down) {
    const move = (now) => {
      const position = (now.clientX - this.strip.getBoundingClientRect().left - this.gutter) / this.width;
      const middle = this.rangeStart + position * (this.rangeEnd - this.rangeStart), half = (this.to - this.from) / 2;
      this.look(middle - half, middle + half);
    };
    move(down);
    untilRelease(move, () => {});
  }

  find(text) {
    const word = text.trim().toLowerCase(), output = byId("found");
    this.hits = word ? this.spans.search(word) : null;
    output.textContent = "";
    if (this.hits) {
      let sum = 0;
      for (let place = 0; place < this.spans.count; place++) if (this.hits[place + 1] > this.hits[place]) sum += this.spans.dur[place];
      output.textContent = `${this.hits[this.spans.count].toLocaleString("en")} spans, ${time(sum)} together`;
    }
    this.redraw();
  }

  // Goes to the next match, and from the last one to the first.
  findNext() {
    if (!this.hits || !this.hits[this.spans.count]) return;
    const count = this.spans.count, start = this.chosen === null ? 0 : this.chosen + 1;
    const number = this.hits[start] < this.hits[count] ? this.hits[start] : 0;
    this.choose(lowerBound(0, count, (place) => this.hits[place + 1] > number), true);
  }

  showLanes(selection) {
    byId("which").value = selection;
    this.chooseLanes(selection);
  }

  listen() {
    const on = (element, name, act, options) => element.addEventListener(name, act, options);
    on(this.canvas, "wheel", (turn) => this.wheel(turn), { passive: false });
    on(this.canvas, "pointerdown", (down) => this.press(down));
    on(this.canvas, "pointermove", (mouse) => { if (!mouse.buttons) this.hover(mouse); });
    on(this.canvas, "pointerleave", () => { this.tip.hidden = true; });
    on(this.canvas, "dblclick", (mouse) => {
      const box = this.boxAt(mouse);
      if (box && box.count === 1) this.closeUp(box.place, 0.05);
    });
    on(this.canvas, "keydown", (pressed) => this.key(pressed));
    on(this.scroller, "scroll", () => this.redraw());
    on(this.strip, "pointerdown", (down) => this.dragStrip(down));
    on(byId("find"), "input", (typed) => this.find(typed.target.value));
    on(byId("find"), "keydown", (pressed) => { if (pressed.key === "Enter") this.findNext(); });
    on(byId("which"), "change", (chosen) => this.chooseLanes(chosen.target.value));
    on(byId("in"), "click", () => this.zoom(0.5));
    on(byId("out"), "click", () => this.zoom(2));
    on(byId("all"), "click", () => this.all());
    on(window, "resize", () => this.redraw());
  }

  // The visible time range and boxes, with their positions on the canvas, for tests.
  visibleState() {
    const placeOf = (box) => ({ x: this.gutter + (box.left + box.right) / 2, y: this.top(box.row) + this.high / 2 });
    return { from: this.from, to: this.to, boxes: this.boxes.map((box) => ({ ...box, ...placeOf(box), name: this.get.name(box.place) })) };
  }
}

function untilRelease(move, release) {
  const stop = (up) => {
    removeEventListener("pointermove", move);
    removeEventListener("pointerup", stop);
    release(up);
  };
  addEventListener("pointermove", move);
  addEventListener("pointerup", stop);
}
