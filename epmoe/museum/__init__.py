"""Faults of public kernels, each as a miniature that runs in the simulator: `epmoe museum N`.

| file | |
|---|---|
| mN_*.py | an exhibit: the story in five sentences, the broken kernel, its repair, the threads that tell of it |
| exhibit.py | runs an exhibit, broken and repaired, under many schedules; the diff; the schedule that breaks it |
| command.py | the command line |

A file of an exhibit holds a kernel and what it runs in:

REGIONS: (name, byte, int32 words) of each rank's memory. EXPECTED: {rank: its region `result` in the end}. BLOCKS,
WARPS: the grid, and warps of a block. REPAIR: ((text, its replacement), ...), each text once in the file; the lines of
the first are the answer to "spot it", and so are the lines of the texts in ALSO. Where the defaults of exhibit.py do not
fit: LINKS, the threads; CALLS launches behind each other, SHARED bytes of a block, BYTES of a rank's memory,
before(memory, np).
"""

from pathlib import Path

_FOUND = {int(path.stem[1:].partition("_")[0]): path for path in Path(__file__).parent.glob("m[0-9]*_*.py")}
FILES = dict(sorted(_FOUND.items()))
