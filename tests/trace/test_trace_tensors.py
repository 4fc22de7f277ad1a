"""Tensors, views and allocations of launch functions, by proxies and by the Python launcher."""

import math

import pytest
import torch
from subject import MATRICES, E, gathered, ints

from jitkern.runtime import specializer

pytestmark = pytest.mark.common_cache
# ---------------------------------------------------------------------------- what tensors are

ASKED = {
    "sizes": lambda x: [x.shape[0], x.shape[-1], x.size(1), x.size()[0], *x.shape],
    "products": lambda x: [math.prod(x.shape[:-1]), x.shape[:-1].numel(), x.numel(), x.nelement(), x.nbytes, x.shape.numel()],
    "strides": lambda x: [x.stride(0), x.stride(-1), *x.stride()],
    "kinds": lambda x: [x.dim(), x.ndim, x.element_size(), x.itemsize, int(x.is_cuda), int(x.is_floating_point()), int(x.is_cpu)],
    "contiguous": lambda x: [int(x.is_contiguous())],
    "alignment": lambda x: [x.data_ptr() % 16, int(x.data_ptr() % 8 == 0), int((x.data_ptr() | x.shape[1] * 4) & 15 == 0)],
    "compared": lambda x: [int(x.shape == (3, 4)), int(x.shape[0] == x.shape[1]), int(x.stride() == (4, 1)), int(1 in x.shape), x.shape.count(1)],
    "unpacked": lambda x: [math.prod(s for s in x.shape if s > 1), sum(x.shape), max(x.shape), *reversed(x.shape)],
    "instances": lambda x: [int(isinstance(x, torch.Tensor)), int(isinstance(x.shape[0], int)), int(isinstance(x.shape, tuple)), int(isinstance(x.shape, torch.Size))],
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", ASKED)
def test_a_tensor_answers_in_a_trace_as_it_does_in_python(subject, name):
    asked = ASKED[name]
    tested = subject("(Tensor x) -> Tensor", lambda k, x: ints(k, *asked(x)))
    for matrix in MATRICES.values():
        tested.learns(matrix)
    for matrix in MATRICES.values():
        tested.serves(matrix)


@pytest.mark.long
def test_another_dtype_or_rank_is_another_variant(subject):
    def launch(k, x):
        kind = {torch.float32: 1, torch.float64: 2}.get(x.dtype, 3)
        return ints(k, kind, x.dim(), x.numel(), *([x.shape[1]] if x.dim() == 2 else []))

    tested = subject("(Tensor x) -> Tensor", launch)
    x = torch.ones(2, 3)
    given = [x, x.double(), torch.ones(4).int(), torch.ones(()).bool()]
    for x in given:
        tested.learns(x)
    for x in given:
        tested.serves(x)
    assert tested.misses == 4


@pytest.mark.long
def test_two_tensors_are_told_apart_by_what_they_are(subject):
    def launch(k, x, y):
        same = x.shape == y.shape, x.dtype == y.dtype, x.stride() == y.stride()
        return ints(k, *map(int, same), int(x.data_ptr() == y.data_ptr()))

    tested = subject("(Tensor x, Tensor y) -> Tensor", launch)
    for y in (torch.ones(2, 3), torch.ones(3, 2), torch.ones(3, 2).t(), torch.ones(2, 3).int()):
        tested.learns(torch.ones(2, 3), y)


# ------------------------------------------------------------------------------------- views

VIEWS = {
    "view_flat": lambda x: x.view(-1),
    "view_swapped": lambda x: x.view(x.shape[1], x.shape[0]),
    "view_with_a_hole": lambda x: x.view(x.shape[0], -1, 1),
    "view_same": lambda x: x.view(x.shape),
    "reshape_flat": lambda x: x.reshape(-1),
    "reshape_swapped": lambda x: x.reshape((x.shape[1], x.shape[0])),
    "flatten": lambda x: x.flatten(),
    "t": lambda x: x.t(),
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "transpose": lambda x: x.transpose(-1, 0),
    "permute": lambda x: x.permute(1, 0),
    "torch_transpose": lambda x: torch.transpose(x, 0, 1),
    "rows_from_1": lambda x: x[1:],
    "rows_to_the_last": lambda x: x[:-1],
    "rows_beyond": lambda x: x[:100],
    "rows_backwards": lambda x: x[2:1],
    "first_columns": lambda x: x[:, :2],
    "inner": lambda x: x[1:, 1:],
    "half": lambda x: x[: x.shape[0] // 2],
    "last_row": lambda x: x[-1],
    "first_column": lambda x: x[:, 0],
    "last_column": lambda x: x[..., -1],
    "element": lambda x: x[0, 0],
    "none": lambda x: x[None],
    "none_last": lambda x: x[..., None],
    "all": lambda x: x[:],
    "select": lambda x: x.select(1, 0),
    "narrow": lambda x: x.narrow(1, 0, 1),
    "unsqueeze_first": lambda x: x.unsqueeze(0),
    "unsqueeze_inner": lambda x: x.unsqueeze(1),
    "unsqueeze_last": lambda x: x.unsqueeze(-1),
    "squeeze_first": lambda x: x.squeeze(0),
    "squeeze_last": lambda x: x.squeeze(-1),
    "expand_new": lambda x: x.expand(2, -1, -1),
    "expand_new_to_1": lambda x: x.expand(1, *x.shape),
    "expand_row": lambda x: x[:1].expand(3, -1),
    "detach": lambda x: x.detach(),
    "twice": lambda x: x.t()[1:].t()[1:],
    "contiguous": lambda x: x.contiguous(),
    "contiguous_view": lambda x: x.t().contiguous()[1:],
}  # fmt: skip
# `reshape` may copy where Torch views, and the strides are then those of the copy.
KEEPING_STRIDES = [name for name in VIEWS if not name.startswith(("reshape", "flatten"))]


@pytest.mark.long
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_reads_the_same_elements(subject, name):
    view = VIEWS[name]
    tested = subject("(Tensor x) -> Tensor", lambda k, x: gathered(k, view(x)))
    tested.learns(MATRICES["3x4"])
    for matrix in MATRICES.values():
        tested.agrees(matrix)
    specializer.settle()
    for matrix in MATRICES.values():
        tested.agrees(matrix)
    tested.serves(MATRICES["2x6"])


@pytest.mark.long
@pytest.mark.parametrize("name", KEEPING_STRIDES)
def test_a_view_has_torchs_sizes_strides_and_address(subject, name):
    view = VIEWS[name]

    def launch(k, x):
        y = view(x)
        moved = y.data_ptr() - x.data_ptr() if y.numel() and "contiguous" not in name else 0
        return ints(k, int(y.is_contiguous()), moved, *y.shape, *y.stride())

    tested = subject("(Tensor x) -> Tensor", launch)
    matrices = [m for m in MATRICES.values() if m.numel()]
    for matrix in matrices * 2:
        tested.agrees(matrix)
        specializer.settle()
    tested.serves(MATRICES["3x4"])


@pytest.mark.long
@pytest.mark.parametrize(
    "x", [MATRICES["0x4"], MATRICES["4x0"], MATRICES["1x5"]], ids=["0x4", "4x0", "1x5"]
)
def test_the_address_of_an_empty_view_is_that_of_python(subject, x):
    tested = subject("(Tensor x) -> Tensor", lambda k, x: ints(k, x[1:].data_ptr() % 16))
    tested.learns(torch.ones(3, 5))
    tested.agrees(x)
    specializer.settle()
    tested.agrees(x)


BAD = {  # a launch function, numbers that it takes, and others that it does not
    "view": (lambda k, x, n, m: ints(k, *x.view(n, m).shape), (3, 4), [(-3, -4), (4, 4), (-1, 4)]),
    "hole": (lambda k, x, n, m: ints(k, *x.view(-1, n).shape), (3, 0), [(-3, 0), (5, 0), (0, 0)]),
    "reshape": (lambda k, x, n, m: ints(k, *x.reshape(n, m).shape), (3, 4), [(-3, -4), (5, 1)]),
    "expand": (lambda k, x, n, m: ints(k, x[:1].expand(n, m).numel()), (3, 12), [(-3, 12), (3, -5), (3, 11)]),
    "index": (lambda k, x, n, m: gathered(k, x[n]), (3, 0), [(12, 0), (-13, 0), (-1, 0)]),
    "select": (lambda k, x, n, m: gathered(k, x.select(0, n)), (3, 0), [(12, 0), (-13, 0)]),
    "narrow": (lambda k, x, n, m: gathered(k, x.narrow(0, n, m)), (3, 4), [(3, 12), (3, -1), (-3, 2)]),
    "slice": (lambda k, x, n, m: gathered(k, x[n:m]), (3, 4), [(-3, 12), (5, 1), (-100, 100), (0, 0)]),
    "new_zeros": (lambda k, x, n, m: gathered(k, x.new_zeros(n, m)), (3, 4), [(-3, 4), (-3, -4), (0, 7)]),
    "transpose": (lambda k, x, n, m: gathered(k, x.transpose(n, m)), (0, 0), [(1, 0), (0, -1), (0, 3)]),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", BAD)
def test_a_bad_size_or_index_is_refused_at_a_later_call_too(subject, name):
    launch, good, bad = BAD[name]
    tested = subject("(Tensor x, int n, int m) -> Tensor", launch)
    x = torch.arange(12.0)
    x = x.view(1, 12) if name == "expand" else x
    tested.learns(x, *good)
    for pair in bad:
        tested.agrees(x, *pair)


# ------------------------------------------------------------------------------- allocations


def odd_cube(*order):
    return torch.arange(24.0).view(2, 3, 4).permute(order)


DENSE = {
    **{name: MATRICES[name] for name in ["3x4", "2x6", "transposed", "1x5", "5x1", "1x1", "0x4", "4x0", "unaligned", "a_column_of_a_transposed", "odd_strides_of_1", "odd_strides_of_0"]},
    "cube": odd_cube(0, 1, 2), "permuted_cube": odd_cube(2, 0, 1), "other_cube": odd_cube(1, 0, 2),
    "cube_with_a_1": odd_cube(2, 0, 1)[:, :1], "empty_cube": odd_cube(2, 1, 0)[:0], "scalar": torch.tensor(3.0),
    "vector": torch.arange(5.0), "unaligned_vector": torch.arange(5.0)[1:], "integers": torch.arange(6).view(2, 3).t(),
    "halves": torch.arange(6.0).half().view(2, 3).t(), "bools": torch.ones(3, dtype=torch.bool),
}  # fmt: skip
LOOSE = {
    **{name: MATRICES[name] for name in ["columns", "every_other", "expanded", "expanded_columns"]},
    "every_other_cube": torch.arange(48.0).view(2, 3, 8)[..., ::2], "every_other_vector": torch.arange(9.0)[::2],
    "expanded_cube": torch.arange(4.0).view(1, 1, 4).expand(2, 3, 4),
}  # fmt: skip
ALLOCATED = {
    "empty": lambda k, x: torch.empty(x.shape, dtype=x.dtype).zero_(),
    "empty_of_a_constant": lambda k, x: torch.empty(3, 5).zero_(),
    "empty_of_a_tuple": lambda k, x: torch.empty((x.numel(), 2), dtype=torch.float64).zero_(),
    "empty_by_size": lambda k, x: torch.empty(size=(x.numel(),), device=x.device).zero_(),
    "empty_strided": lambda k, x: torch.empty_strided((2, x.numel()), (1, 2)).zero_(),
    "empty_strided_with_gaps": lambda k, x: torch.empty_strided((2, x.numel()), (2 * x.numel() + 7, 2)).zero_(),
    "zeros": lambda k, x: torch.zeros(x.numel() + 1, dtype=torch.int32).zero_(),
    "zeros_of_a_shape": lambda k, x: torch.zeros(*x.shape, 2).zero_(),
    "new_empty": lambda k, x: x.new_empty(x.shape).zero_(),
    "new_empty_of_a_dtype": lambda k, x: x.new_empty((x.numel(), 0), dtype=torch.int64).zero_(),
    "new_zeros": lambda k, x: x.new_zeros(x.numel(), 1).zero_(),
    "new_empty_strided": lambda k, x: x.new_empty_strided((x.numel(), 3), (1, x.numel())).zero_(),
    "empty_like": lambda k, x: torch.empty_like(x).zero_(),
    "empty_like_of_a_dtype": lambda k, x: torch.empty_like(x, dtype=torch.float64).zero_(),
    "empty_like_contiguous": lambda k, x: torch.empty_like(x, memory_format=torch.contiguous_format).zero_(),
    "empty_like_a_transposed": lambda k, x: (torch.empty_like(x.t()) if x.dim() == 2 else torch.empty_like(x)).zero_(),
    "empty_like_a_contiguous": lambda k, x: torch.empty_like(x.contiguous()).zero_(),
    "zeros_like": lambda k, x: torch.zeros_like(x).zero_(),
    "transposed": lambda k, x: torch.empty(2, x.numel()).t().zero_(),
    "sliced": lambda k, x: torch.empty(x.numel() + 4, 3)[2:, 1:].zero_(),
    "viewed": lambda k, x: torch.empty(x.numel() * 6).view(-1, 3).zero_(),
    "viewed_like": lambda k, x: torch.empty_like(x).view(x.shape).zero_(),
    "unsqueezed": lambda k, x: torch.empty(x.numel(), 2).unsqueeze(1).zero_(),
    "expanded": lambda k, x: torch.zeros(x.numel(), 1).expand(-1, 3).zero_(),
    "expanded_to_1": lambda k, x: torch.zeros(x.numel()).expand(1, -1).zero_(),
    "selected": lambda k, x: torch.empty(2, x.numel())[1].zero_(),
}  # fmt: skip


COPIED = {
    "clone": lambda k, x: x.clone(),
    "clone_contiguous": lambda k, x: x.clone(memory_format=torch.contiguous_format),
    "to": lambda k, x: x.to(torch.complex64),
    "to_and_back": lambda k, x: x.to(torch.int64).to(x.dtype).clone(),
    "float": lambda k, x: x.float().clone(),
    "double": lambda k, x: x.double().clone(),
    "half": lambda k, x: x.half().clone(),
    "copy_": lambda k, x: torch.empty_like(x).copy_(x),
    "copy_to_another_dtype": lambda k, x: torch.empty(x.shape, dtype=torch.float64).copy_(x),
    "contiguous": lambda k, x: x.contiguous().clone(),
    "contiguous_transposed": lambda k, x: x.transpose(0, -1).contiguous().clone(),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "launch", [*ALLOCATED.values(), *COPIED.values()], ids=[*ALLOCATED, *COPIED]
)
def test_an_output_has_the_dtype_values_and_strides_of_pythons(subject, launch):
    tested = subject("(Tensor x) -> Tensor", launch)
    for x in [*DENSE.values(), *LOOSE.values()] * 2:
        tested.agrees(x)
        specializer.settle()
    for x in (MATRICES["3x4"], MATRICES["2x6"], MATRICES["0x4"]):
        tested.serves(x)


@pytest.mark.long
@pytest.mark.parametrize("name", ["3x4", "transposed", "columns", "0x4", "expanded", "1x5"])
def test_contiguous_copies_only_what_is_not(subject, name):
    def launch(k, x):
        y = x.contiguous()
        copies = int(y.data_ptr() != x.data_ptr()) if x.is_contiguous() else 1
        out = torch.empty_like(y)
        k.axpy[{"T": x.dtype}](out, 1.0 + copies, y, None, y.numel())
        return out

    tested = subject("(Tensor x) -> Tensor", launch)
    tested.learns(MATRICES[name])
    tested.learns(MATRICES["2x6"])
    tested.serves(MATRICES[name])


@pytest.mark.long
def test_several_outputs_are_returned_in_order(subject):
    def launch(k, x, n):
        a, b, c = torch.empty(n, dtype=torch.int64), torch.empty(2, n).t(), torch.zeros(())
        k.fill[{"T": torch.int64}](a, n, 5)
        k.fill[{"T": torch.float32}](b, 2 * n, x.numel())
        return c, a, b

    tested = subject("(Tensor x, int n) -> (Tensor, Tensor, Tensor)", launch)
    tested.learns(torch.ones(3), 4)
    tested.serves(torch.ones(7), 0)
    tested.serves(torch.ones(0), 9)
    tested.agrees(E, -1)


@pytest.mark.long
@pytest.mark.parametrize("constant", [True, False], ids=["constant", "symbolic"])
def test_a_workspace_is_the_calls_own(subject, constant):
    def launch(k, x):
        n = x.numel()
        space = torch.empty(64 if constant else 2 * n, dtype=torch.float64)
        out = torch.empty(n, dtype=torch.float64)
        k.fill[{"T": torch.float64}](space, n, 3)
        k.gather[{"T": torch.float64}](space[n:], space, n, 1, 1, 1, 0, 0)
        k.axpy[{"T": torch.float64}](out, 2.0, space[n : 2 * n], x, n)
        return out

    tested = subject("(Tensor x) -> Tensor", launch)
    tested.learns(torch.ones(5).double())
    for n in (1, 17, 32):
        tested.serves(torch.arange(n).double())


@pytest.mark.long
def test_a_kernel_gets_the_address_of_a_view_of_an_allocation(subject):
    def launch(k, x, n):
        out = torch.zeros(x.shape[0], 6, dtype=torch.float64)
        k.fill[{"T": torch.float64}](out[n], 6, 10)
        k.fill[{"T": torch.float64}](out[n + 1 :, 3:], 2, 20)
        return out

    tested = subject("(Tensor x, int n) -> Tensor", launch)
    tested.learns(torch.ones(4), 1)
    tested.serves(torch.ones(6), 3)
    for n in (6, -1):
        tested.agrees(torch.ones(6), n)


def test_the_alignment_of_an_allocation_is_known(subject):
    def launch(k, x, n):
        out = torch.empty(x.numel() + 64)
        return ints(k, out.data_ptr() % 16, out[1:].data_ptr() % 16, out[n:].data_ptr() % 64)

    tested = subject("(Tensor x, int n) -> Tensor", launch)
    tested.learns(E, 3)
    for n in (0, 5, 16):
        tested.serves(torch.ones(100), n)
