"""Two processes of one group on the CPU, for what layers do beside others."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PROCESSES = 2


def in_two_processes(check: Callable[[int, Path], None], directory: Path) -> None:
    """Run ``check(rank, directory)`` in each; what one raises is raised here."""
    mp.spawn(_process, args=(check, directory), nprocs=PROCESSES)


def _process(rank: int, check: Callable[[int, Path], None], directory: Path) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{directory / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=PROCESSES)
    check(rank, directory)
    dist.barrier()  # nobody leaves while another still talks to it
    dist.destroy_process_group()
