"""`MatrixView`: views of every kind cover a tensor once, and survive a checkpoint."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim_utils.param_groups import MatrixView, route_parameters


def test_plain_form_of_a_view_is_builtins_and_comes_back(tmp_path):
    view = MatrixView(shape=(8, 24), split=(8, 8, 8), split_dim=-1, transposed=True, num_heads=(2, 2, 2))
    torch.save(view.to_plain(), tmp_path / "view.pt")
    plain = torch.load(tmp_path / "view.pt", weights_only=True)
    assert MatrixView.from_plain(plain) == view
    assert {view: 1}[pickle.loads(pickle.dumps(view))] == 1
    assert copy.deepcopy(view) == view
    assert eval(repr(view)) == view
    assert view.describe() == "6 × 4×8"
    with pytest.raises(ValueError, match="plain form"):
        MatrixView.from_plain({"shape": (2, 2), "sizes": ()})


def test_groups_with_views_are_loaded_with_weights_only(tmp_path):
    table = route_parameters([("qkv", torch.nn.Parameter(torch.zeros(6, 2)))])
    optimizer = torch.optim.SGD(table.param_groups(), lr=0.1)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    saved = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert saved["param_groups"][0]["views"] == [table[0].view]
    optimizer.load_state_dict(saved)


def test_identity():
    weight = torch.zeros(3, 2)
    view = MatrixView.identity(weight.shape)
    assert view.is_identity
    assert view.views(weight)[0] is weight
    assert not MatrixView(shape=(3, 2), transposed=True).is_identity
    with pytest.raises(TypeError, match=r"of shape \(3, 2\), got a NoneType"):
        MatrixView(shape=(3, 2)).views(None)
    with pytest.raises(ValueError, match=r"of shape \(3, 2\), got \(2, 3\)"):
        view.views(weight.T)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": (3,)}, "at least two dimensions"),
        ({"shape": (3, 2), "order": (0, 0)}, "no permutation"),
        ({"shape": (3, 2), "matrix_shape": (3, 3)}, "does not hold the elements"),
        ({"shape": (3, 2), "split": (1, 1)}, "add up to 3"),
        ({"shape": (3, 2), "split_dim": 0}, "must be -2"),
        ({"shape": (3, 2), "split": (3, 0)}, "positive sizes"),
        ({"shape": (3, 2), "split": (4, -1)}, "positive sizes"),
        ({"shape": (3, 2), "num_heads": (2,)}, "do not divide into 2 heads"),
        ({"shape": (3, 2), "num_heads": (3, 3)}, "each of the 1 parts"),
    ],
)
def test_wrong_views(options, message):
    with pytest.raises(ValueError, match=message):
        MatrixView(**options)


@pytest.mark.parametrize("name", ["shape", "order", "matrix_shape", "split", "num_heads"])
@pytest.mark.parametrize("values", [3, None, "32", (1.0, 2.0)], ids=str)
def test_what_is_no_sequence_of_integers_is_refused_by_name(name, values):
    # halves were cut off: a view of 3.9 rows was one of 3
    with pytest.raises(TypeError, match=f"{name} of a MatrixView must hold integers, got "):
        MatrixView(**{"shape": (3, 2), name: values})
    with pytest.raises(TypeError, match="shape of a MatrixView must hold integers, got "):
        MatrixView.identity(values)


@st.composite
def views(draw):
    """A view with any combination of its steps, and a tensor that it fits."""
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    heads, parts = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = [heads * draw(st.integers(1, 3)) for _ in range(parts)]
    rows, columns = sum(sizes), draw(st.integers(1, 4))
    transposed = draw(st.booleans())
    matrix = (*batch, columns, rows) if transposed else (*batch, rows, columns)
    shape, order, matrix_shape = matrix, (), ()
    if draw(st.booleans()):
        # a weight whose last dimensions are flattened, stored with another order of dimensions
        shape, order, matrix_shape = (
            (*matrix[:-1], 1, matrix[-1]),
            (*range(len(matrix) - 1), len(matrix), len(matrix) - 1),
            matrix,
        )
    return MatrixView(
        shape=shape,
        order=order,
        matrix_shape=matrix_shape,
        split=tuple(sizes) if parts > 1 or draw(st.booleans()) else (),
        split_dim=-1 if transposed else -2,
        transposed=transposed,
        num_heads=(heads,) * parts if draw(st.booleans()) else (),
    )


@settings(deadline=None)
@given(views())
def test_views_cover_the_tensor_once_and_share_its_memory(view):
    tensor = torch.arange(float(torch.Size(view.shape).numel())).reshape(view.shape)
    expected = tensor.clone()
    found = view.views(tensor)
    assert tuple(tuple(part.shape) for part in found) == view.shapes
    assert sum(part[..., 0, 0].numel() for part in found) == view.num_matrices
    assert sorted(torch.cat([part.reshape(-1) for part in found]).tolist()) == expected.reshape(-1).tolist()
    for part in found:
        part.add_(0.5)
    assert torch.equal(tensor, expected + 0.5)
    assert MatrixView.from_plain(view.to_plain()) == view
    assert eval(repr(view)) == view
