# SPDX-License-Identifier: Apache-2.0
"""Arguments at the edges of memory: sources without rows, tensors that begin anywhere, huge sizes.

On a GPU run it under compute-sanitizer, too, and with GROUPED_LINEAR_PORTABLE=1 (CONTRIBUTING.md).

T rows, E groups, K in_features, N out_features.
"""

import re
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.utils._pytree import tree_leaves

from support.cases import distinct_variants
from support.compare import assert_all_same_bits, assert_same_bits, bits
from support.devices import HERE
from support.errors import GROUPS_3, fake_sentence, sentence
from support.groups import GROUPS
from support.op_info import Sample
from support.operands import GATHERED
from support.ops import OPS, PAGES
from support.samples import make, specified, variant_of, with_every_tensor
from support.tensors import BF16, DTYPES, FP32

# --- sources without rows ------------------------------------------------------------------------

# By op: the numbers of gathered rows, and the sources that they index.
GATHERS = [
    ("group_quantize", "rows"),
    *((op, "rows") for op in ("grouped_mm", "grouped_mm_list", "grouped_scaled_mm")),
    *((op, "rows") for op in ("grouped_mm_swiglu", "grouped_mm_swiglu_grad")),
    *(
        (op, rows)
        for op in ("grouped_mm_wgrad", "grouped_mm_wgrad_", "grouped_mm_wgrad_list_")
        for rows in ("dy_rows", "x_rows")
    ),
]


def gathering(op: str, rows: str, dtype: torch.dtype, index: torch.dtype) -> tuple[Sample, str]:
    """A call that gathers, and the name of the argument whose rows it gathers."""
    options: dict[str, Any] = {"gathers": rows}
    if op == "group_quantize":
        options = {"columnwise": True, "bias_grad": True}
    sample = make(op, GROUPS_3, dtype, index=index, **options)
    return sample, "x" if op == "group_quantize" else GATHERED[rows]


def with_source_rows(sample: Sample, source: str, count: int) -> Sample:
    """The same with a source of so many rows, all zeros."""
    changed = {source: torch.zeros_like(sample[source][:1]).repeat(count, 1)}
    if "scale_a" in sample.arguments:
        changed["scale_a"] = sample["scale_a"][:, : 4 * count]
    return sample.but(**changed)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "rows"), GATHERS)
def test_source_without_rows(
    op: str, rows: str, dtype: torch.dtype, index: torch.dtype, device: str
) -> None:
    """Groups without rows gather nothing, whatever the row numbers are."""
    sample, source = gathering(op, rows, dtype, index)
    sample = sample.but(offs=torch.zeros_like(sample["offs"]))
    if op.endswith("_"):
        sample = sample.but(overwrite=torch.tensor(True))
    empty = with_source_rows(sample, source, 0)
    expected = with_source_rows(sample, source, 1).results("cpu")
    actual = empty.results(device)
    assert_all_same_bits(specified(empty, actual), specified(sample, expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "rows"), GATHERS)
def test_rows_of_a_source_without_rows(op: str, rows: str, dtype: torch.dtype, device: str) -> None:
    """Row numbers that index nothing: one sentence on a CPU, zeros on a GPU."""
    sample, source = gathering(op, rows, dtype, torch.int32)
    sample = sample.but(**{rows: torch.zeros_like(sample[rows])})
    if op.endswith("_"):
        sample = sample.but(overwrite=torch.tensor(True))
    empty = with_source_rows(sample, source, 0)
    if device == "cpu":
        said = sentence(empty).partition(": ")[2]
        assert said == f"{rows} must index the 0 rows of {source}, got 0 at row 0"
    else:
        for i, result in enumerate(empty.results(device)):
            if (op, i) != ("grouped_mm_swiglu_grad", 1):  # h is of gate_up
                assert not result.float().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["gather_sum", "gather_dot", "scatter_rows"])
def test_moves_from_and_to_no_rows(op: str, dtype: torch.dtype, device: str) -> None:
    sample = make(op, GROUPS_3, dtype)
    nothing = {"num_rows": 0} if op == "scatter_rows" else {"y": sample["y"][:0]}
    owner = "out" if op == "scatter_rows" else "y"
    if device == "cpu":
        said = sentence(sample.but(**nothing))
        assert said.startswith(f"{op}: rows must index the 0 rows of {owner}, got ")
    else:
        for result in sample.but(**nothing).results(device):
            assert not bits(result).any()


# --- tensors that begin anywhere -----------------------------------------------------------------

MARGIN = 64  # bytes before and behind a tensor, which an op must leave alone
MARK = 0xA5


def shifted(value: Any, by: int) -> Any:
    """The same tensors `by` bytes, rounded up to an element, into memory that is aligned.

    What shares memory still does.
    """
    buffers: dict[int, Tensor] = {}

    def shift(t: Tensor) -> Tensor:
        storage, skip = t.untyped_storage(), -(-by // t.itemsize) * t.itemsize
        if storage.data_ptr() not in buffers:
            held = torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage)
            buffer = held.new_full((len(held) + 2 * MARGIN + skip,), MARK)
            buffer[MARGIN + skip :][: len(held)] = held
            buffers[storage.data_ptr()] = buffer
        view = torch.empty(0, dtype=t.dtype, device=t.device)
        first = (MARGIN + skip) // t.itemsize + t.storage_offset()
        return view.set_(buffers[storage.data_ptr()].untyped_storage(), first, t.shape, t.stride())

    return [shift(t) for t in value] if isinstance(value, list) else shift(value)


def assert_margins(value: Any, by: int) -> None:
    for t in tree_leaves(value):
        held = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
        skip = -(-by // t.itemsize) * t.itemsize
        assert (held[: MARGIN + skip] == MARK).all()
        assert (held[-MARGIN:] == MARK).all()


def copies(value: Any) -> Any:
    """Copies to write to, at the start of memory of their own, laid out alike."""
    return shifted(value, 0)


def call(sample: Sample) -> list[Tensor]:
    """What the call returns and what it has written, on the CPU."""
    outputs = [sample(), [sample[name] for name in sample.written]]
    return specified(sample, [t.cpu() for t in tree_leaves(outputs) if t is not None])


@pytest.mark.parametrize(
    ("op", "variant"),
    [
        (op, variant)
        for op in OPS
        for variant in distinct_variants(op, each_layout=True)
        if "grad_of" not in variant and not variant.endswith("grad")
    ],
)
def test_tensors_that_begin_anywhere(op: str, variant: str, device: str) -> None:
    """Each tensor argument one element, or 8 bytes, past 16-byte alignment: the same bits.

    The plain sample's one element and 8 bytes, those of other variants in turn.
    """
    plans = [("capacity", BF16)]
    # By several threads torch's float32 GEMMs have other bits where memory begins elsewhere.
    if variant == "plain" and torch.get_num_threads() == 1:
        plans.append(("capacity", FP32))
    if variant == "plain" or "_list" in op:
        plans.append(("one_group", BF16))
    for groups, dtype in plans:
        sample = variant_of(op, GROUPS[groups], variant, dtype).on(device)

        def fresh(sample: Sample = sample) -> Sample:
            return sample.but(**{name: copies(sample[name]) for name in sample.written})

        expected = call(fresh())
        turn = len(variant)
        for name, value in sample.arguments.items():
            if not all(isinstance(t, Tensor) for t in tree_leaves(value)):
                continue
            turn += 1
            for by in (1, 8) if variant == "plain" else ((1, 8)[turn % 2],):
                moved = fresh().but(**{name: shifted(value, by)})
                assert fake_sentence(moved) == "no error"
                for i, (actual, other) in enumerate(zip(call(moved), expected, strict=True)):
                    if (op, i) == ("grouped_mm_swiglu_grad", 2):  # summed by tiles or by rows
                        torch.testing.assert_close(actual, other, rtol=1e-4, atol=1e-3)
                    else:
                        assert_same_bits(actual, other)
                assert_margins(moved[name], by)


# --- vectors with gaps ---------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_vectors_of_stride_two(op: str, device: str) -> None:
    """Of group ends, rows, scales and flags that an op reads: the same bits, for the fake, too."""
    sample = with_every_tensor(op, GROUPS["capacity"], BF16).on(device)

    def fresh(**changed: Tensor) -> Sample:
        return sample.but(**{name: copies(sample[name]) for name in sample.written}, **changed)

    expected = call(fresh())
    for name, t in sample.arguments.items():
        if isinstance(t, Tensor) and t.dim() == 1 and name not in sample.written:
            gaps = fresh(**{name: torch.stack([t, t], dim=1)[:, 0]})
            assert fake_sentence(gaps) == "no error"
            assert_all_same_bits(call(gaps), expected)


# --- sizes that 32 bits do not hold --------------------------------------------------------------

HUGE = 2**31 - 64  # rounded up to blocks of 128 it is no int32


def of_size(t: Tensor, dim: int, size: int = HUGE) -> Tensor:
    """t with another size of a dimension, in the memory of one row of it."""
    return t.narrow(dim, 0, 1).expand(*t.shape[:dim], size, *t.shape[dim + 1 :])


def with_sizes(sample: Sample, dims: dict[str, int], size: int = HUGE) -> Sample:
    def change(value: Any, dim: int) -> Any:
        if isinstance(value, list):
            return [of_size(t, dim, size) for t in value]
        if value.dim() == 3 and dim == 1 and size == HUGE:  # experts with too many rows in all
            return value[:1, :1].expand(8, 2**29, -1)
        return of_size(value, dim, size)

    return sample.but(**{name: change(sample[name], dim) for name, dim in dims.items()})


TOO_MANY = (
    r"(\w+): (\w+) must have at most 2147483519 (?:rows|columns|groups|choices)"
    r"(?: in all| in blocks)?, got (\d+)"
)


@pytest.mark.parametrize("device", [*HERE, "fake", "meta"])
@pytest.mark.parametrize("op", [op for op, page in PAGES.items() if page.too_large])
def test_more_rows_than_32_bits_count(op: str, device: str) -> None:
    for dims, options in PAGES[op].too_large:
        sample = make(op, GROUPS_3, BF16, **options)
        if device == "fake":
            said = fake_sentence(with_sizes(sample, dims))
        else:
            said = sentence(with_sizes(sample.on(device), dims))
        match = re.fullmatch(TOO_MANY, said)
        assert match, said
        assert match[1] != op or match[2] in dims  # another op is one that it calls
        assert int(match[3]) > 2147483519


@pytest.mark.parametrize("device", [*HERE, "fake", "meta"])
def test_more_features_than_32_bits_count(device: str) -> None:
    lines = []
    for op, dims in (
        ("group_quantize", {"x": 1}),
        ("swiglu", {"gate_up": 1}),
        ("grouped_mm", {"a": 1, "b": 1}),
        ("quantize_weight", {"w": 2}),
        ("gather_sum", {"y": 1}),
    ):
        sample = make(op, GROUPS_3, BF16)
        if device == "fake":
            lines.append(fake_sentence(with_sizes(sample, dims, 2**32)))
        else:
            lines.append(sentence(with_sizes(sample.on(device), dims, 2**32)))
    assert_expected_inline(
        "\n".join(lines),
        """\
group_quantize: K must be at most 536870912, got 4294967296
swiglu: K must be at most 536870912, got 2147483648
grouped_mm: K must be at most 536870912, got 4294967296
quantize_weight: K must be at most 536870912, got 4294967296
gather_sum: H must be at most 536870912, got 4294967296""",
    )


def test_what_torch_cannot_allocate() -> None:
    """torch's own words, of a result and of a copy of an argument: this is no lack of memory."""
    x, rows = torch.zeros(1, 16), torch.zeros(1, 1, dtype=torch.int32)
    endless = torch.zeros(1, 1).expand(2**33, 2**29)
    for call in (
        lambda: torch.ops.grouped_linear.scatter_rows(x, rows, 2**62),
        lambda: torch.ops.grouped_linear.gather_sum(endless, rows),
    ):
        # torch 2.11 gives its stable ABI no message.
        assert any(word in sentence(call) for word in ("overflow", "its message is on stderr"))
