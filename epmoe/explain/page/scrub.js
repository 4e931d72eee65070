// Numbers in the text that can be dragged, or changed with + and −, arrow keys, or the wheel of a selected one.

import {say} from "./svg.js";

export const RANGES = {ranks: [2, 4, 1], local: [1, 3, 1], topK: [1, 3, 1], tokens: [1, 4, 1], skew: [0, 2, 0.1],
  bigExperts: [8, 512, 8], bigTokens: [1, 8192, 1], bigTopK: [1, 16, 1]};

/** The value that is n steps away, inside the range; token counts go in powers of two. */
export function stepped(which, value, n) {
  const [low, high, by] = RANGES[which];
  const moved = which === "bigTokens" ? 2 ** (Math.round(Math.log2(value)) + n) : Math.round((value + n * by) / by) * by;
  return Number(Math.max(low, Math.min(high, moved)).toFixed(1));
}

const KEYS = {"+": 1, "=": 1, ArrowUp: 1, ArrowRight: 1, "-": -1, "−": -1, ArrowDown: -1, ArrowLeft: -1};

/** Make these elements scrubbable; get(name) is a value, set(name, value) changes it. */
export function scrubs(elements, get, set) {
  const refresh = () => elements.forEach((e) => {
    const value = get(e.dataset.scrub), [low, high] = RANGES[e.dataset.scrub];
    e.textContent = say(value, RANGES[e.dataset.scrub][2] < 1 ? 1 : 0);
    e.setAttribute("aria-valuenow", value);
    e.setAttribute("aria-valuemin", low);
    e.setAttribute("aria-valuemax", high);
  });
  const change = (which, value) => { if (value !== get(which)) { set(which, value); refresh(); } };
  for (const e of elements) {
    const which = e.dataset.scrub;
    let from = null;
    e.addEventListener("pointerdown", (event) => {
      from = {x: event.clientX, value: get(which)};
      e.setPointerCapture(event.pointerId);
      e.focus({preventScroll: true});
      event.preventDefault();
    });
    e.addEventListener("pointermove", (event) => {
      if (from) change(which, stepped(which, from.value, Math.round((event.clientX - from.x) / 14)));
    });
    for (const end of ["pointerup", "pointercancel"]) e.addEventListener(end, () => { from = null; });
    e.addEventListener("keydown", (event) => {
      if (!(event.key in KEYS)) return;
      event.preventDefault();
      event.stopPropagation();
      change(which, stepped(which, get(which), KEYS[event.key]));
    });
  }
  refresh();
}
