"""What `epmoe` and `epmoe routing` print fits a narrow terminal, and loses no word there."""

import numpy as np
import pytest

from epmoe.__main__ import main


@pytest.mark.parametrize("width", [40, 60, 80])
@pytest.mark.parametrize(
    "argv",
    [
        ["verify", "--rounds", "1", "--hidden", "8", "--counters"],
        ["verify", "--rounds", "1", "--hidden", "8", "--ranks", "8", "--tokens", "30"],
        ["routing", "ids.npy"],
        ["routing", "ids.npy", "--ranks", "16"],
    ],
    ids=" ".join,
)
def test_the_tables_are_whole(argv, width, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.save("ids.npy", np.argsort(rng.random((9, 200, 64)), axis=2)[:, :, :4])
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert "…" not in out
