"""`python -m epmoe explain`: one round of a small world, recorded in the simulator, as a page, figures and a trace.

inputs, recording: what goes in, the run, what was recorded      arrays: names and shapes of what kernels touch
history: words over time          moments: what the page steps through          phases: what each block did when
svg, palette: drawing             routing, buffers, rows, counters, timeline, way_back: one figure each, as panels
page, chapters: the HTML page and its words                      figures: SVG and PNG files
trace, recorded_trace: JSON for Perfetto                         stamped, gpu_round: the same from a GPU's stamps

Every picture comes from recorded events. Whatever shows a value says in data-at which array and index it is, and in
data-value what was recorded; the arrays themselves are in the page as JSON.
"""
