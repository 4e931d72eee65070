// Values that stand in the text as {{name}}: all of them follow from the world and from the numbers that readers change.

import {combine, messageBytes, traffic} from "./model.js";
import {say} from "./svg.js";

export const HIDDEN = 7168;      // of the measured model
export const EXPERT_BYTES = 3 * HIDDEN * 2048;      // three matrices, one byte a weight

/** Pairs and rows that a rank sends to all other ranks on average, of a uniform routing. */
export function uniform({ranks, experts, topK, tokens}) {
  const local = experts / ranks;
  let none = 1;       // no expert of a given rank is among the top k
  for (let k = 0; k < topK; k++) none *= (experts - local - k) / (experts - k);
  return {pairs: tokens * topK * (ranks - 1) / ranks, rows: tokens * (1 - none) * (ranks - 1)};
}

const tokenName = (p) => `t${p.token}`, expertName = (e) => `e${e}`, rankName = (rank) => `rank ${rank}`;
const worst = ({rankLoad}) => rankLoad.indexOf(Math.max(...rankLoad));

/** {name: {name, rank}}: what on the stage a value in the text names, and the rank whose colour it has. */
export function references({world, followed, first, example, together, late, twice, load}) {
  const token = (p) => ({name: `t${p.rank}.${p.token}`, rank: p.rank}), rank = (r) => ({name: `rank${r}`, rank: r});
  const expert = (e) => ({name: `e${e}`, rank: Math.floor(e / world.local)});
  const missed = late ?? example, [one] = together;
  return {token: token(followed), tokenRank: rank(followed.rank),
    lastExpert: expert(world.ranks * world.local - 1), lastRank: rank(world.ranks - 1),
    firstExpert: expert(first.e), firstDst: rank(first.dst),
    exampleExpert: expert(example.e), src: rank(example.rank), dst: rank(example.dst),
    ...one && {togetherExpert: expert(one.e), togetherRank: rank(one.rank)},
    lateToken: token(missed), lateRank: rank(missed.rank), lateExpert: expert(missed.e),
    ...twice && {twiceToken: token(twice)}, worst: rank(worst(load))};
}

/** {name: text} for a story, and the numbers of the page that are not the world's. */
export function values(story, numbers) {
  const {world, model, followed, first, together, late, example, twice, load} = story;
  const experts = world.ranks * world.local, t = story.whole ?? traffic(world), link = story.measured.link_gbps * 1e3;
  const weights = numbers.bigExperts * 58 * EXPERT_BYTES, bytes = messageBytes(HIDDEN, 8);
  const many = uniform({ranks: 4, experts: 256, topK: numbers.bigTopK, tokens: numbers.bigTokens}), floors = uniform({ranks: 4, experts: 256, topK: 8, tokens: numbers.bigTokens});
  const result = combine(world)[followed.rank][followed.token];
  const missed = late ?? example, rowsOfExample = model.counts[example.dst][example.le][example.rank];
  const twiceIds = twice ? model.pairs.filter((p) => p.rank === twice.rank && p.token === twice.token && p.dst === twice.dst).map((p) => expertName(p.e)) : [];
  const sumPairs = t.pairs.flat().reduce((a, b) => a + b, 0), sumRows = t.rows.flat().reduce((a, b) => a + b, 0);
  return {
    ranks: world.ranks, local: world.local, experts, lastExpert: expertName(experts - 1), lastRank: rankName(world.ranks - 1),
    lastLocal: world.local - 1,
    gigabytes: say(weights / 1e9), gpus: Math.ceil(weights / 141e9),
    token: tokenName(followed), tokenRank: rankName(followed.rank),
    chosen: world.ids[followed.rank][followed.token].map((e, k) => e < 0 ? "none" : `e${e} (weight ${world.weights[followed.rank][followed.token][k].toFixed(2)})`).join(" and "),
    exampleExpert: expertName(example.e), dst: rankName(example.dst), src: rankName(example.rank),
    firstExpert: expertName(first.e), firstDst: rankName(first.dst), firstSlot: first.slot,
    pairs: model.pairs.length, message: say(bytes.total),
    together: together.length, togetherExpert: expertName(together[0]?.e ?? 0), togetherRank: rankName(together[0]?.rank ?? 0), togetherSlots: together.map((p) => p.slot).join(", "),
    lateToken: tokenName(missed), lateRank: rankName(missed.rank), lateExpert: expertName(missed.e),
    exampleRows: `${rowsOfExample} row${rowsOfExample === 1 ? "" : "s"}`, row: example.row,
    twiceToken: twice ? tokenName(twice) : "No token here",
    twiceChoice: twice ? `of ${rankName(twice.rank)} chose ${twiceIds.join(" and ")}, and all of them live on ${rankName(twice.dst)}. Its numbers cross the link ${twiceIds.length === 2 ? "twice" : `${twiceIds.length} times`}.`
      : "chose two experts of one other rank, so none crosses a link twice. Move a choice to see the difference.",
    onceChoice: twice ? `The numbers cross once, and ${rankName(twice.dst)} hands them to ${twiceIds.join(" and ")}.` : "Nothing changes here.",
    sum: result ? result[0] : 0, sumPairs: say(sumPairs), sumRows: say(sumRows), loadTokens: story.loadOf,
    saved: sumRows ? say(100 * (1 - sumRows / sumPairs)) : 0,
    rankImbalance: say(load.imbalance, 2), expertImbalance: say(load.expertImbalance, 2),
    worst: rankName(worst(load)),
    bigPairs: say(many.pairs), bigRows: say(many.rows),
    bigSaved: say(100 * (1 - many.rows / many.pairs)),
    floorPairs: say(floors.pairs * bytes.total / link, floors.pairs > 2000 ? 0 : 1), floorRows: say(floors.rows * 2 * HIDDEN / link, floors.rows > 2000 ? 0 : 1),
  };
}
