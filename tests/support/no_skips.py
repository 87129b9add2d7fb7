"""A plugin of pytest, `-p support.no_skips`: skipped tests fail a run that has all that they require."""

import pytest


class _Skips:
    """Counts what is skipped."""

    def __init__(self) -> None:
        self.count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a skipped test."""
        self.count += report.skipped and not hasattr(report, "wasxfail")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that is skipped when it is imported."""
        self.count += report.skipped

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Set the exit code."""
        if self.count and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_configure(config: pytest.Config) -> None:
    """Count from the start."""
    config.pluginmanager.register(_Skips())
