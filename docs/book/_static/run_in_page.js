// Runs a page's code inside the page, through Pyodide. Pages that can do so have an element with id "run-in-page".
// Its attribute data-pyodide is the address of Pyodide; nothing is loaded before somebody selects Run.

const where = document.getElementById("run-in-page");
if (where) for (const cell of document.querySelectorAll("div.cell_input")) offer(cell);

let python; // a promise of the interpreter, once somebody wants it
let ran = 0; // the cells above this one have run

function cells() {
  return [...document.querySelectorAll("div.cell_input")];
}

function offer(cell) {
  const bar = document.createElement("div");
  bar.className = "run-bar";
  bar.append(button("Run", () => run(cell)), button("Edit", () => edit(cell)));
  cell.append(bar);
}

function button(text, action) {
  const it = document.createElement("button");
  it.type = "button";
  it.textContent = text;
  it.addEventListener("click", action);
  return it;
}

function source(cell) {
  const area = cell.querySelector("textarea");
  if (area) return area.value;
  const pre = cell.querySelector("pre").cloneNode(true);
  for (const number of pre.querySelectorAll(".linenos")) number.remove();
  return pre.textContent;
}

function edit(cell) {
  if (cell.querySelector("textarea")) return;
  const area = document.createElement("textarea");
  area.value = source(cell);
  area.rows = area.value.split("\n").length;
  area.spellcheck = false;
  area.setAttribute("aria-label", "Python code");
  area.addEventListener("input", () => { ran = Math.min(ran, cells().indexOf(cell)); });
  cell.querySelector(".highlight").replaceWith(area);
  area.focus();
}

async function load() {
  const base = new URL(where.dataset.pyodide, document.baseURI).href;
  const { loadPyodide } = await import(base + "pyodide.mjs");
  const it = await loadPyodide({ indexURL: base });
  it.globals.set("__name__", "lesson");
  if (cells().some((cell) => /^(import|from) epmoe_ref/m.test(source(cell)))) {
    await it.loadPackage(["numpy", "ml-dtypes"]);
    const reference = await fetch(where.dataset.reference);
    it.unpackArchive(await reference.arrayBuffer(), "zip");
  }
  return it;
}

// Run a cell, and before it those above it that have not run yet.
async function run(cell) {
  const all = cells();
  const last = all.indexOf(cell);
  const output = outputOf(cell);
  output.textContent = "Loading Python ...";
  try {
    python ??= load();
    const it = await python;
    const first = Math.min(ran, last);
    for (let i = first; i <= last; i++) await runOne(it, all[i]);
    ran = last + 1;
  } catch (error) {
    if (!error.shown) output.textContent = `Python could not be loaded: ${error.message}`;
    if (!error.shown) python = undefined;
  }
}

async function runOne(it, cell) {
  const output = outputOf(cell);
  output.textContent = "";
  const write = (text) => { output.textContent += text + "\n"; };
  it.setStdout({ batched: write });
  it.setStderr({ batched: write });
  const code = source(cell);
  try {
    await it.loadPackagesFromImports(code);
    await it.runPythonAsync(code);
  } catch (error) {
    output.textContent += error.message;
    error.shown = true;
    throw error;
  }
}

// The place under a cell for what it prints; the first time it takes the place of the recorded output.
function outputOf(cell) {
  const recorded = cell.parentElement.querySelector(".cell_output");
  if (recorded) recorded.remove();
  let output = cell.querySelector("pre.run-output");
  if (!output) {
    output = document.createElement("pre");
    output.className = "run-output";
    output.setAttribute("aria-live", "polite");
    cell.append(output);
  }
  return output;
}
