# SPDX-License-Identifier: Apache-2.0
"""``python -m grouped_linear``: what is installed, and whether a layer runs on each device."""

import importlib.util
import os
import runpy
import sys

import pytest
import torch

import grouped_linear
from grouped_linear import report
from support.commands import run
from support.devices import needs_gpu


def printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> str:
    monkeypatch.setattr("sys.argv", ["grouped_linear", *options])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("grouped_linear", run_name="__main__")
    return capsys.readouterr().out


def test_command_prints_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(monkeypatch, capsys)
    rows = {line[:17].strip(): line[17:] for line in out.splitlines()}
    assert rows["grouped_linear"] == grouped_linear.__version__
    assert rows["library"] == str(grouped_linear.loading.library_path())
    assert rows["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert rows["torch"].startswith(torch.__version__)
    if importlib.util.find_spec("grouped_linear._host"):  # the optional pybind11 module
        assert rows["kernels"].startswith("CPU")
    assert "threads; a layer runs\n" in f"{out}\n"
    assert "fails" not in out
    assert printed(monkeypatch, capsys, "--version") == f"{grouped_linear.__version__}\n"


def test_a_reader_that_stops_early() -> None:
    """As head does: no traceback."""
    done = run(["bash", "-c", f"{sys.executable} -m grouped_linear | true"])
    assert done.returncode == 0
    assert "Error" not in done.stderr


def test_what_does_not_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(*given: object, **options: object) -> None:
        raise RuntimeError("grouped_mm: no CUDA kernel in this build, only CPU\nAdvice of torch's.")

    monkeypatch.setattr(report, "GroupedLinear", layer)
    said = report.runs(torch.device("cpu"))
    assert said == "a layer fails: grouped_mm: no CUDA kernel in this build, only CPU"
    assert report.built(None) == "not told: this build has no _host"


def test_transformers_is_supported_or_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.delitem(sys.modules, "grouped_linear.integrations.transformers", raising=False)
    monkeypatch.delattr("grouped_linear.integrations.transformers", raising=False)
    monkeypatch.setattr("transformers.__version__", "4.57.0")
    assert "got 4.57.0" in report.transformers()
    assert report.transformers().startswith("not supported: ")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert report.transformers() == "not installed"


@needs_gpu
def test_kernels_that_ran_on_a_gpu() -> None:
    portable = os.environ.get("GROUPED_LINEAR_PORTABLE") == "1"
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    gemms = "sm80" if portable or not is_hopper else "sm90"
    assert report.runs(torch.device("cuda:0")) == f"a layer runs, its GEMMs in {gemms}"
