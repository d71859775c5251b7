# SPDX-License-Identifier: Apache-2.0
"""Does a language model learn in FP8 what it learns in BF16? Losses of many runs, paired.

    python -m benchmarks.convergence --seeds 5 --tokens 100e6
    python -m benchmarks.convergence --modes bf16 fp8 bf16_wgrad e5m2_grad_output --seeds 3
    python -m benchmarks.convergence --modes bf16 fp8 --seeds 1 --tokens 1e9
    python -m benchmarks.convergence --modes bf16 --seeds 1 --tokens 1e9 --together
    python -m benchmarks.convergence --modes fp8 fp8_restarted --seeds 1
    python -m benchmarks.convergence --modes bf16 qat fp8_then_qat --seeds 5
    python -m benchmarks.convergence --report          # the page and pictures of what is recorded

A model of Qwen3's form (transformers' Qwen3MoeForCausalLM) learns the Python source that is
installed, byte-level BPE tokens of it. A seed decides the initial weights and the order of batches,
so runs of one seed differ by the mode alone. Each GPU trains one run at a time; with `--together`
all train one, each a batch of each step. A finished run is appended to the CSV at once, and
recorded runs are not trained again: several calls add up.

Parameters are in float32 and products in BF16 by autocast, in every mode; `convert` has the experts
computed here. B sequences of S tokens.
"""

import argparse
import csv
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import convergence_report as report
from benchmarks import timing
from benchmarks.convergence_report import RESTARTED, Record
from benchmarks.python_source import Corpus, corpus
from grouped_linear import Float8BlockScaling, Format, Recipe, convert
from grouped_linear.contrib import fake_quantize

BALANCE_COEFFICIENT = 0.01  # of the load-balancing loss: Switch Transformer, arXiv:2101.03961
WARM_UP = 0.05  # of the steps; then a cosine to zero
EVERY = 10  # steps whose mean loss is a row
EVALUATIONS = 4  # spread over a run


def to_e5m2(t: Tensor, offs: Tensor | None, layouts: Any) -> Tensor:
    """Each 128 features of a row by a power of two to e5m2, and back."""
    block = t.unflatten(-1, (-1, 128)).float()
    amax = block.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    factor = torch.exp2(torch.floor(torch.log2(57344 / amax)))
    return ((block * factor).to(torch.float8_e5m2).float() / factor).to(t.dtype).flatten(-2)


FP8 = Float8BlockScaling()
QAT = Float8BlockScaling(qat="mxfp4")
LAST = 0.1  # the share of a run that `qat_last` learns in MXFP4
FAKE = fake_quantize(FP8)  # FP8's numbers, multiplied in BF16
ENDS: dict[str, Recipe | None] = {"model.layers.0.*": None, "model.layers.7.*": None}
# What convert is told. All others stand beside bf16.
MODES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"recipe": FP8},
    "both": {"recipe": FP8, "weights": "both"},
    "nudged": {},
    "again": {"recipe": FP8},
    "qat": {"recipe": QAT},
    "fp8_then_qat": {"recipe": FP8},
    "bf16_wgrad": {"recipe": Float8BlockScaling(wgrad=torch.bfloat16)},
    "bf16_ends": {"recipe": FP8, "recipes": ENDS},
    "bf16_input": {"recipe": fake_quantize(FP8, ("weight", "grad_output"))},
    "bf16_weight": {"recipe": fake_quantize(FP8, ("input", "grad_output"))},
    "bf16_grad_output": {"recipe": fake_quantize(FP8, ("input", "weight"))},
    "e5m2_grad_output": {"recipe": Recipe(FAKE.input, FAKE.weight, Format(quantize=to_e5m2))},
}
MODES |= {restarted: MODES[mode] for restarted, mode in RESTARTED.items()}
# The modes whose rows a run of this mode gives.
ROWS_OF = {mode: (mode,) for mode in MODES} | {"fp8_then_qat": ("fp8", "qat_after", "qat_last")}
NUDGE = 1 + 2.0**-20  # what initial weights are multiplied by: far less than BF16 rounds


@dataclass(frozen=True)
class Scale:
    """A model, its batches, and how long it learns."""

    sizes: dict[str, int]
    context: int
    batch: int
    held_out: int
    """Sequences."""
    learning_rate: float = 1e-3
    text: int | None = None
    """Characters of the corpus; None for all."""

    def tokens_of_step(self, processes: int) -> int:
        return self.batch * processes * self.context


SCALES = {
    # 418 M parameters, 36 M of them at work for a token: 0.24 GFLOP a token.
    "small": Scale(
        {
            "vocab_size": 8192,
            "hidden_size": 512,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 256,
        },
        context=1024,
        batch=64,
        held_out=1024,
    ),
    "tiny": Scale(
        {
            "vocab_size": 512,
            "hidden_size": 128,
            "num_hidden_layers": 8,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
        },
        context=32,
        batch=4,
        held_out=8,
        text=2_000_000,
    ),
}


class Learner:
    """A model's losses on a batch. Layers, and the head with its loss, are compiled.

    One layer is compiled for all of them: it takes a fraction of the time of a whole model.
    """

    def __init__(self, model: Any, compiled: bool, autocast: bool = True) -> None:
        self.model, self.autocast = model, autocast
        self.head = entropy_and_hits
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(keep_logits)
            if compiled:
                layer.compile(fullgraph=True, dynamic=False)
        if compiled:
            self.head = torch.compile(entropy_and_hits, fullgraph=True, dynamic=False)

    def __call__(self, ids_BS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is minimised, the cross-entropy in it, and which tokens are the first choice."""
        from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

        model, config = self.model, self.model.config
        with torch.autocast(ids_BS.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            x_BSD = model.model(input_ids=ids_BS, use_cache=False).last_hidden_state
            entropy, right = self.head(x_BSD, model.lm_head.weight, ids_BS)
            logits = tuple(layer.mlp.gate.logits for layer in model.model.layers)
            sizes = config.num_experts, config.num_experts_per_tok
            balance = load_balancing_loss_func(logits, *sizes)
        return entropy + BALANCE_COEFFICIENT * balance, entropy.detach(), right


def keep_logits(gate: Any, args: Any, output: tuple[Tensor, ...]) -> None:
    # Transformers' output_router_logits asks a ContextVar, which Dynamo cannot read.
    gate.logits = output[0]


def entropy_and_hits(x_BSD: Tensor, weight_VD: Tensor, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
    logits_BSV = functional.linear(x_BSD, weight_VD).float()
    next_BS = functional.pad(ids_BS[:, 1:], (0, 1), value=-100)  # cross_entropy leaves these out
    entropy = functional.cross_entropy(logits_BSV.flatten(0, 1), next_BS.flatten())
    return entropy, logits_BSV.detach()[:, :-1].argmax(-1) == ids_BS[:, 1:]


def new_model(scale: Scale, seed: int, device: torch.device) -> nn.Module:
    from transformers import AttentionInterface, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # By a name that transformers makes no mask for: torch before 2.14 compiles one in, and then
    # attention is not flash attention's.
    AttentionInterface.register("sdpa_causal", sdpa_attention_forward)
    config = Qwen3MoeConfig(
        **scale.sizes,
        norm_topk_prob=True,
        max_position_embeddings=scale.context,
        attn_implementation="sdpa_causal",
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    with device:
        return Qwen3MoeForCausalLM(config)


@dataclass
class Course:
    """A run as far as it has come."""

    seed: int
    tokens: int
    steps: int
    optimizer: torch.optim.Optimizer
    done: int = 0
    losses: list[Tensor] = field(default_factory=list)
    rows: list[Record] = field(default_factory=list)


class Training:
    """A converted and compiled model that starts anew with each seed."""

    def __init__(
        self, mode: str, scale: Scale, device: torch.device, data: Corpus, compiled: bool
    ) -> None:
        self.mode, self.scale, self.device, self.corpus = mode, scale, device, data.digest
        self.rank, self.processes = 0, 1
        if dist.is_initialized():
            self.rank, self.processes = dist.get_rank(), dist.get_world_size()
        self.model = new_model(scale, 0, device)
        convert(self.model, **MODES[mode])
        torch._dynamo.reset()  # nothing of another mode's
        self.forward = Learner(self.model, compiled)
        self.training = data.training.to(device)
        S = scale.context
        start_B = torch.linspace(0, len(data.held_out) - S, scale.held_out).long()
        held_out = data.held_out[start_B[:, None] + torch.arange(S)].long().to(device)
        self.held_out = held_out.split(scale.batch)
        self.ends_line = data.ends_line.to(device)

    def run(self, seed: int, tokens: int, half: Path | None = None) -> list[Record] | None:
        """Train once. With a path the first call saves half of a run there, the second goes on.

        Returns: the run's rows, or None of a half.
        """
        steps = tokens // self.scale.tokens_of_step(self.processes)
        self.model.load_state_dict(new_model(self.scale, seed, self.device).state_dict())
        if self.mode == "nudged":
            with torch.no_grad():
                for p in self.model.parameters():
                    p.mul_(NUDGE)
        course = Course(seed, tokens, steps, optimizer_of(self.model, self.scale.learning_rate))
        if self.mode == "fp8_then_qat":
            return self.serve_in_mxfp4(course)
        if half is None:
            return self.learn(course, steps)
        half = half.with_suffix(f".{self.rank}.pt")
        if half.exists():
            self.restore(course, torch.load(half, self.device))
            return self.learn(course, steps)
        self.learn(course, steps // 2)
        torch.save(self.state(course), half)
        return None

    def serve_in_mxfp4(self, course: "Course") -> list[Record]:
        """Three runs that are one up to the last tenth: FP8; then rounded; the last in MXFP4."""
        self.learn(course, course.steps - round(LAST * course.steps))
        before = deepcopy(self.state(course))
        fp8 = self.learn(course, course.steps)
        convert(self.model, QAT)
        after = [*fp8[:-1], fp8[-1]._replace(**self.evaluate())]
        self.restore(course, before)
        last = self.learn(course, course.steps)
        convert(self.model, FP8)
        modes = zip(ROWS_OF[self.mode], (fp8, after, last), strict=True)
        return [row._replace(mode=mode) for mode, rows in modes for row in rows]

    def state(self, course: "Course") -> tuple[Any, ...]:
        rows = [tuple(row) for row in course.rows]
        states = self.model.state_dict(), course.optimizer.state_dict()
        return course.done, course.losses[-EVERY:], rows, *states

    def restore(self, course: "Course", state: tuple[Any, ...]) -> None:
        # The step is the position in the data and in the schedule, too.
        course.done, course.losses, rows, model, optimizer = state
        course.rows = [Record(*row) for row in rows]
        self.model.load_state_dict(model)
        course.optimizer.load_state_dict(optimizer)

    def learn(self, course: "Course", ends: int) -> list[Record]:
        """Go on up to this step. Returns: the run's rows up to there."""
        begins, steps, optimizer = course.done, course.steps, course.optimizer
        losses, rows = course.losses, course.rows
        timed, begin = 0.0, 0.0
        # The step that is timed first: compiled by then.
        first = begins + min(EVERY, steps // (2 * EVALUATIONS))
        for step, ids_BS in islice(enumerate(self.batches(course.seed, steps)), begins, ends):
            if step == first:
                synchronize(self.device)
                begin = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = self.scale.learning_rate * rate(step, steps)
            objective, loss, _ = self.forward(ids_BS)
            (objective / self.processes).backward()
            self.add_up(p.grad for p in self.model.parameters())
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
            course.done = done = step + 1
            evaluated = done * EVALUATIONS // steps > step * EVALUATIONS // steps
            if done % EVERY == 0 or evaluated:
                recent: Any = (
                    torch.stack(losses[-EVERY:]).mean() / self.processes
                )  # read at the end
                self.add_up([recent])
                row = Record(self.corpus, course.tokens, self.mode, course.seed, done, recent)
                if evaluated:
                    synchronize(self.device)
                    if done > first:  # a run that was just restarted may be evaluated before
                        timed += time.perf_counter() - begin
                        speed = (done - first) * ids_BS.numel() * self.processes / timed
                        row = row._replace(tokens_per_second=round(speed))
                    row = row._replace(**self.evaluate())
                    begin = time.perf_counter()
                rows.append(row)
        return [row._replace(loss=float(row.loss)) for row in rows]

    def batches(self, seed: int, steps: int) -> Iterator[Tensor]:
        """The corpus in pieces, each once before any twice, in an order that the seed decides."""
        B, S = self.scale.batch * self.processes, self.scale.context
        pieces = len(self.training) // S
        generator = torch.Generator().manual_seed(seed)
        epochs = -(-steps * B // pieces)
        order = torch.cat([torch.randperm(pieces, generator=generator) for _ in range(epochs)])
        start = S * order[: steps * B].to(self.device)
        for start_B in start.split(B):
            own_B = start_B[self.rank :: self.processes]
            position = own_B[:, None] + torch.arange(S, device=self.device)
            yield self.training[position].long()

    def add_up(self, tensors: Iterable[Any]) -> None:
        """Sum each over the processes that train one model."""
        if self.processes > 1:
            for t in tensors:
                dist.all_reduce(t)

    def evaluate(self) -> dict[str, float]:
        """Of the held-out text: loss, share of tokens, and of lines, that are the first choice."""
        losses, right, lines, right_lines = [], [], [], []
        for ids_BS in self.held_out:
            # With gradients, as in training: without them it would be compiled once more.
            _, loss, right_BS = self.forward(ids_BS)
            losses.append(loss)
            right.append(right_BS.float().mean())
            of_lines = lines_of(right_BS, self.ends_line[ids_BS[:, 1:]])
            lines.append(of_lines.whole)
            right_lines.append(of_lines.right)
        return {
            "held_out": torch.stack(losses).double().mean().item(),
            "accuracy": torch.stack(right).double().mean().item(),
            "lines": (torch.stack(right_lines).sum() / torch.stack(lines).sum()).item(),
        }


class Lines(NamedTuple):
    whole: Tensor
    right: Tensor


def lines_of(right_BS: Tensor, ends_BS: Tensor) -> Lines:
    """How many lines lie whole in the sequences, and of how many all tokens are right.

    A line goes up to a token with a line feed; the first may have begun before its sequence.

    >>> right = torch.tensor([[0, 1, 1, 1, 0, 1, 1]]).bool()
    >>> lines_of(right, torch.tensor([[1, 0, 0, 1, 0, 1, 0]]).bool())
    Lines(whole=tensor(2), right=tensor(1))
    """
    ends_BS = ends_BS.long()
    line_BS = ends_BS.cumsum(1) - ends_BS
    wrong_BL = torch.zeros_like(line_BS).scatter_add_(1, line_BS, (~right_BS).long())
    number = torch.arange(right_BS.size(1), device=right_BS.device)
    whole_BL = (number >= 1) & (number < ends_BS.sum(1, keepdim=True))
    return Lines(whole_BL.sum(), (whole_BL & (wrong_BL == 0)).sum())


def optimizer_of(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def rate(step: int, steps: int) -> float:
    """The learning rate's share of its largest."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm_up) / (steps - warm_up))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Work:
    """Runs to do, and what every process needs to know of them."""

    scale: Scale
    tokens: int
    compiled: bool
    device: str
    path: Path
    corpus: Path
    until: float
    processes: int
    together: bool
    todo: Any
    halves: Any
    """Runs that were stopped, which another process continues."""
    lock: Any

    def take(self, mode: str | None, needed: float) -> tuple[str, int] | None:
        """The next run, of this mode where one is left, or None; also where time is short."""
        run = [None if self.together and dist.get_rank() else self._take(mode, needed)]
        if self.together:
            dist.broadcast_object_list(run, device=torch.device("cpu"))
        return run[0]

    def _take(self, mode: str | None, needed: float) -> tuple[str, int] | None:
        with self.lock:
            if not self.todo or time.time() + needed > self.until:
                return None
            run = next((run for run in self.todo if run[0] == mode), self.todo[0])
            self.todo.remove(run)
            return tuple(run)

    def half(self, mode: str, seed: int) -> Path | None:
        """The file of a run that is to be restarted."""
        return self.corpus.with_name(f"{mode}_{seed}") if mode in RESTARTED else None

    def add(self, rows: list[Record]) -> None:
        with self.lock, self.path.open("a", newline="") as file:
            known = {row[:4] for row in report.recorded(self.path)}
            new = (row.cells() for row in rows if row[:4] not in known)
            csv.writer(file, lineterminator="\n").writerows(new)


def train(index: int, work: Work) -> None:
    """Train what is left, one run after the other, on the GPU of this number."""
    device = torch.device(work.device)
    if device.type == "cuda":
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    torch._inductor.config.deterministic = True  # else it times kernels and takes the faster
    torch.utils.deterministic.fill_uninitialized_memory = False  # our kernels write all they return
    if work.together:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        meeting = f"file://{work.corpus}.meeting"
        dist.init_process_group(backend, meeting, rank=index, world_size=work.processes)
    data = Corpus(*torch.load(work.corpus, mmap=True))
    training: Training | None = None
    mode, needed = None, 0.0
    while (run := work.take(mode, needed)) is not None:
        begin = time.time()
        mode, seed = run
        if training is None or training.mode != mode:
            training = None  # before there are two
            training = Training(mode, work.scale, device, data, work.compiled)
            compiling = True
        else:
            compiling = False
        rows = training.run(seed, work.tokens, work.half(mode, seed))
        needed = time.time() - begin
        if training.rank > 0:
            continue
        if rows is None:
            work.halves.append(run)
            print(f"{mode:16} seed {seed}  stopped at half  {needed:.0f} s", flush=True)
        else:
            work.add(rows)
            first, last = rows[0], rows[-1]
            print(
                f"{mode:16} seed {seed}  loss {first.loss:.3f} {last.loss:.4f}  "
                f"held out {last.held_out:.5f}  {last.tokens_per_second:,} tokens/s  "
                f"{needed:.0f} s" + (" with compiling" if compiling else ""),
                flush=True,
            )
    if device.type == "cuda":
        print(f"GPU {index}: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    if work.together:
        dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    device = torch.device(options.device)
    if options.report:
        for path in sorted(options.output_dir.glob("convergence_*.csv")):
            print(report.write(path))
        return
    path = options.output_dir / f"convergence_{timing.slug(device)}.csv"
    train_all(options, path, device)
    print(report.write(path))


def train_all(options: argparse.Namespace, path: Path, device: torch.device) -> None:
    begin = time.time()
    scale = SCALES[options.scale]
    data = corpus(scale.sizes["vocab_size"], options.text or scale.text)
    print(f"{data.about[0]}\nmade in {time.time() - begin:.0f} s", flush=True)
    if len(data.held_out) < scale.context:
        sys.exit(f"convergence: only {len(data.held_out)} tokens are held out: take more --text")
    tokens = int(options.tokens)
    key = data.digest, tokens
    last = {(r.mode, r.seed): r.step for r in report.recorded(path) if (r.corpus, r.tokens) == key}
    steps = tokens // scale.tokens_of_step(options.processes if options.together else 1)
    if set(last.values()) - {steps}:
        sys.exit(f"convergence: {path} has runs of as many tokens in other than {steps} steps")
    todo = [(mode, seed) for seed in range(options.seeds) for mode in options.modes]
    todo = [(mode, seed) for mode, seed in todo if (ROWS_OF[mode][-1], seed) not in last]
    about = [*timing.machine(device), *data.about, timing.command("convergence")]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        if file.tell() == 0:
            file.write(",".join(Record._fields) + "\n")
        file.writelines(f"# {line}\n" for line in [*about, f"commit {timing.git_commit()}"])
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for equal bits
    with tempfile.TemporaryDirectory() as folder, torch.multiprocessing.Manager() as manager:
        saved = Path(folder) / "corpus.pt"
        torch.save(tuple(data), saved)
        work = Work(
            scale,
            tokens,
            options.compile,
            options.device,
            path,
            saved,
            begin + options.seconds,
            options.processes,
            options.together,
            manager.list(todo),
            manager.list(),
            manager.Lock(),
        )
        if options.processes > 1:
            torch.multiprocessing.spawn(train, (work,), options.processes)
        else:
            train(0, work)
        if work.halves:
            Path(f"{saved}.meeting").unlink(missing_ok=True)
            again = replace(work, todo=work.halves)
            torch.multiprocessing.spawn(train, (again,), options.processes)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence", description=(__doc__ or "").splitlines()[0]
    )
    option = parser.add_argument
    option("--modes", nargs="+", choices=MODES, default=["bf16", "fp8", "both"])
    option("--seeds", type=int, default=5, help="runs of each mode (default: 5)")
    option("--tokens", type=float, default=100e6, help="that a run learns from (default: 100e6)")
    option("--seconds", type=float, default=math.inf, help="start no run that would end later")
    option("--scale", choices=SCALES, default="small")
    option("--text", type=int, help="characters of the corpus (default: all)")
    option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    option("--processes", type=int, help="one a GPU (default: as many as there are)")
    option("--together", action="store_true", help="all train one run, with a batch from each")
    option("--compile", action=argparse.BooleanOptionalAction, default=True)
    option("--output-dir", type=Path, default=timing.RESULTS)
    option("--report", action="store_true", help="train nothing; write page and pictures")
    options = parser.parse_args(arguments)
    if options.processes is None:
        options.processes = torch.cuda.device_count() if options.device == "cuda" else 1
    options.together &= options.processes > 1
    return options


if __name__ == "__main__":
    main()
