"""A command run in this process, and options of a verify that takes no time."""

from epmoe.__main__ import main

SMALL = [
    "--ranks",
    "2",
    "--experts-per-rank",
    "2",
    "--top-k",
    "2",
    "--hidden",
    "16",
    "--tokens",
    "4",
    "--rounds",
    "2",
]


def shown(capsys, *argv):
    """(exit status, what it wrote) of epmoe with these words."""
    status = main(list(argv))
    return status, capsys.readouterr()
