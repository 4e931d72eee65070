"""`epmoe museum`: lists the exhibits, shows one, and asks for the line that is wrong."""

import textwrap

from epmoe.command_line import DIFFERS, EQUAL, at_least_one, number_of_one
from epmoe.lessons.telling import WIDTH, plain_simulator, wrapped
from epmoe.museum import FILES
from epmoe_ref.errors import EPValueError

ASK = 0  # --spot without a line
SHOWN = 14  # operations of a schedule that are shown


def add_arguments(parser):
    """The options of museum."""
    number_of_one(parser, FILES, "exhibits")
    parser.add_argument(
        "--spot",
        nargs="?",
        type=at_least_one,
        const=ASK,
        metavar="LINE",
        help="show the code alone; with a line: judge whether that line is the faulty one",
    )


def run(args):
    """Do what was asked; the exit status is 0, 1 if the line is not the one, 2 if something cannot be done."""
    if args.number is None and args.spot is not None:
        raise EPValueError("--spot needs a number: epmoe museum 1 --spot")
    with plain_simulator():
        # epmoe.device chooses the simulator when it is imported
        from epmoe.museum.exhibit import Exhibit

        if args.number is None:
            return listed([Exhibit(file) for file in FILES.values()])
        exhibit = Exhibit(FILES[args.number])
        if args.spot == ASK:
            return asked(args.number, exhibit)
        if args.spot:
            found, says = exhibit.spot(args.spot)
            print(wrapped(f"{'RIGHT' if found else 'NOT YET':7}  {says}", WIDTH))
            if found:
                print(f"\nepmoe museum {args.number} tells the story.")
            return EQUAL if found else DIFFERS
        return shown(args.number, exhibit)


def listed(exhibits):
    """The exhibits by number and title."""
    print(
        "Faults of public kernels. Each is rebuilt as a small kernel that breaks in the\n"
        "simulator, with the report and the repair.\n"
    )
    for number, exhibit in zip(FILES, exhibits):
        threads = ", ".join(_short(link) for link in exhibit.links)
        print(f"  {number}  {exhibit.title}" + (f"\n     {threads}" if threads else ""))
    print(
        "\nepmoe museum N --spot        shows the code: which line is wrong?\n"
        "epmoe museum N --spot LINE   judges your answer\n"
        "epmoe museum N               shows story, repair, schedule and report"
    )
    return EQUAL


def asked(number, exhibit):
    """The puzzle: code without a word about it."""
    print(
        f"Exhibit {number}. The kernel runs on two ranks. Which line is wrong, or\n"
        "lacks another one before or after it? The lines above the kernel count too.\n"
    )
    _print_code(exhibit)
    print(f"\nepmoe museum {number} --spot LINE judges your answer.")
    return EQUAL


def shown(number, exhibit):
    """Story, code, repair, schedule, report, and how often it shows."""
    print(f"{number}. {exhibit.title}\n")
    print(textwrap.fill(exhibit.story, WIDTH - 2))
    if exhibit.links:
        print("\nRead on: " + "\n         ".join(exhibit.links))
    else:
        print(
            "\nSeen in public kernels; we know of no issue. `epmoe mutants --faults` puts\n"
            "the same fault into this project's own kernels."
        )
    _heading("The kernel")
    _print_code(exhibit)
    _heading("The repair")
    print("\n".join(exhibit.diff))
    failure = exhibit.first_failure
    breaks = "in which the race is found (results may be right)" if failure.how == "race" else "that breaks it"
    _heading(f"A schedule {breaks}: seed {failure.seed}")
    cut, name = len(failure.events) - SHOWN, exhibit.first_region
    if cut > 0:
        print(f"(after {cut} operations)")
    print("\n".join(failure.events[-SHOWN:]) or "(no access to memory came before it)")
    print("\n" + wrapped(f"({name}[2] of 1: word 2 of the region {name} of rank 1; = written, -> read)", WIDTH))
    _heading({"race": "The race report", "hang": "The hang report"}.get(failure.how, "The error"))
    print(wrapped(failure.says, WIDTH))
    alone = exhibit.counts(racecheck=False)
    _heading(f"Under {sum(alone.values())} schedules")
    print(f"  broken, judged by results only:   {_told(alone)}")
    print(f"  broken, with the race detector:   {_told(exhibit.counts())}")
    print(f"  repaired, with the race detector: {_told(exhibit.counts(repaired=True))}")
    return EQUAL


def _heading(text):
    print(f"\n{text}\n")


def _print_code(exhibit):
    for i, part in enumerate(exhibit.code):
        if i and part[0][0] > exhibit.code[i - 1][-1][0] + 1:
            print()
        for number, line in part:
            print(f"{number:3}│{line}")
    for word, does in exhibit.new_words:
        print(("\n" if word == exhibit.new_words[0][0] else "") + wrapped(f"{word}: {does}", WIDTH))


def _told(counts):
    return ", ".join(f"{n} {how}" for how, n in counts.items())


def _short(link):
    owner, repository, _, number = link.removeprefix("https://github.com/").split("/")
    return f"{owner}/{repository}#{number}"
