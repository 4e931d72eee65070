"""What checks of rounds on the counting driver have in common."""

import numpy as np


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


def words_at(ep, driver, params, n=None):
    """n words of the parameter block at an address, those of an allocation made comparable between processes."""
    raw = driver.memory_at(params).view(np.uint64)[:n]
    bases = sorted(driver.allocated())
    places = []
    for word in raw.tolist():
        inside = [i for i, (start, nbytes) in enumerate(bases) if start <= word < start + nbytes]
        places.append((bases[inside[0]][1], word - bases[inside[0]][0]) if inside else word)
    return places
