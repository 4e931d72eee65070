"""Pages of the book beside the lessons: the museum, whose faults run while the page is made, and the puzzles."""

import chapters
from nbformat.v4 import new_code_cell, new_markdown_cell

from epmoe.lessons.telling import plain_simulator
from epmoe.museum import FILES as EXHIBITS
from epmoe.museum.exhibit import SCHEDULES, Exhibit
from epmoe.puzzles import FILES as PUZZLES
from epmoe.puzzles import puzzle
from epmoe.puzzles.command import file_of

MUSEUM = f"""\
# A museum of real bugs

Faults of public kernels. Each is rebuilt as a small kernel that breaks in the simulator, and each report below was
printed while this page was made. Before you read on, try to find the faulty line: `epmoe museum N --spot` shows the code
alone, and `epmoe museum N --spot LINE` judges your answer. Every count is of {SCHEDULES} schedules.
"""
EXHIBIT = """
## {number}. {title}

{story}

{links}

{code}

The repair:

```diff
{diff}
```

What the simulator says of seed {seed}:

```text
{says}
```

| | {outcomes} |
|---|{rules}|
| broken, only the results are checked | {alone} |
| broken, with the race detector | {raced} |
| repaired, with the race detector | {repaired} |
"""
OUTCOMES = ("right", "wrong", "race", "hang", "error")
PUZZLES_INTRO = """\
# Puzzles: write the kernel yourself

Each puzzle is a kernel with a hole of 3 to 12 lines. `epmoe puzzle N --start` writes the file, `epmoe puzzle N --check`
judges it: on many schedules, with the race detector, against memory as it should be. `epmoe puzzle N --hint` gives a
hint. Puzzles need the simulator, which does not run inside a browser. All of them are also a
<a href="notebooks/puzzles.ipynb" download>notebook</a>.
"""


def museum():
    """The museum as one Markdown page."""
    with plain_simulator():
        return MUSEUM + "".join(_exhibit(number, Exhibit(file)) for number, file in EXHIBITS.items())


def _exhibit(number, exhibit):
    failure = exhibit.first_failure
    counts = [exhibit.counts(racecheck=False), exhibit.counts(), exhibit.counts(repaired=True)]
    seen = [how for how in OUTCOMES if any(how in found for found in counts)]
    alone, raced, repaired = (" | ".join(str(c.get(how, 0)) for how in seen) for c in counts)
    return EXHIBIT.format(
        number=number,
        title=exhibit.title,
        story=exhibit.story,
        links="\n".join(f"- <{link}>" for link in exhibit.links),
        code="\n\n".join(_blocks(exhibit.code)),
        diff="\n".join(exhibit.diff),
        seed=failure.seed,
        says=failure.says,
        outcomes=" | ".join(seen),
        rules="|".join("---" for _ in seen),
        alone=alone,
        raced=raced,
        repaired=repaired,
    )


def _blocks(parts):
    """Pieces of code with the line numbers of their file; those that follow one another as one."""
    joined = []
    for part in parts:
        if joined and part[0][0] <= joined[-1][-1][0] + 3:
            between = range(joined[-1][-1][0] + 1, part[0][0])
            joined[-1] += [(n, "") for n in between] + part
        else:
            joined.append(list(part))
    for lines in joined:
        code = "\n".join(line for _, line in lines)
        yield f"```{{code-block}} python\n:lineno-start: {lines[0][0]}\n\n{code}\n```"


def puzzles():
    """The puzzles as one Markdown page: what each asks, and its file."""
    out = [PUZZLES_INTRO]
    for number in PUZZLES:
        one = puzzle(number)
        out.append(f"\n## {number}. {one.title}\n\n{one.line}\n\n```python\n{one.start.strip()}\n```\n")
    return "".join(out)


def puzzles_notebook(wheel):
    """The puzzles as a notebook: a cell that writes each file, and one that judges it."""
    install = chapters.INSTALL.format(wheel=wheel)
    out = [new_markdown_cell("# Puzzles: write the kernel yourself"), new_code_cell(install)]
    for number in PUZZLES:
        one, file = puzzle(number), file_of(number)
        out += [
            new_markdown_cell(f"## {number}. {one.title}\n\n{one.line}"),
            new_code_cell(f"%%writefile {file}\n{one.start.strip()}"),
            new_code_cell(f"!epmoe puzzle {number} --check"),
        ]
    return chapters.finished(out)
