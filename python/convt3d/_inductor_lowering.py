# SPDX-License-Identifier: Apache-2.0
"""The operators' short form in the graphs that Inductor makes code of: a pass behind autograd."""

from __future__ import annotations

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ._cat import cat_core_op
from ._inductor_chain import ChainedPass
from ._ops import core_op
from ._packed import pack, packed_op

# Their places among the operators' arguments: input, weight, bias, add, and the skip where there is one.
_TENSORS = (0, 1, 2, 8, 13)


class PackPass(ChainedPass):
    """Puts ``conv_transpose3d_packed`` in the place of the core operators."""

    # Its own and those whose tables number what it packs.
    sources = ("_inductor_lowering.py", "_packed.py", "_activations.py", "_precision.py", "_problem.py")

    def change(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in (core_op, cat_core_op) or node.kwargs:
                continue
            out = node.meta.get("val")
            if not isinstance(out, FakeTensor) or out.device.type not in self.device_types:
                continue
            arguments = pack(node.args)
            if arguments is None:
                continue
            with graph.inserting_before(node):
                packed = graph.call_function(packed_op, arguments)
            packed.meta = dict(node.meta)
            # The tensors, and nothing else, that it was traced with: Inductor keeps those strides.
            eager = node.meta.get("eager_input_vals")
            if eager is not None:
                input, weight, bias, add, *skip = (eager[0][at] for at in _TENSORS if at < len(eager[0]))
                tensors = (input, weight, bias, add, *(skip or (None,)))
                packed.meta["eager_input_vals"] = ((*tensors, *arguments[len(tensors) :]), {})
            node.replace_all_uses_with(packed)
            graph.erase_node(node)
