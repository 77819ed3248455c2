# SPDX-License-Identifier: Apache-2.0
"""The same fusion inside ``torch.compile``: a pass over the graphs that Inductor is given.

It runs before autograd is traced, where the graph still has the calls that the model makes (behind it the
activations are in pieces). Everything that must not be fused is a property of that graph: another user of an
intermediate result, a type that changes on the way, a tensor changed in place in between.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from ._cat import cat_core_op, cat_op
from ._composite import forward_op
from ._fuse._batch_norm import fold, types_fit
from ._fuse._plan import Planner
from ._fuse._steps import ADD, BATCH_NORM, CAT, DROPOUT, Step, cat_dim, is_eval_dropout
from ._inductor_chain import ChainedPass
from ._memory_format import surely
from ._ops import core_op
from ._problem import triple

_AMBIENCE = ("_enter_", "_exit_", "_set_grad_enabled", "set_grad_enabled", "_saved_tensors_hooks")
_VIEWS = ("view", "view_as", "as_strided", "as_strided_")  # what depends on strides
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class ConvTranspose3dPass(ChainedPass):
    """Puts convt3d's operators in place of transposed convolutions; what was ``before`` it runs first."""

    sources = ("_inductor_pass.py", "_fuse/*.py")

    def change(self, graph: fx.Graph) -> None:
        fuse_graph(graph, self.device_types)


# --- the graph ---------------------------------------------------------------------------------------------


def fuse_graph(graph: fx.Graph, device_types: Collection[str]) -> int:
    """Fuses what can be fused in a graph of Dynamo's, in place; returns how many calls that made.

    Every tensor node must have its fake tensor in ``meta["example_value"]``; the others are left alone.
    """
    planner = _GraphPlanner(graph)
    # All are planned before the first is replaced: what the planner knows of changes in place and of shared
    # memory is about the graph as it came.
    calls = [_Call.of(node, device_types) for node in graph.nodes]
    taken = [call for call in calls if call is not None and call.take(planner)]
    replaced: dict[fx.Node, fx.Node] = {}
    for call in taken:
        replaced[call.chain[-1]] = call.replace(graph, replaced)
    if taken:
        graph.lint()
    return len(taken)


class _GraphPlanner(Planner):
    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(graph.owning_module or torch.nn.Module(), graph, "then the graph's output")
        self.has_views = any(_is_view(node) for node in graph.nodes)
        self._widened: dict[fx.Node, set[fx.Node]] = {}
        self._inputs = {node for node in graph.nodes if _is_input(node)}
        self._ambience = [position for node, position in self.position.items() if _changes_ambience(node)]

    def reads(self, conv: fx.Node) -> list[fx.Node]:
        return conv.all_input_nodes

    def storage(self, node: fx.Node) -> set[fx.Node]:
        """Inputs of a graph may be views of one tensor: those of one type count as one (not parameters and
        buffers)."""
        if node not in self._widened:
            found = super().storage(node)
            dtypes = {_example_dtype(n) for n in found if n in self._inputs}
            self._widened[node] = found | {n for n in self._inputs if _example_dtype(n) in dtypes}
        return self._widened[node]

    def is_fresh(self, node: fx.Node) -> bool:
        return node.target in (forward_op, core_op, cat_op, cat_core_op) or super().is_fresh(node)

    def changed_by(self, node: fx.Node) -> list[fx.Node]:
        module = self.module(node)
        if module is None or all(type(m).__module__.startswith("torch.nn.") for m in module.modules()):
            return super().changed_by(node)
        return node.all_input_nodes

    def changes_unseen(self, node: fx.Node) -> bool:
        """Whether the tensor was changed more often, while the graph was traced, than the graph shows.

        A second net: tracing counts the changes, and a kind that is not known here must not go unseen.
        """
        value = _example(node)
        if value is None or value.is_inference():  # whose changes torch does not count
            return False
        own = super().storage(node)
        seen = sum(not own.isdisjoint(super(_GraphPlanner, self).storage(n)) for _, n in self.mutations)
        return value._version > seen

    def unseen_between(self, node: fx.Node, user: fx.Node) -> str | None:
        """A reason if autocast or the gradient mode is switched in between."""
        first, last = self.position[node], self.position[user]
        if any(first < position < last for position in self._ambience):
            return "then autocast or the gradient mode changes"
        return None


def _is_view(node: fx.Node) -> bool:
    """Method or function, of torch's or of torch.ops.aten's."""
    if node.op not in ("call_method", "call_function"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.partition(".")[0] in _VIEWS


def _is_input(node: fx.Node) -> bool:
    name = str(node.target)
    return node.op == "placeholder" and "_parameters_" not in name and "_buffers_" not in name


def _example_dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta.get("example_value"), "dtype", None)


def _changes_ambience(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name.startswith(_AMBIENCE)


def _example(node: Any) -> FakeTensor | None:
    """The fake tensor of a node; None also for subclasses (a DTensor, say), whose rules are not ours."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, FakeTensor) and type(value) is FakeTensor else None


_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}


class _Call:
    """The arguments of one fused call, collected step by step as nodes of the graph."""

    def __init__(self, conv: fx.Node, arguments: dict[str, Any], precision: str, out: FakeTensor) -> None:
        self.conv = conv
        self.arguments = arguments
        self.precision = precision
        self.core = conv.target is core_op  # computes in the types that it says, and goes on doing so
        self.out = out  # fake: what the convolution gives
        self.chain = [conv]
        self.add: Any = None
        self.add_order = "before"
        self.activation = "none"
        self.negative_slope = 0.01
        self.batch_norm: dict[str, Any] | None = None
        self.cat: tuple[fx.Node, bool] | None = None

    @staticmethod
    def of(node: fx.Node, device_types: Collection[str]) -> _Call | None:
        """The call that ``node`` is, if it is a transposed convolution that can be fused with something."""
        out = _example(node)
        if node.op != "call_function" or out is None or out.dtype not in _FLOATS:
            return None
        if out.device.type not in device_types:
            return None
        precision = "default"
        if node.target in (forward_op, core_op):
            # As convt3d's own function made it: all arguments, by position.
            if len(node.args) != 13 or node.args[8] is not None or node.args[10] != "none":
                return None
            arguments = dict(zip(_CONVOLUTION, node.args, strict=False))
            precision = str(node.args[12])
        elif node.target is torch.conv_transpose3d:
            arguments = {**_DEFAULTS, **dict(zip(_CONVOLUTION, node.args, strict=False)), **node.kwargs}
        else:
            return None
        try:
            for name in ("stride", "padding", "output_padding", "dilation"):
                arguments[name] = triple(arguments[name], name)
        except (TypeError, RuntimeError):  # sizes that are computed in the graph
            return None
        if arguments.keys() != set(_CONVOLUTION) or not isinstance(arguments["groups"], int):
            return None
        return _Call(node, arguments, precision, out)

    def take(self, planner: _GraphPlanner) -> bool:
        """Takes in what follows; whether there was anything."""
        plan = planner.plan(self.conv)
        end = 0
        for index, (name, nodes) in enumerate(zip(plan.steps, plan.nodes, strict=True)):
            if not self._take(name, nodes, planner.step(nodes[-1])):
                break
            self.chain += nodes
            if name != DROPOUT:
                end = index + 1
        del self.chain[1 + sum(len(nodes) for nodes in plan.nodes[:end]) :]
        inside = set(self.chain)
        if end == 0 or any(user not in inside for node in self.chain[:-1] for user in node.users):
            return False  # nothing to take in, or somebody asks for the shape of what there would not be
        read = {node for link in self.chain for node in link.all_input_nodes} - inside
        if any(map(planner.changes_unseen, read)):
            return False
        was = _example(self.chain[-1])
        assert was is not None
        fake = self._fake()
        if fake is None or fake.dtype != was.dtype or not _same(fake.shape, was.shape):
            return False
        # torch's fake convolution knows only some of the cases in which the real one is channels_last_3d. A
        # view that was traced for other strides would fail.
        if planner.has_views and not _same_strides(fake, was):
            return False
        self.out = fake
        return True

    def _take(self, name: str, nodes: tuple[fx.Node, ...], step: Step | None) -> bool:
        result = _example(nodes[-1])
        if step is None or result is None or result.dtype != self.out.dtype:
            return False
        if name == CAT:
            return self._take_cat(step)
        if not _same(result.shape, self.out.shape):
            return False
        if name == DROPOUT:
            return is_eval_dropout(step)
        if name == BATCH_NORM:
            return self._take_batch_norm(step)
        if name == ADD:
            first, second = step.operands
            other = second if first is self.chain[-1] else first
            tensor = _example(other)
            if tensor is None or tensor.dtype != self.out.dtype or tensor.device != self.out.device:
                return False
            self.add, self.add_order = other, "before" if self.activation == "none" else "after"
            return True
        self.activation = name
        self.negative_slope = step.negative_slope
        return True

    def _take_batch_norm(self, step: Step) -> bool:
        arguments = dict(step.arguments or {})
        # Without a batch, torch's batch norm is one over the depth.
        if arguments.get("training", False) or self.out.dim() != 5:
            return False
        channels, device = self.out.shape[1], self.out.device
        types: set[torch.dtype] = set()
        for name in ("running_mean", "running_var", "weight", "bias"):
            node = arguments.get(name)
            tensor = _example(node)
            if node is None and name in ("weight", "bias"):
                continue
            if tensor is None or not _same(tensor.shape, (channels,)) or tensor.device != device:
                return False
            types.add(tensor.dtype)
        if not types_fit(types, self.out.dtype):
            return False
        self.batch_norm = arguments
        return True

    def _take_cat(self, step: Step) -> bool:
        first, second = step.operands
        skip_first = second is self.chain[-1]
        other = first if skip_first else second
        tensor = _example(other)
        channels = self.out.dim() - 4
        if cat_dim(step) not in (channels, -4) or tensor is None:
            return False
        if tensor.dtype != self.out.dtype or tensor.dim() != self.out.dim():
            return False
        self.cat = (other, skip_first)
        return True

    def _operator(self, weight: Any, bias: Any) -> tuple[Any, tuple[Any, ...]]:
        """The operator, and its arguments as nodes."""
        a = self.arguments
        own = (
            a["input"],
            weight,
            bias,
            *(a[name] for name in ("stride", "padding", "output_padding", "groups", "dilation")),
            self.add,
            self.add_order,
            self.activation,
            self.negative_slope,
            self.precision,
        )
        if self.cat is None:
            return core_op if self.core else forward_op, own
        return cat_core_op if self.core else cat_op, (*own, *self.cat)

    def _fake(self) -> FakeTensor | None:
        """The result as fake tensors have it, or None where the operator refuses the call."""
        target, arguments = self._operator(self.arguments["weight"], self.arguments["bias"])
        mode = self.out.fake_mode
        values = [_example(item) if isinstance(item, fx.Node) else item for item in arguments]
        if any(v is None and isinstance(a, fx.Node) for v, a in zip(values, arguments, strict=True)):
            return None
        dtype = self.out.dtype
        values = [v.to(dtype) if isinstance(v, Tensor) else v for v in values]  # as autocast would
        try:
            with mode, torch.no_grad(), torch.autocast(self.out.device.type, enabled=False):
                out: FakeTensor = target(*values)
                return out
        except (RuntimeError, ValueError, NotImplementedError, TypeError):
            return None

    def replace(self, graph: fx.Graph, replaced: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Puts the call in the place of the last of its nodes, takes these out, and returns its node.

        Args:
            replaced: what earlier calls have put in the place of nodes that are arguments here.
        """
        last = self.chain[-1]

        def now(argument: Any) -> Any:
            return fx.map_arg(argument, lambda node: replaced.get(node, node))

        weight, bias = now((self.arguments["weight"], self.arguments["bias"]))
        with graph.inserting_before(last):
            if self.batch_norm is not None:
                names = ("running_mean", "running_var", "weight", "bias")
                tensors = now([self.batch_norm.get(name) for name in names])
                eps = self.batch_norm.get("eps", 1e-5)
                folded = graph.call_function(
                    fold_batch_norm, (weight, bias, self.arguments["groups"], *tensors, eps)
                )
                weight, bias = (graph.call_function(_item, (folded, index)) for index in (0, 1))
            target, arguments = self._operator(weight, bias)
            new = graph.call_function(target, now(arguments))
        new.meta = {**last.meta, "example_value": self.out}
        last.replace_all_uses_with(new)
        for node in sorted(self.chain, reverse=True):
            graph.erase_node(node)
        return new


def _item(pair: tuple[Tensor, Tensor], index: int) -> Tensor:
    return pair[index]


def _same_strides(a: Tensor, b: Tensor) -> bool:
    pairs = zip(a.stride(), b.stride(), a.shape, strict=True)
    return all(surely(p == q) or surely(n == 1) for p, q, n in pairs)


def _same(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether shapes are equal for every value of the sizes that only the data tell."""
    return len(shape) == len(other) and all(map(surely, map(operator.eq, shape, other)))


def fold_batch_norm(
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    running_mean: Tensor,
    running_var: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """:func:`fold` for a graph, which has made sure that there is something to fold."""
    arguments = {
        "running_mean": running_mean,
        "running_var": running_var,
        "weight": gamma,
        "bias": beta,
        "eps": eps,
    }
    folded = fold(weight, bias, groups, arguments)
    if folded is None:
        raise RuntimeError("convt3d: batch norm has tensors that do not go with the convolution before it")
    return folded
