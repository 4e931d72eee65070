"""A token format is a module of the same name on each side and a line in the table of formats; no more."""

import sys
from types import ModuleType

import pytest

from epmoe import EPConfig, EPValueError, LocalWorld, routing
from epmoe.kernels.formats import mxfp4 as kernel_mxfp4
from epmoe.verify.checked_rounds import Case, rounds_of
from epmoe_ref.format_names import TOKEN_FORMATS, FormatName
from epmoe_ref.formats import mxfp4 as reference_mxfp4


@pytest.fixture
def seventh(monkeypatch):
    """A format "seventh", which here is made of mxfp4_rows on both sides."""
    for package, model in (("epmoe_ref.formats", reference_mxfp4), ("epmoe.kernels.formats", kernel_mxfp4)):
        module = ModuleType(f"{package}.seventh")
        module.make = model.make
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(TOKEN_FORMATS, "seventh", FormatName("seventh", 32))


@pytest.mark.parametrize("fused", [False, True], ids=["split", "fused"])
@pytest.mark.parametrize("shared", [False, True], ids=["plain", "shared expert"])
def test_rounds_with_a_new_format_equal_the_reference(seventh, fused, shared):
    cfg = EPConfig(2, 4, 2, 96, 6, token_format="seventh", fused_shared_expert=shared)
    case = Case(cfg, fused=fused)
    routed = [routing.make(cfg, [7, n]) for n in range(2)]
    rounds = list(rounds_of(case, LocalWorld(2, seed=3), routed))
    assert len(rounds) == 2 and not any(r.differences for r in rounds)
    assert rounds[0].seen[0].output_tokens.shape[1] == 48 and rounds[0].seen[0].output_scales.shape[1] == 3


def test_without_its_line_in_the_table_it_is_refused():
    with pytest.raises(EPValueError, match="token_format='seventh' must be one of bf16, "):
        EPConfig(2, 4, 2, 96, 6, token_format="seventh")
