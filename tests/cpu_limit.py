"""A plugin of pytest: limits of a test in seconds of CPU, for a busy machine takes longer for the same work.

Wall time is limited by pytest-timeout, generously, for tests that wait for what does not come. Time that other
processes compute is not counted here.
"""

import signal
import threading
import time
from contextlib import contextmanager

import pytest

SLOW = 30  # seconds of CPU from which a test is named in the summary: it should be several cases


def pytest_addoption(parser):
    parser.addini("cpu_timeout", "most seconds of CPU that a test may take; 0: any", default="0")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    with limited(limit_of(item)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with noted(item), limited(limit_of(item)):
        return (yield)


def pytest_terminal_summary(terminalreporter):
    stats = terminalreporter.stats
    if lines := slow_tests([*stats.get("passed", ()), *stats.get("failed", ())]):
        terminalreporter.section(f"tests of more than {SLOW} s of CPU")
        terminalreporter.write("\n".join(lines) + "\n")


def limit_of(item) -> float:
    """Seconds: those of the configuration, or of the test's marker "timeout" if they are more."""
    marker = item.get_closest_marker("timeout")
    named = [float(x) for x in (marker.args[:1] if marker else ())]
    return max([float(item.config.getini("cpu_timeout")), *named])


@contextmanager
def limited(seconds: float):
    """Fail what takes more seconds of this process's CPU, all threads together. Nothing is limited where the system has
    no such timer (Windows), and outside the main thread, which alone gets signals."""
    if not hasattr(signal, "SIGPROF") or threading.current_thread() is not threading.main_thread() or seconds <= 0:
        yield
        return

    def stop(*_):
        pytest.fail(f"Timeout (>{seconds:g} s of CPU time), cpu_timeout in pyproject.toml")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def noted(item):
    """Enters into the report how long the test ran."""
    start = time.process_time()
    try:
        yield
    finally:
        item.user_properties.append(("cpu_seconds", round(time.process_time() - start, 1)))


def slow_tests(reports) -> list[str]:
    """Lines that name the tests which took long, the longest first."""
    found = {report.nodeid: dict(report.user_properties).get("cpu_seconds", 0) for report in reports
             if report.when == "call"}
    return [f"{seconds:g} s of CPU: {name}" for name, seconds in sorted(found.items(), key=lambda one: -one[1])
            if seconds > SLOW]
