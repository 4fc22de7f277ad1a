"""The shipped ops that change an argument and return nothing."""

import pytest
import torch
from helpers import refusing_to_wait, served

import jitkern.ops
from jitkern.devtools import check
from jitkern.launch.kernels import Kernels
from jitkern.op.all_ops import all_ops

pytestmark = pytest.mark.common_cache

IN_PLACE = [
    op
    for name, op in sorted(all_ops().items())
    if name.startswith("jitkern::") and not op.signature.outputs
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HALVES_AND_WHOLES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
each_device = pytest.mark.parametrize("device", DEVICES)
each_op = pytest.mark.parametrize("op", IN_PLACE, ids=lambda op: op.name)
each_dtype = pytest.mark.parametrize("dtype", HALVES_AND_WHOLES, ids=str)


@pytest.mark.long
@each_device
@each_op
def test_every_kernel_is_right_and_passes_opcheck(op, device):
    if not op.sources[device]:
        for sample in op.sample_inputs(device):
            torch.library.opcheck(op.overload, check.copied(sample))
        return
    mine = [row for row in check.checks_of(op, [device]) if row.device == device]
    assert len(mine) == len(op.sources[device]) + 1
    assert all(row.ok for row in mine), mine


@pytest.mark.long
@each_device
@each_op
def test_compile_makes_one_graph(op, device):
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(op, fullgraph=True, backend=backend)
    for sample in op.sample_inputs(device)[:2]:
        ours, theirs = check.copied(sample), check.copied(sample)
        compiled(*ours)
        op(*theirs)
        for position, _ in op.signature.changed:
            assert torch.equal(ours[position], theirs[position])


@pytest.mark.gpu
@each_op
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # of a sample without elements
def test_they_do_not_synchronise_and_run_in_a_graph(op):
    for sample in op.sample_inputs("cuda")[-3:]:
        ours, theirs = check.copied(sample), check.copied(sample)
        served(op, *check.copied(sample), device="cuda")
        torch.cuda.synchronize()
        with refusing_to_wait():
            op(*theirs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            op(*ours)
        graph.replay()
        for position, _ in op.signature.changed:
            assert torch.equal(ours[position], theirs[position])


# ------------------------------------------------------------------ loss_meter_


def metered(values, device, dtype=torch.float64):
    state = torch.zeros(6, dtype=torch.float64, device=device)
    for value in values:
        jitkern.ops.loss_meter_(torch.tensor(value, dtype=dtype, device=device), state)
    return state.tolist()


@pytest.mark.long
@each_device
def test_a_sum_is_exact_where_plain_addition_is_not(device):
    total, lost, count, bad, least, most = metered([1.0, 1e100, 1.0, -1e100], device)
    assert total + lost == 2.0
    assert (count, bad, least, most) == (4, 0, -1e100, 1e100)


@pytest.mark.long
@each_device
@each_dtype
def test_losses_that_are_not_finite_are_counted_apart(device, dtype):
    inf, nan = float("inf"), float("nan")
    state = metered([nan, 2.0, inf, -0.5, -inf], device, dtype)
    assert state == [1.5, 0, 2, 3, -0.5, 2.0]


@each_device
def test_the_first_loss_is_minimum_and_maximum(device):
    assert metered([5.0], device)[4:] == [5, 5]
    assert metered([-5.0], device)[4:] == [-5, -5]


@each_device
def test_what_is_no_loss_or_no_state_is_named(device):
    state = torch.zeros(6, dtype=torch.float64, device=device)
    loss = torch.ones((), device=device)
    for bad, message in (
        ((torch.ones(2, device=device), state), r"one element, got shape \(2,\)"),
        ((loss.int(), state), "must be floating point, got torch.int32"),
        ((loss, state.float()), "six contiguous float64 values, got torch.float32"),
        ((loss, torch.zeros(12, dtype=torch.float64, device=device)[::2]), "six contiguous"),
    ):
        with pytest.raises(RuntimeError, match=message):
            jitkern.ops.loss_meter_(*bad)


# ------------------------------------------------------------------ nonfinite_flag_tensor_

flag_of_one = jitkern.ops.nonfinite_flag_tensor_


def no_flag(device):
    return torch.zeros((), dtype=torch.int32, device=device)


@pytest.mark.long
@each_device
@each_dtype
def test_largest_and_smallest_values_are_finite(device, dtype):
    limits = torch.finfo(dtype)
    values = [limits.max, -limits.max, limits.tiny, limits.smallest_normal / 2, -0.0, 0.0]
    flag = no_flag(device)
    flag_of_one(torch.tensor(values * 100, dtype=dtype, device=device), flag)
    assert flag.item() == 0


@each_device
@each_dtype
def test_every_bit_pattern_is_judged_as_torch_does(device, dtype):
    if dtype.itemsize != 2:
        pytest.skip("too many patterns; those of 16 bits are all tried")
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    wanted = every.isfinite()
    for part, finite in ((every[wanted], 0), (every[~wanted][:1], 1), (every[~wanted][-1:], 1)):
        flag = no_flag(device)
        flag_of_one(part.to(device), flag)
        assert flag.item() == finite
    for bad in every[~wanted][::37].to(device):
        flag = no_flag(device)
        flag_of_one(bad, flag)
        assert flag.item() == 1


@each_device
@each_dtype
def test_one_bad_value_is_found_wherever_it_is(device, dtype):
    n = 3 * 65536 + 5
    memory = torch.zeros(n + 16, dtype=dtype, device=device)
    for offset in (0, 1, 3, 7):
        x = memory[offset : offset + n]
        places = {0, 1, 6, 7, 8, 9, 511 * 8, 65535, 65536, 2 * 65536 - 1, n - 9, n - 2, n - 1}
        for place in sorted(places):
            flag = no_flag(device)
            x[place] = float("nan") if place % 2 else float("-inf")
            flag_of_one(x, flag, 2)
            assert flag.item() == 2, (offset, place)
            x[place] = 0
        for outside in (offset - 1, offset + n):  # beside the tensor
            if outside >= 0:
                memory[outside] = float("nan")
        flag = no_flag(device)
        flag_of_one(x, flag)
        assert flag.item() == 0, offset
        memory.zero_()


@each_device
def test_codes_are_kept_beside_each_other(device):
    flag = no_flag(device)
    bad = torch.full((10,), float("nan"), device=device)
    for code, wanted in ((4, 4), (1, 5), (4, 5), (2**30, 2**30 + 5)):
        flag_of_one(bad, flag, code)
        assert flag.item() == wanted
        flag_of_one(torch.ones(10, device=device), flag, 2)
        assert flag.item() == wanted


@each_device
def test_what_is_no_flag_code_or_tensor_of_floats_is_named(device):
    x, flag = torch.ones(3, device=device), no_flag(device)
    for bad, message in (
        ((x, flag.long()), "flag must be one int32, got torch.int64"),
        ((x, torch.zeros(2, dtype=torch.int32, device=device)), r"one int32.*\(2,\)"),
        ((x, flag, 0), "code must be bits of a positive int32, got 0"),
        ((x, flag, 2**31), "code must be bits of a positive int32"),
        ((x.int(), flag), "must be floating point, got torch.int32"),
    ):
        with pytest.raises(RuntimeError, match=message):
            flag_of_one(*bad)


# ------------------------------------------------------------------ nonfinite_flag_


@pytest.mark.long
@each_device
def test_a_list_of_any_dtypes_and_length_is_searched(device):
    sizes = [(), (0,), (5,), (300, 7), (70_001,)]
    tensors = [
        torch.zeros(sizes[i % len(sizes)], dtype=HALVES_AND_WHOLES[i % 4], device=device)
        for i in range(40)
    ]
    for count in (0, 1, 3, 40):
        flag = no_flag(device)
        jitkern.ops.nonfinite_flag_(tensors[:count], flag)
        assert flag.item() == 0
    for i in range(0, 40, 3):
        if tensors[i].numel():
            flag = no_flag(device)
            tensors[i].view(-1)[-1] = float("nan")
            jitkern.ops.nonfinite_flag_(tensors, flag, 4)
            assert flag.item() == 4, i
            tensors[i].zero_()


@pytest.mark.long
@each_device
def test_a_list_with_a_tensor_of_integers_is_refused(device):
    tensors = [torch.ones(3, device=device), torch.ones(3, dtype=torch.int32, device=device)]
    with pytest.raises(RuntimeError, match="must be floating point, got torch.int32"):
        jitkern.ops.nonfinite_flag_(tensors, no_flag(device))


@each_device
def test_a_tensor_with_gaps_is_refused_another_order_is_not(device):
    x = torch.zeros(6, 4, device=device)
    flag = no_flag(device)
    jitkern.ops.nonfinite_flag_([x, x.T], flag)
    with pytest.raises(RuntimeError, match="tensor 1.*has gaps"):
        jitkern.ops.nonfinite_flag_([x, x[:, :2]], flag)
    assert flag.item() == 0


def launches(tensors):
    """What the launch function for a GPU starts for a list."""
    op, calls = jitkern.ops.nonfinite_flag_, []
    op.launch_function(op.sources["cuda"][0], "cuda")(
        Kernels(calls.append), tensors, no_flag("cpu"), 1
    )
    return calls


def test_a_list_is_one_launch_for_each_dtype():
    gradients = [torch.ones(n, dtype=torch.bfloat16) for n in range(0, 120_000, 400)]
    (call,) = launches(gradients)
    assert call.keywords["grid"] == sum(-(-g.numel() // 65536) for g in gradients)
    assert (dict(call.template)["N"], dict(call.template)["T"]) == (512, torch.bfloat16)
    assert len(launches([*gradients, torch.ones(3)])) == 2
    assert launches([]) == []


@pytest.mark.gpu
def test_300_gradients_are_one_kernel_on_a_gpu():
    flag = no_flag("cuda")
    gradients = [torch.ones(n, dtype=torch.bfloat16, device="cuda") for n in range(7, 120_007, 400)]
    served(jitkern.ops.nonfinite_flag_, gradients, flag, device="cuda")
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        jitkern.ops.nonfinite_flag_(gradients, flag)
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if "nonfinite_flag" in event.name]
    assert len(kernels) == 1 and flag.item() == 0
    gradients[-1][-1] = float("inf")
    jitkern.ops.nonfinite_flag_(gradients, flag)
    assert flag.item() == 1
