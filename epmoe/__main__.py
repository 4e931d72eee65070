"""Command line: epmoe [command] [options]. Without a command it verifies."""

import sys

from epmoe import command_line

# command -> (module with add_arguments(parser) and run(arguments) -> exit status, help)
COMMANDS = {
    "verify": (
        "epmoe.verify.command",
        "run the kernels, compare every byte with the reference, show the routing (the default)",
    ),
    "doctor": ("epmoe.doctor", "list what is missing on this machine, and how to fix it"),
    "routing": (
        "epmoe.routing_report.command",
        "report what a model's routing costs: imbalance, bytes, lower bounds, memory",
    ),
    "check": ("epmoe.check.command", "compare an implementation with the reference"),
    "vectors": ("epmoe.vectors.command", "write golden vectors: inputs and results as files"),
    "mutants": (
        "epmoe.mutants.command",
        "remove each synchronisation of the kernels in turn, and check that a test notices",
    ),
    "explain": (
        "epmoe.explain.command",
        "write a page that teaches dispatch, the full tape of a round, slides, a trace",
    ),
    "soak": ("epmoe.soak.command", "run many rounds, generated and checked on the device"),
    "lesson": ("epmoe.lessons.command", "list or print the lessons on expert parallelism, with exercises"),
    "museum": (
        "epmoe.museum.command",
        "show real faults of public kernels as small kernels that break in the simulator",
    ),
    "puzzle": ("epmoe.puzzles.command", "list puzzles (kernels with a hole of a few lines), judge your answers"),
}


def main(argv=None):
    """Run a command; returns the exit status."""
    return command_line.main("epmoe", "Expert-parallel dispatch and combine.", COMMANDS, "verify", argv)


if __name__ == "__main__":
    sys.exit(main())
