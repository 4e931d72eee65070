"""Which commit the source is of: asked of git without writing into its folder."""

import os
import shutil
import subprocess

import pytest

from epmoe import provenance

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def test_the_commit_is_told_and_the_index_is_left_alone(tmp_path):
    def git(*words):
        user = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", "-C", str(tmp_path), *user, *words], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    assert provenance.commit(tmp_path) is None
    file, index = tmp_path / "file", tmp_path / ".git" / "index"
    file.write_text("a")
    git("add", "file")
    git("commit", "-q", "-m", "a")
    (tmp_path / "other").write_text("not tracked")
    os.utime(file, (0, 0))  # git would write that into its index
    os.utime(index, (0, 0))
    assert provenance.commit(tmp_path) == git("rev-parse", "HEAD")
    assert index.stat().st_mtime == 0
    file.write_text("longer")
    assert provenance.commit(tmp_path) == git("rev-parse", "HEAD") + "-changed"
