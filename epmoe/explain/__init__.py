"""`epmoe explain`: a page that teaches dispatch, the full tape of a recorded round, slides, and a trace.

page/: the page itself. text/*.md: its words; model, floats: dispatch and combine of a small world, equal to epmoe_ref;
    layout, scene, charts, broken: the stage; chapters: changes in each step; main, stage, scrub, drag: the live page;
    stills: pictures as SVG text; tape: the second page
bundle: joins modules and Markdown to one file  world: the world that is drawn, and epmoe_ref's arrays of it
broken, operations: correct runs beside broken ones
story: the page       stills, figures: pictures without a browser, slides, the animation
inputs, recording: a round in the simulator     arrays, history, moments, phases: read a recording       tape: its page
trace, recorded_trace: JSON for Perfetto        stamped, gpu_round: the same from a GPU's stamps
"""
