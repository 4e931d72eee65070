"""The project's own kernels with one synchronisation taken out, found by what its loss does to a region of memory."""

from epmoe.mutants import edited_kernels
from epmoe.mutants.hunt import attempt
from epmoe.mutants.tokens import mutants_of
from epmoe.mutants.worlds import WORLDS

SEEDS = 4
ELSEWHERE = ("rows/", "formats/", "swiglu")        # other kernels, and what neither sends nor signals


def unordered(region, world="split"):
    """(Mutant, report): the first fence or release whose loss makes a race on the region. Raises LookupError.

    Of several schedules the one is taken whose report names the changed line, or else the first.
    """
    for mutant in _candidates():
        edits = {mutant.token.file: mutant.apply(edited_kernels.source_of(mutant.token.file))}
        reports = []
        for seed in range(SEEDS):
            how, report = attempt(WORLDS[world], seed, edits)
            if how != "race" or not report.startswith(f"data race on {region}["):
                break
            reports.append(report)
            if f"{mutant.token.file.rpartition('/')[2]}:{mutant.token.line} " in report:
                return mutant, report
        if reports:
            return mutant, reports[0]
    raise LookupError(f"no fence or release of epmoe/kernels makes a race on {region} in the world {world!r} when it "
                      "is lost")


def _candidates():
    """Lost fences first, then relaxed releases of system scope, then of device scope."""
    found = [m for file in edited_kernels.files() if not file.startswith(ELSEWHERE)
             for m in mutants_of(file, edited_kernels.source_of(file))]
    lost = [m for m in found if m.token.text.startswith("fence_acq_rel") and m.new == "pass"]
    relaxed = [m for m in found if m.kind == "order" and "_release_" in m.token.text]
    return lost + sorted(relaxed, key=lambda m: "_sys_" not in m.token.text)
