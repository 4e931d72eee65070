"""Prints verdicts: a line for each as it comes, then a table, then the unexpected ones."""

from collections import Counter

from epmoe.mutants.harmless import HARMLESS

MEANING = {
    "race": "data race reported",
    "wrong": "results differ from the reference",
    "hang": "every thread waits",
    "bounds": "access outside every buffer",
    "leftover": "memory not as before the rounds, or written in vain",
    "error": "the kernel failed otherwise",
    "survives": "nothing noticed it",
    "unused": "no world runs the line",
}
OF_TOKENS = "order", "scope", "plain", "barrier", "reset", "wait", "nc"
OF_STATEMENTS = "swap", "early", "skip", "off by one", "twice", "whose", "both"
SURVIVES = (
    "survives: either the synchronisation is not needed (say why in epmoe/mutants/harmless.py), or a world "
    "that needs it is missing"
)
NO_WORLD = (
    "survives: either it changes neither results nor memory nor the order of accesses, or "
    "epmoe/mutants/worlds.py lacks a world that shows it: add one"
)
UNUSED = "is run by no world of epmoe/mutants/worlds.py: add one"


def judge(verdicts):
    """[(verdict, what is wrong with it)]: survivors not known to be harmless, and harmless ones that were killed."""
    found = []
    for v in verdicts:
        if v.killed and v.mutant.key in HARMLESS:
            found.append((v, f'is listed as harmless, but was killed: {v.how} in "{v.world}", seed {v.seed}'))
        elif not v.killed and v.mutant.key not in HARMLESS:
            found.append((v, NO_WORLD if v.mutant.kind == "patch" else SURVIVES if v.how == "survives" else UNUSED))
    return found


def word(failed, interrupted=False):
    """The word that begins the last line."""
    if failed or interrupted:
        return f"[bold red]{'FAIL' if failed else 'INTERRUPTED'}[/bold red]"
    return "[bold green]PASS[/bold green]"


class Verdicts:
    """All verdicts of a hunt. every: print a line for each, not only for survivors. reports: print the reports too."""

    def __init__(self, console, *, every=False, reports=False):
        self.console, self.every, self.reports = console, every, reports
        self.all = []

    def add(self, v):
        self.all.append(v)
        if self.every or not v.killed or v.mutant.key in HARMLESS:
            self._line(v)
        if self.reports and v.killed:
            self.console.print(f"    {v.report}".replace("\n", "\n    "), markup=False, style="dim")

    def _line(self, v):
        reason = HARMLESS.get(v.mutant.key)
        where = f' in "{v.world}", seed {v.seed}' if v.killed else f": {reason}" if reason else ""
        self.console.print(
            f"{v.how:8} {v.mutant.token.place:24} {v.mutant.kind}: {v.mutant.change}"
            f"{' seen by ' + v.mutant.seen_by if v.mutant.seen_by else ''}{where}",
            markup=False,
        )

    def table(self):
        """Print how many mutants were noticed, by kind of edit and of report."""
        from rich.table import Table

        counts = Counter((v.mutant.kind, v.how) for v in self.all)
        hows = [how for how in MEANING if any(h == how for _, h in counts)]
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        table.add_column("what was done", style="bold")
        for column in ("mutants", *hows):
            table.add_column(column, justify="right")
        kinds = [k for k in (*OF_TOKENS, *OF_STATEMENTS, "patch") if any(kind == k for kind, _ in counts)]
        for kind in kinds:
            of = [counts[kind, how] for how in hows]
            table.add_row(kind, str(sum(of)), *(str(n) if n else "" for n in of))
        of = [sum(counts[kind, how] for kind in kinds) for how in hows]
        table.add_row("all", *map(str, (sum(of), *of)), style="bold")
        self.console.print(table)
        self.console.print("; ".join(f"{how}: {MEANING[how]}" for how in hows), style="dim")

    def end(self, undecided, seeds, seconds):
        """Print the table, the unexpected verdicts, and undecided mutants. Returns the number of unexpected ones."""
        unexpected = judge(sorted(self.all, key=lambda v: (v.mutant.token.file, v.mutant.token.start, v.mutant.key)))
        if self.all:
            self.table()
        for v, what in unexpected:
            self.console.print(f"\n[bold red]{v.mutant.token.place}[/bold red]")
            self.console.print(f"{v.mutant.key}\n{what}\n{v.report}".rstrip(), markup=False)
        for mutant, done, of in undecided:
            if done or self.every:
                self.console.print(
                    f"undecided {mutant.token.place:22} {mutant.kind}: {mutant.change}: not noticed in "
                    f"{done} of {of} runs",
                    markup=False,
                )
        harmless = sum(not v.killed for v in self.all) - sum(not v.killed for v, _ in unexpected)
        left = f", {len(undecided)} undecided" if undecided else ""
        n = len(self.all) + len(undecided)
        as_expected = len(self.all) - len(unexpected)
        self.console.print(
            f"\n{word(unexpected, undecided)}  {n} mutants: {sum(v.killed for v in self.all)} noticed, {harmless} known to "
            f"be harmless, {len(unexpected)} not as expected{left}: {100 * as_expected // n} %; "
            f"{seeds} seeds, {seconds:.0f} s"
        )
        return len(unexpected)
