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
from support.ops import PAGES
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


def assert_refused(good: Sample, mistakes: list[dict[str, Any]]) -> None:
    """Each mistake has one sentence, equal for fake, meta, CPU and CUDA tensors.

    The rules are written twice, in Python and in C++. A correct call still works after the failed
    ones.
    """
    expected = specified(good, good.results("cpu"))
    devices = ["cpu", "meta"] + (["cuda"] if HAS_GPU and good.op in CUDA_OPS else [])
    for mistake in mistakes:
        bad = good.but(**mistake)
        said = {"fake": fake_sentence(bad)} | {d: sentence(bad.on(d)) for d in devices}
        assert len(set(said.values())) == 1, said
        op, _, rule = said["fake"].partition(": ")
        assert op in PAGES, said  # another op is one that it calls
        assert rule, said
    for actual, before in zip(specified(good, good.results("cpu")), expected, strict=True):
        assert_same_bits(actual, before)
