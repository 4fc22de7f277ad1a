import pytest
import torch

from jitkern import config, target
from jitkern.errors import TargetError
from jitkern.target import Target, short_version, this_platform

SPELLED = [
    "cuda-sm_90-cu130-torch2.11.0",
    "cuda-sm_90a-cu128-torch2.11.0",
    "cuda-sm_120-cu132-torch2.15.0",
    "cuda-sm_80-cu130-torch2.14.0.dev20260801+cu130",
    "cpu-x86_64-torch2.13.0",
    "cpu-x86_64_v3-torch2.13.0",
    "cpu-aarch64-torch2.13.0a0+gitabc123",
    "cpu-x86_64-torch2.13.0-linux_x86_64",
    "cuda-sm_90-cu130-torch2.11.0-linux_x86_64-cxx11_glibc2.36_cp311",
]


@pytest.mark.parametrize("text", SPELLED)
def test_what_prints_parses(text):
    assert str(Target.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "cuda", "cuda-sm_90", "cuda-90-cu130-torch2.11.0", "gpu-sm_90-cu130-torch2.11.0", "cpu-x86_64", "cpu-x86_64-torch",
     "cuda-sm_90-cu130-torch2.11.0-", "cuda-sm_90-cu130-torch2.11.0/..", "cpu-x86_64-cu130-torch2.13.0", "cuda-sm_90-cu130-torch2.11.0\n"],
)  # fmt: skip
def test_what_does_not_parse_is_an_error_with_an_example(text):
    with pytest.raises(TargetError, match="cuda-sm_90-cu130-torch2.11.0"):
        Target.parse(text)


@pytest.mark.parametrize(("cuda", "meant"), [("13", "; did you mean cu130?"), ("110", "")])
def test_a_cuda_that_nothing_is_built_for_is_an_error(cuda, meant):
    with pytest.raises(TargetError) as caught:
        Target.parse(f"cuda-sm_90-cu{cuda}-torch2.13.0")
    assert str(caught.value).endswith(f"`cu120` and later are known{meant}")


@pytest.mark.parametrize(
    ("version", "short"),
    [("2.11.0+cu130", "2.11.0"), ("2.13.0+cpu", "2.13.0"), ("2.13.0", "2.13.0"), ("2.13.0rc1", "2.13.0rc1"),
     ("2.14.0.dev20260801+cu130", "2.14.0.dev20260801+cu130"), ("2.11.0+mycompany", "2.11.0+mycompany")],
)  # fmt: skip
def test_public_releases_print_short(version, short):
    assert short_version(version) == short


def test_current_cpu_is_this_torch():
    current = Target.current("cpu")
    assert current.torch == short_version(torch.__version__)
    assert str(current).startswith("cpu-")


def test_host_code_names_its_platform_and_device_code_does_not():
    host = Target.current("cpu").for_host_code()
    assert host.platform == this_platform()
    assert host.for_device_code().platform == ""


def test_native_is_this_machines_instruction_set():
    plain, named = Target.parse("cpu-x86_64-torch2.13.0"), Target.parse("cpu-x86_64_v2-torch2.13.0")
    assert plain.for_host_code(native=True).arch.startswith("x86_64")
    assert named.for_host_code(native=True).arch == "x86_64_v2"
    assert named.for_host_code().arch == "x86_64"


def test_cuda_version_is_split():
    assert Target.parse("cuda-sm_90-cu128-torch2.11.0").cuda_version == (12, 8)


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a Torch without CUDA")
def test_no_cuda_target_without_cuda():
    with pytest.raises(TargetError, match="built without CUDA"):
        Target.current("cuda")


def test_unknown_device_is_refused():
    with pytest.raises(TargetError, match="`xpu` is not a device"):
        Target.current("xpu")


@pytest.mark.parametrize(
    ("capabilities", "order", "expected"),
    [
        ([(9, 0), (9, 0)], None, (9, 0)),
        ([(8, 0), (9, 0)], None, (12, 0)),
        ([(8, 0), (9, 0)], "FASTEST_FIRST", (12, 0)),
        ([(8, 0), (9, 0)], "PCI_BUS_ID", (8, 0)),
    ],
)
def test_cuda_is_asked_which_of_unlike_gpus_is_the_first(
    monkeypatch, capabilities, order, expected
):
    monkeypatch.setattr(target, "nvml_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (12, 0))
    with config.using(environment={"CUDA_DEVICE_ORDER": order} if order else {}):
        assert Target.current("cuda").arch == "sm_{}{}".format(*expected)


@pytest.mark.gpu
def test_the_gpu_is_found_without_a_context(run_python):
    done = run_python(
        "import torch; from jitkern.target import Target; print(*Target.visible(), torch.cuda.is_initialized())"
    )
    assert "cuda-sm_" in done.stdout and done.stdout.strip().endswith("False"), done.stderr


@pytest.mark.gpu
def test_visible_devices_are_respected(run_python):
    done = run_python(
        "from jitkern.target import Target; print(len(Target.visible()))", CUDA_VISIBLE_DEVICES="-1"
    )
    assert done.stdout.strip() == "1", done.stderr


def test_an_arch_alone_is_one_for_this_torch_and_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    assert str(Target.parse("sm_90")) == "cuda-sm_90-cu130-torch2.11.0"
    assert Target.parse("cpu") == Target.current("cpu")
    assert str(Target.parse("sm_100a")) == "cuda-sm_100a-cu130-torch2.11.0"
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(TargetError, match="write the whole target, `cuda-sm_90-cu130-torch2.11.0`"):
        Target.parse("sm_90")
