"""README.md of this folder: what mutants are, and the reports on the four public faults, made by running them."""

import re
from pathlib import Path

from epmoe.mutants.public_faults import FAULTS, report

README = Path(__file__).with_name("README.md")

HEAD = """\
# Is every synchronisation needed, and would its loss be noticed?

`python -m epmoe mutants` takes the source of every kernel, breaks one synchronising token at a time (an order
weakened, a scope narrowed, an atomic made plain, a barrier, a wait or a reset deleted, a load sent through the
non-coherent path), and runs the result in small worlds of two or three ranks under the race detector. Every such mutant
must be noticed: as a race, a wrong result, a hang, an access out of bounds, or memory that is not as it was before the
rounds. The few that change nothing are in `harmless.py`, each with its reason, and it is an error if one of them is
noticed after all.

| option | |
|---|---|
| `--only signaller.py:72` | only what stands there |
| `--sample 30`, `--part 1/2` | a fixed sample; every second one |
| `--slips` | mistakes of another make (statements that change places, waits off by one, ...): see `slips.py` |
| `--list`, `--reports` | every verdict; what was reported |
| `--faults` | the four faults below |

Checking results alone would not do: under sequentially consistent schedules, and on most GPUs most of the time, a
weakened order gives right results. The race detector (`epmoe/device/sim/`) follows the PTX memory model instead.

# Four faults of public kernels

Each is an edit of this project's kernels (`public_faults.py`). What follows them is the report, made by
`python -m epmoe mutants --faults --write`.
"""


def text():
    """The whole document, reports of seed 0 included."""
    parts = [HEAD]
    for number, fault in enumerate(FAULTS, 1):
        how, said = report(fault)
        parts.append(f"\n## {number}. {fault.name[0].upper() + fault.name[1:]}\n\n{fault.what}\n\n```\n"
                     f"{_without_addresses(said)}\n```\n")
        if fault.repair:
            parts.append(f"\nRepaired ({fault.repair_is}), nothing is reported.\n")
    return "".join(parts)


def _without_addresses(said):
    """Where buffers lie differs from run to run, and so does which one comes next."""
    return re.sub(r" and \d+ bytes before .*", "", re.sub(r"0x[0-9a-f]+", "0x7f0000000000", said))
