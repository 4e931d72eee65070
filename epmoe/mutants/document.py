"""Writes README.md of this folder: what mutants are, and the reports on the four public faults, which it runs."""

import re
from pathlib import Path

from epmoe.mutants.public_faults import FAULTS, report

README = Path(__file__).with_name("README.md")

HEAD = """\
# Is every synchronisation needed, and would its loss be noticed?

`epmoe mutants` takes the source of every kernel and breaks one synchronising token at a time: it weakens an order, narrows a
scope, makes an atomic plain, deletes a barrier, a wait or a reset, or sends a load through the non-coherent path. It runs the
result in small worlds, most of two ranks, under the race detector. Every mutant must be noticed: as a race, a wrong result, a
hang, an access out of bounds, or memory that differs from its state before the rounds. A few mutants change nothing. They are
in `harmless.py`, each with its reason, and it is an error if one of them is noticed.

| option | |
|---|---|
| `--only pairs/signal.py` | only tokens of that file; `FILE:LINE`: of that line; `pairs/`: of that folder |
| `--only plain/ --statements also` | the plain kernels: every removed synchronisation and every edited statement |
| `--sample 30`, `--part 1/2` | a fixed sample of 30; every second mutant |
| `--statements` | other mistakes instead (exchanged statements, waits off by one, ...): see `statement_mutations.py`. `--statements also`: both |
| `--list`, `--reports` | print every verdict; print every report |
| `--patch FILE ...` | your own unified diffs (`git diff`) of the kernels, each a mutant: see below |
| `--as-they-are` | the kernels of the tree, in all worlds: nothing may be reported |
| `--thresholds` | which worlds are below, at and above each threshold of the kernels, such as a limit on tokens |
| `--faults` | the four faults below |

Checking results alone is not enough. Under sequentially consistent schedules, and on most GPUs most of the time, a weakened
order gives right results. The race detector (`epmoe/device/sim/`) follows the PTX memory model instead.

# Your own edit

After you have edited a kernel in the tree, `epmoe mutants --as-they-are` runs it in every world under the detector, with three
schedules each, and prints all reports. In the last schedule loads return older values. This takes minutes.

To find out whether a mistake would be noticed, without leaving it in the tree:

```sh
git diff > /tmp/edit.patch && git checkout epmoe/kernels
epmoe mutants --patch /tmp/edit.patch --reports
```

Each patch is a mutant. Paths may begin at the repository's root or at any folder on the way to the file. First all worlds, and
some drawn at random (`--random`), run the unedited kernels once: the output says how many run the edited lines. Only these run
the mutant, under each seed. Worlds that run only the function around the lines come last, under one seed: another schedule may
lead them to the lines. The exit status is 0 if all patches are noticed, and 2 if one is no patch of the kernels. It is 1 if
one survives: then it changes neither results nor memory nor the order of accesses, or `worlds.py` lacks a world that shows it.
`--seeds` and `--jobs` work as without `--patch`.

Verdicts are printed as they are found, and the number of finished runs every ten seconds. Ctrl-C ends the hunt with a table of the
verdicts so far, and for every patch without a verdict the number of runs that have not noticed it. The exit status is 130.

# Thirteen edits written blind

They were written from the docstrings and the protocol alone. Under seed 0 they are noticed as follows:

| edit | noticed as | in the world |
|---|---|---|
| a payload word equal to ABSENT is not replaced | hang | "fp16 and an epilogue" |
| a negative id of a small batch is not counted as a bad one | wrong | "few tokens, bad ids" |
| the second window of counts begins again at tile 0 | race | "windows, split" |
| half of the vectors of a Lamport row are not erased | leftover | "rows without signals in parts, erased" |
| scales of a row from the 33rd on repeat the first 32 | wrong | "pairs of more scales than lanes" |
| a counter of parity 0 is cleared in place of the other parity's | leftover | "rows of eight ranks" |
| a sum of eight rows takes the seventh twice | wrong | "hybrid, as many experts of a token as lanes" |
| the escape misses a third word of a vector whose first is ABSENT too | hang | "rows without signals of four ranks" |
| the small-batch way to read bits is used for one token too many | wrong | "few rows by expert, few bits at a time" |
| tokens 97 to 128 of a small batch are counted one too early | hang | "rows without signals of four tokens a lane" |
| an expert without rows gets a row of padding | wrong | "hybrid, several sending blocks" |
| a warp's share of one vector is empty | wrong | "few rows by expert, few bits at a time" |
| expert 0 counts as no expert | wrong | "rows without signals" |

# Four faults of public kernels

Each is an edit of this project's kernels (`public_faults.py`), followed by the report. `epmoe mutants --faults --write` makes
this section.
"""


def text():
    """The whole document, with the reports of seed 0."""
    parts = [HEAD]
    for number, fault in enumerate(FAULTS, 1):
        how, said = report(fault)
        parts.append(
            f"\n## {number}. {fault.name[0].upper() + fault.name[1:]}\n\n{fault.what}\n\n```\n"
            f"{_without_addresses(said)}\n```\n"
        )
        if fault.repair:
            parts.append(f"\nRepaired ({fault.repair_is}), nothing is reported.\n")
    return "".join(parts)


def _without_addresses(said):
    """The report without addresses and neighbouring buffers, because they differ from run to run."""
    return re.sub(r" and \d+ bytes before .*", "", re.sub(r"0x[0-9a-f]+", "0x7f0000000000", said))
