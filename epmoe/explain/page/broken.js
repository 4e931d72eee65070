// Two recorded runs of a kernel side by side, as it is and with a mistake, up to an operation of one clock.

import {line, node, rect, text, wrapped} from "./svg.js";

const ROW = 15;

/** {nodes, height}: words of memory, operations so far, and the race report of a pair of recordings. */
export function recordingPanels(pair, step, width) {
  const beside = width > 600, w = beside ? (width - 16) / 2 : width;
  const nodes = [node("b.title", 0, 16, text(0, 0, pair.title, "t title"))];
  let y = 28;
  const sides = [["as it is", pair.right], ["with the mistake", pair.broken]];
  let bottom = y;
  sides.forEach(([words, run], i) => {
    const x = beside ? i * (w + 16) : 0, made = panel(run, `b${i}`, words, step, x, y, w);
    nodes.push(...made.nodes);
    bottom = Math.max(bottom, made.bottom);
    if (!beside) y = made.bottom + 10;
  });
  if (step >= pair.length) {
    const lines = pair.report.flatMap((l) => wrapped(l, width - 24));
    nodes.push(node("b.report", 0, bottom + 8, rect(0, 0, width, 12 + lines.length * ROW, "report", 6) +
      lines.map((l, n) => text(10, 17 + n * ROW, l, "t mono")).join("")));
    bottom += 20 + lines.length * ROW;
  }
  return {nodes, height: bottom + 8};
}

// One run: its words of memory with their values now, and its operations up to now.
function panel(run, key, title, step, x, y, w) {
  const nodes = [], now = run.operations.slice(0, step);
  const values = run.words.map((word, n) => now.reduce((v, o) => o.word === n && o.value !== undefined ? o.value : v, word.first));
  const across = Math.max(1, Math.floor((w - 16) / 150)), each = (w - 16) / across;
  const body = run.words.map((word, n) => {
    const wx = 8 + (n % across) * each, wy = 30 + Math.floor(n / across) * 40, last = now.at(-1)?.word === n;
    const wrong = now.some((o) => o.wrong && o.word === n);
    return text(wx, wy, word.name, "m") + rect(wx, wy + 5, each - 10, 20, wrong ? "cell wrong" : last ? "cell now" : "cell") +
      text(wx + 6, wy + 19, values[n], "t b");
  }).join("");
  let at = 30 + Math.ceil(run.words.length / across) * 40 + 6;
  const rows = now.map((o, n) => {
    const lines = wrapped(o.text, w - 34), high = lines.length * ROW + 2, top = at;
    at += high;
    return (o.wrong || o.race ? rect(4, top - 11, w - 8, high, o.wrong ? "wrong" : "race", 3) : n === now.length - 1 ? rect(4, top - 11, w - 8, high, "now", 3) : "") +
      rect(8, top - 8, 10, 10, `s${o.rank % 8}`, 2) + lines.map((l, i) => text(24, top + 1 + i * ROW, l, "t")).join("");
  }).join("");
  const all = run.operations.reduce((h, o) => h + wrapped(o.text, w - 34).length * ROW + 2, 36 + Math.ceil(run.words.length / across) * 40);
  nodes.push(node(key, x, y, rect(0, 0, w, all + 4, "gpu", 8) + text(8, 16, title, "t b") + body + rows));
  return {nodes, bottom: y + all + 4};
}
