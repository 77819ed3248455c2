# SPDX-License-Identifier: Apache-2.0
"""Registration of ``torch.ops.convt3d``: schemas, fake, CPU and CUDA kernels, autograd, vmap.

``conv_transpose3d_core`` is the operation behind autocast's rule, which _composite.py puts before it.
Every kernel starts by building a :class:`Problem`, so all of them refuse the same calls with the same words.
Autograd is an implementation of the Autograd key rather than ``register_autograd``, whose formulas raise
under ``torch.func`` and return zero tangents in silence under forward-mode AD: such calls are decomposed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _aten, _backward, _native
from ._problem import Problem, check_grad_output

_ARGUMENTS = (
    "Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] output_padding, "
    "SymInt groups, SymInt[] dilation, Tensor? add, str add_order, str activation, Scalar negative_slope, "
    "str precision"
)

# Positions of the tensors among those arguments.
_INPUT, _WEIGHT, _BIAS, _ADD = 0, 1, 2, 8
_ACTIVATION = 10

_library: Any = torch.library.Library("convt3d", "DEF")  # type: ignore[no-untyped-call]
_library.define(f"conv_transpose3d_core({_ARGUMENTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    f"conv_transpose3d_backward(Tensor grad_output, {_ARGUMENTS}, bool[] mask) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)

core_op = torch.ops.convt3d.conv_transpose3d_core.default
backward_op = torch.ops.convt3d.conv_transpose3d_backward.default

_Args = tuple[Any, ...]


def _tensors(args: _Args) -> tuple[Any, Any, Any, Any]:
    """What stands at the tensors' places (input, weight, bias, add) among the operator's arguments."""
    return args[_INPUT], args[_WEIGHT], args[_BIAS], args[_ADD]


def _with_tensors(args: _Args, change: Callable[[Tensor], Tensor]) -> _Args:
    changed = list(args)
    for position in (_INPUT, _WEIGHT, _BIAS, _ADD):
        if changed[position] is not None:
            changed[position] = change(changed[position])
    return tuple(changed)


# --- forward -----------------------------------------------------------------------------------------------


def _fake(*args: Any) -> Tensor:
    return Problem.create(*args).empty_output()


def _forward_aten(*args: Any) -> Tensor:
    return _aten.forward(Problem.create(*args), *_tensors(args))


def _forward_cuda(*args: Any) -> Tensor:
    out = _native.quick_operator(args)  # the short way of eager calls
    if out is not None:
        return out
    problem = Problem.create(*args)
    out = _forward_native(problem, args)
    return _aten.forward(problem, *_tensors(args)) if out is None else out


def _forward_native(problem: Problem, args: _Args) -> Tensor | None:
    """The result of our kernels, or None where they do not take the call."""
    if problem.batch == 0 or 0 in problem.out_size:
        return None
    if problem.batched:
        return _native.forward(args)
    out = _native.forward((args[_INPUT].unsqueeze(0), *args[1:]))
    return None if out is None else out.squeeze(0)


# --- backward ----------------------------------------------------------------------------------------------


def _backward_problem(grad_output: Tensor, args: _Args, mask: list[bool]) -> Problem:
    """The call whose gradients are asked for; a bias that no formula reads may be left out.

    Raises:
        RuntimeError: ``mask`` or ``grad_output`` does not fit the call, or what the call itself raises.
    """
    if len(mask) != 4:
        raise RuntimeError(f"convt3d: mask must have 4 entries (input, weight, bias, add), got {mask!r}")
    problem = Problem.create(*args)
    if mask[3] and args[_ADD] is None:
        raise RuntimeError(f"convt3d: mask asks for the gradient of add, but there is none: {mask!r}")
    check_grad_output(problem, grad_output)
    return problem


def _backward_fake(grad_output: Tensor, *rest: Any) -> list[Tensor]:
    args, mask = rest[:-1], rest[-1]
    problem = _backward_problem(grad_output, args, mask)
    return _backward.empty_gradients(problem, *_tensors(args), mask)


def _backward_real(grad_output: Tensor, *rest: Any) -> list[Tensor]:
    args, mask = rest[:-1], rest[-1]
    problem = _backward_problem(grad_output, args, mask)
    # A compiled graph calls this operator under the autocast that surrounds backward(), which is not its own.
    with torch._C._DisableAutocast():
        return _backward.backward(
            problem, grad_output, *_tensors(args), mask, recompute=lambda: _recompute(problem, args)
        )


def _recompute(problem: Problem, args: _Args) -> Tensor:
    """The pre-activation: the same call with neither an activation nor an add that comes after one.

    On a CPU 16-bit types stay in fp32; on CUDA it is the kernels' rounded result.
    """
    changed = list(args)
    changed[_ACTIVATION] = "none"
    if not problem.add_before:
        changed[_ADD] = None
    if problem.is_sixteen_bit and problem.device.type == "cpu":
        changed = list(_with_tensors(tuple(changed), Tensor.float))
    return core_op(*changed)  # type: ignore[no-any-return]


class _ConvTranspose3dFunction(torch.autograd.Function):
    """Saves inputs only, and of those only what a wanted gradient needs. ``input`` is 5-D."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Tensor:
        problem = Problem.create(*args)
        with torch._C._AutoDispatchBelowAutograd():
            out = core_op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
        _ConvTranspose3dFunction.remember(ctx, problem, args)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def remember(ctx: Any, problem: Problem, args: _Args) -> None:
        """Leaves in ``ctx`` what :meth:`backward` reads; ``args`` are the arguments after the first."""
        input, weight, bias, add = _tensors(args)
        mask = _tensors(ctx.needs_input_grad[1:])
        # Gradients of bias and add alone are sums of what the activation passes back.
        through_activation = _backward.needs_preactivation(problem) and (
            any(mask[:3]) or (mask[3] and problem.add_before)
        )
        through_convolution = mask[0] or mask[1] or through_activation
        ctx.save_for_backward(
            input if through_convolution else None,
            weight if through_convolution else None,
            _savable(bias) if through_activation else None,
            _savable(add) if through_activation and problem.add_before else None,
        )
        ctx.problem = problem
        ctx.through_activation = through_activation
        ctx.args = _with_tensors(args, lambda tensor: None)  # type: ignore[arg-type, return-value]
        ctx.add_shape = None if add is None else add.shape
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        (grad_output,) = grad_outputs
        grads: list[Tensor | None] = [None] * (1 + len(ctx.args))
        if grad_output is None:
            return tuple(grads)
        problem: Problem = ctx.problem
        mask = list(_tensors(ctx.needs_input_grad[1:]))
        # A backward pass runs in the types of its forward pass, whatever autocast says around it.
        with torch._C._DisableAutocast():
            if mask[3] and not (ctx.through_activation and problem.add_before):
                grads[1 + _ADD] = grad_output.sum_to_size(ctx.add_shape)
                mask[3] = False
            if mask[2] and not ctx.through_activation:
                grads[1 + _BIAS] = grad_output.sum((0, 2, 3, 4))
                mask[2] = False
            wanted = [p for p, want in zip((_INPUT, _WEIGHT, _BIAS, _ADD), mask, strict=True) if want]
            if not wanted:
                return tuple(grads)
            args = list(ctx.args)
            args[_INPUT], args[_WEIGHT], args[_BIAS], args[_ADD] = ctx.saved_tensors
            results = backward_op(grad_output, *args, mask)
        for position, grad in zip(wanted, results, strict=True):
            grads[1 + position] = grad
        return tuple(grads)


def _savable(tensor: Tensor | None) -> Tensor | None:
    """``tensor``, or a copy that autograd takes: PyTorch's own add and bias save no operand at all."""
    return tensor.clone() if tensor is not None and tensor.is_inference() else tensor


def _backward_autograd(keyset: Any, grad_output: Tensor, *rest: Any) -> list[Tensor]:
    """Differentiable ATen operators where a derivative may follow, the registered kernel otherwise."""
    args = rest[:-1]
    if _needs_decomposition() or _wants_grad(grad_output, *_tensors(args)):
        return _backward_decomposed(grad_output, *rest)
    with torch._C._AutoDispatchBelowAutograd():
        return backward_op.redispatch(  # type: ignore[no-any-return]
            keyset & torch._C._after_autograd_keyset, grad_output, *rest
        )


def _backward_decomposed(grad_output: Tensor, *rest: Any) -> list[Tensor]:
    args, mask = rest[:-1], rest[-1]
    problem = _backward_problem(grad_output, args, mask)
    return _backward.differentiable_backward(problem, grad_output, *_tensors(args), mask)


def _wants_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _needs_decomposition() -> bool:
    """Whether a functorch transform or a forward-mode level is active."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


_has_met_dtensor = False


def meet_dtensor() -> None:
    """Gives DTensor its rules (_dtensor.py) once it is there: it takes longer to import than convt3d."""
    global _has_met_dtensor
    if not _has_met_dtensor and "torch.distributed.tensor" in sys.modules:
        importlib.import_module("._dtensor", __package__)  # waits where another thread is at it
        _has_met_dtensor = True


def _autograd(keyset: Any, *args: Any) -> Tensor:
    meet_dtensor()
    wants_grad = _wants_grad(*_tensors(args))
    # aten::convolution_backward, which our formula is made of, does not know complex types.
    if _needs_decomposition() or (wants_grad and args[_INPUT].is_complex()):
        return _aten.decomposed(Problem.create(*args), *_tensors(args))
    if wants_grad:
        return _with_gradients(keyset, args)
    with torch._C._AutoDispatchBelowAutograd():
        return core_op.redispatch(keyset & torch._C._after_autograd_keyset, *args)  # type: ignore[no-any-return]


def _with_gradients(keyset: Any, args: _Args) -> Tensor:
    if args[_INPUT].dim() == 5:
        return _ConvTranspose3dFunction.apply(keyset, *args)  # type: ignore[no-any-return, no-untyped-call]
    # The batch of one comes and goes outside the Function: a Function that returns a view forbids changing
    # its result in place. What is wrong with the call is found first, in the caller's terms.
    Problem.create(*args)
    out = _ConvTranspose3dFunction.apply(keyset, args[_INPUT].unsqueeze(0), *args[1:])  # type: ignore[no-untyped-call]
    return out.squeeze(0)  # type: ignore[no-any-return]


# --- vmap, and the registrations ---------------------------------------------------------------------------


def _vmap(*args: Any) -> Tensor:
    """Decomposes: ATen's batching rules fold a mapped input into the batch, a mapped weight into groups."""
    return _aten.decomposed(Problem.create(*args), *_tensors(args))


# CPU, and every device that has no kernel of its own here, such as MPS and XPU.
_library.impl("conv_transpose3d_core", _forward_aten, "CPU")
_library.impl("conv_transpose3d_core", _forward_aten, "CompositeExplicitAutograd")
_library.impl("conv_transpose3d_core", _forward_cuda, "CUDA")
_library.impl("conv_transpose3d_core", _autograd, "Autograd", with_keyset=True)
_library.impl("conv_transpose3d_core", _vmap, "FuncTorchBatched")
_library.impl("conv_transpose3d_backward", _backward_autograd, "Autograd", with_keyset=True)
_library.impl("conv_transpose3d_backward", _backward_decomposed, "FuncTorchBatched")
# The vmap of is_grads_batched and of torch.autograd.functional, which is not torch.func's.
_library.impl("conv_transpose3d_backward", _backward_decomposed, "Batched")
for _key in ("CPU", "CUDA", "CompositeExplicitAutograd"):
    _library.impl("conv_transpose3d_backward", _backward_real, _key)
torch.library.register_fake("convt3d::conv_transpose3d_core", _fake, lib=_library)
torch.library.register_fake("convt3d::conv_transpose3d_backward", _backward_fake, lib=_library)
