# SPDX-License-Identifier: Apache-2.0
"""Experts over several GPUs, ours beside LigerCute's: forward, backward, memory.

    torchrun --nproc-per-node 2 -m benchmarks.parallel_peers --write

LigerCute has a row where it is installed (liger-kernel, "liger-cute-kernels[cu12]"): BF16, kernels
that fetch tokens through NVSHMEM while they compute, no capacity. All rows have the same weights,
tokens and routing and take turns, ours as CUDA graphs, LigerCute's as eager calls, for replays of
its graphs do not end; the slowest process counts. FP8 weights are kept as "both", so that no call
quantizes them. Backward is a step less a forward.

TFLOP/s are of one GPU: three GEMMs forward, six backward. LigerCute's own figures count eight, for
it computes gate and up again. Outside is what a row took of the GPU outside of torch's allocator,
buffers and code, which the peak does not have. Difference is the largest of y's and the gradients',
by their norms, from the first row.

NVSHMEM_DISABLE_NVLS=1 and NCCL_NVLS_ENABLE=0 forbid NVLink's multicast, which nothing here needs.
"""

import importlib
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks import parallel_run, timing
from benchmarks.parallel import Candidate, captured, warm
from benchmarks.parallel_model import MIB, SHAPES, WAYS, Shape
from benchmarks.parallel_run import RECIPES, time_in_turns
from grouped_linear import GroupedMLP
from grouped_linear.parallel import ExpertParallel

LIGER = "LigerCute"
OURS = "all_gather, no capacity", "all_gather"


@dataclass
class Row:
    """One candidate's results: milliseconds, TFLOP/s, MiB, percent."""

    shape: str
    recipe: str
    way: str
    forward: float
    backward: float
    forward_tflops: float
    backward_tflops: float
    peak: float
    outside: float
    difference: float


class LigerCute(nn.Module):
    """LigerCute's experts, with this process's part of a layer's weights."""

    recipe = None

    def __init__(self, layer: GroupedMLP, shape: Shape, mesh: DeviceMesh) -> None:
        super().__init__()
        liger: Any = importlib.import_module("liger_cute_kernels")
        size = shape.T, shape.H, shape.E, shape.C
        liger.configure(moe=liger.MoEConfig(*size, num_hosts=1, gpus_per_host=mesh.size()))
        self.fused: Any = importlib.import_module("liger_kernel.ops.cute.ops.moe").moe_fused
        whole = layer.gate_up_proj.detach(), layer.down_proj.detach()
        gate_up, down = (w.chunk(mesh.size())[dist.get_rank()] for w in whole)
        self.weights = nn.ParameterList(w.clone() for w in (*gate_up.chunk(2, dim=1), down))
        self.counts = shape.E, shape.C

    def forward(self, x: Tensor, weights: Tensor, index: Tensor, _: Any = None) -> Any:
        return self.fused(x, index.int(), weights.bfloat16(), *self.weights, *self.counts)


def experts(shape: Shape, recipe: str, way: str, mesh: DeviceMesh, device: torch.device) -> Any:
    """A layer whose experts are spread over the mesh."""
    torch.manual_seed(0)
    options: Any = {"recipe": RECIPES[recipe], "weights": RECIPES[recipe] and "both"}
    sizes = shape.E, shape.H, shape.F
    layer = GroupedMLP(*sizes, **options, dtype=torch.bfloat16, device=device)
    if way == LIGER:
        return LigerCute(layer, shape, mesh)
    return parallelize_module(layer, mesh, ExpertParallel(**WAYS[way]))


def forward(of: Candidate) -> Any:
    """y, as in a step. LigerCute's kernels are the same without gradients, and keep no buffers."""
    with torch.set_grad_enabled(not isinstance(of.layer, LigerCute)):
        return of.layer(of.x, of.weights, of.index, of.first).detach()


def results(of: Candidate) -> list[Tensor]:
    """y, and the gradients of x, the routing's weights, gate and up, down; of this process."""
    gradients = (g.to_local() if isinstance(g, DTensor) else g for g in of.step())
    dx, d_weights, *gate_up, d_down = gradients
    return [forward(of), dx, d_weights, torch.cat(gate_up, dim=1), d_down]


def measure(recipes: list[str], name: str, _: str, mesh: DeviceMesh, rounds: int) -> list[Row]:
    """All rows of one shape."""
    shape, on_gpu = SHAPES[name], mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    pool = torch.cuda.graph_pool_handle() if on_gpu else None
    keys = [(recipe, way) for recipe in recipes for way in OURS]
    keys += [("bf16", LIGER)] if find_spec("liger_cute_kernels") else []

    def left() -> float:
        """MiB of the GPU that are free or torch's allocator's."""
        return (torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()) / MIB if on_gpu else 0

    calls: dict[Any, Callable[[], Any]] = {}
    rest: list[tuple[float, ...]] = []
    first: list[Tensor] = []
    dist.barrier()  # NCCL's own memory is in no row
    for key in keys:
        before = left()
        one = Candidate(experts(shape, *key, mesh, device), shape, shape.T, device)
        memory = warm(one, device), before - left()
        found = results(one)
        first = first or found
        pairs = [(a.float(), b.float()) for a, b in zip(found, first, strict=True)]
        worst = torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max()
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        rest.append((*memory, 100 * float(worst)))
        for part, call in {"forward": partial(forward, one), "step": one.step}.items():
            calls[key, part] = call if key[1] == LIGER else captured(call, device, pool)
    times = {k: statistics.median(ms) for k, ms in time_in_turns(calls, device, rounds).items()}
    rows = []
    for i, key in enumerate(keys):
        ms = times[key, "forward"], times[key, "step"] - times[key, "forward"]
        speeds = (6 * n * shape.T * shape.C * shape.H * shape.F / 1e9 / ms[n - 1] for n in (1, 2))
        rows.append(Row(name, *key, *ms, *speeds, *rest[i]))
    return rows


def table(rows: list[Row]) -> str:
    numbers = [list(asdict(row).values()) for row in rows]
    digits = (3, 3, 0, 0, 0, 0, 2)
    cells = [[*r[:3], *(f"{x:.{n}f}" for x, n in zip(r[3:], digits, strict=True))] for r in numbers]
    return timing.markdown([list(Row.__annotations__), *cells])


def main() -> None:
    options = parallel_run.arguments(__doc__, "shapes", SHAPES, ["qwen3_30b"]).parse_args()
    recipes, options.recipes = options.recipes, [""]  # which take turns, too
    how = "Ours beside LigerCute (`benchmarks/parallel_peers.py` says what the columns are)."
    of_recipes = partial(measure, recipes)
    parallel_run.run("parallel_peers", how, options, options.shapes, of_recipes, table)
    if find_spec("liger_cute_kernels"):
        importlib.import_module("liger_cute_kernels.nvshmem").finalize()


if __name__ == "__main__":
    main()
