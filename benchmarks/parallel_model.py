# SPDX-License-Identifier: Apache-2.0
"""What to expect of experts spread over many GPUs: bytes, bandwidths and the layer's time on one.

    python -m benchmarks.parallel --predict 8 64 512

Predictions, not measurements. A step of one expert layer, forward and backward, with T tokens a
GPU, takes the time of the layer on one GPU (E experts and T tokens there, E / D experts and D T
tokens' choices of them here: as many rows), and the time of communication, as if nothing hid it:

    communication = there + back + memory + fixed
    there, back   = the longer of bytes / NVLink and bytes / network

There go x and dy, in FP8 or 16 bits, and routing; back come y and dx. Of n rows to each of D - 1
others a GPU sends to G - 1 by NVLink, and to D - G by the network, with G GPUs a node. An
all-gather sends a row once into each node (NCCL), so that a GPU sends 1 / G of these rows over the
network; what comes back has no such way. Memory is what packing, quantization and the sum of a
token's rows read and write.

Where GPUs are more than D, each expert is on several, and FSDP2 gathers its weights twice and
reduces its gradient once a step. This is a column of its own, because FSDP2 overlaps it.

Recorded results of one node give NVLink's, memory's and the fixed part, by least squares. What is
not measured is nominal, times REACHED.

T tokens of a GPU, D GPUs that share the experts, E experts, C chosen for a token, H and F features,
n slots from one GPU to another, S = D n.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import timing

MIB = 1 << 20


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer, and the tokens of one GPU alone."""

    T: int
    H: int
    F: int
    E: int
    C: int


SHAPES = {
    "qwen3_30b": Shape(8192, 2048, 768, 128, 8),
    "dsv3_32_experts": Shape(4096, 7168, 2048, 32, 8),
    "mixtral": Shape(8192, 4096, 14336, 8, 2),
    "tiny": Shape(64, 32, 48, 8, 2),
}
CAPACITY = 1.25
WAYS: dict[str, dict[str, Any]] = {
    "all_gather, no capacity": {"dispatch": "all_gather"},
    "all_gather": {"dispatch": "all_gather", "capacity_factor": CAPACITY},
    "all_gather, FP8": {"dispatch": "all_gather", "capacity_factor": CAPACITY, "fp8": True},
    "all_to_all": {"dispatch": "all_to_all", "capacity_factor": CAPACITY},
    "all_to_all, FP8": {"dispatch": "all_to_all", "capacity_factor": CAPACITY, "fp8": True},
    "all_to_all_v": {"dispatch": "all_to_all_v", "capacity_factor": CAPACITY},
}
# Of NVSHMEM's exchange no rate is known but that of two GPUs, which is another than NCCL's.
FITTED = [way for way in WAYS if way != "all_to_all_v"]
PREDICTED = [way for way in FITTED if way != "all_gather, no capacity"]
# Milliseconds on one H100, forward and backward, CUDA graph, weights cached in FP8:
# benchmarks/results/bench_expert_layer_nvidia_h100_80gb_hbm3.md, which counts the router, too.
LAYER_MS = {("qwen3_30b", "bf16"): 4.434, ("qwen3_30b", "block"): 3.156}
COLLECTIVES = 7  # a step: x, routing; y; dy; dx, the weights' gradient; and scales of dy


@dataclass(frozen=True)
class Machine:
    """What communication is made of; GB/s of one GPU in one direction, microseconds."""

    node: int = 8
    nvlink: float = 450.0  # H100 SXM: 900 GB/s in both directions together (NVIDIA's data sheet)
    network: float = 50.0  # one 400 Gb/s port a GPU, as in a DGX H100
    memory: float = 3350.0  # H100 SXM, HBM3 (NVIDIA's data sheet)
    fixed: float = 20.0 * COLLECTIVES  # 20 us a collective: assumed
    measured: str = ""
    """Which of these a recorded result gave, and how well it is met."""


REACHED = 0.8  # of a nominal bandwidth: assumed


def slots(shape: Shape, tokens: int, D: int, way: Mapping[str, Any]) -> int:
    """n, the rows that a process sends to each other one."""
    if way["dispatch"] == "all_gather":
        return tokens
    room = min(tokens, -(-int(CAPACITY * tokens * shape.C) // D))
    if way["dispatch"] == "all_to_all_v":  # the tokens that chose an expert of it, at random
        return min(room, round(tokens * (1 - (1 - 1 / D) ** shape.C)))
    return room + 1


def row_bytes(shape: Shape, way: Mapping[str, Any]) -> tuple[float, float]:
    """Of one row in a step: x, dy and routing there; y, dx and the weights' gradient back."""
    there = (1 + 4 / 128 if way.get("fp8") else 2) * shape.H  # and a scale for each 128
    return 2 * there + 8 * shape.C, 2 * 2 * shape.H + 4 * shape.C


def sent_bytes(shape: Shape, tokens: int, D: int, way: Mapping[str, Any]) -> float:
    """What a process sends to others in a step."""
    return (D - 1) * slots(shape, tokens, D, way) * sum(row_bytes(shape, way))


def memory_bytes(shape: Shape, tokens: int, D: int, way: Mapping[str, Any]) -> float:
    """What a step of communication reads and writes besides what is sent."""
    row, S = 2 * shape.H, D * slots(shape, tokens, D, way)
    packed = 0 if way["dispatch"] == "all_gather" else 2 * row * S
    fp8 = 1.5 * row * tokens + 1.5 * row * S if way.get("fp8") else 0
    summed = row * (S + tokens)
    return 2 * (packed + fp8 + summed)


@dataclass(frozen=True)
class Links:
    """Bytes of a step by the link that they take, there and back."""

    nvlink: tuple[float, float]
    network: tuple[float, float]


def links(shape: Shape, tokens: int, D: int, way: Mapping[str, Any], node: int) -> Links:
    inside = min(D, node)
    n = slots(shape, tokens, D, way)
    there, back = (n * each for each in row_bytes(shape, way))
    if way["dispatch"] == "all_gather":  # each row once into each node, and on by NVLink
        return Links(
            ((D - 1) * there, (inside - 1) * back),
            ((D - inside) * there / node, (D - inside) * back),
        )
    return Links(
        ((inside - 1) * there, (inside - 1) * back), ((D - inside) * there, (D - inside) * back)
    )


def communication(
    shape: Shape, tokens: int, D: int, way: Mapping[str, Any], machine: Machine
) -> float:
    """Milliseconds of dispatch and combine, forward and backward."""
    taken = links(shape, tokens, D, way, machine.node)
    seconds = sum(
        max(inside / machine.nvlink, outside / machine.network) / 1e9
        for inside, outside in zip(taken.nvlink, taken.network, strict=True)
    )
    seconds += memory_bytes(shape, tokens, D, way) / machine.memory / 1e9
    return 1e3 * (seconds + machine.fixed / 1e6)


def weights(shape: Shape, gpus: int, D: int, machine: Machine) -> float:
    """Milliseconds of FSDP2 for a GPU's experts: two all-gathers, one reduce-scatter, 16 bits."""
    copies = gpus // D
    sent = 3 * (1 - 1 / copies) * 2 * 3 * shape.E * shape.H * shape.F / D
    rate = machine.nvlink if gpus <= machine.node else machine.network
    return 1e3 * sent / rate / 1e9


# --- what a recorded result says -----------------------------------------------------------------


def recorded(folder: Path = timing.RESULTS) -> list[dict[str, Any]]:
    """What ``--write`` left of GPUs of one node: all results of the kind with the most GPUs."""
    found = [
        json.loads(path.read_text())
        for path in sorted(folder.glob("parallel_*.json"))
        if not {"cpu", "training"} & set(path.stem.split("_"))
    ]
    if not found:
        return []
    most = max(found, key=lambda result: int(result["processes"]))
    return [result for result in found if result["device"] == most["device"]]


def fitted(results: Sequence[Mapping[str, Any]], machine: Machine) -> Machine:
    """The machine with NVLink's and memory's rates and the fixed part of recorded results.

    Least squares of relative errors, none of the three negative: the best of all their subsets.
    """
    rows = [
        (r, int(result["processes"]))
        for result in results
        for r in result["rows"]
        if r["way"] in FITTED
    ]
    parts, took = [], []
    for r, D in rows:
        shape, way = SHAPES[r["shape"]], WAYS[r["way"]]
        taken = links(shape, r["tokens"], D, way, machine.node)
        moved = memory_bytes(shape, r["tokens"], D, way)
        parts.append([sum(taken.nvlink) / 1e6, moved / 1e6, 1.0])
        took.append(r["communication"])
    a = torch.tensor(parts, dtype=torch.float64) / torch.tensor(took, dtype=torch.float64)[:, None]
    best, error = None, float("inf")
    for size in (1, 2, 3):
        for columns in map(list, itertools.combinations(range(3), size)):
            if 0 not in columns:
                continue
            x = torch.linalg.lstsq(a[:, columns], torch.ones(len(rows), 1, dtype=a.dtype)).solution
            left = float((a[:, columns] @ x - 1).square().sum())
            if (x > 0).all() and left < error:
                best, error = dict(zip(columns, x.flatten().tolist(), strict=True)), left
    assert best is not None
    one_ms = [1 / best[i] if i in best else float("inf") for i in (0, 1)]  # MB a ms are GB/s
    fit = replace(machine, nvlink=one_ms[0], memory=one_ms[1], fixed=1e3 * best.get(2, 0.0))
    off = [
        communication(SHAPES[r["shape"]], r["tokens"], D, WAYS[r["way"]], fit) / r["communication"]
        for r, D in rows
    ]
    gpus = " and ".join(str(result["processes"]) for result in results)
    commits = " and ".join(dict.fromkeys(str(result["commit"]) for result in results))
    return replace(
        fit,
        measured=f"NVLink, memory and the fixed part fit {len(rows)} rows of "
        f"{results[0]['about'][0]}, {gpus} GPUs, commit {commits}: "
        f"predicted over measured {min(off):.2f} to {max(off):.2f}",
    )


def layer_times(results: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """Milliseconds of a layer on one GPU, by shape and recipe."""
    alone = [r for result in results for r in result["rows"] if r["scaling"] == "one GPU"]
    return {**LAYER_MS, **{(r["shape"], r["recipe"]): r["ms"] for r in alone}}


# --- what follows --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """One way of one layer whose experts are over D GPUs; milliseconds, bytes."""

    D: int
    way: str
    sent: Links
    communication: float
    step: float
    efficiency: float
    tokens: float
    """Of x and y as they come, the larger part of what dispatch holds."""


def predict(shape: Shape, layer_ms: float, D: int, way: str, machine: Machine) -> Prediction:
    how = WAYS[way]
    talk = communication(shape, shape.T, D, how, machine)
    S = D * slots(shape, shape.T, D, how)
    # The layer writes y for every slot, and dx, also where no token came.
    empty = 2 * 2 * shape.H * max(0, S - shape.T) / machine.memory / 1e6
    step = layer_ms + talk + empty
    sent = links(shape, shape.T, D, how, machine.node)
    return Prediction(D, way, sent, talk, step, layer_ms / step, 2 * 2 * shape.H * S)


def degrees(shape: Shape, counts: Sequence[int], node: int) -> list[int]:
    """Over how many GPUs to spread experts: one node, two, and all, as far as experts suffice."""
    most = min(max(counts), shape.E)
    return sorted({D for D in (node, 2 * node, *counts) if most >= D and shape.E % D == 0})


def table(shape: Shape, layer_ms: float, counts: Sequence[int], machine: Machine) -> str:
    """Ways by D; the last columns are FSDP2's, for as many GPUs."""
    head = ["D", "way", "NVLink, MiB", "network, MiB", "communication, ms", "step, ms"]
    cells = [
        [*head, "efficiency", "tokens held, MiB", *(f"FSDP2 on {gpus}, ms" for gpus in counts)]
    ]
    for D in degrees(shape, counts, machine.node):
        rows = [predict(shape, layer_ms, D, way, machine) for way in PREDICTED]
        best = min(row.step for row in rows)
        beside = [f"{weights(shape, N, D, machine):.1f}" if N >= D else "-" for N in counts]
        for row in rows:
            mark = "**" if row.step == best else ""
            sent = (f"{sum(t) / MIB:.0f}" for t in (row.sent.nvlink, row.sent.network))
            times = f"{row.communication:.2f}", f"{row.step:.2f}", f"{row.efficiency:.2f}"
            held = f"{row.tokens / MIB:.0f}"
            cells.append([str(D), f"{mark}{row.way}{mark}", *sent, *times, held, *beside])
    return timing.markdown(cells)


def best_ways(shape: Shape, layer_ms: float, machine: Machine) -> str:
    """Which way is fastest, by D, as ranges."""
    found: list[tuple[str, int, int]] = []
    for D in (2**i for i in range(1, shape.E.bit_length())):
        way = min(PREDICTED, key=lambda way: predict(shape, layer_ms, D, way, machine).step)
        if found and found[-1][0] == way:
            found[-1] = (way, found[-1][1], D)
        else:
            found.append((way, D, D))
    return "; ".join(
        f"{way} on {first}" + (f" to {last}" if last > first else "") for way, first, last in found
    )


def page(counts: Sequence[int], machine: Machine, results: Sequence[Mapping[str, Any]]) -> str:
    """All that ``--predict`` prints."""
    nominal = replace(
        machine,
        nvlink=machine.nvlink * REACHED,
        network=machine.network * REACHED,
        memory=machine.memory * REACHED,
    )
    used = fitted(results, nominal) if results else nominal
    basis = used.measured or (
        f"no result of several GPUs is recorded: these are {REACHED:.0%} of nominal bandwidths, "
        f"and {used.fixed / COLLECTIVES:.0f} us a collective"
    )
    text = [
        "# Predictions for more GPUs: not measured",
        f"`python -m benchmarks.parallel --predict {' '.join(map(str, counts))}`; "
        "`benchmarks/parallel_model.py` says how they follow. Experts are over D GPUs, and FSDP2 "
        "over the rest. Bold: the fastest of its D.",
        f"- {used.node} GPUs a node; in GB/s of a GPU in one direction NVLink {used.nvlink:.0f}, "
        f"network {used.network:.0f}, memory {used.memory:.0f}; fixed {used.fixed:.0f} us a step\n"
        f"- {basis}",
    ]
    for (name, recipe), ms in layer_times(results).items():
        shape = SHAPES[name]
        text += [
            f"## {name}, {recipe}: {ms:.3f} ms on one GPU for {shape.T} tokens, measured",
            f"Fastest: {best_ways(shape, ms, used)} GPUs.",
            table(shape, ms, counts, used),
        ]
    return "\n\n".join(text)
