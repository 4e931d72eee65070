// Pieces of SVG as text, and nodes: things on the stage that have a key, a place, and a drawing relative to it.

/** A number with so many decimals, and commas between thousands; engines differ in toLocaleString. */
export function say(value, digits = 0) {
  const [whole, part] = value.toFixed(digits).split(".");
  return whole.replace(/\B(?=(\d{3})+$)/g, ",") + (part ? `.${part}` : "");
}

export const escape = (s) => String(s).replace(/[&<>"]/g, (c) => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})[c]);
const n = (v) => Math.round(v * 10) / 10;

export const rect = (x, y, w, h, cls, rx = 3) =>
  `<rect class="${cls}" x="${n(x)}" y="${n(y)}" width="${n(w)}" height="${n(h)}" rx="${rx}"/>`;
export const text = (x, y, content, cls = "t", anchor = "start") =>
  `<text class="${cls}" x="${n(x)}" y="${n(y)}"${anchor === "start" ? "" : ` text-anchor="${anchor}"`}>${escape(content)}</text>`;
export const line = (x1, y1, x2, y2, cls) => `<path class="${cls}" d="M${n(x1)} ${n(y1)}L${n(x2)} ${n(y2)}"/>`;
export const path = (d, cls) => `<path class="${cls}" d="${d}"/>`;

/** A box with its label in the middle. */
export const box = (w, h, cls, label, labelCls = "t") =>
  rect(0, 0, w, h, cls) + (label === "" ? "" : text(w / 2, h / 2 + 4.3, label, labelCls, "middle"));

/**
 * A node; more: {cls, title, from: the place that it comes from when it is new, data: {name: value}, about: [names],
 * fixed: whether it stays when the stage scrolls}. Nodes that are about the same thing light up together; the first name
 * is the node's own. A node that is "hot" (followed) or has a "mark" gets a ring around its first shape.
 */
export function node(key, x, y, body, more = {}) {
  for (const word of ["hot", "mark"]) if (` ${more.cls} `.includes(` ${word} `)) body = ringed(body, word);
  return {key, x: n(x), y: n(y), body, ...more};
}

function ringed(body, word) {
  const shape = body.match(/^<rect class="[^"]*" x="([^"]*)" y="([^"]*)" width="([^"]*)" height="([^"]*)"/);
  if (!shape) return body.replace('<path class="', `<path class="is-${word} `);
  const [x, y, w, h] = shape.slice(1).map(Number);
  return body + rect(x - 2, y - 2, w + 4, h + 4, `is-${word} none`, Math.min(5, h / 2 + 2));
}

/** Nodes as SVG text: for stills, slides and print. */
export const drawn = (nodes) => nodes.map((d) =>
  `<g transform="translate(${d.x} ${d.y})"${d.cls ? ` class="${d.cls}"` : ""}>${d.title ? `<title>${escape(d.title)}</title>` : ""}${d.body}</g>`).join("");

/** Lines of text, broken at spaces so that each is at most `width` pixels wide; letter: the mean width of a letter. */
export function wrapped(words, width, letter = 6.4) {
  const lines = [""];
  for (const word of words.split(" ")) {
    if ((lines.at(-1).length + word.length) * letter > width && lines.at(-1)) lines.push("");
    lines[lines.length - 1] += (lines.at(-1) ? " " : "") + word;
  }
  return lines;
}
