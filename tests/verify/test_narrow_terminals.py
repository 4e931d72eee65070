"""What `epmoe` prints fits a terminal of 60 columns, and loses no word there."""

from epmoe.__main__ import main


def test_the_tables_are_whole_in_60_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["verify", "--rounds", "1", "--hidden", "8"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 60
    assert "…" not in out
