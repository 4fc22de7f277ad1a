"""`Cuda(..., arch_specific=True)`: kernels for the features of one arch alone, in ops and by themselves."""

import pytest
import torch
from fake_gpu import TARGET
from helpers import needs_nvrtc, target_of

import jitkern
from jitkern import jit
from jitkern.declare import Cuda, kernel
from jitkern.errors import CompileError
from jitkern.op.needed_kernels import needs_of
from jitkern.remote import layout
from jitkern.source.kinds import Variant
from jitkern.target import Target

# A warpgroup adds registers to its own, and its matrix instructions are fenced.
CU = """
__global__ void hop(float *y) {
#if !defined FALLBACK || defined __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  asm volatile("wgmma.fence.sync.aligned;");
#endif
  *y = 1;
}
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "k.cu").write_text(CU)
    return Cuda("k.cu", folder=str(tmp_path), arch_specific=True)


def compiled(source, arch="sm_90"):
    return jit.ensure(Variant("t::hop", source, "hop"), TARGET._replace(arch=arch))


@pytest.mark.long
@needs_nvrtc
def test_an_op_is_compiled_for_the_features_of_its_arch(cli):
    source = Cuda(text=CU, arch_specific=True)
    op = kernel("jitkern_arch::f(Tensor x) -> Tensor", cuda=source)

    @op.launch("cuda")
    def _(k, x):
        y = torch.empty_like(x)
        k.hop(y, grid=1, block=128)
        return y

    @op.samples
    def _(device):
        yield torch.ones(1, device=device)

    results = [r for r in jitkern.prewarm([op.name], targets=[str(TARGET)]) if r.status == "built"]
    (variant,) = needs_of(op, op.sources["cuda"][0], "cuda", TARGET).variants
    entry = jit.ensure(variant, TARGET, may_compile=False)
    assert entry.manifest.inputs["target"] == target_of("sm_90a")
    assert b"sm_90a" in (entry.path / "kernel.cubin").read_bytes()
    assert {result.status for result in results} == {"built"}
    code, out, _ = cli("explain", op.name, "--target", str(TARGET))
    assert code == 0 and "sm_90a" in out


@needs_nvrtc
def test_without_the_flag_a_source_is_for_the_plain_arch(source):
    plain = compiled(source.replace(arch_specific=False, flags=("-DFALLBACK",)))
    assert plain.manifest.inputs["target"] == str(TARGET)
    assert b"sm_90a" not in (plain.path / "kernel.cubin").read_bytes()


@needs_nvrtc
def test_without_the_flag_the_error_names_the_flag(source):
    with pytest.raises(CompileError, match=r"(?s)wgmma.fence.*not supported.*arch_specific=True"):
        compiled(source.replace(arch_specific=False))


@needs_nvrtc
def test_an_arch_without_such_features_is_compiled_for_as_it_is(source):
    with pytest.raises(CompileError, match=r"(?s)sm_80 lacks that instruction.*SM90_ALL"):
        compiled(source, "sm_80")
    older = compiled(source.replace(flags=("-DFALLBACK",)), "sm_80")
    assert older.manifest.inputs["target"] == target_of("sm_80")


@pytest.mark.parametrize(
    ("arch", "specific"),
    [("sm_75", "sm_75"), ("sm_89", "sm_89"), ("sm_90", "sm_90a"), ("sm_90a", "sm_90a"), ("sm_100", "sm_100a"),
     ("sm_100f", "sm_100f"), ("sm_103", "sm_103a"), ("sm_120", "sm_120a"), ("sm_121", "sm_121a")],
)  # fmt: skip
def test_each_arch_has_one_with_its_own_features(arch, specific):
    assert TARGET._replace(arch=arch).arch_specific().arch == specific


def test_a_machine_uses_both(source):
    specific, plain = TARGET.arch_specific(), TARGET
    assert layout.machine_of(str(specific)) == layout.machine_of(str(plain))
    cpu = str(Target.current("cpu"))
    assert layout.machine_of(cpu).startswith(cpu.rpartition("-torch")[0])


@needs_nvrtc
def test_a_kernel_by_itself_takes_the_flag():
    hop = jitkern.cuda_kernel(text=CU, name="hop", arch_specific=True)
    assert "sm_90a" in hop.compile(target=str(TARGET)).manifest.inputs["target"]
