"""GroupedTensor: its numbers, what keeps it quantized, and how optimizers step it.

E groups, K in_features, N out_features. Sizes have whole and partial blocks along N and K.
"""

import base64
import copy
import io
import pickle
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from grouped_linear import Float8BlockScaling, MXFP8BlockScaling
from grouped_linear.quantized import dispatch, tensor
from grouped_linear.quantized.tensor import GroupedTensor
from support import reference
from support.compare import assert_same, assert_same_bits
from support.devices import devices
from support.errors import sentence
from support.tensors import BF16, DTYPES, FP32

E, N, K = 3, 272, 144
DEVICES = pytest.mark.parametrize("device", devices("quantize_weight", "refresh_weight_"))
RECIPES = {
    "default": Float8BlockScaling(),
    "any_scale": Float8BlockScaling(power_of_two_scales=False),
    "epsilon": Float8BlockScaling(amax_epsilon=1e3),
}


def random_weight(device: str = "cpu", dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    magnitude_E = torch.tensor([1.0, 1e-3, 50.0])[:, None, None]
    return (torch.randn(E, N, K, generator=generator) * magnitude_E).to(device, dtype)


def to_nearest(w: Tensor) -> GroupedTensor:
    """A quantized weight that in-place operations round to nearest."""
    return GroupedTensor.quantize(w, stochastic_rounding=False)


def parts(t: Tensor) -> list[Tensor]:
    assert isinstance(t, GroupedTensor)
    return [t.q, t.scale] if t.q_t is None else [t.q, t.scale, t.q_t]


def assert_shares_memory(part: Tensor, whole: Tensor, first: int = 0) -> None:
    """What is written to `part` is written to the experts of `whole` from the first on."""
    for a, b in zip(parts(part), parts(whole), strict=True):
        assert a.data_ptr() == b[first].data_ptr()


# --- numbers -------------------------------------------------------------------------------------


@DEVICES
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers(device: str, recipe: Float8BlockScaling, dtype: torch.dtype) -> None:
    w = random_weight(device, dtype)
    w[0, 3, 5] = torch.nan
    t = GroupedTensor.quantize(w, recipe)
    scaling = reference.Scaling(recipe.power_of_two_scales, recipe.amax_epsilon)
    q, scale, q_t = reference.quantize_weight(w.cpu(), scaling)
    for actual, expected in zip(parts(t), (q, scale, q_t), strict=True):
        assert_same_bits(actual.cpu(), expected)
    # An e4m3 number is exact in each dtype, so q * scale is rounded once.
    exact = reference.dequantize_weight(q, scale)
    for to in DTYPES:  # to the bit, but for the one NaN, whose bits are the device's own
        torch.testing.assert_close(
            t.dequantize(to).cpu(), exact.to(to), rtol=0, atol=0, equal_nan=True
        )
    assert_same_bits(t.dequantize(), t.dequantize(dtype))
    assert t.dtype == dtype
    assert t.shape == w.shape


def test_from_parts() -> None:
    t = GroupedTensor.quantize(random_weight(dtype=BF16))
    assert_same(GroupedTensor.from_parts(t.q, t.scale), t)
    without = GroupedTensor.from_parts(t.q, t.scale, columnwise=False)
    assert without.q_t is None
    assert without.q.data_ptr() == t.q.data_ptr()
    assert_same(GroupedTensor.from_parts(t.q[1], t.scale[1]), t[1])


def test_quantized_weight() -> None:
    t = GroupedTensor.quantize(random_weight())
    for w in (t, GroupedTensor.from_parts(t.q, t.scale, FP32, columnwise=False)):
        weight = w.quantized_weight()
        assert weight.values is w.q
        assert weight.scale is w.scale
        assert weight.columnwise is w.q_t
    assert w.q_t is None


def test_errors() -> None:
    t = GroupedTensor.quantize(random_weight())
    cases = {
        "recipe": lambda: GroupedTensor.quantize(t.dequantize(), MXFP8BlockScaling()),
        "q": lambda: GroupedTensor.from_parts(t.q.float(), t.scale),
        "dimensions": lambda: GroupedTensor.from_parts(t.q[0, 0], t.scale),
        "K": lambda: GroupedTensor.from_parts(t.q[..., :24], t.scale),
        "scale": lambda: GroupedTensor.from_parts(t.q, t.scale.half()),
        "blocks": lambda: GroupedTensor.from_parts(t.q, t.scale[:, :2]),
        "dense": lambda: GroupedTensor.from_parts(t.q.transpose(1, 2), t.scale.transpose(1, 2)),
        "dtype": lambda: GroupedTensor.from_parts(t.q, t.scale, torch.float64),
        "dequantize": lambda: t.dequantize(torch.int8),
        "shape": lambda: t.transpose_(1, 2),
    }
    sentences = []
    for case in cases.values():
        with pytest.raises((RuntimeError, ValueError)) as error:
            case()
        sentences.append(str(error.value))
    assert_expected_inline(
        "\n".join(sentences),
        """\
GroupedTensor: recipe must be Float8BlockScaling, got MXFP8BlockScaling()
GroupedTensor: q must be float8_e4m3fn, got float32
GroupedTensor: q must be 2-D or 3-D, got 1-D
GroupedTensor: K must be a positive multiple of 16, got 24
GroupedTensor: scale must be float32, got float16
GroupedTensor: scale must be [3, 3, 2], got [3, 2, 2]
GroupedTensor: q must be contiguous
GroupedTensor: dtype must be bfloat16, float16 or float32, got float64
GroupedTensor: dtype must be bfloat16, float16 or float32, got int8
GroupedTensor: aten.transpose_.default cannot change the shape of a quantized tensor""",
    )


# --- views ---------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Tensor], list[tuple[int, Tensor]]]] = {
    "index": lambda t: [(1, t[1]), (2, t[-1])],
    "slice": lambda t: [(1, t[1:]), (0, t[:2]), (1, t[1:2])],
    "iteration": lambda t: list(enumerate(t)),
    "unbind": lambda t: list(enumerate(t.unbind())),
    "split": lambda t: [(0, t.split(2)[0]), (2, t.split(2)[1]), (1, t.split([1, 2])[1])],
    "chunk": lambda t: [(2, t.chunk(2)[1])],
    "narrow": lambda t: [(1, t.narrow(0, 1, 2))],
    "alias": lambda t: [(0, t.detach()), (0, t.view(E, N, K)), (0, t.view(-1).view(E, -1, K))],
    "strides": lambda t: [
        (0, t.as_strided((E, N, K), (N * K, K, 1))),
        (1, t.as_strided((2, N, K), (N * K, K, 1), N * K)),
        (2, t.as_strided((N, K), (K, 1), 2 * N * K)),
    ],
}


@pytest.mark.parametrize("columnwise", [True, False])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_of_experts(view: Any, columnwise: bool) -> None:
    t = GroupedTensor.quantize(random_weight(), columnwise=columnwise)
    dense = t.dequantize()
    for (first, part), (_, expected) in zip(view(t), view(dense), strict=True):
        assert_shares_memory(part, t, first)
        assert_same_bits(part.dequantize(), expected)
        assert part.stride() == expected.stride()
        assert part.storage_offset() == expected.storage_offset()
        # its own metadata: a view of it is right, too
        assert_same_bits(part.view(-1).dequantize(), expected.reshape(-1))
    for (_, part), (_, expected) in zip(view(t), view(dense), strict=True):
        versions = [p._version for p in parts(t)]
        part.mul_(2)
        expected.mul_(2)
        assert all(p._version > version for p, version in zip(parts(t), versions, strict=True))
    assert_same(t, GroupedTensor.quantize(dense))


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda t: t[0, 3],
    "columns": lambda t: t[..., 5:9],
    "rows": lambda t: t[:, :128],
    "every_other": lambda t: t[::2],
    "transpose": lambda t: t.transpose(1, 2),
    "member_transpose": lambda t: t[1].t(),
    "flat_slice": lambda t: t.view(-1)[7:19],
    "strides": lambda t: t.as_strided((2, 3), (5, 7), 11),
    "mask": lambda t: t[t > 0],
    "product": lambda t: torch.ones(2, K, device=t.device, dtype=t.dtype) @ t[1].t(),
    "sum": lambda t: t.sum(dim=0),
    "comparison": lambda t: t > 1,
    "dtype": lambda t: t.double(),
    "stack_high_precision": lambda t: torch.stack([t[0], t[1].dequantize()]),
    "cat_rows": lambda t: torch.cat([t[0], t[1]]),
    "foreach": lambda t: torch._foreach_mul([t, t], 2.0)[1],
}


@pytest.mark.parametrize("op", COPIES.values(), ids=COPIES)
def test_everything_else_dequantizes(op: Callable[[Tensor], Tensor]) -> None:
    t = GroupedTensor.quantize(random_weight())
    result = op(t)
    assert type(result) is Tensor
    assert_same_bits(result, op(t.dequantize()))


@pytest.mark.parametrize("op", [torch.empty_like, torch.zeros_like, torch.ones_like])
@pytest.mark.parametrize(
    "options", [{}, {"dtype": FP32}, {"memory_format": torch.preserve_format}], ids=str
)
def test_like_is_plain(options: dict[str, Any], op: Callable[..., Tensor]) -> None:
    t = GroupedTensor.quantize(random_weight(dtype=BF16))
    like = op(t, **options)
    assert type(like) is Tensor
    assert like.shape == t.shape
    assert like.dtype == options.get("dtype", BF16)
    assert like.is_contiguous()
    assert op(t, device="meta").is_meta


# --- copies --------------------------------------------------------------------------------------


def through_torch_save(t: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save({"weight": t}, file)
    file.seek(0)
    loaded: Tensor = torch.load(file, weights_only=True)["weight"]
    return loaded


KEPT: dict[str, Callable[[Any], Any]] = {
    "clone": torch.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "torch_save": through_torch_save,
    "to": lambda t: t.to(t.device, copy=True),
    "stack": lambda t: torch.stack([*t]),
    "cat": lambda t: torch.cat([t[:1], t[1:]]),
    "parts": lambda t: t.__tensor_unflatten__(
        {name: getattr(t, name).clone() for name in t.__tensor_flatten__()[0]},
        t.__tensor_flatten__()[1],
        t.shape,
        t.stride(),
    ),
}


@DEVICES
@pytest.mark.parametrize("columnwise", [True, False])
@pytest.mark.parametrize("copied", KEPT.values(), ids=KEPT)
def test_copies_keep_every_byte(copied: Any, columnwise: bool, device: str) -> None:
    t = GroupedTensor.quantize(
        random_weight(device, BF16),
        Float8BlockScaling(False, 1e-4, True),  # no option as it is by default
        columnwise=columnwise,
        stochastic_rounding=True,
    )
    twin = copied(t)
    assert_same(twin, t)
    assert twin.__tensor_flatten__() == t.__tensor_flatten__()
    assert not {p.data_ptr() for p in parts(twin)} & {p.data_ptr() for p in parts(t)}


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "torch_save"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_copies_of_a_parameter(copied: str, requires_grad: bool) -> None:
    p = nn.Parameter(GroupedTensor.quantize(random_weight()), requires_grad)
    p.note = "kept"
    twin = KEPT[copied](p)
    assert isinstance(twin, nn.Parameter)
    assert twin.requires_grad == requires_grad
    assert twin.note == "kept"
    assert_same(twin, p)


def test_copies_of_what_shares_memory() -> None:
    """A deepcopy shares it too. A pickle does not, and q_t is the transpose of q in both."""
    w = GroupedTensor.quantize(random_weight())
    for copied, shares in ((KEPT["deepcopy"], True), (KEPT["pickle"], False)):
        whole, expert = copied([w, w[1]])
        expert.zero_()
        assert_same(whole, whole)
        assert not expert.dequantize().any()
        assert torch.equal(whole[1].dequantize(), w[1].dequantize() * (not shares))
    twins = copy.deepcopy([w, w])
    assert twins[0] is twins[1]


# --- identity ------------------------------------------------------------------------------------


def test_address_tells_tensors_apart() -> None:
    """Programs find tensors again by it. What reads memory there must fail, and not find e4m3."""
    a, b = (nn.Parameter(GroupedTensor.quantize(random_weight())) for _ in range(2))
    assert a.data_ptr() == a.detach().data_ptr() == a.view(-1).data_ptr() != b.data_ptr()
    assert a[1].data_ptr() - a.data_ptr() == N * K
    before = a.data_ptr()
    with torch.no_grad():
        a.add_(1)
    assert a.data_ptr() == before
    assert before != a.q.data_ptr()
    assert before % 16 == 0
    assert GroupedTensor.quantize(torch.zeros(1, 16, 16, device="meta")).data_ptr() == 0


def test_tied_weights_stay_tied() -> None:
    """Also where they are two parameters of the same memory."""
    a = nn.Module()
    a.w = nn.Parameter(GroupedTensor.quantize(random_weight()))
    a.tied = nn.Parameter(a.w.detach())
    b = copy.deepcopy(a)
    assert b.w.data_ptr() == b.tied.data_ptr() != a.w.data_ptr()
    with torch.no_grad():
        b.w.mul_(2)
    assert_same(b.tied.detach(), b.w.detach())


def test_new_empty_is_quantized_in_the_same_shape() -> None:
    w = GroupedTensor.quantize(random_weight())
    assert isinstance(w.new_empty(w.shape), GroupedTensor)
    for other in (w.new_empty(2, 3), w.new_empty(w.shape, dtype=torch.int32)):
        assert type(other) is Tensor


def test_pickled_without_q_t() -> None:
    """A checkpoint holds a byte an element, not two."""
    t = GroupedTensor.quantize(random_weight())
    assert len(pickle.dumps(t)) < 1.1 * t.numel()


# zlib and base64 of pickle.dumps(version_1()), as the first version wrote it.
PICKLE_OF_VERSION_1 = """
eNrtVM1u00AQth2nqZymipoTCAkuSOZABGkJVD0gBVSErPBTLr6g1cbexIscr/fHTYsUlAtqQHtjufEAvAGPwENw44Z4AgQH
xkkjOJQHQDCHXXv329mZb/abmfv2Y9VamL44EqzISYxSmhEs2rzAmaLPSdxWJJNMGL2OBBkUNI3NGzM1vq4dEiEpy0xga5sb
vaGYiJI2KhRNpdFbKzhaOkCHHTjo68YSJmHCI2J0E6UMx2go2BgNjhWRgOp9dyxr5rz20h/v9r9devb+0bn2zOl/qcA45ZYf
NiHkXDDFIpai0zi4DYCwATspVSoliGQxxRl35qEHi+o4J0hCRpJXptz1wzJzmTCheDVwwgr80UzxtcAN3dIHy0a8FrhFAXf6
Ya0EL0PmVrRIwetBtE+Wax63w02A7O5sX9/d6XS73Zs3trt86TbKC17pW84Dxd3H4O0pt84C27htOctqvPhv/7SZl+bABFbg
BM2geWL6lg0f9ol5pevw4FMSKXjvoLH6QxETQeK7NFIgmysHRsFBXZURTolJ1v2k3qvYf4GU9qEHqLO1dKsDc+fa71oK/iSl
FRakdKok6/L9rb0P4097vyi1SybLccFo0lqx5gEBxTibUEnMHDhMcE7MqgS6GpdZw7wI2OjasAx5u+xpek2QiMJm2RVbOZsQ
gdgQqQlDi0JIqNsGHuMjRHJJgQ1z7/b57uevF+5c1ZtwjSDoaIWcF7oF5EQJlopGCHoyMJ+NIKCGILyggkg0EjgGlx5WStBB
UbbMqSnK/No/AelsODQ=
"""


def version_1() -> GroupedTensor:
    w = torch.tensor([1.0, 3.0])[:, None, None].expand(2, 16, 16).contiguous()
    recipe = Float8BlockScaling(False, 1e-4, True)
    return GroupedTensor.quantize(w, recipe, stochastic_rounding=True)


def test_reads_a_pickle_of_version_1() -> None:
    """Files that users saved stay readable: a change of the format needs a new version."""
    t = pickle.loads(zlib.decompress(base64.b64decode(PICKLE_OF_VERSION_1)))
    assert_same(t, version_1())
    assert t.q_t is not None
    assert t.__tensor_flatten__() == version_1().__tensor_flatten__()


def test_refuses_a_pickle_of_a_newer_version(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(tensor, "PICKLE_VERSION", 3)
        saved = pickle.dumps(version_1())
    assert sentence(lambda: pickle.loads(saved)) == (
        "GroupedTensor: the pickle has version 3, this grouped_linear reads versions up to 2"
    )


@dataclass(frozen=True, repr=False)
class OwnRecipe(Float8BlockScaling):
    """A recipe of a user's own, with a field of its own."""

    note: str = ""


@pytest.mark.parametrize("copied", ["deepcopy", "pickle", "torch_save"])
def test_copies_keep_the_class_of_the_recipe(copied: str) -> None:
    recipe = OwnRecipe(amax_epsilon=1e-4, note="mine")
    t = GroupedTensor.quantize(random_weight(), recipe)
    with torch.serialization.safe_globals([OwnRecipe]):
        twin = KEPT[copied](t)
    assert type(twin.recipe) is OwnRecipe
    assert twin.recipe == recipe


def test_a_class_that_torch_does_not_trust() -> None:
    """torch.load names it, as it does any class of a user's own."""
    t = GroupedTensor.quantize(random_weight(), OwnRecipe())
    with pytest.raises(pickle.UnpicklingError, match="OwnRecipe was not an allowed global"):
        through_torch_save(t)


def test_dtype_is_what_it_stands_for() -> None:
    t = GroupedTensor.quantize(random_weight())
    half = t.to(BF16)
    assert half.dtype == BF16
    assert_same_bits(half.q, t.q)
    assert_same_bits(half.dequantize(), t.dequantize(BF16))
    assert t.bfloat16().float().dtype == FP32
    assert t.to("meta").is_meta


@pytest.mark.parametrize("columnwise", [True, False])
def test_copy_of_bytes(columnwise: bool) -> None:
    """Whatever the recipe of the one that is written would choose."""
    quantized = GroupedTensor.quantize(random_weight(), RECIPES["any_scale"])
    to = GroupedTensor.quantize(torch.zeros(E, N, K), columnwise=columnwise)
    assert to.copy_(quantized) is to
    assert_same(to, quantized)


@pytest.mark.parametrize("kind", ["float", "bfloat16", "double", "flatten"])
def test_copy_of_a_plain_tensor(kind: str) -> None:
    source = getattr(random_weight(), kind)()
    to = to_nearest(torch.zeros(E, N, K))
    to.view(source.shape).copy_(source)
    assert_same(to, GroupedTensor.quantize(source.view(E, N, K).to(FP32)))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_copy_of_fp8_without_scales_is_refused(dtype: torch.dtype) -> None:
    """Numbers without their scales would be other weights."""
    quantized = to_nearest(random_weight())
    to = GroupedTensor.quantize(random_weight(seed=1))
    before = to.clone()
    for write in (to.copy_, lambda w: torch._foreach_copy_([to], [w])):
        with pytest.raises(ValueError, match=r"copy_ of a tensor of float8_e\dm.* has no scales"):
            write(quantized.q.to(FP32).to(dtype))
    assert_same(to, before)


def test_copy_of_another_shape() -> None:
    quantized = GroupedTensor.quantize(random_weight(), RECIPES["any_scale"])
    to = GroupedTensor.quantize(torch.zeros(E, N, K))
    with pytest.raises(RuntimeError, match="expanded size"):
        to.copy_(quantized.view(E, K, N))
    to.view(E, K, N).copy_(quantized.view(E, K, N))
    assert_same(to, quantized)
    to.copy_(torch.tensor(3.0))
    assert (to == 3).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_copy_to_a_plain_tensor(dtype: torch.dtype) -> None:
    quantized = GroupedTensor.quantize(random_weight(), RECIPES["any_scale"])
    plain = torch.empty(E, N, K, dtype=dtype)
    plain.copy_(quantized)
    # BF16 from the float32 product, not rounded twice
    assert_same_bits(plain, reference.dequantize_weight(*parts(quantized)[:2]).to(FP32).to(dtype))


def test_foreach_copy() -> None:
    quantized = GroupedTensor.quantize(random_weight(), RECIPES["any_scale"])
    to, plain = GroupedTensor.quantize(torch.zeros(E, N, K)), torch.empty(E, N, K)
    torch._foreach_copy_([to, plain], [quantized, quantized])
    assert_same(to, quantized)
    assert_same_bits(plain, quantized.dequantize())


# --- writing -------------------------------------------------------------------------------------

X = random_weight(seed=1)
WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "add_": lambda t: t.add_(X.to(t.device), alpha=-0.1),
    "mul_": lambda t: t.mul_(0.9),
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(7),
    "addcdiv_": lambda t: t.addcdiv_(X.to(t.device), X.to(t.device).abs() + 1, value=0.5),
    "lerp_": lambda t: t.lerp_(X.to(t.device), 0.3),
    "lerp_of_lower_precision": lambda t: t.lerp_(X.to(t.device, BF16).to(t.dtype), 0.3),
    "itself": lambda t: t.add_(t),
    "clamp_": lambda t: t.clamp_(-1, 1),
    "index_fill_": lambda t: t.index_fill_(1, torch.tensor([3, 200], device=t.device), 9.0),
    "out": lambda t: torch.add(X.to(t.device), 1, out=t),
    "uniform_": lambda t: t.uniform_(-1, 1, generator=torch.Generator(t.device).manual_seed(0)),
}


@DEVICES
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_in_place(write: Callable[[Tensor], Tensor], device: str) -> None:
    """In float32, then quantized: into the same memory, and the tensor itself is returned."""
    t = to_nearest(random_weight(device))
    addresses, versions = [p.data_ptr() for p in parts(t)], [p._version for p in parts(t)]
    expected = GroupedTensor.quantize(write(t.dequantize()))
    assert write(t) is t
    assert_same(t, expected)
    assert [p.data_ptr() for p in parts(t)] == addresses
    assert all(p._version > version for p, version in zip(parts(t), versions, strict=True))


OVERWRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "fill_": lambda t: t.fill_(0.3),
    "zero_": lambda t: t.zero_(),
    "uniform_": WRITES["uniform_"],
    "normal_": lambda t: t.normal_(generator=torch.Generator(t.device).manual_seed(0)),
}


@pytest.mark.parametrize("write", OVERWRITES.values(), ids=OVERWRITES)
def test_overwriting_rounds_to_nearest(write: Callable[[Tensor], Tensor]) -> None:
    """What does not read the old numbers adds nothing up."""
    t = GroupedTensor.quantize(random_weight())
    expected = GroupedTensor.quantize(write(t.dequantize()))
    assert_same(write(t), expected)


def test_in_place_of_lower_precision() -> None:
    """What is added to a weight that stands for bf16 is not rounded to bf16 on the way."""
    t = to_nearest(torch.ones(1, 16, 16, dtype=BF16))
    t.add_(torch.full_like(t, 0.0625)).add_(1)  # 1.0625: halfway, to the even neighbour
    expected = GroupedTensor.quantize(torch.full((1, 16, 16), 2.0))
    assert_same_bits(t.q, expected.q)
    exact = torch.full((1, 16, 16), 1.0625 + 2**-12)
    t = to_nearest(torch.full((1, 16, 16), 1.0, dtype=BF16))
    t.add_(0.0625 + 2**-12)
    assert_same_bits(t.q, GroupedTensor.quantize(exact).q)


def test_plain_tensors_are_written_too() -> None:
    t = GroupedTensor.quantize(random_weight())
    plain = torch.ones(E, N, K, dtype=BF16)
    assert plain.add_(t) is plain
    assert_same_bits(plain, (1 + t.dequantize()).to(BF16))
    torch._foreach_add_([plain, plain[0]], [t, t[0]])
    assert_same_bits(plain[1], ((1 + t.dequantize()).to(BF16).float() + t.dequantize())[1].to(BF16))


SETS: dict[str, Callable[[Tensor], None]] = {
    "expert": lambda t: t.__setitem__(1, 3.0),
    "experts": lambda t: t.__setitem__(slice(1, None), X[1:]),
    "rows": lambda t: t.__setitem__((0, slice(3, 130)), X[1, 3:130]),
    "mask": lambda t: t.__setitem__(X > 1, 0),
    "one": lambda t: t.__setitem__((0, 0, 0), 1000.0),
}


@pytest.mark.parametrize("put", SETS.values(), ids=SETS)
def test_set_item(put: Callable[[Tensor], None]) -> None:
    t = to_nearest(random_weight())
    dense = t.dequantize()
    put(t)
    put(dense)
    assert_same(t, GroupedTensor.quantize(dense))


@DEVICES
@pytest.mark.parametrize("columnwise", [True, False])
@pytest.mark.parametrize("name", ["expert", "experts", "rows", "one"])
def test_set_item_keeps_other_blocks(name: str, columnwise: bool, device: str) -> None:
    """Published weights have scales that are no powers of two: what is not written keeps them."""
    put = SETS[name]
    t = GroupedTensor.from_parts(
        *with_any_scales(random_weight(device)),
        FP32,
        columnwise=columnwise,
        stochastic_rounding=False,
    )
    before, dense = t.clone(), t.dequantize()
    put(t)
    put(dense)
    assert isinstance(before, GroupedTensor)
    again = GroupedTensor.quantize(dense)
    met = torch.nn.functional.max_pool2d(
        (dense != before.dequantize()).float(), 128, ceil_mode=True
    ).bool()
    assert met.any()
    assert not met.all()
    assert_same_bits(t.scale, torch.where(met, again.scale, before.scale))
    of_numbers = met.repeat_interleave(128, 1)[:, :N].repeat_interleave(128, 2)[:, :, :K]
    expected = torch.where(of_numbers, again.q.view(torch.uint8), before.q.view(torch.uint8))
    assert torch.equal(t.q.view(torch.uint8), expected)
    if columnwise:
        assert t.q_t is not None
        assert_same_bits(t.q_t, t.q.transpose(1, 2))


def with_any_scales(w: Tensor) -> tuple[Tensor, Tensor]:
    quantized = GroupedTensor.quantize(w)
    return quantized.q, quantized.scale * 0.7


def test_set_item_of_one_expert_and_of_a_flattened_view() -> None:
    t = GroupedTensor.from_parts(*with_any_scales(random_weight()), FP32)
    before = t.clone()
    t[1][200, 140] = 5.0
    t.view(-1)[0] = 7.0
    assert_same(t[2], before[2])
    assert [t[1, 200, 140].item(), t[0, 0, 0].item()] == [5.0, 7.0]
    same = t.q.view(torch.uint8) == before.q.view(torch.uint8)
    assert bool(same[0, 128:].all() and same[1, :128].all() and same[1, :, :128].all())


EMPTY_SETS: dict[str, Callable[[Tensor], None]] = {
    "experts": lambda t: t.__setitem__(slice(2, 2), 0.5),
    "rows": lambda t: t.__setitem__((0, slice(3, 3)), 0.5),
    "mask": lambda t: t.__setitem__(t > 1e9, 0.5),
    "list": lambda t: t.__setitem__([], 0.5),
}


@DEVICES
@pytest.mark.parametrize("columnwise", [True, False])
def test_empty_writes(columnwise: bool, device: str) -> None:
    """Nothing changes, scales that the recipe would not choose included."""
    quantized = GroupedTensor.quantize(random_weight(device), columnwise=columnwise)
    t = GroupedTensor.from_parts(quantized.q, quantized.scale * 3, FP32, columnwise=columnwise)
    before = t.clone()
    for name in ("fill_", "mul_", "zero_", "clamp_", "itself"):
        assert WRITES[name](t[2:2]).shape == (0, N, K)
    torch._foreach_mul_([t[2:2], t[:0]], 2.0)
    t[2:2].copy_(torch.ones(N, K, device=device))
    for write_nothing in EMPTY_SETS.values():
        write_nothing(t)
    with pytest.raises(RuntimeError, match="expanded size"):
        t[2:2] = torch.ones(E, N, K, device=device)
    assert_same(t, before)


@pytest.mark.parametrize("write", [WRITES["add_"], *SETS.values()], ids=["add_", *SETS])
def test_leaf_is_not_written_with_gradients(write: Callable[[Tensor], Any]) -> None:
    p = nn.Parameter(GroupedTensor.quantize(random_weight()))
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        write(p)


def test_inference_mode() -> None:
    t = to_nearest(random_weight())
    with torch.inference_mode():
        twin = to_nearest(random_weight())
        for w in (t, twin):
            w[1].mul_(2)
            w.view(-1).add_(1)
            w[2] = 3.0
        assert_same(t, twin)


def test_gradients_are_plain() -> None:
    p = nn.Parameter(GroupedTensor.quantize(random_weight(dtype=BF16)))
    dense = p.detach().dequantize().requires_grad_()
    x = torch.randn(5, K)
    for w, plain in ((p, p.dequantize()), (dense, dense)):
        ((x @ w[1].float().t()).sum() + plain.square().sum()).backward()
    assert type(p.grad) is Tensor
    assert_same_bits(p.grad, dense.grad)


def write_data(p: nn.Parameter, value: Tensor | float, operation: str) -> None:
    data = p.data
    p.data = getattr(data, operation)(value)


DATA: dict[str, Callable[[Any], Any]] = {
    "iadd": lambda p: write_data(p, 1, "__iadd__"),  # what p.data += 1 is
    "isub": lambda p: write_data(p, torch.full((E, N, K), 3.0), "__isub__"),
    "imul": lambda p: write_data(p, 4, "__imul__"),
    "itruediv": lambda p: write_data(p, 4, "__itruediv__"),
    "expert": lambda p: write_data(p[1], 1, "__iadd__"),
    "mul_": lambda p: p.data.mul_(2),
    "zero_": lambda p: p.data.zero_(),
    "item": lambda p: p.data.__setitem__(1, 5.0),
    "add": lambda p: write_data(p, 1, "__add__"),  # to a plain tensor
    "plain": lambda p: setattr(p, "data", torch.full((E, N, K), 3.0)),
    "dtype": lambda p: setattr(p, "data", torch.full((E, N, K), 3.0, dtype=BF16)),
    "to": lambda p: setattr(p, "data", p.data.to(BF16)),
    "itself": lambda p: setattr(p, "data", p),
    "fewer_experts": lambda p: setattr(p, "data", p.data[1:]),
    "vector": lambda p: nn.utils.vector_to_parameters(torch.full((E * N * K,), 4.0), [p]),
    "module": lambda p: nn.ParameterList([p]).bfloat16(),
}


@pytest.mark.parametrize("write", DATA.values(), ids=DATA)
def test_data(write: Callable[[Any], Any]) -> None:
    """What a plain parameter has after the same write, and no error."""
    w = torch.tensor([1.0, 2.0, 8.0])[:, None, None].expand(E, N, K).contiguous()
    plain, p = nn.Parameter(w.clone()), nn.Parameter(GroupedTensor.quantize(w))
    write(plain)
    write(p)
    assert isinstance(p, GroupedTensor)
    assert isinstance(p, nn.Parameter)
    assert p.requires_grad
    assert (p.shape, p.dtype) == (plain.shape, plain.dtype)
    assert_same_bits(p.detach().dequantize(), plain.detach())
    assert_same(p.detach(), GroupedTensor.quantize(plain.detach()))


def test_data_shares_memory_with_what_is_assigned() -> None:
    """And no longer with what was there: a program may put that back."""
    recipe = Float8BlockScaling(amax_epsilon=1e-4)
    p = nn.Parameter(GroupedTensor.quantize(random_weight(), recipe))
    other, before = GroupedTensor.quantize(X), p.data
    numbers = before.clone()
    p.data = other
    other[1].mul_(2)
    assert_same(p.detach(), other)
    assert p.recipe == recipe
    p.data = torch.ones(E, N, K)
    assert_same(before, numbers)
    p.data = before
    assert_same(p.detach(), numbers)
    assert_shares_memory(p.detach(), before)


# --- stochastic rounding -------------------------------------------------------------------------


@DEVICES
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_rounding_by_chance_is_unbiased(device: str, recipe: Float8BlockScaling) -> None:
    """Each result is a neighbour of the exact value, and their mean is the exact value."""
    draws = 2048
    v_K = torch.tensor([3.3, -0.77, 1e-2, -3.1e-3, 2.0**-9 / 3, 100.1, -448.0, 0.0], device=device)
    w = torch.zeros(1, draws, 16, device=device)
    t = GroupedTensor.quantize(w, recipe, stochastic_rounding=True)
    w[..., :8] = v_K
    t.add_(w)  # to zero: the sum is exact
    q, scale = t.q[0, :, :8].double(), t.scale[0, 0, 0].double()
    assert (t.scale == t.scale[0, 0, 0]).all()
    exact = v_K.double() / scale
    size = exact.abs().clamp(min=2.0**-6)
    step = 2.0 ** (size.log2().floor() - 3)  # between neighbours; an e4m3 has 3 bits of mantissa
    assert ((q - exact).abs() < step).all()
    error = (q.mean(dim=0) - exact).abs() / step
    assert (error < 5 * 0.5 / draws**0.5).all()  # a coin's deviation is at most 0.5
    if recipe.power_of_two_scales:
        assert (q[:, 6:] == exact[6:]).all()  # e4m3 numbers already
    assert_same_bits(t.q_t, t.q.transpose(1, 2))


@pytest.mark.parametrize(("stochastic", "mean"), [(False, 1.0), (True, 1.1)])
def test_small_updates_vanish_unless_rounded_by_chance(stochastic: bool, mean: float) -> None:
    t = GroupedTensor.quantize(torch.ones(1, 128, 128), stochastic_rounding=stochastic)
    for _ in range(100):
        t.add_(1e-3)  # of steps of 0.125
    # stochastically: 100 steps deviate by at most 0.125 * sqrt(100 * 0.008) = 0.11 an element
    assert abs(t.mean().item() - mean) < 5 * 0.11 / 128


def test_rounding_by_chance_of_special_values() -> None:
    t = GroupedTensor.quantize(torch.ones(1, 16, 16), stochastic_rounding=True)
    w = torch.full((1, 16, 16), 448.0)
    w[0, 0, :4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e-30])
    t.mul_(0).add_(w)
    plain = GroupedTensor.quantize(w)
    assert_same_bits(t.q.isnan(), plain.q.isnan())
    assert_same_bits(t.scale, plain.scale)
    assert (t.q.float()[0, 1:] == 448).all()


def add_in_graph(t: Tensor) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def add(t: Tensor, step: Tensor) -> None:
        t.add_(torch.ones_like(t), alpha=step)  # Dynamo writes it as copy_ (torch 2.13)

    add(t, torch.tensor(1e-3))


def copy_in_graph(t: Tensor) -> None:
    torch.compile(lambda t: t.copy_(t.float() + 1e-3), fullgraph=True, backend="aot_eager")(t)


STEPS: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda t: t.add_(1e-3),
    "out": lambda t: torch.add(t, 1e-3, out=t),
    "copy_": lambda t: t.copy_(t.float() + 1e-3),
    "copy_of_double": lambda t: t.copy_(t.double() + 1e-3),
    "copy_to_expert": lambda t: t[0].copy_(t[0] + 1e-3),
    "copy_to_view": lambda t: t.view(-1).copy_(t.view(-1) + 1e-3),
    "foreach_copy_": lambda t: torch._foreach_copy_([t, t[:0]], [t + 1e-3, t[:0].float()]),
    "data": lambda t: setattr(t, "data", t.data + 1e-3),
    "vector": lambda t: nn.utils.vector_to_parameters(t.flatten() + 1e-3, [t]),
    "set_expert": lambda t: t.__setitem__(0, t[0] + 1e-3),
    "set_rows": lambda t: t.__setitem__((0, slice(0, 128)), t[0, :128] + 1e-3),
    "set_all": lambda t: t.__setitem__(slice(None), t + 1e-3),
    "add_in_graph": add_in_graph,
    "copy_in_graph": copy_in_graph,
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_small_steps_add_up(step: Callable[[Tensor], Any]) -> None:
    """However they are written: nothing tells copy_ a step from a load."""
    torch.manual_seed(0)
    t = GroupedTensor.quantize(torch.ones(1, 128, 128))
    for _ in range(100):
        step(t)
    # as above: the spacing of e4m3 is 0.125 there
    assert abs(t.mean().item() - 1.1) < 5 * 0.11 / 128
    assert_same(t, t)


@DEVICES
@pytest.mark.parametrize("dtype", [BF16, FP32, torch.float64], ids=str)
def test_copy_of_numbers_of_the_format_is_exact(dtype: torch.dtype, device: str) -> None:
    """Stochastic rounding leaves e4m3 numbers as they are: a checkpoint may be copied by hand."""
    numbers = GroupedTensor.quantize(random_weight(device)[:, :256])
    numbers[0, :128] = numbers[0, :128] * 2**-6  # blocks that do not use all of e4m3's range
    w = numbers.dequantize(FP32)
    for write in (
        lambda t: t.copy_(w.to(dtype)),
        lambda t: torch._foreach_copy_([t], [w.to(dtype)]),
        lambda t: t.__setitem__(slice(None), w.to(dtype)),
        lambda t: t.__setitem__((slice(None), slice(3, 256)), w[:, 3:].to(dtype)),
    ):
        t = GroupedTensor.quantize(torch.full_like(w, 1e-9))
        t[:, :3] = w[:, :3]
        write(t)
        assert_same_bits(t.dequantize(), w)


def test_to_nearest_on_purpose() -> None:
    """A copy of what is quantized moves bytes: one that a weight in high precision should make."""
    w = random_weight()
    for recipe in RECIPES.values():
        t = GroupedTensor.quantize(torch.zeros(E, N, K), recipe)
        nearest = GroupedTensor.quantize(w, recipe)
        t.copy_(GroupedTensor.quantize(w, t.recipe))
        assert_same(t, nearest)
        t.copy_(w)
        assert not torch.equal(t.q.view(torch.uint8), nearest.q.view(torch.uint8))
        assert_same_bits(t.scale, nearest.scale)


# --- optimizers ----------------------------------------------------------------------------------

MODES = pytest.mark.parametrize("mode", ["loop", "foreach", "fused"])
FUSED_ADAMW = ("AdamW", "fused")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, **o),
    # AdamW decays weights in a step of its own.
    "AdamW": lambda p, **o: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0, **o),
}


def in_mode(name: str, mode: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    # Left to itself, an optimizer on CUDA takes foreach for plain parameters, with other last bits.
    options = {"foreach": False} if mode == "loop" else {mode: True}
    return OPTIMIZERS[name](parameters, **options)


@DEVICES
@pytest.mark.parametrize(
    ("name", "mode"),  # test_adam.py has fused AdamW
    [(n, m) for n in OPTIMIZERS for m in ("loop", "foreach", "fused") if (n, m) != FUSED_ADAMW],
)
@pytest.mark.parametrize("at_once", [E, 2, 0], ids=["whole", "some_experts", "one_expert"])
def test_optimizer_steps(
    at_once: int, name: str, mode: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is the one of a float32 parameter, and quantized; plain neighbours are unharmed."""
    monkeypatch.setattr(dispatch, "ELEMENTS_AT_ONCE", at_once * N * K)
    p = nn.Parameter(to_nearest(random_weight(device)))
    neighbours = [nn.Parameter(torch.ones(16, device=device, dtype=d)) for d in (FP32, BF16)]
    optimizer = in_mode(name, mode, [neighbours[0], p, neighbours[1]])
    twin = nn.Parameter(p.detach().dequantize())
    twins = [nn.Parameter(n.detach().clone()) for n in neighbours]
    reference_optimizer = in_mode(name, mode, [twins[0], twin, twins[1]])
    for seed in range(3):
        for a, b in zip([p, *neighbours], [twin, *twins], strict=True):
            generator = torch.Generator().manual_seed(seed)
            a.grad = torch.randn(a.shape, generator=generator).to(device, a.dtype)
            b.grad = a.grad.clone()
        if device == "cuda":  # the host waits for nothing
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        reference_optimizer.step()
        with torch.no_grad():
            expected = GroupedTensor.quantize(twin)
            assert_same(p.detach(), expected)
            twin.copy_(expected)
        for a, b in zip(neighbours, twins, strict=True):
            assert_same_bits(a, b)
    state = [s for s in optimizer.state[p].values() if isinstance(s, Tensor) and s.dim()]
    assert state
    assert all(type(s) is Tensor and s.dtype == FP32 for s in state)


SMALL_STEPS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3),
    "SGD_foreach": lambda p: torch.optim.SGD(p, lr=1e-3, foreach=True),
    "SGD_fused": lambda p: torch.optim.SGD(p, lr=1e-3, fused=True),
    "SGD_tensor_lr": lambda p: torch.optim.SGD(p, lr=torch.tensor(1e-3)),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "AdamW_foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "AdamW_tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-4),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
}


# One of a kind compiles: a loop, a fused and a foreach one, a tensor for lr, and the ones of which
# docs/quantized_weights.md says something else. Adafactor's pieces would take Dynamo minutes.
COMPILED_STEPS = ("SGD", "SGD_fused", "AdamW_foreach", "AdamW_tensor_lr", "RAdam")


@pytest.mark.parametrize(
    ("name", "compiled"),
    [*((name, False) for name in SMALL_STEPS), *((name, True) for name in COMPILED_STEPS)],
)
def test_small_steps_of_every_optimizer(name: str, compiled: bool) -> None:
    """They go where those of a plain weight go: docs/quantized_weights.md lists them."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    means = []
    for make in (torch.clone, GroupedTensor.quantize):
        p = nn.Parameter(make(torch.ones(1, 128, 128)))
        optimizer = SMALL_STEPS[name]([p])
        step = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for _ in range(30):
            p.grad = torch.ones(p.shape)
            step()
        means.append(p.detach().mean().item())
    plain, quantized = means
    assert plain < 0.995
    # An element takes a step of 0.0625 with the probability of d / 0.0625, so that after all of
    # them it deviates by at most sqrt(0.0625 * (1 - plain)), and by twice that where Adam first
    # steps below 1; the mean of 2^14 elements by 2^-7 of it.
    assert abs(quantized - plain) < 5 * 2 * (0.0625 * (1 - plain)) ** 0.5 / 128


def losses_of(p: nn.Parameter, name: str, mode: str, target: Tensor) -> list[float]:
    """200 steps of least squares, an expert each; the learning rate falls to zero."""
    # Left to itself, an optimizer on CUDA takes foreach for plain parameters, with other last bits.
    options = {"foreach": False} if mode == "loop" else {mode: True}
    if name == "SGD":
        optimizer = torch.optim.SGD([p], lr=50.0, **options)
    else:
        optimizer = torch.optim.AdamW([p], lr=0.05, weight_decay=1e-3, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 200)
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(200):
        x = torch.randn(target.size(0), 64, target.size(2), generator=generator)
        loss = (x @ (p.float() - target).transpose(1, 2)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses


@MODES
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_trajectory(name: str, mode: str) -> None:
    """200 steps go where those of a bf16 parameter go, as near as the format allows."""
    generator = torch.Generator().manual_seed(2)
    start, target = torch.randn(2, 2, 128, 32, generator=generator)
    quantized = GroupedTensor.quantize(start.to(BF16), stochastic_rounding=True)
    bf16 = losses_of(nn.Parameter(quantized.dequantize()), name, mode, target)
    stochastic = losses_of(nn.Parameter(quantized), name, mode, target)
    assert stochastic[0] == bf16[0]
    # What is lost by rounding the solution itself to nearest. Rounding stochastically has twice the
    # variance, and that of several steps adds up before gradients take it back.
    error = GroupedTensor.quantize(target).dequantize() - target
    floor = target.size(2) * error.square().mean().item()
    for a, b in zip(stochastic, bf16, strict=True):
        assert a < 1.2 * b + 6 * floor
    if name == "AdamW":  # whose steps are smaller than half of a number's distance to the next
        nearest = to_nearest(start.to(BF16))
        assert losses_of(nn.Parameter(nearest), name, mode, target)[-1] > 20 * stochastic[-1]


# --- what cannot be ------------------------------------------------------------------------------


def test_data_that_does_not_fit() -> None:
    """Is refused before anything is written."""
    p = nn.Parameter(GroupedTensor.quantize(random_weight()))
    before = p.detach().clone()
    stands_for = "stands for bfloat16, float16 or float32, got data of float64: assign its deq"
    cases = {
        "dtype": (lambda: setattr(p, "data", torch.zeros(E, N, K).double()), stands_for),
        "module": (lambda: nn.ParameterList([p]).double(), stands_for),
        "shape": (
            lambda: setattr(p, "data", torch.zeros(0)),
            r"plain data must have the shape \[3, 272, 144\], got \[0\]",
        ),
        "device": (lambda: setattr(p, "data", p.data.to("meta")), "incompatible tensor type"),
    }
    for assign, says in cases.values():
        with pytest.raises(RuntimeError, match=says):
            assign()
        assert_same(p.detach(), before)


def test_memory_is_not_read_beneath_torch() -> None:
    """There is none where a tensor would have it: an error, not a null pointer."""
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.from_dlpack(GroupedTensor.quantize(random_weight()))


def test_memory_is_not_shared_among_processes() -> None:
    with pytest.raises(RuntimeError, match="share the tensor's q and scale"):
        nn.ParameterList([GroupedTensor.quantize(random_weight())]).share_memory()


@pytest.mark.parametrize("size", [(3, -1), (-1, -1), (E, N, K - 16), (0, -1), (-2, K)])
def test_view_of_another_size(size: tuple[int, ...]) -> None:
    w = random_weight()[:2]
    with pytest.raises(RuntimeError) as expected:
        w.view(5, *size)
    with pytest.raises(RuntimeError) as actual:
        GroupedTensor.quantize(w).view(5, *size)
    assert str(actual.value) == str(expected.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_new_zeros_of_what_is_not_quantized(dtype: torch.dtype) -> None:
    zeros = GroupedTensor.quantize(random_weight()).new_zeros(E, N, K, dtype=dtype)
    assert type(zeros) is Tensor
    assert zeros.dtype == dtype
    assert not zeros.any()


def test_out_of_another_shape() -> None:
    t = GroupedTensor.quantize(random_weight(dtype=BF16))
    out = torch.empty(0, dtype=BF16)
    assert torch.add(t, 1, out=out) is out
    assert_same_bits(out, t.dequantize() + 1)
    with pytest.raises(RuntimeError, match="cannot change the shape of a quantized tensor"):
        torch.add(t[0].dequantize(), 1, out=t[:0])
