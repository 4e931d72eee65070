"""What checks of rounds on the counting driver have in common.

`python counted_rounds.py [check_...]` runs those, or all of checks_of_*.py; each is told as it begins.
"""

import sys
from importlib import import_module
from pathlib import Path


def run(checks):
    """Those of checks, {name: function}, that this program's arguments name, or all; each is told as it begins."""
    for name, check in checks.items():
        if name.startswith("check_") and name in (sys.argv[1:] or checks):
            print(name, flush=True)
            check()


def fails(error, said, function, *args, **options):
    text = error_of(error, lambda: function(*args, **options))
    assert said in text, text


def error_of(kind, function):
    """The text of the error that function() raises."""
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def a_round(ep, x, ids, weights, **options):
    """A round whose experts are the identity: the combined output."""
    d = ep.dispatch(x, ids)
    return ep.combine(d.output_tokens, d, weights, **options)


def since(driver, function):
    """(what was launched by a function, names of the other driver calls)."""
    driver.launches.clear()
    driver.calls.clear()
    driver.waited_for.clear()
    driver.copied_on.clear()
    function()
    return list(driver.launches), list(driver.calls)


if __name__ == "__main__":
    for program in sorted(Path(__file__).parent.glob("checks_of_*.py")):
        run(vars(import_module(program.stem)))
