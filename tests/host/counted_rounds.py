"""What checks of rounds on the counting driver have in common."""

import sys


def run(checks):
    """Those whose names are this program's arguments, each told as it begins."""
    for check in sys.argv[1:]:
        print(check, flush=True)
        checks[check]()


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
