# SPDX-License-Identifier: Apache-2.0
"""A language model on one GPU, and on several: time of a step, memory, losses.

    torchrun --nproc-per-node 2 -m benchmarks.parallel_training --write
    torchrun --nproc-per-node 4 -m benchmarks.parallel_training --cases qwen3 --write

A step is forward, backward and AdamW(fused), with parameters in float32 and products in BF16 or
FP8; FSDP2 gathers bf16 and reduces float32. Steps are eager, or have each block compiled. Each GPU
has as many tokens as one GPU alone (weak scaling). Efficiency is the time of one GPU alone, eager
or compiled as the way is, over the way's: its tokens a second and GPU, beside one GPU's. It can be
above 1, since GPUs share the optimizer's work. FSDP2 shards everything, with plain weights or
with FP8 beside them, which it then gathers; or experts are spread over all GPUs, and FSDP2 shards
the rest. Ways take turns; a sample is the longest time of any process. The loss is that of the last
step, the mean of processes: ways over several GPUs learn from the same tokens and should agree; one
GPU learns from its own.
"""

import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import parallel_run, timing
from benchmarks.moe_model import VOCABULARY, LanguageModel, ModelSize
from benchmarks.parallel_model import PREDICTED, WAYS
from benchmarks.parallel_run import RECIPES, time_in_turns
from grouped_linear import GroupedMLP
from grouped_linear.parallel import ExpertParallel


@dataclass(frozen=True)
class Case:
    """A model, and how many sequences a GPU has."""

    size: ModelSize
    sequences: int


SMALL = ModelSize(
    layers=4, width=2048, heads=16, context=2048, experts=32, chosen=4, expert_width=768
)
CASES = {
    "small": Case(SMALL, sequences=4),
    "long": Case(replace(SMALL, context=4096), sequences=4),
    # Experts as in Qwen3-30B. More layers than two are more than one GPU's memory.
    "qwen3": Case(replace(SMALL, layers=2, context=4096, experts=128, chosen=8), sequences=4),
    "tiny": Case(
        ModelSize(layers=2, width=32, heads=2, context=8, experts=4, chosen=2, expert_width=16),
        sequences=4,
    ),
}
BOTH = ', weights="both"'
COMPILED = ", compiled"
WARM = 3
HOW = (
    "A language model on one GPU and on several (`benchmarks/parallel_training.py`). Held: "
    "parameters, optimizer, tokens. Peak: the most during a step, these included. Gathered: what "
    "a process sends to all-gathers of a step, as FSDP2's of its shards."
)


@dataclass
class Row:
    """One way's results; milliseconds, MiB."""

    case: str
    recipe: str
    way: str
    gpus: int
    tokens: int
    ms: float
    spread: float
    efficiency: float
    held: float
    peak: float
    gathered: float
    loss: float


class AllGathers(TorchDispatchMode):
    """Counts the bytes that this process sends to all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.c10d._allgather_base_.default:
            self.sent += args[1].nbytes
        return func(*args, **(kwargs or {}))


class Training:
    """A model, its optimizer and the tokens of this process."""

    def __init__(self, case: Case, recipe: str, way: str, mesh: DeviceMesh) -> None:
        kind = mesh.device_type
        self.device = torch.device(kind, torch.cuda.current_device() if kind == "cuda" else None)
        gc.collect()  # of what was measured before, which would count as held
        before = allocated(self.device)
        torch.manual_seed(0)
        with self.device:
            self.model = LanguageModel(
                case.size,
                lambda size: experts(size, recipe, "both" if BOTH in way else None),
                dtype=torch.bfloat16,
            )
        if way.endswith(COMPILED):
            for i, block in enumerate(self.model.blocks):
                # Not Module.compile, which would compile FSDP2's hooks.
                self.model.blocks[i] = cast(nn.Module, torch.compile(block, fullgraph=True))
        if (how := WAYS.get(way.removesuffix(COMPILED))) is not None:
            spread(self.model, mesh, **how)
        elif way.startswith("FSDP2"):
            shard(self.model, mesh, set())
        of_experts = experts_of(self.model)
        rest = [p for p in self.model.parameters() if p not in of_experts]
        # Two groups: DTensors of two meshes cannot be updated in one call.
        self.optimizer = torch.optim.AdamW(
            [{"params": rest}, {"params": list(of_experts)}], 1e-4, fused=True
        )
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        shape = case.sequences, case.size.context + 1
        self.bytes = torch.randint(VOCABULARY, shape, generator=generator).to(self.device)
        self.loss = torch.zeros((), device=self.device)
        for _ in range(WARM):
            self.step()
        self.held = allocated(self.device) - before
        self.peak = self._peak()
        with torch.compiler.set_stance("force_eager"), AllGathers() as gathers:
            self.step()
        self.gathered = gathers.sent / (1 << 20)

    def step(self) -> None:
        """Forward, backward, update."""
        loss, _ = self.model(self.bytes)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = loss.detach()

    def _peak(self) -> float:
        if self.device.type == "cpu":
            return 0.0
        before = allocated(self.device)
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / (1 << 20) - before + self.held


def allocated(device: torch.device) -> float:
    return torch.cuda.memory_allocated() / (1 << 20) if device.type == "cuda" else 0.0


def experts(size: ModelSize, recipe: str, weights: Any) -> GroupedMLP:
    sizes = size.experts, size.width, size.expert_width
    return GroupedMLP(*sizes, recipe=RECIPES[recipe], weights=weights)


def ways_of(recipe: str) -> tuple[str, ...]:
    alone_and_sharded = "one GPU", "FSDP2"
    kept = tuple(way + BOTH for way in alone_and_sharded) if RECIPES[recipe] is not None else ()
    eager = *alone_and_sharded, *kept
    return *eager, *(way + COMPILED for way in (*eager, "all_gather")), *PREDICTED


def alone(way: str) -> str:
    """The way of one GPU with which another is compared."""
    return "one GPU" + (COMPILED if way.endswith(COMPILED) else "")


def experts_of(model: nn.Module) -> set[Tensor]:
    found = (m for m in model.modules() if isinstance(m, GroupedMLP))
    return {p for mlp in found for p in mlp.parameters()}


def spread(model: Any, mesh: DeviceMesh, **how: Any) -> None:
    """As docs/several_gpus.md has it: experts over all processes, FSDP2 of everything else.

    On the meta device `average` is left to the caller: `to_empty` loses hooks of DTensors.
    """
    for mlp in [m for m in model.modules() if isinstance(m, GroupedMLP)]:
        parallelize_module(mlp, mesh, ExpertParallel(**how))
    shard(model, mesh, experts_of(model))
    if not any(p.is_meta for p in experts_of(model)):
        average(model, mesh)


def average(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let experts' gradients be means of all processes, too."""
    for p in experts_of(model):
        p.register_hook(lambda grad: grad / mesh.size())


def shard(model: Any, mesh: DeviceMesh, ignored: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        sharded: Any = fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=ignored)
        if mesh.device_type == "cpu":  # gloo cannot divide while it sums
            sharded.set_force_sum_reduction_for_comms(True)


def measure(
    ways: Sequence[str] | None, name: str, recipe: str, mesh: DeviceMesh, rounds: int
) -> list[Row]:
    """Ways of one case and recipe, and one GPU beside them; all where None."""
    case, D, every = CASES[name], mesh.size(), ways_of(recipe)
    wanted = every if ways is None else {*ways, *map(alone, ways)}
    chosen = [way for way in every if way in wanted]
    trainings = {way: Training(case, recipe, way, mesh) for way in chosen}
    device = next(iter(trainings.values())).device
    times = time_in_turns({way: t.step for way, t in trainings.items()}, device, rounds)
    rows = []
    for way, training in trainings.items():
        loss = training.loss.clone()
        dist.all_reduce(loss)
        ms = statistics.median(times[way])
        rows.append(
            Row(
                name,
                recipe,
                way,
                1 if way.startswith("one GPU") else D,
                case.sequences * case.size.context,
                ms,
                (max(times[way]) - min(times[way])) / ms,
                statistics.median(times[alone(way)]) / ms,
                training.held,
                training.peak,
                training.gathered,
                float(loss) / D,
            )
        )
    return rows


def table(rows: list[Row]) -> str:
    head = ["model", "recipe", "way", "GPUs", "tokens a GPU", "ms", "range"]
    head += ["tokens/s a GPU", "efficiency"]
    cells = [[*head, "held, MiB", "peak, MiB", "gathered, MiB", "loss"]]
    for r in rows:
        rate = f"{1e3 * r.tokens / r.ms:,.0f}"
        times = f"{r.ms:.2f}", f"{r.spread:.0%}", rate, f"{r.efficiency:.2f}"
        memory = f"{r.held:.0f}", f"{r.peak:.0f}", f"{r.gathered:.0f}"
        cells.append(
            [r.case, r.recipe, r.way, str(r.gpus), str(r.tokens), *times, *memory, f"{r.loss:.4f}"]
        )
    return timing.markdown(cells)


def main() -> None:
    parser = parallel_run.arguments(__doc__, "cases", CASES, ["small"])
    parser.add_argument("--ways", nargs="+", choices=ways_of("block"), help="default: all")
    options = parser.parse_args()
    of_ways = partial(measure, options.ways)
    parallel_run.run("parallel_training", HOW, options, options.cases, of_ways, table)


if __name__ == "__main__":
    main()
