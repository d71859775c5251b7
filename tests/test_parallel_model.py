# SPDX-License-Identifier: Apache-2.0
"""Predictions for more GPUs: what they are made of, against numbers counted by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import parallel, parallel_model
from benchmarks.parallel_model import SHAPES, WAYS, Machine, Shape

SHAPE = Shape(T=100, H=256, F=128, E=64, C=4)
MACHINE = Machine(node=4, nvlink=300.0, network=40.0, memory=2000.0, fixed=100.0)
GATHER, TO_ALL, TO_ALL_FP8 = (WAYS[way] for way in ("all_gather", "all_to_all", "all_to_all, FP8"))


def test_bytes_by_hand() -> None:
    """Rows of 512 bytes, or 264 in FP8; 8 bytes a choice there, 4 back."""
    there, back = 2 * 512 + 32, 2 * 512 + 16
    assert parallel_model.sent_bytes(SHAPE, 100, 8, GATHER) == 7 * 100 * (there + back)
    n = 63 + 1  # 1.25 * 100 * 4 / 8, rounded up, and an empty slot
    assert parallel_model.sent_bytes(SHAPE, 100, 8, TO_ALL) == 7 * n * (there + back)
    in_fp8 = 2 * 264 + 32
    assert parallel_model.sent_bytes(SHAPE, 100, 8, TO_ALL_FP8) == 7 * n * (in_fp8 + back)
    # Two nodes of four: three others by NVLink, four by the network.
    of_all = parallel_model.links(SHAPE, 100, 8, TO_ALL, node=4)
    assert of_all.nvlink == (3 * n * there, 3 * n * back)
    assert of_all.network == (4 * n * there, 4 * n * back)
    # An all-gather sends a row over the network once a node, and on by NVLink.
    of_gather = parallel_model.links(SHAPE, 100, 8, GATHER, node=4)
    assert of_gather.nvlink == (7 * 100 * there, 3 * 100 * back)
    assert of_gather.network == (100 * there, 4 * 100 * back)


def test_a_step_by_hand() -> None:
    n, there, back = 64, 2 * 512 + 32, 2 * 512 + 16
    slower = [max(3 * n * b / 300, 4 * n * b / 40) for b in (there, back)]  # the network
    moved = 2 * (2 * 512 * 8 * n + 512 * (8 * n + 100))
    expected = (sum(slower) + moved / 2000) / 1e6 + 0.1
    assert parallel_model.communication(SHAPE, 100, 8, TO_ALL, MACHINE) == pytest.approx(expected)
    weights = 3 * (1 - 1 / 4) * 2 * 3 * 64 * 256 * 128 / 8  # four copies of each expert
    assert parallel_model.weights(SHAPE, 32, 8, MACHINE) == pytest.approx(weights / 40 / 1e6)


def result_of(machine: Machine, D: int = 2) -> dict[str, Any]:
    """What ``--write`` would leave of a machine that is as the model says."""
    rows = []
    for name in ("qwen3_30b", "mixtral"):
        row = {"shape": name, "recipe": "block", "efficiency": 0.5}
        rows.append({**row, "scaling": "one GPU", "way": "-", "ms": 4.0, "communication": 0.0})
        for way, how in WAYS.items():
            for scaling, tokens in (("weak", SHAPES[name].T), ("strong", SHAPES[name].T // D)):
                talk = parallel_model.communication(SHAPES[name], tokens, D, how, machine)
                times = {"ms": 4.0 + talk, "communication": talk, "tokens": tokens}
                rows.append({**row, "scaling": scaling, "way": way, **times})
    return {"about": ["a GPU"], "device": "gpu", "processes": D, "commit": "abc", "rows": rows}


def test_recorded_results_give_the_parameters() -> None:
    fit = parallel_model.fitted([result_of(MACHINE), result_of(MACHINE, 4)], Machine())
    for name in ("nvlink", "memory", "fixed"):
        assert getattr(fit, name) == pytest.approx(getattr(MACHINE, name), rel=1e-6)
    assert fit.network == Machine().network
    assert fit.measured.endswith("predicted over measured 1.00 to 1.00")
    free = parallel_model.fitted([result_of(replace(MACHINE, fixed=0.0))], Machine())
    assert free.fixed == pytest.approx(0.0, abs=1e-6)


def test_pages_say_what_they_are() -> None:
    for results in ([], [result_of(MACHINE)]):
        text = parallel_model.page([8, 64], Machine(), results)
        assert text.startswith("# Predictions for more GPUs: not measured")
        assert ("no result of several GPUs is recorded" in text) == (not results)
        assert "Fastest: all_gather" in text
        assert "| 64 | **all_to_all, FP8**" in text


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    parallel.plot(result_of(MACHINE), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
