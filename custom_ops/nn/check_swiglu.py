# SPDX-License-Identifier: Apache-2.0
"""Run an expert on random rows, and compare with SwiGLU in float32.

The names of its parameters are only a guess at its formula.

R rows, H features of a token, F features inside an expert.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear

ROWS = 4  # for each magnitude: a single row may be mostly rounding error
MAGNITUDES = 16
# Rounding as _swiglu does explains an error; experts may round in other places, and more often.
ROUNDINGS = 3.0


@torch.no_grad()
def check_swiglu(op: str, expert: nn.Module, names: Sequence[str]) -> None:
    """Raise ValueError unless a module with the weights ``names``, gate, up and down, is SwiGLU.

    It runs in training mode, so that dropout is noticed. Weights without useful values, as zeros,
    NaN and those on the meta device, run with random ones in their place, of meta with small ones:
    the computation does not depend on sizes.
    """
    weights: Sequence[Tensor] = [expert.get_parameter(name).detach() for name in names]
    on_meta, device, dtype = weights[0].is_meta, weights[0].device, weights[0].dtype
    if on_meta:  # on a GPU if there is one: some experts need it
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    modes = {module: module.training for module in expert.modules()}
    expert.train()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            other = {}
            largest = [0.0 if on_meta else float(w.abs().max()) for w in weights]
            if not all(0 < w < torch.inf for w in largest):
                F, H = (48, 32) if on_meta else weights[0].shape
                shapes = (F, H), (F, H), (H, F)
                weights = [
                    torch.randn(s, dtype=dtype, device=device) / (s[-1] ** 0.5) for s in shapes
                ]
                other = dict(zip(names, weights, strict=True))
            x_RH = _rows(weights[0])
            y_RH: Tensor = functional_call(expert, other, x_RH).float()
    except Exception as error:
        if not on_meta:
            raise
        raise ValueError(
            f"{op}: parameters are on the meta device, and small ones in their place do not run: "
            "convert when they have values"
        ) from error
    finally:
        for module, training in modes.items():
            module.training = training
    bits = 8 if dtype == torch.bfloat16 else 11  # float32 GEMMs may be in TF32
    expected_RH = _swiglu(x_RH, weights, None)
    off_M = _relative(y_RH, expected_RH)
    explained_M = _relative(_swiglu(x_RH, weights, bits), expected_RH)
    excess, i = (off_M / explained_M).nan_to_num(torch.inf, torch.inf).max(dim=0)
    if not excess < ROUNDINGS:
        raise ValueError(
            f"{op}: experts do not compute down(silu(gate(x)) * up(x)): they are {off_M[i]:.2%} "
            f"off, and rounding explains {explained_M[i]:.2%}"
        )


def _rows(gate: Tensor) -> Tensor:
    """Rows with gates of 0.1 to 30: activations differ for small ones, clamps act on large ones."""
    device = gate.device
    x_RH = torch.randn(MAGNITUDES * ROWS, gate.size(1), device=device, dtype=gate.dtype)
    magnitude_R = torch.logspace(-1, 1.5, MAGNITUDES, device=device).repeat_interleave(ROWS)
    spread = linear(x_RH.float(), gate.float()).std()
    return (x_RH * magnitude_R[:, None] / spread).to(x_RH.dtype)


def _rounded(t: Tensor, bits: int | None) -> Tensor:
    """In float32, to this many significant bits whatever the exponent is; None for all."""
    if bits is None:
        return t.float()
    fraction, exponent = t.float().frexp()
    return fraction.ldexp(t.new_tensor(bits)).round().ldexp(exponent - bits)


def _swiglu(x_RH: Tensor, weights: Sequence[Tensor], bits: int | None) -> Tensor:
    """SwiGLU in float32, with each operand and result rounded."""
    rounded = partial(_rounded, bits=bits)
    x, gate_w, up_w, down_w = map(rounded, (x_RH, *weights))
    gate, up = rounded(linear(x, gate_w)), rounded(linear(x, up_w))
    h = rounded(rounded(gate * rounded(gate.sigmoid())) * up)
    return rounded(linear(h, down_w))


def _relative(y_RH: Tensor, expected_RH: Tensor) -> Tensor:
    """The error of the rows of each magnitude beside their norm."""
    error_M = (y_RH - expected_RH).view(MAGNITUDES, -1).norm(dim=1)
    return error_M / expected_RH.view(MAGNITUDES, -1).norm(dim=1)
