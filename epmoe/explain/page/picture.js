// A moment of the story as nodes: what the page shows, and what stills and slides are made of.

import {beginning, scene} from "./scene.js";
import {dispatch, makeWorld, summary, traffic} from "./model.js";
import {layout} from "./layout.js";
import {extras} from "./charts.js";
import {recordingPanels} from "./broken.js";
import {makeStory, stateAt, stepsOf} from "./chapters.js";
import {drawn} from "./svg.js";

/** The story of a world: what dispatch makes of it, loads of a larger routing of the same shape, and whom we follow. */
export function storyOf(data, world, numbers, followed = null) {
  const many = {ranks: world.ranks, local: 8, topK: Math.max(2, world.topK), tokens: 128, skew: numbers.skew, seed: 7, hidden: 1};
  const whole = data.whole ? summary(data.whole) : null, given = whole && numbers.skew === data.numbers.skew;
  return makeStory(world, dispatch(world), {whole, numbers, followed,
    load: given ? whole : traffic(makeWorld(many)),
    loadOf: given ? "the whole routing" : "128 tokens a rank and 8 experts a rank",
    measured: data.measured, recordings: data.recordings ?? []});
}

/** {state, places, nodes} of step n at a stage of this width. */
export function picture(story, steps, n, width) {
  const {world, model} = story, state = stateAt(beginning(), steps, n, story);
  const rowsOf = Math.max(0, ...model.offsets.flatMap((of) => of.slice(1).map((end, le) => end - of[le])));
  const places = layout(world, width, rowsOf);
  if (state.chart?.kind === "broken") {
    const panels = recordingPanels(story.recordings[state.chart.recording], state.chart.step, width);
    return {state, places: {...places, height: panels.height, end: panels.end}, nodes: panels.nodes};
  }
  return {state, places, nodes: [...scene(world, model, state, places, story.followed), ...extras(story, state, places)]};
}

/** The steps of these chapters. In a tiny world some would change nothing that can be seen: they join the next one. */
export function stepsFor(story, order, width = 760) {
  const all = stepsOf(order, story.recordings), kept = [];
  let before = "", waiting = [];
  all.forEach((step, n) => {
    const now = drawn(picture(story, all, n, width).nodes);
    waiting.push(step.change);
    if (now === before) return;
    const changes = waiting;
    kept.push({...step, change: (s, told) => changes.reduce((state, change) => ({...state, ...change(state, told)}), s)});
    [before, waiting] = [now, []];
  });
  return kept;
}
