# SPDX-License-Identifier: Apache-2.0
"""Qwen3-30B-A3B, whole, on several GPUs: tokens a second, share of peak, memory, losses.

    python -m benchmarks.parallel_30b --gpus 4 --write
    python -m benchmarks.parallel_30b --gpus 2 --compiled --sequences 4 --step-in-backward --write
    python -m benchmarks.parallel_30b --gpus 4 --layers 12 --restart /tmp --write

transformers' model at its published sizes, with random weights, learns Python source, a byte as a
token. A step is forward, backward and torch's AdamW(fused) with bf16 parameters, as bf16 recipes of
the field have it; FSDP2 reduces float32. Layers are checkpointed, but for the first --kept. Experts
are torch's grouped_mm or a GroupedMLP; FSDP2 shards all, or they are spread over all GPUs by
ExpertParallel with FSDP2 around them. Each expert is chosen as often as another unless
--learned-routing is given, as in the field's figures. All ways have the same first weights, tokens
and choices.

MFU: 6 FLOPs an active parameter, of embeddings none, and attention's causal half, by torch's peak
of BF16 also where products are FP8. A step's time is the median; the last process counts.

Each way has new processes, so that one that fails is a row with the reason. With --restart each
trains again from a checkpoint of half its steps, with deterministic kernels throughout.
--accumulate sums gradients of so many batches of --sequences before AdamW: NeMo's figure is of 16
batches of 4. --step-in-backward has AdamW update each parameter as soon as its gradient is there,
so that gradients of few layers are in memory. --write replaces rows of the same options.

A batches, B sequences of S tokens, E experts, C chosen for a token, L of them here, H and F
features, R rows.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from benchmarks import parallel_training, timing
from benchmarks.parallel_model import WAYS
from benchmarks.parallel_run import RECIPES
from benchmarks.python_source import distinct
from grouped_linear import GroupedMLP
from grouped_linear.parallel import Dispatched

FORMS: dict[str, dict[str, Any] | None] = {"FSDP2": None, **WAYS}
EXPERTS = ("torch", "bf16", "block", "both")
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_30b": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}
COLUMNS = [
    *("GPUs", "form", "experts", "options", "s a step", "tokens/s a GPU", "MFU", "of torch's"),
    *("held, GiB", "peak, GiB", "dropped", "step: loss", "restart differs by", "commit", "date"),
]
HOW = """Qwen3-30B-A3B on several GPUs (`benchmarks/parallel_30b.py` says how), with
`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True TORCH_NCCL_HIGH_PRIORITY=1`. Of torch's is the
share of tokens/s of torch's experts in the same command. Held and peak are of one GPU. NeMo
Automodel: 12,040 tokens/s a GPU (BF16, 8 H100, 16 batches of 4 sequences of 4096)."""
PEAK = 989e12  # H100 and H200 SXM, dense BF16 (NVIDIA's data sheets)
WARM, RATE, CHARACTERS = 5, 3e-4, 20_000_000
LOGITS = 1024  # tokens whose logits are in memory: 1.5 GiB with their gradient


@dataclass
class Options:
    """What all ways share."""

    size: str = "qwen3_30b"
    layers: int = 48
    context: int = 4096
    sequences: int = 2
    accumulate: int = 1
    steps: int = 50
    kept: int = 0
    step_in_backward: bool = False
    compiled: bool = False
    learned_routing: bool = False
    restart: str | None = None

    def flags(self) -> str:
        """Those that are not the defaults, as the command has them."""
        given = {k: v for k, v in asdict(self).items() if v != getattr(Options, k)}
        words = (
            f"--{k.replace('_', '-')}" + ("" if v is True else f" {v}") for k, v in given.items()
        )
        return " ".join(words)


@dataclass
class Row:
    """A way's results: GiB, seconds of a step, nats a token."""

    form: str
    experts: str
    seconds: float
    tokens: float
    mfu: float
    held: float
    peak: float
    dropped: float
    losses: list[float]
    apart: float | None = None
    """With a restart: the largest relative difference of a loss after it."""


class Experts(GroupedMLP):
    """Called as transformers calls experts."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, weights, index)


class TorchExperts(GroupedMLP):
    """The same of torch's operations alone."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        if self.dispatcher is None:
            return self._own(Dispatched(x, weights, index))
        sent = self.dispatcher.dispatch(x, weights, index)
        return self.dispatcher.combine(self._own(sent), sent)

    def _own(self, sent: Dispatched) -> Tensor:
        gate_up, down = (
            (p.to_local() if isinstance(p, DTensor) else p).to(sent.x.dtype).transpose(1, 2)
            for p in (self.gate_up_proj, self.down_proj)
        )
        index_SC, L = sent.top_k_index, gate_up.size(0)
        expert = torch.where((index_SC >= 0) & (index_SC < L), index_SC, L).flatten()
        order_R = expert.argsort(stable=True)[: sent.max_rows]
        expert_R = expert[order_R]
        offs = torch.searchsorted(expert_R, torch.arange(L, device=expert.device), right=True)
        offs = offs.to(torch.int32)
        x_RH = sent.x.index_select(0, order_R // index_SC.size(1))
        here_R1 = expert_R[:, None] < L
        if self.dispatcher is not None:  # grouped_mm leaves rows past the last end as they were
            x_RH = torch.where(here_R1, x_RH, 0)  # in its input's gradient
        gate, up = F.grouped_mm(x_RH, gate_up, offs=offs).chunk(2, dim=-1)
        y_RH = F.grouped_mm(F.silu(gate) * up, down, offs=offs)
        if self.dispatcher is not None:
            y_RH = torch.where(here_R1, y_RH, 0)
        y_RH = y_RH * sent.top_k_weights.flatten()[order_R, None].to(y_RH.dtype)
        y = y_RH.new_zeros(expert.size(0), y_RH.size(1)).index_copy(0, order_R, y_RH)
        return y.unflatten(0, (-1, index_SC.size(1))).sum(dim=1)


def balanced(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Let token t choose experts t, t + E / C, ...: all as often, and of all processes."""
    x, index_TC, weights = args
    E, (T, C) = int(module.num_experts), index_TC.shape  # type: ignore[arg-type]
    token, choice = (torch.arange(n, device=x.device) for n in (T, C))
    return x, (token[:, None] + choice * (E // C)) % E, weights


class Qwen3(nn.Module):
    """transformers' model and its loss, logits of few tokens at a time."""

    def __init__(self, options: Options, experts: str) -> None:
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM

        self.config = AutoConfig.for_model(
            "qwen3_moe", **SIZES[options.size], num_hidden_layers=options.layers
        )
        model = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16)
        self.body, self.head = model.model, model.lm_head
        recipe = None if experts == "torch" else RECIPES[experts.replace("both", "block")]
        for i, layer in enumerate(self.body.layers):
            layer.mlp.experts = (TorchExperts if experts == "torch" else Experts)(
                self.config.num_experts,
                self.config.hidden_size,
                self.config.moe_intermediate_size,
                recipe=recipe,
                weights="both" if experts == "both" else None,
                dtype=torch.bfloat16,
            )
            if not options.learned_routing:
                layer.mlp.experts.register_forward_pre_hook(balanced)
            if options.compiled:  # not Module.compile, which would compile FSDP2's hooks
                layer = torch.compile(layer, fullgraph=True)
            if i >= options.kept:
                layer = checkpoint_wrapper(layer)
            self.body.layers[i] = layer

    @property
    def blocks(self) -> nn.ModuleList:
        layers: nn.ModuleList = self.body.layers
        return layers

    def flops(self, context: int) -> float:
        """Of a token, forward and backward."""
        c = self.config
        of_experts = sum(p.numel() for p in parallel_training.experts_of(self))
        others = sum(p.numel() for p in self.parameters()) - of_experts
        others -= c.vocab_size * c.hidden_size  # the embedding multiplies nothing
        active = others + of_experts * c.num_experts_per_tok / c.num_experts
        return 6.0 * (active + c.num_hidden_layers * c.num_attention_heads * c.head_dim * context)

    @torch.no_grad()
    def draw(self, device: torch.device) -> None:
        """Make memory, and the same weights for each way over as many processes."""
        self.to_empty(device=device)
        with device:  # its frequencies are no parameters
            self.body.rotary_emb = type(self.body.rotary_emb)(config=self.config)
        D, rank = dist.get_world_size(), dist.get_rank()
        for i, p in enumerate(self.parameters()):
            own = p.to_local() if isinstance(p, DTensor) else p
            if own.ndim == 1:
                own.fill_(1.0)
            else:
                generator = torch.Generator(device).manual_seed(i * D + rank)
                own.normal_(std=0.02, generator=generator)
        for dispatcher in self.dispatchers():
            dispatcher.reset()

    def dispatchers(self) -> list[Any]:
        mlps = (m for m in self.modules() if isinstance(m, GroupedMLP))
        return [m.dispatcher for m in mlps if m.dispatcher is not None]

    def forward(self, token_BS1: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats a token."""
        hidden_BSH = self.body(input_ids=token_BS1[:, :-1], use_cache=False).last_hidden_state
        pieces = zip(
            hidden_BSH.flatten(0, 1).split(LOGITS),
            token_BS1[:, 1:].flatten().split(LOGITS),
            strict=True,
        )
        sums = [checkpoint(self._entropy, *piece, use_reentrant=False) for piece in pieces]
        return torch.stack(sums).sum() / token_BS1[:, 1:].numel()

    def _entropy(self, hidden_PH: Tensor, next_P: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden_PH).float(), next_P, reduction="sum")


def train(
    form: str,
    experts: str,
    options: Options,
    text: Tensor,
    mesh: DeviceMesh,
    saved: Path | None = None,
    resumed: bool = False,
) -> Row:
    """Train on all processes: from the first step on, saving half way, or on from there."""
    device, rank, D = text.device, dist.get_rank(), mesh.size()
    with torch.device("meta"):
        model = Qwen3(options, experts)
    flops = model.flops(options.context)
    if (how := FORMS[form]) is None:
        parallel_training.shard(model, mesh, set())
    else:
        parallel_training.spread(model, mesh, **how)
    model.draw(device)
    if how is not None:
        parallel_training.average(model, mesh)
    of_experts = parallel_training.experts_of(model)
    rest = [p for p in model.parameters() if p not in of_experts]
    parts: list[list[Tensor]] = [rest, list(of_experts)]  # DTensors of two meshes
    if options.step_in_backward:
        parts = [[p] for part in parts for p in part]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(part, RATE, fused=True) for part in parts
    ]
    if options.step_in_backward:
        for (p,), optimizer in zip(parts, optimizers, strict=True):
            p.register_post_accumulate_grad_hook(partial(update, optimizer))
    half = options.steps // 2
    if resumed:
        weights, moments = get_state_dict(model, optimizers)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=saved)
        set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=moments)
        del weights, moments
    losses, seconds = [], []
    for step in range(half if resumed else 0, options.steps):
        if step == half and saved is not None and not resumed:
            weights, moments = get_state_dict(model, optimizers)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=saved)
            del weights, moments
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / 10)
        random = torch.Generator().manual_seed(step * D + rank)
        first_AB1 = torch.randint(
            len(text) - options.context,
            (options.accumulate, options.sequences, 1),
            generator=random,
        )
        at_ABS1 = first_AB1 + torch.arange(options.context + 1)
        step_loss = torch.zeros((), device=device)
        for at_BS1 in at_ABS1.to(device):
            loss = model(text[at_BS1].long()) / options.accumulate
            loss.backward()
            step_loss += loss.detach()
        if options.step_in_backward:
            assert all(p.grad is None for p in model.parameters()), "no step in the backward"
        else:
            for optimizer in optimizers:
                update(optimizer)
        losses.append(step_loss)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    dropped = sum(float(d.dropped) for d in model.dispatchers())
    c = model.config
    batch = options.accumulate * options.sequences * options.context
    choices = len(losses) * batch
    choices *= c.num_experts_per_tok * c.num_hidden_layers
    held, peak = parallel_training.allocated(device) / 1024, 0.0
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / (1 << 30)
    worst = [statistics.median(seconds[WARM:] or seconds), held, peak, dropped / choices]
    found = torch.tensor(worst, dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    curve = torch.stack(losses)
    dist.all_reduce(curve)
    ms, held, peak, dropped = found.tolist()
    tokens = batch / ms
    mfu = tokens * flops / PEAK
    return Row(form, experts, ms, tokens, mfu, held, peak, dropped, (curve / D).tolist())


def update(optimizer: torch.optim.Optimizer, _: Tensor | None = None) -> None:
    """Let AdamW update its parameters, whose gradients it frees."""
    optimizer.step()
    optimizer.zero_grad()


def process(
    rank: int,
    gpus: int,
    kind: str,
    folder: Path,
    way: tuple[str, str],
    options: Options,
    resumed: bool,
) -> None:
    """One of a way's processes; the first leaves the row in the folder."""
    device = torch.device(kind, rank if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    if options.restart is not None:
        torch.use_deterministic_algorithms(True)  # flash attention takes a warning for a no
        torch.backends.cuda.enable_cudnn_sdp(False)  # whose backward adds in any order
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder / f'rendezvous_{resumed}'}",
        rank=rank,
        world_size=gpus,
        timeout=timedelta(minutes=3),
    )
    text = "".join(document.text for document in distinct(CHARACTERS)).encode()
    text_N = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    saved = None if options.restart is None else folder / "checkpoint"
    row = train(*way, options, text_N, init_device_mesh(kind, (gpus,)), saved, resumed)
    if rank == 0:
        (folder / f"row_{resumed}.json").write_text(json.dumps(asdict(row)))
    dist.barrier()  # a process that ends may take the first with it, which writes
    dist.destroy_process_group()


def run(way: tuple[str, str], options: Options, gpus: int, kind: str, seconds: float) -> Row:
    """A way in processes of its own, and again from its checkpoint if asked.

    Raises TimeoutError, or what torch.multiprocessing does where a process fails.
    """
    with tempfile.TemporaryDirectory(dir=options.restart) as name:
        folder, rows = Path(name), []
        for resumed in (False, True)[: 1 + (options.restart is not None)]:
            arguments = gpus, kind, folder, way, options, resumed
            context = mp.start_processes(process, arguments, gpus, join=False)
            end = time.monotonic() + seconds
            while not context.join(max(0.0, end - time.monotonic())):
                if time.monotonic() >= end:
                    for each in context.processes:
                        each.kill()
                    raise TimeoutError(f"ran for more than {seconds:.0f} seconds")
            rows.append(Row(**json.loads((folder / f"row_{resumed}.json").read_text())))
    if options.restart is not None:
        rows[0].apart = apart(rows[0].losses, rows[1].losses)
    return rows[0]


def apart(whole: list[float], resumed: list[float]) -> float:
    """The largest relative difference of losses after a restart; 0 if all bits are equal."""
    last = whole[-len(resumed) :]
    return max(abs(a / b - 1) for a, b in zip(resumed, last, strict=True))


def cells(row: Row, of_torch: dict[str, float]) -> list[str]:
    """What the record has of a row, but for GPUs, way, options, commit and date."""
    share = f"{row.tokens / of_torch[row.form]:.2f}" if row.form in of_torch else "-"
    steps = sorted({s for s in (1, 10, 25, 50) if s <= len(row.losses)} | {len(row.losses)})
    return [
        *(f"{row.seconds:.3f}", f"{row.tokens:,.0f}", f"{row.mfu:.1%}", share),
        *(f"{row.held:.1f}", f"{row.peak:.1f}", f"{row.dropped:.2%}"),
        ", ".join(f"{step}: {row.losses[step - 1]:.4f}" for step in steps),
        "-" if row.apart is None else f"{row.apart:.1e}" if row.apart else "nothing",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["FSDP2", "all_gather"])
    parser.add_argument("--experts", nargs="+", choices=EXPERTS, default=list(EXPERTS))
    parser.add_argument("--size", choices=SIZES, default="qwen3_30b")
    for name in ("layers", "context", "sequences", "accumulate", "steps"):
        default = getattr(Options, name)
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--kept", type=int, default=0, help="layers that are not checkpointed")
    parser.add_argument("--step-in-backward", action="store_true", help="AdamW in the backward")
    parser.add_argument("--compiled", action="store_true", help="each layer by torch.compile")
    parser.add_argument("--learned-routing", action="store_true", help="in place of balance")
    parser.add_argument("--restart", metavar="FOLDER", help="for a checkpoint: 6 bytes a parameter")
    parser.add_argument("--seconds", type=float, default=500, help="of a way, then it has failed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/")
    given = vars(parser.parse_args())
    if given["step_in_backward"] and given["accumulate"] > 1:
        parser.error("--step-in-backward keeps no gradient for a second batch: --accumulate 1")
    if given["write"] and given["device"] == "cpu":
        parser.error("--write records GPUs alone: leave it out")
    options = Options(**{name: given[name] for name in Options.__dataclass_fields__})
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what deterministic kernels need
    records: list[list[str]] = []
    of_torch: dict[str, float] = {}
    for form, experts in itertools.product(given["forms"], given["experts"]):
        try:
            row = run((form, experts), options, given["gpus"], given["device"], given["seconds"])
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            found = [reason, *["-"] * (len(COLUMNS) - 7)]
        else:
            if experts == "torch":
                of_torch[form] = row.tokens
            found = cells(row, of_torch)
        made = timing.git_commit(), str(date.today())
        records.append([str(given["gpus"]), form, experts, options.flags(), *found, *made])
        print(*records[-1], flush=True)
        if given["write"]:  # after each way: a run that is ended leaves what it has
            timing.replace_rows("parallel_30b", COLUMNS, records, HOW, same=4)
    print(timing.markdown([COLUMNS, *records]))


if __name__ == "__main__":
    main()
