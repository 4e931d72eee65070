"""What checks of rounds on the counting driver have in common."""


def fails(error, said, function, *args, **options):
    try:
        function(*args, **options)
    except error as e:
        assert said in str(e), e
        return
    raise AssertionError(f"no {error.__name__} that says {said}")


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
