# SPDX-License-Identifier: Apache-2.0
"""Two processes of one group, for what layers do beside others: on the CPU, or on two GPUs.

Starting a pair takes longer than most checks do, so that one pair runs every check of a module that
is wanted in this run of pytest (`-k`). A test reports one check::

    CHECKS: Checks = {"replicas": check_replicas, ...}

    test_two_processes, test_two_gpus = on_cpu(CHECKS), on_gpus(CHECKS)

A check makes its tensors on :func:`device`. A module that needs more processes has a number
PROCESSES of its own. A check that does not end fails after CHECK_SECONDS and says where it waited.
"""

import faulthandler
import fcntl
import gc
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from support.versions import FSDP_TAKES_BYTES

PROCESSES = 2
# Longer than gloo and NCCL wait for another process before they raise.
CHECK_SECONDS = 300
IMPORTED = [
    "grouped_linear",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.integrations.finegrained_fp8",  # where it is installed
    "transformers.models.mixtral.modeling_mixtral",
]
# Called with the rank and an empty directory that both processes share.
Checks = Mapping[str, Callable[[int, Path], None]]
_device: tuple[str, int] = "cpu", 0


# Fails the test with the tracebacks of a check that failed.
Passes = Callable[[str], None]


@pytest.fixture(scope="module")
def passes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Passes:
    """Called with the name of one of the module's CHECKS, which run on the CPU."""
    return _shared_run(request, tmp_path_factory, "gloo")


@pytest.fixture(scope="module")
def passes_on_gpus(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Passes:
    """The same on two GPUs."""
    return _shared_run(request, tmp_path_factory, "nccl")


def on_cpu(checks: Iterable[Any]) -> Callable[[str, Passes], None]:
    """A test of each check on the CPU."""

    @pytest.mark.parametrize("check", checks)
    def test(check: str, passes: Passes) -> None:
        passes(check)

    return test


def on_gpus(checks: Iterable[Any], count: int = PROCESSES) -> Callable[[str, Passes], None]:
    """The same on so many GPUs."""

    @pytest.mark.gpus(count)
    @pytest.mark.parametrize("check", checks)
    def test(check: str, passes_on_gpus: Passes) -> None:
        passes_on_gpus(check)

    return test


def device() -> torch.device:
    """Where a check of this process runs."""
    return torch.device("cpu") if _device[0] == "cpu" else torch.device(*_device)


def choose_device(rank: int, backend: str) -> None:
    """Give a process that was started here its device, and one thread."""
    global _device
    torch.set_num_threads(1)
    if backend == "nccl":
        _device = "cuda", rank
        torch.cuda.set_device(rank)


def synchronize() -> None:
    """Wait for this process's GPU, if it has one."""
    if _device[0] == "cuda":
        torch.cuda.synchronize()


def _shared_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, backend: str
) -> Passes:
    """The workers of pytest-xdist share one run: the first one does it while others wait."""
    temporary = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        temporary = temporary.parent
    directory = temporary / f"two_processes_{backend}_{request.module.__name__}"
    directory.mkdir(exist_ok=True)
    report = directory / "failures.json"
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not report.exists():
            processes = getattr(request.module, "PROCESSES", PROCESSES)
            wanted = _wanted(request)
            checks = {n: c for n, c in request.module.CHECKS.items() if n in wanted}
            found = _run(checks, directory, backend, processes)
            report.write_text(json.dumps(found))
    failures: dict[str, str] = json.loads(report.read_text())

    def passes(check: str) -> None:
        failure = failures.get(check, "")
        if not FSDP_TAKES_BYTES and "can require gradients" in failure:
            pytest.skip("FSDP2 of torch 2.11 has every parameter learn, and bytes cannot")
        if failure:
            pytest.fail(failure, pytrace=False)

    return passes


def _wanted(request: pytest.FixtureRequest) -> set[str]:
    """The checks that this module's tests ask for. All workers of pytest-xdist see the same."""
    return {
        item.callspec.params["check"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and request.fixturename in item.fixturenames
    }


def _run(checks: Checks, directory: Path, backend: str, processes: int) -> dict[str, str]:
    for name in checks:
        (directory / name).mkdir()
    ended, arguments = "", (checks, directory, backend, processes)
    with started(_process, arguments, backend, processes) as context:
        try:
            join(context, CHECK_SECONDS * (1 + len(checks)))
        except (TimeoutError, mp.ProcessExitedException) as error:
            ended = f"not run to its end: {error}"
    found: dict[str, str] = {}
    for name in checks:
        files = sorted((*directory.glob(f"{name}.rank*"), *directory.glob(f"{name}.waits*")))
        texts = [text for file in files if (text := file.read_text())]
        if len(list(directory.glob(f"{name}.end*"))) < processes:
            texts.append(ended)
        if texts:
            found[name] = "\n".join(texts)
    return found


@contextmanager
def started(
    function: Callable[..., None], arguments: tuple[Any, ...], backend: str, processes: int
) -> Iterator[mp.ProcessContext]:
    """Processes that call a function with their rank and these arguments.

    On the CPU copies of one process that has imported what all need, which takes each 8 seconds. No
    GPU is visible to them: once a process has asked for GPUs, its copies cannot use them.
    """
    multiprocessing.set_forkserver_preload(IMPORTED)
    is_on_cpu = backend == "gloo"
    method = "forkserver" if is_on_cpu else "spawn"
    with pytest.MonkeyPatch.context() as patch:
        if is_on_cpu:
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield mp.start_processes(function, arguments, processes, join=False, start_method=method)


@contextmanager
def one_process(backend: str = "gloo") -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def join(context: mp.ProcessContext, seconds: float) -> None:
    """Wait for processes that torch.multiprocessing started.

    Raises:
        TimeoutError: after `seconds`, once they were killed.
        mp.ProcessExitedException, mp.ProcessRaisedException: if one of them failed.
    """
    end = time.monotonic() + seconds
    while not context.join(max(0.0, end - time.monotonic())):
        if time.monotonic() >= end:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"the processes ran for more than {seconds:.0f} seconds")


def _process(rank: int, checks: Checks, directory: Path, backend: str, processes: int) -> None:
    """Each check has a process group of its own, so that a failed one leaves nothing behind.

    Where one process fails, its group closes: the other stops waiting for it and fails, too. A
    process that neither ends nor fails in time writes where it waits, and exits.
    """
    choose_device(rank, backend)
    for name, check in checks.items():
        with open(directory / f"{name}.waits{rank}", "w") as waits:
            faulthandler.dump_traceback_later(CHECK_SECONDS, exit=True, file=waits)
            torch.manual_seed(0)
            dist.init_process_group(
                backend,
                init_method=f"file://{directory / name}.rendezvous",
                rank=rank,
                world_size=processes,
                timeout=timedelta(minutes=2 if backend == "gloo" else 1),
            )
            try:
                check(rank, directory / name)
                synchronize()
                dist.barrier()  # nobody leaves while another still talks to it
            except Exception:
                failure = f"rank {rank}: {traceback.format_exc()}"
                (directory / f"{name}.rank{rank}").write_text(failure)
                gc.collect()  # what the failed check made may hold its group open
            dist.destroy_process_group()
            faulthandler.cancel_dump_traceback_later()
        (directory / f"{name}.end{rank}").touch()
        torch._dynamo.reset()
