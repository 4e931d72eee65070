"""Finds, by running the worlds, which acquire reads which release. A mutant relaxes both together."""

from functools import lru_cache

from epmoe.device.sim.detector import Detector
from epmoe.device.sim.race_report import line_of
from epmoe.mutants import edited_kernels
from epmoe.mutants.statement_mutations import StatementMutation
from epmoe.mutants.token_mutations import STRONG, mutants_of

SITE = 7, 8, 6  # code, place and word of an access


def seen_in(run):
    """{(release's (file, line, word), acquire's)} in one run of a world. The run must pass."""
    found, observe = set(), Detector.observe

    def watch(self, a, location, access, acquire, scope, write, heads):
        if acquire:
            found.update((_site(h[3]), _site(access)) for h in heads.values() if h[0] is not a)
        observe(self, a, location, access, acquire, scope, write, heads)

    Detector.observe = watch
    try:
        run()
    finally:
        Detector.observe = observe
    return {(r, q) for r, q in found if r[0] and q[0] and (m := STRONG.match(r[2])) and m[2] in ("release", "acq_rel")}


def _site(access):
    code, place, word = (access[i] for i in SITE)
    file = code.co_filename.removeprefix(f"{edited_kernels.FOLDER}/")
    return ("" if file == code.co_filename else file), line_of(code, place), word


@lru_cache(None)
def _relaxed(file):
    """{(line, word): the mutant of token_mutations.py that relaxes it}."""
    return {
        (m.token.line, m.token.text): m
        for m in mutants_of(file, edited_kernels.source_of(file))
        if m.kind == "order" and "_relaxed_" in m.new
    }


def statement_mutations_of_pairs(sites):
    """A mutant for each pair of sites."""
    out = []
    for release, acquire in sorted(sites):
        first, second = (_relaxed(file).get((line, word)) for file, line, word in (release, acquire))
        if first and second and first.token != second.token:
            what = f"{release[2]} and {acquire[0]}'s {acquire[2]} become relaxed"
            parts = [
                StatementMutation(m.token, "both", m.new, what, (m.token.line, m.token.line)) for m in (first, second)
            ]
            out.append(StatementMutation(parts[0].token, "both", parts[0].new, what, parts[0].lines, other=parts[1]))
    return out
