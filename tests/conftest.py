# SPDX-License-Identifier: Apache-2.0
"""Fixtures of every test, and how many inputs the tests draw that draw theirs."""

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
import torch._dynamo.guards

pytest.register_assert_rewrite("support")  # a failed comparison there shows its values, too
pytest_plugins = ["support.devices", "support.processes"]  # the fixtures `device` and `passes`

# glibc then fills new memory with 0x7f, huge numbers or NaN: what an op leaves out is not taken for
# zeros.
M_PERTURB = -6  # malloc.h
if hasattr(ctypes.CDLL(None), "mallopt"):
    ctypes.CDLL(None).mallopt(M_PERTURB, 0x80)

# Collections of garbage take two of ten seconds of pytest's collection, and a twentieth of a
# compile's time.
gc.set_threshold(10_000, 50, 20)
# A collection after each compile, and a flush of the CPU's cache to time its guards, take 50 ms.
torch._dynamo.config.run_gc_after_compile = False
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0

# The same draws in every run. `pytest --hypothesis-profile=many` makes ten times as many.
hypothesis.settings.register_profile(
    "few", max_examples=30, deadline=None, derandomize=True, database=None, print_blob=False
)
hypothesis.settings.register_profile(
    "many", hypothesis.settings.get_profile("few"), max_examples=300
)
hypothesis.settings.load_profile("few")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--threads", type=int, default=1, help="torch's threads in each test")
    parser.addoption("--nightly", action="store_true", help="also the tests that take long")
    parser.addoption("--failures", help="a file that each failure is appended to at once")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpus(count): needs so many GPUs and kernels for them")
    config.addinivalue_line("markers", "nightly: takes long")
    path = config.getoption("failures")
    if path and not hasattr(config, "workerinput"):  # pytest-xdist's workers report to this process
        config.pluginmanager.register(Failures(path))


class Failures:
    """Writes each failure to a file as it happens: a run that is stopped prints no summary."""

    def __init__(self, path: str) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with open(self.path, "a") as file:
                file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that need more GPUs than this machine has, and those that take long."""
    from support.devices import GPUS  # not before its assertions are rewritten

    names = () if config.getoption("nightly") else ("nightly",)
    items[:] = [
        item
        for item in items
        if all(mark.args[0] <= GPUS for mark in item.iter_markers("gpus"))
        and not any(map(item.get_closest_marker, names))
    ]
    gc.freeze()  # or each collection, those at the end too, goes through all of pytest's items


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    from support.devices import GPUS

    long = "" if config.getoption("nightly") else ", nor those that take long: --nightly has them"
    terminalreporter.write_line(f"not run: tests that need more than {GPUS} GPUs{long}")


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Hide from the collector what earlier modules have left, which lives as long as the process.

    A collection takes half a second else, and convert's look at all objects a tenth.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Compiles of one test must not count toward another's recompile limit."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New memory of tensors is NaN: what a kernel leaves out shows."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def few_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tensors of tests are small: threads would wait for each other more than they work.

    test_determinism.py compares thread counts; `.ci/sanitize thread` looks for races of two.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(request.config.getoption("threads"))
    yield
    torch.set_num_threads(threads)
