// Where everything stands on the stage. Units are pixels of the page: text is 12 px and more at any width.

const PAD = 8, LABEL = 17, TOKEN = 26, CHIP = 26, CELL = 20, LINE = 22;

const tokensOf = (world) => Math.max(1, ...world.ids.map((of) => of.length));

/** The width below which words on the stage would not fit into their boxes; a narrower view scrolls. */
export const leastWidth = (world) => world.ranks * (tokensOf(world) * 20 + 58) + (world.ranks - 1) * 6;

/**
 * Places for a world in a stage of this width; rowsOf: the most rows that one expert gets. On a narrow stage only what is
 * shown takes room: {name of a strip, or lines: whether it is}.
 */
export function layout(world, width, rowsOf, shown = {}) {
  const {ranks: R, local: L, topK: K} = world, E = R * L;
  const T = tokensOf(world);
  const gap = width > 600 ? 16 : 6, column = (width - (R - 1) * gap) / R;
  const inside = column - 2 * PAD;
  const fit = (n, room, most) => Math.min(most, Math.floor(room / n));
  const beside = inside > 160, [groupTop, lead] = beside ? [0, 22] : [15, 0];      // an expert's name: before its lines, or above
  const chip = fit(T, inside, 44), slot = fit(T, inside - lead - 16 - 26, 36), counter = fit(E, inside, 28);
  const rowsAt = beside ? 66 : 36;      // an expert's range of rows: beside it, or below
  const cell = Math.max(20, fit(Math.max(1, rowsOf), inside - rowsAt, 36));
  const across = Math.max(1, Math.floor((inside - rowsAt) / cell)), lines = Math.max(beside ? 1 : 2, Math.ceil(rowsOf / across));
  const group = lines * (LINE + 2) + 4;
  const message = Math.min(chip - 4, slot - 3, cell - 3);      // the same size wherever it is
  const strips = {}, wide = width > 600;
  let y = 28;
  const strip = (name, height) => {
    const room = wide || shown[name] ? height + LABEL + 9 : 0;
    strips[name] = {y, height: Math.max(0, room - 9)};
    y += room;
  };
  strip("tokens", TOKEN + K * CHIP);
  strip("counters", (wide || shown.both ? 2 : 1) * (CELL + 2) + 2);
  strip("recv", L * (R * LINE + groupTop) + (L - 1) * 5);
  if (!wide && shown.lines && !shown.recv) y += 90;
  strip("rows", L * group);
  strip("back", K * LINE + 6 + LINE);
  y = Math.max(y, wide ? 520 : shown.chart ? 400 : 200);
  const at = (name) => strips[name].y + LABEL;
  const left = (rank) => rank * (column + gap) + PAD;
  const recvLine = (le, src) => at("recv") + (le * R + src) * LINE + le * 5 + (le + 1) * groupTop;
  const chart = wide ? {x: 0, y: strips.counters.y - 4, w: width, h: y - strips.counters.y} : {x: 0, y: 0, w: width, h: 380};
  return {R, L, T, K, E, width, column, gap, strips, height: y + 4, sizes: {chip, slot, counter, message, CHIP},
    inside, beside, wide, left, box: (rank) => ({x: rank * (column + gap), y: 0, w: column, h: y}),
    label: (rank, name) => ({x: left(rank), y: strips[name].y + 12}),
    token: (rank, t) => ({x: left(rank) + t * chip, y: at("tokens")}),
    chip: (rank, t, k) => ({x: left(rank) + t * chip, y: at("tokens") + TOKEN + k * CHIP}),
    counter: (rank, which, e) => ({x: left(rank) + e * counter, y: at("counters") + which * (CELL + 2)}),
    recvLine: (dst, le, src) => ({x: left(dst) + lead, y: recvLine(le, src)}),
    group: (dst, le) => ({x: left(dst), y: recvLine(le, 0) + (beside ? 14.3 : -4)}),
    slot: (dst, le, src, s) => ({x: left(dst) + lead + 16 + s * slot, y: recvLine(le, src)}),
    count: (dst, le, src) => ({x: left(dst) + lead + 16 + T * slot + 3, y: recvLine(le, src)}),
    expert: (rank, le) => ({x: left(rank), y: at("rows") + le * group}),
    row: (rank, le, i) => ({x: left(rank) + rowsAt + (i % across) * cell, y: at("rows") + le * group + Math.floor(i / across) * (LINE + 2)}),
    back: (rank, t, k) => ({x: left(rank) + t * chip, y: at("back") + k * LINE}),
    out: (rank, t) => ({x: left(rank) + t * chip, y: at("back") + K * LINE + 6}),
    chart};
}
