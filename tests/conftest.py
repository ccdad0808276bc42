"""Set-up of the whole suite: a cache directory of its own, quiet threads, and the list of what this machine could not run."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Several pytest processes share the cores: threads that spin while they wait would slow their neighbours (set before torch).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tests must not meet kernels that an earlier run left behind, nor leave theirs to the user.
os.environ["ATTNC_CACHE_DIR"] = tempfile.mkdtemp(prefix="attnc-tests-")

import pytest
from hypothesis import HealthCheck, settings

from needs import PREFIX

settings.register_profile(
    "attnc", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("attnc")


@pytest.fixture
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty disk cache for one test."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("ATTNC_CACHE_DIR", str(directory))
    yield directory


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """A skip that does not come from needs.py, and every xfail, is a failure: nothing is put off silently."""
    report = yield
    if hasattr(report, "wasxfail"):
        report.outcome, report.longrepr = "failed", f"{item.nodeid}: xfail is not used here"
        del report.wasxfail
    elif report.skipped and not _reason(report).startswith(PREFIX):
        report.outcome, report.longrepr = "failed", f"{item.nodeid}: skip only through needs.py ({_reason(report)})"
    return report


def pytest_terminal_summary(terminalreporter) -> None:
    """Names the groups of tests that this machine could not run."""
    groups = Counter(_reason(report).removeprefix(PREFIX) for report in terminalreporter.stats.get("skipped", []))
    terminalreporter.section("groups that did not run here")
    for group, count in sorted(groups.items()):
        terminalreporter.write_line(f"{group}: {count} test{'s' if count > 1 else ''}")
    if not groups:
        terminalreporter.write_line("none: every tool- and ISA-dependent group ran")


def pytest_sessionfinish() -> None:
    import shutil

    shutil.rmtree(os.environ["ATTNC_CACHE_DIR"], ignore_errors=True)


def _reason(report) -> str:
    """Why a test was skipped, without pytest's prefix."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
