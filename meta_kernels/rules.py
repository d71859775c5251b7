"""The rules that ops share, with the same sentences as csrc/checks/."""

from collections.abc import Callable

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
MAX_RANK = 512
FLOAT32_MAX = torch.finfo(torch.float32).max

E4M3 = torch.float8_e4m3fn
FP8 = (E4M3, torch.float8_e5m2)
ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return (a + b - 1) // b


def padded_rows(num_rows: int, num_groups: int) -> int:
    """Rows of columnwise data: the bound 128 * floor((T + 127 * min(E, T)) / 128)."""
    wasted: int = (BLOCK - 1) * torch.sym_min(num_groups, num_rows)
    return BLOCK * ((num_rows + wasted) // BLOCK)


def output_if(requested: bool, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An output of an op, or an empty tensor if it is not requested."""
    return like.new_empty(shape if requested else (0,), dtype=dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as the sentences name it."""
    return str(dtype).removeprefix("torch.")


def _at_most(size: int, most: int) -> bool:
    """Whether a size is in a limit. A symbol is, so that it stays free of guards."""
    return not isinstance(size, int) or size <= most


class Rules:
    """The rules of one op. Every method raises RuntimeError with a sentence that starts with it."""

    def __init__(self, op: str) -> None:
        self.op = op

    def check(self, rule_holds: bool, sentence: Callable[[], str]) -> None:
        """Raise ``op: sentence`` unless the rule holds; for unbacked sizes at run time."""
        torch._check(rule_holds, lambda: f"{self.op}: {sentence()}")

    def dim(self, name: str, t: Tensor, dim: int) -> None:
        """t has `dim` dimensions."""
        self.check(t.dim() == dim, lambda: f"{name} must be {dim}-D, got {t.dim()}-D")

    def dtype(self, name: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> None:
        """The dtype is one of the allowed."""
        names = [dtype_name(d) for d in allowed]
        listed = " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
        self.check(dtype in allowed, lambda: f"{name} must be {listed}, got {dtype_name(dtype)}")

    def device(self, name: str, t: Tensor, first_name: str, first: Tensor) -> None:
        """t is on the device of the op's first tensor."""
        self.check(
            t.device == first.device,
            lambda: f"{name} is on {t.device}, {first_name} is on {first.device}",
        )

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
            _at_most(size, MAX_FEATURES),
            lambda: f"{what} must be at most {MAX_FEATURES}, got {size}",
        )

    def count(self, name: str, what: str, count: int) -> None:
        """What is counted in 32 bits: the rows of a tensor, its columns, or what `what` names."""
        self.check(
            _at_most(count, MAX_COUNT),
            lambda: f"{name} must have at most {MAX_COUNT} {what}, got {count}",
        )

    def groups(self, num_groups: int) -> None:
        """A number of groups is supported."""
        self.check(
            1 <= num_groups <= MAX_GROUPS,
            lambda: f"E must be between 1 and {MAX_GROUPS}, got {num_groups}",
        )

    def offs(self, offs: Tensor, first_name: str, first: Tensor) -> None:
        """Offs is [E] int32 on the first tensor's device."""
        self.dim("offs", offs, 1)
        self.dtype("offs", offs.dtype, (torch.int32,))
        self.device("offs", offs, first_name, first)
        self.groups(offs.size(0))
        self.count(first_name, "rows", first.size(0))

    def rows(
        self, rows: Tensor, dim: int, first_name: str, first: Tensor, name: str = "rows"
    ) -> None:
        """Rows holds numbers of rows of a tensor on the first tensor's device."""
        self.dim(name, rows, dim)
        self.dtype(name, rows.dtype, (torch.int32, torch.int64))
        self.device(name, rows, first_name, first)
        self.count(name, "rows", rows.size(0))
        if dim == 2:
            self.count(name, "columns", rows.size(1))

    def epsilon(self, amax_epsilon: float) -> None:
        """amax_epsilon is finite and not negative."""
        self.check(
            0 <= amax_epsilon < float("inf"),
            lambda: f"amax_epsilon must be finite and not negative, got {amax_epsilon:g}",
        )

    def finite(self, name: str, number: float) -> None:
        """A number is finite, in float32 too."""
        self.check(abs(number) <= FLOAT32_MAX, lambda: f"{name} must be finite, got {number:g}")

    def not_negative(self, name: str, value: int) -> None:
        """A size is not negative."""
        self.check(value >= 0, lambda: f"{name} must not be negative, got {value}")

    def grouped_rows(self, x: Tensor, offs: Tensor, rowwise: bool, columnwise: bool) -> None:
        """X is [T, K] of an activation dtype with offs, and at least one layout is requested."""
        self.dim("x", x, 2)
        self.dtype("x", x.dtype, ACTIVATIONS)
        self.features("K", x.size(1))
        self.offs(offs, "x", x)
        self.layouts(rowwise, columnwise)

    def layouts(self, rowwise: bool, columnwise: bool) -> None:
        """At least one layout is requested."""
        self.check(rowwise or columnwise, lambda: "rowwise or columnwise must be true, got neither")

    def weight(self, w: Tensor) -> None:
        """W is [E, N, K] of an activation dtype."""
        self.dim("w", w, 3)
        self.dtype("w", w.dtype, ACTIVATIONS)
        self.groups(w.size(0))
        self.features("N", w.size(1))
        self.features("K", w.size(2))
        self.count("w", "rows in all", w.size(0) * w.size(1))

    def weight_list(self, w: list[Tensor]) -> None:
        """W is E tensors [N, K] of an activation dtype."""
        self.experts("w", w)
        self.dtype("w", w[0].dtype, ACTIVATIONS)
        self.features("N", w[0].size(0))
        self.features("K", w[0].size(1))
        self.count("w", "rows in all", len(w) * w[0].size(0))

    def experts(self, name: str, experts: list[Tensor]) -> None:
        """The experts are E matrices of one shape, dtype and device."""
        self.groups(len(experts))
        first_name, first = f"the first {name}", experts[0]
        self.dim(name, first, 2)
        for expert in experts:
            self.dim(name, expert, 2)
            self.dtype(name, expert.dtype, (first.dtype,))
            self.device(name, expert, first_name, first)
            self.same("N", name, expert.size(0), first_name, first.size(0))
            self.same("K", name, expert.size(1), first_name, first.size(1))

    def group_scale(
        self,
        name: str,
        scale: Tensor,
        first_name: str,
        first: Tensor,
        num_groups: int,
        owner: str = "offs",
    ) -> None:
        """Scale is [E]: one a group."""
        self.dim(name, scale, 1)
        self.dtype(name, scale.dtype, (torch.float32,))
        self.device(name, scale, first_name, first)
        self.same("E", name, scale.size(0), owner, num_groups)

    def amax(
        self, amax: Tensor, first_name: str, first: Tensor, num_groups: int, owner: str
    ) -> None:
        """Amax is [E], to be written."""
        self.group_scale("amax", amax, first_name, first, num_groups, owner)
        self.contiguous("amax", amax)

    def contiguous(self, name: str, t: Tensor) -> None:
        """A tensor that is written is contiguous."""
        self.check(t.is_contiguous(), lambda: f"{name} must be contiguous")

    def written(
        self,
        name: str,
        t: Tensor,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        first_name: str,
        first: Tensor,
    ) -> None:
        """A tensor that is written has this dtype and shape and is contiguous."""
        self.dim(name, t, len(shape))
        self.dtype(name, t.dtype, (dtype,))
        self.device(name, t, first_name, first)
        self.check(
            all(size == own for size, own in zip(t.shape, shape, strict=True)),
            lambda: f"{name} must be {list(shape)}, got {list(t.shape)}",
        )
        self.contiguous(name, t)

    def column_blocks(self, name: str, q_t: Tensor, features: str) -> None:
        """q_t is [blocks, features, 128]."""
        self.dim(name, q_t, 3)
        self.check(
            q_t.size(2) == BLOCK,
            lambda: f"{name} must hold blocks of {BLOCK} rows, got {q_t.size(2)}",
        )
        self.features(features, q_t.size(1))
        self.count(name, "rows in blocks", q_t.size(0) * BLOCK)

    def rowwise(self, name: str, q: Tensor, scale_name: str, scale: Tensor) -> None:
        """q [rows, K] with scale [ceil(K / 128), round_up(rows, 4)]."""
        self.dim(name, q, 2)
        self.dtype(name, q.dtype, (E4M3,))
        self.features("K", q.size(1))
        self.dim(scale_name, scale, 2)
        self.dtype(scale_name, scale.dtype, (torch.float32,))
        self.device(scale_name, scale, name, q)
        blocks = ceil_div(q.size(1), BLOCK)
        self.same("the number of K blocks", name, blocks, scale_name, scale.size(0))
        rows = SCALE_ROW_MULTIPLE * ceil_div(q.size(0), SCALE_ROW_MULTIPLE)
        self.same("the number of scale rows", name, rows, scale_name, scale.size(1))

    def columnwise(
        self,
        name: str,
        q_t: Tensor,
        scale_name: str,
        scale_t: Tensor,
        features: str,
    ) -> None:
        """q_t [blocks, features, 128] with scale_t [blocks, features]."""
        self.column_blocks(name, q_t, features)
        self.dtype(name, q_t.dtype, (E4M3,))
        self.dim(scale_name, scale_t, 2)
        self.dtype(scale_name, scale_t.dtype, (torch.float32,))
        self.device(scale_name, scale_t, name, q_t)
        self.same("the number of blocks", name, q_t.size(0), scale_name, scale_t.size(0))
        self.same(features, name, q_t.size(1), scale_name, scale_t.size(1))

    def bias(
        self, bias: Tensor | None, a: Tensor, num_groups: int, N: int, out_dtype: torch.dtype
    ) -> None:
        """Bias is [E, N] in the output's dtype."""
        if bias is None:
            return
        self.dim("bias", bias, 2)
        self.dtype("bias", bias.dtype, (out_dtype,))
        self.device("bias", bias, "a", a)
        self.same("E", "bias", bias.size(0), "offs", num_groups)
        self.same("N", "bias", bias.size(1), "b", N)

    def low_rank(
        self,
        a_low: Tensor | None,
        b_low: Tensor | None,
        a: Tensor,
        rows: Tensor | None,
        num_groups: int,
        N: int,
        dtype: torch.dtype,
    ) -> None:
        """A second product's operands are [T, r] and [E, r, N] of a dtype, or neither is given."""
        given = "b_low" if a_low is None else "a_low"
        self.check(
            (a_low is None) == (b_low is None),
            lambda: f"give a_low and b_low, got {given} alone",
        )
        if a_low is None or b_low is None:
            return
        self.dim("a_low", a_low, 2)
        self.dim("b_low", b_low, 3)
        self.dtype("a_low", a_low.dtype, (dtype,))
        self.dtype("b_low", b_low.dtype, (dtype,))
        self.device("a_low", a_low, "a", a)
        self.device("b_low", b_low, "a", a)
        r = a_low.size(1)
        owner, of_rows = ("a", a) if rows is None else ("rows", rows)
        self.same("T", "a_low", a_low.size(0), owner, of_rows.size(0))
        self.same("r", "a_low", r, "b_low", b_low.size(1))
        self.features("r", r)
        self.check(r <= MAX_RANK, lambda: f"r must be at most {MAX_RANK}, got {r}")
        self.same("E", "b_low", b_low.size(0), "offs", num_groups)
        self.same("N", "b_low", b_low.size(2), "b", N)
