# SPDX-License-Identifier: Apache-2.0
"""How long does an expert layer take for few tokens, as in generation?

    python -m benchmarks.bench_decode

`GroupedMLP.forward` without gradients, as one CUDA graph with a cold L2 cache, for tokens that
choose random experts. Beside it the time in which the bytes of the weights of the chosen experts
are read once, at the speed of the fastest of some large copies in the same run, of which read and
written bytes count. Where sglang is installed, its fused experts in Triton take turns in BF16 and
FP8, given the same weights and routing, after their results were compared; a line says where they
failed.

With --write the rows replace those of the same cases in benchmarks/results/.
"""

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import alternatives, timing
from grouped_linear import Float8BlockScaling, GroupedMLP, SwiGLU

BF16 = torch.bfloat16
DEVICE = torch.device("cuda")
TOKENS = (1, 4, 16, 64, 256)
COPIED = tuple(n << 20 for n in (256, 384, 512, 768, 1024))  # bytes, read and written


class Size(NamedTuple):
    """A layer: experts, features of a token and inside an expert, experts a token, and options."""

    E: int
    H: int
    F: int
    top: int
    options: dict[str, Any]


SIZES = {
    "qwen3_30b": Size(128, 2048, 768, 8, {}),
    "gptoss_120b": Size(
        128,
        2880,
        2880,
        4,
        {"bias": True, "activation": SwiGLU(alpha=1.702, beta=1.0, limit=7.0, interleaved=True)},
    ),
}
#: The weights' form: a layer's options, and bytes of 128 x 128 numbers with their scales.
FORMS: dict[str, tuple[dict[str, Any], int]] = {
    "bf16": ({}, 2 * 128 * 128),
    "fp8": ({"recipe": Float8BlockScaling(), "weights": "fp8"}, 128 * 128 + 4),
    "mxfp4": ({"weights": "mxfp4"}, 128 * 128 // 2 + 128 * 4),
}


def layer_of(size: Size, form: str) -> GroupedMLP:
    torch.manual_seed(0)
    options = size.options | FORMS[form][0]
    return GroupedMLP(size.E, size.H, size.F, dtype=BF16, device=DEVICE, **options)


def tokens_of(size: Size, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, and the weights and numbers of each token's experts."""
    generator = torch.Generator(DEVICE).manual_seed(tokens)
    x = torch.randn(tokens, size.H, generator=generator, dtype=BF16, device=DEVICE)
    scores = torch.rand(tokens, size.E, generator=generator, device=DEVICE)
    return x, *scores.softmax(dim=-1).topk(size.top)


def call_of(layer: GroupedMLP, given: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    @torch.no_grad()
    def call() -> Tensor:
        y: Tensor = layer(*given)
        return y

    return call


def triton_of(layer: GroupedMLP, given: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    """SGLang's experts over the layer's own weights; it chooses its tuned configuration itself."""
    (x, weights, experts), run = given, alternatives.sglang_experts()
    ids = experts.int()
    w1, w2 = layer.gate_up_proj.data, layer.down_proj.data
    up, down = map(layer.frozen_weight, ("gate_up_proj", "down_proj"))
    options: dict[str, Any] = {"filter_expert": False}  # all experts are here
    if up is not None and down is not None:
        w1, w2 = up.values, down.values
        options |= {"use_fp8_w8a8": True, "w1_scale": up.scale, "w2_scale": down.scale}
        options["block_shape"] = [128, 128]
    return lambda: run(x, w1, w2, weights, ids, **options)


def check(form: str, y: Tensor, expected: Tensor) -> None:
    """A fast wrong layer is no result. In FP8 each rounds rows by itself: 4 to 5% of float32's."""
    error = (y - expected).float().norm() / expected.float().norm()
    if not error <= (2**-3 if form == "fp8" else 2**-6):
        raise ValueError(f"its results are {error:.1%} from ours")


def beside(layer: GroupedMLP, form: str, given: tuple[Tensor, ...]) -> Callable[[], Tensor] | str:
    """SGLang's call, once it has run, agreed and been timed; or a line that says what failed."""
    try:
        triton = triton_of(layer, given)
        check(form, triton(), call_of(layer, given)())
        timing.time_paired({"": triton}, DEVICE, rounds=1)
    except Exception as error:  # Triton's errors have no base class of their own
        return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
    return triton


def bytes_of(size: Size, form: str, experts: Tensor) -> int:
    chosen = experts.unique().numel()
    return round(chosen * 3 * size.H * size.F * FORMS[form][1] / (128 * 128))


COLUMNS = ("layer", "form", "tokens", "us", "low", "high", "bytes_us", "of_bytes", "commit")
HOW = (
    "GroupedMLP.forward without gradients, one CUDA graph, cold L2, random experts; medians and "
    "quartiles, microseconds.\nbytes_us: the weights of the chosen experts at the speed of a copy "
    "in the same run."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="to benchmarks/results/")
    options = parser.parse_args()
    copies = {str(size): timing.copy_of(size, DEVICE) for size in COPIED}
    times = timing.time_paired(copies, DEVICE)
    speed = max(int(size) / t.microseconds.median for size, t in times.items())  # bytes a us
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {speed / 1e6:.2f} TB/s")
    print("| layer | form | tokens | us | low | high | bytes, us | of bytes |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    rows, notes = [], [HOW]
    for name in options.layers:
        size = SIZES[name]
        for form in options.forms:
            layer = layer_of(size, form)
            calls, floors = {}, {}
            for tokens in options.tokens:
                given = tokens_of(size, tokens)
                calls[f"{form} {tokens}"] = call_of(layer, given)
                floors[str(tokens)] = bytes_of(size, form, given[2]) / speed
                if form == "mxfp4" or size.options or not find_spec("sglang"):
                    continue
                triton = beside(layer, form, given)
                if isinstance(triton, str):
                    notes.append(f"Triton left out of {name}, {form}, {tokens} tokens: {triton}")
                    print(notes[-1], flush=True)
                else:
                    calls[f"{form} triton {tokens}"] = triton
            for call, measured in timing.time_paired(calls, DEVICE, options.rounds).items():
                whose, n = call.rsplit(" ", 1)
                us, floor = measured.microseconds, floors[n]
                cells = [f"{t:.1f}" for t in (us.median, us.low, us.high, floor)]
                row = (name, whose, n, *cells, f"{floor / us.median:.2f}")
                print(f"| {' | '.join(row)} |", flush=True)
                rows.append((*row, timing.git_commit()))
            del layer, calls
    if options.write:
        timing.replace_rows("bench_decode", COLUMNS, rows, "\n".join(notes), same=3)


if __name__ == "__main__":
    main()
