"""Lets compiled updates multiply matrices by oneDNN instead of MKL.

MKL does not use AVX-512 on AMD processors, so its products take twice as long there as oneDNN's.
Both libraries are part of PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from nmer_recipes.provenance import misses_avx512

_LEAST = 2**20  # multiplications of a product from which oneDNN is faster, measured on an EPYC

# A plain operator costs less per call than one made by `torch.library.custom_op`.
_library = torch.library.Library("nmer_recipes", "DEF")
_library.define("multiply(Tensor left, Tensor right) -> Tensor")


@torch.library.impl(_library, "multiply", "CPU")
def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Returns the product of float32 matrices `[m, k]` and `[k, n]`, computed by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise.default(left, right.T, None, "none", [], "")


@torch.library.register_fake("nmer_recipes::multiply", lib=_library)
def _allocate(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


class UseOneDNN(CustomGraphPass):
    """Replaces the large float32 products of a graph that `torch.compile` has traced.

    It sees the products of gradients as well, so the operator needs no derivative.
    """

    def __call__(self, graph: Graph) -> None:
        """Replaces the products in place."""
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
            left, right = (argument.meta["val"] for argument in node.args)
            if left.dtype == torch.float32 and left.numel() * right.shape[1] >= _LEAST:
                node.target = torch.ops.nmer_recipes.multiply.default
                if not left.is_contiguous():
                    _copy(graph, node)

    def uuid(self) -> Any:
        """Returns what tells versions of this pass apart in the compiler's cache."""
        return get_hash_for_files((__file__,))


def _copy(graph: Graph, node: Node) -> None:
    """Makes the left side of a product contiguous.

    oneDNN would copy it itself, but Inductor copies it together with what computes it.
    """
    given = node.args[0]
    with graph.inserting_before(node):
        copied = graph.call_function(
            torch.ops.aten.clone.default, (given,), {"memory_format": torch.contiguous_format}
        )
    copied.meta["val"] = given.meta["val"].contiguous()
    node.update_arg(0, copied)


def compile_options(device: torch.device) -> dict[str, Any] | None:
    """Returns the options of `torch.compile` with which products are fast on this machine."""
    if device.type != "cpu" or not misses_avx512() or not torch.backends.mkldnn.is_available():
        return None
    return {"post_grad_custom_pre_pass": UseOneDNN()}
