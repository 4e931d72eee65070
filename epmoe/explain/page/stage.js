// The stage in the page: keeps one element for each node, and lets it travel when its place changes.

const SVG = "http://www.w3.org/2000/svg";
const at = (x, y) => `translate(${x}px,${y}px)`;

export class Stage {
  constructor(svg) {
    this.camera = svg.appendChild(document.createElementNS(SVG, "g"));
    this.items = new Map();
  }

  /** Show these nodes; new ones come from node.from, others move. Without `moving` everything is there at once. */
  show(nodes, moving) {
    const kept = new Set(nodes.map((n) => n.key));
    for (const [key, item] of this.items) if (!kept.has(key)) this.leave(key, item, moving);
    let next = this.camera.firstChild, delay = 0;
    const fresh = [];
    for (const n of nodes) {
      while (next && next.leaving) next = next.nextSibling;
      let item = this.items.get(n.key);
      if (!item) {
        item = {g: document.createElementNS(SVG, "g")};
        this.items.set(n.key, item);
        this.camera.insertBefore(item.g, next);
        item.g.style.opacity = 0;
        const from = n.from ?? n;
        item.g.style.transform = at(from.x, from.y);
        fresh.push(item.g);
      } else next = item.g.nextSibling;
      if (item.body !== n.body || item.title !== n.title) item.g.innerHTML = (n.title ? `<title>${n.title}</title>` : "") + n.body;
      const travels = moving && (item.x !== undefined ? item.x !== n.x || item.y !== n.y : n.from);
      item.delay = travels && n.key.includes("message") ? Math.min(40 * delay++, 600) : 0;
      item.g.setAttribute("class", n.cls ?? "");
      for (const [name, value] of Object.entries({"data-key": n.key, ...n.data})) item.g.setAttribute(name, value);
      Object.assign(item, {body: n.body, title: n.title, x: n.x, y: n.y});
    }
    if (fresh.length) this.camera.getBoundingClientRect();     // where they come from counts before they start
    this.camera.classList.toggle("still", !moving);
    for (const n of nodes) {
      const {g, delay} = this.items.get(n.key);
      g.style.transitionDelay = `${delay}ms`;
      g.style.transform = at(n.x, n.y);
      g.style.opacity = 1;
    }
  }

  leave(key, {g}, moving) {
    this.items.delete(key);
    g.leaving = true;
    g.style.opacity = 0;
    g.removeAttribute("data-key");
    setTimeout(() => g.remove(), moving ? 400 : 0);
  }

  /** Move so that the strips in focus can be seen in a view that is less high than the stage. */
  look(places, focus, high, moving) {
    const ranges = focus.map((name) => name === "chart" ? {y: 0, height: places.wide ? places.height : high} : places.strips[name]);
    const top = Math.min(...ranges.map((r) => r.y)), end = Math.max(...ranges.map((r) => r.y + r.height));
    const most = Math.max(0, places.height - high);
    const shift = places.end ? most : end - top > high ? top - 4 : (top + end - high) / 2;
    this.camera.classList.toggle("still", !moving);
    this.camera.style.transform = at(0, -Math.max(0, Math.min(most, shift)));
  }
}
