# SPDX-License-Identifier: Apache-2.0
"""The rules that ops share, with the same sentences as csrc/checks/.

``@fake`` registers a function of a call as the fake kernel of the op that has its name.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

BLOCK = 128
FEATURE_MULTIPLE = 16
SCALE_ROW_MULTIPLE = 4
MAX_GROUPS = 1024
MX_BLOCK = 32
MAX_MARGIN = 64
MAX_COUNT = 2**31 - 1 - BLOCK  # rows are counted in 32 bits and rounded up to blocks
MAX_FEATURES = 2**29
MAX_MXFP4_FEATURES = 2**22
MAX_RANK = 512
FLOAT32_MAX = torch.finfo(torch.float32).max

E4M3 = torch.float8_e4m3fn
FP8 = (E4M3, torch.float8_e5m2)
ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return (a + b - 1) // b


def block_scales(E: int, N: int, K: int) -> tuple[int, int, int]:
    """The shape of a weight's scales, one a block of 128 x 128."""
    return E, ceil_div(N, BLOCK), ceil_div(K, BLOCK)


def padded_rows(num_rows: int, num_groups: int) -> int:
    """Rows of columnwise data: the bound 128 * floor((T + 127 * min(E, T)) / 128)."""
    wasted: int = (BLOCK - 1) * torch.sym_min(num_groups, num_rows)  # type: ignore[assignment]
    return BLOCK * ((num_rows + wasted) // BLOCK)


def output_if(requested: bool, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An output of an op, or an empty tensor if it is not requested."""
    return like.new_empty(shape if requested else (0,), dtype=dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as the sentences name it."""
    return str(dtype).removeprefix("torch.")


def at_most(size: int, most: int) -> bool:
    """Whether a size is in a limit. A symbol is, so that it stays free of guards."""
    return not isinstance(size, int) or size <= most


#: None in the place of a tensor, as C++ sees it: of one dimension, until a rule refuses it.
MISSING = SimpleNamespace(dtype=None, dim=lambda: 1)


class Rules:
    """The rules of one call of an op. Each method raises RuntimeError, with the op's name first.

    A rule looks up the arguments by name. The tensor of a list is its first one. An argument that
    is None was not given and follows every rule.
    """

    def __init__(self, op: str, /, **arguments: Any) -> None:
        self.op, self.arguments = op, arguments

    def _tensor(self, name: str) -> Any:
        argument = self.arguments[name]
        return argument[0] if isinstance(argument, list | tuple) else argument

    def check(self, rule_holds: bool, sentence: Callable[[], str]) -> None:
        """Raise ``op: sentence`` unless the rule holds; for unbacked sizes at run time."""
        torch._check(rule_holds, lambda: f"{self.op}: {sentence()}")

    def dim(self, name: str, dim: int, *dtypes: torch.dtype) -> None:
        """A tensor has `dim` dimensions, and one of the dtypes where they are given."""
        if (t := self._tensor(name)) is not None:
            got = None if t is MISSING else f"{t.dim()}-D"
            fits = t is not MISSING and t.dim() == dim
            self.check(fits, lambda: f"{name} must be {dim}-D, got {got}")
            if dtypes:
                self.dtype(name, *dtypes)

    def dtype(self, name: str, *allowed: torch.dtype) -> None:
        """A dtype, or a tensor's, is one of the allowed."""
        if (argument := self._tensor(name)) is None:
            return
        dtype = argument.dtype if isinstance(argument, Tensor) else argument
        names = [dtype_name(d) for d in allowed]
        listed = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        self.check(dtype in allowed, lambda: f"{name} must be {listed}, got {dtype_name(dtype)}")

    def device(self, name: str, first_name: str) -> None:
        """A tensor is on the device of the op's first tensor."""
        t, first = self._tensor(name), self._tensor(first_name)
        if t is not None:
            self.check(
                t.device == first.device,
                lambda: f"{name} is on {t.device}, {first_name} is on {first.device}",
            )

    def tensor(self, name: str, dim: int, dtype: torch.dtype, first_name: str) -> None:
        """A tensor has these dimensions and this dtype on the first one's device."""
        self.dim(name, dim, dtype)
        self.device(name, first_name)

    def same(self, what: str, a_name: str, a: int, b_name: str, b: int) -> None:
        """Two tensors agree on a size."""
        self.check(a == b, lambda: f"{what} differs: {a_name} has {a}, {b_name} has {b}")

    def features(self, what: str, size: int) -> None:
        """A number of features is a positive multiple of 16."""
        self.check(
            size > 0 and size % FEATURE_MULTIPLE == 0,
            lambda: f"{what} must be a positive multiple of {FEATURE_MULTIPLE}, got {size}",
        )
        self.check(
            at_most(size, MAX_FEATURES),
            lambda: f"{what} must be at most {MAX_FEATURES}, got {size}",
        )

    def count(self, name: str, what: str, count: int) -> None:
        """A count fits in 32 bits: a tensor's rows, its columns, or what `what` names."""
        self.check(
            at_most(count, MAX_COUNT),
            lambda: f"{name} must have at most {MAX_COUNT} {what}, got {count}",
        )

    def groups(self, num_groups: int) -> None:
        """A number of groups is supported."""
        self.check(
            1 <= num_groups <= MAX_GROUPS,
            lambda: f"E must be between 1 and {MAX_GROUPS}, got {num_groups}",
        )

    def offs(self, first_name: str, **owners: int) -> int:
        """Offs is [E] int32 on the first tensor's device, and E that of other tensors; E."""
        self.tensor("offs", 1, torch.int32, first_name)
        E: int = self.arguments["offs"].size(0)
        self.groups(E)
        self.count(first_name, "rows", self._tensor(first_name).size(0))
        for owner, own in owners.items():
            self.same("E", owner, own, "offs", E)
        return E

    def rows(self, dim: int, first_name: str, name: str = "rows") -> None:
        """Rows holds numbers of rows of a tensor on the first tensor's device."""
        if (rows := self.arguments[name]) is None:
            return
        self.dim(name, dim, torch.int32, torch.int64)
        self.device(name, first_name)
        self.count(name, "rows", rows.size(0))
        if dim == 2:
            self.count(name, "columns", rows.size(1))

    def finite(self, name: str, least: float = -FLOAT32_MAX) -> None:
        """A number is finite, in float32 too, and not negative where the least one is zero."""
        number = self.arguments[name]
        fits = "finite and not negative" if least == 0 else "finite"
        holds = least <= number <= FLOAT32_MAX
        self.check(holds, lambda: f"{name} must be {fits}, got {number:g}")

    def not_negative(self, name: str) -> None:
        """A size is not negative."""
        value = self.arguments[name]
        self.check(value >= 0, lambda: f"{name} must not be negative, got {value}")

    def swiglu_form(self) -> None:
        """The numbers of a form of SwiGLU are finite, limit positive, cubic not negative."""
        limit = self.arguments["limit"]
        self.finite("alpha")
        self.finite("beta")
        self.check(limit is None or limit > 0, lambda: f"limit must be positive, got {limit:g}")
        self.finite("cubic", 0)

    def grouped_rows(self) -> None:
        """X is [T, K] of an activation dtype with offs, and at least one layout is requested."""
        self.dim("x", 2, *ACTIVATIONS)
        self.features("K", self.arguments["x"].size(1))
        self.offs("x")
        self.layouts()

    def layouts(self) -> None:
        """At least one layout is requested."""
        self.check(
            self.arguments["rowwise"] or self.arguments["columnwise"],
            lambda: "rowwise or columnwise must be true, got neither",
        )

    def weight(self, name: str = "w", *allowed: torch.dtype) -> tuple[int, int, int]:
        """A weight is [E, N, K] of one of the dtypes, by default of activations; E, N and K."""
        self.dim(name, 3, *(allowed or ACTIVATIONS))
        E, N, K = self._tensor(name).shape
        self.groups(E)
        self.features("N", N)
        self.features("K", K)
        self.count(name, "rows in all", E * N)
        return E, N, K

    def mxfp4_dim(self, N: int, K: int) -> None:
        """Blocks of MXFP4 run along K, along N or not at all, and that is whole blocks."""
        dim = self.arguments["mxfp4_dim"]
        if dim is None:
            return
        self.check(dim in (-1, -2), lambda: f"mxfp4_dim must be None, -1 or -2, got {dim}")
        name, size = ("K", K) if dim == -1 else ("N", N)
        self.check(
            size % MX_BLOCK == 0,
            lambda: f"{name} must be a multiple of {MX_BLOCK} with mxfp4_dim={dim}, got {size}",
        )

    def weight_list(self) -> tuple[int, int, int]:
        """W is E tensors [N, K] of an activation dtype; E, N and K."""
        self.experts("w")
        self.dtype("w", *ACTIVATIONS)
        w = self.arguments["w"]
        E, (N, K) = len(w), w[0].shape
        self.features("N", N)
        self.features("K", K)
        self.count("w", "rows in all", E * N)
        return E, N, K

    def experts(self, name: str) -> None:
        """The experts are E matrices of one shape, dtype and device."""
        experts = self.arguments[name]
        self.groups(len(experts))
        self.dim(name, 2)
        first_name, first = f"the first {name}", experts[0]
        for expert in experts:
            pair = Rules(self.op, **{name: expert, first_name: first})
            pair.tensor(name, 2, first.dtype, first_name)
            pair.same("N", name, expert.size(0), first_name, first.size(0))
            pair.same("K", name, expert.size(1), first_name, first.size(1))

    def group_scale(self, name: str, first_name: str, num_groups: int, owner: str = "offs") -> None:
        """Scale is [E]: one a group."""
        if (scale := self.arguments[name]) is not None:
            self.tensor(name, 1, torch.float32, first_name)
            self.same("E", name, scale.size(0), owner, num_groups)

    def amax(self, first_name: str, num_groups: int, owner: str) -> None:
        """Amax is [E], to be written."""
        self.group_scale("amax", first_name, num_groups, owner)
        self.contiguous("amax")

    def contiguous(self, name: str) -> None:
        """A tensor that is written is contiguous."""
        if (t := self._tensor(name)) is not None:
            self.check(t.is_contiguous(), lambda: f"{name} must be contiguous")

    def written(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], first_name: str
    ) -> None:
        """A tensor that is written has this dtype and shape and is contiguous."""
        if (t := self.arguments[name]) is None:
            return
        self.tensor(name, len(shape), dtype, first_name)
        self.check(
            all(size == own for size, own in zip(t.shape, shape, strict=True)),
            lambda: f"{name} must be {list(shape)}, got {list(t.shape)}",
        )
        self.contiguous(name)

    def column_blocks(self, name: str, features: str) -> None:
        """q_t is [blocks, features, 128]."""
        q_t = self.arguments[name]
        self.dim(name, 3)
        self.check(
            q_t.size(2) == BLOCK,
            lambda: f"{name} must hold blocks of {BLOCK} rows, got {q_t.size(2)}",
        )
        self.features(features, q_t.size(1))
        self.count(name, "rows in blocks", q_t.size(0) * BLOCK)

    def rowwise(self, name: str, scale_name: str) -> None:
        """q [rows, K] with scale [ceil(K / 128), round_up(rows, 4)]."""
        q, scale = self.arguments[name], self.arguments[scale_name]
        self.dim(name, 2, E4M3)
        self.features("K", q.size(1))
        self.tensor(scale_name, 2, torch.float32, name)
        blocks = ceil_div(q.size(1), BLOCK)
        self.same("the number of K blocks", name, blocks, scale_name, scale.size(0))
        rows = SCALE_ROW_MULTIPLE * ceil_div(q.size(0), SCALE_ROW_MULTIPLE)
        self.same("the number of scale rows", name, rows, scale_name, scale.size(1))

    def columnwise(self, name: str, scale_name: str, features: str) -> None:
        """q_t [blocks, features, 128] with scale_t [blocks, features]."""
        q_t, scale_t = self.arguments[name], self.arguments[scale_name]
        self.column_blocks(name, features)
        self.dtype(name, E4M3)
        self.tensor(scale_name, 2, torch.float32, name)
        self.same("the number of blocks", name, q_t.size(0), scale_name, scale_t.size(0))
        self.same(features, name, q_t.size(1), scale_name, scale_t.size(1))

    def bias(self, num_groups: int, N: int, out_dtype: torch.dtype) -> None:
        """Bias is [E, N] in the output's dtype."""
        if (bias := self.arguments["bias"]) is not None:
            self.tensor("bias", 2, out_dtype, "a")
            self.same("E", "bias", bias.size(0), "offs", num_groups)
            self.same("N", "bias", bias.size(1), "b", N)

    def low_rank(self, num_groups: int, N: int, dtype: torch.dtype) -> None:
        """A second product's operands are [T, r] and [E, r, N] of a dtype, or neither is given."""
        a_low, b_low = (self.arguments.get(name) for name in ("a_low", "b_low"))
        given = "b_low" if a_low is None else "a_low"
        self.check(
            (a_low is None) == (b_low is None), lambda: f"give a_low and b_low, got {given} alone"
        )
        if a_low is None or b_low is None:
            return
        self.dim("a_low", 2)
        self.dim("b_low", 3)
        self.dtype("a_low", dtype)
        self.dtype("b_low", dtype)
        self.device("a_low", "a")
        self.device("b_low", "a")
        r = a_low.size(1)
        owner = "a" if self.arguments["rows"] is None else "rows"
        self.same("T", "a_low", a_low.size(0), owner, self.arguments[owner].size(0))
        self.same("r", "a_low", r, "b_low", b_low.size(1))
        self.features("r", r)
        self.check(r <= MAX_RANK, lambda: f"r must be at most {MAX_RANK}, got {r}")
        self.same("E", "b_low", b_low.size(0), "offs", num_groups)
        self.same("N", "b_low", b_low.size(2), "b", N)


def arguments_of(op: Any, given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an overload by the names in its schema, with its defaults."""
    arguments = {argument.name: argument.default_value for argument in op._schema.arguments}
    return {**arguments, **dict(zip(arguments, given, strict=False)), **named}


def fake(function: Callable[[Rules, Any], Any]) -> Callable[..., Any]:
    """Register a function of a call as the fake kernel of the op that has its name.

    It is called with the rules, and with the arguments by the names of the op's schema, which has
    their defaults. The decorated function takes the op's arguments, so that the fake of an op that
    computes several others can call theirs.

    >>> from grouped_linear.meta_kernels.quantize import grouped_bias_grad
    >>> dy, offs = torch.empty(4, 16, device="meta"), torch.empty(2, device="meta").int()
    >>> grouped_bias_grad(dy, offs).shape
    torch.Size([2, 16])
    """
    name = function.__name__
    op = getattr(torch.ops.grouped_linear, name).default
    tensors = [a.name for a in op._schema.arguments if str(a.type) == "Tensor"]

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        arguments = arguments_of(op, given, named)
        arguments |= {tensor: MISSING for tensor in tensors if arguments[tensor] is None}
        return function(Rules(name, **arguments), SimpleNamespace(**arguments))

    torch.library.register_fake(f"grouped_linear::{name}", call)
    return call
