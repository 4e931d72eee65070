import pytest

from epmoe.check import conformance


@pytest.fixture
def each_case_once(monkeypatch):
    """Equal cases are not run again: only implementations that depend on a world before need that."""
    monkeypatch.setattr(conformance, "RUNS", 1)
