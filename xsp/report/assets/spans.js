"use strict";
// The spans of the timeline: unpacked columns, and queries that do not visit each span.

// Integers are packed as differences: zigzag, seven bits a byte, the lowest first, in base64.
function integers(text) {
  const bytes = atob(text), numbers = [];
  let current = 0, value = 0, scale = 1;
  for (let at = 0; at < bytes.length; at++) {
    const byte = bytes.charCodeAt(at);
    value += (byte & 127) * scale;
    scale *= 128;
    if (byte > 127) continue;
    current += value % 2 ? -(value + 1) / 2 : value / 2;
    numbers.push(current);
    [value, scale] = [0, 1];
  }
  return Float64Array.from(numbers);
}

// Missing values are packed as the lengths of stretches of present and missing values in turn.
function missingFlags(lengths, count) {
  const flags = new Uint8Array(count);
  let place = 0;
  lengths.forEach((length, number) => {
    if (number % 2) flags.fill(1, place, place + length);
    place += length;
  });
  return flags;
}

// Ids are packed as eight bytes each.
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
    const indices = integers(column.at);
    return (number) => column.values[indices[number]];
  }
  const numbers = integers(column.numbers), isMissing = missingFlags(column.holes, numbers.length);
  return (number) => (isMissing[number] ? null : numbers[number]);
}

// Returns a column as a function from a span's place to its value, null where it is missing.
function unpack(column, count) {
  if (column === undefined) return () => null;
  if ("all" in column) return () => column.all;
  const from = integers(column.from), value = changes(column);
  if (from.length === count) return value;
  const number = new Int32Array(count);
  from.forEach((first, change) => number.fill(change, first, change + 1 < from.length ? from[change + 1] : count));
  return (place) => value(number[place]);
}

class Spans {
  constructor(data) {
    const { columns, lanes, count } = data;
    this.count = count;
    this.lanes = lanes.map(([track, levels, first, last]) => ({ track, contents: levelWords(levels), first, last }));
    this.get = Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, unpack(column, count)]));
    this.start = Float64Array.from({ length: count }, (_, place) => this.get.start(place));
    this.dur = Float64Array.from({ length: count }, (_, place) => this.get.dur_ns(place));
    this.sums = sums(this.dur);
    this.tree = longestTree(this.dur);
  }

  end(place) { return this.start[place] + this.dur[place]; }

  // Spans of a lane are sorted by start and do not overlap, so they are sorted by end too.
  firstEndingAfter(ns, low, high) { return lowerBound(low, high, (place) => this.end(place) >= ns); }

  // The next one is usually near, so the search begins with small steps.
  firstStartingFrom(ns, low, high) {
    let step = 1;
    while (low + step < high && this.start[low + step] < ns) step *= 2;
    return lowerBound(low, Math.min(high, low + step + 1), (place) => this.start[place] >= ns);
  }

  laneOf(place) { return lowerBound(0, this.lanes.length, (lane) => this.lanes[lane].last > place); }

  busy(first, last) { return this.sums[last] - this.sums[first]; }

  // The index of the longest of some neighbours, from a tournament tree.
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
    const matches = [];
    for (let place = 0; place < this.count; place++) if (condition(place)) matches.push(place);
    return matches;
  }

  inside(place) {
    return this.places((other) => this.get.parent(other) === place).sort((a, b) => this.dur[b] - this.dur[a]);
  }

  launched(place) { return this.places((other) => this.get.launch(other) === place); }

  // Names repeat, so each distinct name is compared once. Returns the number of hits before each index.
  search(word) {
    const cache = new Map(), before = new Uint32Array(this.count + 1);
    const isHit = (value) => {
      if (!cache.has(value)) cache.set(value, String(value === null ? "" : value).toLowerCase().includes(word));
      return cache.get(value);
    };
    for (let place = 0; place < this.count; place++) {
      before[place + 1] = before[place] + (isHit(this.get.name(place)) || isHit(this.get.type(place)) ? 1 : 0);
    }
    return before;
  }
}

// Returns the smallest number from low on for which a monotonic condition holds, else high.
function lowerBound(low, high, holds) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) high = middle; else low = middle + 1;
  }
  return low;
}

function sums(values) {
  const totals = new Float64Array(values.length + 1);
  values.forEach((value, place) => { totals[place + 1] = totals[place] + value; });
  return totals;
}

// A node has the index of the longer span of its two children; the leaves are the spans.
function longestTree(dur) {
  const count = dur.length, tree = new Int32Array(2 * count);
  for (let place = 0; place < count; place++) tree[count + place] = place;
  for (let node = count - 1; node > 0; node--) {
    const [left, right] = [tree[2 * node], tree[2 * node + 1]];
    tree[node] = dur[left] >= dur[right] ? left : right;
  }
  return tree;
}
