# SPDX-License-Identifier: Apache-2.0
"""An all-to-all of rows whose sizes stay on the device.

On GPUs torch's symmetric memory does it, by NVSHMEM: a process reads the rows that are for it from
the memory of the others. On CPUs the sizes are numbers that the host has.

D processes of a group, N rows that may be sent, S rows that may come.
"""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory, distributed_c10d

from grouped_linear.meta_kernels.rules import ceil_div

_symm_mem: Any = _symmetric_memory
_resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
# A row's bytes are a multiple of this: torch divides what a process reads from another one into up
# to so many equal parts.
_ROW_BYTES = 64


class _Buffers:
    """Symmetric memory of one group; every process allocates the same.

    CUDA graphs know addresses, so memory that became too small is kept beside what replaced it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.tensors: dict[str, Tensor] = {}
        self.replaced: list[Tensor] = []
        if _symm_mem.get_backend(device) != "NVSHMEM":
            _symm_mem.set_backend("NVSHMEM")
        self.splits = self._new(group.size())
        self.came = self._new(2, self.splits.numel())
        self.no_splits, self.nothing_came = (self._new(*t.shape) for t in (self.splits, self.came))
        self.no_splits.zero_()
        self.no_row = self._new(_ROW_BYTES // 8)

    def _new(self, *shape: int) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "all_to_all_v: symmetric memory cannot be allocated while a CUDA graph is "
                "captured: run the layer with as many tokens before"
            )
        made: Tensor = _symm_mem.empty(*shape, dtype=torch.int64, device=self.device)
        _symm_mem.rendezvous(made, group=self.group.group_name)
        return made

    def rows(self, name: str, count: int, row_bytes: int) -> Tensor:
        """[count, row_bytes / 8] int64, of any content."""
        size = count * row_bytes // 8
        if name not in self.tensors or self.tensors[name].numel() < size:
            if name in self.tensors:
                self.replaced.append(self.tensors[name])
            self.tensors[name] = self._new(max(size, 1))
        return self.tensors[name][:size].view(count, -1)


# The key is the group: names repeat after destroy_process_group. Memory of a group that was
# destroyed is kept, because processes would have to free it together.
_buffers = cache(_Buffers)


@torch.library.custom_op("grouped_linear_parallel::all_to_all_v", mutates_args=())
def all_to_all_v(rows: Tensor, splits: Tensor, max_rows: int, group: str) -> Tensor:
    """Send the first splits[0] rows to process 0, the next splits[1] to process 1, and so on.

    rows is [N, I] of any dtype, splits [D] int64 on the device, whose sum is at most N. The
    result [max_rows, I] has the rows from process 0, from process 1, ...; then zeros. All processes
    of the group, given by its name, call it with the same sizes.
    """
    raise NotImplementedError(f"all_to_all_v: not for {rows.device.type}")


@all_to_all_v.register_fake
def _(rows: Tensor, splits: Tensor, max_rows: int, group: str) -> Tensor:
    return rows.new_empty((max_rows, rows.size(1)))


@all_to_all_v.register_kernel("cpu")
def _(rows: Tensor, splits: Tensor, max_rows: int, group: str) -> Tensor:
    processes = _resolve(group)
    came = torch.empty_like(splits)
    dist.all_to_all_single(came, splits, group=processes)
    sent, received = splits.tolist(), came.tolist()
    out = rows.new_zeros((max_rows, rows.size(1)))
    to, of = (t.contiguous().view(torch.uint8) for t in (out, rows))
    dist.all_to_all_single(to[: sum(received)], of[: sum(sent)], received, sent, group=processes)
    return out


@all_to_all_v.register_kernel("cuda")
def _(rows: Tensor, splits: Tensor, max_rows: int, group: str) -> Tensor:
    if not (len(rows) and max_rows):  # on every process
        return rows.new_zeros((max_rows, rows.size(1)))
    words = _as_words(rows)
    row_bytes = ceil_div(words.size(1) * words.element_size(), _ROW_BYTES) * _ROW_BYTES
    buffers = _buffers(_resolve(group), rows.device)
    send = buffers.rows("send", len(rows), row_bytes)
    receive = buffers.rows("receive", max_rows, row_bytes)
    send.view(words.dtype)[:, : words.size(1)].copy_(words)
    buffers.splits.copy_(splits)
    exchange = torch.ops.symm_mem.all_to_all_vdev
    exchange(send, receive, buffers.splits, buffers.came, group)
    came = torch.arange(max_rows, device=rows.device) < buffers.came[0].sum()
    received = receive.view(words.dtype)[:, : words.size(1)]
    out = torch.where(came[:, None], received, 0)
    # An exchange starts when every process has called it. So one of no rows ends when all have read
    # their rows, and the next exchange may write this memory.
    exchange(buffers.no_row, buffers.no_row, buffers.no_splits, buffers.nothing_came, group)
    return out.view(rows.dtype)


def _as_words(rows: Tensor) -> Tensor:
    """The same bytes [N, ...] in the widest integers: copies move one at a time."""
    rows = rows.contiguous()
    row_bytes = rows.size(1) * rows.element_size()
    for dtype in (torch.int64, torch.int32, torch.int16):
        if row_bytes % dtype.itemsize == 0:
            return rows.view(dtype)
    return rows.view(torch.uint8)
