"""An Inductor pass that fuses SwiGLU into the quantization behind it.

T rows, K features of h.
"""

import operator
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten, prims = torch.ops.aten, torch.ops.prims
_ops = torch.ops.grouped_linear

# A pattern is a name to bind, a number, or an op and patterns of its arguments. Casts between
# float32 and the activations' dtype are looked through: they change how often a value is rounded.
_SILU = (  # as torch decomposes it; as others write it; as it is
    ("div", "gate", ("add", ("exp", ("neg", "gate")), 1)),
    ("mul", "gate", ("sigmoid", "gate")),
    ("silu", "gate"),
)
_H = tuple(("mul", silu, "up") for silu in _SILU)
_SLOPE = ("add", ("mul", "gate", ("sub", 1, ("sigmoid", "gate"))), 1)
_D_GATE = ("mul", ("mul", ("mul", "dh", "up"), ("sigmoid", "gate")), _SLOPE)
_D_GATE_UP = tuple((_D_GATE, ("mul", "dh", silu)) for silu in _SILU)

_TARGETS = {
    "add": aten.add.Tensor,
    "div": aten.div.Tensor,
    "exp": aten.exp.default,
    "mul": aten.mul.Tensor,
    "neg": aten.neg.default,
    "sigmoid": aten.sigmoid.default,
    "silu": aten.silu.default,
    "sub": aten.sub.Tensor,
}
_COMMUTES = {"add", "mul"}
_SLICE = ((1, 0), (2, 0), (3, sys.maxsize), (4, 1))  # dim, start, end, step
_VIEWS = {aten.view.default, aten.reshape.default}
Bound = dict[str, fx.Node]


class FuseSwiglu(CustomGraphPass):
    """Rewrites ``group_quantize(silu(gate) * up)`` to ``group_quantize_swiglu``, and its gradient.

    What torch.compile then runs reads gate_up once and never writes h, nor the gradient of gate_up:
    the ops of :func:`grouped_linear.ops.group_quantize_swiglu` and
    :func:`grouped_linear.ops.group_quantize_swiglu_grad`. Pass it to torch.compile, or set it in
    ``torch._inductor.config.post_grad_custom_pre_pass`` for every compile::

        model = torch.compile(model, options={"post_grad_custom_pre_pass": FuseSwiglu()})

    It matches where gate and up are the halves of one [T, 2 K] tensor, in this order, and where
    nothing else reads their product (or the gradient). Everything else is left as it is: other
    activations, gate and up of two tensors, recipes other than ``Float8BlockScaling``. torch
    2.11 writes the gradient in a way that is not found: there the forward alone is rewritten.

    Fused or not, h differs in last bits: Inductor rounds silu(gate) to the activations' dtype
    before it multiplies by up, :func:`grouped_linear.ops.swiglu` rounds the product alone, and each
    has its own exp. Fused gives the bits of :func:`grouped_linear.ops.swiglu`.

    Attributes:
        swiglu_matches: forward rewrites in what was compiled so far. A graph that Inductor reads
            from its cache, which knows this pass by its source, counts nothing.
        swiglu_grad_matches: backward rewrites.

    >>> import torch.nn.functional as F
    >>> from grouped_linear import ops
    >>> def quantized(gate_up, offs):
    ...     gate, up = gate_up.chunk(2, dim=1)
    ...     return ops.group_quantize(F.silu(gate) * up, offs).q.float()
    >>> fuse = FuseSwiglu()
    >>> options = {"post_grad_custom_pre_pass": fuse, "fx_graph_cache": False}
    >>> compiled = torch.compile(quantized, fullgraph=True, options=options)
    >>> q = compiled(torch.randn(10, 64), torch.tensor([4, 10], dtype=torch.int32))
    >>> fuse.swiglu_matches
    1
    """

    def __init__(self) -> None:
        self.swiglu_matches = 0
        self.swiglu_grad_matches = 0

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph of Inductor's, before its own passes."""
        for quantize in graph.find_nodes(
            op="call_function", target=_ops.group_quantize.default, sort=False
        ):
            options = _options(quantize)
            x, rows = options.pop("x"), options.pop("rows")
            if rows is not None or not _read_by_one(x):
                continue
            bias_grad, share_scales = options.pop("bias_grad"), options.pop("share_scales")
            del options["factor"]  # of rows, which there are none
            of_h = {**options, "keep_h": False, "share_scales": share_scales}
            of_gradient = {**options, "bias_grad": bias_grad}
            if not bias_grad and _replace_h(graph, quantize, x, of_h):
                self.swiglu_matches += 1
            elif not share_scales and _replace_gradient(graph, quantize, x, of_gradient):
                self.swiglu_grad_matches += 1

    def uuid(self) -> bytes:
        """What tells Inductor's caches that this pass is still the same."""
        return get_hash_for_files((__file__,))


def _replace_h(graph: fx.Graph, quantize: fx.Node, x: fx.Node, options: dict[str, Any]) -> bool:
    if any(getitem.args[1] == 4 for getitem in quantize.users):  # bias_grad there, h here
        return False
    h = _without_view(x)
    if not _read_by_one(h):
        return False
    for bound in _matches(h, _H, _dtype(x)):
        gate_up = _whole(bound["gate"], bound["up"], x)
        if gate_up is not None:
            _replace(graph, quantize, _ops.group_quantize_swiglu.default, (gate_up,), options)
            return True
    return False


def _replace_gradient(
    graph: fx.Graph, quantize: fx.Node, x: fx.Node, options: dict[str, Any]
) -> bool:
    cat = _without_casts(_without_view(x), _dtype(x))
    if cat is None or cat.target is not aten.cat.default or not _read_by_one(cat):
        return False
    parts, dim = _arguments(cat)[0], _argument(cat, 1, 0)
    if len(parts) != 2 or dim not in (-1, _value(cat).dim() - 1):
        return False
    for d_gate, d_up in _D_GATE_UP:
        for bound in _match(parts[0], d_gate, {}, _dtype(x)):
            for both in _match(parts[1], d_up, bound, _dtype(x)):
                dh = _without_view(both["dh"])
                gate_up = _whole(both["gate"], both["up"], dh)
                if gate_up is not None and _dtype(dh) is _dtype(x):
                    op = _ops.group_quantize_swiglu_grad.default
                    _replace(graph, quantize, op, (dh, gate_up), options)
                    return True
    return False


def _replace(
    graph: fx.Graph,
    quantize: fx.Node,
    op: torch._ops.OpOverload,
    tensors: tuple[fx.Node, ...],
    options: dict[str, Any],
) -> None:
    """Put the fused op in the place of the quantization, and erase what nothing reads any more.

    options: the op's other arguments, in the schema's order.
    """
    arguments = (*tensors, *options.values())
    values = fx.map_arg(arguments, _value)
    with values[0].fake_mode, graph.inserting_before(quantize):
        fused = graph.call_function(op, arguments)
        # The strides that an op gets are those of its eager_input_vals.
        fused.meta = {**quantize.meta, "val": op(*values), "eager_input_vals": (values, {})}
    unused = quantize.all_input_nodes
    quantize.replace_all_uses_with(fused)
    graph.erase_node(quantize)
    erased = set()
    while unused:
        node = unused.pop()
        if node.op == "call_function" and not node.users and node not in erased:
            unused += node.all_input_nodes
            erased.add(node)
            graph.erase_node(node)


def _whole(gate: fx.Node, up: fx.Node, like: fx.Node) -> fx.Node | None:
    """gate_up [T, 2 K], of which gate and up are the halves, for h or dh [T, K]."""
    of_gate, of_up = _part(gate), _part(up)
    if of_gate is None or of_up is None or of_gate[0] is not of_up[0]:
        return None
    cast = _without_casts(of_gate[0], _dtype(like))
    if cast is None or _dtype(cast) is not _dtype(like):
        return None
    whole = _without_view(cast)
    if not _value(whole).dim() == _value(like).dim() == 2:
        return None
    (T, K), (rows, columns) = _value(like).shape, _value(whole).shape
    fits = (of_gate[1:], of_up[1:], columns) == ((0, K), (K, 2 * K), 2 * K)
    return whole if fits and statically_known_true(rows == T) else None


def _part(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """The tensor that a node is columns [start, end) of."""
    if node.target is operator.getitem:
        split, index = _arguments(node)
        if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
            return None
        source, sizes = _arguments(split)[:2]
        dim, step = _argument(split, 2, 0), 1
        if not isinstance(sizes, (list, tuple)):
            sizes = [sizes] * (index + 1)
        if not _ints(*sizes):
            return None
        start, end = sum(sizes[:index]), sum(sizes[: index + 1])
    elif node.target is aten.slice.Tensor:
        source = _arguments(node)[0]
        dim, start, end, step = (_argument(node, i, default) for i, default in _SLICE)
    else:
        return None
    columns = _value(source).shape[-1]
    if not _ints(start, end, columns) or step != 1 or dim not in (-1, _value(source).dim() - 1):
        return None
    return source, start, min(end, columns)


def _ints(*numbers: Any) -> bool:
    return all(isinstance(number, int) for number in numbers)


def _matches(node: fx.Node, patterns: Any, dtype: torch.dtype | None) -> Iterator[Bound]:
    for pattern in patterns:
        yield from _match(node, pattern, {}, dtype)


def _match(node: Any, pattern: Any, bound: Bound, dtype: torch.dtype | None) -> Iterator[Bound]:
    """Every way to read a node as a pattern, as what its names stand for."""
    if isinstance(pattern, int):
        if node == pattern:
            yield bound
        return
    node = _without_casts(node, dtype)
    if node is None:
        return
    if isinstance(pattern, str):
        if bound.get(pattern, node) is node:
            yield {**bound, pattern: node}
        return
    name, *parts = pattern
    if node.target is not _TARGETS[name] or node.kwargs or len(node.args) != len(parts):
        return
    orders = [node.args, node.args[::-1]] if name in _COMMUTES else [node.args]
    for arguments in orders:
        matches = [bound]
        for argument, part in zip(arguments, parts, strict=True):
            matches = [wider for b in matches for wider in _match(argument, part, b, dtype)]
        yield from matches


def _without_casts(node: Any, dtype: torch.dtype | None) -> fx.Node | None:
    """What a node is a cast of, among float32 and dtype; None for what is no such tensor."""
    while isinstance(node, fx.Node) and _dtype(node) in (torch.float32, dtype):
        if node.target is not prims.convert_element_type.default:
            return node
        node = node.args[0]
    return None


def _without_view(node: fx.Node) -> fx.Node:
    """What a node is a view of, where the view keeps the last dimension."""
    if node.target in _VIEWS:
        source: fx.Node = _arguments(node)[0]
        if _value(source).shape[-1] == _value(node).shape[-1]:
            return source
    return node


def _read_by_one(node: fx.Node) -> bool:
    return len(node.users) == 1


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _argument(node: fx.Node, index: int, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else default


def _options(node: fx.Node) -> dict[str, Any]:
    """Every argument of a call by its name in the schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = node.target._schema.arguments
    given = dict(zip((a.name for a in arguments), node.args, strict=False)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value) for a in arguments}
