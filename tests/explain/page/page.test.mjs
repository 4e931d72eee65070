// The page's modules, tested by node: `node --test tests/explain/page`, or by pytest.

import test from "node:test";
import assert from "node:assert/strict";
import {readFileSync, readdirSync} from "node:fs";
import {dispatch, makeWorld, traffic} from "../../../epmoe/explain/page/model.js";
import {bf16, fma} from "../../../epmoe/explain/page/floats.js";
import {CHAPTERS, stepsOf} from "../../../epmoe/explain/page/chapters.js";
import {picture, storyOf} from "../../../epmoe/explain/page/picture.js";
import {drawn} from "../../../epmoe/explain/page/svg.js";
import {film} from "../../../epmoe/explain/page/stills.js";
import {stepped} from "../../../epmoe/explain/page/scrub.js";
import {uniform, values} from "../../../epmoe/explain/page/words.js";

const page = new URL("../../../epmoe/explain/page/", import.meta.url);
const texts = Object.fromEntries(readdirSync(new URL("text/", page)).map((f) => [f.replace(/^\d+-|\.md$/g, ""), readFileSync(new URL(`text/${f}`, page), "utf8")]));
const measured = JSON.parse(readFileSync(new URL("measured.json", page), "utf8"));
const numbers = {bigExperts: 256, bigTokens: 4096, bigTopK: 8, skew: 1};
const order = Object.keys(CHAPTERS).filter((name) => name !== "broken");
const sizes = [{ranks: 3, local: 2, topK: 2, tokens: 3}, {ranks: 2, local: 1, topK: 1, tokens: 1}, {ranks: 4, local: 3, topK: 3, tokens: 4}, {ranks: 2, local: 3, topK: 2, tokens: 4}];
const story = (world) => storyOf({measured, numbers}, world, numbers);

test("bf16 and fma round once, ties to even", () => {
  assert.equal(bf16(1 + 2 ** -8), 1);
  assert.equal(bf16(1 + 3 * 2 ** -8), 1 + 2 ** -6);
  assert.equal(bf16(1 + 2 ** -8 + 2 ** -20), 1 + 2 ** -7);
  // the product's last bit decides a tie of the sum: rounding to double first would lose it
  assert.equal(fma(1 + 2 ** -23, 2 ** -24 * (1 + 2 ** -7), 1), Math.fround(1 + 2 ** -23));
  assert.equal(fma(2 ** -24, 1, 1), 1);
  assert.equal(fma(2 ** -24, 1, 1 + 2 ** -23), Math.fround(1 + 2 ** -22));
  assert.equal(fma(2 ** -60, 1, fma(2 ** -24, 1, 1)), 1);
});

for (const size of sizes) {
  for (const width of [820, 374]) {
    test(`no step leaves the stage as it was: ${JSON.stringify(size)} at ${width}`, () => {
      const told = story(makeWorld({...size, skew: 0.3, seed: 0})), steps = stepsOf(order, told);
      assert.ok(steps.length >= 35);
      let before = "";
      steps.forEach((step, n) => {
        const now = drawn(picture(told, steps, n, width).nodes);
        assert.notEqual(now, before, `step ${n}, ${step.chapter} ${step.caption}`);
        before = now;
      });
    });
  }
}

test("everything stays on the stage, and each thing is there once", () => {
  for (const size of sizes) for (const width of [820, 374]) {
    if (width < 600 && size.ranks * size.local > 6) continue;
    const told = story(makeWorld({...size, skew: 0, seed: 3})), steps = stepsOf(order, told);
    steps.forEach((_, n) => {
      const {nodes, places} = picture(told, steps, n, width), keys = nodes.map((d) => d.key);
      assert.equal(new Set(keys).size, keys.length);
      for (const d of nodes) {
        assert.ok(d.x >= -1 && d.x < width && d.y >= -1 && d.y <= places.height + 1, `${d.key} at ${d.x}, ${d.y}`);
        assert.ok(!/NaN|undefined/.test(d.body + d.x + d.y), `${d.key}: ${d.body}`);
      }
    });
  }
});

test("in the film a message is over the slot, row and place that it comes to", () => {
  const {things} = film({data: {measured, numbers, world: makeWorld({...sizes[0], skew: 0, seed: 0})}, order});
  const kinds = things.map((t) => t.key.match(/^[a-z]+/)[0]), first = kinds.indexOf("message");
  for (const under of ["gpu", "line", "offset", "place"]) assert.ok(kinds.lastIndexOf(under) >= 0 && kinds.lastIndexOf(under) < first, under);
  assert.ok(kinds.lastIndexOf("message") < kinds.indexOf("head"));
});

test("a chapter has a caption for each step, and words have only values that there are", () => {
  const told = story(makeWorld({...sizes[0], skew: 0, seed: 0}));
  const known = {...values(told, numbers), chapters: 1};
  for (const [name, text] of Object.entries(texts)) {
    if (CHAPTERS[name]) assert.equal(text.match(/^\d+\. /gm).length, CHAPTERS[name].length, name);
    for (const [, value] of text.matchAll(/\{\{(\w+)\}\}/g)) assert.ok(value in known, `${name}: ${value}`);
    for (const [, which] of text.matchAll(/\[\[(\w+)\]\]/g)) assert.doesNotThrow(() => stepped(which, 1, 1), `${name}: ${which}`);
  }
  assert.deepEqual(Object.keys(texts).filter((n) => n !== "intro").sort(), Object.keys(CHAPTERS).sort());
  assert.ok(order.length >= 12 && Object.keys(CHAPTERS).length <= 16);
});

test("made routings are routings: distinct ids of experts that exist, weights that sum to about 1", () => {
  for (const size of sizes) for (const skew of [0, 2]) {
    const world = makeWorld({...size, skew, seed: 5});
    for (const [r, of] of world.ids.entries()) for (const [t, chosen] of of.entries()) {
      assert.equal(new Set(chosen).size, world.topK);
      assert.ok(chosen.every((e) => e >= 0 && e < size.ranks * size.local));
      assert.ok(Math.abs(world.weights[r][t].reduce((a, b) => a + b) - 1) < 0.02);
    }
  }
  const load = (skew) => traffic(makeWorld({ranks: 4, local: 8, topK: 2, tokens: 128, skew, seed: 7})).imbalance;
  assert.ok(load(0) < 1.2 && load(1) > 1.5 && load(2) > load(1));
});

test("floors follow from the routing: the uniform formulas agree with a large random routing", () => {
  const world = makeWorld({ranks: 4, local: 16, topK: 8, tokens: 2000, skew: 0, seed: 1, hidden: 1});
  const t = traffic(world), want = uniform({ranks: 4, experts: 64, topK: 8, tokens: 2000});
  const sent = (m) => m.reduce((all, of, r) => all + of.reduce((a, b) => a + b) - of[r], 0) / 4;
  assert.ok(Math.abs(sent(t.pairs) / want.pairs - 1) < 0.01 && Math.abs(sent(t.rows) / want.rows - 1) < 0.01);
});

test("numbers are scrubbed inside their range", () => {
  assert.equal(stepped("ranks", 4, 1), 4);
  assert.equal(stepped("ranks", 2, -9), 2);
  assert.equal(stepped("skew", 1, 1), 1.1);
  assert.equal(stepped("bigTokens", 4096, -2), 1024);
});

test("a moved choice changes rows, offsets and bytes", () => {
  const world = makeWorld({...sizes[0], skew: 0, seed: 0}), before = dispatch(world);
  const p = before.pairs[0], to = [...Array(6).keys()].find((e) => !world.ids[p.rank][p.token].includes(e) && Math.floor(e / 2) !== p.dst);
  world.ids[p.rank][p.token][p.k] = to;
  const after = dispatch(world);
  assert.equal(after.counts[p.dst][p.le][p.rank], before.counts[p.dst][p.le][p.rank] - 1);
  assert.equal(after.offsets[Math.floor(to / 2)].at(-1), before.offsets[Math.floor(to / 2)].at(-1) + 1);
});
