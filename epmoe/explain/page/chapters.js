// The chapters: for each step what it changes of the stage. Their words are in text/*.md, a caption for each step.

import {beginning, name, segment} from "./scene.js";

const all = (story) => story.model.pairs;
const names = (pairs) => pairs.map(name);
const add = (set, keys) => new Set([...set, ...keys]);
const mine = (story) => all(story).filter((p) => p.rank === story.followed.rank && p.token === story.followed.token);
const segments = (story) => story.model.counts.flatMap((of, dst) => of.flatMap((c, le) => c.map((_, src) => `${dst}.${le}.${src}`)));
// what follows is what is still missing once the late message is left out
const punctual = (story) => all(story).filter((p) => p !== story.late);
const lateSegment = (story) => story.late ? segment(story.late) : null;
const ofRank = (pairs, rank) => pairs.filter((p) => p.rank === rank);

/** Steps by chapter: {chapter: [(state, story) => changes]}. A story: {world, model, followed, late, ...}. */
export const CHAPTERS = {
  "one-gpu": [
    () => ({capacity: 1}),
    () => ({capacity: 2}),
    (s, {world}) => ({capacity: 0, boxes: world.ranks, home: true, focus: ["rows"]}),
  ],
  "owners": [
    (s, {world}) => ({mark: range(0, world.local).map((e) => `expert${e}`), focus: ["rows"]}),
    (s, {world}) => ({mark: [`expert${world.ranks * world.local - 1}`]}),
    () => ({mark: [], tokens: true, focus: ["tokens"]}),
  ],
  "router": [
    (s, {followed, world}) => ({chips: true, lines: "followed", mark: range(0, world.topK).map((k) => `chip.${followed.rank}.${followed.token}.${k}`)}),
    () => ({lines: "all", mark: [], focus: ["tokens", "rows"]}),
    () => ({lines: "followed", follow: true}),
  ],
  "message": [
    () => ({lines: false, inset: "message", focus: ["back"]}),
    () => ({recv: true, focus: ["recv"]}),
    (s, story) => ({mark: mine(story).map((p) => `line.${p.dst}.${p.le}.${p.rank}`)}),
  ],
  "slot": [
    () => ({inset: null, mark: [], counters: "reserved", focus: ["counters", "recv"]}),
    (s, story) => ({reserved: add(s.reserved, names(mine(story).slice(0, 1))), mark: mine(story).slice(0, 1).flatMap(touched)}),
    (s, story) => ({reserved: add(s.reserved, names(story.together)), mark: story.together.slice(0, 1).flatMap(touched)}),
    (s, story) => ({reserved: add(s.reserved, names(all(story))), mark: []}),
  ],
  "travel": [
    (s, story) => ({written: add(s.written, names(mine(story))), focus: ["tokens", "recv"]}),
    (s, story) => ({written: add(s.written, names(ofRank(punctual(story), story.followed.rank)))}),
    (s, story) => ({written: add(s.written, names(punctual(story)))}),
    () => ({blind: true, focus: ["recv"]}),
  ],
  "arrived": [
    (s, story) => ({blind: false, counters: "both", finished: add(s.finished, names(punctual(story))), focus: ["counters", "recv"]}),
    () => ({signals: true}),
    (s, story) => ({signalled: add(s.signalled, segments(story).filter((key) => key !== lateSegment(story) && story.sizeOf(key))), mark: story.late ? [`line.${lateSegment(story)}`] : []}),
    (s, story) => ({signalled: add(s.signalled, segments(story).filter((key) => key !== lateSegment(story))),
      mark: segments(story).filter((key) => !story.sizeOf(key)).map((key) => `count.${key}`)}),
    (s, story) => ({written: add(s.written, names(all(story))), finished: add(s.finished, names(all(story))), signalled: add(s.signalled, segments(story)),
      mark: story.late ? [`message.${name(story.late)}`, `count.${lateSegment(story)}`] : []}),
  ],
  "order": [
    (s, story) => ({inset: "chain", chain: 1, mark: [`message.${name(story.example)}`], focus: ["recv", "back"]}),
    (s, story) => ({chain: 2, mark: [`finished.${story.example.rank}.${story.example.e}`, `count.${segment(story.example)}`]}),
    (s, story) => ({chain: 3, mark: [`count.${segment(story.example)}`, `line.${segment(story.example)}`]}),
  ],
  "grouping": [
    () => ({inset: null, mark: [], offsets: true, focus: ["recv", "rows"]}),
    (s, story) => ({grouped: add(s.grouped, names(mine(story)))}),
    (s, story) => ({grouped: add(s.grouped, names(all(story).filter((p) => p.dst === story.example.dst)))}),
    (s, story) => ({grouped: add(s.grouped, names(all(story)))}),
  ],
  "experts": [
    (s, story) => ({computed: add(s.computed, names(all(story).filter((p) => p.dst === 0))), focus: ["rows"]}),
    (s, story) => ({computed: add(s.computed, names(all(story)))}),
  ],
  "back": [
    () => ({backShown: true, focus: ["rows", "back"]}),
    (s, story) => ({back: add(s.back, names(mine(story)))}),
    (s, story) => ({back: add(s.back, names(all(story)))}),
    (s, {followed}) => ({summed: new Set([`${followed.rank}.${followed.token}`])}),
    (s, {world}) => ({summed: new Set(world.ids.flatMap((of, rank) => of.map((_, t) => `${rank}.${t}`)))}),
  ],
  "clean": [
    (s) => ({reset: add(s.reset, ["counters"]), focus: ["counters"]}),
    (s) => ({reset: add(s.reset, ["recv_count"]), focus: ["recv"]}),
    () => ({next: true, follow: false, focus: ["tokens"]}),
  ],
  "broken": null,       // from the recordings: see brokenSteps
  "rows": [
    () => ({...beginning(), boxes: 9, home: true, tokens: true, chips: true, lines: "pairs", focus: ["tokens", "rows"]}),
    (s, {twice}) => ({lines: twice ? "rows" : "pairs"}),
    () => ({lines: false, chart: {kind: "bytes", step: 1}, focus: ["chart"]}),
    () => ({chart: {kind: "bytes", step: 2}}),
    () => ({chart: {kind: "ranks", step: 1}}),
  ],
  "hot": [
    () => ({follow: true, chart: {kind: "load", step: 1}}),
    () => ({chart: {kind: "load", step: 2}}),
    () => ({chart: {kind: "load", step: 3}}),
  ],
  "time": [
    () => ({chart: {kind: "time", step: 1}}),
    () => ({chart: {kind: "time", step: 2}}),
    () => ({chart: {kind: "time", step: 3}}),
  ],
};

const range = (from, to) => Array.from({length: to - from}, (_, i) => from + i);
const touched = (p) => [`reserved.${p.rank}.${p.e}`, `line.${p.dst}.${p.le}.${p.rank}`];

/** Steps of the chapter of broken kernels: each operation of each recorded pair of runs. */
const brokenSteps = (recordings) => recordings.flatMap((pair, n) => range(0, pair.length).map((i) => ({
  caption: n, change: () => ({chart: {kind: "broken", recording: n, step: i + 1}, focus: ["chart"]})})));

/** Everything that chapters refer to: the world, what dispatch makes of it, the followed token, the late message. */
export function makeStory(world, model, more = {}) {
  const {pairs} = model;
  const at = (rank, token) => pairs.filter((p) => p.rank === rank && p.token === token);
  const tokens = world.ids.flatMap((of, rank) => of.map((_, token) => ({rank, token})));
  const apart = ({rank, token}) => new Set(at(rank, token).map((p) => p.dst).filter((d) => d !== rank)).size * 10 + at(rank, token).length;
  const wished = more.followed && world.ids[more.followed.rank]?.[more.followed.token] ? more.followed : null;
  const followed = wished ?? tokens.reduce((best, one) => apart(one) > apart(best) ? one : best, tokens[0]);
  const away = pairs.filter((p) => p.dst !== p.rank);
  const late = away.findLast((p) => p.rank !== followed.rank || p.token !== followed.token) ?? null;
  const of = (p) => pairs.filter((q) => segment(q) === segment(p));
  const own = at(followed.rank, followed.token);
  const example = own.find((p) => p.dst !== p.rank) ?? pairs[0], first = own[0] ?? example;
  const together = pairs.reduce((best, p) => of(p).length > best.length && p !== own[0] ? of(p) : best, []);
  const sizeOf = (key) => { const [dst, le, src] = key.split(".").map(Number); return model.counts[dst][le][src]; };
  const twice = away.find((p) => away.some((q) => q !== p && q.rank === p.rank && q.token === p.token && q.dst === p.dst)) ?? null;
  return {...more, world, model, followed, first, late, together, example, twice, sizeOf};
}

// What travels in a step is what these sets gain.
const TRAVEL = ["written", "signalled", "grouped", "back"];

// What can be seen of a state, as text: sets only grow, so their sizes tell them apart.
const looks = (state) => JSON.stringify({...state, focus: null}, (_, v) => v instanceof Set ? v.size : v);

/**
 * The steps in order, each with the stage's state: [{chapter, caption, state}]; order: the chapters that the page has. In a
 * tiny world some would change nothing that can be seen: they are left out.
 */
export function stepsOf(order, story) {
  const all = order.flatMap((chapter) => (chapter === "broken" ? brokenSteps(story.recordings)
    : CHAPTERS[chapter].map((change, caption) => ({caption, change}))).map((step) => ({chapter, ...step})));
  let before = beginning();
  return all.flatMap(({chapter, caption, change}) => {
    const state = {...before, ...change(before, story)};
    state.moved = Object.fromEntries(TRAVEL.map((set) => [set, new Set([...state[set]].filter((key) => !before[set].has(key)))]));
    const changed = looks(state) !== looks(before);
    before = state;
    return changed ? [{chapter, caption, state}] : [];
  });
}
