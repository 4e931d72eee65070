"use strict";
// Time: each group of sections has a list of moments; elements know from which step on they are there (data-from)
// and which text they show when (data-h). Nothing here computes a value: all of them were recorded.
(function () {
  const data = JSON.parse(document.getElementById("moments").textContent);
  const groups = {};
  for (const name of Object.keys(data)) {
    const sections = [...document.querySelectorAll(`[data-group="${name}"]`)];
    const inside = (q) => sections.flatMap((s) => [...s.querySelectorAll(q)]);
    groups[name] = {
      moments: data[name].moments, at: data[name].start, timer: null, sections,
      later: inside("[data-from]").map((e) => [e, Number(e.dataset.from)]),
      words: inside("[data-h]").map((e) => [e, JSON.parse(e.dataset.h)]),
      hot: inside("[data-now]").map((e) => [e, Number(e.dataset.now)]),
      cursors: inside(".cursor"),
      bars: inside(".bar"),
    };
  }
  function show(name, n) {
    const g = groups[name];
    g.at = Math.max(0, Math.min(g.moments.length - 1, n));
    const [step, says] = g.moments[g.at];
    const before = g.at ? g.moments[g.at - 1][0] : -1;
    for (const [e, from] of g.later) e.classList.toggle("future", from > step);
    for (const [e, history] of g.words) {
      let value = "–", since = -1, past = 0;
      for (const [s, v, over] of history) { if (s > step) break; value = v; since = s; past = over; }
      e.classList.toggle("past", !!past);
      if (e.textContent !== value) e.textContent = value;
      const box = e.previousElementSibling;
      if (box && box.tagName === "rect") box.classList.toggle("new", since > before && since > 0);
    }
    for (const [e, now] of g.hot) e.classList.toggle("hot", now > before && now <= step && g.at < g.moments.length - 1);
    for (const c of g.cursors) {
      const d = c.dataset, x = Number(d.left) + (Math.min(step, d.last) - d.first) * d.scale;
      c.style.display = step < d.first || step > Number(d.last) ? "none" : "";
      c.setAttribute("x1", x); c.setAttribute("x2", x);
    }
    for (const bar of g.bars) {
      bar.querySelector("input").value = g.at;
      bar.querySelector(".step").textContent = `step ${step} · moment ${g.at + 1} of ${g.moments.length}. `;
      bar.querySelector(".text").textContent = says;
    }
  }
  function play(name) {
    const g = groups[name];
    const stop = () => { clearInterval(g.timer); g.timer = null; for (const b of g.bars) b.querySelector(".play").textContent = "Play"; };
    if (g.timer) return stop();
    if (g.at >= g.moments.length - 1) show(name, 0);
    for (const b of g.bars) b.querySelector(".play").textContent = "Stop";
    g.timer = setInterval(() => { show(name, g.at + 1); if (g.at >= g.moments.length - 1) stop(); }, 220);
  }
  for (const [name, g] of Object.entries(groups)) {
    for (const bar of g.bars) {
      bar.querySelector("input").addEventListener("input", (e) => show(name, Number(e.target.value)));
      bar.querySelector(".first").addEventListener("click", () => show(name, 0));
      bar.querySelector(".back").addEventListener("click", () => show(name, g.at - 1));
      bar.querySelector(".on").addEventListener("click", () => show(name, g.at + 1));
      bar.querySelector(".last").addEventListener("click", () => show(name, g.moments.length - 1));
      bar.querySelector(".play").addEventListener("click", () => play(name));
    }
    show(name, g.at);
  }
  // what an element shows, in words
  const tip = document.getElementById("tip");
  function say(target, x, y) {
    const e = target.closest && target.closest("[data-at],[data-tip]");
    if (!e) { tip.style.display = "none"; return; }
    const live = e.dataset.h ? e : e.querySelector("[data-h]");
    tip.textContent = "";
    if (e.dataset.at) {
      const b = document.createElement("b");
      const value = live ? live.textContent : e.dataset.value;
      b.textContent = e.dataset.at + (value === undefined ? "" : " = " + (value === "–" ? "not arrived" : value));
      tip.append(b);
    }
    if (e.dataset.tip) tip.append(e.dataset.tip);
    tip.style.display = "block";
    const w = tip.offsetWidth, h = tip.offsetHeight;
    tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - w - 8)) + "px";
    tip.style.top = (y + 18 + h < innerHeight ? y + 18 : Math.max(8, y - h - 12)) + "px";
  }
  document.addEventListener("pointermove", (e) => say(e.target, e.clientX, e.clientY));
  document.addEventListener("click", (e) => say(e.target, e.clientX, e.clientY));
  document.addEventListener("keydown", (e) => { if (e.key === "Escape") tip.style.display = "none"; });
  document.addEventListener("scroll", () => { tip.style.display = "none"; }, { passive: true });
  for (const box of document.querySelectorAll(".choose input")) {
    box.addEventListener("change", () => {
      for (const s of document.querySelectorAll("." + box.dataset.of)) s.classList.toggle("hide-" + box.value, !box.checked);
    });
  }
  document.documentElement.dataset.ready = "yes";
})();
