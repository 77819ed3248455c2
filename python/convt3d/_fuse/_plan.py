# SPDX-License-Identifier: Apache-2.0
"""From a graph to plans: the operations that each transposed convolution can take in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn

from ._code import NOWHERE, CodePlace, place_of_forward
from ._hooks import has_hooks
from ._mutations import changed_operands, function_name, joined_operands
from ._steps import (
    ADD,
    BATCH_NORM,
    CAT,
    DROPOUT,
    METADATA_ATTRIBUTES,
    METADATA_METHODS,
    MUL,
    X_HARDSWISH,
    Step,
    cat_dim,
    classify,
)


@dataclass(frozen=True)
class Plan:
    """What one call of a transposed convolution can take in, and why no more.

    Attributes:
        nodes: of the graph, by step.
        way: where the forwards are written of the modules that the plan leaves, from inside out, and at last
            of the one that it ends in.
        passed: the modules that the result leaves and enters on the way, the convolution aside.
    """

    steps: tuple[str, ...]
    reason: str
    nodes: tuple[tuple[fx.Node, ...], ...] = ()
    way: tuple[CodePlace, ...] = ()
    passed: tuple[nn.Module, ...] = ()


def plans(root: nn.Module, graph: fx.Graph, at_the_end: str) -> Iterator[tuple[nn.ConvTranspose3d, Plan]]:
    """One plan for each call of a transposed convolution in ``graph``.

    Args:
        root: what the names in ``graph`` are relative to.
        at_the_end: the reason where the result is what ``graph`` returns.
    """
    planner = Planner(root, graph, at_the_end)
    for node in graph.nodes:
        module = planner.module(node)
        if isinstance(module, nn.ConvTranspose3d):
            plan = planner.plan(node)
            chain = [node, *(n for nodes in plan.nodes for n in nodes)]
            around = {call: name for call, name in _stack(node).items() if name != node.target}
            exits = max(len(around.keys() - _stack(n)) for n in chain)
            left = [root, *map(root.get_submodule, around.values())][len(around) - exits :]
            way = tuple(place_of_forward(m) for m in reversed(left))
            passed = {
                name: None for pair in pairwise(chain) for name in _passed(*pair) if name != node.target
            }
            modules = tuple(root.get_submodule(name) for name in passed)
            if plan.steps and NOWHERE in way:
                plan = Plan((), "then a forward that has no code of its own to be recognised by")
            yield module, replace(plan, way=way, passed=modules)


class Planner:
    """Plans the calls of one graph; an operation goes to the first of the calls that could take it."""

    def __init__(self, root: nn.Module, graph: fx.Graph, at_the_end: str) -> None:
        self.root = root
        self.at_the_end = at_the_end
        self.position = {node: index for index, node in enumerate(graph.nodes)}
        self.changed = {node: self.changed_by(node) for node in graph.nodes}
        self.mutations = [(node, target) for node, targets in self.changed.items() for target in targets]
        self._joined: dict[fx.Node, list[fx.Node]] = {}
        for group in map(joined_operands, graph.nodes):
            for node in group:
                self._joined[node] = self._joined.get(node, []) + group
        self._storages: dict[fx.Node, set[fx.Node]] = {}
        self.claimed: set[fx.Node] = set()

    def module(self, node: fx.Node) -> nn.Module | None:
        if node.op != "call_module":
            return None
        assert isinstance(node.target, str)
        return self.root.get_submodule(node.target)

    def reads(self, conv: fx.Node) -> list[fx.Node]:
        """The tensors that the call reads when it runs, as far as something in the graph may change them."""
        input = conv.args[0] if conv.args else conv.kwargs.get("input")
        return [input] if isinstance(input, fx.Node) else []

    def plan(self, conv: fx.Node) -> Plan:
        steps: list[str] = []
        chain = [conv]
        by_step: list[tuple[fx.Node, ...]] = []
        # What the deferred call reads, each with the node at which the network itself reads it.
        read = [(node, conv) for node in self.reads(conv)]
        while True:
            if CAT in steps:
                reason = "written into the concatenation"
                break
            found = self._next(chain[-1], steps)
            if isinstance(found, str):
                reason = found
                break
            name, nodes, operands = found
            # The gradient of an activation reads the add again: it may not change later either.
            kept = ADD in steps and name not in (BATCH_NORM, DROPOUT, CAT)
            adds = [(tensor, reader) for tensor, reader in read if reader is not conv]
            changed = self._changed(read, nodes[-1], {*chain, *nodes}) or (
                self._changed(adds, None, {*chain, *nodes}) if kept else None
            )
            if changed is not None:
                reason = (
                    f"then {self._describe(nodes[-1])}, but {changed} changes in place what would be read"
                )
                break
            steps.append(name)
            by_step.append(tuple(nodes))
            chain += nodes
            read += [(operand, nodes[-1]) for operand in operands]
        while steps and steps[-1] == DROPOUT:  # alone it is nothing to take in
            steps.pop()
            chain.pop()
        self.claimed.update(chain[1:])
        return Plan(tuple(steps), reason, tuple(by_step[: len(steps)]))

    def _next(self, node: fx.Node, steps: list[str]) -> tuple[str, list[fx.Node], list[fx.Node]] | str:
        """The name, the nodes and the other operands of the step that follows; or why there is none."""
        users = [user for user in node.users if not _is_metadata(user)]
        if not users:
            return "then nothing uses the result"
        activated = any(step not in (BATCH_NORM, DROPOUT, ADD) for step in steps)
        if not activated:
            gate = self._gated_by_itself(users, node)
            if gate is not None:
                return self.unseen_between(node, gate[1]) or (X_HARDSWISH, list(gate), [])
        if len(users) > 1:
            return f"then the result is used {len(users)} times"
        user = users[0]
        if user.op == "output":
            return self.at_the_end
        if list(user.all_input_nodes).count(node) != 1 or _count(user, node) != 1:
            return f"then the result is used twice by {self._describe(user)}"
        unseen = self.unseen_between(node, user)
        if unseen:
            return unseen
        step = self.step(user)
        then = f"then {self._describe(user)}"
        if step is None or step.name == MUL:
            return then
        if step.name == DROPOUT:
            return DROPOUT, [user], []
        if step.name == BATCH_NORM:
            if ADD in steps or activated or BATCH_NORM in steps:
                return then
            return BATCH_NORM, [user], [other for other in user.all_input_nodes if other is not node]
        if step.name == ADD:
            return self._add(node, user, step, steps, then)
        if step.name == CAT:
            return self._cat(node, user, step, then)
        return then if activated else (step.name, [user], [])

    def _add(
        self, node: fx.Node, user: fx.Node, step: Step, steps: list[str], then: str
    ) -> tuple[str, list[fx.Node], list[fx.Node]] | str:
        if ADD in steps:
            return then
        if user in self.claimed:
            return f"{then}, which the other operand's convolution takes"
        other = step.operands[1] if step.operands[0] is node else step.operands[0]
        if step.inplace and step.operands[0] is not node:
            return f"{then}, which changes its other operand in place"
        if isinstance(other, (bool, int, float)):
            return f"{then} of a number"
        return ADD, [user], [other] if isinstance(other, fx.Node) else []

    def _cat(
        self, node: fx.Node, user: fx.Node, step: Step, then: str
    ) -> tuple[str, list[fx.Node], list[fx.Node]] | str:
        if user in self.claimed:
            return f"{then}, into which the other operand's convolution writes"
        # Which dimension is the channels' depends on the batch, so it is looked at in the call.
        if cat_dim(step) not in (0, 1, -4):
            return f"{then} along dimension {cat_dim(step)}"
        other = step.operands[1] if step.operands[0] is node else step.operands[0]
        return CAT, [user], [other] if isinstance(other, fx.Node) else []

    def _gated_by_itself(self, users: list[fx.Node], t: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """The two nodes of ``t * hardswish(t)``."""
        if len(users) != 2:
            return None
        for gate, product in (users, reversed(users)):
            first, second = self.step(gate), self.step(product)
            if (
                first is not None
                and first.name == "hardswish"
                and not first.inplace
                and second is not None
                and second.name == MUL
                and list(gate.users) == [product]
                and {id(operand) for operand in second.operands} == {id(t), id(gate)}
                and not (second.inplace and second.operands[0] is gate)
                and not self.unseen_between(gate, product)
            ):
                return gate, product
        return None

    def step(self, node: fx.Node) -> Step | None:
        module = self.module(node)
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and type(module) in (
            nn.BatchNorm3d,
            nn.SyncBatchNorm,
        ):
            return Step(BATCH_NORM, (node.args[0],)) if node.args else None
        function: Any = node.target
        if node.op == "call_method":
            function = getattr(torch.Tensor, str(node.target), None)
        elif node.op != "call_function":
            return None
        return classify(function, node.args, node.kwargs)

    def unseen_between(self, node: fx.Node, user: fx.Node) -> str | None:
        """A reason if a hook or a compiler sees the tensor on its way from ``node`` to ``user``."""
        if user.meta.get("compiled") and not node.meta.get("compiled"):
            return "then compiled code"
        for name in _passed(node, user):
            if has_hooks(self.root.get_submodule(name)):
                return f"then a hook of {name!r} sees the result"
        return None

    def _describe(self, node: fx.Node) -> str:
        module = self.module(node)
        return function_name(node) if module is None else f"{type(module).__name__} {str(node.target)!r}"

    # --- changes in place ----------------------------------------------------------------------------------

    def _changed(
        self, read: list[tuple[fx.Node, fx.Node]], end: fx.Node | None, chain: set[fx.Node]
    ) -> str | None:
        """What changes a tensor after the network has read it and before ``end``; without ``end``, ever."""
        for node, target in self.mutations:
            if node in chain or (end is not None and self.position[node] > self.position[end]):
                continue
            for tensor, reader in read:
                late = self.position[node] > self.position[reader]
                if late and self.storage(target) & self.storage(tensor):
                    return self._describe(node)
        return None

    def changed_by(self, node: fx.Node) -> list[fx.Node]:
        """The nodes whose tensors ``node`` changes."""
        return changed_operands(node, self.module(node))

    def storage(self, node: fx.Node) -> set[fx.Node]:
        """The nodes whose memory ``node`` may share, itself among them."""
        if node not in self._storages:
            self._storages[node] = self._find_storage(node)
        return self._storages[node]

    def _find_storage(self, node: fx.Node) -> set[fx.Node]:
        found: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            current = waiting.pop()
            if current not in found:
                found.add(current)
                waiting += self._joined.get(current, [])
                if not self.is_fresh(current):
                    waiting += current.all_input_nodes
        return found

    def is_fresh(self, node: fx.Node) -> bool:
        """Whether the result surely has memory of its own."""
        if self.changed[node]:
            return False
        module = self.module(node)
        if module is not None:
            return isinstance(module, _FRESH_MODULES)
        step = self.step(node)
        return (step is not None and step.name != DROPOUT) or function_name(node) in _FRESH_FUNCTIONS


_FRESH_MODULES = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.Linear,
    nn.PReLU,
)
_FRESH_FUNCTIONS = frozenset(
    {
        "cat", "stack", "conv3d", "conv_transpose3d", "linear", "matmul", "interpolate", "instance_norm",
        "group_norm", "layer_norm", "batch_norm", "max_pool3d", "avg_pool3d", "prelu", "sub", "div", "clone",
        "zeros", "ones", "empty", "zeros_like",
    }
)  # fmt: skip


def _stack(node: fx.Node) -> dict[str, str]:
    """The names of the modules around ``node``, by a key of the call."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack", {})
    return {call: value[0] for call, value in stack.items() if value[0]}


def _passed(node: fx.Node, user: fx.Node) -> list[str]:
    """The names of the modules that a tensor leaves and enters on its way from ``node`` to ``user``."""
    left, entered = _stack(node), _stack(user)
    names = [name for call, name in left.items() if call not in entered]
    names += [name for call, name in entered.items() if call not in left]
    return names + [str(n.target) for n in (node, user) if n.op == "call_module"]


def _count(user: fx.Node, node: fx.Node) -> int:
    hits: list[fx.Node] = []
    fx.map_arg((user.args, user.kwargs), lambda n: hits.append(n) if n is node else None)
    return len(hits)


def _is_metadata(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in METADATA_METHODS
    return node.op == "call_function" and node.target is getattr and node.args[1] in METADATA_ATTRIBUTES
