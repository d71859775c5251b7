# SPDX-License-Identifier: Apache-2.0
"""How far are FP8's gradients from the exact ones, beside the noise of a batch?

    python -m benchmarks.gradient_error
    python -m benchmarks.gradient_error --tokens 1e6   # early in training
    python -m benchmarks.gradient_error --modes bf16 fp8 --home 4 0  # if rows came home in FP8

The model of benchmarks.convergence learns in BF16. Then every mode computes the gradients of the
same batches from the same weights, and so does float32. Losses of many runs differ by chance, these
differences do not. With batches b = 1 ... B, a mode's gradients g_b and float32's r_b:

    of a batch = sqrt(sum |g_b - r_b|^2 / sum |r_b|^2)
    of the mean = |sum (g_b - r_b)| / |sum r_b|

Rounding that is random vanishes from a mean of many batches; what leans to one side stays in it.

`--home D` has each mode again with its experts on D processes, whose sums of a token's rows come
home in 16 bits, as they do, and in e4m3: outputs in the forward, gradients of x in the backward.
One process computes it all. With D = 0 each expert's row comes home by itself.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.convergence import MODES, SCALES, Learner, Scale, Training, new_model
from benchmarks.convergence_report import LABELS
from benchmarks.python_source import Corpus, corpus
from grouped_linear import ops
from grouped_linear.autograd.routing import ChosenRows, sum_of_rows
from grouped_linear.contrib import watch

LEARNS_IN = "bf16"
COMPARED = (
    *("bf16", "fp8", "bf16_wgrad", "bf16_input", "bf16_weight", "bf16_grad_output"),
    *("e5m2_grad_output", "bf16_ends"),
)
Gradients = dict[str, Tensor]


class Distance(NamedTuple):
    """From the exact gradients, beside their size."""

    of_batch: float
    of_mean: float


def gradients(learner: Learner, batches: Iterable[Tensor]) -> Iterator[Gradients]:
    """Of each batch, by the names of parameters."""
    for ids_BS in batches:
        learner.model.zero_grad()
        learner(ids_BS)[0].backward()
        yield {name: p.grad for name, p in learner.model.named_parameters()}


class Exact(NamedTuple):
    """Float32's gradients of each batch, and their sizes in each part of the parameters."""

    of_batches: Sequence[Gradients]
    total: Gradients
    parts: Mapping[str, Sequence[str]]
    size_of_batches: Sequence[float]
    size_of_total: Sequence[float]

    @classmethod
    def of(cls, of_batches: Sequence[Gradients], parts: Mapping[str, Sequence[str]]) -> "Exact":
        total = {name: torch.stack([e[name] for e in of_batches]).sum(0) for name in of_batches[0]}
        sizes = [size([norm(e, names) for e in of_batches]) for names in parts.values()]
        sizes_of_total = [float(norm(total, names)) for names in parts.values()]
        return cls(of_batches, total, parts, sizes, sizes_of_total)


def exact_gradients(scale: Scale, weights: Any, batches: Sequence[Tensor]) -> list[Gradients]:
    """In float32, by transformers' experts one after the other."""
    model: Any = new_model(scale, 0, batches[0].device)
    model.load_state_dict(weights)
    model.set_experts_implementation("eager")
    return list(gradients(Learner(model, compiled=False, autocast=False), batches))


def distances(of_batches: Iterable[Gradients], exact: Exact) -> list[Distance]:
    """Of each part of the parameters."""
    errors = [list[Tensor]() for _ in exact.parts]
    sums: Gradients = {}
    for given, right in zip(of_batches, exact.of_batches, strict=True):
        difference = {name: given[name] - right[name] for name in right}
        for error, names in zip(errors, exact.parts.values(), strict=True):
            error.append(norm(difference, names))
        sums = {name: sums[name] + d for name, d in difference.items()} if sums else difference
    sizes = zip(exact.size_of_batches, exact.size_of_total, strict=True)
    return [
        Distance(size(error) / of_batch, float(norm(sums, names)) / of_total)
        for error, names, (of_batch, of_total) in zip(
            errors, exact.parts.values(), sizes, strict=True
        )
    ]


def in_e4m3(rows_TH: Tensor) -> Tensor:
    """Each 128 features of a row by a power of two to e4m3, and back."""
    offs_1 = torch.full((1,), len(rows_TH), dtype=torch.int32, device=rows_TH.device)
    q, scale, *_ = ops.group_quantize(rows_TH, offs_1)
    assert q is not None
    assert scale is not None
    return ops.group_dequantize(q, scale, offs_1, rows_TH.dtype)


@contextmanager
def home_from(processes: int, fp8: bool) -> Iterator[None]:
    """Sum a token's rows first in each of so many processes, and round each sum; 0: each row."""
    combine = ChosenRows.combine

    def combine_at_home(self: ChosenRows, y_RH: Tensor, weight_TC: Tensor | None) -> Tensor:
        E, (T, C) = len(self.offs), self.row.shape
        if processes:  # whose experts lie side by side
            place_TC = torch.searchsorted(self.offs, self.row, right=True) * processes // E
        else:
            place_TC = torch.arange(C, device=y_RH.device).expand(T, C)
        weight_TC = torch.ones_like(self.row).float() if weight_TC is None else weight_TC
        total_TH = torch.zeros_like(y_RH[:1], dtype=torch.float32)
        for place in range(processes or C):
            sum_TH = sum_of_rows(y_RH, self.row, weight_TC * (place_TC == place), self.offs)
            total_TH = total_TH + (in_e4m3(sum_TH) if fp8 else sum_TH)
        return total_TH.to(y_RH.dtype)

    ChosenRows.combine = combine_at_home  # type: ignore[method-assign]
    try:
        yield
    finally:
        ChosenRows.combine = combine  # type: ignore[method-assign]


def noise(exact: Exact) -> list[Distance]:
    """From the mean of all possible batches, estimated by these."""
    B, found = len(exact.of_batches), []
    sizes = zip(exact.size_of_batches, exact.size_of_total, strict=True)
    for names, (of_batch, of_total) in zip(exact.parts.values(), sizes, strict=True):
        means = {name: exact.total[name] / B for name in names}
        apart = [norm({n: e[n] - means[n] for n in names}, names) for e in exact.of_batches]
        deviation = size(apart) / (B - 1) ** 0.5  # of a batch
        found.append(Distance(deviation * B**0.5 / of_batch, deviation * B**0.5 / of_total))
    return found


def norm(of: Gradients, names: Sequence[str]) -> Tensor:
    return torch.stack([of[name].double().norm() for name in names]).norm()


def size(norms: Sequence[Tensor]) -> float:
    return float(torch.stack(list(norms)).norm())


def counts(training: Training, ids_BS: Tensor) -> list[list[str]]:
    """What FP8 does to the operands of each role: means over the layers."""
    seen = watch(training.model, rows=None)
    next(gradients(training.forward, [ids_BS]))
    read = seen.step()
    seen.remove()
    assert read is not None
    cells = [["operand of", "role", "became zero, %", "saturated, %", "mean square of the error"]]
    found = {(row.layer.rsplit(".", 1)[-1], row.role): list[Any]() for row in read.operands}
    for row in read.operands:
        found[row.layer.rsplit(".", 1)[-1], row.role].append(row)
    for key, rows in found.items():
        underflow, saturated, error = (
            mean(getattr(row, column) for row in rows)
            for column in ("underflow", "saturated", "error")
        )
        cells.append([*key, f"{100 * underflow:.3f}", f"{100 * saturated:.3f}", f"{error:.1e}"])
    return cells


def measure(options: argparse.Namespace, scale: Scale, data: Corpus, device: torch.device) -> str:
    """Two tables: gradients by mode, and what FP8 does to operands."""
    tokens = int(options.tokens)
    learner = Training(LEARNS_IN, scale, device, data, options.compile)
    learner.run(0, tokens)
    weights = {name: p.detach().clone() for name, p in learner.model.state_dict().items()}
    # Of another order than the run's, and pieces of the training text: what a step would read.
    batches = list(islice(learner.batches(1, options.batches), options.batches))
    names = [name for name, _ in learner.model.named_parameters()]
    parts = {part: [name for name in names if f".{part}" in name] for part in options.parts}
    found = {name for part in parts.values() for name in part}
    parts["everything else"] = [name for name in names if name not in found]
    del learner
    exact = Exact.of(exact_gradients(scale, weights, batches), parts)
    measures = [f"{part}: {of}" for part in parts for of in ("of a batch, %", "of the mean, %")]
    cells, operands = [["", *measures]], list[list[str]]()

    def add(label: str, found: Sequence[Distance]) -> None:
        cells.append([label, *(f"{100 * x:.2f}" for distance in found for x in distance)])
        print(*cells[-1], sep="  ", flush=True)

    add("another batch", noise(exact))
    for mode in options.modes:
        training = Training(mode, scale, device, data, compiled=False)
        training.model.load_state_dict(weights)
        add(LABELS[mode], distances(gradients(training.forward, batches), exact))
        for D, fp8 in product(options.home, (False, True)):
            of = f"{D} processes" if D else "each row"
            with home_from(D, fp8):
                given = distances(gradients(training.forward, batches), exact)
            add(f"{LABELS[mode]}; {of}, {'e4m3' if fp8 else '16 bits'}", given)
        if mode == "fp8":
            operands = counts(training, batches[0])
        del training
    return "\n\n".join(timing.markdown(table) for table in (cells, operands) if table)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gradient_error", description=(__doc__ or "").splitlines()[0]
    )
    option = parser.add_argument
    option("--modes", nargs="+", choices=MODES, default=COMPARED)
    option("--home", nargs="*", type=int, default=[], help="numbers of processes; 0: each row")
    option("--parts", nargs="*", default=["experts"], help="of parameters, by their names")
    option("--tokens", type=float, default=20e6, help="that the model learns from (default: 20e6)")
    option("--batches", type=int, default=16)
    option("--scale", choices=SCALES, default="small")
    option("--size", nargs="*", default=[], help="another size of the model, as hidden_size=2048")
    option("--text", type=int, help="characters of the corpus (default: all)")
    option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    option("--compile", action=argparse.BooleanOptionalAction, default=True)
    option("--output-dir", type=Path, default=timing.RESULTS)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    scale = SCALES[options.scale]
    other_sizes = {name: int(size) for name, size in (o.split("=") for o in options.size)}
    scale = replace(scale, sizes=scale.sizes | other_sizes)
    data = corpus(scale.sizes["vocab_size"], options.text or scale.text)
    tables = measure(options, scale, data, device)
    about = (
        f"After {options.tokens / 1e6:g} M tokens in BF16: the distance of each mode's gradients "
        f"from float32's, over {options.batches} batches of {scale.batch} x {scale.context} "
        f"tokens, in percent of their size. {data.about[0]}."
    )
    text = timing.page("Gradients beside float32's", about, "gradient_error", device, tables)
    print(text)
    name = f"gradient_error_{options.tokens / 1e6:g}M_{timing.slug(device)}.md"
    (options.output_dir / name).write_text(text)


if __name__ == "__main__":
    main()
