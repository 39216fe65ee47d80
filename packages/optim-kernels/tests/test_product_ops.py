"""Products with gradients: values, derivatives, ``torch.compile`` registration, other projects' names."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from random_tensors import DEVICE

pytest.importorskip("triton")
from torch import Tensor
from torch.autograd import gradcheck

from optim_kernels import muon_kernels as mk
from optim_kernels import newton_schulz, sum_of_squares
from optim_kernels._newton_schulz import product_launches, torch_products
from optim_kernels._newton_schulz.block_launch import BlockLaunch
from optim_kernels._newton_schulz.product_launches import multiply
from optim_kernels._newton_schulz.product_ops import _product
from optim_kernels._newton_schulz.tiles import Tile


def wide(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("side", ["left", "right"])
def test_gram(side: str) -> None:
    x = wide(2, 4, 6)
    expected = 0.5 * (x @ x.mT if side == "left" else x.mT @ x)
    torch.testing.assert_close(mk.gram(x, side=side, alpha=0.5), expected)
    assert gradcheck(lambda x: mk.gram(x, side=side, alpha=0.5), x)


def test_matmul_add() -> None:
    a, b, c = wide(3, 4), wide(4, 5), wide(3, 5)
    torch.testing.assert_close(mk.matmul_add(a, b, c=c, alpha=2.0, beta=0.5), 2 * a @ b + 0.5 * c)
    assert gradcheck(lambda a, b, c: mk.matmul_add(a, b, c=c, alpha=2.0, beta=0.5), (a, b, c))


def test_symmetric_matmul() -> None:
    a = mk.gram(wide(2, 5, 7)).detach()
    product = mk.symmetric_matmul(a, a, c=a, alpha=0.5, beta=-1.0)
    torch.testing.assert_close(product, 0.5 * a @ a - a)
    assert torch.equal(product, product.mT)


@pytest.mark.parametrize("symmetric", [True, False])
def test_factors_as_tensors(symmetric: bool) -> None:
    a, b, c = mk.gram(wide(4, 7)).detach().requires_grad_(), wide(4, 4), wide(4, 4)
    alpha, beta = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (2.0, -0.5))
    if symmetric:
        product = mk.symmetric_matmul(a, a, c=a, alpha=alpha, beta=beta)
        torch.testing.assert_close(product, 2 * a @ a - 0.5 * a)
    else:
        torch.testing.assert_close(mk.matmul_add(a, b, c=c, alpha=alpha, beta=beta), 2 * a @ b - 0.5 * c)
        assert gradcheck(lambda *x: mk.matmul_add(*x[:2], c=x[2], alpha=x[3], beta=x[4]), (a, b, c, alpha, beta))
    with pytest.raises(ValueError, match="alpha must be"):
        mk.gram(a, alpha=torch.ones(2))


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shapes", [((7, 9), (9, 5)), ((2, 3, 33, 65), (2, 3, 65, 17)), ((0, 4, 5), (0, 5, 6))], ids=str
)
def test_plain_torch_rounds_once(shapes: Any, dtype: torch.dtype, as_tensors: bool) -> None:
    """Errors of half a unit in the last place, not of one for the product, for its multiple, and for the sum."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    c = torch.randn((*a.shape[:-1], b.shape[-1]), generator=generator).to(DEVICE, dtype)
    for c_or_none, alpha, beta in ((None, 1.0, 0.0), (None, -1.7, 0.0), (c, 1.0, 3.4445), (c, 2.0315, -4.775)):
        factors = [torch.tensor(x, device=DEVICE) if as_tensors else x for x in (alpha, beta)]
        found = torch_products.matmul_add(a, b, c=c_or_none, alpha=factors[0], beta=factors[1])
        exact = alpha * a.double() @ b.double() + beta * c.double()
        assert found.dtype == dtype
        assert found.shape == c.shape
        half_unit = torch.finfo(dtype).eps / 2
        torch.testing.assert_close(found.double(), exact, rtol=1.01 * half_unit, atol=2e-5)


class OnGpu(torch.Tensor):
    """A tensor of the CPU for which plain torch does what it does on a GPU."""

    is_cuda = True  # type: ignore[assignment]


@pytest.mark.parametrize("c_dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_plain_torch_adds_other_dtypes_on_a_gpu_too(c_dtype: torch.dtype) -> None:
    """cuBLAS adds the dtype of its products alone."""
    a = torch.full((4, 4), 0.25, dtype=torch.float16, device=DEVICE).as_subclass(OnGpu)
    c = torch.full((4, 4), 3.0, device=DEVICE, dtype=c_dtype)
    for product in (torch_products.matmul_add, torch_products.symmetric_matmul):
        found = product(a, a, c=c, beta=2.0)
        assert found.dtype == torch.float16
        assert bool((found == 6.25).all())


def test_factors_by_their_address() -> None:
    """In the kernels, for every schedule that may take them: the same bits as with numbers."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = mk.as_batch(torch.randn(2, 40, 40, device=device).half() / 8)
    alpha, beta = (torch.tensor(value, device=device) for value in (0.5, -2.0))
    size, depth = (32, 32) if device == "cpu" else (128, 64)
    for kind in ({}, {"quartered": True}, {"joined": True}):
        tile = Tile(size, size, depth, 4, 2, **kind)
        by_number = mk.symmetric_product(x, x, c=x, alpha=0.5, beta=-2.0, tile=tile)
        assert torch.equal(mk.symmetric_product(x, x, c=x, alpha=alpha, beta=beta, tile=tile), by_number)
    tile = mk.portable_tile(x, x, symmetric=False)
    by_number = mk.general_product(x, x, c=x, alpha=0.5, beta=-2.0, tile=tile)
    assert torch.equal(mk.general_product(x, x, c=x, alpha=alpha, beta=beta, tile=tile), by_number)


def test_whole_numbers_are_no_constants_of_a_kept_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles the int 1 into a kernel, where it would stay for the numbers of later launches."""
    given: list[Any] = []
    launch = BlockLaunch.launch

    def listen(self: BlockLaunch, matrices: Any, others: Any) -> None:
        given.extend(others[-3:])
        launch(self, matrices, others)

    monkeypatch.setattr(BlockLaunch, "launch", listen)
    x = mk.as_batch(torch.randn(2, 40, 40, device=DEVICE).half() / 8)
    for number in (1, 2):
        for product in (mk.symmetric_product, mk.general_product):
            tile = mk.portable_tile(x, x, symmetric=product is mk.symmetric_product)
            product(x, x, c=x, alpha=number, beta=number, tile=tile)
    # α, β and ω; of the general product the depth K, which its launch is kept for, comes before α and β
    assert [type(value) for value in given] == 2 * [float, float, float, int, float, float]


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_summand_of_another_dtype_has_a_launch_of_its_own(symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept launch goes on reading the dtype that it was compiled for."""
    launches: list[BlockLaunch] = []
    launch = BlockLaunch.launch

    def listen(self: BlockLaunch, matrices: Any, others: Any) -> None:
        launches.append(self)
        launch(self, matrices, others)

    monkeypatch.setattr(BlockLaunch, "launch", listen)
    x = mk.as_batch(torch.randn(2, 40, 40, device=DEVICE).half() / 8)
    a = mk.symmetric_product(x, x)
    for dtype in (torch.float32, torch.float16, torch.float32):
        c = a.to(dtype)
        expected = a.double() @ a.double() + c.double()
        found = multiply(a, a, c, 1.0, 1.0, symmetric=symmetric)
        torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)
    first, second, third = launches[1:]
    assert first is third is not second


@pytest.mark.parametrize("size", [72, *(pytest.param(size, marks=pytest.mark.gpu) for size in (520, 2048))])
@pytest.mark.parametrize("of_products", [torch.float16, torch.float32, torch.float64], ids=str)
def test_summands_of_several_dtypes(size: int, of_products: torch.dtype) -> None:
    a, b = (torch.randn(size, size, device=DEVICE).to(of_products) / size**0.5 for _ in range(2))
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float32):
        c = torch.randn(size, size, device=DEVICE).to(dtype).requires_grad_()
        expected = a.double() @ b.double() + c.detach().double()
        found = mk.matmul_add(a, b, c=c, beta=1.0)
        assert found.dtype == of_products
        torch.testing.assert_close(found.detach().double(), expected, rtol=1e-2, atol=1e-2)
        (to_c,) = torch.autograd.grad(found.sum(), c)
        assert to_c.dtype == dtype
        assert bool((to_c == 1).all())
        symmetric = mk.symmetric_matmul(a, a.mT.contiguous(), c=c.detach() + c.detach().mT, beta=1.0)
        assert symmetric.dtype == of_products


@pytest.mark.parametrize("products", [mk.matmul_add, mk.symmetric_matmul], ids=["matmul_add", "symmetric_matmul"])
def test_the_gradients_of_factors_are_summed_in_fp32(products: Any) -> None:
    """In fp16 a sum over 256² elements would end at 65504."""
    a = torch.full((256, 256), 1 / 16, dtype=torch.float16, device=DEVICE)
    factors = [torch.ones((), device=DEVICE, requires_grad=True) for _ in range(2)]
    found = products(a, a, c=torch.ones_like(a), alpha=factors[0], beta=factors[1])
    of_alpha, of_beta = torch.autograd.grad(found, factors, torch.full_like(found, 2.0))
    assert of_alpha.item() == of_beta.item() == 2 * 256**2


@pytest.mark.parametrize("as_tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("products", [mk.matmul_add, mk.symmetric_matmul], ids=["matmul_add", "symmetric_matmul"])
def test_the_gradient_of_a_wide_summand_has_its_range(products: Any, as_tensors: bool) -> None:
    """Multiplied by beta in c's own dtype: fp16, that of the product, ends at 65504 and at 6e-8."""
    a = torch.zeros(8, 8, dtype=torch.float16, device=DEVICE)
    for c_dtype in (torch.float32, torch.bfloat16):
        for beta, grad in ((1e6, 1.0), (1e-6, 2.0**-10)):
            c = torch.zeros(8, 8, dtype=c_dtype, device=DEVICE, requires_grad=True)
            found = products(a, a, c=c, beta=torch.tensor(beta, device=DEVICE) if as_tensors else beta)
            (to_c,) = torch.autograd.grad(found, c, torch.full_like(found, grad))
            torch.testing.assert_close(to_c, torch.full_like(c, beta * grad))


@pytest.mark.gpu
def test_a_whole_number_before_others() -> None:
    a, b, c = (torch.randn(shape, device="cuda").half() for shape in ((72, 88), (88, 104), (72, 104)))
    for beta in (1, 0.5):
        expected = a.double() @ b.double() + beta * c.double()
        torch.testing.assert_close(mk.matmul_add(a, b, c=c, beta=beta).double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("size", [72, 1280, 4096])
def test_products_on_another_device_than_the_current_one(size: int) -> None:
    a, b = (torch.randn(size, size, device="cuda:1").half() / size**0.5 for _ in range(2))
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(mk.matmul_add(a, b).double(), a.double() @ b.double(), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(mk.gram(a).double(), a.double() @ a.double().mT, rtol=1e-2, atol=1e-2)


def test_products_are_launched_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.Tensor] = []
    launched_in: list[int] = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        entered.append(tensor)
        yield
        entered.pop()

    product = product_launches.general_product

    def listen(*args: Any, **kwargs: Any) -> torch.Tensor:
        launched_in.append(len(entered))
        return product(*args, **kwargs)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(product_launches, "general_product", listen)
    x = torch.randn(8, 8, device=DEVICE).half()
    multiply(x, x, None, 1.0, 0.0, symmetric=False)
    assert launched_in == [1]


def plain(a: Any, b: Any, c: Any, alpha: Any, beta: Any) -> torch.Tensor:
    return alpha * (a @ b) + beta * c


def added(a: Any, b: Any, c: Any, alpha: Any, beta: Any) -> torch.Tensor:
    return mk.matmul_add(a, b, c=c, alpha=alpha, beta=beta)


# along which dimension calls differ
@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0, 0), (0, None, 0, None, None), (None, None, None, 0, None)], ids=str)
def test_products_under_torch_func(in_dims: Any) -> None:
    """Values and derivatives of both orders, by ``vmap`` of derivatives and by derivatives of ``vmap``."""
    # the compiler counts what it makes of torch's own code over all tests
    torch._dynamo.reset()
    shapes = [(4, 5), (5, 6), (4, 6), (), ()]
    each = [
        torch.randn((*([] if dim is None else [3]), *shape), dtype=torch.float64, device=DEVICE)
        for shape, dim in zip(shapes, in_dims)
    ]
    every = tuple(range(5))
    found, expected = [
        (
            batched(*each),
            torch.vmap(torch.func.grad(lambda *x, f=f: f(*x).pow(3).sum(), every), in_dims)(*each),
            torch.func.grad(lambda *x, f=batched: f(*x).pow(3).sum(), every)(*each),
            torch.func.jacrev(torch.func.grad(lambda *x, f=batched: f(*x).pow(3).sum()), every)(*each),
            torch.compile(batched, backend="eager", fullgraph=True)(*each),
        )
        for f in (added, plain)
        for batched in [torch.vmap(f, in_dims)]
    ]
    torch.testing.assert_close(found, expected)


def test_symmetric_products_under_torch_func() -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64, device=DEVICE)
    each = torch.vmap(torch.func.grad(lambda x: mk.gram(x, alpha=0.5).pow(2).sum()))
    torch.testing.assert_close(each(x), torch.func.grad(lambda x: (0.5 * x @ x.mT).pow(2).sum())(x))
    symmetric = x @ x.mT
    products = torch.vmap(lambda a, alpha: mk.symmetric_matmul(a, a, c=a, alpha=alpha, beta=2.0))
    alphas = torch.tensor([1.0, -0.5, 0.0], dtype=torch.float64, device=DEVICE)
    for a in (symmetric, symmetric.half()):
        found, wide = products(a, alphas), a.double()
        assert found.dtype == a.dtype
        expected = (alphas[:, None, None] * wide @ wide + 2 * wide).to(a.dtype)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("function", [mk.gram, newton_schulz])
def test_forward_mode_is_refused_in_words_wherever_it_is_met(function: Any) -> None:
    x = torch.randn(3, 4, device=DEVICE)
    for transform in (torch.func.jacfwd, torch.func.hessian):
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            transform(lambda x: function(x).square().sum())(x)


def test_registration() -> None:
    torch.library.opcheck(_product, (torch.randn(2, 3), torch.randn(3, 4), None, None, None, 1.0, 0.0, False))


def test_names_of_others() -> None:
    x = torch.randn(6, 9).bfloat16()
    out = torch.empty(6, 6, dtype=torch.bfloat16)
    mk.matmul_transpose_assign(x, out)
    assert torch.equal(out, mk.matmul_transpose(x))
    assert mk.fast_newtonschulz(x).dtype == torch.bfloat16
    assert mk.zeropower_via_newtonschulz5(torch.randn(4, 5)).shape == (4, 5)


def test_bad_operands() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="side"):
        mk.gram(x, side="both")
    with pytest.raises(ValueError, match=r"x must be floating-point matrices, got torch\.int32"):
        mk.gram(x.int())
    with pytest.raises(ValueError, match="c is on meta, the matrices on cpu"):
        mk.matmul_add(x, torch.randn(4, 2), c=torch.randn(3, 2, device="meta"))
    with pytest.raises(ValueError, match="square"):
        mk.symmetric_matmul(x, x)
    with pytest.raises(ValueError, match="multiplied"):
        mk.matmul_add(x, x)
    with pytest.raises(ValueError, match="the other is"):
        mk.matmul_add(x, torch.randn(4, 2).double())
    with pytest.raises(ValueError, match="out has shape"):
        mk.gram(x, out=torch.empty(2, 2))
    with pytest.raises(ValueError, match=r"out must be of a floating dtype, got torch\.int32"):
        mk.gram(x, out=torch.empty(3, 3, dtype=torch.int32))
    # torch would repeat it, kernels would read beyond it
    with pytest.raises(ValueError, match=r"c must have the shape of the product, \(3, 2\), got \(1, 2\)"):
        mk.matmul_add(x, torch.randn(4, 2), c=torch.randn(1, 2))
    with pytest.raises(ValueError, match=r"c must have the shape of the product, \(3, 3\), got \(2, 3, 3\)"):
        mk.symmetric_matmul(torch.eye(3), torch.eye(3), c=torch.randn(2, 3, 3))
    with pytest.raises(ValueError, match=r"c must be one of torch\.float32, .* got torch\.float64"):
        mk.matmul_add(x, torch.randn(4, 2), c=torch.randn(3, 2).double())


@pytest.mark.parametrize("factor", ["alpha", "beta"])
@pytest.mark.parametrize("value", [1j, "2", None])
def test_what_is_no_number_is_refused_by_name(factor: str, value: Any) -> None:
    """A complex alpha gave zeros."""
    x = torch.randn(3, 3)
    option: dict[str, Any] = {factor: value}
    with pytest.raises(TypeError, match=f"{factor} must be a number or a 1-element tensor, got {value!r}"):
        mk.matmul_add(x, x, c=x, **option)
    with pytest.raises(ValueError, match=rf"{factor} must be a number or .*, got torch\.complex64 of shape \(\)"):
        mk.matmul_add(x, x, c=x, **{factor: torch.tensor(1j)})


@pytest.mark.parametrize("factor", ["alpha", "beta"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.tensor([2.0]).to_sparse(), r"must be a dense tensor, got one in torch\.sparse_coo"),
        (torch.tensor(2.0, device="meta"), "is on meta, and so has no value; give one on cpu"),
        (10**400, "is too large"),
    ],
    ids=["sparse", "meta", "too large"],
)
def test_what_has_no_value_is_refused_by_name(factor: str, value: Any, words: str) -> None:
    x = torch.randn(3, 3)
    with pytest.raises((ValueError, OverflowError), match=f"^{factor} {words}"):
        mk.matmul_add(x, x, c=x, **{factor: value})


@pytest.mark.parametrize(
    "kind",
    [Tensor.to_sparse, Tensor.to_sparse_csr, lambda x: torch.nested.nested_tensor([x, x])],
    ids=["sparse", "sparse rows", "nested"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
def test_matrices_are_dense(kind: Any) -> None:
    """A product of sparse ones was computed on a CPU, and others ended in errors about operators of torch's."""
    x = torch.randn(3, 3)
    bad = kind(x)
    with pytest.raises(ValueError, match=r"^x must be a dense tensor, got "):
        mk.gram(bad)
    for function in (mk.matmul_add, mk.symmetric_matmul):
        for place in ("a", "b", "c", "out"):
            with pytest.raises(ValueError, match=f"^{place} must be a dense tensor, got "):
                function(**{"a": x, "b": x, place: bad})


@pytest.mark.parametrize("value", [[[1.0]], np.ones((2, 2))], ids=["list", "array"])
def test_what_is_no_tensor_is_refused_by_name(value: Any) -> None:
    kind = type(value).__name__
    with pytest.raises(TypeError, match=f"x must be a tensor of matrices, got a {kind}"):
        mk.gram(value)
    with pytest.raises(TypeError, match=f"a must be a tensor of matrices, got a {kind}"):
        mk.matmul_add(value, torch.randn(2, 2))
    x = torch.randn(2, 2)
    with pytest.raises(TypeError, match=f"c must be a tensor or None, got a {kind}"):
        mk.symmetric_matmul(x, x, c=value)
    with pytest.raises(TypeError, match=f"out must be a tensor for each result, got {kind}"):
        mk.gram(x, out=value)
    with pytest.raises(TypeError, match=f"out must be a tensor for each x, got {kind}"):
        newton_schulz(x, out=value)
    with pytest.raises(TypeError, match=f"out must be a tensor of one floating-point number, got a {kind}"):
        sum_of_squares([x], out=value)


def test_an_expanded_out_is_refused_by_name() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"out has several elements at one place, strides \(0, 1\)"):
        mk.gram(x, out=torch.empty(1, 3).expand(3, 3))


def test_both_operands_are_matrices_of_dtypes_that_can_be_multiplied() -> None:
    x = torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"a must be floating-point matrices, got torch\.float32 of shape \(4,\)"):
        mk.matmul_add(x[:, 0], x)
    with pytest.raises(ValueError, match=r"got torch\.float8_e4m3fn .*; products take 16 bits and more"):
        mk.gram(x.to(torch.float8_e4m3fn))


def test_autocast_changes_nothing() -> None:
    x, b = (torch.randn(6, 6, requires_grad=True) for _ in range(2))
    expected = mk.matmul_add(x, b, c=mk.gram(x))
    gradients = torch.autograd.grad(expected.sum(), (x, b))
    with torch.autocast("cpu", torch.bfloat16):
        found = mk.matmul_add(x, b, c=mk.gram(x))
        assert torch.equal(found, expected)
        for one, other in zip(torch.autograd.grad(found.sum(), (x, b)), gradients, strict=True):
            assert torch.equal(one, other)
