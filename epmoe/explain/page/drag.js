// Dragging a token's choice to another expert; with the keyboard, + and − change the selected choice.

/** Choices are [data-chip="rank,token,k"], experts [data-expert]; a token that is dragged moves its first choice. */
export function dragging(svg, {zoom, ids, experts, put}) {
  let held = null;
  const expertAt = (event) => document.elementsFromPoint(event.clientX, event.clientY)
    .map((e) => e.closest?.("[data-expert]")).find(Boolean);
  svg.addEventListener("pointerdown", (event) => {
    const g = event.target.closest("[data-chip], .token[data-token]");
    if (!g || event.button) return;
    const [rank, token, k = 0] = (g.dataset.chip ?? g.dataset.token).split(",").map(Number);
    held = {g, rank, token, k, x: event.clientX, y: event.clientY, ghost: null};
  });
  svg.addEventListener("pointermove", (event) => {
    if (!held) return;
    const dx = event.clientX - held.x, dy = event.clientY - held.y;
    if (!held.ghost && Math.hypot(dx, dy) > 6) {
      svg.setPointerCapture(event.pointerId);
      held.base = held.g.style.transform;
      held.ghost = held.g.cloneNode(true);
      held.ghost.classList.add("ghost");
      held.g.parentNode.append(held.ghost);
    }
    if (!held.ghost) return;
    held.ghost.style.transform = `${held.base} translate(${dx / zoom()}px,${dy / zoom()}px)`;
    const over = expertAt(event);
    for (const e of svg.querySelectorAll(".over")) if (e !== over) e.classList.remove("over");
    over?.classList.add("over");
  });
  const drop = (event) => {
    if (held?.ghost) {
      const over = event.type === "pointerup" && expertAt(event);
      held.ghost.remove();
      for (const e of svg.querySelectorAll(".over")) e.classList.remove("over");
      if (over) put(held.rank, held.token, held.k, Number(over.dataset.expert));
    }
    held = null;
  };
  svg.addEventListener("pointerup", drop);
  svg.addEventListener("pointercancel", drop);
  svg.addEventListener("keydown", (event) => {
    const by = {"+": 1, "=": 1, ArrowUp: 1, "-": -1, "−": -1, ArrowDown: -1}[event.key];
    const g = event.target.closest("[data-chip]");
    if (!by || !g) return;
    event.preventDefault();
    event.stopPropagation();
    const [rank, token, k] = g.dataset.chip.split(",").map(Number), n = experts();
    put(rank, token, k, (Math.max(0, ids()[rank][token][k]) + by + n) % n);
  });
}
