// A moment of the story as nodes: what the page shows, and what stills and slides are made of.

import {scene} from "./scene.js";
import {dispatch, makeWorld, summary, traffic} from "./model.js";
import {layout} from "./layout.js";
import {extras} from "./charts.js";
import {recordingPanels} from "./broken.js";
import {makeStory} from "./chapters.js";

// Loads of a larger routing; the last one is kept, as making one takes longer than all else.
let last = {};
function loadOf({ranks, topK}, skew) {
  const key = `${ranks} ${topK} ${skew}`;
  if (last.key !== key) last = {key, load: traffic(makeWorld({ranks, local: 8, topK: Math.max(2, topK), tokens: 128, skew, seed: 7, hidden: 1}))};
  return last.load;
}

/** The story of a world: what dispatch makes of it, loads of a larger routing of the same shape, and whom we follow. */
export function storyOf(data, world, numbers, followed = null) {
  const whole = data.whole ? summary(data.whole) : null, given = whole && numbers.skew === data.numbers.skew;
  return makeStory(world, dispatch(world), {whole, numbers, followed,
    load: given ? whole : loadOf(world, numbers.skew),
    loadOf: given ? "the whole routing" : "128 tokens a rank and 8 experts a rank",
    measured: data.measured, recordings: data.recordings ?? []});
}

/** {state, places, nodes} of step n at a stage of this width. */
export function picture(story, steps, n, width) {
  const {world, model} = story, {state} = steps[n];
  const rowsOf = Math.max(0, ...model.offsets.flatMap((of) => of.slice(1).map((end, le) => end - of[le])));
  const places = layout(world, width, rowsOf, shown(state));
  if (state.chart?.kind === "broken") {
    const panels = recordingPanels(story.recordings[state.chart.recording], state.chart.step, width);
    return {state, places: {...places, height: panels.height, end: panels.end}, nodes: panels.nodes};
  }
  return {state, places, nodes: [...scene(world, model, state, places, story), ...extras(story, state, places)]};
}

// The strips that take room on a narrow stage.
const shown = (s) => ({tokens: s.tokens, counters: Boolean(s.counters), both: s.counters === "both", recv: s.recv, rows: s.home && s.inset !== "chain",
  back: Boolean(s.inset || s.backShown), lines: Boolean(s.lines), chart: Boolean(s.chart || s.capacity)});
