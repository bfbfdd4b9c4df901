"use strict";
// The timeline: lanes of spans on a canvas. What is narrower than two pixels is drawn as one box per two pixels,
// as dark as it is full, so a frame costs what fits on the screen and not what is in the step.

const LEVELS = {
  10: ["application", "#c9cfda"], 20: ["model", "#8db7f2"], 30: ["layer", "#86d0a3"], 40: ["op", "#f4c27a"],
  50: ["library", "#c8abef"], 60: ["runtime", "#aeb8c6"], 70: ["kernel", "#f29cab"],
};
const GUTTER = 104, BIN = 2, LETTER = 6.2;

function levelName(level) { return (LEVELS[level] || ["level " + level])[0]; }
function levelColour(level) { return (LEVELS[level] || [null, "#c9cfda"])[1]; }

// A column came as one value for all, as the different values and who has which, or as a list.
function unpack(column) {
  if (Array.isArray(column)) return (place) => column[place];
  if ("all" in column) return () => column.all;
  return (place) => column.values[column.at[place]];
}

// Steps of 1, 2 or 5 on the ruler, and the unit in which they are short numbers.
function ticks(from, to, room) {
  const rough = (to - from) / Math.max(1, room / 110);
  const ten = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 5, 10].map((factor) => factor * ten).find((each) => each >= rough);
  const size = Math.max(Math.abs(from), Math.abs(to));
  const [unit, name] = size >= 1e9 ? [1e9, "s"] : size >= 1e6 ? [1e6, "ms"] : size >= 1e3 ? [1e3, "µs"] : [1, "ns"];
  const digits = Math.max(0, Math.min(9, Math.ceil(-Math.log10(step / unit) - 1e-9)));
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push([at, (at / unit).toFixed(digits) + " " + name]);
  return found;
}

function Timeline(step, show) {
  const holder = document.getElementById("timeline-chart"), scroller = document.getElementById("lanes");
  const [ruler, canvas, strip] = ["ruler", "spans", "strip"].map((id) => document.getElementById(id));
  const tip = document.getElementById("tip");
  const get = Object.fromEntries(Object.entries(step.columns).map(([name, column]) => [name, unpack(column)]));
  const parent = unpack(step.parent), { start, lanes } = step;
  const end = (place) => start[place] + get.dur_ns(place);
  const [least, most] = step.range[0] < step.range[1] ? step.range : [step.range[0], step.range[0] + 1];
  // Few lanes are high, many are low and scroll.
  const LANE = Math.max(18, Math.min(30, Math.floor(480 / Math.max(1, lanes.length))));
  const laneOf = (place) => lanes.findIndex(([, , first, last]) => place >= first && place < last);
  let from = least, to = most, width = 1, boxes = [], chosen = null, wanted = null, pending = false;

  function place(x) { return from + ((x - GUTTER) / width) * (to - from); }
  function x(ns) { return GUTTER + ((ns - from) / (to - from)) * width; }

  // Spans of a lane stand by start and do not overlap, so they stand by end too.
  function firstEndingAfter(ns, low, high) {
    while (low < high) {
      const middle = (low + high) >> 1;
      if (end(middle) < ns) low = middle + 1; else high = middle;
    }
    return low;
  }

  function visible() {
    const found = [], scale = width / (to - from);
    lanes.forEach(([, , first, last], lane) => {
      let bin = null;
      for (let at = firstEndingAfter(from, first, last); at < last && start[at] <= to; at++) {
        const left = (start[at] - from) * scale, dur = get.dur_ns(at), wide = dur * scale;
        const hit = wanted === null || wanted(at);
        if (wide >= BIN) {
          found.push({ lane, left: Math.max(0, left), right: Math.min(width, left + wide), place: at, count: 1, busy: dur, hit });
          bin = null;
          continue;
        }
        const pixel = Math.max(0, Math.floor(left / BIN) * BIN);
        if (bin === null || bin.left !== pixel) found.push((bin = { lane, left: pixel, right: pixel + BIN, place: at, count: 0, busy: 0, hit: false }));
        bin.count += 1;
        bin.busy += dur;
        bin.hit = bin.hit || hit;
        if (dur > get.dur_ns(bin.place)) bin.place = at;
      }
    });
    return found;
  }

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

  function shade(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

  // A module's name holds its parents' names; the end tells more than the beginning.
  function label(at, room) {
    const letters = Math.floor((room - 8) / LETTER);
    const name = String(get.name(at) === null ? "" : get.name(at));
    if (letters < 3) return "";
    if (name.length <= letters) return name;
    const short = get.kind(at) === "module" ? name.slice(name.lastIndexOf(".") + 1) : name.replace(/^(aten|autograd)::/, "").replace(/^void /, "");
    return short.length <= letters ? short : short.slice(0, letters - 1) + "…";
  }

  function drawRuler(outer) {
    const context = sized(ruler, outer, 22);
    context.fillStyle = shade("--quiet");
    context.textAlign = "center";
    for (const [at, text] of ticks(from, to, width)) {
      const middle = Math.min(GUTTER + width - 22, Math.max(GUTTER + 22, x(at)));
      context.fillText(text, middle, 9);
      context.fillRect(x(at), 17, 1, 5);
    }
  }

  function drawLanes(outer) {
    const context = sized(canvas, outer, LANE * lanes.length + 2);
    const line = shade("--line"), text = shade("--text"), quiet = shade("--quiet");
    context.fillStyle = line;
    for (const [at] of ticks(from, to, width)) context.fillRect(x(at), 0, 1, LANE * lanes.length);
    lanes.forEach(([track, level], lane) => {
      const top = lane === 0 || lanes[lane - 1][0] !== track;
      if (top && lane) { context.fillStyle = quiet; context.fillRect(0, lane * LANE, outer, 1); }
      context.fillStyle = top ? text : quiet;
      context.textAlign = "left";
      context.fillText(top ? track : "", 0, lane * LANE + LANE / 2);
      context.textAlign = "right";
      context.fillStyle = quiet;
      if (!top || track.length < 9) context.fillText(levelName(level), GUTTER - 8, lane * LANE + LANE / 2);
    });
    context.textAlign = "left";
    const perPixel = (to - from) / width;
    for (const box of boxes) {
      const { lane, left, place: at, count, hit } = box, wide = Math.max(1, box.right - left);
      const many = wide <= BIN;
      context.globalAlpha = (hit ? 1 : 0.12) * (many ? Math.max(0.25, Math.min(1, box.busy / (BIN * perPixel))) : 1);
      context.fillStyle = levelColour(get.level(at));
      context.fillRect(GUTTER + left, lane * LANE + 2, many ? wide : wide - (wide > 4 ? 1 : 0.5), LANE - 3);
      if (get.phase(at) === "backward") {
        context.fillStyle = "#16202e";
        context.globalAlpha *= 0.5;
        context.fillRect(GUTTER + left, lane * LANE + LANE - 4, wide - (wide > 4 ? 1 : 0), 3);
      }
      if (wide > 24 && count === 1) {
        context.globalAlpha = hit ? 1 : 0.3;
        context.fillStyle = hit ? "#16202e" : text;
        context.fillText(label(at, wide), GUTTER + left + 4, lane * LANE + LANE / 2 + 0.5, wide - 6);
      }
    }
    context.globalAlpha = 1;
    if (chosen !== null) outline(context);
  }

  function outline(context) {
    const lane = laneOf(chosen), left = Math.max(GUTTER, x(start[chosen])), right = Math.min(GUTTER + width, x(end(chosen)));
    if (right < GUTTER || left > GUTTER + width) return;
    context.strokeStyle = shade("--text");
    context.lineWidth = 2;
    context.strokeRect(left, lane * LANE + 1.5, Math.max(3, right - left - 0.5), LANE - 2);
  }

  function drawStrip(outer) {
    const context = sized(strip, outer, 14);
    context.fillStyle = shade("--line");
    context.fillRect(GUTTER, 4, width, 8);
    context.fillStyle = shade("--accent");
    const left = ((from - least) / (most - least)) * width;
    context.fillRect(GUTTER + left, 4, Math.max(3, ((to - from) / (most - least)) * width), 8);
  }

  function draw() {
    pending = false;
    const outer = scroller.clientWidth;
    if (outer <= GUTTER + 40) return;
    width = outer - GUTTER - 4;
    boxes = visible();
    drawRuler(outer);
    drawLanes(outer);
    drawStrip(outer);
  }

  function redraw() {
    if (!pending) requestAnimationFrame(draw);
    pending = true;
  }

  function look(wantedFrom, wantedTo) {
    const span = Math.min(most - least, Math.max(20, wantedTo - wantedFrom));
    from = Math.min(most - span, Math.max(least, (wantedFrom + wantedTo) / 2 - span / 2));
    to = from + span;
    tip.hidden = true;
    redraw();
  }

  function zoom(factor, middle) {
    const at = middle === undefined ? (from + to) / 2 : middle;
    look(at - (at - from) * factor, at + (to - at) * factor);
  }

  function choose(at, reveal) {
    chosen = at;
    const room = end(at) - start[at];
    if (reveal && (end(at) < from || start[at] > to || room < (to - from) / 400)) look(start[at] - room * 2, end(at) + room * 2);
    const top = laneOf(at) * LANE;
    if (reveal && (top < scroller.scrollTop || top + LANE > scroller.scrollTop + scroller.clientHeight)) scroller.scrollTop = top - 40;
    redraw();
    show(at);
  }

  function closeUp(at, margin) {
    look(start[at] - get.dur_ns(at) * margin, end(at) + get.dur_ns(at) * margin);
  }

  // Where a link from elsewhere leads: the span alone, with what is beside it.
  function visit(at) {
    choose(at, true);
    closeUp(at, 0.5);
  }

  function boxAt(mouse) {
    const seen = canvas.getBoundingClientRect();
    const lane = Math.floor((mouse.clientY - seen.top) / LANE), at = mouse.clientX - seen.left - GUTTER;
    const near = boxes.filter((box) => box.lane === lane && at >= box.left - 1 && at <= box.right + 1);
    return near.sort((a, b) => Math.abs(2 * at - a.left - a.right) - Math.abs(2 * at - b.left - b.right))[0] || null;
  }

  function hover(mouse) {
    const box = boxAt(mouse);
    tip.hidden = box === null;
    canvas.style.cursor = box ? "pointer" : "grab";
    if (!box) return;
    const name = make("b", get.name(box.place)), dur = time(get.dur_ns(box.place));
    const about = box.count > 1
      ? `the longest of ${box.count.toLocaleString("en")} spans here, ${time(box.busy)} together; click to zoom in`
      : `${get.kind(box.place)}, ${dur} recorded, ${time(get.true_ns(box.place))} true`;
    tip.replaceChildren(name, make("div", about));
    const frame = holder.getBoundingClientRect(), left = mouse.clientX - frame.left, top = mouse.clientY - frame.top;
    tip.style.left = Math.max(0, Math.min(left + 12, frame.width - tip.offsetWidth)) + "px";
    tip.style.top = top + 18 + "px";
  }

  function press(down) {
    if (down.button !== 0) return;
    const [wasFrom, wasTo, wasTop] = [from, to, scroller.scrollTop];
    let moved = false;
    const move = (now) => {
      const aside = now.clientX - down.clientX, below = now.clientY - down.clientY;
      moved = moved || Math.abs(aside) + Math.abs(below) > 4;
      if (!moved) return;
      canvas.style.cursor = "grabbing";
      const away = (aside / width) * (wasTo - wasFrom);
      look(wasFrom - away, wasTo - away);
      scroller.scrollTop = wasTop - below;
    };
    const release = (up) => {
      removeEventListener("pointermove", move);
      removeEventListener("pointerup", release);
      const box = moved ? null : boxAt(up);
      if (!box) return;
      if (box.count === 1) choose(box.place);
      else zoom(0.1, place(up.clientX - canvas.getBoundingClientRect().left));
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", release);
  }

  function next(way) {
    if (chosen === null) return;
    const [, , first, last] = lanes[laneOf(chosen)];
    if (chosen + way >= first && chosen + way < last) choose(chosen + way, true);
  }

  function key(pressed) {
    const aside = (to - from) / 8;
    const act = {
      ArrowLeft: () => look(from - aside, to - aside), ArrowRight: () => look(from + aside, to + aside),
      ArrowUp: () => (scroller.scrollTop -= LANE), ArrowDown: () => (scroller.scrollTop += LANE),
      "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => look(least, most),
      n: () => next(1), p: () => next(-1),
    }[pressed.key];
    if (!act || pressed.ctrlKey || pressed.metaKey) return;
    pressed.preventDefault();
    act();
  }

  // Names repeat, so each different one is compared once.
  function find(text) {
    const found = document.getElementById("found");
    const word = text.trim().toLowerCase();
    wanted = null;
    found.textContent = "";
    if (word) {
      const known = new Map();
      const says = (value) => {
        if (!known.has(value)) known.set(value, String(value === null ? "" : value).toLowerCase().includes(word));
        return known.get(value);
      };
      wanted = (at) => says(get.name(at)) || says(get.type(at));
      let count = 0, sum = 0;
      for (let at = 0; at < start.length; at++) if (wanted(at)) { count += 1; sum += get.dur_ns(at); }
      found.textContent = `${count.toLocaleString("en")} spans, ${time(sum)} together`;
    }
    redraw();
  }

  canvas.addEventListener("wheel", (wheel) => {
    wheel.preventDefault();
    if (wheel.shiftKey) { scroller.scrollTop += wheel.deltaY || wheel.deltaX; return; }
    if (Math.abs(wheel.deltaX) > Math.abs(wheel.deltaY)) { const away = (wheel.deltaX / width) * (to - from); look(from + away, to + away); return; }
    zoom(Math.pow(1.002, Math.max(-240, Math.min(240, wheel.deltaY))), place(wheel.clientX - canvas.getBoundingClientRect().left));
  }, { passive: false });
  canvas.addEventListener("pointerdown", press);
  canvas.addEventListener("pointermove", (mouse) => { if (!mouse.buttons) hover(mouse); });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("dblclick", (mouse) => {
    const box = boxAt(mouse);
    if (box && box.count === 1) closeUp(box.place, 0.05);
  });
  canvas.addEventListener("keydown", key);
  strip.addEventListener("pointerdown", (mouse) => {
    const go = (now) => {
      const at = least + ((now.clientX - strip.getBoundingClientRect().left - GUTTER) / width) * (most - least), half = (to - from) / 2;
      look(at - half, at + half);
    };
    const stop = () => { removeEventListener("pointermove", go); removeEventListener("pointerup", stop); };
    go(mouse);
    addEventListener("pointermove", go);
    addEventListener("pointerup", stop);
  });
  document.getElementById("find").addEventListener("input", (typed) => find(typed.target.value));
  document.getElementById("in").addEventListener("click", () => zoom(0.5));
  document.getElementById("out").addEventListener("click", () => zoom(2));
  document.getElementById("all").addEventListener("click", () => look(least, most));
  addEventListener("resize", redraw);
  draw();

  return {
    choose, visit, redraw, get, parent, start,
    // What is on the screen, for tests: boxes with their places on the canvas.
    seen: () => ({ from, to, boxes: boxes.map((box) => ({ ...box, x: GUTTER + (box.left + box.right) / 2, y: box.lane * LANE + LANE / 2, name: get.name(box.place) })) }),
  };
}
