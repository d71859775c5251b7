# SPDX-License-Identifier: Apache-2.0
"""Run a model's experts on random rows, and compare with SwiGLU in float32.

The names of experts' parameters are only a guess at their formula.

R rows, E experts, H features of a token, F features inside an expert.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grouped_linear.ops.activation import PLAIN, SwiGLU

ROWS = 4  # for each magnitude: a single row may be mostly rounding error
MAGNITUDES = 16
# Rounding as _swiglu does explains an error; experts may round in other places, and more often.
ROUNDINGS = 3.0


class Expert(NamedTuple):
    """The parameters of one expert."""

    gate: Tensor  # [F, H]
    up: Tensor  # [F, H]
    down: Tensor  # [H, F]
    gate_bias: Tensor | None = None  # [F]
    up_bias: Tensor | None = None  # [F]
    down_bias: Tensor | None = None  # [H]


#: ``run(x [E, R, H], stand_ins)``: the outputs of the experts of a module, which compute with their
#: parameters, or with the stand-ins where these are not None.
Run = Callable[[Tensor, Sequence[Expert] | None], Tensor]


def _device_to_run_on(p: Tensor) -> torch.device:
    """The parameter's device. For the meta device a GPU if there is one: some experts need it."""
    if not p.is_meta:
        return p.device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextmanager
def _in_training(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Training mode, so that dropout is noticed; modes and generators are restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def _is_usable(expert: Expert) -> bool:
    """Whether each weight is finite and not all zeros, so that outputs show the formula."""
    largest = torch.stack([w.abs().amax().float() for w in expert[:3]])
    return bool((largest.isfinite() & (largest > 0)).all())


def _random_like(expert: Expert, F: int, H: int) -> Expert:
    """An expert of other sizes, with the same parameters."""
    shapes = (F, H), (F, H), (H, F), (F,), (F,), (H,)
    like: dict[str, Any] = {"dtype": expert.gate.dtype, "device": _device_to_run_on(expert.gate)}
    return Expert._make(
        None if p is None else torch.randn(shape, **like) / (shape[-1] ** 0.5)
        for p, shape in zip(expert, shapes, strict=True)
    )


def _rounded(t: Tensor, bits: int | None) -> Tensor:
    """In float32, to this many significant bits whatever the exponent is; None for all."""
    if bits is None:
        return t.float()
    fraction, exponent = t.float().frexp()
    return fraction.ldexp(t.new_tensor(bits)).round().ldexp(exponent - bits)


def _rows(expert: Expert) -> Tensor:
    """Rows with gates of 0.1 to 30: activations differ for small ones, clamps act on large ones."""
    H, device = expert.gate.size(1), expert.gate.device
    x_RH = torch.randn(MAGNITUDES * ROWS, H, device=device, dtype=expert.gate.dtype)
    magnitude_R = torch.logspace(-1, 1.5, MAGNITUDES, device=device).repeat_interleave(ROWS)
    spread = _linear(x_RH, expert.gate, expert.gate_bias).std()
    return (x_RH * magnitude_R[:, None] / spread).to(x_RH.dtype)


def _linear(x_RK: Tensor, w_NK: Tensor, bias_N: Tensor | None, bits: int | None = None) -> Tensor:
    bias_N = None if bias_N is None else _rounded(bias_N, bits)
    y_RN = nn.functional.linear(_rounded(x_RK, bits), _rounded(w_NK, bits), bias_N)
    return _rounded(y_RN, bits)


def _swiglu(x_RH: Tensor, expert: Expert, activation: SwiGLU, bits: int | None = None) -> Tensor:
    """SwiGLU in float32, with each operand and result rounded."""
    rounded = partial(_rounded, bits=bits)
    gate = _linear(x_RH, expert.gate, expert.gate_bias, bits)
    up = _linear(x_RH, expert.up, expert.up_bias, bits)
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    x = rounded(activation.alpha * (gate + activation.cubic * gate**3))
    h = rounded(rounded(gate * rounded(x.sigmoid())) * rounded(up + activation.beta))
    return _linear(h, expert.down, expert.down_bias, bits)


def _outputs(
    where: str, module: nn.Module, run: Run, experts: Sequence[Expert]
) -> tuple[Sequence[Expert], Tensor, Tensor]:
    """Run experts on random rows: the experts that ran, their rows and their outputs in float32.

    Those whose parameters have no useful values run with random ones in their place.
    """
    gate, on_meta = experts[0].gate, experts[0].gate.is_meta
    with _in_training(module, _device_to_run_on(gate)):
        stand_ins = None
        if on_meta or not all(map(_is_usable, experts)):
            # On meta small weights of all experts: the computation does not depend on sizes.
            F, H = (48, 32) if on_meta else gate.shape
            stand_ins = experts = [_random_like(expert, F, H) for expert in experts]
        x_ERH = torch.stack([_rows(expert) for expert in experts])
        try:
            return experts, x_ERH, run(x_ERH, stand_ins).float()
        except Exception as error:
            if not on_meta:
                raise
            raise ValueError(
                f"{where}: parameters are on the meta device, and small ones in their place do not "
                "run: convert when they have values"
            ) from error


@torch.no_grad()
def check_swiglu(
    where: str,
    module: nn.Module,
    run: Run,
    experts: Sequence[Expert],
    activation: SwiGLU = PLAIN,
    *,
    in_bfloat16: bool = False,
) -> None:
    """Raise ValueError unless each expert computes SwiGLU; in float32 there is never more than one.

    ``in_bfloat16`` says that experts may compute in bfloat16 whatever their parameters' dtype is.
    """
    experts, x_ERH, actual = _outputs(where, module, run, experts)
    in_bfloat16 = in_bfloat16 or experts[0].gate.dtype == torch.bfloat16
    bits = 8 if in_bfloat16 else 11  # float32 GEMMs may be in TF32
    most_off, most_explained, worst = 0.0, 0.0, 0.0
    for x_RH, y_RH, expert in zip(x_ERH, actual, experts, strict=True):
        expected = _swiglu(x_RH, expert, activation)
        off = _relative(y_RH, expected)
        explained = _relative(_swiglu(x_RH, expert, activation, bits), expected)
        excess, i = (off / explained).nan_to_num(torch.inf, torch.inf).max(dim=0)
        if not excess < worst:
            worst, most_off, most_explained = (float(t) for t in (excess, off[i], explained[i]))
    if not worst < ROUNDINGS:
        plain = activation in (PLAIN, SwiGLU(interleaved=True))
        formula = "down(silu(gate(x)) * up(x))" if plain else f"down of {activation}"
        raise ValueError(
            f"{where}: experts do not compute {formula}: they are {most_off:.2%} off, "
            f"and rounding explains {most_explained:.2%}"
        )


def _relative(y_RH: Tensor, expected_RH: Tensor) -> Tensor:
    """The error of the rows of each magnitude beside their norm."""
    error_M = (y_RH - expected_RH).view(MAGNITUDES, -1).norm(dim=1)
    return error_M / expected_RH.view(MAGNITUDES, -1).norm(dim=1)
