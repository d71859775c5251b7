"""Run a model's experts on random rows, and compare with SwiGLU in float32.

The names of experts' parameters are only a guess at what they compute.

R rows, E experts, H features of a token, F features inside an expert.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import silu

#: ``run(x [E, R, H], gate, up, down)``: the experts' outputs, with these weights for their own.
Run = Callable[..., Tensor]


def run_each(experts: nn.ModuleList, names: Sequence[str]) -> Run:
    """Experts that are a module each, with parameters of these names."""

    def run(x_ERH: Tensor, *weights: Tensor) -> Tensor:
        y = [
            functional_call(expert, dict(zip(names, own, strict=True)), x_RH)
            for expert, x_RH, *own in zip(experts, x_ERH, *weights, strict=True)
        ]
        return torch.stack(y)

    return run


def run_sorted(experts: nn.Module, names: Sequence[str]) -> Run:
    """Experts in one module, called as (sorted rows, rows of each expert)."""

    def run(x_ERH: Tensor, *weights: Tensor) -> Tensor:
        E, R, _ = x_ERH.shape
        counts_E = torch.full((E,), R, dtype=torch.int32, device=x_ERH.device)
        args = x_ERH.flatten(0, 1), counts_E
        y: Tensor = functional_call(experts, dict(zip(names, weights, strict=True)), args)
        return y.view(x_ERH.shape)

    return run


def device_to_run_on(p: Tensor) -> torch.device:
    """The parameter's device. For the meta device a GPU if there is one: some experts need it."""
    if not p.is_meta:
        return p.device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextmanager
def _in_training(model: nn.Module) -> Iterator[None]:
    """Training mode, so that dropout is noticed; each module's own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _is_usable(weight_ENK: Tensor) -> bool:
    """Whether each expert's weight is finite and not all zeros, so that a comparison says much."""
    largest_E = weight_ENK.abs().amax(dim=(1, 2))
    return bool((largest_E.isfinite() & (largest_E > 0)).all())


@torch.no_grad()
def check_swiglu(
    where: str, experts: nn.Module, run: Run, gate_EFH: Tensor, up_EFH: Tensor, down_EHF: Tensor
) -> None:
    """Raise ValueError unless each expert computes ``down(silu(gate(x)) * up(x))``."""
    E, F, H = gate_EFH.shape
    dtype, device, on_meta = gate_EFH.dtype, device_to_run_on(gate_EFH), gate_EFH.is_meta
    weights = [gate_EFH, up_EFH, down_EHF]
    if on_meta:  # small weights of all experts: the computation does not depend on sizes
        F, H = 48, 32
    if on_meta or not all(map(_is_usable, weights)):
        shapes = (F, H), (F, H), (H, F)
        weights = [torch.randn(E, N, K, dtype=dtype, device=device) / K**0.5 for N, K in shapes]
    gate, up, down = (w.float().mT for w in weights)
    rows = 4  # of each magnitude: a single row may be mostly rounding error
    with _in_training(experts):
        x_ERH = torch.randn(E, 16 * rows, H, dtype=dtype, device=device)
        # Gates of 0.1 to 30: activations differ for small ones, clamps act on large ones.
        magnitude_R1 = torch.logspace(-1, 1.5, 16, device=device).repeat_interleave(rows)[:, None]
        spread_E11 = (x_ERH.float() @ gate).std(dim=(1, 2), keepdim=True)
        x_ERH = (x_ERH * magnitude_R1 / spread_E11).to(dtype)
        try:
            actual = run(x_ERH, *weights).float()
        except Exception as error:
            if not on_meta:
                raise
            raise ValueError(
                f"{where}: parameters are on the meta device, and small ones in their place do not "
                "run: convert when they have values"
            ) from error
    expected = (silu(x_ERH.float() @ gate) * (x_ERH.float() @ up)) @ down
    by_magnitude = E, 16, rows * H
    distance = (actual - expected).view(by_magnitude).norm(dim=2)
    difference = distance / expected.view(by_magnitude).norm(dim=2)
    # Experts may round to bf16 four times, by at most 2^-9 each. Sums of few terms may cancel.
    if not difference.max() < 2.0**-5:
        raise ValueError(
            f"{where}: experts do not compute down(silu(gate(x)) * up(x)): they are "
            f"{difference.max():.1%} off"
        )
