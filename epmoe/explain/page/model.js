// Dispatch and combine of a small world: the same numbers as epmoe_ref, which the tests compare on 200 worlds.
//
// A world: {ranks, local (experts a rank), topK, ids, weights, x}; ids, weights [rank][token][k], x [rank][token][col].
// An id of -1 means "no expert". Slots are claimed in the order of tokens, one of the orders that the protocol allows.

import {bf16, fma} from "./floats.js";

const zeros = (...sizes) => sizes.length === 1
  ? Array(sizes[0]).fill(0)
  : Array.from({length: sizes[0]}, () => zeros(...sizes.slice(1)));
const sum = (list) => list.reduce((a, b) => a + b, 0);

/** What the page's expert does to a number: a stand-in for a small neural network. */
export const expert = (e, value) => bf16(value * (e + 1));

/**
 * Every pair (token, k) with an expert: where its message lies and which row it becomes; counts and offsets by rank.
 * pairs: [{rank, token, k, e, dst, le, slot, row, weight}]; counts [dst][local expert][src_rank];
 * offsets [dst][local experts + 1]; rows [dst][row] is a pair.
 */
export function dispatch(world) {
  const {ranks, local, ids} = world;
  const counts = zeros(ranks, local, ranks), pairs = [];
  ids.forEach((tokens, rank) => tokens.forEach((chosen, token) => chosen.forEach((e, k) => {
    if (e < 0) return;
    const dst = Math.floor(e / local), le = e % local;
    const slot = counts[dst][le][rank]++;
    pairs.push({rank, token, k, e, dst, le, slot, weight: world.weights[rank][token][k]});
  })));
  const offsets = counts.map((of) => of.reduce((ends, c) => [...ends, ends.at(-1) + sum(c)], [0]));
  const rows = offsets.map((of) => Array(of.at(-1)));
  for (const p of pairs) {
    p.row = offsets[p.dst][p.le] + sum(counts[p.dst][p.le].slice(0, p.rank)) + p.slot;
    rows[p.dst][p.row] = p;
  }
  return {pairs, counts, offsets, rows};
}

/** combined [rank][token][col]: each token's expert outputs times its weights, summed in the order of k. */
export function combine(world) {
  return world.x.map((tokens, rank) => tokens.map((x, token) => x.map((value) => {
    let sumSoFar = 0;
    world.ids[rank][token].forEach((e, k) => {
      if (e >= 0) sumSoFar = fma(world.weights[rank][token][k], expert(e, value), sumSoFar);
    });
    return bf16(sumSoFar);
  })));
}

/**
 * Who sends how much to whom: pairs, rows [src_rank][dst_rank] (a row is a token that a rank gets, however many of its
 * experts want it), load [expert], rankLoad [rank], and the imbalance of both: the largest over the mean.
 */
export function traffic(world) {
  const {ranks, local, ids} = world;
  const pairs = zeros(ranks, ranks), rows = zeros(ranks, ranks), load = zeros(ranks * local);
  ids.forEach((tokens, rank) => tokens.forEach((chosen) => {
    const there = new Set();
    for (const e of chosen) if (e >= 0) {
      const dst = Math.floor(e / local);
      pairs[rank][dst]++;
      load[e]++;
      there.add(dst);
    }
    for (const dst of there) rows[rank][dst]++;
  }));
  return summary({pairs, rows, load, local});
}

/** The numbers that follow from who sends how much to whom. */
export function summary({pairs, rows, load, local}) {
  const rankLoad = pairs.map((_, dst) => sum(pairs.map((of) => of[dst])));
  const over = (list) => sum(list) ? Math.max(...list) * list.length / sum(list) : 1;
  return {pairs, rows, load, local, rankLoad, imbalance: over(rankLoad), expertImbalance: over(load)};
}

/** Bytes of a message: the token's numbers in bf16, its index, and its expert ids, each padded to 16 bytes. */
export function messageBytes(hidden, topK) {
  const up = (n) => Math.ceil(n / 16) * 16;
  return {payload: up(2 * hidden), src_info: 16, topk_info: up(2 * topK),
    total: up(2 * hidden) + 16 + up(2 * topK)};
}

/** A routing from a seed: experts are chosen by random scores; skew 0 is uniform, 1 makes expert e popular as 1/(e+1). */
export function makeWorld({ranks, local, topK, tokens, skew, seed = 0, hidden = 4}) {
  const experts = ranks * local, k = Math.min(topK, experts);
  let state = (seed * 2654435761 + ranks * 97 + local * 31 + 1) >>> 0;
  const random = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
  const of = (make) => Array.from({length: ranks}, () => Array.from({length: tokens}, make));
  const scores = of(() => Array.from({length: experts}, (_, e) =>
    -Math.log(-Math.log(random() * 0.999998 + 1e-6)) - skew * Math.log(e + 1)));
  const ids = scores.map((of) => of.map((s) => s.map((_, e) => e).sort((a, b) => s[b] - s[a]).slice(0, k)));
  const weights = ids.map((of, r) => of.map((chosen, t) => {
    const raised = chosen.map((e) => Math.exp(scores[r][t][e] / 2)), all = sum(raised);
    return raised.map((w) => Math.fround(Math.round(100 * w / all) / 100));
  }));
  const x = of(() => Array.from({length: hidden}, () => (Math.floor(random() * 33) - 16) / 8));
  return {ranks, local, topK: k, ids, weights, x};
}
