"""pytest plugin: `pytest --epmoe-check module:Class` adds one test for each case of epmoe.check.

The ini option `epmoe_check` (one name a line) does the same for every run of a project's tests. Cases that the
implementation does not serve are skipped. A failure prints what differs, not a traceback. The cases run in a separate
process with a time limit, as in `epmoe check`. With one rank a process they run in this one, and a hang or an exception
ends all ranks.
"""

import pytest

DEFAULTS = {"--epmoe-ranks": None, "--epmoe-timeout": 120.0}


def pytest_addoption(parser):
    """The options --epmoe-check, --epmoe-ranks and --epmoe-timeout, and the setting epmoe_check."""
    group = parser.getgroup("epmoe")
    group.addoption(
        "--epmoe-check",
        action="append",
        default=[],
        metavar="module:Class",
        help="compare this dispatch and combine with the reference (epmoe.check), one test for each case",
    )
    group.addoption("--epmoe-ranks", type=int, help="size of the world of --epmoe-check (default 4)")
    group.addoption(
        "--epmoe-timeout",
        type=_seconds,
        metavar="S",
        help="seconds after which a case of --epmoe-check counts as hung (default 120)",
    )
    parser.addini(
        "epmoe_check",
        "implementations to compare with the reference, as with --epmoe-check",
        type="linelist",
        default=[],
    )


def _seconds(text):
    from epmoe.command_line import positive_seconds

    return positive_seconds(text)


def pytest_collection_modifyitems(session, config, items):
    """Add a test for each case of each implementation that was named."""
    names = [*config.getini("epmoe_check"), *config.getoption("--epmoe-check")]
    given = {option: value for option in DEFAULTS if (value := config.getoption(option)) is not None}
    if given and not names:
        raise pytest.UsageError(f"{', '.join(given)}: no meaning without --epmoe-check")
    for name in names:
        items.extend(_tests(session, name, *(DEFAULTS | given).values()))


def _tests(session, name, n_ranks, timeout):
    from epmoe.check.conformance import all_cases
    from epmoe.check.implementation import load
    from epmoe.check.ranks import ranks_of
    from epmoe_ref.errors import EPError

    try:
        implementation = load(name)
        ranks = ranks_of(implementation, n_ranks, name)
        found = all_cases(implementation, ranks.size)
    except EPError as error:
        raise pytest.UsageError(f"--epmoe-check {name}: {error}") from None
    if all(reason for _, reason, _ in found):
        raise pytest.UsageError(
            f"--epmoe-check {name}: it serves none of the {len(found)} cases ({found[0][0].name}: "
            f"{found[0][1]}), so nothing would be compared"
        )
    if implementation.per_rank:
        cases = _InThisProcess(name, implementation, found, ranks, timeout, session.config)
    else:
        cases = _InAnotherProcess(name, ranks, timeout)
    parent = Implementations.from_parent(session, name="epmoe-check", nodeid="epmoe-check")
    for case, _, _ in found:
        yield Conformance.from_parent(parent, name=f"{name}[{case.name}]", case=case.name, cases=cases)


class Implementations(pytest.Collector):
    """The parent of all cases, whose name is theirs in reports and JUnit files."""

    def collect(self):
        """Nothing: the options name the cases."""
        return []


class _InThisProcess:
    def __init__(self, name, implementation, found, ranks, timeout, config):
        self.name, self.ranks, self._timeout, self._config = name, ranks, timeout, config
        self._found = {case.name: (implementation, case, reason, run, ranks) for case, reason, run in found}

    def outcome(self, case, items):
        from epmoe.check import guarded
        from epmoe.check.conformance import outcome

        capture = self._config.pluginmanager.getplugin("capturemanager")
        shown = capture and (lambda difference: capture.suspend_global_capture(in_=True))
        with guarded.as_rank(self.name, case, self._timeout, "--epmoe-timeout", shown):
            return outcome(*self._found[case])


class _InAnotherProcess:
    """The outcomes of the selected cases of one implementation, which one process runs one after another."""

    def __init__(self, name, ranks, timeout):
        self.name, self.ranks, self._timeout, self._cannot = name, ranks, timeout, ""
        # a generator of outcomes, and {case: Outcome} of tests that come later
        self._running, self._known = None, {}

    def outcome(self, case, items):
        """The Outcome of a case. items: of this session; the first call begins with all cases among them."""
        from epmoe_ref.errors import EPError

        if self._running is None:
            self._begin([i.case for i in items if isinstance(i, Conformance) and i.cases is self])
        while case not in self._known:
            if self._cannot:
                raise Differs(self._cannot)
            try:
                found = next(self._running, None)
            except EPError as error:
                self._cannot = f"{self.name} cannot be run: {error}"
                continue
            if found is None:
                self._begin([case])  # it runs a second time
            else:
                self._known[found.case] = found
        return self._known.pop(case)

    def _begin(self, cases):
        from epmoe.check import guarded
        from epmoe.check.conformance import Report

        report = Report(self.name, self.ranks.size)
        self._running = guarded.outcomes(report, cases, self._timeout, timeout_option="--epmoe-timeout")


class Conformance(pytest.Item):
    """One case of one implementation."""

    def __init__(self, *, case, cases, **of_item):
        super().__init__(**of_item)
        self.case, self.cases = case, cases

    def runtest(self):
        from epmoe.check.compare import report
        from epmoe.check.conformance import SHOWN

        result = self.cases.outcome(self.case, self.session.items)
        if result.not_served or result.not_run:
            pytest.skip(result.not_served or result.not_run)
        if result.differences:
            again = self.cases.ranks.again(self.cases.name, self.case)
            raise Differs(f"{report(result.differences, SHOWN)}\nagain: {again}")

    def repr_failure(self, excinfo, style=None):
        if isinstance(excinfo.value, Differs):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self):
        return self.path, None, self.name


class Differs(Exception):
    """The implementation's results differ from the reference's."""
