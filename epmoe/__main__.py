"""Command line: epmoe [command] [options]. Without a command it verifies."""

import sys

from epmoe import command_line

# command -> (the module with add_arguments(parser) and run(arguments) -> exit status, what it does)
COMMANDS = {
    "verify": ("epmoe.verify.command", "kernels against the reference, with pictures (the default)"),
    "doctor": ("epmoe.doctor", "what this machine can do, and the remedy for what is missing"),
    "routing": ("epmoe.routing_report.command", "what a model's routing costs: imbalance, bytes, floors, memory"),
    "check": ("epmoe.check.command", "anybody's implementation against the reference"),
    "vectors": ("epmoe.vectors.command", "golden vectors: inputs and results as files"),
    "mutants": ("epmoe.mutants.command", "each synchronisation of the kernels broken in turn: is it noticed?"),
    "explain": ("epmoe.explain.command", "a page that teaches dispatch, the full tape of a recorded round, slides, a trace"),
    "soak": ("epmoe.soak.command", "very many rounds, made and checked on the device"),
    "lesson": ("epmoe.lessons.command", "six lessons: what happens here and why, to run, read and try"),
}


def main(argv=None):
    """Run a command; returns the exit status."""
    return command_line.main("epmoe", "Expert-parallel dispatch and combine.", COMMANDS, "verify", argv)


if __name__ == "__main__":
    sys.exit(main())
