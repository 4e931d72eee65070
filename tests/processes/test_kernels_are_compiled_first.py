"""A walk of verify over processes: its kernels are known beforehand, each once, and shared out. Needs no GPU."""

from collections import Counter
from pathlib import Path

from epmoe import verify_kernels
from epmoe.verify_matrix import cases

HERE = Path(__file__).parent
ALL = list(cases(4, 256))


def test_the_pieces_have_every_kernel_that_the_cases_launch(gpu_side):
    found = gpu_side(HERE / "kernels_of_verify.py")
    assert found["launched"] == found["in pieces"] and None not in found["launched"]
    names = Counter(found["launched"].values())
    assert set(names) == {"dispatch", "combine", "dispatch_async", "dispatch_wait", "combine_async", "combine_wait"}
    assert found["pieces"] <= sum(names.values())


def test_a_piece_is_compiled_once_and_the_longest_come_first():
    pieces = verify_kernels.pieces(ALL)
    assert len(ALL) == 252 and len(pieces) == len(set(pieces)) == 92
    cost = [(phase == "combine", not case.fused) for case, phase in pieces]
    assert cost == sorted(cost)
    assert {case.cfg for case in ALL} == {case.cfg for case, phase in pieces if phase == "dispatch"}


def test_without_a_gpu_there_is_nothing_to_compile_for(capsys):
    from epmoe import __main__

    assert __main__.main(["verify", "--all", "--compile", "1/2"]) == 2
    assert "needs a GPU" in capsys.readouterr().err
