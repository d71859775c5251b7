# SPDX-License-Identifier: Apache-2.0
"""torch.export and AOTInductor: an expert layer runs from Python, and from C++ without Python."""

import importlib.util
import os
import shlex
import subprocess
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType

import cmake
import ninja
import pytest
import torch
from torch import Tensor, nn
from torch._inductor import aoti_load_package

import grouped_linear
from grouped_linear import Float8BlockScaling, GroupedLinear, GroupedMLP
from grouped_linear.nn.lora import LoraWeights
from support.commands import MINUTES, run
from support.compare import assert_same_bits
from support.op_info import overload
from support.ops import OPS
from support.versions import aoti_reads_dtypes

EXAMPLE = Path(__file__).parent.parent / "examples" / "aoti"


class Build:
    """main.cpp, compiled while Python does something else."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "expert_layer"
        torch_path = f"-DTORCH_PATH={Path(torch.__file__).parent}"
        configure = shlex.join(["cmake", "-G", "Ninja", "-S", str(EXAMPLE), "-B", ".", torch_path])
        path = os.pathsep.join([cmake.CMAKE_BIN_DIR, ninja.BIN_DIR, os.environ["PATH"]])
        self.process = subprocess.Popen(
            f"{configure} && cmake --build .",
            shell=True,
            cwd=folder,
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @cached_property
    def output(self) -> str:
        return self.process.communicate(timeout=60 * MINUTES)[0]

    def run(self, *arguments: Path) -> subprocess.CompletedProcess[str]:
        """Run it without an environment, so without any Python that it could find."""
        assert self.process.wait(60 * MINUTES) == 0, self.output
        return run([self.program, *arguments], env={})


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    build = Build(tmp_path_factory.mktemp("build"))
    yield build
    build.process.kill()
    build.process.wait()


@pytest.fixture(scope="module")
def export() -> ModuleType:
    spec = importlib.util.spec_from_file_location("aoti_export", EXAMPLE / "export.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly
@aoti_reads_dtypes
@pytest.mark.parametrize("recipe", ["fp8"])
def test_expert_layer(
    recipe: str,
    device: str,
    build: Build,
    export: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    export.export(export.RECIPES[recipe], torch.device(device), tmp_path)  # compares with eager
    _, *rows = capsys.readouterr().out.splitlines()
    assert [int(row.split()[0]) for row in rows] == list(export.TOKENS) == [37, 300]

    examples = torch.load(tmp_path / "examples.pt", weights_only=True)
    compiled = aoti_load_package(str(tmp_path / "expert_layer.pt2"))
    for x, y in zip(examples[::2], examples[1::2], strict=True):
        assert_same_bits(compiled(x.to(device)).cpu(), y)
        assert not compiled(x[:0].to(device)).numel()
        assert_same_bits(compiled(x[:1].to(device)).cpu(), compiled(x.to(device)).cpu()[:1])

    done = build.run(grouped_linear.loading.library_path(), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "37 tokens: the bits that Python got\n300 tokens: the bits that Python got\n"
    )
    examples[3] += 1
    torch.save(examples, tmp_path / "examples.pt")
    done = build.run(grouped_linear.loading.library_path(), tmp_path)
    assert done.returncode == 1
    assert done.stdout.endswith("300 tokens: not the bits that Python got\n")


def test_weights_that_are_kept_quantized(device: str) -> None:
    """A program holds them as they are, and quantizes nothing; docs/compile.md packages one."""
    sizes = {"num_experts": 4, "hidden_size": 64, "intermediate_size": 128, "device": device}
    mlp = GroupedMLP(**sizes, recipe=Float8BlockScaling(), weights="fp8")

    def inputs(tokens: int) -> tuple[Tensor, ...]:
        scores, experts = torch.rand(tokens, 4, device=device).topk(2)
        return torch.randn(tokens, 64, device=device), scores, experts

    tokens = {0: torch.export.Dim.DYNAMIC}
    with torch.no_grad():
        shapes = {"x": tokens, "top_k_weights": tokens, "top_k_index": tokens}
        program = torch.export.export(mlp, inputs(33), dynamic_shapes=shapes)
        assert not any("quantize_weight" in str(node.target) for node in program.graph.nodes)
        for count in (33, 70, 1):
            given = inputs(count)
            assert_same_bits(program.module()(*given), mlp(*given))


@pytest.mark.nightly
def test_program_has_no_python_and_says_what_is_wrong(build: Build, tmp_path: Path) -> None:
    assert "usage" in build.run().stderr
    missing = build.run(tmp_path / "_C.so", tmp_path)
    assert missing.returncode == 1
    assert "cannot open shared object file" in missing.stderr
    nothing = build.run(grouped_linear.loading.library_path(), tmp_path)
    assert nothing.returncode == 1
    assert len(nothing.stderr.splitlines()) == 1  # no backtrace
    linked = run(["ldd", build.program], check=True)
    assert "libtorch_cpu.so" in linked.stdout
    assert "python.so" not in linked.stdout
    assert "libpython" not in linked.stdout


@pytest.mark.parametrize("strict", [False, True])
def test_a_named_number_of_rows_needs_no_bound(strict: bool) -> None:
    """Nor any other guard that torch.export would want to be told of."""
    layer = GroupedLinear(4, 64, 32)
    inputs = torch.randn(20, 64), torch.tensor([10, 0, 7, 3])
    sizes = {0: torch.export.Dim("rows", min=2)}, None
    program = torch.export.export(layer, inputs, dynamic_shapes=sizes, strict=strict)
    x, m_splits = torch.randn(7, 64), torch.tensor([3, 1, 0, 3])
    assert_same_bits(program.module()(x, m_splits), layer(x, m_splits))


class Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = GroupedMLP(4, 64, 32)

    def forward(self, x: Tensor, top_k_weights: Tensor, top_k_index: Tensor) -> Tensor:
        y: Tensor = self.mlp(x, top_k_weights, top_k_index, max_rows=x.size(0))
        return y


def test_nor_does_a_max_rows_that_follows_from_it() -> None:
    layer, given = Bounded(), (torch.randn(20, 64), *torch.rand(20, 4).topk(2))
    tokens = {0: torch.export.Dim("tokens", min=2)}
    program = torch.export.export(layer, given, dynamic_shapes=(tokens,) * 3)
    fewer = [t[:7] for t in given]
    assert_same_bits(program.module()(*fewer), layer(*fewer))


class Adapted(nn.Module):
    def forward(self, x: Tensor, weight: Tensor, m_splits: Tensor, lora: LoraWeights) -> Tensor:
        return grouped_linear.grouped_linear(x, weight, m_splits, lora=lora)


def test_a_saved_program_takes_factors(tmp_path: Path) -> None:
    lora = LoraWeights(torch.randn(2, 4, 32), torch.randn(2, 16, 4), 0.5)
    given = torch.randn(20, 32), torch.randn(2, 16, 32), torch.tensor([5, 15]), lora
    torch.export.save(torch.export.export(Adapted(), given), tmp_path / "adapted.pt2")
    program = torch.export.load(tmp_path / "adapted.pt2")
    assert_same_bits(program.module()(*given), Adapted()(*given))


@pytest.mark.parametrize("op", OPS)
def test_no_dtype_has_a_default_that_packages_could_not_hold(op: str) -> None:
    for argument in overload(op)._schema.arguments:
        if "ScalarType" in str(argument.real_type):
            assert argument.default_value is None, argument
