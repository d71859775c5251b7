# SPDX-License-Identifier: Apache-2.0
"""The process group in which rows travel."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# NCCL's group for exchanges by the group of a mesh: all layers of a mesh share it. Names alone
# repeat after destroy_process_group, which also ends the groups that were made here.
_made: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def exchange_group(mesh: DeviceMesh) -> str:
    """The name of a group of a mesh's processes whose collectives go before waiting GEMMs.

    NCCL's kernels and a persistent GEMM want the same SMs. On a stream of high priority NCCL's are
    the next to get them. That is a second communicator, of the mesh's processes alone. Groups that
    have such streams, and those of other backends, are taken as they are.
    """
    group = mesh.get_group()
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)  # not in torch for CPUs
    if mesh.device_type != "cuda" or nccl is None:
        return group.group_name
    backend: Any = group._get_backend(torch.device("cuda"))
    ranks = dist.get_process_group_ranks(group)
    # new_group sorts ranks, and so would give some processes another number.
    if not isinstance(backend, nccl) or ranks != sorted(ranks):
        return group.group_name
    if backend.options.is_high_priority_stream:
        return group.group_name
    if group not in _made:
        options = nccl.Options(is_high_priority_stream=True)
        options._timeout = timeout = backend.options._timeout
        world: Any = dist.group.WORLD
        if world.bound_device_id is None:
            made: Any = dist.new_group(
                ranks,
                timeout=timeout,
                backend="nccl",
                pg_options=options,
                use_local_synchronization=True,
            )
        else:  # new_group would split the communicator of all processes, which have to take part
            every = [list(range(len(ranks)))]
            made = dist.split_group(group, every, timeout=timeout, pg_options=options)
        _made[group] = made.group_name
    return _made[group]
