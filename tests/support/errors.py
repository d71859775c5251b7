"""Error sentences: the same from fake tensors, meta tensors, CPU and CUDA."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from support.compare import assert_same_bits
from support.devices import CUDA_OPS, HAS_GPU
from support.groups import Groups
from support.op_info import Sample
from support.samples import specified


def sentence(
    call: Callable[[], Any], kinds: tuple[type[Exception], ...] = (RuntimeError, ValueError)
) -> str:
    """The message of the error that the call raises, which must be of one of these kinds."""
    try:
        call()
    except kinds as error:
        return str(error)
    return "no error"


GROUPS_3 = Groups((3, 0, 7), 12, K=144, N=32)


def fake_sentence(sample: Sample) -> str:
    with FakeTensorMode() as mode:
        arguments = tree_map_only(Tensor, mode.from_tensor, sample.arguments)
        return sentence(Sample(sample.op, arguments))


def sentences(good: Sample, mistakes: list[dict[str, Any]]) -> str:
    """One line per mistake: the message, equal for fake, meta, CPU and CUDA tensors.

    A correct call still works after the failed ones.
    """
    lines, differing = [], []
    expected = specified(good, good.results("cpu"))
    devices = ["cpu", "meta"] + (["cuda"] if HAS_GPU and good.op in CUDA_OPS else [])
    for mistake in mistakes:
        bad = good.but(**mistake)
        said = {"fake": fake_sentence(bad)} | {d: sentence(bad.on(d)) for d in devices}
        if len(set(said.values())) > 1:
            differing.append(said)
        lines.append(said["fake"])
    assert not differing
    for actual, before in zip(specified(good, good.results("cpu")), expected, strict=True):
        assert_same_bits(actual, before)
    return "\n".join(lines)
