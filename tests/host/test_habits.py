"""What .ci/run checks is what editors and hooks use: one version of ruff, workflows that name what exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_hook_and_the_extra_have_the_same_ruff():
    hook = re.search(r"rev: v([\d.]+)", (ROOT / ".pre-commit-config.yaml").read_text())
    extra = re.search(r"ruff ==([\d.]+)", (ROOT / "setup.cfg").read_text())
    assert hook[1] == extra[1]


def test_workflows_call_what_ci_run_offers():
    offered = set(re.findall(r"^(\w+)\)$", (ROOT / ".ci" / "run").read_text(), re.M)) | {""}
    called = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        called |= set(re.findall(r"- run: \.ci/run ?(\w*)$", path.read_text(), re.M))
    assert called == offered >= {"", "nightly"}
