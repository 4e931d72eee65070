// Values that stand in the text as {{name}}: all of them follow from the world and from the numbers that readers change.

import {combine, messageBytes, traffic} from "./model.js";
import {say} from "./svg.js";

const HIDDEN = 7168, LINK = 359.1;      // of the measured model, GB/s of the measured links

/** Pairs and rows that a rank sends to each other rank on average, of a uniform routing. */
export function uniform({ranks, experts, topK, tokens}) {
  const local = experts / ranks;
  let none = 1;       // no expert of a given rank is among the top k
  for (let k = 0; k < topK; k++) none *= (experts - local - k) / (experts - k);
  return {pairs: tokens * topK * (ranks - 1) / ranks, rows: tokens * (1 - none) * (ranks - 1)};
}

/** {name: text} for a story, and the numbers of the page that are not the world's. */
export function values(story, numbers) {
  const {world, model, followed, together, late, example} = story;
  const experts = world.ranks * world.local, t = story.whole ?? traffic(world), {load} = story;
  const weights = numbers.bigExperts * 58 * 44e6, bytes = messageBytes(HIDDEN, 8);
  const many = uniform({ranks: 4, experts: 256, topK: 8, tokens: numbers.bigTokens});
  const result = combine(world)[followed.rank][followed.token];
  const late_ = late ?? example, inside = t.pairs.map((of, r) => of[r]).reduce((a, b) => a + b, 0);
  const first = model.pairs.find((p) => p.rank === followed.rank && p.token === followed.token) ?? example;
  const sumPairs = t.pairs.flat().reduce((a, b) => a + b, 0), sumRows = t.rows.flat().reduce((a, b) => a + b, 0);
  return {
    ranks: world.ranks, local: world.local, experts, topK: world.topK, lastExpert: experts - 1, lastRank: world.ranks - 1,
    lastLocal: world.local - 1, firstLast: world.local - 1,
    gigabytes: say(weights / 1e9), gpus: Math.ceil(weights / 141e9), bigExperts: numbers.bigExperts,
    token: followed.token, tokenRank: followed.rank,
    chosen: world.ids[followed.rank][followed.token].map((e, k) => e < 0 ? "none" : `e${e} (weight ${world.weights[followed.rank][followed.token][k].toFixed(2)})`).join(" and "),
    e: example.e, dst: example.dst, le: example.le, src: example.rank, slot: example.slot, firstE: first.e, firstDst: first.dst, firstSlot: first.slot,
    pairs: model.pairs.length, payload: say(bytes.payload), trailer: bytes.src_info + bytes.topk_info, message: say(bytes.total),
    together: together.length, togetherE: together[0]?.e ?? 0, togetherRank: together[0]?.rank ?? 0, togetherSlots: together.map((p) => p.slot).join(", "),
    lateToken: late_.token, lateRank: late_.rank, lateE: late_.e, lateDst: late_.dst,
    exampleCount: model.counts[example.dst][example.le][example.rank], row: example.row,
    sum: result ? result[0] : 0, sumPairs: say(sumPairs), sumRows: say(sumRows), inside: say(inside), loadTokens: story.loadOf,
    saved: sumRows ? say(100 * (1 - sumRows / sumPairs)) : 0,
    rankImbalance: say(load.imbalance, 2), expertImbalance: say(load.expertImbalance, 2),
    worst: load.rankLoad.indexOf(Math.max(...load.rankLoad)),
    bigTokens: say(numbers.bigTokens), bigPairs: say(many.pairs), bigRows: say(many.rows), skew: numbers.skew.toFixed(1),
    floorPairs: say(many.pairs * bytes.total / LINK / 1e3, many.pairs > 2000 ? 0 : 1), floorRows: say(many.rows * 2 * HIDDEN / LINK / 1e3, many.rows > 2000 ? 0 : 1),
  };
}
