# SPDX-License-Identifier: Apache-2.0
"""The demo: a mixture-of-experts language model learns Python from the standard library's source.

It trains the same model on the same bytes with torch's grouped_mm in BF16 and with ours in BF16 and
in FP8, eager and compiled (on a GPU also with CUDA graphs). Then it prints one table, a plot of the
losses, a line that the model wrote and how long all of it took::

    python -m benchmarks.demo
    python -m benchmarks.demo --recipe block current delayed mxfp8
    python -m benchmarks.demo --gate-up-in-fp8
    python -m benchmarks.demo --micro-batches 4
    python -m benchmarks.demo --modes compiled --steps 3000
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from torch import Tensor
from torch._dynamo.utils import counters
from tqdm import tqdm  # type: ignore[import-untyped]

from benchmarks import timing
from benchmarks.alternatives import TorchGroupedLinear
from benchmarks.moe_model import (
    VOCABULARY,
    Experts,
    LanguageModel,
    ModelSize,
    give_gradients_memory,
)
from benchmarks.python_source import of_the_library
from grouped_linear import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    GroupedLinear,
    GroupedMLP,
    MXFP8BlockScaling,
    Recipe,
    update_scales,
)

# With --gate-up-in-fp8, experts compute in BF16 and save SwiGLU's input in FP8 for the backward.
GATE_UP_IN_FP8 = "gate_up"
TORCH = "torch"  # experts compute with torch's grouped_mm
# Each is trained beside BF16. Colours of Okabe and Ito, told apart by all kinds of eyes.
RECIPES: dict[str, Recipe | None] = {
    "block": Float8BlockScaling(),
    "own": Float8BlockScaling(share_x_scales=False),
    "bf16_wgrad": Float8BlockScaling(wgrad=torch.bfloat16),
    GATE_UP_IN_FP8: None,
    TORCH: None,
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(),
    "mxfp8": MXFP8BlockScaling(),
}
NAMES = {"block": "FP8", "current": "FP8 current", "delayed": "FP8 delayed", "mxfp8": "MXFP8"}
NAMES |= {"own": "FP8 own scales", "bf16_wgrad": "FP8, BF16 wgrad"}
NAMES |= {GATE_UP_IN_FP8: "gate_up saved in FP8"}
COLOURS = {"block": "#D55E00", "current": "#009E73", "delayed": "#CC79A7", "mxfp8": "#E69F00"}
COLOURS |= {"own": "#999999", "bf16_wgrad": "#56B4E9"}
COLOURS |= {GATE_UP_IN_FP8: "#F0E442", TORCH: "#000000"}
# torch.compile's mode. CUDA graphs need a GPU.
MODES = {"eager": None, "compiled": "default", "compiled + graphs": "reduce-overhead"}
WARM_UP = 3  # steps in which torch.compile compiles, and records CUDA graphs


@dataclass(frozen=True)
class Scale:
    """How large a run is: the model, B sequences a step, steps, and bytes of text to learn from.

    With `micro_batches` a step's sequences go through the model in as many parts, and gradients add
    up.
    """

    size: ModelSize
    batch: int
    steps: int
    learning_rate: float
    text_bytes: int
    micro_batches: int = 1


# 2 cores: 60 to 80 ms a step, six runs of about 20 s, the compiled ones up to 20 s more. With two
# thirds of the steps or twice the rate, runs differ by 2 % stochastically: more than FP8 changes.
CPU = Scale(
    ModelSize(layers=2, width=128, heads=4, context=128, experts=8, chosen=2, expert_width=128),
    batch=16,
    steps=300,
    learning_rate=1.5e-3,
    text_bytes=4_000_000,
)
# One H200: 60 to 95 ms a step, nine runs of some 12 s, 31 GB. 1.7e9 parameters, few of them active.
HOPPER = Scale(
    ModelSize(
        layers=4, width=2048, heads=16, context=1024, experts=64, chosen=4, expert_width=1024
    ),
    batch=16,
    steps=150,
    learning_rate=1.5e-4,
    text_bytes=20_000_000,
)


@dataclass
class Run:
    """One training run: what was asked for and what came out."""

    kind: str | None
    """A name in RECIPES; None for products in `dtype`."""
    dtype: torch.dtype
    mode: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation_loss: float = math.nan
    recompiles: int = 0
    graph_breaks: int = 0
    graph_launches: int = 0

    @property
    def recipe(self) -> Recipe:
        return None if self.kind is None else RECIPES[self.kind]

    @property
    def precision(self) -> str:
        name = {torch.bfloat16: "BF16", torch.float32: "FP32"}[self.dtype]
        return {None: name, TORCH: f"torch {name}"}.get(self.kind) or NAMES[self.kind or ""]

    @property
    def name(self) -> str:
        return f"{self.precision} {self.mode}"

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.seconds[WARM_UP:])

    @property
    def compile_seconds(self) -> float:
        return sum(self.seconds[:WARM_UP]) - WARM_UP * self.step_seconds

    @property
    def final_loss(self) -> float:
        return statistics.mean(self.losses[-10:])


class Text:
    """The first files as bytes: every tenth is held out for validation."""

    def __init__(self, files: Sequence[Path], limit: int) -> None:
        training, held_out = bytearray(), bytearray()
        for i, path in enumerate(files):
            (held_out if i % 10 == 9 else training).extend(path.read_bytes())
            if len(training) >= limit:
                break
        if len(training) < 1_000_000:
            sys.exit(f"demo: {len(files)} files have only {len(training)} bytes of Python source")
        self.training = torch.frombuffer(training, dtype=torch.uint8)
        self.held_out = torch.frombuffer(held_out, dtype=torch.uint8)

    def random_batch(self, B: int, S: int, generator: torch.Generator) -> Tensor:
        """Random stretches of the training text: [B, S + 1] int64."""
        start_B = torch.randint(len(self.training) - S, (B,), generator=generator)
        return self.training[start_B[:, None] + torch.arange(S + 1)].long()

    def held_out_batches(self, B: int, S: int, count: int) -> list[Tensor]:
        """Stretches spread evenly over the held-out text: `count` batches of [B, S + 1] int64."""
        start = torch.linspace(0, len(self.held_out) - S - 1, B * count).long()
        return list(self.held_out[start[:, None] + torch.arange(S + 1)].long().split(B))


def experts_with_gate_up_in_fp8(size: ModelSize) -> GroupedMLP:
    """The experts of a block; their first parameters are those of two layers, on a GPU, too."""
    E, H, F = size.experts, size.width, size.expert_width
    mlp = GroupedMLP(E, H, F, save_gate_up_in_fp8=True, device="meta")
    mlp.to_empty(device=torch.get_default_device())
    for weight_ENK in (mlp.gate_up_proj, mlp.down_proj):
        bound = 1 / math.sqrt(weight_ENK.size(2))
        for weight_NK in weight_ENK:  # one expert at a time, as GroupedLinear draws
            torch.nn.init.uniform_(weight_NK, -bound, bound)
    return mlp


class TorchLinear(TorchGroupedLinear):
    """Plain torch, which has no weight to quantize in the first micro-batch."""

    def forward(self, x_TK: Tensor, m_splits_E: Tensor, *first: Tensor | bool) -> Tensor:
        return super().forward(x_TK, m_splits_E)


def train(run: Run, scale: Scale, text: Text, device: torch.device, seed: int) -> LanguageModel:
    """Train one model, filling in `run`. The seed decides its parameters and what it reads."""
    torch.manual_seed(seed)
    order = torch.Generator().manual_seed(seed)
    S, parts = scale.size.context, scale.micro_batches
    with device:
        linear: Callable[..., torch.nn.Module] = TorchLinear
        if run.kind != TORCH:
            linear = partial(GroupedLinear, bias=False, recipe=run.recipe)
        if run.kind != TORCH and parts > 1:  # quantize weights once; wgrad adds to main_grad
            linear = partial(linear, cache_weights=True, fuse_wgrad_accumulation=True)
        experts: Callable[[ModelSize], torch.nn.Module] = partial(Experts, linear=linear)
        if run.kind == GATE_UP_IN_FP8:
            experts = experts_with_gate_up_in_fp8
        model = LanguageModel(scale.size, experts, run.dtype)
    if parts > 1:
        give_gradients_memory(model)
    flags = [(torch.tensor(i == 0, device=device),) if parts > 1 else () for i in range(parts)]
    mode = MODES[run.mode]
    forward = torch.compile(model, fullgraph=True, mode=mode) if mode else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=scale.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / 10, 0.5 + 0.5 * math.cos(math.pi * step / scale.steps)),
    )

    def step() -> float:
        total = torch.zeros((), device=device)
        batch = text.random_batch(scale.batch, S, order).to(device)
        for part, first in zip(batch.chunk(parts), flags, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            objective, loss = forward(part, *first)
            (objective / parts).backward()
            total += loss / parts
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=parts == 1)
        update_scales(model)  # of delayed scaling: nothing to do for the others
        return float(total)  # waits for the device, so a step's time is all of it

    torch._dynamo.reset()
    counters.clear()
    # In a log every refresh is a line.
    refresh_seconds = 0.2 if sys.stdout.isatty() else 10
    first = f"{run.name}: compiling ..." if mode else run.name
    bar = tqdm(range(scale.steps), desc=first, file=sys.stdout, mininterval=refresh_seconds)
    for i in bar:
        if i == WARM_UP:
            bar.set_description(run.name)
        start = time.perf_counter()
        run.losses.append(step())
        schedule.step()
        run.seconds.append(time.perf_counter() - start)
        bar.set_postfix(loss=f"{run.losses[-1]:.3f}", refresh=False)
    run.recompiles = max(0, counters["stats"]["unique_graphs"] - 1)
    run.graph_breaks = sum(counters["graph_break"].values())
    with torch.no_grad():
        held_out = text.held_out_batches(scale.batch, S, count=16)
        run.validation_loss = statistics.mean(model(part.to(device))[1].item() for part in held_out)
    if device.type == "cuda":
        run.graph_launches = count_graph_launches(step)
    return model


def count_graph_launches(step: Callable[[], float]) -> int:
    """CUDA graphs launched in one more step."""
    with torch.profiler.profile(acc_events=True) as profile:
        step()
    return sum(event.name == "cudaGraphLaunch" for event in profile.events())


def activation_dtype(device: torch.device) -> torch.dtype:
    """BF16, but float32 on a CPU without wide vectors: its BF16 products are eight times slower."""
    narrow = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT")
    return torch.float32 if narrow else torch.bfloat16


def unusable(device: torch.device, recipes: list[Recipe]) -> str:
    """Why the layer cannot train on a GPU, or nothing where it can."""
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"{name} has compute capability {capability[0]}.{capability[1]}, less than 8.0"
    try:
        for recipe in recipes:
            layer = GroupedLinear(2, 128, 128, recipe=recipe, device=device, dtype=torch.bfloat16)
            x = torch.ones(8, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
            layer(x, torch.tensor([3, 5], device=device)).sum().backward()
    except RuntimeError as error:
        return f"{name}: {error}"
    return ""


def choose_device(asked: str, recipes: list[Recipe]) -> torch.device:
    """The GPU where the ops run on it, else the CPU, with a line that says which and why."""
    cuda = torch.device("cuda")
    if asked == "cpu":
        reason = "as asked"
    elif not torch.cuda.is_available():
        reason = "no GPU found"
    else:
        reason = unusable(cuda, recipes)
        if not reason:
            print(f"device: {torch.cuda.get_device_name(cuda)}")
            return cuda
    if asked == "cuda":
        sys.exit(f"demo: --device cuda: {reason}")
    print(f"device: CPU, {torch.get_num_threads()} threads: {reason}")
    return torch.device("cpu")


def pairs(runs: list[Run]) -> list[tuple[Run, Run]]:
    """Each run under a recipe with the run of the same mode without."""
    others = {run.mode: run for run in runs if run.kind is None}
    return [(run, others[run.mode]) for run in runs if run.kind is not None]


def plot(runs: list[Run], path: Path) -> None:
    """Draw the training losses and, below, how far the others' are from ours in BF16."""
    mpl.use("Agg")
    styles = dict(zip(MODES, ("-", "--", ":"), strict=True))
    # Modes compute the same, so lines coincide: marks at steps of its own tell each run apart.
    steps = len(runs[0].losses)
    every = max(len(runs), steps // 10)
    markers = dict(zip(MODES, ("o", "^", "s"), strict=True))
    marks = [
        {"marker": markers[run.mode], "markevery": (i * every // len(runs), every), "markersize": 6}
        for i, run in enumerate(runs)
    ]
    figure, (top, bottom) = plt.subplots(
        2, sharex=True, figsize=(8, 6), height_ratios=(3, 1), layout="constrained"
    )
    for run, mark in zip(runs, marks, strict=True):
        # Sky blue, under the others; its marks are larger and white inside.
        broad = {"color": "#56B4E9", "linewidth": 4.0, "markerfacecolor": "white"}
        look = broad if run.kind is None else {"color": COLOURS[run.kind]}
        label = f"{run.name} (held-out files: {run.validation_loss:.3f})"
        top.plot(run.losses, linestyle=styles[run.mode], label=label, **mark, **look)
    for fp8, other in pairs(runs):
        bottom.set_ylabel(f"above\n{other.precision}, %")
        percent = [100 * (a / b - 1) for a, b in zip(fp8.losses, other.losses, strict=True)]
        colour = COLOURS[fp8.kind or ""]
        look = {"color": colour, "linewidth": 1}
        bottom.plot(percent, linestyle=styles[fp8.mode], **marks[runs.index(fp8)], **look)
    guess = math.log(VOCABULARY)
    top.axhline(guess, color="0.5", linewidth=1)
    top.text(steps / 2, guess, "a blind guess", ha="center", va="bottom")
    top.set(
        title="A mixture-of-experts language model learns Python",
        ylabel="cross-entropy, nats a byte",
        ylim=(0, 1.1 * guess),
    )
    bottom.set_xlabel("training step")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    # In the corner that a falling loss leaves free. Its line styles hold for the lower plot, too.
    top.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.9))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def print_table(runs: list[Run], scale: Scale, device: torch.device) -> None:
    """Print one row a run. Step times are medians without the first steps, which compile."""
    tokens = scale.batch * scale.size.context
    titles = ["run", "step ms", "tokens/s", "first loss", "final loss", "held out"]
    others = {run.name: other for run, other in pairs(runs)}
    titles += [f"final above {runs[0].precision}"]
    titles += ["compile s", "recompiles", "graph breaks", "cudaGraphLaunch a step"]
    rows = [titles]
    for run in runs:
        row = [run.name, f"{run.step_seconds * 1e3:.1f}", f"{tokens / run.step_seconds:,.0f}"]
        row += [f"{x:.3f}" for x in (run.losses[0], run.final_loss, run.validation_loss)]
        other = others.get(run.name)
        row += [f"{100 * (run.final_loss / other.final_loss - 1):+.2f} %" if other else ""]
        compilation = [f"{run.compile_seconds:.1f}", str(run.recompiles), str(run.graph_breaks)]
        row += compilation if MODES[run.mode] else [""] * len(compilation)
        rows.append([*row, str(run.graph_launches)])
    if device.type == "cpu":
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for name, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        print(name.ljust(widths[0]), *numbers, sep="  ")
    print()


def write_losses(runs: list[Run], device: torch.device) -> Path:
    """The rows of which benchmarks.front_page takes the losses."""
    path = timing.RESULTS / f"demo_{timing.slug(device)}.csv"
    lines = ["run,steps,step_ms,held_out,commit"]
    for run in runs:
        cells = [run.name, str(len(run.losses)), f"{run.step_seconds * 1e3:.1f}"]
        lines.append(",".join([*cells, f"{run.validation_loss:.3f}", timing.git_commit()]))
    path.write_text("\n".join(lines) + "\n")
    return path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo", description=(__doc__ or "").split("\n\n")[0]
    )
    option = parser.add_argument
    option("--steps", type=int, help=f"of each run (CPU: {CPU.steps}, GPU: {HOPPER.steps})")
    option(
        "--recipe",
        nargs="+",
        choices=[kind for kind in RECIPES if kind not in (GATE_UP_IN_FP8, TORCH)],
        default=["block"],
        help="of the runs beside torch's and ours in BF16 (default: block, FP8 in blocks of 128)",
    )
    option(
        "--gate-up-in-fp8",
        action="store_true",
        help="also train in BF16 with the input of SwiGLU kept in FP8 for the backward",
    )
    option("--modes", nargs="+", choices=tuple(MODES), default=list(MODES), help="default: all")
    option(
        "--micro-batches",
        type=int,
        default=1,
        metavar="N",
        help="parts of a step: weights are quantized in the first, gradients add up in main_grad",
    )
    option(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto, the default: a GPU if the ops run on it, else the CPU",
    )
    option("--output-dir", type=Path, default=Path("demo"), help="for loss.png (default: demo)")
    option("--write", action="store_true", help="losses to benchmarks/results/")
    option("--seed", type=int, default=0, help="of parameters and text order (default: 0)")
    arguments = parser.parse_args()
    if arguments.steps is not None and arguments.steps <= WARM_UP:
        parser.error(f"--steps must be more than {WARM_UP}, got {arguments.steps}")
    parts = arguments.micro_batches
    if arguments.gate_up_in_fp8 and parts > 1:
        parser.error("--gate-up-in-fp8 goes without --micro-batches")
    if parts < 1 or any(scale.batch % parts for scale in (CPU, HOPPER)):
        parser.error(
            f"--micro-batches must divide the {CPU.batch} sequences of a step, got {parts}"
        )
    return arguments


def main() -> None:
    start = time.perf_counter()
    arguments = parse_arguments()
    kinds = [None, TORCH, *arguments.recipe]
    if arguments.gate_up_in_fp8:
        kinds.append(GATE_UP_IN_FP8)
    device = choose_device(arguments.device, [kind and RECIPES[kind] for kind in kinds])
    scale = HOPPER if device.type == "cuda" else CPU
    scale = replace(scale, micro_batches=arguments.micro_batches)
    if arguments.steps is not None:
        scale = replace(scale, steps=arguments.steps)
    text = Text(of_the_library(), scale.text_bytes)
    dtype = activation_dtype(device)
    runs = [
        Run(kind, dtype, mode)
        for mode in arguments.modes
        for kind in kinds
        if device.type == "cuda" or MODES[mode] != "reduce-overhead"
    ]
    line = b""
    for run in runs:
        model = train(run, scale, text, device, arguments.seed)
        if run is runs[-1]:
            line = model.generate(b"def ", 60, arguments.seed)

    print_table(runs, scale, device)
    for fp8, other in pairs(runs):
        ratio = fp8.validation_loss / other.validation_loss
        print(f"held-out loss of {fp8.name} / {other.name}: {ratio:.4f}")
    plot(runs, arguments.output_dir / "loss.png")
    print(f"loss curves: {arguments.output_dir / 'loss.png'}")
    if arguments.write:
        print(f"losses: {write_losses(runs, device)}")
    # Escaped as in a Python literal: an early model writes control bytes, too.
    escaped = line.rstrip().decode("latin-1").encode("unicode_escape").decode()
    print(f"{runs[-1].name} writes: {escaped}")
    minutes, seconds = divmod(round(time.perf_counter() - start), 60)
    print(f"all of it took {minutes} min {seconds} s")
    for run in runs:
        if not run.final_loss < run.losses[0]:  # NaN compares false
            sys.exit(f"demo: {run.name}: the loss went from {run.losses[0]} to {run.final_loss}")


if __name__ == "__main__":
    main()
