// Pictures as SVG text, for readers without JavaScript, for print, and for slides. Called from Python.

import {drawn, rect} from "./svg.js";
import {picture, storyOf} from "./picture.js";
import {stepsOf} from "./chapters.js";
import {values} from "./words.js";

/** [{chapter, stage, svg, width, height}] of every step, or only of each chapter's last. */
export function stills({data, order, width = 760, lastOnly = false}) {
  const story = storyOf(data, data.world, data.numbers), steps = stepsOf(order, story.recordings);
  return steps.flatMap((step, n) => {
    if (lastOnly && steps[n + 1]?.chapter === step.chapter) return [];
    const {nodes, places} = picture(story, steps, n, width);
    return [{chapter: step.chapter, stage: 1 + n - steps.findIndex((s) => s.chapter === step.chapter), width,
      height: Math.ceil(places.height), svg: drawn(nodes)}];
  });
}

/** {name: text}: what stands in the text as {{name}}, for the page's first moment. */
export const words = ({data}) => values(storyOf(data, data.world, data.numbers), data.numbers);
