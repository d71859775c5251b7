# SPDX-License-Identifier: Apache-2.0
"""Statistics of watched layers: the numbers, their flag, compiled, copied, over processes.

T rows, E groups, K in_features, N out_features, H features of a token, F features of h.
"""

import copy
import io
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from grouped_linear import (
    Float8BlockScaling,
    Float8CurrentScaling,
    GroupedLinear,
    GroupedMLP,
    Recipe,
    SquaredReLU,
    SwiGLU,
    convert,
    ops,
    te,
)
from grouped_linear.contrib import Statistics, fake_quantize, watch
from grouped_linear.contrib.watch_counts import COLUMNS, MAXIMA, WatchedLayer
from grouped_linear.parallel import ExpertParallel
from grouped_linear.recipes.recipe import ROLES
from support import reference
from support.compare import assert_all_same_bits, assert_same_bits
from support.devices import HERE, needs_gpu
from support.errors import sentence
from support.experts import FusedGroupedExperts, GroupedExperts
from support.formats import composed
from support.graphs import captured
from support.hugging_face import model_of, tokens
from support.pairs import one_in_ci, pairwise
from support.processes import Checks, device, on_cpu
from support.recipes import RECIPES
from support.tensors import BF16, FP32
from support.versions import INDUCTOR_COMPILES_WATCHED
from support.watched import COUNTS, layers, loss_of, mixtral

E, K, N, F, C = 5, 128, 272, 144, 2
SPLITS = (40, 0, 131, 3, 60)
T = sum(SPLITS) + 6


def linear(recipe: Recipe | None, where: str, dtype: torch.dtype = BF16, **options: Any) -> Any:
    torch.manual_seed(1)
    return GroupedLinear(E, K, N, recipe=recipe, dtype=dtype, device=where, **options)


def mlp(recipe: Recipe | None, where: str, **options: Any) -> Any:
    torch.manual_seed(1)
    return GroupedMLP(E, K, F, recipe=recipe, dtype=BF16, device=where, **options)


def watched(layer: Any) -> WatchedLayer:
    return watch(layer).layers[""]


def rows(features: int, dtype: torch.dtype = BF16) -> Tensor:
    """Rows with numbers that become zero, in groups and after them."""
    torch.manual_seed(2)
    t = torch.randn(T, features)
    t[:, 5::7] *= 2.0**-20
    t[:, 3] = 0
    t[sum(SPLITS) :] = torch.nan
    return t.to(dtype)


def routing(where: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    scores = torch.randn(T, E)
    scores[:, 1] = -9  # no token chooses it
    weights, chosen = scores.softmax(-1).topk(C)
    return weights.to(where), chosen.to(where)


def step(layer: Any, x: Tensor, *arguments: Any, of: Any = None) -> list[Tensor]:
    """The output and the gradients of a forward and a backward; `of` is what is called."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = (layer if of is None else of)(x, *arguments)
    torch.manual_seed(4)
    y.backward(torch.randn(y.shape).to(y))
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters() if p.requires_grad)]


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """All but the shared scales; float64 sums of squares in another order."""
    same = [i for i, name in enumerate(COLUMNS) if name not in ("blocks", "shared")]
    torch.testing.assert_close(actual[..., same], expected[..., same], rtol=1e-12, atol=0)


# --- the numbers ---------------------------------------------------------------------------------


def operand(name: str, t: Tensor, offs: Tensor | None, fp8: torch.dtype) -> tuple[Any, Any]:
    """What a GEMM reads of rows, or of a weight, and each number's scale, by the reference."""
    scaling, is_weight = reference.Scaling(name == "block"), offs is None
    if name == "none":
        return None, None
    if name == "mxfp8":
        return reference.round_mx_rowwise(t.flatten(0, -2)).view(t.shape), None
    if name == "block" and is_weight:
        q, scale, _ = reference.quantize_weight(t, scaling)
        scale = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        return q, scale[:, : t.size(1), : t.size(2)]
    if name == "block":
        q, scale = reference.quantize_rowwise(t, scaling)
        return q, scale[:, : len(t)].t().repeat_interleave(128, 1)[:, : t.size(1)]
    if is_weight:
        q, scale = reference.quantize(t, (1, 2), scaling)
        return q, scale.expand(t.shape)
    if name == "saturated":
        scale = torch.full((E,), OLD_SCALE)
        q, _ = reference.quantize_groups_with(t, offs, scale, fp8)
    else:
        q, scale = reference.quantize_groups(t, offs, scaling, fp8)
    of_row = torch.ones(len(t))
    for group, one in zip(reference.groups(offs, len(t)), scale, strict=True):
        of_row[group] = one
    return q, of_row[:, None].expand(t.shape)


def spaced(n: int, most: int | None, turn: int) -> list[int]:
    """At most so many of n: one of each of as many spaces, the larger first, by the turn."""
    count, found, first = n if most is None else min(n, most), [], 0
    share = Fraction((turn - 1) * 2654435769 % 2**32, 2**32)  # by the golden ratio
    for i in range(count):
        space = n // count + (i < n % count)
        found.append(first + int(share * space))
        first += space
    return found


def expected(
    name: str,
    t: Tensor,
    offs: Tensor | None,
    fp8: torch.dtype = reference.E4M3,
    most: int | None = 4,
    turn: int = 1,
) -> Tensor:
    """[E, columns] in float64, of the reference's quantizers."""
    q, scale = operand(name, t.float(), offs, fp8)
    N = t.size(1)
    groups = [slice(e * N, (e + 1) * N) for e in range(E)]
    if offs is not None:
        groups = reference.groups(offs, len(t))
    t, q, scale = (x if x is None else x.double().flatten(0, -2) for x in (t, q, scale))
    counted, width = [], 128 if name == "block" else t.size(1)
    for group in groups:
        n = group.stop - group.start
        at = [group.start + i for i in spaced(n, most, turn)]
        x, after = t[at], None if q is None else q[at] * (1 if scale is None else scale[at])
        finite = x.isfinite() if after is None else x.isfinite() & after.isfinite()
        now = {"calls": 1, "rows": n, "numbers": x.numel(), "not_finite": (~finite).sum()}
        now["amax"] = x[finite].abs().max() if finite.any() else 0
        if after is not None:
            now["compared"] = finite.sum()
            now["underflow"] = (finite & (x != 0) & (after == 0)).sum()
            now["error"] = ((after - x)[finite] ** 2).sum()
            now["square"] = (x[finite] ** 2).sum()
        if scale is not None:
            beyond = 464.0 if fp8 == reference.E4M3 else 61440.0  # half a step beyond the largest
            now["saturated"] = (finite & (x.abs() > beyond * scale[at])).sum()
            scanned = [group.start + i for i in spaced(n, most and 128 * most, turn)]
            if offs is None or name != "block":  # whole blocks, and a group's
                scanned = list(range(group.start, group.stop))
            # Zeros have scale 1 and count nothing: a block of rows, a row's, or a group's.
            of_blocks = scale[scanned].masked_fill(~is_counted(q, scale, scanned, width), 0)
            now["scaled_amax"] = of_blocks.max() * torch.finfo(fp8).max if n else 0
        counted.append([float(now.get(column, 0)) for column in COLUMNS])
    return torch.tensor(counted, dtype=torch.float64)


def is_counted(q: Tensor, scale: Tensor, at: list[int], width: int) -> Tensor:
    """Where a scale is of a block that has a number other than 0, or is not 1."""
    has = torch.stack([(part != 0).any(1) for part in q[at].split(width, 1)], 1)
    return has.repeat_interleave(width, 1)[:, : q.size(1)] | (scale[at] != 1)


OLD_SCALE = 2.0**-8
EXTREMES = ("none", "block", "current", "delayed", "saturated", "mxfp8")


def extremes(t: Tensor) -> Tensor:
    """Rows of zeros, whose scale is 1, and what is not finite."""
    t[5:9] = 0
    t[41::7, 2] = torch.inf
    t[43::9, -1] = torch.nan
    t[60, 20] = 400  # whose scale is 1 as well
    return t


@pytest.mark.parametrize("where", HERE)
@pytest.mark.parametrize(
    ("most", "turn", "dtype", "changed"),
    [(4, 1, BF16, False), (4, 7, FP32, True), (1, 2, BF16, True), (None, 3, BF16, True)],
    ids=str,
)
@pytest.mark.parametrize("name", EXTREMES)
def test_numbers_of_a_linear_layer(
    name: str, most: int | None, turn: int, dtype: torch.dtype, changed: bool, where: str
) -> None:
    """Each role and group, of rows that are quantized by the reference, in float64."""
    layer = linear(RECIPES["delayed" if name == "saturated" else name], where, dtype)
    if name == "saturated":  # by scales of earlier steps, which were smaller
        layer.weight_state.x.scale.fill_(OLD_SCALE)
    x, dy, offs = rows(K, dtype), rows(N, dtype), torch.tensor(SPLITS).cumsum(0).int()
    if changed:
        x, dy = extremes(x), extremes(dy)
    seen = watch(layer, rows=most).layers[""]
    seen.switch(turn)
    layer(x.to(where, copy=True).requires_grad_(), list(SPLITS)).backward(dy.to(where))
    read = seen.read().cpu()[0]
    delayed = name in ("delayed", "saturated")
    w, of_others = layer.weight.detach().cpu(), "delayed" if delayed else name
    by_role = {
        "input": expected(name, x, offs, most=most, turn=turn),
        "weight": expected(of_others, w, None, most=most, turn=turn),
        "grad_output": expected(
            of_others, dy, offs, reference.E5M2 if delayed else reference.E4M3, most, turn
        ),
    }
    for role, of_role in by_role.items():
        assert_near(read[ROLES.index(role)], of_role)
    assert name != "saturated" or by_role["input"][:, COLUMNS.index("saturated")].sum() > 0


@pytest.mark.parametrize("where", HERE)
@pytest.mark.parametrize("name", RECIPES)
def test_numbers_of_an_mlp(name: str, where: str) -> None:
    """Its two projections count what two linear layers of the same rows do."""
    recipe, (weights, chosen) = RECIPES[name], routing(where)
    layer, x = mlp(recipe, where), rows(K)[: sum(SPLITS)].to(where)
    weights, chosen = weights[: len(x)], chosen[: len(x)]
    seen = watched(layer)
    step(layer, x, weights, chosen)
    read = seen.read()
    sorted_rows = ops.sort_by_expert(chosen, E)
    splits = sorted_rows.offs.diff(prepend=sorted_rows.offs.new_zeros(1))
    x_RK = x[sorted_rows.token.long()]
    t = x_RK
    for i, weight in enumerate((layer.gate_up_proj, layer.down_proj)):
        one = GroupedLinear(E, weight.size(2), weight.size(1), bias=False, recipe=recipe).to(x)
        one.weight.data.copy_(weight.detach())
        beside = watched(one)
        t = one(t, splits).detach()
        if i == 0:
            t = ops.swiglu(t, sorted_rows.offs)
        of_one = beside.read()[0]
        for role in (0, 1):
            assert_near(read[i, role], of_one[role])
    # of the second layer the unweighted gradient is multiplied
    torch.manual_seed(4)
    d_out_RK = torch.randn(x.shape).to(x)[sorted_rows.token.long()]
    down = GroupedLinear(E, F, K, bias=False, recipe=recipe, dtype=BF16, device=where)
    beside = watched(down)
    h_RF = torch.zeros(len(t), F, dtype=BF16, device=where, requires_grad=True)
    down(h_RF, splits).backward(d_out_RK)
    assert_near(read[1, 2], beside.read()[0, 2])


@pytest.mark.parametrize("where", HERE)
@pytest.mark.parametrize("name", ["block", "current", "mxfp8"])
def test_a_format_of_a_users_own(name: str, where: str) -> None:
    """The same numbers of a function as of the format that it composes, d_gate_up's among them."""
    recipe = RECIPES[name]
    assert recipe is not None
    found = []
    for one in (recipe, composed(recipe)):
        layer = mlp(one, where)
        seen = watched(layer)
        step(layer, rows(K)[: sum(SPLITS)].to(where), *(t[: sum(SPLITS)] for t in routing(where)))
        found.append(seen.read())
    assert_near(*found)


@pytest.mark.parametrize("where", HERE)
def test_shared_scales(where: str) -> None:
    """Blocks of 128 rows whose features are far apart, and near."""
    torch.manual_seed(0)
    far = torch.logspace(0, -4, K).expand(T, K)
    for x, shares in ((torch.randn(T, K), 1.0), (torch.randn(T, K) * far, 0.0)):
        layer = linear(Float8BlockScaling(), where)
        seen = watch(layer)
        layer(x.to(where, BF16).requires_grad_(), list(SPLITS)).sum().backward()
        assert seen.read().operands[0].shared == shares
        layer = mlp(Float8BlockScaling(), where)
        seen = watch(layer)
        step(layer, x.to(where, BF16), *routing(where))
        assert seen.read().operands[0].shared == shares


def test_shared_scales_of_each_group() -> None:
    """Blocks of 128 rows count from the first row of their group."""
    x = torch.randn(T, K).to(BF16)
    far = torch.cat([torch.arange(40, 171), torch.arange(174, 234)])  # groups 2 and 4
    x[far] *= torch.logspace(0, -4, K).to(BF16)
    layer = linear(Float8BlockScaling(), "cpu")
    seen = watched(layer)
    layer(x.requires_grad_(), list(SPLITS)).sum().backward()
    read = seen.read()[0, ROLES.index("input")]
    assert read[:, COLUMNS.index("blocks")].tolist() == [1, 0, 2, 1, 1]
    assert read[:, COLUMNS.index("shared")].tolist() == [1, 0, 0, 1, 0]


def test_calls_add_up() -> None:
    """Sums are added, of maxima the larger is kept."""
    layer, read = linear(Float8BlockScaling(), "cpu"), []
    seen = watched(layer)
    for scales in ((3.0,), (1.0,), (3.0, 1.0)):
        for scale in scales:
            layer((scale * rows(K)).requires_grad_(), list(SPLITS)).backward(rows(N))
        read.append(seen.read())
    first, second, both = read
    maxima = torch.tensor([name in MAXIMA for name in COLUMNS])
    torch.testing.assert_close(both, torch.where(maxima, first.maximum(second), first + second))
    assert (first[0, 0, 0] != second[0, 0, 0]).any()


def test_dropped_rows_and_loads() -> None:
    layer, (weights, chosen) = mlp(Float8BlockScaling(), "cpu"), routing("cpu")
    seen, max_rows = watch(layer), T * C - 100
    layer(rows(K).nan_to_num(), weights, chosen, max_rows=max_rows)
    load = seen.read().loads[0]
    whole = chosen.flatten().bincount(minlength=E)
    assert sum(load.tokens) == max_rows
    assert load.dropped == 100
    assert load.idle == [1, *([4] if whole[4] <= 100 else [])]
    assert load.imbalance == pytest.approx(max(load.tokens) * E / max_rows)


# --- what a layer computes and the flag ----------------------------------------------------------


LAYERS = ("linear", "mlp", "sorted", "limit", "relu")


def case(kind: str, recipe: Recipe | None, where: str, **options: Any) -> tuple[Any, Any, Any]:
    """A layer, its input and the other arguments of a call."""
    x = rows(K)[: sum(SPLITS)].to(where)
    splits = torch.tensor(SPLITS, device=where)
    if kind == "linear":
        return linear(recipe, where, **options), x, (splits,)
    if kind == "sorted":

        class Sorted(GroupedMLP):
            def forward(self, x: Tensor, m_splits: Tensor) -> Tensor:
                return self.forward_sorted(x, m_splits)

        torch.manual_seed(1)
        layer = Sorted(E, K, F, recipe=recipe, dtype=BF16, device=where, **options)
        return layer, x, (splits,)
    activation = {"limit": SwiGLU(limit=0.5, interleaved=True), "relu": SquaredReLU()}.get(kind)
    more = {} if activation is None else {"activation": activation}
    weights, chosen = (t[: len(x)] for t in routing(where))
    return mlp(recipe, where, **more, **options), x, (weights, chosen)


@pytest.mark.parametrize("where", HERE)
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", RECIPES)
def test_bits_and_flag(name: str, kind: str, where: str) -> None:
    layer, x, arguments = case(kind, RECIPES[name], where)
    plain = step(copy.deepcopy(layer), x, *arguments)
    seen = watched(layer)
    seen.switch(False)
    off = step(layer, x, *arguments)
    assert not seen.read().any()
    seen.switch(True)
    on = step(layer, x, *arguments)
    counted = seen.read()
    assert (counted[..., COLUMNS.index("calls")] == 1).all()  # each operand of each group, once
    assert not seen.read().any()
    for results in (off, on):
        assert_all_same_bits(results, plain)


@pytest.mark.parametrize("where", HERE)
@pytest.mark.parametrize(
    ("name", "kind"), one_in_ci([*[*zip(RECIPES, LAYERS, strict=False)][1:], ("none", "linear")])
)
def test_compiled_graphs(name: str, kind: str, where: str) -> None:
    """A graph counts what eager calls count, as the flag says, with bits close to theirs."""
    layer, x, arguments = case(kind, RECIPES[name], where)
    plain = step(copy.deepcopy(layer), x, *arguments)
    seen = watched(layer)
    step(layer, x, *arguments)
    counted = seen.read()
    torch._dynamo.reset()
    by_inductor = kind == "mlp" and (where == "cpu" or INDUCTOR_COMPILES_WATCHED)
    backend = "inductor" if by_inductor else "aot_eager"
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    step(layer, x, *arguments, of=compiled)
    torch.testing.assert_close(seen.read(), counted, rtol=1e-12, atol=0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        seen.switch(False)
        step(layer, x, *arguments, of=compiled)
        assert not seen.read().any()
        seen.switch(True)
        for actual, one in zip(step(layer, x, *arguments, of=compiled), plain, strict=True):
            torch.testing.assert_close(actual, one, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(seen.read(), counted, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("recipe", "compiled"),
    one_in_ci([(Float8CurrentScaling(), False), (Float8BlockScaling(), True)]),
    ids=str,
)
def test_weights_that_are_kept_transposed(recipe: Recipe, compiled: bool) -> None:
    """As [E, K, N], which GPT-OSS has: those that each call quantizes."""
    model, ids = model_of("gpt_oss", "cpu"), tokens("cpu", 3, 7)
    read = []
    for weights in (None, "both"):
        one: Any = copy.deepcopy(model)
        convert(one, recipe, weights=weights)  # type: ignore[arg-type]
        seen = watch(one, rows=None)
        call = torch.compile(one, backend="aot_eager") if compiled and weights else one
        call(ids).logits.square().mean().backward()
        read.append([row[1:-1] for row in seen.read().operands if row.role == "weight"])
    assert read[0] == read[1]
    assert len(read[0]) == 2


@pytest.mark.parametrize("where", HERE)
@pytest.mark.parametrize(
    ("options", "kind", "compiled"),
    pairwise(
        {"both": {"weights": "both"}, "fp8": {"weights": "fp8"}, "cached": {"cache_weights": True}},
        {"linear": "linear", "mlp": "mlp"},
        {"eager": False, "compiled": True},
    ),
)
def test_weights_that_are_kept(
    kind: str, options: dict[str, Any], compiled: bool, where: str
) -> None:
    """As those that each call quantizes; of FP8 alone what the numbers tell."""
    plain, x, arguments = case(kind, Float8BlockScaling(), where)
    kept, _, _ = case(kind, Float8BlockScaling(), where, **options)
    if options.get("weights") == "fp8":  # which is frozen
        for name, _ in plain.named_parameters():
            plain.get_parameter(name).requires_grad_(kept.get_parameter(name).requires_grad)
    first = (True,) if "cache_weights" in options else ()
    counted = []
    for layer, more in ((plain, ()), (kept, first)):
        seen = watched(layer)
        step(layer, x, *arguments, *more)
        counted.append(seen.read())
        if compiled and layer is kept:
            torch._dynamo.reset()
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            step(layer, x, *arguments, *more, of=compiled)
            assert torch.equal(seen.read(), counted[-1])
    if options.get("weights") != "fp8":
        assert torch.equal(*counted)
        return
    assert torch.equal(counted[0][:, [0, 2]], counted[1][:, [0, 2]])
    alone = counted[1][:, 1]
    compared, amax = (alone[..., COLUMNS.index(n)] for n in ("compared", "amax"))
    assert not compared.any()
    assert (amax > 0).all()


@pytest.mark.parametrize(("name", "compiled"), [*((n, False) for n in RECIPES), ("block", True)])
def test_lists_of_weights(name: str, compiled: bool) -> None:
    """A parameter for each expert counts as one of all does."""
    found = []
    for single in (False, True):
        torch.manual_seed(1)
        options: Any = {"params_dtype": BF16, "single_grouped_weight": single}
        layer = te.GroupedLinear(E, K, N, bias=False, recipe=RECIPES[name], **options)
        seen = watch(layer)
        of = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else None
        step(layer, rows(K)[: sum(SPLITS)], list(SPLITS), of=of)
        with torch.no_grad():
            for p in layer.parameters():
                p[..., : N // 2, :] += 1
        found.append(seen.read())
    assert repr(found[0]) == repr(found[1])  # NaN is NaN
    assert {row.moved for row in found[0].operands if row.role == "weight"} == {0.5}


def test_weights_in_other_16_bits_than_autocasts() -> None:
    layer = linear(RECIPES["block"], "cpu", torch.float16)
    seen, x = watch(layer), rows(K)[: sum(SPLITS)]
    counted = []
    for autocast in (False, True):
        with torch.autocast("cpu", BF16, enabled=autocast):
            layer(x, list(SPLITS))
        counted.append(repr(seen.read()))
    assert counted[0] == counted[1]


@needs_gpu
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", RECIPES)
def test_cuda_graph_obeys_the_flag(name: str, kind: str) -> None:
    layer, x, arguments = case(kind, RECIPES[name], "cuda")
    seen = watched(layer)
    step(layer, x, *arguments)
    counted = seen.read()
    x = x.requires_grad_()
    torch.manual_seed(4)
    dy = torch.randn(layer(x, *arguments).shape).to(x)
    graph, _ = captured(lambda: layer(x, *arguments).backward(dy))
    for on, times in ((False, 0), (True, 1), (False, 0), (True, 1)):
        seen.switch(on)
        seen.reset()
        graph.replay()
        torch.cuda.synchronize()
        read = seen.read()
        assert bool(read.any()) == on
        if times:
            assert torch.equal(read, counted)


# --- copies, devices, readings -------------------------------------------------------------------


def test_copies_and_pickles_are_not_watched() -> None:
    layer, x, arguments = case("mlp", Float8BlockScaling(), "cpu")
    seen, keys = watched(layer), list(layer.state_dict())
    assert not dict(layer.named_buffers())
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    for other in (copy.deepcopy(layer), torch.load(saved, weights_only=False)):
        assert other.observed is None
        assert list(other.state_dict()) == keys
        step(other, x, *arguments)
        assert not seen.read().any()


def test_the_numbers_move_with_the_model_and_keep_their_dtype() -> None:
    """To another dtype, and from meta: a model that gets memory after watch counts as any."""
    _, x, arguments = case("mlp", None, "cpu")
    layer = mlp(Float8BlockScaling(), "meta")
    seen = watch(layer)
    layer.to_empty(device="cpu").reset_parameters()
    step(layer.to(FP32), x.float(), *arguments)
    assert layer.observed.read(reset=False).dtype == torch.float64
    layer.to_empty(device="cpu")  # of what has numbers already, which stay
    read = seen.read()
    assert sum(read.loads[0].tokens) == C * len(x)
    assert all(row.amax > 0 for row in read.operands)


def trained(layer: Any, x: Tensor, arguments: Any, lr: float, steps: int, **watching: Any) -> Any:
    optimizer, seen = torch.optim.SGD(layer.parameters(), lr=lr), watch(layer, **watching)
    for _ in range(steps):
        layer.zero_grad()
        layer(x, *arguments).square().mean().backward()
        optimizer.step()
        yield seen.step()


def test_steps_between_readings() -> None:
    layer, x, arguments = case("linear", Float8BlockScaling(), "cpu")
    seen: list[Statistics] = []
    read = list(trained(layer, x, arguments, 0.1, 7, every=3, to=seen.append))
    assert [r is not None for r in read] == [True, False, False, True, False, False, True]
    assert [r.step for r in seen] == [0, 3, 6]
    assert all(r.loads[0].tokens == SPLITS for r in seen)  # of one step each
    whole = next(row for row in seen[-1].operands if row.role == "input")
    assert whole.tokens == sum(SPLITS)
    assert 1e-4 < whole.error < 2e-3


def test_the_sample_moves_and_can_be_all() -> None:
    """One row of a weight shows in some steps; with rows=None in each; in none while it is off."""
    layer, x, arguments = case("linear", Float8BlockScaling(), "cpu")
    layer.weight.data[2, 200, 7] = 1e4

    def steps(seen: Any, n: int) -> list[int]:
        found = []
        for i in range(n):
            layer(x, *arguments)
            rows = [r for r in seen.step().experts if (r.role, r.expert) == ("weight", 2)]
            assert not any(r.scaled_amax < 9e3 for r in rows)
            found += [i for r in rows if r.amax > 9e3]
        return found

    assert steps(watch(layer, rows=None), 2) == [0, 1]
    sampled = steps(watch(layer), N)
    assert 1 <= len(sampled) <= 6  # one of 68 rows in each step
    assert steps(watch(layer), max(sampled) + 1) == sampled
    seen = watch(layer, rows=None)
    seen.switch(False)
    assert not steps(seen, 2)
    seen.switch(True)
    assert steps(seen, 1) == [0]


def test_graphs_from_before_fit_again() -> None:
    """After remove(); of a layer and of a module that convert has converted."""
    experts = GroupedExperts(E, K, F)
    convert(experts)
    layer, x, (splits,) = case("linear", None, "cpu")
    for module, rows_TK in ((layer, x), (experts, x.float())):
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        compiled(rows_TK, splits)
        watch(module).remove()
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled(rows_TK, splits)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_checkpointed_layer(compiled: bool) -> None:
    """Its bits stay, and a forward that is computed again is counted again."""
    layer, x, arguments = case("mlp", Float8BlockScaling(), "cpu")
    plain = step(layer, x, *arguments)
    seen = watched(layer)

    def call(*given: Any) -> Any:
        return checkpoint(layer, *given, use_reentrant=False)

    of = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    assert_all_same_bits(step(layer, x, *arguments, of=of), plain)
    calls = seen.read()[..., COLUMNS.index("calls")]
    assert (calls[:, :2] >= 1).all()
    assert (calls[:, 2] == 1).all()


def test_gate_and_up_that_are_computed_again() -> None:
    """The backward quantizes the same rows again, which are counted once."""
    read = []
    for again in (False, True):
        layer, x, arguments = case("mlp", Float8BlockScaling(), "cpu", recompute_gate_up=again)
        seen = watch(layer)
        step(layer, x, *arguments)
        read.append(seen.read())
    first, second = ([row for row in r.operands if row.role == "input"] for r in read)
    assert repr(first) == repr(second)  # NaN of what an input does not count
    assert read[0].loads == read[1].loads


def test_worst_finds_what_no_row_has_shown() -> None:
    """A number in a row that is not read stands in its block's scale."""
    layer, x, arguments = case("mlp", Float8BlockScaling(), "cpu")
    x = torch.randn_like(x)
    x[7, 9] = 1e4
    seen = watch(layer)
    step(layer, x, *arguments)
    read, has_it = seen.step(), arguments[1][7].tolist()
    for row in read.experts:
        if row[:2] == ("gate_up_proj", "input") and row.tokens:
            assert (row.outlier > 1e3) if row.expert in has_it else (row.outlier < 50)
    assert {row.expert for row in read.worst(role="input", n=C)} <= set(has_it)


def test_one_watch_of_a_layer() -> None:
    """A second would reset the numbers of the first."""
    layer, x, arguments = case("linear", Float8BlockScaling(), "cpu")
    first = watch(layer)
    layer(x, *arguments)
    assert sentence(lambda: watch(nn.Sequential(layer))) == (
        "watch: 0 is watched already: read that Watch, or call its remove()"
    )
    assert first.read().operands
    first.remove()
    second = watch(layer)
    first.remove()  # not of the second
    layer(x, *arguments)
    assert second.read().operands


def test_table() -> None:
    layer, x, arguments = case("mlp", Float8BlockScaling(), "cpu")
    model = nn.Sequential(layer)
    layer.down_proj.data[3, 0, 0] = 1e6
    (seen,) = (watch(model),)
    step(layer, x, *arguments)
    read = seen.read()
    table = str(read)
    assert table.splitlines()[1].split()[:4] == ["layer", "role", "tokens", "amax"]
    assert table.splitlines()[6].split()[:2] == ["0.down_proj", "weight"]
    assert read.worst("scaled_amax", "weight")[0][:3] == ("0.down_proj", "weight", 3)
    seen.remove()
    step(layer, x, *arguments)
    assert layer.observed is None


def test_nothing_to_watch_and_wrong_options() -> None:
    with pytest.raises(ValueError, match=r"^watch: Linear has no GroupedLinear, no GroupedMLP and"):
        watch(nn.Linear(3, 3))
    layer = linear(None, "cpu")
    with pytest.raises(ValueError, match=r"^watch: every must be a positive integer, got 0$"):
        watch(layer, every=0)
    with pytest.raises(ValueError, match=r"^watch: rows must be a positive integer, got True$"):
        watch(layer, rows=True)
    with pytest.raises(ValueError, match=r"^watch: to must be a function, got int$"):
        watch(layer, to=3)
    assert layer.observed is None


# --- transformers --------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, Float8BlockScaling()])
def test_hugging_face(recipe: Recipe | None) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from support.hugging_face import tiny

    model = tiny("qwen3_moe", num_hidden_layers=2)
    convert(model, recipe)
    seen = watch(model)
    tokens = torch.arange(20).view(2, 10)
    model(input_ids=tokens, labels=tokens).loss.backward()
    read = seen.read()
    assert len(read.loads) == 2
    assert all(sum(load.tokens) == 40 for load in read.loads)
    assert read.operands[0].layer == "model.layers.0.mlp.experts.gate_up_proj"
    assert len(read.operands) == 2 * 2 * 3
    callback = seen.trainer_callback()
    callback.on_step_end(None, None, None)
    assert seen.steps == 1


WEIGHTS = {GroupedExperts: ("w1_EFD", "w3_EFD", "w2_EDF"), FusedGroupedExperts: ("w13", "w2_EDF")}


@pytest.mark.parametrize(
    ("experts", "name"),
    [
        (GroupedExperts, "delayed"),
        *one_in_ci([(FusedGroupedExperts, "block"), (GroupedExperts, "none")]),
    ],
)
def test_watch_experts_in_one_module(experts: Any, name: str) -> None:
    """Eager and compiled count the same; the bits stay; every weight has a name and moves."""
    model, x = layers(experts, RECIPES[name])
    plain = copy.deepcopy(model)(x)
    plain.sum().backward()
    seen = watch(model)
    y = model(x)
    y.sum().backward()
    assert_same_bits(y, plain)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1
    read = seen.read()
    names = [f"layers.{i}.{w}" for i in range(2) for w in WEIGHTS[experts]]
    assert list(dict.fromkeys(row.layer for row in read.operands)) == names
    assert len(read.operands) == 3 * len(names)
    assert all(row.moved > 0.99 for row in read.operands if row.role == "weight")
    assert [load.tokens for load in read.loads] == [COUNTS, COUNTS]
    if name != "delayed":  # whose state the first call has moved
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1
        torch._dynamo.reset()
        model.zero_grad()
        seen.read()
        torch.compile(model, fullgraph=True, backend="aot_eager")(x).sum().backward()
        again = seen.read()
        assert [r[:4] for r in again.experts] == [r[:4] for r in read.experts]
        for now, before in zip(again.experts, read.experts, strict=True):
            assert now.amax == pytest.approx(before.amax, rel=1e-5, nan_ok=True)  # of silu


def test_by_pattern() -> None:
    """convert gives one layer the recipe whose gradient stays in high precision; it trains."""
    own = fake_quantize(Float8BlockScaling(), ("input", "weight"))
    model = mixtral(recipes={"*.layers.0.*": own})
    seen = watch(model)
    loss_of(model).backward()
    compared = {
        (row.layer.split(".")[2], row.role): row.error == row.error
        for row in seen.read().operands
        if "gate_up" in row.layer
    }
    assert compared == {
        (layer, role): layer == "1" or role != "grad_output"
        for layer in "01"
        for role in ("input", "weight", "grad_output")
    }


def test_a_language_model_is_healthy() -> None:
    """By the rules of docs/debugging_fp8.md: padding and last tokens have gradients of zeros."""
    model = mixtral(num_hidden_layers=1, hidden_size=128, intermediate_size=256)
    seen, tokens = watch(model), torch.randint(64, (4, 64))
    labels, mask = tokens.clone(), torch.ones_like(tokens)
    labels[0, 40:], mask[0, 40:] = -100, 0
    model(input_ids=tokens, labels=labels, attention_mask=mask).loss.backward()
    for row in seen.read().operands:
        assert row.amax <= row.scaled_amax < 8 * row.amax, row
        assert row.underflow < 0.01
        assert row.saturated == row.not_finite == 0
        assert 5e-4 < row.error < 1e-3


# --- processes -----------------------------------------------------------------------------------


def check_reduced(rank: int, folder: Path) -> None:
    where = device()
    layer = linear(Float8BlockScaling(), where)
    seen = watch(layer)
    x = rows(K)[: sum(SPLITS)].to(where) * (1 + rank)
    step(layer, x, list(SPLITS))
    own, together = seen.read(reset=False), seen.read(dist.group.WORLD)
    assert sum(together.loads[0].tokens) == 2 * sum(SPLITS)
    amax = torch.tensor([row.amax for row in own.experts if row.role == "input"])
    dist.all_reduce(amax.to(where), dist.ReduceOp.MAX)
    both = [row.amax for row in together.experts if row.role == "input"]
    assert both[0] >= own.experts[0].amax
    assert torch.tensor(both).isfinite().sum() == 4  # and an expert without tokens
    assert not any(load.tokens[0] for load in seen.read().loads)


def check_spread(rank: int, folder: Path) -> None:
    """FSDP2 over other processes than experts are spread over: their numbers are added up."""
    kind = device().type
    mlp: Any = GroupedMLP(4, 32, 16, recipe=Float8BlockScaling(), device=kind)
    both = init_device_mesh(kind, (2, 1), mesh_dim_names=("data", "experts"))
    parallelize_module(mlp, both["experts"], ExpertParallel())
    seen = watch(fully_shard(mlp, mesh=both["data"]))
    chosen = torch.arange(10, device=kind).view(10, 1) % 4
    mlp(rows(32)[:10].to(kind), torch.ones(10, 1, device=kind), chosen)
    assert seen.read(both["data"].get_group()).loads[0].tokens == (6, 6, 4, 4)


class Layer(nn.Module):
    """torchtitan's experts, and how many rows each has."""

    def __init__(self, E: int) -> None:
        super().__init__()
        self.experts = GroupedExperts(E, 32, 16)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return self.experts(x, counts)


def check_sharded(rank: int, folder: Path) -> None:
    """By FSDP2, before and after watch, whole and beside experts that are spread already."""
    kind, recipe = device().type, Float8BlockScaling()
    mesh = init_device_mesh(kind, (2,))
    counts = {E: torch.tensor([7, 0, 2, *[1] * (E - 3)], device=kind) for E in (3, 4)}
    for E, wholly in ((3, True), (3, False), (4, True)):  # one process has no second expert of 3
        found = []
        for shard_first in (False, True):
            torch.manual_seed(0)
            model = Layer(E).to(kind)
            convert(model, recipe)
            seen = None if shard_first else watch(model)
            fully_shard(model if wholly else model.experts, mesh=mesh)
            seen = seen or watch(model)
            x = rows(32)[: int(counts[E].sum())].to(kind).requires_grad_()
            for _ in range(2):  # the second time as an update of weights leaves them
                model(x, counts[E]).square().sum().backward()
                torch.optim.SGD(model.parameters(), lr=1e-3).step()
            found.append(seen.read(dist.group.WORLD))
        assert str(found[0]) == str(found[1])
        assert found[0].loads[0].tokens == tuple((4 * counts[E]).tolist())

    both = init_device_mesh(kind, (1, 2), mesh_dim_names=("data", "experts"))
    spread: Any = Layer(4).to(kind)
    whole = Layer(4).to(kind)
    convert(spread, recipe)
    for name, p in list(spread.experts.named_parameters()):
        part = distribute_tensor(p.detach(), both["experts"], [Shard(0)])
        spread.experts.register_parameter(name, nn.Parameter(part))
    ignored = copy.deepcopy(spread)
    fully_shard(ignored, mesh=mesh, ignored_params={*ignored.parameters()})
    for model in (ignored, fully_shard(spread, mesh=both["data"])):
        seen = watch(model)
        model(rows(32)[:10].to(kind), torch.tensor([4, 6], device=kind))  # which gathers weights
        seen.remove()
        seen = watch(model)
        model(rows(32)[:10].to(kind), torch.tensor([4, 6], device=kind))
        with pytest.raises(ValueError, match="are spread over processes of this group"):
            seen.read(both["experts"].get_group())
        assert seen.read(both["data"].get_group()).loads[0].tokens == (4, 6)

    part = Layer(4).to(kind)
    convert(part, recipe)
    fully_shard(part, mesh=mesh)
    seen = watch(part.experts)  # beside what else FSDP2 gathers with it
    part(rows(32)[:10].to(kind), torch.tensor([4, 6, 0, 0], device=kind))
    assert seen.read().loads[0].tokens == (4, 6, 0, 0)

    convert(whole, recipe)
    alone = GroupedMLP(4, 32, 16, recipe=recipe, device=kind)
    for module, use_orig_params in ((whole, True), (alone, False)):
        options: Any = {"use_orig_params": use_orig_params, "device_id": device()}
        flat = FullyShardedDataParallel(module, **options)
        for inside in (flat, flat.module):
            said = sentence(lambda inside=inside: watch(inside))
            assert "has flat parameters, as FullyShardedDataParallel makes them: call" in said
        assert all(getattr(m, "observed", None) is None for m in flat.modules())
    before = GroupedMLP(4, 32, 16, recipe=recipe, device=kind)
    other = FullyShardedDataParallel(nn.Linear(16, 16), device_id=device())
    seen = watch(nn.ModuleList([other, before]))
    flat = FullyShardedDataParallel(before, device_id=device())  # reads no view that it left
    flat(torch.randn(9, 32, device=kind), *torch.rand(9, 4, device=kind).topk(2))
    assert sum(seen.read().loads[0].tokens) == 18


def check_transposed(rank: int, folder: Path) -> None:
    """Weights stored as [E, K, N] that FSDP2 gathers in FP8: what their numbers tell."""
    torch.manual_seed(0)
    model: Any = model_of("gpt_oss", device().type)
    ids = tokens(device().type, 3, 7)
    convert(model, Float8BlockScaling(), weights="both")
    experts = model.model.layers[0].mlp.experts
    largest = [experts.get_parameter(n).abs().max().item() for n in ("gate_up_proj", "down_proj")]
    mesh = init_device_mesh(device().type, (2, 1), mesh_dim_names=("others", "alone"))
    seen = watch(fully_shard(model, mesh=mesh["alone"]), rows=None)
    model(ids).logits.sum().backward()
    amax = [row.amax for row in seen.read().operands if row.role == "weight"]
    for actual, expected in zip(amax, largest, strict=True):
        assert abs(actual - expected) < 2.0**-4 * expected


CHECKS: Checks = {
    "reduced": check_reduced,
    "spread": check_spread,
    "sharded": check_sharded,
    "transposed": check_transposed,
}

test_two_processes = on_cpu(CHECKS)
