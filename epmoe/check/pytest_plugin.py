"""pytest plugin: `pytest --epmoe-check module:Class` adds one test for each case of epmoe.check.

The ini option `epmoe_check` (one name a line) does the same for every run of a project's tests. Cases that the
implementation does not serve are left out. A failure prints what differs, not a traceback.
"""

import pytest


def pytest_addoption(parser):
    """The options --epmoe-check and --epmoe-ranks, and the setting epmoe_check."""
    group = parser.getgroup("epmoe")
    group.addoption(
        "--epmoe-check",
        action="append",
        default=[],
        metavar="module:Class",
        help="compare this dispatch and combine with the reference (epmoe.check), one test for each case",
    )
    group.addoption(
        "--epmoe-ranks", type=int, default=4, help="size of the world of --epmoe-check (default 4)"
    )
    parser.addini(
        "epmoe_check",
        "implementations to compare with the reference, as with --epmoe-check",
        type="linelist",
        default=[],
    )


def pytest_collection_modifyitems(session, config, items):
    """Add a test for each case of each implementation that was named."""
    for name in [*config.getini("epmoe_check"), *config.getoption("--epmoe-check")]:
        items.extend(_tests(session, name, config.getoption("--epmoe-ranks")))


def _tests(session, name, n_ranks):
    from epmoe.check.conformance import all_cases
    from epmoe.check.implementation import load
    from epmoe.check.ranks import ranks_of
    from epmoe_ref.errors import EPError

    try:
        implementation = load(name)
        ranks = ranks_of(implementation, n_ranks)
        found = all_cases(implementation, ranks.size)
    except EPError as error:
        raise pytest.UsageError(f"--epmoe-check {name}: {error}") from None
    if all(reason for _, reason, _ in found):
        raise pytest.UsageError(
            f"--epmoe-check {name}: it serves none of the {len(found)} cases ({found[0][0].name}: "
            f"{found[0][1]}), so nothing would be compared"
        )
    for case, reason, run in found:
        if reason is None:
            yield Conformance.from_parent(
                session, name=f"{name}[{case.name}]", what=(implementation, case, None, run, ranks)
            )


class Conformance(pytest.Item):
    """One case of one implementation."""

    def __init__(self, *, what, **of_item):
        super().__init__(**of_item)
        self._what = what  # of conformance.outcome

    def runtest(self):
        from epmoe.check.conformance import outcome

        result = outcome(*self._what)
        if result.differences:
            raise Differs(str(result))

    def repr_failure(self, excinfo, style=None):
        if isinstance(excinfo.value, Differs):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self):
        return self.path, None, self.name


class Differs(Exception):
    """The implementation's results differ from the reference's."""
