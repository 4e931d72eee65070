"""`python -m epmoe explain`: one round of a small world, recorded in the simulator, as a page, figures and a trace.

recording: the run and what was recorded     arrays: names and shapes of what kernels touch     history: words over time
moments: the steps that the page can show    phases: what each block did when                   svg, palette: drawing
routing, buffers, rows, counters, timeline, way_back: one figure each, as panels
page, chapters: the HTML page and its words    figures: SVG and PNG files
trace: Perfetto's JSON of a recording         stamped, gpu_round: the same of a GPU's stamps

Every picture comes from recorded events. Whatever shows a value says in data-at which array and index it is, and in
data-value what was recorded; the arrays themselves are in the page as JSON.
"""
