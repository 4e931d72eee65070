// Two recorded runs of a kernel side by side, as it is and with a mistake, up to an operation of one clock.

import {node, path, rect, text, wrapped} from "./svg.js";

const ROW = 15, WORD = 24;

/**
 * {nodes, height, end}: two GPUs with their words, operations so far, and the race report of a pair of recordings. On a
 * narrow stage the report takes the place of the right run.
 */
export function recordingPanels(pair, step, width) {
  const beside = width > 600, w = beside ? (width - 16) / 2 : width, end = step >= pair.length;
  const nodes = [node("b.title", 0, 16, text(0, 0, pair.title, "t title"))];
  let y = 22, bottom = y;
  [["as it is", pair.right], ["with the mistake", pair.broken]].forEach(([words, run], i) => {
    if (!i && !beside && end) return;
    const x = beside ? i * (w + 16) : 0, made = panel(run, `b${i}`, words, step, x, y, w, beside);
    nodes.push(...made.nodes);
    bottom = Math.max(bottom, made.bottom);
    if (!beside) y = made.bottom + 4;
  });
  if (end) {
    const lines = pair.report.flatMap((l) => wrapped(l, width - 24, 7.4));
    nodes.push(node("b.report", 0, bottom + 8, rect(0, 0, width, 12 + lines.length * ROW, "report", 6) +
      lines.map((l, n) => text(10, 17 + n * ROW, l, "t mono")).join("")));
    bottom += 20 + lines.length * ROW;
  }
  return {nodes, height: bottom + 2, end};
}

// One run: rank 0 and rank 1 with their blocks of threads and their words, a line for the operation of this step from the
// block to its word, and the operations up to now; where panels are stacked only the latest.
function panel(run, key, title, step, x, y, w, beside) {
  const now = run.operations.slice(0, step), last = step <= run.operations.length ? now.at(-1) : null;
  const values = run.words.map((word, n) => now.reduce((v, o) => o.word === n && o.value !== undefined ? o.value : v, word.first));
  const gpu = (w - 24) / 2, left = [8, 16 + gpu], places = [], used = [0, 0];
  for (const word of run.words) places.push({rank: word.rank, x: left[word.rank] + 8, y: 60 + WORD * used[word.rank]++});
  const most = Math.max(...used), high = 38 + WORD * most, top = 24 + high + 15, latest = beside ? 0 : most > 3 ? 1 : 2;
  const chip = Math.min(56, (gpu - 58) / 2), block = (rank, n) => left[rank] + gpu - (2 - n) * chip;
  const boxes = [0, 1].map((rank) => rect(left[rank], 24, gpu, high, "gpu", 6) + rect(left[rank] + 1, 25, gpu - 2, 24, `s${rank}`, 5) +
    text(left[rank] + 8, 41, `rank ${rank}`, `x${rank} b`) + [0, 1].map((n) => {
      const acts = last?.rank === rank && last.block === n;
      return rect(block(rank, n), 27, chip - 2, 20, acts ? "cell now" : "cell", 10) + text(block(rank, n) + chip / 2 - 1, 41.3, `block ${n}`, acts ? "t" : "m", "middle");
    }).join("")).join("");
  const words = run.words.map((word, n) => {
    const p = places[n], wrong = now.some((o) => o.wrong && o.word === n), racing = now.some((o) => o.race && o.word === n);
    return text(p.x, p.y + 14.3, word.name, "m") +
      rect(p.x + gpu - 72, p.y, 44, 20, wrong ? "cell wrong" : racing ? "cell racing" : last?.word === n ? "cell now" : "cell") +
      text(p.x + gpu - 50, p.y + 14.3, values[n], "t b", "middle");
  }).join("");
  const linesOf = (o) => wrapped(o.text, w - 34), height = (list) => list.reduce((h, o) => h + linesOf(o).length * ROW + 2, 0);
  let at = top;
  const list = now.slice(-latest).map((o) => {
    const lines = linesOf(o), from = at;
    at += lines.length * ROW + 2;
    const cls = o.wrong ? "wrong" : o.race ? "race" : o === last ? "now" : "none";
    return rect(4, from - 11, w - 8, lines.length * ROW + 1, cls, 3) + rect(8, from - 8, 10, 10, `s${o.rank % 8}`, 2) +
      lines.map((l, i) => text(24, from + 1 + i * ROW, l, "t")).join("");
  }).join("");
  const full = top + (latest ? latest * 2 * (ROW + 1) : height(run.operations)) - 8;
  return {nodes: [node(key, x, y, rect(0, 0, w, full, "ground", 8) + text(8, 16, title, "t b") + boxes + words +
    (last ? way(last, block(last.rank, last.block) + chip / 2 - 1, places[last.word], left, gpu) : "") + list)], bottom: y + full};
}

// From the acting block to its word, in the lanes beside the words; the dot is where the value goes.
function way({rank, block, value}, x, word, left, gpu) {
  const right = rank === word.rank && block === 1, y = word.y + 10;
  const lane = left[word.rank] + gpu - (right ? 10 : 74), edge = left[word.rank] + gpu - (right ? 20 : 64);
  const [dx, dy] = value === undefined ? [x, 47] : [edge, y];
  return path(`M${x.toFixed(1)} 47V54H${lane.toFixed(1)}V${y}H${edge.toFixed(1)}`, `acting k${rank % 8}`) +
    `<circle class="s${rank % 8}" cx="${dx.toFixed(1)}" cy="${dy}" r="4"/>`;
}
