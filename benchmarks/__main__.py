"""Command line: python -m benchmarks [options], or one of the COMMANDS below."""

import sys

from epmoe import command_line

COMMANDS = {
    "run": ("benchmarks.run", "dispatch and combine against the floor and other libraries (the default)"),
    "loop": ("benchmarks.loop", "pairs of dispatch and combine back to back, wall clock, host included"),
    "figure": ("benchmarks.figure", "draws time against tokens, from files of results"),
    "table": ("benchmarks.readme_table", "the figures of docs/measured.md as a Markdown table, from files of results"),
    "aims": ("benchmarks.aims", "targets and results as a Markdown table, from files of results"),
    "merge": ("benchmarks.results", "joins files of results"),
    "compile": ("benchmarks.compiling", "compiles the kernels of a run into the disk cache; a run does this itself"),
    "cpu": ("benchmarks.cpu", "the reference against memcpy, and how fast the simulator is"),
}


def main(argv=None):
    """Run a command. Returns the exit status."""
    return command_line.main("python -m benchmarks", "Measures dispatch and combine.", COMMANDS, "run", argv)


if __name__ == "__main__":
    sys.exit(main())
