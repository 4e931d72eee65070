"""A fixed sample of the option matrix; `python tests/oracle/option_matrix.py` runs all of it."""

import random

import pytest
from option_matrix import FORMATS, all_cases, difference_of, legal_cases


def sample():
    """The same few cases every time, in which every format meets every option."""
    draw = random.Random(1)
    cases = []
    for token_format in FORMATS:
        own = [c for c in legal_cases() if c.token_format == token_format]
        draw.shuffle(own)
        seen, chosen = set(), []
        for case in own:
            options = {
                case.launches,
                ("shared", case.shared_expert),
                ("skip", case.skip_a2a),
                case.weights,
                ("epilogue", case.epilogue),
            }
            if options - seen:
                chosen.append(case)
                seen |= options
        cases += chosen
    return cases


def test_the_matrix_is_whole():
    assert len(all_cases()) == 7 * 2 * 2 * 2 * 3 * 2 and len(legal_cases()) == 7 * 2 * 2 * 9
    assert len(set(map(str, legal_cases()))) == len(legal_cases())
    assert 5 * len(FORMATS) > len(sample()) > 3 * len(FORMATS)


def with_kernels():
    """Every case with one kind of kernels, in turn; at night with the other as well."""
    for number, case in enumerate(sample()):
        for kernels in ("plain", "fast"):
            at_night = [] if (kernels == "fast") == number % 2 else [pytest.mark.nightly]
            yield pytest.param(case, kernels, id=f"{case}-{kernels}", marks=at_night)


@pytest.mark.parametrize("case, kernels", list(with_kernels()))
@pytest.mark.by_day(8)
def test_kernels_reference_and_records_agree(case, kernels):
    difference = difference_of(case, kernels=kernels)
    assert difference is None, difference
