# SPDX-License-Identifier: Apache-2.0
"""Graphs that show what follows each transposed convolution: by torch.fx, or by watching one run.

Graphs serve the plan alone. They are never run, so what they do not see (a flag that changes later, another
branch) costs a fusion, not a result.
"""

from __future__ import annotations

import contextlib
import operator
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules import module as _globals
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from ._code import in_compiled_code
from ._hooks import HOOKS
from ._steps import METADATA

# Traced into, so that the graph shows the function they call.
_TRANSPARENT = (
    nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Dropout,
    nn.Dropout3d, nn.Identity,
)  # fmt: skip


def holds_conv(module: nn.Module) -> bool:
    return any(isinstance(m, nn.ConvTranspose3d) for m in module.modules())


class _Tracer(fx.Tracer):
    """Symbolic tracing in which a module that does not trace is one opaque node."""

    def __init__(self) -> None:
        super().__init__()
        self.opaque: dict[nn.Module, str] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, nn.ConvTranspose3d):
            return True
        return type(m) not in _TRANSPARENT and super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if m not in self.opaque:
            last = next(iter(reversed(self.graph.nodes)), None)
            stack = OrderedDict(self.module_stack)
            try:
                return super().call_module(m, forward, args, kwargs)
            except Exception as error:
                self.module_stack = stack
                self.opaque[m] = _first_line(error)
                for node in reversed(self.graph.nodes):
                    if node is last:
                        break
                    self.graph.erase_node(node)
        return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].split('. ')[0]}" if text else type(error).__name__


@contextlib.contextmanager
def _left_as_found(model: nn.Module) -> Iterator[None]:
    """Undoes what a forward with stand-ins for tensors may leave behind; hides the hooks from it."""
    found: list[tuple[nn.Module, dict[str, Any]]] = []
    contents: list[tuple[Any, list[Any]]] = []
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # a leaf of the trace; its attributes live in C++
        # The parts, and what else a forward may put something into.
        contents += [
            (container, list(container.items() if isinstance(container, dict) else container))
            for name, attribute in module.__dict__.items()
            if "hooks" not in name
            for container in _containers(attribute)
            if not isinstance(container, (tuple, frozenset))
        ]
        found.append((module, dict(module.__dict__)))
        for name in HOOKS:
            module.__dict__[name] = OrderedDict()
    try:
        # A forward computes with the buffers themselves: a stand-in might stay in a cache.
        with _same_values(model), torch.random.fork_rng(()):
            yield
    finally:
        for module, attributes in found:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for container, content in contents:
            _refill(container, content)


@contextlib.contextmanager
def _same_values(model: nn.Module) -> Iterator[None]:
    """Undoes what a forward does to buffers (statistics, counters) and to Python's random generator."""
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    named = [(module._buffers, dict(module._buffers)) for module in modules]
    values = [
        (b, b._version, b.detach().clone())
        for b in model.buffers()
        if not (b.is_inference() or nn.parameter.is_lazy(b))
    ]
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
        for buffers, found in named:
            buffers.update(found)
        with torch.no_grad():
            for buffer, version, value in values:
                if buffer._version != version:
                    buffer.copy_(value)


_CONTAINERS = (dict, list, set, deque, tuple, frozenset)


def _containers(item: Any, depth: int = 3) -> Iterator[Any]:
    """``item``, if it is a container, and those within it, to some depth: they may hold each other."""
    if isinstance(item, _CONTAINERS) and depth:
        yield item
        for part in _contained(item):
            yield from _containers(part, depth - 1)


def _contained(container: Any) -> Iterable[Any]:
    return chain(container.keys(), container.values()) if isinstance(container, dict) else container


def _refill(container: Any, content: list[Any]) -> None:
    """By the methods of the type itself: a subclass may count or refuse what it is given."""
    if isinstance(container, dict):
        base = OrderedDict if isinstance(container, OrderedDict) else dict
        base.clear(container)
        for key, value in content:
            base.__setitem__(container, key, value)
    elif isinstance(container, list):
        list.__setitem__(container, slice(None), content)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, content)
    else:
        deque.clear(container)
        deque.extend(container, content)


Region = tuple[nn.Module, fx.Graph]  # names in the graph are relative to the module


def symbolic_graphs(model: nn.Module) -> tuple[list[Region], dict[nn.Module, str]]:
    """Graphs of the largest modules that torch.fx can trace and, of those it cannot, the reason.

    Together the graphs show every transposed convolution that runs inside a forward that traces.
    """
    regions: list[Region] = []
    opaque: dict[nn.Module, str] = {}
    waiting = [model]
    seen = set()
    with _left_as_found(model):
        while waiting:
            root = waiting.pop(0)
            if root in seen or isinstance(root, nn.ConvTranspose3d) or not holds_conv(root):
                continue
            seen.add(root)
            if _is_container(root):
                waiting += root.children()
                continue
            tracer = _Tracer()
            try:
                graph = tracer.trace(root)
            except Exception as error:
                opaque[root] = _first_line(error)
                waiting += root.children()
                continue
            _use_what_is_kept(graph, root, lambda item: item.node if isinstance(item, fx.Proxy) else None)
            regions.append((root, graph))
            for module, reason in tracer.opaque.items():
                if holds_conv(module):
                    opaque[module] = reason
                    waiting += module.children()
    return regions, opaque


def _use_what_is_kept(graph: fx.Graph, root: nn.Module, node_of: Callable[[Any], fx.Node | None]) -> None:
    """Makes a module that keeps a tensor, as Grad-CAM's do (``self.features = y``), one of its users."""
    present = set(graph.nodes)
    for module in root.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        attributes = list(module.__dict__.values())
        held = chain(attributes, *map(_contained, chain.from_iterable(map(_containers, attributes))))
        kept = {node_of(item): None for item in held}
        nodes = [node for node in kept if node in present]  # not those of an earlier attempt
        if nodes:
            with graph.inserting_before(next(iter(reversed(graph.nodes)))):
                graph.call_function(kept_by_a_module, tuple(nodes))


def kept_by_a_module(*tensors: Any) -> None:
    """Stands in a graph for a module that keeps tensors."""


def _is_container(module: nn.Module) -> bool:
    """Whether only its parts have a forward to trace: a ModuleList, or what torch.compile returns."""
    if hasattr(module, "_orig_mod"):
        return True
    return type(module).forward is nn.Module.forward and "forward" not in module.__dict__


class _Recorder(TorchFunctionMode):
    """Writes the calls of one run down as a graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.names = {module: name for name, module in model.named_modules()}
        self.stack: OrderedDict[str, tuple[str, Any]] = OrderedDict()
        self.calls = 0
        self.nodes: Any = WeakIdKeyDictionary()
        self.convolved: Any = None  # the last input of a transposed convolution

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            return func(*args, **kwargs)
        node_args = self._stand_ins(tuple(args))
        node_kwargs = self._stand_ins(dict(kwargs))
        if func is F.conv_transpose3d:
            self.convolved = node_args[0]
        out = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) for leaf in tree_flatten(out)[0]):
            self._enter(self._node("call_function", func, node_args, node_kwargs), out)
        else:
            self._node("call_function", func, node_args, node_kwargs)
        return out

    def before(self, module: nn.Module, args: Any) -> None:
        if module in self.names:
            self.calls += 1  # a module may be called twice
            self.stack[f"{self.names[module]}@{self.calls}"] = (self.names[module], type(module))

    def after(self, module: nn.Module, args: Any, out: Any) -> None:
        if module not in self.names:
            return
        for key, (name, _) in reversed(self.stack.items()):
            if name == self.names[module]:
                del self.stack[key]
                break
        if isinstance(module, nn.ConvTranspose3d) and isinstance(out, Tensor):
            # A global hook does not see keyword arguments.
            self._enter(self._node("call_module", self.names[module], (self.convolved,), {}), out)

    def finish(self, out: Any) -> None:
        self.graph.output(self._stand_ins(tuple(tree_flatten(out)[0])))

    def _stand_ins(self, arguments: Any) -> Any:
        def stand_in(item: Any) -> Any:
            if isinstance(item, Tensor):
                return self.nodes.get(item)
            return item if isinstance(item, (int, float, bool, str)) else None

        return tree_map(stand_in, arguments)

    def _node(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta["nn_module_stack"] = OrderedDict(self.stack)
        node.meta["compiled"] = in_compiled_code(sys._getframe(1))
        return node

    def _enter(self, node: fx.Node, out: Any) -> None:
        if isinstance(out, Tensor):
            self.nodes[out] = node
        elif isinstance(out, (tuple, list)):
            for index, item in enumerate(out):
                if isinstance(item, Tensor):
                    self.nodes[item] = self._node("call_function", operator.getitem, (node, index), {})


def recorded_graph(model: nn.Module, example_inputs: Any) -> fx.Graph:
    """The graph of one run of ``model`` in eval mode, without gradients.

    Args:
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
    """
    if isinstance(example_inputs, Mapping):
        args: tuple[Any, ...] = ()
        kwargs = dict(example_inputs)
    else:
        args = tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
        kwargs = {}
    training = [(module, module.training) for module in model.modules()]
    recorder = _Recorder(model)
    handles = [
        _globals.register_module_forward_pre_hook(recorder.before),
        _globals.register_module_forward_hook(recorder.after),
    ]
    devices = {t.device for t in model.parameters() if t.device.type == "cuda"}
    try:
        for module, _ in training:
            module.training = False
        with torch.random.fork_rng(sorted(d.index for d in devices)), torch.no_grad():
            # The inputs' nodes: what the run changes in place is then known by name.
            for leaf in tree_flatten((args, kwargs))[0]:
                if isinstance(leaf, Tensor):
                    recorder.nodes[leaf] = recorder.graph.placeholder(f"input_{len(recorder.nodes)}")
            # What is compiled runs eagerly: the compiler would trace the recorder.
            with _same_values(model), recorder, torch.compiler.set_stance("force_eager"):
                out = model(*args, **kwargs)
        recorder.finish(out)
        _use_what_is_kept(
            recorder.graph, model, lambda item: recorder.nodes.get(item) if isinstance(item, Tensor) else None
        )
    finally:
        for handle in handles:
            handle.remove()
        for module, flag in training:
            module.training = flag
    return recorder.graph
