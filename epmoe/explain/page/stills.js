// Pictures as SVG text, for readers without JavaScript, for print, and for slides. Called from Python.

import {drawn, rect} from "./svg.js";
import {stepsOf} from "./chapters.js";
import {picture, storyOf} from "./picture.js";
import {values} from "./words.js";

// the step of a chapter that says most, where it is not the last
const TELLING = {"one-gpu": 1, "router": 1, "travel": 2};

/** [{chapter, stage, svg, width, height}] of every step, or only of each chapter's most telling one. */
export function stills({data, order, width = 760, oneEach = false}) {
  const story = storyOf(data, data.world, data.numbers), steps = stepsOf(order, story);
  return steps.flatMap((step, n) => {
    const last = steps[n + 1]?.chapter !== step.chapter, telling = TELLING[step.chapter];
    if (oneEach && (telling === undefined ? !last : step.caption !== telling)) return [];
    const {nodes, places} = picture(story, steps, n, width);
    return [{chapter: step.chapter, stage: 1 + n - steps.findIndex((s) => s.chapter === step.chapter), width,
      height: Math.ceil(places.height), svg: drawn(nodes)}];
  });
}

/** {name: text}: what stands in the text as {{name}}, for the page's first moment. */
export const words = ({data}) => values(storyOf(data, data.world, data.numbers), data.numbers);

const FILM = ["router-2", "slot-4", "travel-3", "arrived-5", "grouping-4", "experts-2", "back-3", "back-5"];

// what lies over what in a film, where things of different pictures meet: a message over its slot, its row and its place
const LAYERS = ["gpu", "expert", "label", "route", "reserved", "finished", "group", "line", "count", "offset", "place", "out", "message", "token", "chip", "links", "head"];
const layer = (thing) => LAYERS.indexOf(thing.key.match(/^[a-z]+/)[0]);

/** A film of the main steps: {pictures, width, height, things: [{body, cls, at: [[x, y] or null a picture]}]}. */
export function film({data, order, width = 760}) {
  const story = storyOf(data, data.world, data.numbers), steps = stepsOf(order, story), things = new Map();
  let height = 0;
  FILM.forEach((name, i) => {
    const [chapter, caption] = name.split("-"), n = steps.findLastIndex((s) => s.chapter === chapter && s.caption < Number(caption));
    const {nodes, places} = picture(story, steps, n, width);
    height = Math.ceil(places.height);
    const before = new Set([...things.values()].map((t) => t.key));
    nodes.forEach(({key, body, cls, x, y, from}, z) => {
      if (key.startsWith("trail")) return;      // in a film things move themselves
      // a thing that changes its looks fades into the next: it is another thing at the same place
      const id = `${key} ${cls ?? ""} ${body}`;
      if (!things.has(id)) things.set(id, {key, body, cls: cls ?? "", z, at: FILM.map(() => null),
        from: from && !before.has(key) ? [from.x, from.y] : null});
      things.get(id).at[i] = [x, y];
    });
  });
  return {pictures: FILM.length, width, height, things: [...things.values()].sort((a, b) => layer(a) - layer(b) || a.z - b.z)};
}
