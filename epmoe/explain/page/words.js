// Values that stand in the text as {{name}}: all of them follow from the world and from the numbers that readers change.

import {combine, messageBytes, traffic} from "./model.js";
import {say} from "./svg.js";

const HIDDEN = 7168, LINK = 359.1;      // of the measured model, GB/s of the measured links
export const EXPERT_BYTES = 3 * HIDDEN * 2048;      // three matrices, one byte a weight

/** Pairs and rows that a rank sends to all other ranks on average, of a uniform routing. */
export function uniform({ranks, experts, topK, tokens}) {
  const local = experts / ranks;
  let none = 1;       // no expert of a given rank is among the top k
  for (let k = 0; k < topK; k++) none *= (experts - local - k) / (experts - k);
  return {pairs: tokens * topK * (ranks - 1) / ranks, rows: tokens * (1 - none) * (ranks - 1)};
}

const tokenName = (p) => `t${p.token}`, expertName = (e) => `e${e}`, rankName = (rank) => `rank ${rank}`;

const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

/** {name: {name, rank}}: what on the stage a value in the text names, and the rank whose colour it has. */
export function references({world, followed, example, together, late, twice, model, load}) {
  const token = (p) => ({name: `t${p.rank}.${p.token}`, rank: p.rank}), rank = (r) => ({name: `rank${r}`, rank: r});
  const expert = (e) => ({name: `e${e}`, rank: Math.floor(e / world.local)});
  const first = firstOf(model, followed) ?? example, late_ = late ?? example, made = {};
  const put = (name, p) => { if (p) made[name] = p; };
  put("token", token(followed));
  put("tokenRank", rank(followed.rank));
  put("lastExpert", expert(world.ranks * world.local - 1));
  put("lastRank", rank(world.ranks - 1));
  put("firstExpert", first && expert(first.e));
  put("firstDst", first && rank(first.dst));
  put("exampleExpert", example && expert(example.e));
  put("src", example && rank(example.rank));
  put("dst", example && rank(example.dst));
  put("togetherExpert", together[0] && expert(together[0].e));
  put("togetherRank", together[0] && rank(together[0].rank));
  put("lateToken", late_ && token(late_));
  put("lateRank", late_ && rank(late_.rank));
  put("lateExpert", late_ && expert(late_.e));
  put("twiceToken", twice && token(twice));
  put("worst", rank(load.rankLoad.indexOf(Math.max(...load.rankLoad))));
  return made;
}

const firstOf = (model, followed) => model.pairs.find((p) => p.rank === followed.rank && p.token === followed.token);

/** {name: text} for a story, and the numbers of the page that are not the world's. */
export function values(story, numbers) {
  const {world, model, followed, together, late, example, twice} = story;
  const experts = world.ranks * world.local, t = story.whole ?? traffic(world), {load} = story;
  const weights = numbers.bigExperts * 58 * EXPERT_BYTES, bytes = messageBytes(HIDDEN, 8);
  const many = uniform({ranks: 4, experts: 256, topK: numbers.bigTopK, tokens: numbers.bigTokens}), floors = uniform({ranks: 4, experts: 256, topK: 8, tokens: numbers.bigTokens});
  const result = combine(world)[followed.rank][followed.token];
  const late_ = late ?? example, inside = t.pairs.map((of, r) => of[r]).reduce((a, b) => a + b, 0);
  const first = firstOf(model, followed) ?? example;
  const twiceIds = twice ? model.pairs.filter((p) => p.rank === twice.rank && p.token === twice.token && p.dst === twice.dst).map((p) => expertName(p.e)) : [];
  const sumPairs = t.pairs.flat().reduce((a, b) => a + b, 0), sumRows = t.rows.flat().reduce((a, b) => a + b, 0);
  return {
    ranks: world.ranks, local: world.local, experts, topK: world.topK, lastExpert: expertName(experts - 1), lastRank: rankName(world.ranks - 1),
    lastLocal: world.local - 1,
    gigabytes: say(weights / 1e9), gpus: Math.ceil(weights / 141e9), bigExperts: numbers.bigExperts,
    token: tokenName(followed), tokenRank: rankName(followed.rank),
    chosen: world.ids[followed.rank][followed.token].map((e, k) => e < 0 ? "none" : `e${e} (weight ${world.weights[followed.rank][followed.token][k].toFixed(2)})`).join(" and "),
    exampleExpert: expertName(example.e), dst: rankName(example.dst), src: rankName(example.rank),
    firstExpert: expertName(first.e), firstDst: rankName(first.dst), firstSlot: first.slot,
    pairs: model.pairs.length, payload: say(bytes.payload), trailer: bytes.src_info + bytes.topk_info, message: say(bytes.total),
    together: together.length, togetherExpert: expertName(together[0]?.e ?? 0), togetherRank: rankName(together[0]?.rank ?? 0), togetherSlots: together.map((p) => p.slot).join(", "),
    lateToken: tokenName(late_), lateRank: rankName(late_.rank), lateExpert: expertName(late_.e),
    exampleRows: plural(model.counts[example.dst][example.le][example.rank], "row"), row: example.row,
    twiceToken: twice ? tokenName(twice) : "No token here",
    twiceChoice: twice ? `of ${rankName(twice.rank)} chose ${twiceIds.join(" and ")}, and all of them live on ${rankName(twice.dst)}. Its numbers cross the link ${twiceIds.length === 2 ? "twice" : `${twiceIds.length} times`}.`
      : "chose two experts of one other rank, so none crosses a link twice. Move a choice to see the difference.",
    onceChoice: twice ? `The numbers cross once, and ${rankName(twice.dst)} hands them to ${twiceIds.join(" and ")}.` : "Nothing changes here.",
    sum: result ? result[0] : 0, sumPairs: say(sumPairs), sumRows: say(sumRows), inside: say(inside), loadTokens: story.loadOf,
    saved: sumRows ? say(100 * (1 - sumRows / sumPairs)) : 0,
    rankImbalance: say(load.imbalance, 2), expertImbalance: say(load.expertImbalance, 2),
    worst: rankName(load.rankLoad.indexOf(Math.max(...load.rankLoad))),
    bigTokens: say(numbers.bigTokens), bigPairs: say(many.pairs), bigRows: say(many.rows), skew: numbers.skew.toFixed(1),
    bigSaved: say(100 * (1 - many.rows / many.pairs)),
    floorPairs: say(floors.pairs * bytes.total / LINK / 1e3, floors.pairs > 2000 ? 0 : 1), floorRows: say(floors.rows * 2 * HIDDEN / LINK / 1e3, floors.rows > 2000 ? 0 : 1),
  };
}
