// The stage: from a world, what dispatch makes of it, and how far the story has come, to nodes.

import {box, line, node, path, rect, text} from "./svg.js";

/** The beginning of the story. Each step of a chapter changes some of it; the sets hold names of messages or segments. */
export const beginning = () => ({
  boxes: 1, home: false, tokens: false, chips: false, lines: false, recv: false, blind: false, counters: false, signals: false,
  reserved: new Set(), written: new Set(), finished: new Set(), signalled: new Set(), reset: new Set(),
  offsets: false, grouped: new Set(), computed: new Set(), backShown: false, back: new Set(), summed: new Set(),
  follow: false, mark: [], inset: null, chart: null, chain: 0, capacity: 0, focus: ["tokens"], next: false,
});

export const name = (p) => p.name ??= `${p.rank}.${p.token}.${p.k}`;
export const segment = (p) => p.segment ??= `${p.dst}.${p.le}.${p.rank}`;
const color = (rank) => rank % 8;

/** All nodes of the stage at a moment. */
export function scene(world, model, state, places, story) {
  if (state.chart && !places.wide) return [];       // a narrow stage has no room for both
  const parts = [boxes, trails, experts, ...(state.chart ? [] : [routes, counters, recv, rows, back, messages]), tokens, heads];
  return parts.flatMap((part) => part(world, model, state, places, story));
}

const isFollowed = (state, {followed}, rank, token) => state.follow && followed.rank === rank && followed.token === token;
const marked = (state, key) => state.mark.includes(key) ? " mark" : "";
const boxesOf = (state, places) => state.capacity ? [] : Array.from({length: Math.min(state.boxes, places.R)}, (_, rank) => rank);

function boxes(world, model, state, places) {
  return boxesOf(state, places).map((rank) => {
    const b = places.box(rank);
    return node(`gpu${rank}`, b.x, b.y, rect(0, 0, b.w, state.chart ? places.strips.counters.y - 12 : b.h, "gpu", 8));
  });
}

// The names of the ranks, and the links between them, stay in view when the stage scrolls.
function heads(world, model, state, places) {
  const ranks = boxesOf(state, places);
  const links = ranks.length > 1 ? [node("links", 0, 0, line(places.column / 2, 13, places.width - places.column / 2, 13, "link"), {fixed: true})] : [];
  return [...links, ...ranks.map((rank) => node(`head${rank}`, places.box(rank).x, 0,
    rect(1, 1, places.column - 2, 23, `s${color(rank)}`, 7) + text(PAD, 17, `rank ${rank}`, `x${color(rank)} b`), {fixed: true, about: [`rank${rank}`]}))];
}
const PAD = 8;

// A strip's name; where columns are narrow it ends at the comma.
function strip(places, rank, name, words) {
  const at = places.label(rank, name);
  if (!places.beside && name !== "counters") words = words.split(",")[0];
  return node(`label.${name}.${rank}`, at.x, at.y, text(0, 0, words, "m halo"));
}

function experts(world, model, state, places) {
  if (state.chart || !state.home || state.inset === "chain" && !places.wide) return [];
  const nodes = [];
  for (let e = 0; e < places.E; e++) {
    const rank = Math.floor(e / places.L), le = e % places.L, at = places.expert(rank, le);
    nodes.push(node(`expert${e}`, at.x, at.y, box(32, 22, "expert", `e${e}`, "t b"), {
      cls: marked(state, `expert${e}`), from: {x: places.left(0), y: 40}, data: {"data-expert": e}, about: [`e${e}`],
      title: `expert ${e}: local expert ${le} of rank ${rank}`}));
    if (le === 0) nodes.push(strip(places, rank, "rows",
      state.offsets ? (state.computed.size ? "rows, results" : "rows, grouped by expert") : "experts"));
  }
  return nodes;
}

function tokens(world, model, state, places, story) {
  const nodes = [], w = places.sizes.chip - 4;
  if (!state.tokens) return nodes;
  for (let rank = 0; rank < places.R; rank++) {
    nodes.push(strip(places, rank, "tokens", state.next ? "new tokens" : state.chips ? "tokens, topk_ids" : "tokens"));
    world.ids[rank].forEach((chosen, t) => {
      const at = places.token(rank, t), hot = isFollowed(state, story, rank, t) ? " hot" : "";
      nodes.push(node(`token.${rank}.${t}`, at.x, at.y,
        box(w, 24, `s${color(rank)} edge`, state.next ? `t${t}′` : `t${t}`, `x${color(rank)}`), {
          cls: "token" + hot + marked(state, `token.${rank}.${t}`), data: {"data-token": `${rank},${t}`}, about: [`t${rank}.${t}`, `rank${rank}`],
          title: `token ${t} of rank ${rank}: ${world.x[rank][t].slice(0, 4).join(", ")}, …`}));
      if (state.chips && !state.next) chosen.forEach((e, k) => {
        const c = places.chip(rank, t, k);
        nodes.push(node(`chip.${rank}.${t}.${k}`, c.x, c.y,
          box(w, 24, "cell", e < 0 ? "−1" : `e${e}`) + (e < 0 ? "" : rect(0, 21, w, 3, `s${color(Math.floor(e / places.L))}`, 0)), {
            cls: "chip" + hot + marked(state, `chip.${rank}.${t}.${k}`), data: {"data-chip": `${rank},${t},${k}`},
            about: [`p${rank}.${t}.${k}`, `t${rank}.${t}`, `e${e}`, "topk_ids"],
            title: `topk_ids[rank ${rank}][token ${t}, k ${k}] = ${e}, weight ${world.weights[rank][t][k].toFixed(2)}`}));
      });
    });
  }
  return nodes;
}

// A line that comes down and ends at (tx, ty) from the right (side 1) or the left (side -1).
const curve = (x, y, tx, ty, side) => `M${x.toFixed(1)} ${y.toFixed(1)}C${x.toFixed(1)} ${(y + 90).toFixed(1)} ${(tx + side * 60).toFixed(1)} ${(ty - 20).toFixed(1)} ${tx.toFixed(1)} ${ty.toFixed(1)}`;

// Lines from a token's choice to its expert, while the router is the subject; they end at the expert's nearer side. As
// rows, the choices of one token on one rank share a line, which that rank splits up.
function routes(world, model, state, places, story) {
  if (!state.lines) return [];
  const {followed, twice} = story;
  const wanted = (p) => state.lines === "all" || (state.lines === "followed" ? p.rank === followed.rank && p.token === followed.token
    : twice && p.rank === twice.rank && p.token === twice.token);
  const start = (p) => { const a = places.chip(p.rank, p.token, 0); return [a.x + places.sizes.chip / 2 - 2, a.y + places.K * places.sizes.CHIP]; };
  const end = (p) => { const b = places.expert(p.dst, p.le), side = p.rank < p.dst ? -1 : 1; return [side < 0 ? b.x - 2 : b.x + 34, b.y + 11, side]; };
  const more = (p) => ({cls: "flat" + (isFollowed(state, story, p.rank, p.token) ? " hot" : ""), about: [`p${name(p)}`, `t${p.rank}.${p.token}`, `e${p.e}`]});
  const pairs = model.pairs.filter(wanted);
  if (state.lines !== "rows") return pairs.map((p) => node(`route.${name(p)}`, 0, 0, path(curve(...start(p), ...end(p)), `route k${color(p.rank)}`), more(p)));
  return [...new Set(pairs.map((p) => p.dst))].map((dst) => {
    const mine = pairs.filter((p) => p.dst === dst), ends = mine.map(end), side = ends[0][2], x = ends[0][0] + side * (side < 0 ? 14 : 26);
    const y = ends.reduce((sum, e) => sum + e[1], 0) / ends.length;
    return node(`route.row.${dst}`, 0, 0, path(curve(...start(mine[0]), x, y, side), `route wide k${color(mine[0].rank)}`) +
      ends.map((e) => path(`M${x.toFixed(1)} ${y.toFixed(1)}L${e[0].toFixed(1)} ${e[1].toFixed(1)}`, `route k${color(mine[0].rank)}`)).join(""), more(mine[0]));
  });
}

// Where a message is: in its slot, in its expert's rows, or back at its rank.
const slotOf = (places, p) => places.slot(p.dst, p.le, p.rank, p.slot);
const rowOf = (places, model, p) => places.row(p.dst, p.le, p.row - model.offsets[p.dst][p.le]);

// The ways of what travels in this step, so that a picture that stands still shows them too.
function trails(world, model, state, places, story) {
  if (state.chart) return [];
  const {moved} = state, half = places.sizes.message / 2, nodes = [];
  const way = (key, rank, a, b, dx = half) => nodes.push(node(`trail.${key}`, 0, 0, line(a.x + dx, a.y + 10, b.x + dx, b.y + 10, `trail k${color(rank)}`), {cls: "flat"}));
  for (const p of model.pairs) {
    const key = name(p), back = places.back(p.rank, p.token, p.k);
    if (moved.back.has(key)) way(key, p.rank, rowOf(places, model, p), back);
    else if (moved.grouped.has(key)) way(key, p.rank, slotOf(places, p), rowOf(places, model, p));
    else if (moved.written.has(key)) way(key, p.rank, places.token(p.rank, p.token), slotOf(places, p));
  }
  for (const key of moved.signalled) {
    const [dst, le, src] = key.split(".").map(Number);
    way(`signal.${key}`, src, places.counter(src, 1, dst * places.L + le), places.count(dst, le, src), 10);
  }
  const p = story.example;
  if (state.inset === "chain") {
    way("writer", p.rank, places.token(p.rank, p.token), slotOf(places, p));
    if (state.chain >= 2) way("signaller", p.rank, places.counter(p.rank, 1, p.e), places.count(p.dst, p.le, p.rank), 10);
    if (state.chain >= 3) way("receiver", p.dst, slotOf(places, p), places.expert(p.dst, p.le));
  }
  return nodes;
}

function counters(world, model, state, places) {
  if (!state.counters) return [];
  const nodes = [], value = {reserved: {}, finished: {}};
  if (!state.reset.has("counters")) for (const which of ["reserved", "finished"]) for (const p of model.pairs)
    if (state[which].has(name(p))) value[which][`${p.rank}.${p.e}`] = (value[which][`${p.rank}.${p.e}`] ?? 0) + 1;
  for (let rank = 0; rank < places.R; rank++) {
    nodes.push(strip(places, rank, "counters", state.counters === "both" ? "reserved, finished" : "reserved"));
    for (let e = 0; e < places.E; e++) {
      const dst = Math.floor(e / places.L), le = e % places.L;
      ["reserved", "finished"].forEach((which, i) => {
        if (i && state.counters !== "both") return;
        const at = places.counter(rank, i, e), key = `${which}.${rank}.${e}`, n = value[which][`${rank}.${e}`] ?? 0;
        nodes.push(node(key, at.x, at.y, box(places.sizes.counter - 2, 20, `cell k${color(dst)}`, n, n ? "t b" : "m"), {
          cls: "counter" + marked(state, key), about: [`s${dst}.${le}.${rank}`, `e${e}`, which],
          title: `${which}[rank ${rank}][local_expert ${le}, dst_rank ${dst}] = ${n}`}));
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
  const nodes = [], {slot, message} = places.sizes;
  for (let dst = 0; dst < places.R; dst++) {
    nodes.push(strip(places, dst, "recv", state.signals ? "recv_buf, recv_count" : "recv_buf"));
    for (let le = 0; le < places.L; le++) {
      const e = dst * places.L + le, group = places.group(dst, le);
      nodes.push(node(`group.${e}`, group.x, group.y, text(0, 0, `e${e}`, "m halo"), {about: [`e${e}`]}));
      for (let src = 0; src < places.R; src++) {
        const at = places.recvLine(dst, le, src), key = `line.${dst}.${le}.${src}`, about = [`s${dst}.${le}.${src}`, `e${e}`, `rank${src}`];
        const taken = model.pairs.filter((p) => p.dst === dst && p.le === le && p.rank === src);
        const body = rect(0, 2, 12, 18, `s${color(src)}`, 2) + Array.from({length: places.T}, (_, s) => {
          const p = taken.find((p) => p.slot === s), old = p && (state.grouped.has(name(p)) || state.next);
          const words = state.blind ? "?" : old ? `t${p.token}` : "";
          return rect(16 + s * slot, 0, message, 20, p && state.reserved.has(name(p)) && !state.next && !state.blind ? "cell claimed" : "cell") +
            (words ? text(16 + s * slot + message / 2, 14.3, words, "m", "middle") : "");
        }).join("");
        nodes.push(node(key, at.x, at.y, body, {cls: "line" + marked(state, key), about: [...about, "recv_buf"],
          title: `recv_buf[rank ${dst}][local_expert ${le} (e${e}), src_rank ${src}]: ${places.T} slots`}));
        if (!state.signals) continue;
        const value = count(model, state, dst, le, src), where = places.count(dst, le, src), word = `count.${dst}.${le}.${src}`;
        nodes.push(node(word + (value === null ? ".none" : ""), where.x, where.y,
          rect(0, 0, 22, 20, value === null ? "cell" : `signal k${color(src)}`, 10) +
          text(11, 14.3, value === null ? "–" : value, value === null ? "m" : "t b", "middle"), {
            cls: marked(state, word), from: value === null ? null : places.counter(src, 1, e), about: [...about, "recv_count"],
            title: `recv_count[rank ${dst}][local_expert ${le}, src_rank ${src}] ${value === null ? "has not arrived" : `= ${value}`}`}));
      }
    }
  }
  return nodes;
}

function rows(world, model, state, places) {
  if (!state.offsets || state.next) return [];
  return model.offsets.flatMap((of, rank) => Array.from({length: places.L}, (_, le) => {
    const at = places.expert(rank, le), n = of[le + 1] - of[le];
    const range = n > 1 ? `${of[le]}–${of[le + 1] - 1}` : n ? `${of[le]}` : "none";
    const cells = Array.from({length: n}, (_, i) => {
      const c = places.row(rank, le, i);
      return rect(c.x - at.x, c.y - at.y, places.sizes.message, 20, "cell");
    }).join("");
    return node(`offset.${rank}.${le}`, at.x, at.y, cells + (places.beside ? text(49, 15, range, "m", "middle") : text(16, 38, range, "m", "middle")), {
      cls: marked(state, `offset.${rank}.${le}`), about: [`e${rank * places.L + le}`, "row_offsets"],
      title: `row_offsets[rank ${rank}][${le}] = ${of[le]}, [${le + 1}] = ${of[le + 1]}`});
  }));
}

function back(world, model, state, places, story) {
  if (!state.backShown || state.next) return [];
  const nodes = [], w = places.sizes.message;
  for (let rank = 0; rank < places.R; rank++) {
    nodes.push(strip(places, rank, "back", state.summed.size ? "returned rows, results" : "returned rows"));
    world.ids[rank].forEach((chosen, t) => {
      const about = [`t${rank}.${t}`, `rank${rank}`];
      chosen.forEach((e, k) => {
        const at = places.back(rank, t, k);
        nodes.push(node(`place.${rank}.${t}.${k}`, at.x, at.y, rect(0, 0, w, 20, "cell"), {about: [`p${rank}.${t}.${k}`, ...about],
          title: `combine recv_buf[rank ${rank}][token ${t}, k ${k}]`}));
      });
      if (!state.summed.has(`${rank}.${t}`)) return;
      const at = places.out(rank, t);
      nodes.push(node(`out.${rank}.${t}`, at.x, at.y, box(w, 20, `s${color(rank)} edge`, `Σ${t}`, `x${color(rank)} b`), {
        cls: isFollowed(state, story, rank, t) ? "hot" : "", from: places.back(rank, t, 0), about,
        title: `result of token ${t} of rank ${rank}`}));
    });
  }
  return nodes;
}

// One node a message: it is the same thing from the token through slot, row and expert back to its rank.
function messages(world, model, state, places, story) {
  if (state.next || state.blind) return [];
  return model.pairs.filter((p) => state.written.has(name(p))).map((p) => {
    const key = name(p);
    let at, what;
    if (state.back.has(key)) [at, what] = [places.back(p.rank, p.token, p.k), `its result, in combine's recv_buf[rank ${p.rank}][token ${p.token}, k ${p.k}]`];
    else if (state.grouped.has(key)) [at, what] = [rowOf(places, model, p), `row ${p.row} of rank ${p.dst}, for expert e${p.e}`];
    else [at, what] = [slotOf(places, p), `recv_buf[rank ${p.dst}][local_expert ${p.le}, src_rank ${p.rank}, slot ${p.slot}]`];
    const done = state.computed.has(key), cls = done ? `hollow k${color(p.rank)}` : `s${color(p.rank)} edge`;
    const hot = isFollowed(state, story, p.rank, p.token) ? " hot" : "";
    return node(`message.${key}`, at.x, at.y, box(places.sizes.message, 20, cls, done ? `y${p.token}` : `t${p.token}`, done ? "t" : `x${color(p.rank)}`), {
      cls: "message" + hot + marked(state, `message.${key}`), from: places.token(p.rank, p.token), data: {"data-token": `${p.rank},${p.token}`},
      about: [`t${p.rank}.${p.token}`, `p${key}`, `e${p.e}`, `s${segment(p)}`, `rank${p.rank}`],
      title: `token ${p.token} of rank ${p.rank}: ${what}`});
  });
}
