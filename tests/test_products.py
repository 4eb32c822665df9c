"""Products that compiled updates compute by oneDNN."""

import pytest
import torch
from recipe_helpers import RECIPES  # noqa: F401  # puts the recipes on the path
from torch.fx.experimental.proxy_tensor import make_fx

from nmer_recipes import products  # isort: skip

needs_mkldnn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="needs PyTorch with oneDNN"
)
MULTIPLY = torch.ops.nmer_recipes.multiply.default


def trace(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> torch.fx.GraphModule:
    traced = make_fx(torch.mm)(torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype))
    products.UseOneDNN()(traced.graph)
    traced.recompile()
    return traced


def uses_onednn(traced: torch.fx.GraphModule) -> bool:
    return any(node.target is MULTIPLY for node in traced.graph.nodes)


def test_large_products_of_float32_are_replaced():
    assert uses_onednn(trace(100, 400, 300))
    assert not uses_onednn(trace(100, 23, 16))
    assert not uses_onednn(trace(100, 400, 300, torch.float64))
    assert not uses_onednn(trace(100, 400, 300, torch.bfloat16))


@needs_mkldnn
@pytest.mark.parametrize("turned", ["", "left", "right", "left right"])
def test_a_replaced_product_is_that_of_float64(turned):
    left, right = torch.randn(100, 400), torch.randn(400, 300)
    if "left" in turned:
        left = left.T.contiguous().T
    if "right" in turned:
        right = right.T.contiguous().T
    traced = make_fx(torch.mm)(left, right)
    products.UseOneDNN()(traced.graph)
    traced.recompile()
    assert ("clone" in traced.code) == ("left" in turned)
    found = traced(left, right)
    assert found.is_contiguous()
    torch.testing.assert_close(
        found, (left.double() @ right.double()).float(), rtol=1e-4, atol=1e-3
    )


@needs_mkldnn
def test_compiled_gradients_are_those_of_the_function(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(products, "misses_avx512", lambda: True)
    called, compute = [], products.UseOneDNN.__call__
    monkeypatch.setattr(
        products.UseOneDNN,
        "__call__",
        lambda own, graph: (compute(own, graph), called.append(str(graph).count("multiply"))),
    )
    inputs, weight = torch.randn(64, 200), torch.randn(128, 200)

    def gradient(weight, inputs):
        def loss(weight):
            return torch.nn.functional.linear(inputs, weight).relu().square().mean()

        return torch.func.grad_and_value(loss)(weight)

    options = products.compile_options(torch.device("cpu"))
    compiled = torch.compile(gradient, fullgraph=True, dynamic=False, options=options)
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        found = compiled(weight, inputs)
    torch.testing.assert_close(found, gradient(weight, inputs))
    assert called == [2]  # the layer's product and that of its gradient


def test_products_are_left_alone_where_mkl_is_as_fast(monkeypatch):
    monkeypatch.setattr(products, "misses_avx512", lambda: False)
    assert products.compile_options(torch.device("cpu")) is None
    monkeypatch.setattr(products, "misses_avx512", lambda: True)
    assert products.compile_options(torch.device("cuda")) is None
    given = products.compile_options(torch.device("cpu"))
    assert (given is not None) == torch.backends.mkldnn.is_available()
