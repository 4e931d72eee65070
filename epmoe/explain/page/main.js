// The page: one clock, which scrolling, keys, buttons and the slider all set; and what readers can change.

import {combine, expert, makeWorld} from "./model.js";
import {picture, stepsFor, storyOf} from "./picture.js";
import {values} from "./words.js";
import {Stage} from "./stage.js";
import {leastWidth} from "./layout.js";
import {scrubs} from "./scrub.js";
import {dragging} from "./drag.js";
import {name} from "./scene.js";

const short = (value) => +value.toPrecision(5);
const one = (q) => document.querySelector(q), every = (q) => [...document.querySelectorAll(q)];

/** Start the page. */
export function main() {
  const data = JSON.parse(one("#data").textContent), svg = one("#stage"), view = one(".view"), stage = new Stage(svg);
  const captions = every(".chapter").flatMap((s) => [...s.querySelectorAll("ol.steps > li")].map((li) => ({chapter: s.id, li})));
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const page = {world: data.world, numbers: {...data.numbers}, followed: null, at: -1, playing: null};
  const order = every(".chapter").map((s) => s.id);
  let story, steps, shown;

  function tell() {
    story = storyOf(data, page.world, page.numbers, page.followed);
    steps = stepsFor(story, order);
    const words = {...values(story, page.numbers), ...data.words};
    for (const e of every("[data-value]")) if (words[e.dataset.value] !== undefined) e.textContent = words[e.dataset.value];
  }

  function draw(moving) {
    const wide = Math.max(view.clientWidth, leastWidth(page.world));
    svg.style.width = `${wide}px`;
    shown = picture(story, steps, Math.max(0, page.at), wide);
    card();
    const high = view.clientHeight;
    stage.show(shown.nodes, moving && !still.matches);
    stage.look(shown.places, shown.state.focus, high, moving && !still.matches);
    for (const g of svg.querySelectorAll("[data-token].token, [data-chip]")) accessible(g);
  }

  // Tokens are buttons, choices are numbers that can be changed.
  function accessible(g) {
    g.setAttribute("tabindex", "0");
    if (g.dataset.chip) {
      const [r, t, k] = g.dataset.chip.split(",").map(Number), e = page.world.ids[r][t][k];
      g.setAttribute("role", "spinbutton");
      g.setAttribute("aria-valuenow", e);
      g.setAttribute("aria-label", `expert of token ${t} of rank ${r}, choice ${k}`);
    } else {
      const [r, t] = g.dataset.token.split(",");
      g.setAttribute("role", "button");
      g.setAttribute("aria-label", `follow token ${t} of rank ${r}`);
      g.setAttribute("aria-pressed", String(g.classList.contains("hot")));
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
    const {chapter, caption} = steps[n];
    for (const c of captions) c.li.classList.toggle("now", c.chapter === chapter && indexOf(c) === caption);
    one("#where").textContent = `${n + 1} of ${steps.length}`;
    one("#clock").max = steps.length - 1;
    one("#clock").value = n;
    const said = captions.find((c) => c.chapter === chapter && indexOf(c) === caption)?.li;
    one("#clock").setAttribute("aria-valuetext", `${one(`#${CSS.escape(chapter)} h2`).textContent}: ${said?.textContent ?? ""}`);
    one("#said").textContent = said?.textContent ?? "";
    draw(moving);
  }
  const indexOf = (c) => captions.filter((d) => d.chapter === c.chapter).indexOf(c);
  const of = (li) => steps.map((s, n) => ({...s, n})).filter((s) => s.chapter === li.chapter && s.caption === indexOf(li));

  // The reading line: the step whose caption has passed it is shown.
  const reading = () => innerHeight * (matchMedia("(min-width: 900px)").matches ? 0.55 : 0.76);
  function scrolled() {
    const y = reading(), passed = captions.filter((c) => c.li.getBoundingClientRect().top < y).at(-1);
    if (!passed) return show(0);
    if (!of(passed).length) return show(steps.findLastIndex((s) => order.indexOf(s.chapter) < order.indexOf(passed.chapter) || s.chapter === passed.chapter && s.caption < indexOf(passed)));
    const box = passed.li.getBoundingClientRect(), mine = of(passed);
    show(mine[Math.max(0, Math.min(mine.length - 1, Math.floor((y - box.top) / box.height * mine.length)))].n);
  }
  function go(n) {
    n = Math.max(0, Math.min(steps.length - 1, n));
    const c = captions.find((c) => c.chapter === steps[n].chapter && indexOf(c) === steps[n].caption);
    const mine = of(c), box = c.li.getBoundingClientRect(), i = mine.findIndex((s) => s.n === n);
    scrollTo({top: scrollY + box.top + (mine.length > 1 ? (i + 0.5) / mine.length * box.height : Math.min(60, box.height / 2)) - reading(), behavior: "instant"});
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
  svg.addEventListener("pointerover", (e) => {
    const token = e.target.closest("[data-token]")?.dataset.token;
    for (const g of svg.querySelectorAll("[data-token]")) g.classList.toggle("peek", g.dataset.token === token);
  });
  function follow(g) {
    if (!g) return;
    const [rank, token] = g.dataset.token.split(",").map(Number);
    page.followed = {rank, token};
    changed();
  }
  dragging(svg, {ids: () => page.world.ids, experts: () => page.world.ranks * page.world.local, put(rank, token, k, e) {
    const ids = structuredClone(page.world.ids), other = ids[rank][token].indexOf(e);
    if (other >= 0) ids[rank][token][other] = ids[rank][token][k];      // the ids of one token are distinct
    ids[rank][token][k] = e;
    page.world = {...page.world, ids};
    changed();
  }});
  scrubs(every(".scrub"), (which) => which in page.numbers ? page.numbers[which] : which === "tokens" ? page.world.ids[0].length : page.world[which], (which, value) => {
    if (which in page.numbers) page.numbers[which] = value;
    else {
      const sizes = {ranks: page.world.ranks, local: page.world.local, topK: page.world.topK, tokens: page.world.ids[0].length, [which]: value};
      sizes.topK = Math.min(sizes.topK, sizes.ranks * sizes.local);
      page.world = makeWorld({...sizes, skew: 0.3, seed: 1});
    }
    changed();
  });
  addEventListener("scroll", scrolled, {passive: true});
  addEventListener("resize", () => draw(false));
  tell();
  page.at = -1;
  scrolled();
  draw(false);
  Object.assign(window, {explain: {go, page, steps: () => steps, story: () => story}});
  document.documentElement.dataset.ready = "yes";
}
