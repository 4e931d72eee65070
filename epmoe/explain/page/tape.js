// The full tape: one clock over all words that change, and a timeline with the arrows of the current moment.

import {escape, line, path, rect, text} from "./svg.js";

const one = (q) => document.querySelector(q);
const LEFT = 110, LANE = 26, TOP = 24, BAR = 16;

/** A cell's value at a step: the last change by then, or null. */
const valueAt = (cell, step) => cell.changes.findLast((c) => c[0] <= step) ?? null;

/** The timeline of the run that a moment belongs to, as SVG; arrows: those that begin or end in (before, step]. */
function timeline(data, step, before, width) {
  const run = step > data.runs[1] ? 1 : 0, [first, last] = [data.runs[run], data.runs[run + 1]];
  const x = (s) => LEFT + (Math.max(first, Math.min(last, s)) - first) * (width - LEFT - 10) / (last - first);
  const mine = data.lanes.filter((l) => l.end > first && l.begin < last), names = [], y = {};
  for (const l of mine) {
    const name = `rank ${l.rank} block ${l.block}`;
    if (!(name in y)) names.push(name);
    y[name] = 0;
  }
  names.sort((a, b) => a.localeCompare(b, "en", {numeric: true}));
  names.forEach((name, i) => { y[name] = TOP + i * LANE + BAR / 2; });
  const of = (rank, block) => y[`rank ${rank} block ${block}`];
  const parts = [text(0, 14, run ? "combine" : "dispatch", "t b")];
  for (const name of names) parts.push(text(0, y[name] + 4, name, "t"), line(LEFT, y[name], width - 10, y[name], "tick faint"));
  for (const l of mine) for (const [phase, begin, end, word] of l.slices)
    parts.push(`<g><title>${escape(phase === "wait" ? `waits for ${word}` : data.phases[phase])}, steps ${begin} to ${end}</title>${rect(x(begin), of(l.rank, l.block) - BAR / 2, Math.max(1, x(end) - x(begin)), BAR, phase === "wait" ? "wait" : `p-${phase}`, 2)}</g>`);
  for (const l of mine) for (const [kind, at, words] of l.marks) if (at > before && at <= step)
    parts.push(`<g transform="translate(${x(at).toFixed(1)} ${of(l.rank, l.block)})"><title>${escape(words)}</title>${path("M0-6L5 4H-5Z", kind === "acquire" ? "open" : "sign")}</g>`);
  for (const [r1, b1, s1, r2, b2, s2, words] of data.arrows) {
    if (!((s2 > before && s2 <= step) || (s1 > before && s1 <= step)) || s1 < first || s2 > last) continue;
    const [x1, y1, x2, y2] = [x(s1), of(r1, b1), x(s2), of(r2, b2)], bend = (y2 - y1) * 0.4;
    parts.push(`<g><title>${escape(words)}</title>${path(`M${x1.toFixed(1)} ${y1}C${x1.toFixed(1)} ${y1 + bend} ${x2.toFixed(1)} ${y2 - bend} ${x2.toFixed(1)} ${y2}`, r1 === r2 ? "near" : `far k${r1 % 8}`)}<circle class="s${r1 % 8}" cx="${x2.toFixed(1)}" cy="${y2}" r="4"/></g>`);
  }
  parts.push(line(x(step), 4, x(step), TOP + names.length * LANE, "cursor"));
  return {svg: parts.join(""), height: TOP + names.length * LANE + 6};
}

/** Start the page. */
export function main() {
  const data = JSON.parse(one("#data").textContent), still = matchMedia("(prefers-reduced-motion: reduce)");
  one("#about").textContent = `${data.about} ${data.verdict}`;
  one("#legend").innerHTML = Object.entries(data.phases).map(([name, what]) =>
    `<li><svg width="18" height="12" aria-hidden="true">${rect(0, 0, 18, 12, `p-${name}`, 2)}</svg> ${escape(what)}</li>`).join("");
  const words = [];
  for (const region of data.regions) {
    const section = one("#regions").appendChild(document.createElement("section"));
    section.className = "region";
    section.innerHTML = `<h2>${escape(region.name)} <span>${escape(region.meaning)}</span></h2><div class="ranks"></div>`;
    region.ranks.forEach((cells, rank) => {
      if (!cells.length) return;
      const div = section.lastChild.appendChild(document.createElement("div"));
      div.innerHTML = `<span class="rankname">rank ${rank}</span>`;
      for (const cell of cells) {
        const e = div.appendChild(document.createElement("button"));
        e.type = "button";
        e.className = "word";
        e.innerHTML = `<small>${escape(cell.index)}</small><b></b>`;
        e.title = cell.name;
        e.addEventListener("click", () => { one("#name").textContent = `${cell.name} = ${e.lastChild.textContent}`; });
        words.push({cell, e});
      }
    });
  }
  let at = -1, playing = null;
  function show(n) {
    at = Math.max(0, Math.min(data.moments.length - 1, n));
    const [step, says] = data.moments[at], before = at ? data.moments[at - 1][0] : -1;
    for (const {cell, e} of words) {
      const value = valueAt(cell, step);
      e.lastChild.textContent = value ? value[1] : "·";
      e.classList.toggle("new", Boolean(value) && value[0] > before && at > 0);
    }
    one("#clock").max = data.moments.length - 1;
    one("#clock").value = at;
    one("#clock").setAttribute("aria-valuetext", says);
    one("#where").textContent = `${at + 1} of ${data.moments.length}`;
    one("#said").textContent = `Step ${step}. ${says}`;
    one("#name").textContent = "";
    draw(step, before);
  }
  function draw(step, before) {
    const width = Math.max(700, one("#timeline").clientWidth), made = timeline(data, step, before, width);
    one("#timeline").innerHTML = `<svg role="img" aria-label="what each block did when" width="${width}" height="${made.height}">${made.svg}</svg>`;
  }
  function play() {
    if (playing) { clearInterval(playing); playing = null; }
    else playing = setInterval(() => at >= data.moments.length - 1 ? play() : show(at + 1), still.matches ? 1500 : 900);
    one("#play").textContent = playing ? "Pause" : "Play";
  }
  one("#clock").addEventListener("input", (e) => show(Number(e.target.value)));
  one("#back").addEventListener("click", () => show(at - 1));
  one("#on").addEventListener("click", () => show(at + 1));
  one("#play").addEventListener("click", play);
  addEventListener("keydown", (e) => {
    const by = {ArrowRight: 1, ArrowLeft: -1}[e.key];
    if (by && !e.target.closest?.("input") && !e.ctrlKey && !e.metaKey && !e.altKey) { e.preventDefault(); show(at + by); }
  });
  addEventListener("resize", () => show(at));
  Object.assign(window, {tape: {show, data, get at() { return at; }}});
  show(0);
  document.documentElement.dataset.ready = "yes";
}
