"""`@triton.jit` functions of values, one after the other in one kernel."""

import pytest
import torch

triton = pytest.importorskip("triton")

import jitkern_chains  # noqa: E402
from helpers import H100, kernels, last_json  # noqa: E402

from jitkern import compose  # noqa: E402
from jitkern.composition.triton_functions import chain  # noqa: E402
from jitkern.errors import DeclarationError  # noqa: E402


def test_arguments_are_those_that_no_function_gives():
    assert jitkern_chains.chain.schema.endswith(
        "(Tensor x, float factor, Tensor added) -> (Tensor, Tensor)"
    )
    assert compose(jitkern_chains.scale, jitkern_chains.scale).schema.endswith(
        "(Tensor x, float factor, float factor_1) -> Tensor"
    )
    assert (
        compose(jitkern_chains.scale, jitkern_chains.relu, jitkern_chains.both)
        is not jitkern_chains.chain
    )  # another module's
    sums = jitkern_chains.chain(*meta((3, 1), (4,)))
    assert [t.shape for t in sums] == [(3, 4)] * 2


def meta(first, second):
    return torch.empty(first, device="meta"), 2.0, torch.empty(second, device="meta")


def test_the_kernel_is_one_and_can_be_read():
    text = chain([jitkern_chains.scale, jitkern_chains.relu, jitkern_chains.both]).text
    assert text.count("@") == 5  # the functions, what widens, and the kernel
    lines = text[text.index("def scale_relu_both_kernel") :]
    assert (
        "jitkern_value0_0 = scale(jitkern_x, factor)\n"
        "    jitkern_value1_0 = relu(jitkern_value0_0)\n"
    ) in lines
    assert lines.count("tl.load") == lines.count("tl.store") == 2


def test_parameters_may_be_called_like_functions_and_variables():
    assert jitkern_chains.clashing.schema.endswith(
        "(Tensor x, float factor, Tensor scale_1, Tensor count_1) -> Tensor"
    )


@pytest.mark.long
def test_it_is_prewarmed_without_a_gpu(cli, monkeypatch):
    monkeypatch.syspath_prepend(str(jitkern_chains.__file__).rpartition("/")[0])
    code, out, err = cli("prewarm", "jitkern_chains", "--target", H100, "--json")
    assert code == 0, err
    for made in (jitkern_chains.chain, jitkern_chains.clashing):
        built = [row for row in kernels(last_json(out)) if row["op"] == made.name]
        assert len(built) >= 3


def test_what_is_no_function_of_values_is_refused():
    def plain(x):
        return x

    with pytest.raises(TypeError, match="takes pointwise functions, or"):
        compose(plain)
    with pytest.raises(
        DeclarationError, match="takes 1 values, and the function before it returns 2"
    ):
        compose(jitkern_chains.both, jitkern_chains.relu)


@pytest.mark.gpu
def test_it_computes_what_the_functions_do():
    for dtype, bound in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float32, 1e-6)):
        for shapes in (((4097,), (4097,)), ((5, 33), (33,)), ((2, 3, 1), (3, 7)), ((0,), (0,))):
            x, added = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
            base = torch.relu(x.double() * 0.5)
            for found, wanted in zip(
                jitkern_chains.chain(x, 0.5, added), (base + added, base - added)
            ):
                assert (found.shape, found.dtype) == (wanted.shape, dtype)
                assert ((found.double() - wanted).abs() <= 1.05 * bound * wanted.abs() + 1e-6).all()
    torch.library.opcheck(jitkern_chains.chain.overload, (x, 0.5, added))
