"""Command line: python -m benchmarks [options], or one of the COMMANDS below."""

import sys

from epmoe import command_line

COMMANDS = {
    "run": (
        "benchmarks.run",
        "dispatch and combine against the floor and other libraries (the default)",
    ),
    "loop": (
        "benchmarks.loop",
        "pairs of dispatch and combine back to back, wall clock, host included",
    ),
    "figure": ("benchmarks.figure", "time against tokens, out of files of results"),
    "table": (
        "benchmarks.readme_table",
        "the figures of docs/measured.md as a Markdown table, out of files of results",
    ),
    "aims": (
        "benchmarks.aims",
        "aims beside what is reached, as a Markdown table, out of files of results",
    ),
    "merge": ("benchmarks.results", "files of results into one"),
    "compile": (
        "benchmarks.compiling",
        "the kernels of a run into the disk cache; a run does it itself",
    ),
    "cpu": ("benchmarks.cpu", "the reference against memcpy, and how fast the simulator is"),
}


def main(argv=None):
    """Run a command. Returns the exit status."""
    return command_line.main(
        "python -m benchmarks", "What dispatch and combine cost.", COMMANDS, "run", argv
    )


if __name__ == "__main__":
    sys.exit(main())
