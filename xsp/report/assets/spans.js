"use strict";
// The spans of the timeline: packed columns made readable, and questions that are answered without looking at each.

// Integers came as differences: zigzag, seven bits a byte, the lowest first, in base64.
function integers(text) {
  const bytes = atob(text), found = [];
  let last = 0, value = 0, scale = 1;
  for (let at = 0; at < bytes.length; at++) {
    const byte = bytes.charCodeAt(at);
    value += (byte & 127) * scale;
    scale *= 128;
    if (byte > 127) continue;
    last += value % 2 ? -(value + 1) / 2 : value / 2;
    found.push(last);
    [value, scale] = [0, 1];
  }
  return Float64Array.from(found);
}

// Which values are missing came as the lengths of the stretches that are there and missing, in turn.
function missing(lengths, count) {
  const found = new Uint8Array(count);
  let place = 0;
  lengths.forEach((length, number) => {
    if (number % 2) found.fill(1, place, place + length);
    place += length;
  });
  return found;
}

// Ids came as bytes; each is eight of them.
function hexadecimal(bytes, place) {
  let text = "";
  for (let at = 8 * place; at < 8 * place + 8; at++) text += bytes.charCodeAt(at).toString(16).padStart(2, "0");
  return text;
}

// Returns the values of a column where they change, as a function from the number of the change.
function changes(column) {
  if ("hex" in column) {
    const bytes = atob(column.hex);
    return (number) => hexadecimal(bytes, number);
  }
  if ("values" in column) {
    const which = integers(column.at);
    return (number) => column.values[which[number]];
  }
  const numbers = integers(column.numbers), gone = missing(column.holes, numbers.length);
  return (number) => (gone[number] ? null : numbers[number]);
}

// Returns a column as a function from a span's place to its value, null where it is missing.
function unpack(column, count) {
  if (column === undefined) return () => null;
  if ("all" in column) return () => column.all;
  const from = integers(column.from), value = changes(column);
  if (from.length === count) return value;
  const number = new Int32Array(count);
  from.forEach((first, each) => number.fill(each, first, each + 1 < from.length ? from[each + 1] : count));
  return (place) => value(number[place]);
}

class Spans {
  constructor(data) {
    const { columns, lanes, count } = data;
    this.count = count;
    this.lanes = lanes.map(([track, levels, first, last]) => ({ track, holds: levelWords(levels), first, last }));
    this.get = Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, unpack(column, count)]));
    this.start = Float64Array.from({ length: count }, (_, place) => this.get.start(place));
    this.dur = Float64Array.from({ length: count }, (_, place) => this.get.dur_ns(place));
    this.sums = sums(this.dur);
    this.tree = longestTree(this.dur);
  }

  end(place) { return this.start[place] + this.dur[place]; }

  // Spans of a lane stand by start and do not overlap, so they stand by end too.
  firstEndingAfter(ns, low, high) { return least(low, high, (place) => this.end(place) >= ns); }

  // The next one is mostly near, so steps are small at first.
  firstStartingFrom(ns, low, high) {
    let step = 1;
    while (low + step < high && this.start[low + step] < ns) step *= 2;
    return least(low, Math.min(high, low + step + 1), (place) => this.start[place] >= ns);
  }

  laneOf(place) { return least(0, this.lanes.length, (lane) => this.lanes[lane].last > place); }

  busy(first, last) { return this.sums[last] - this.sums[first]; }

  // The place of the longest of some neighbours, from a tree of winners.
  longest(first, last) {
    const { tree, dur, count } = this;
    let best = first;
    for (let low = first + count, high = last + count; low < high; low >>= 1, high >>= 1) {
      if (low & 1) { if (dur[tree[low]] > dur[best]) best = tree[low]; low++; }
      if (high & 1) { high--; if (dur[tree[high]] > dur[best]) best = tree[high]; }
    }
    return best;
  }

  places(condition) {
    const found = [];
    for (let place = 0; place < this.count; place++) if (condition(place)) found.push(place);
    return found;
  }

  inside(place) {
    return this.places((each) => this.get.parent(each) === place).sort((a, b) => this.dur[b] - this.dur[a]);
  }

  launched(place) { return this.places((each) => this.get.launch(each) === place); }

  // Names repeat, so each different one is compared once. Returns how many hits stand before each place.
  search(word) {
    const known = new Map(), before = new Uint32Array(this.count + 1);
    const says = (value) => {
      if (!known.has(value)) known.set(value, String(value === null ? "" : value).toLowerCase().includes(word));
      return known.get(value);
    };
    for (let place = 0; place < this.count; place++) {
      before[place + 1] = before[place] + (says(this.get.name(place)) || says(this.get.type(place)) ? 1 : 0);
    }
    return before;
  }
}

// Returns the least number from low on that has a property which all above it have, else high.
function least(low, high, has) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (has(middle)) high = middle; else low = middle + 1;
  }
  return low;
}

function sums(values) {
  const found = new Float64Array(values.length + 1);
  values.forEach((value, place) => { found[place + 1] = found[place] + value; });
  return found;
}

// A node holds the place of the longer of its two; the spans themselves are the leaves.
function longestTree(dur) {
  const count = dur.length, tree = new Int32Array(2 * count);
  for (let place = 0; place < count; place++) tree[count + place] = place;
  for (let node = count - 1; node > 0; node--) {
    const [left, right] = [tree[2 * node], tree[2 * node + 1]];
    tree[node] = dur[left] >= dur[right] ? left : right;
  }
  return tree;
}
