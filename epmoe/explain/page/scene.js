// The stage: from a world, what dispatch makes of it, and how far the story has come, to nodes.

import {box, line, node, path, rect, text} from "./svg.js";

/** The beginning of the story. Each step of a chapter changes some of it; model: what dispatch() returned. */
export const beginning = () => ({
  boxes: 1, home: false, tokens: false, chips: false, lines: false, weights: false, recv: false, counters: false,
  reserved: new Set(), written: new Set(), late: null, finished: new Set(), signalled: new Set(), reset: new Set(),
  offsets: false, grouped: new Set(), computed: new Set(), back: new Set(), returned: false, summed: new Set(),
  follow: false, mark: [], chart: null, chain: 0, focus: ["tokens"], next: false,
});

export const name = (p) => `${p.rank}.${p.token}.${p.k}`;
export const segment = (p) => `${p.dst}.${p.le}.${p.rank}`;
const color = (rank) => rank % 8;

/** All nodes of the stage at a moment. */
export function scene(world, model, state, places, followed) {
  if (state.chart && !places.wide) return [];       // a narrow stage has no room for both
  const parts = [boxes, experts, ...(state.chart ? [] : [routes, counters, recv, rows, back, messages]), tokens];
  return parts.flatMap((part) => part(world, model, state, places, followed));
}

const isFollowed = (state, followed, rank, token) => state.follow && followed && followed.rank === rank && followed.token === token;
const marked = (state, key) => state.mark.includes(key) ? " mark" : "";

function boxes(world, model, state, places) {
  const nodes = [];
  if (state.capacity) return nodes;
  if (state.boxes > 1) nodes.push(node("links", 0, 0, line(places.column / 2, 13, places.width - places.column / 2, 13, "link")));
  for (let rank = 0; rank < Math.min(state.boxes, places.R); rank++) {
    const b = places.box(rank), h = state.chart ? places.strips.counters.y - 12 : b.h;
    nodes.push(node(`gpu${rank}`, b.x, b.y, rect(0, 0, b.w, h, "gpu", 8) + rect(1, 1, b.w - 2, 23, `s${color(rank)}`, 7) +
      text(PAD, 17, `rank ${rank}`, `x${color(rank)} b`)));
  }
  return nodes;
}
const PAD = 8;

// A strip's name; where columns are narrow it ends at the comma.
function strip(places, state, rank, name, words) {
  const at = places.label(rank, name);
  if (!places.beside && name !== "counters") words = words.split(",")[0];
  return node(`label.${name}.${rank}`, at.x, at.y, text(0, 0, words, "m"));
}

function experts(world, model, state, places) {
  if (state.chart || !state.home) return [];
  const nodes = [];
  for (let e = 0; e < places.E; e++) {
    const rank = Math.floor(e / places.L), le = e % places.L, at = places.expert(rank, le);
    nodes.push(node(`expert${e}`, at.x, at.y, box(32, 22, "expert", `e${e}`, "t b"), {
      cls: marked(state, `expert${e}`), from: {x: places.left(0), y: 40}, data: {"data-expert": e},
      title: `expert ${e}: local expert ${le} of rank ${rank}`}));
    if (le === 0) nodes.push(strip(places, state, rank, "rows",
      state.offsets ? (state.computed.size ? "rows, results" : "rows, grouped by expert") : "experts"));
  }
  return nodes;
}

function tokens(world, model, state, places, followed) {
  const nodes = [];
  if (!state.tokens) return nodes;
  for (let rank = 0; rank < places.R; rank++) {
    nodes.push(strip(places, state, rank, "tokens", state.next ? "new tokens" : state.chips ? "tokens, topk_ids" : "tokens"));
    world.ids[rank].forEach((chosen, t) => {
      const at = places.token(rank, t), hot = isFollowed(state, followed, rank, t) ? " hot" : "";
      nodes.push(node(`token.${rank}.${t}`, at.x, at.y,
        box(places.sizes.chip - 4, 24, `s${color(rank)} edge`, state.next ? `t${t}′` : `t${t}`, `x${color(rank)}`), {
          cls: "token" + hot, data: {"data-token": `${rank},${t}`},
          title: `token ${t} of rank ${rank}: ${world.x[rank][t].slice(0, 4).join(", ")}, …`}));
      if (state.chips && !state.next) chosen.forEach((e, k) => {
        const c = places.chip(rank, t, k);
        nodes.push(node(`chip.${rank}.${t}.${k}`, c.x, c.y,
          box(places.sizes.chip - 4, 24, "cell", e < 0 ? "−1" : `e${e}`) +
          (e < 0 ? "" : rect(0, 21, places.sizes.chip - 4, 3, `s${color(Math.floor(e / places.L))}`, 0)), {
            cls: "chip" + hot + marked(state, `chip.${rank}.${t}.${k}`), data: {"data-chip": `${rank},${t},${k}`},
            title: `topk_ids[rank ${rank}][token ${t}, k ${k}] = ${e}, weight ${world.weights[rank][t][k].toFixed(2)}`}));
      });
    });
  }
  return nodes;
}

// Lines from a token's choice to its expert, while the router is the subject.
function routes(world, model, state, places, followed) {
  if (!state.lines) return [];
  return model.pairs.filter((p) => state.lines === "all" || isFollowed({follow: true}, followed, p.rank, p.token)).map((p) => {
    const a = places.chip(p.rank, p.token, p.k), b = places.expert(p.dst, p.le), x = a.x + places.sizes.chip / 2 - 2, y = a.y + 24;
    const hot = isFollowed(state, followed, p.rank, p.token) ? " hot" : "";
    return node(`route.${name(p)}`, 0, 0, path(`M${x.toFixed(1)} ${y}C${x.toFixed(1)} ${y + 90} ${(b.x + 20).toFixed(1)} ${b.y - 90} ${(b.x + 20).toFixed(1)} ${b.y}`,
      `route k${color(p.rank)}`), {cls: "flat" + hot});
  });
}

function counters(world, model, state, places) {
  if (!state.counters) return [];
  const nodes = [];
  for (let rank = 0; rank < places.R; rank++) {
    nodes.push(strip(places, state, rank, "counters", state.counters === "both" ? places.beside ? "reserved, and below finished" : "reserved, finished" : "reserved"));
    for (let e = 0; e < places.E; e++) {
      const dst = Math.floor(e / places.L), le = e % places.L;
      const mine = model.pairs.filter((p) => p.rank === rank && p.e === e), done = state.reset.has("counters");
      const value = {reserved: done ? 0 : mine.filter((p) => state.reserved.has(name(p))).length,
        finished: done ? 0 : mine.filter((p) => state.finished.has(name(p))).length};
      ["reserved", "finished"].forEach((which, i) => {
        if (i && state.counters !== "both") return;
        const at = places.counter(rank, i, e), key = `${which}.${rank}.${e}`;
        nodes.push(node(key, at.x, at.y, box(places.sizes.counter - 2, 20, `cell k${color(dst)}`, value[which], value[which] ? "t b" : "m"), {
          cls: "counter" + marked(state, key),
          title: `${which}[rank ${rank}][local_expert ${le}, dst_rank ${dst}] = ${value[which]}`}));
      });
    }
  }
  return nodes;
}

/** What a recv_count word holds: null is "not arrived". */
export function count(model, state, dst, le, src) {
  if (state.reset.has("recv_count") || !state.signalled.has(`${dst}.${le}.${src}`)) return null;
  return model.counts[dst][le][src];
}

function recv(world, model, state, places) {
  if (!state.recv) return [];
  const nodes = [], {slot} = places.sizes;
  for (let dst = 0; dst < places.R; dst++) {
    nodes.push(strip(places, state, dst, "recv", state.signals ? "recv_buf, recv_count" : "recv_buf"));
    for (let le = 0; le < places.L; le++) for (let src = 0; src < places.R; src++) {
      const at = places.recvLine(dst, le, src), key = `line.${dst}.${le}.${src}`;
      const taken = model.pairs.filter((p) => p.dst === dst && p.le === le && p.rank === src);
      const body = rect(0, 2, 12, 18, `s${color(src)}`, 2) + Array.from({length: places.T}, (_, s) => {
        const p = taken.find((p) => p.slot === s), old = p && (state.grouped.has(name(p)) || state.next);
        return rect(16 + s * slot, 0, slot - 3, 20, p && state.reserved.has(name(p)) && !state.next ? "cell claimed" : "cell") +
          (old ? text(16 + s * slot + (slot - 3) / 2, 14.3, `t${p.token}`, "m", "middle") : "");
      }).join("");
      nodes.push(node(key, at.x, at.y, body, {cls: "line" + marked(state, key),
        title: `recv_buf[rank ${dst}][local_expert ${le} (e${dst * places.L + le}), src_rank ${src}]: ${places.T} slots`}));
      if (!state.signals) continue;
      const value = count(model, state, dst, le, src), where = places.count(dst, le, src), word = `count.${dst}.${le}.${src}`;
      const from = places.counter(src, 1, dst * places.L + le);
      nodes.push(node(word + (value === null ? ".none" : ""), where.x, where.y,
        rect(0, 0, 22, 20, value === null ? "cell" : `signal k${color(src)}`, 10) +
        text(11, 14.3, value === null ? "–" : value, value === null ? "m" : "t b", "middle"), {
          cls: marked(state, word), from: value === null ? null : from,
          title: `recv_count[rank ${dst}][local_expert ${le}, src_rank ${src}] ${value === null ? "has not arrived" : `= ${value}`}`}));
    }
  }
  return nodes;
}

function rows(world, model, state, places) {
  if (!state.offsets || state.next) return [];
  return model.offsets.flatMap((of, rank) => Array.from({length: places.L}, (_, le) => {
    const at = places.offset(rank, le), n = of[le + 1] - of[le];
    const range = n > 0 ? `${of[le]}–${of[le + 1] - 1}` : "none";
    const cells = Array.from({length: n}, (_, i) => {
      const c = places.row(rank, le, i);
      return rect(c.x - at.x, c.y - at.y, places.sizes.cell - 3, 20, "cell");
    }).join("");
    return node(`offset.${rank}.${le}`, at.x, at.y, cells + (places.beside ? text(49, 15, range, "m", "middle") : text(16, 38, range, "m", "middle")), {
      cls: marked(state, `offset.${rank}.${le}`),
      title: `row_offsets[rank ${rank}][${le}] = ${of[le]}, [${le + 1}] = ${of[le + 1]}`});
  }));
}

function back(world, model, state, places, followed) {
  if (!state.back.size && !state.backShown || state.next) return [];
  const nodes = [], w = places.sizes.chip - 4;
  for (let rank = 0; rank < places.R; rank++) {
    nodes.push(strip(places, state, rank, "back", state.summed.size ? "returned rows, results" : "returned rows"));
    world.ids[rank].forEach((chosen, t) => {
      chosen.forEach((e, k) => {
        const at = places.back(rank, t, k);
        nodes.push(node(`place.${rank}.${t}.${k}`, at.x, at.y, box(w, 20, "cell", ""), {
          title: `combine recv_buf[rank ${rank}][token ${t}, k ${k}]`}));
      });
      if (!state.summed.has(`${rank}.${t}`)) return;
      const at = places.out(rank, t);
      nodes.push(node(`out.${rank}.${t}`, at.x, at.y, box(w, 20, `s${color(rank)} edge`, `Σ${t}`, `x${color(rank)} b`), {
        cls: isFollowed(state, followed, rank, t) ? "hot" : "", from: places.back(rank, t, 0),
        title: `result of token ${t} of rank ${rank}`}));
    });
  }
  return nodes;
}

// One node a message: it is the same thing from the token through slot, row and expert back to its rank.
function messages(world, model, state, places, followed) {
  if (state.next) return [];
  return model.pairs.filter((p) => state.written.has(name(p))).map((p) => {
    const key = name(p), w = places.sizes.message;
    let at, what;
    if (state.back.has(key)) [at, what] = [places.back(p.rank, p.token, p.k), `its result, in combine's recv_buf[rank ${p.rank}][token ${p.token}, k ${p.k}]`];
    else if (state.grouped.has(key)) [at, what] = [places.row(p.dst, p.le, p.row - model.offsets[p.dst][p.le]), `row ${p.row} of rank ${p.dst}, for expert e${p.e}`];
    else [at, what] = [places.slot(p.dst, p.le, p.rank, p.slot), `recv_buf[rank ${p.dst}][local_expert ${p.le}, src_rank ${p.rank}, slot ${p.slot}]`];
    const done = state.computed.has(key), cls = done ? `hollow k${color(p.rank)}` : `s${color(p.rank)} edge`;
    const hot = isFollowed(state, followed, p.rank, p.token) ? " hot" : "";
    return node(`message.${key}`, at.x, at.y, box(w, 20, cls, done ? `y${p.token}` : `t${p.token}`, done ? "t" : `x${color(p.rank)}`), {
      cls: "message" + hot + marked(state, `message.${key}`), from: places.token(p.rank, p.token), data: {"data-token": `${p.rank},${p.token}`},
      title: `token ${p.token} of rank ${p.rank}: ${what}`});
  });
}
