// The stage in the page: keeps one element for each node, and lets it travel when its place changes.

const SVG = "http://www.w3.org/2000/svg";
const at = (x, y) => `translate(${x}px,${y}px)`;

export class Stage {
  constructor(svg) {
    const layer = () => svg.appendChild(document.createElementNS(SVG, "g"));
    this.camera = layer();      // what scrolls
    this.fixed = layer();       // what does not
    this.items = new Map();
  }

  /** Show these nodes; new ones come from node.from, others move. Without `moving` everything is there at once. */
  show(nodes, moving) {
    const kept = new Set(nodes.map((n) => n.key));
    for (const [key, item] of this.items) if (!kept.has(key)) this.leave(key, item, moving);
    const next = {true: this.fixed.firstChild, false: this.camera.firstChild}, fresh = [];
    let delay = 0;
    for (const n of nodes) {
      const layer = Boolean(n.fixed);
      while (next[layer]?.leaving) next[layer] = next[layer].nextSibling;
      let item = this.items.get(n.key);
      if (!item) {
        item = {g: document.createElementNS(SVG, "g"), node: {}};
        this.items.set(n.key, item);
        (layer ? this.fixed : this.camera).insertBefore(item.g, next[layer]);
        item.g.style.opacity = 0;
        const from = n.from ?? n;
        item.g.style.transform = at(from.x, from.y);
        fresh.push(item);
      } else next[layer] = item.g.nextSibling;
      this.update(item, n, moving && n.key.startsWith("message") && (item.node.x !== n.x || item.node.y !== n.y) ? Math.min(40 * delay++, 600) : 0);
    }
    if (fresh.length && moving) getComputedStyle(fresh[0].g).opacity;     // the styles that they start from are taken note of
    for (const layer of [this.camera, this.fixed]) layer.classList.toggle("still", !moving);
    for (const item of this.items.values()) {
      const {g, node, delay} = item, there = `${node.x} ${node.y} ${delay}`;
      if (item.there === there) continue;
      g.style.transitionDelay = `${delay}ms`;
      g.style.transform = at(node.x, node.y);
      item.there = there;
    }
    for (const {g} of fresh) g.style.opacity = 1;
  }

  // Only what has changed is written: most of the stage stays as it is from step to step.
  update(item, n, delay) {
    const {g, node: old} = item, about = n.about?.join(" ");
    if (old.body !== n.body || old.title !== n.title) g.innerHTML = (n.title ? `<title>${n.title}</title>` : "") + n.body;
    if (old.cls !== n.cls) g.setAttribute("class", n.cls ?? "");
    if (item.about !== about) g.dataset.about = about;
    if (!old.key) for (const [name, value] of Object.entries({"data-key": n.key, ...n.data})) g.setAttribute(name, value);
    else for (const [name, value] of Object.entries(n.data ?? {})) if (old.data?.[name] !== value) g.setAttribute(name, value);
    Object.assign(item, {node: n, about, delay});
  }

  leave(key, {g}, moving) {
    this.items.delete(key);
    g.leaving = true;
    g.style.opacity = 0;
    g.removeAttribute("data-key");
    setTimeout(() => g.remove(), moving ? 400 : 0);
  }

  /** Zoom, and move so that the strips in focus can be seen below the ranks' names, in a view less high than the stage. */
  look(places, focus, high, zoom, moving) {
    const HEAD = 28, room = high / zoom;
    const ranges = focus.map((name) => name === "chart" ? {y: 0, height: places.wide ? places.height : room} : places.strips[name]);
    const top = Math.min(...ranges.map((r) => r.y)) - HEAD, end = Math.max(...ranges.map((r) => r.y + r.height));
    const most = Math.max(0, places.height - room);
    const shift = Math.max(0, Math.min(most, places.end ? most : end - top > room ? top : (top + end - room) / 2));
    for (const layer of [this.camera, this.fixed]) {
      layer.classList.toggle("still", !moving);
      layer.style.transform = `scale(${zoom}) ${at(0, layer === this.camera ? -shift : 0)}`;
    }
  }
}
