// The page: one clock, which scrolling, keys, buttons and the slider all set; and what readers can change.

import {combine, expert, makeWorld} from "./model.js";
import {stepsOf} from "./chapters.js";
import {picture, storyOf} from "./picture.js";
import {references, values} from "./words.js";
import {Stage} from "./stage.js";
import {leastWidth} from "./layout.js";
import {scrubs} from "./scrub.js";
import {dragging} from "./drag.js";
import {name} from "./scene.js";

// names of arrays that light up on the stage when the pointer is over them in the text
const NAMED = ["topk_ids", "reserved", "finished", "recv_buf", "recv_count", "row_offsets"];
const short = (value) => +value.toPrecision(5);
const one = (q) => document.querySelector(q), every = (q) => [...document.querySelectorAll(q)];

/** Start the page. */
export function main() {
  const data = JSON.parse(one("#data").textContent), svg = one("#stage"), view = one(".view"), stage = new Stage(svg);
  // each caption with its chapter, its number in it, and the steps that it has
  const captions = every(".chapter").flatMap((s) => [...s.querySelectorAll("ol.steps > li")].map((li, n) => ({chapter: s.id, li, n, steps: []})));
  const captionOf = (step) => captions.find((c) => c.chapter === step.chapter && c.n === step.caption);
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const page = {world: data.world, numbers: {...data.numbers}, followed: null, at: -1, playing: null};
  const order = every(".chapter").map((s) => s.id);
  let story, steps, shown, wide, high, drawnAt, zoom = 1;

  const spans = every("[data-value]");
  for (const code of every(".prose code")) if (NAMED.includes(code.textContent)) code.dataset.about = code.textContent;

  function tell() {
    story = storyOf(data, page.world, page.numbers, page.followed);
    steps = stepsOf(order, story);
    for (const c of captions) c.steps = [];
    steps.forEach((step, n) => captionOf(step).steps.push(n));
    const words = values(story, page.numbers), about = references(story);
    for (const e of spans) {
      const name = e.dataset.value, word = words[name];
      if (word !== undefined && e.textContent !== String(word)) e.textContent = word;
      if (!about[name]) continue;
      e.dataset.about = about[name].name;
      e.dataset.rank = about[name].rank;
    }
  }

  // A wide stage grows with the window. Recordings have their own size: theirs is mostly text.
  function draw(moving) {
    const {chart} = steps[Math.max(0, page.at)].state;
    zoom = wide > 600 && chart?.kind !== "broken" ? Math.max(1, Math.min(1.5, high / 560, wide / Math.max(601, leastWidth(page.world)))) : 1;
    const width = Math.max(wide / zoom, leastWidth(page.world));
    svg.style.width = `${width * zoom}px`;
    shown = picture(story, steps, Math.max(0, page.at), width);
    card();
    stage.show(shown.nodes, moving && !still.matches);
    stage.look(shown.places, shown.state.focus, high, zoom, moving && !still.matches);
    for (const g of svg.querySelectorAll("[data-token].token, [data-chip]")) accessible(g);
    drawnAt = `${wide} ${high}`;
  }

  // Tokens are buttons, choices are numbers that can be changed.
  function accessible(g) {
    if (!g.hasAttribute("tabindex")) g.setAttribute("tabindex", "0");
    if (g.dataset.chip) {
      const [r, t, k] = g.dataset.chip.split(",").map(Number), e = page.world.ids[r][t][k];
      if (g.getAttribute("aria-valuenow") === String(e)) return;
      g.setAttribute("role", "spinbutton");
      g.setAttribute("aria-valuenow", e);
      g.setAttribute("aria-label", `expert of token ${t} of rank ${r}, choice ${k}`);
    } else {
      const [r, t] = g.dataset.token.split(",");
      const hot = String(g.classList.contains("hot"));
      if (g.getAttribute("aria-pressed") === hot) return;
      g.setAttribute("role", "button");
      g.setAttribute("aria-label", `follow token ${t} of rank ${r}`);
      g.setAttribute("aria-pressed", hot);
    }
  }

  // The followed token's numbers, as far as they are known at this step.
  function card() {
    const {world, followed, model} = story, {state} = shown, {rank, token} = followed;
    one("#card").classList.toggle("off", !state.follow);
    one("#card").classList.toggle("chart", Boolean(state.chart));
    const x = world.x[rank][token]?.[0] ?? 0, known = (set, p, value) => set.has(name(p)) ? value : "·";
    const rows = model.pairs.filter((p) => p.rank === rank && p.token === token).map((p) => {
      const y = expert(p.e, x);
      return [`e${p.e} on rank ${p.dst}`, known(state.reserved, p, p.slot), known(state.grouped, p, p.row), short(x),
        known(state.computed, p, short(y)), p.weight.toFixed(2), known(state.back, p, short(p.weight * y))];
    });
    const sum = state.summed.has(`${rank}.${token}`) ? combine(world)[rank][token][0] : "·";
    one("#card tbody").innerHTML = rows.map((row) => `<tr>${row.map((v, i) => i ? `<td>${v}</td>` : `<th scope="row">${v}</th>`).join("")}</tr>`).join("") +
      `<tr><th scope="row" colspan="6">sum, rounded to bf16</th><td><b>${sum}</b></td></tr>`;
    one("#card caption").textContent = `Token t${token} of rank ${rank}, first of its numbers`;
  }

  function show(n, moving = true) {
    n = Math.max(0, Math.min(steps.length - 1, n));
    if (n === page.at) return;
    page.at = n;
    const now = captionOf(steps[n]);
    for (const c of captions) c.li.classList.toggle("now", c === now);
    one("#where").textContent = `${n + 1} of ${steps.length}`;
    one("#clock").max = steps.length - 1;
    one("#clock").value = n;
    one("#clock").setAttribute("aria-valuetext", `${one(`#${CSS.escape(now.chapter)} h2`).textContent}: ${now.li.textContent}`);
    one("#said").textContent = now.li.textContent;
    draw(moving);
  }

  // The reading line: the step whose caption has passed it is shown.
  const reading = () => innerHeight * (matchMedia("(min-width: 900px)").matches ? 0.62 : 0.76);
  function scrolled() {
    const y = reading(), boxes = captions.map((c) => c.li.getBoundingClientRect());
    let i = boxes.findLastIndex((box) => box.top < y);
    if (i >= 0 && captions[i].steps.length) {
      const mine = captions[i].steps, part = Math.floor((y - boxes[i].top) / boxes[i].height * mine.length);
      return show(mine[Math.max(0, Math.min(mine.length - 1, part))]);
    }
    while (i >= 0 && !captions[i].steps.length) i--;
    show(i < 0 ? 0 : captions[i].steps.at(-1));
  }
  function go(n) {
    n = Math.max(0, Math.min(steps.length - 1, n));
    const {li, steps: mine} = captionOf(steps[n]), box = li.getBoundingClientRect();
    scrollTo({top: scrollY + box.top + (mine.length > 1 ? (mine.indexOf(n) + 0.5) / mine.length * box.height : Math.min(60, box.height / 2)) - reading(), behavior: "instant"});
    show(n);
  }
  function play() {
    if (page.playing) { clearInterval(page.playing); page.playing = null; }
    else {
      if (page.at >= steps.length - 1) go(0);
      page.playing = setInterval(() => page.at >= steps.length - 1 ? play() : go(page.at + 1), 2200);
    }
    one("#play").textContent = page.playing ? "Pause" : "Play";
  }
  function changed() {
    tell();
    page.at = Math.min(page.at, steps.length - 1);
    draw(true);
    scrolled();
  }

  one("#clock").addEventListener("input", (e) => go(Number(e.target.value)));
  one("#back").addEventListener("click", () => go(page.at - 1));
  one("#on").addEventListener("click", () => go(page.at + 1));
  one("#play").addEventListener("click", play);
  addEventListener("keydown", (e) => {
    if (e.target.closest?.("input, .scrub, [role=spinbutton]") || e.ctrlKey || e.metaKey || e.altKey) return;
    const by = {ArrowRight: 1, ArrowLeft: -1}[e.key];
    if (by) { e.preventDefault(); go(page.at + by); }
  });
  svg.addEventListener("click", (e) => follow(e.target.closest("[data-token]")));
  svg.addEventListener("keydown", (e) => { if (e.key === "Enter" || e.key === " ") { const g = e.target.closest("[data-token]"); if (g) { e.preventDefault(); follow(g); } } });
  // What the pointer is over lights up wherever it is, on the stage and in the text.
  addEventListener("pointerover", (e) => {
    const name = e.target.closest?.("[data-about]")?.dataset.about.split(" ")[0];
    if (name === pointed) return;
    pointed = name;
    for (const g of every(".peek")) g.classList.remove("peek");
    if (name) for (const g of every(`[data-about~="${CSS.escape(name)}"]`)) g.classList.add("peek");
  });
  let pointed;
  function follow(g) {
    if (!g) return;
    const [rank, token] = g.dataset.token.split(",").map(Number);
    page.followed = {rank, token};
    changed();
  }
  dragging(svg, {zoom: () => zoom, ids: () => page.world.ids, experts: () => page.world.ranks * page.world.local, put(rank, token, k, e) {
    const ids = structuredClone(page.world.ids), other = ids[rank][token].indexOf(e);
    if (other >= 0) ids[rank][token][other] = ids[rank][token][k];      // the ids of one token are distinct
    ids[rank][token][k] = e;
    page.world = {...page.world, ids};
    changed();
  }});
  const sizes = () => { const {ranks, local, topK, ids} = page.world; return {ranks, local, topK, tokens: ids[0].length}; };
  scrubs(every(".scrub"), (which) => ({...page.numbers, ...sizes()})[which], (which, value) => {
    if (which in page.numbers) page.numbers[which] = value;
    else page.world = makeWorld({...sizes(), [which]: value, skew: 0.3, seed: 1});
    changed();
  });
  let asked = false;
  addEventListener("scroll", () => {
    if (!asked) requestAnimationFrame(() => { asked = false; scrolled(); });
    asked = true;
  }, {passive: true});
  // Sizes are read here and not while drawing: reading them would make the browser lay out the page once more.
  const measure = () => { [wide, high] = [view.clientWidth, view.clientHeight]; };
  new ResizeObserver(() => { measure(); if (drawnAt !== `${wide} ${high}`) draw(false); }).observe(view);
  measure();
  tell();
  page.at = -1;
  scrolled();
  draw(false);
  Object.assign(window, {explain: {go, page, steps: () => steps, story: () => story}});
  document.documentElement.dataset.ready = "yes";
}
