"""What `epmoe verify --dump` writes is an input as it is: it says how many ranks there are."""

from epmoe.__main__ import main


def test_a_dump_of_two_ranks_needs_no_other_option(capsys, tmp_path):
    file = str(tmp_path / "two.npz")
    assert main(["verify", "--rounds", "1", "--hidden", "8", "--ranks", "2", "--dump", file]) == 0
    assert main(["verify", "--input", file]) == 0
    assert "\nepmoe verify  2 ranks x 4 experts" in capsys.readouterr().out
    assert main(["verify", "--input", file, "--ranks", "4"]) == 2
    assert "is for 2 ranks, and this run has 4" in capsys.readouterr().err
