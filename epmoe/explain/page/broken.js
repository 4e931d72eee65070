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
    const lines = pair.report.flatMap((l) => wrapped(l, width - 24, 7.4));
    nodes.push(node("b.report", 0, bottom + 8, rect(0, 0, width, 12 + lines.length * ROW, "report", 6) +
      lines.map((l, n) => text(10, 17 + n * ROW, l, "t mono")).join("")));
    bottom += 20 + lines.length * ROW;
  }
  return {nodes, height: bottom + 8, end: step >= pair.length};
}

// One run: its words of memory with their values now, and its operations up to now; in a narrow panel the last three.
function panel(run, key, title, step, x, y, w) {
  const nodes = [], now = run.operations.slice(0, step), narrow = w < 380;
  const values = run.words.map((word, n) => now.reduce((v, o) => o.word === n && o.value !== undefined ? o.value : v, word.first));
  const across = Math.max(1, Math.floor((w - 16) / (narrow ? 115 : 150))), each = (w - 16) / across;
  const top = 34 + Math.ceil(run.words.length / across) * 40;
  const body = run.words.map((word, n) => {
    const wx = 8 + (n % across) * each, wy = 34 + Math.floor(n / across) * 40, last = now.at(-1)?.word === n;
    const wrong = now.some((o) => o.wrong && o.word === n);
    return text(wx, wy, word.name, "m") + rect(wx, wy + 5, each - 10, 20, wrong ? "cell wrong" : last ? "cell now" : "cell") +
      text(wx + 6, wy + 19, values[n], "t b");
  }).join("");
  const linesOf = (o) => wrapped(o.text, w - 34), high = (list) => list.reduce((h, o) => h + linesOf(o).length * ROW + 2, top + 4);
  let at = top;
  const rows = now.slice(narrow ? -3 : 0).map((o) => {
    const lines = linesOf(o), from = at;
    at += lines.length * ROW + 2;
    const cls = o.wrong ? "wrong" : o.race ? "race" : o === now.at(-1) && step <= run.operations.length ? "now" : "none";
    return rect(4, from - 11, w - 8, lines.length * ROW + 1, cls, 3) + rect(8, from - 8, 10, 10, `s${o.rank % 8}`, 2) +
      lines.map((l, i) => text(24, from + 1 + i * ROW, l, "t")).join("");
  }).join("");
  const height = narrow ? top + 6 * ROW + 6 : high(run.operations);
  nodes.push(node(key, x, y, rect(0, 0, w, height, "gpu", 8) + text(8, 16, title, "t b") + body + rows));
  return {nodes, bottom: y + height};
}
