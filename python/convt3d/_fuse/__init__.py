# SPDX-License-Identifier: Apache-2.0
"""``convt3d.fuse``: a network's transposed convolutions, with what follows each, as one operation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from ._hooks import Watched
from ._module import InPlaceConvTranspose3d, is_ours, swap, why_not
from ._plan import Plan, plans
from ._report import FuseEntry, FuseReport
from ._trace import recorded_graph, symbolic_graphs

__all__ = ["FuseEntry", "FuseReport", "fuse", "fuse_report", "unfuse"]

_REPORT = "_convt3d_fuse_report"
_END = "then the model's output"
_END_OF_PART = "what comes next does not trace: example_inputs would show it"
_NOT_CALLED = "the model's forward does not call it"
_NOT_REACHED = "what comes next does not trace, and the run with example_inputs did not come by"

_Model = TypeVar("_Model", bound=nn.Module)


def fuse(model: _Model, example_inputs: Any = None) -> _Model:
    """Makes the transposed convolutions of ``model`` take in what follows; changes and returns ``model``.

    Every ``nn.ConvTranspose3d`` in it becomes a :class:`convt3d.FusedConvTranspose3d`: the same object, with
    the same parameters, hooks, flags and ``state_dict`` keys. Where the model's graph shows a batch norm (in
    eval), an add, an activation of the table or a concatenation behind one, these run in the same call under
    ``torch.no_grad()`` or ``torch.inference_mode()``. Nothing else in the model changes, neither classes nor
    signatures; :func:`unfuse` undoes it. Calling it again plans anew.

    Args:
        model: traced with torch.fx; parts that do not trace are passed over, and the parts within them traced
            by themselves.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments. If given, a
            model that does not trace as a whole is also run once with them (in eval mode, without gradients)
            and watched.

    Returns:
        ``model`` itself. :func:`fuse_report` says what was replaced, what was left, and why.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.
        Exception: whatever ``model`` raises when it is run with ``example_inputs``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convt3d: model must be a torch.nn.Module, got {type(model).__name__}")
    unfuse(model)
    reasons = {
        module: why_not(module) for module in model.modules() if isinstance(module, nn.ConvTranspose3d)
    }
    names = {module: name for name, module in reversed(list(model.named_modules()))}
    found: dict[nn.Module, list[Plan]] = {module: [] for module in reasons}
    opaque: dict[nn.Module, str] = {}
    end_of_part = _NOT_CALLED
    if any(reason is None for reason in reasons.values()):
        regions, opaque = symbolic_graphs(model)
        if opaque:
            end_of_part = _END_OF_PART if example_inputs is None else _NOT_REACHED
        for root, graph in regions:
            at_the_end = end_of_part if opaque else f"then the output of {names[root]!r}"
            for module, plan in plans(root, graph, _END if root is model else at_the_end):
                found[module].append(plan)
        if opaque and example_inputs is not None:
            watched: dict[nn.Module, list[Plan]] = {}
            for module, plan in plans(model, recorded_graph(model, example_inputs), _END):
                watched.setdefault(module, []).append(plan)
            found.update(watched)
    entries = []
    for module, why in reasons.items():
        if why is not None:
            entries.append(FuseEntry(names[module], False, (), why))
            continue
        plan = _common(found[module]) if found[module] else Plan((), end_of_part)
        swap(module, InPlaceConvTranspose3d)
        if plan.steps:
            module.convt3d_plan = plan.steps  # type: ignore[assignment]
            module.convt3d_ways = tuple({p.way: None for p in found[module]})  # type: ignore[assignment]
            module.convt3d_watched = Watched.of(model, module, plan.passed)  # type: ignore[assignment]
        entries.append(
            FuseEntry(names[module], True, tuple(s for s in plan.steps if s != "dropout"), plan.reason)
        )
    instead = " (one run was watched instead)" if example_inputs is not None else ""
    notes = tuple(
        f"{names[module] or 'the model'} does not trace{instead}: {why}" for module, why in opaque.items()
    )
    model.__dict__[_REPORT] = FuseReport(tuple(entries), notes)
    return model


def unfuse(model: _Model) -> _Model:
    """Undoes :func:`fuse`: the transposed convolutions are what they were; returns ``model``."""
    for module in model.modules():
        module.__dict__.pop(_REPORT, None)
        if is_ours(module):
            for name in ("convt3d_plan", "convt3d_ways", "convt3d_watched", "convt3d_last"):
                module.__dict__.pop(name, None)
            swap(module, nn.ConvTranspose3d)
    return model


def fuse_report(model: nn.Module) -> FuseReport:
    """What :func:`fuse` did to ``model``, and what the last call of each convolution has taken in; print it.

    Raises:
        ValueError: ``model`` has not been fused, or not as a whole, or not since it was unfused.
    """
    report = model.__dict__.get(_REPORT)
    if not isinstance(report, FuseReport):
        raise ValueError("convt3d: this model was not passed to convt3d.fuse(), or has been unfused")
    modules = dict(model.named_modules())
    entries = (
        replace(entry, last=getattr(modules.get(entry.name), "convt3d_last", None))
        for entry in report.entries
    )
    return replace(report, entries=tuple(entries))


def _common(plans_of_module: list[Plan]) -> Plan:
    """The plan of a module that may be called more than once: what all its calls have in common."""
    first, *rest = plans_of_module
    steps = first.steps
    for plan in rest:
        common = [a == b for a, b in zip(steps, plan.steps, strict=False)]
        length = common.index(False) if False in common else len(common)
        steps = steps[:length]
    while steps and steps[-1] == "dropout":
        steps = steps[:-1]
    passed = tuple(dict.fromkeys(module for plan in plans_of_module for module in plan.passed))
    if any(plan.steps != steps for plan in plans_of_module):
        reason = f"called {len(plans_of_module)} times, with different operations behind it"
        return Plan(steps, reason, passed=passed)
    return Plan(steps, first.reason, passed=passed)
