"""`epmoe vectors DIR`: writes the golden vectors and compares them with the hashes of this version."""

import hashlib
import sys
from pathlib import Path

from epmoe.command_line import DIFFERS, EQUAL
from epmoe.vectors import experts, files, fused_a2a
from epmoe_ref.errors import EPValueError

SUMS = Path(__file__).with_name("SHA256SUMS")


def add_arguments(parser):
    """Add the sub-command's arguments to an argparse parser."""
    parser.add_argument("folder", metavar="DIR", help="where to write; made if it is not there")
    parser.add_argument("--only", metavar="TEXT", help="write only the vectors whose name contains TEXT")
    parser.add_argument(
        "--update",
        action="store_true",
        help="for maintainers: after a change of what the reference defines, write the new hashes into the package",
    )


def run(arguments):
    """Write and compare. Returns 0, 1 if a file differs from this version's hash, or 2 if there is nothing to do."""
    if arguments.update and arguments.only:
        raise EPValueError("--update writes the hashes of all vectors: leave --only out")
    if Path(arguments.folder).is_file():
        raise EPValueError(f"{arguments.folder} is a file: give a folder to write to (epmoe check compares your code)")
    sums = write_all(arguments.folder, only=arguments.only or "")
    if not sums:
        raise EPValueError(f"no vector's name contains {arguments.only!r}; their names are those in {SUMS}")
    size_mb = sum((Path(arguments.folder) / name).stat().st_size for name in sums) / 1e6
    print(f"{len(sums) // 3} vectors, {len(sums)} files, {size_mb:.1f} MB in {arguments.folder}")
    if arguments.update:
        SUMS.write_bytes(as_text(sums))
        print(f"hashes written to {SUMS}")
        return EQUAL
    known = recorded()
    wrong = [name for name in sums if known.get(name) != sums[name]]
    for name in wrong:
        print(f"{name}: sha256 {sums[name]}, this version's is {known.get(name, 'not recorded')}", file=sys.stderr)
    print("hashes differ" if wrong else "hashes equal this version's")
    return DIFFERS if wrong else EQUAL


def write_all(folder, only=""):
    """Write the vectors whose name contains `only`. Returns {file name: sha256}."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sums = {}
    for name, about, arrays in [*experts.vectors(), *fused_a2a.vectors()]:
        if only in name:
            files.write(folder, name, about, arrays())
            for suffix in ("bin", "json", "npz"):
                path = folder / f"{name}.{suffix}"
                sums[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return sums


def as_text(sums):
    """The hashes in the form that `sha256sum -c` reads, sorted by file name."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())).encode("ascii")


def recorded():
    """{file name: sha256} recorded for this version."""
    return {name: digest for digest, name in (line.split("  ") for line in SUMS.read_text("ascii").splitlines())}
