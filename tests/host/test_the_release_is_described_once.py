"""Version, licence and citation agree: one place for the version, and the files that a package must bring."""

import re
from configparser import ConfigParser
from pathlib import Path

import epmoe

ROOT = Path(__file__).resolve().parents[2]
SETUP = ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def test_the_version_stands_in_one_place_and_heads_the_changelog():
    assert SETUP["metadata"]["version"] == "attr: epmoe.__version__"
    newest = re.search(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest[1] == epmoe.__version__
    assert "version:" not in (ROOT / "CITATION.cff").read_text().replace("cff-version:", "")


def test_the_licence_is_named_as_it_is():
    text = (ROOT / "LICENSE").read_text()
    assert SETUP["metadata"]["license"] == "Apache-2.0" and SETUP["metadata"]["license_files"] == "LICENSE"
    assert "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text
    assert "\nlicense: Apache-2.0\n" in (ROOT / "CITATION.cff").read_text()


def test_the_package_brings_every_file_that_it_reads():
    brought = re.findall(r"[^,\s]+", SETUP["options.package_data"]["epmoe"])
    found = [path.relative_to(ROOT / "epmoe") for path in (ROOT / "epmoe").rglob("*") if path.is_file()]
    left_out = [
        str(path)
        for path in found
        if path.suffix not in (".py", ".pyc")
        and path.name not in ("README.md", "ruff.toml")
        and ".ruff_cache" not in path.parts
        and not any(path.match(pattern) for pattern in brought)
    ]
    assert left_out == []
