// Where everything stands on the stage. Units are pixels of the page: text is 12 px and more at any width.

const PAD = 8, LABEL = 17, TOKEN = 26, CHIP = 26, CELL = 20, LINE = 22;

const tokensOf = (world) => Math.max(1, ...world.ids.map((of) => of.length));

/** The width below which words on the stage would not fit into their boxes; a narrower view scrolls. */
export const leastWidth = (world) => world.ranks * (tokensOf(world) * 20 + 58) + (world.ranks - 1) * 6;

/** Places for a world in a stage of this width; rowsOf: the most rows that one expert gets. */
export function layout(world, width, rowsOf) {
  const {ranks: R, local: L, topK: K} = world, E = R * L;
  const T = tokensOf(world);
  const gap = width > 600 ? 16 : 6, column = (width - (R - 1) * gap) / R;
  const inside = column - 2 * PAD;
  const fit = (n, room, most) => Math.min(most, Math.floor(room / n));
  const chip = fit(T, inside, 44), slot = fit(T, inside - 16 - 26, 36), counter = fit(E, inside, 28);
  const beside = inside > 160, rowsAt = beside ? 66 : 36;      // an expert's range of rows: beside it, or below
  const cell = Math.max(20, fit(Math.max(1, rowsOf), inside - rowsAt, 32));
  const across = Math.max(1, Math.floor((inside - rowsAt) / cell)), lines = Math.max(beside ? 1 : 2, Math.ceil(rowsOf / across));
  const group = lines * (LINE + 2) + 4;
  const message = Math.min(chip - 4, slot - 3, cell - 3);      // the same size wherever it is
  const strips = {};
  let y = 28;
  const strip = (name, height) => { strips[name] = {y, height: height + LABEL}; y += height + LABEL + 9; };
  strip("tokens", TOKEN + K * CHIP);
  strip("counters", 2 * (CELL + 2) + 2);
  strip("recv", L * R * LINE + (L - 1) * 5);
  strip("rows", L * group);
  strip("back", K * LINE + 6 + LINE);
  y = Math.max(y, width > 600 ? 520 : 400);
  const at = (name) => strips[name].y + LABEL;
  const left = (rank) => rank * (column + gap) + PAD;
  const recvLine = (le, src) => at("recv") + (le * R + src) * LINE + le * 5;
  const wide = width > 600, chart = wide ? {x: 0, y: strips.counters.y - 4, w: width, h: y - strips.counters.y} : {x: 0, y: 0, w: width, h: 380};
  return {R, L, T, K, E, width, column, gap, strips, height: y + 4, sizes: {chip, slot, counter, cell, message, TOKEN, CHIP, CELL, LINE},
    inside, beside, wide, left, box: (rank) => ({x: rank * (column + gap), y: 0, w: column, h: y}),
    label: (rank, name) => ({x: left(rank), y: strips[name].y + 12}),
    token: (rank, t) => ({x: left(rank) + t * chip, y: at("tokens")}),
    chip: (rank, t, k) => ({x: left(rank) + t * chip, y: at("tokens") + TOKEN + k * CHIP}),
    counter: (rank, which, e) => ({x: left(rank) + e * counter, y: at("counters") + which * (CELL + 2)}),
    recvLine: (dst, le, src) => ({x: left(dst), y: recvLine(le, src)}),
    slot: (dst, le, src, s) => ({x: left(dst) + 16 + s * slot, y: recvLine(le, src)}),
    count: (dst, le, src) => ({x: left(dst) + 16 + T * slot + 3, y: recvLine(le, src)}),
    expert: (rank, le) => ({x: left(rank), y: at("rows") + le * group}),
    offset: (rank, le) => ({x: left(rank), y: at("rows") + le * group}),
    row: (rank, le, i) => ({x: left(rank) + rowsAt + (i % across) * cell, y: at("rows") + le * group + Math.floor(i / across) * (LINE + 2)}),
    back: (rank, t, k) => ({x: left(rank) + t * chip, y: at("back") + k * LINE}),
    out: (rank, t) => ({x: left(rank) + t * chip, y: at("back") + K * LINE + 6}),
    chart};
}
