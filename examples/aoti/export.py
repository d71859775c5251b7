# SPDX-License-Identifier: Apache-2.0
"""Compile an expert layer ahead of time, for programs with and without Python.

T tokens, E experts, C experts chosen for a token, R = T * C routed rows, D width, F
expert width.

Writes `expert_layer.pt2`, the compiled layer for any number of tokens, and
`examples.pt`, a list x, y, x, y, ... of inputs and what the layer makes of them::

    python examples/aoti/export.py --recipe fp8 --output-dir build/aoti

On a GPU, or with --device cuda, it compiles for the GPU, and the program then runs
there.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package, aoti_load_package

from grouped_linear import Float8BlockScaling, GroupedLinear, Recipe

RECIPES: dict[str, Recipe] = {"bf16": None, "fp8": Float8BlockScaling()}
EXPERTS, CHOSEN, WIDTH, EXPERT_WIDTH = 8, 2, 64, 96
TOKENS = (37, 300)  # two of the many numbers of tokens that one package serves
CLOSE = (
    0.02  # beside eager, relative: Inductor keeps float32 where eager rounds to bf16
)


class ExpertLayer(nn.Module):
    """Routes each token to a few experts, each a SwiGLU, and adds up what they give."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.gate_up = GroupedLinear(
            EXPERTS, WIDTH, 2 * EXPERT_WIDTH, bias=False, recipe=recipe
        )
        self.down = GroupedLinear(
            EXPERTS, EXPERT_WIDTH, WIDTH, bias=False, recipe=recipe
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        score_TE = self.router(x_TD).float().softmax(dim=-1)
        weight_TC, expert_TC = score_TE.topk(CHOSEN, dim=-1)
        expert_R = expert_TC.flatten()
        order_R = expert_R.argsort(stable=True)  # routed rows, sorted by expert
        m_splits_E = (
            expert_R[:, None] == torch.arange(EXPERTS, device=x_TD.device)
        ).sum(0)
        gate_RF, up_RF = self.gate_up(x_TD[order_R // CHOSEN], m_splits_E).chunk(
            2, dim=-1
        )
        y_RD = self.down(F.silu(gate_RF) * up_RF, m_splits_E)
        y_TCD = y_RD[order_R.argsort()].unflatten(0, (-1, CHOSEN))
        return (y_TCD * weight_TC[..., None]).sum(dim=1).to(x_TD.dtype)


@torch.no_grad()
def export(recipe: Recipe, device: torch.device, folder: Path) -> None:
    """Write the package and its examples, and compare the package with eager."""
    torch.manual_seed(0)
    layer = ExpertLayer(recipe).to(device, torch.bfloat16).eval()
    inputs = [
        torch.randn(T, WIDTH, device=device, dtype=torch.bfloat16) for T in TOKENS
    ]
    tokens = {"x_TD": {0: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(layer, (inputs[0],), dynamic_shapes=tokens)
    folder.mkdir(parents=True, exist_ok=True)
    package = folder / "expert_layer.pt2"
    compiled = aoti_load_package(
        aoti_compile_and_package(program, package_path=str(package))
    )
    examples = []
    print(f"{'tokens':>8}{'away from eager':>20}")
    for x_TD in inputs:
        y_TD, eager_TD = compiled(x_TD), layer(x_TD)
        distance = float((y_TD - eager_TD).float().norm() / eager_TD.float().norm())
        print(f"{len(x_TD):8}{distance:20.1e}")
        if not distance < CLOSE:
            raise SystemExit(f"{package} does not compute what the layer does")
        examples += [
            x_TD.clone().cpu(),
            y_TD.cpu(),
        ]  # clone: torch.export left a note on x
    torch.save(examples, folder / "examples.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", choices=RECIPES, default="fp8")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--output-dir", type=Path, default=Path("build/aoti"))
    args = parser.parse_args()
    export(RECIPES[args.recipe], torch.device(args.device), args.output_dir)


if __name__ == "__main__":
    main()
