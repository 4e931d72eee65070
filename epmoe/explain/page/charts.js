// What the stage shows where tokens are too many to draw: matrices, loads, times; and the panels beside the GPU boxes.

import {messageBytes, traffic} from "./model.js";
import {line, node, rect, say, text, wrapped} from "./svg.js";
import {EXPERT_BYTES, HIDDEN, uniform} from "./words.js";

/** Nodes of what the state asks for besides the GPU boxes. */
export function extras(story, state, places) {
  const nodes = [];
  if (state.capacity) nodes.push(...capacity(story, state.capacity, places));
  if (state.inset) nodes.push(inset(story, state, places));
  if (state.chart && state.chart.kind !== "broken") nodes.push(...charts[state.chart.kind](story, state.chart.step, places));
  return nodes;
}

// Every expert of a model as a square: so many as fit into one GPU's memory are in its box, the others beside it.
function capacity(story, step, places) {
  const n = story.numbers.bigExperts, gb = n * 58 * EXPERT_BYTES / 1e9, fits = Math.min(n, Math.floor(n * 141 / gb));
  const top = 32, high = places.height - top - 12, left = places.column + places.gap + 6, room = places.width - left;
  const size = Math.min(32, Math.sqrt(places.inside * high / Math.max(1, fits)) * 0.94, Math.sqrt(room * (high - 20) / Math.max(1, n - fits)) * 0.94);
  const grid = (count, width, cls) => {
    const across = Math.max(1, Math.floor(width / size));
    return Array.from({length: count}, (_, i) => rect((i % across) * size, Math.floor(i / across) * size, size - 2, size - 2, cls, 2)).join("");
  };
  const across = Math.max(1, Math.floor(places.inside / size)), box = Math.ceil(fits / across) * size + top + 6;
  const nodes = [node("gpu0", 0, 0, rect(0, 0, places.column, box, "gpu", 8) + rect(1, 1, places.column - 2, 23, "s0", 7) +
    text(8, 17, places.column > 140 ? "one GPU, 141 GB, full" : "full: 141 GB", "x0 b")), node("capacity.in", 8, top, grid(fits, places.inside, "s0 edge"))];
  if (step > 1) nodes.push(node("capacity.out", left, 0, text(0, 17, `${say(n - fits)} experts do not fit`, "t b") +
    `<g transform="translate(0 ${top})">${grid(n - fits, room, "s1 edge")}</g>`, {from: {x: 8, y: top}}));
  return nodes;
}

function inset(story, state, places) {
  const {y, height} = places.strips.back, w = places.width, h = height;
  const frame = rect(4, 0, w - 8, h, "inset", 6);
  return node("inset." + state.inset, 0, y, frame + (state.inset === "message" ? anatomy(w, story.followed.rank) : chain(state.chain, w)));
}

// The three parts of a message, with their bytes.
function anatomy(w, rank) {
  const bytes = messageBytes(HIDDEN, 8), narrow = w < 600;
  const parts = [["payload", narrow ? "the token" : "the token's numbers", bytes.payload, 0.5, `s${rank % 8} edge`, `x${rank % 8}`],
    ["src_info", narrow ? "index" : "token index at its rank", bytes.src_info, 0.25, "cell", "t"],
    ["topk_info", narrow ? "expert ids" : "the token's expert ids", bytes.topk_info, 0.25, "cell", "t"]];
  let x = 14;
  return parts.map(([name, what, n, share, cls, on]) => {
    const width = (w - 28) * share;
    const drawn = rect(x, 10, width - 3, 28, cls) + text(x + 6, 28, name, `${on} b`) + text(x, 54, what, "t") +
      text(x, 71, `${say(n)} bytes`, "m");
    x += width;
    return drawn;
  }).join("");
}

const LINKS = [["1 writer", "stores the message, adds to finished: release"],
  ["2 signaller", "loads finished: acquire, stores the count: release"], ["3 receiver", "loads the count: acquire, reads the message"]];

// Who hands on to whom: each link is a release that an acquire sees.
function chain(step, w) {
  const width = (w - 20) / 3;
  return LINKS.map(([who, what], i) => {
    const x = 10 + i * width, cls = i < step ? "t" : "m";
    return rect(x, 6, width - 8, 77, i + 1 === step ? "linkbox now" : "linkbox", 5) + text(x + 6, 20, who, `${cls} b`) +
      wrapped(what, width - 20, 6.9).map((words, n) => text(x + 6, 35 + n * 14, words, cls)).join("");
  }).join("");
}

// src_rank down, dst_rank across; what stays on its rank crosses no link and is pale.
function matrix(key, title, values, x, y, size) {
  const most = Math.max(1, ...values.flat()), n = values.length;
  const cells = values.flatMap((of, src) => of.map((v, dst) =>
    `<rect class="s${src % 8}" opacity="${src === dst ? 0.06 : 0.12 + 0.3 * v / most}" x="${dst * size}" y="${24 + src * size}" width="${size - 2}" height="${size - 2}" rx="3"/>` +
    text(dst * size + size / 2 - 1, 24 + src * size + size / 2 + 4, say(v), src === dst ? "m" : "t b", "middle")));
  const heads = values.map((_, r) => text(r * size + size / 2 - 1, 19, `to ${r}`, "m", "middle") + text(-6, 24 + r * size + size / 2 + 4, `${r}`, "m", "end"));
  return node(key, x, y, text(0, 0, title, "t b") + cells.join("") + heads.join("") + text(-6, 19, "from", "m", "end") + rect(-1, 23, 0, n * size, "none"));
}

const charts = {
  bytes(story, step, {chart, width}) {
    const t = story.whole ?? traffic(story.world), n = t.pairs.length, narrow = width < 600;
    const size = Math.max(30, Math.min(64, Math.floor((narrow ? width - 60 : width / 2 - 70) / n), (narrow ? 110 : 300) / n));
    const [x, y] = narrow ? [44, chart.y + 56 + n * size] : [width / 2 + 44, chart.y + 16];
    const nodes = [matrix("m.pairs", "pairs: a message for each expert", t.pairs, chart.x + 44, chart.y + 16, size),
      matrix("m.rows", "rows: a message for each rank", t.rows, x, y, size)];
    if (step > 1) nodes.push(bars("m.bars", [["as pairs", total(t.pairs), "floor"], ["as rows", total(t.rows), "measured"]],
      chart.x + 14, y + n * size + (narrow ? 44 : 54), width - 28, "messages between ranks"));
    return nodes;
  },
  // The same token among more and more ranks: a small picture for each number of ranks.
  ranks(story, step, {chart, width}) {
    const {bigTopK} = story.numbers, counts = [2, 4, 8, 16, 32, 64], across = width < 600 ? 3 : 6, w = (width - 20) / across, high = 110;
    return counts.map((ranks, i) => {
      const {pairs, rows} = uniform({ranks, experts: 256, topK: bigTopK, tokens: 1});
      const bar = (x, v, cls) => rect(x, 30 + high * (1 - v / bigTopK), 30, Math.max(1, high * v / bigTopK), `${cls} edge`) +
        text(x + 15, 24 + high * (1 - v / bigTopK), v.toFixed(1), "t", "middle");
      return node(`r.${ranks}`, 10 + (i % across) * w, chart.y + 10 + Math.floor(i / across) * 190, text(0, 6, `${ranks} ranks`, "t b") +
        bar(4, pairs, "floor") + bar(42, rows, "measured") + text(19, 46 + high, "pairs", "t", "middle") + text(57, 46 + high, "rows", "t", "middle") +
        text(0, 64 + high, `saves ${say(100 * (1 - rows / pairs))} %`, "t b"));
    });
  },
  load(story, step, {chart, width}) {
    const t = story.load, n = t.load.length, ranks = t.rankLoad.length;
    const w = (width - 20) / n, most = Math.max(1, ...t.load), mean = total([t.load], true) / n, high = Math.min(150, chart.h / 2.6);
    const experts = t.load.map((v, e) => rect(10 + e * w, 20 + high - v / most * high, Math.max(0.8, w - 1), Math.max(0.5, v / most * high), `s${Math.floor(e / t.local) % 8}`, 1)).join("");
    const nodes = [node("l.experts", 0, chart.y + 10, text(10, 6, "rows of each expert", "t b") + experts +
      line(10, 20 + high - mean / most * high, width - 10, 20 + high - mean / most * high, "mean") +
      text(width - 12, 20 + high - mean / most * high - 4, `mean ${mean.toFixed(1)}`, "t halo", "end"))];
    const column = (width - 20) / ranks, top = Math.max(1, ...t.rankLoad), rankMean = total([t.rankLoad], true) / ranks;
    if (step > 1) nodes.push(node("l.ranks", 0, chart.y + high + 54, text(10, 6, "rows of each rank", "t b") + t.rankLoad.map((v, r) =>
      rect(10 + r * column, 20 + high - v / top * high, column - 8, v / top * high, `s${r % 8} edge`, 3) +
      text(10 + r * column + (column - 8) / 2, 20 + high + 16, `rank ${r}: ${say(v)}`, "t", "middle")).join("") +
      (step > 2 ? line(10, 20 + high - rankMean / top * high, width - 10, 20 + high - rankMean / top * high, "mean") +
        text(width - 12, 20 + high - rankMean / top * high - 4, `mean ${rankMean.toFixed(1)}: everyone waits for the highest`, "t halo", "end") : "")));
    return nodes;
  },
  time(story, step, {chart, width}) {
    const {measured} = story, groups = [4096, 128, 1].slice(0, step);
    const h = Math.min(150, (chart.h - 10) / 3);
    return groups.map((tokens, g) => {
      const rows = measured.rows.filter((r) => r.tokens === tokens), most = Math.max(...rows.map((r) => r.us));
      const left = width < 600 ? 96 : 190, scale = (width - left - 90) / most, step = (h - 26) / rows.length;
      return node(`time${tokens}`, 0, chart.y + 8 + g * h, text(10, 8, `${say(tokens)} token${tokens > 1 ? "s" : ""} a rank`, "t b") +
        rows.map((r, i) => text(10, 18 + i * step + step / 2 + 4, width < 600 ? KERNELS[r.kernels][0] : KERNELS[r.kernels][1], "t") +
          rect(left, 18 + i * step + 2, r.us * scale, step - 4, "measured", 2) +
          rect(left, 18 + i * step + 2, Math.max(1, r.floor_us * scale), step - 4, "floor", 2) +
          text(left + r.us * scale + 6, 18 + i * step + step / 2 + 4, `${say(r.us, r.us < 100 ? 1 : 0)} µs`, "t")).join(""));
    });
  },
};

const KERNELS = {"pairs whole": ["pairs", "pairs, every message whole"], "pairs fused": ["payload once", "pairs, payload once a rank"],
  "rows": ["rows", "rows"], "nccl all-to-all": ["NCCL", "NCCL all-to-all"]};

/** The sum of a matrix without its diagonal, or with it. */
const total = (matrix, whole = false) => matrix.flatMap((of, i) => of.filter((_, j) => whole || i !== j)).reduce((a, b) => a + b, 0);

function bars(key, values, x, y, width, title) {
  const most = Math.max(1, ...values.map(([, v]) => v));
  return node(key, x, y, text(0, 0, title, "t b") + values.map(([words, v, cls], i) =>
    rect(70, 10 + i * 26, (width - 130) * v / most, 20, `${cls} edge`) + text(0, 25 + i * 26, words, "t") +
    text(76 + (width - 130) * v / most, 25 + i * 26, say(v), "t b")).join(""));
}
