// Compares the page's model with epmoe_ref's arrays of the same worlds; returns the first difference, or null.

export function firstDifference(model, cases) {
  for (const [n, {world, reference}] of cases.entries()) {
    const made = model.dispatch(world), all = model.traffic(world);
    const mine = {recv_count: made.counts, row_offsets: made.offsets,
      src_info: made.rows.map((of) => of.map((p) => [p.token, p.k])),
      output_tokens: made.rows.map((of) => of.map((p) => world.x[p.rank][p.token])),
      combined: model.combine(world), pairs: all.pairs, rows: all.rows, load: all.load};
    for (const name of Object.keys(reference)) {
      if (!(name in mine) && name !== "local") return `${name} is missing`;
      // -0 is 0 in JSON, as in the page
      const [a, b] = [mine[name], reference[name]].map((v) => JSON.stringify(v, (_, x) => x === 0 ? 0 : x));
      if (name !== "local" && a !== b) return `world ${n}: ${name} is ${a}, epmoe_ref has ${b}`;
    }
  }
  return null;
}
