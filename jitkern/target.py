"""Targets of artifacts, e.g. `cuda-sm_90-cu130-torch2.11.0` and `cpu-x86_64-torch2.13.0`.

These fields are enough for device code (cubins), which can be copied between machines. Targets of
host code add the platform (`…-linux_x86_64`) and, for an Extension, the ABI that it was compiled
for (`…-cxx11_glibc2.36_cp311`). A CPU arch may name an instruction set (`x86_64_v3`); otherwise a
build for the native instruction set uses the instruction set of the machine where the build runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import re
import sys
from collections.abc import Iterable

from jitkern import config
from jitkern.errors import TargetError
from jitkern.named_tuple import NamedTuple

EXAMPLE = "cuda-sm_90-cu130-torch2.11.0"
OLDEST_CUDA = 120  # 12.0, as a target spells it
EXAMPLES = f"`{EXAMPLE}` or `cpu-x86_64-torch2.13.0`"
_PATTERN = r"""(?x)
        (?:cuda-(?P<sm>sm_[1-9]\d{1,2}[af]?)-cu(?P<cuda>\d{2,3}) | cpu-(?P<cpu>[a-z][a-z0-9_]*))
        -torch(?P<torch>\d+\.\d[\w.+!]*)
        (?:-(?P<platform>[a-z]+_[a-z0-9_]+))?
        (?:-(?P<abi>cxx11[\w.]*))?"""
_PUBLIC = r"(\d+\.\d+\.\d+(?:\.post\d+)?)(?:\+(?:cpu|cu\d+|rocm[\d.]+|xpu))?"
_LEVELS = (  # x86-64 psABI levels; each level includes the levels before
    ("v2", {"sse4_1", "sse4_2", "ssse3", "popcnt", "cx16"}),
    ("v3", {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"}),
    ("v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
)
_NATIVE_GPUS = r"(?:^|(?<=\s))(?:-arch|--gpu-architecture)[=\s]native\b"  # in the flags of nvcc
_TELLING = frozenset((  # of /proc/cpuinfo: what `native` may depend on, for x86, Arm, Power, RISC-V
    "vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU architecture",
    "CPU variant", "CPU part", "Features", "cpu", "isa", "uarch",
))  # fmt: skip


class Target(NamedTuple):
    """A target: a device, its arch, and the CUDA and Torch versions to build for.

    `Target.parse(str(target)) == target`.
    """

    device: str
    arch: str
    cuda: str
    torch: str
    platform: str = ""
    abi: str = ""

    def __str__(self) -> str:
        toolkit = f"-cu{self.cuda}" if self.cuda else ""
        tail = "".join(f"-{part}" for part in (self.platform, self.abi) if part)
        return f"{self.device}-{self.arch}{toolkit}-torch{self.torch}{tail}"

    @classmethod
    def parse(cls, text: str) -> Target:
        """Return the target that `text` spells, as `str` does, or in short.

        `sm_90` is for this machine's Torch and CUDA, and `cpu` for its CPU. Raises TargetError.
        """
        if text == "cpu":
            return cls.current("cpu")
        if re.fullmatch(r"sm_[1-9]\d{1,2}[af]?", text):
            return cls._of_arch(text)
        match = re.fullmatch(_PATTERN, text)
        if not match:
            short = re.fullmatch(r"(?:sm|compute)?[-_]?([1-9]\d?)\.?(\d[af]?)", text)
            near = f"; did you mean sm_{short[1]}{short[2]}?" if short else ""
            raise TargetError(f"`{text}` is not a target: expected something like {EXAMPLES}{near}")
        part = match.groupdict(default="")
        if re.fullmatch(r"\d+\.\d+", part["torch"]):
            full = text.replace(f"-torch{part['torch']}", f"-torch{part['torch']}.0")
            raise TargetError(
                f"`{text}` is not a target: versions of Torch have three numbers; did you mean "
                f"{full}?"
            )
        if part["cuda"] and int(part["cuda"]) < OLDEST_CUDA:
            longer = part["cuda"] + "0"
            near = f"; did you mean cu{longer}?" if OLDEST_CUDA <= int(longer) < 200 else ""
            raise TargetError(
                f"`{text}` is not a target: `cu{part['cuda']}` names a CUDA before 12.0, for which "
                f"nothing is built: `cu120` and later are known{near}"
            )
        device, arch = ("cuda", part["sm"]) if part["sm"] else ("cpu", part["cpu"])
        return cls(
            device, arch, part["cuda"], short_version(part["torch"]), part["platform"], part["abi"]
        )

    @classmethod
    def _of_arch(cls, arch: str) -> Target:
        import torch

        version = short_version(torch.__version__)
        if not torch.version.cuda:
            raise TargetError(
                f"`{arch}` alone means this machine's Torch and CUDA, and its Torch {version} is "
                f"built without CUDA: write the whole target, `cuda-{arch}-cu130-torch{version}`"
            )
        return cls("cuda", arch, torch.version.cuda.replace(".", ""), version)

    @classmethod
    def current(cls, device: str = "cpu", index: int | None = None) -> Target:
        """Return the target of this machine's `device`; for `cuda`, of the GPU `index`.

        The default is the first GPU. No CUDA context is created. Raises TargetError where the
        machine has no such device, or is not supported.
        """
        import torch

        if why := unsupported():
            raise TargetError(why)
        if device == "cpu":
            return cls("cpu", _machine(), "", short_version(torch.__version__))
        if device != "cuda":
            raise TargetError(
                f"`{device}` is not a device that jitkern compiles for: expected `cuda` or `cpu`"
            )
        if not torch.version.cuda:
            raise TargetError(
                f"Torch {torch.__version__} is built without CUDA, "
                "so this machine has no cuda target"
            )
        return cls._cuda(_capability(index or 0), torch.version.cuda, torch.__version__)

    @classmethod
    def visible(cls) -> list[Target]:
        """Return every target of this machine: the CPU, then each arch among the visible GPUs."""
        import torch

        targets = [cls.current("cpu")]
        if torch.version.cuda:
            capabilities = dict.fromkeys(nvml_capabilities())
            targets += [cls._cuda(c, torch.version.cuda, torch.__version__) for c in capabilities]
        return targets

    @classmethod
    def _cuda(cls, capability: tuple[int, int], cuda: str, torch_version: str) -> Target:
        major, minor = capability
        return cls(
            "cuda", f"sm_{major}{minor}", cuda.replace(".", ""), short_version(torch_version)
        )

    @property
    def cuda_version(self) -> tuple[int, int]:
        """The version (major, minor) of the CUDA toolkit."""
        return int(self.cuda[:-1]), int(self.cuda[-1])

    def arch_specific(self) -> Target:
        """Return this target with the features that only its arch has: `sm_90a` for `sm_90`.

        An arch that has none (before sm_90), and one with a suffix, are returned as they are.
        """
        number = self.arch.removeprefix("sm_")
        has_some = number.isdigit() and int(number) >= 90
        return self._replace(arch=f"{self.arch}a") if has_some else self

    def for_device_code(self) -> Target:
        """Return this target without the fields that only host code depends on."""
        return self._replace(platform="", abi="")

    def for_host_code(self, *, abi: str = "", native: bool = False) -> Target:
        """Return this target with its platform.

        abi: the ABI to add. native: whether to add the instruction set of this machine.
        """
        arch = self.arch
        base, _, level = arch.partition("_v")
        if self.device == "cpu":
            arch = base if not native else arch if level else base + isa_level()
        machine = base if self.device == "cpu" else _machine()
        platform = self.platform or f"{sys.platform}_{machine}"
        return self._replace(arch=arch, platform=platform, abi=abi or self.abi)


def short_version(version: str) -> str:
    """Return `2.11.0` for any public build of release 2.11.0, and any other version unchanged."""
    match = re.fullmatch(_PUBLIC, version)
    return match.group(1) if match else version


def unsupported() -> str:
    """Return why nothing is compiled or loaded on this machine; "" on Linux with glibc."""
    if glibc():
        return ""
    names = {"darwin": "macOS", "linux": "Linux without glibc (as with musl)", "win32": "Windows"}
    return (
        f"{names.get(sys.platform, sys.platform)} is not supported: kernels are compiled and "
        "loaded on Linux with glibc only; ops that have a reference answer with it"
    )


@functools.cache
def glibc() -> str:
    """Return the version of glibc, e.g. `glibc 2.36`; "" where this is not Linux with glibc."""
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows; macOS; musl
        return os.confstr("CS_GNU_LIBC_VERSION") or "" if sys.platform == "linux" else ""
    return ""


def this_platform() -> str:
    """Return the platform of this machine, e.g. `linux_x86_64`."""
    return f"{sys.platform}_{_machine()}"


def this_abi(*, python: bool) -> str:
    """Return the ABI of an Extension built here: C++, glibc, and the Python version if `python`."""
    tag = f"_cp{sys.version_info.major}{sys.version_info.minor}" if python else ""
    return "cxx11_" + glibc().replace(" ", "") + tag


def _machine() -> str:
    if hasattr(os, "uname"):
        return os.uname().machine.lower()
    import platform  # Windows, where nothing is compiled

    return {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())


def processor_for(flags: Iterable[str]) -> str:
    """Return a digest of this machine's processor for flags like `-march=native`; "" for others."""
    text = " ".join(flags)
    if "=native" not in text or "=native" not in re.sub(_NATIVE_GPUS, "", text):
        return ""
    told = [f"{name}:{value}" for name, value in processor().items() if name in _TELLING]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def gpus_for(flags: Iterable[str]) -> tuple[str, ...]:
    """Return the archs of this machine's GPUs for flags of nvcc like `-arch=native`.

    "none" stands for no GPU, where nvcc takes an arch of its own choice; () is for other flags.
    """
    if not re.search(_NATIVE_GPUS, " ".join(flags)):
        return ()
    return tuple(sorted({t.arch for t in Target.visible() if t.device == "cuda"})) or ("none",)


@functools.cache
def processor() -> dict[str, str]:
    """Return the system's fields for the first processor of this machine, by name."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            lines = itertools.takewhile(bytes.strip, file)
            rows = [line.decode(errors="replace").partition(":") for line in lines]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in rows}


@functools.cache
def isa_level() -> str:
    """Return the level of the instruction set here, e.g. `_v3`; "" for the lowest, or none."""
    level, flags = "", set(processor().get("flags", "").split())
    for name, needed in _LEVELS:
        if not needed <= flags:
            break
        level = f"_{name}"
    return level


def _capability(index: int) -> tuple[int, int]:
    import torch

    if torch.cuda.is_initialized():
        return torch.cuda.get_device_capability(index)
    capabilities = nvml_capabilities()
    ordered = config.current().environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if len(set(capabilities)) > 1 and not ordered:
        return torch.cuda.get_device_capability(index)  # CUDA counts the fastest first, NVML not
    if index < len(capabilities):
        return capabilities[index]
    if not capabilities:
        raise TargetError(f"no GPU is visible; to build without a GPU, name a target: {EXAMPLES}")
    raise TargetError(f"there is no GPU {index}: the number of visible GPUs is {len(capabilities)}")


def cuda_in(text: str) -> str:
    """Return the CUDA version of Torch, e.g. `130`, from the text of torch/version.py, or ""."""
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)", text, re.MULTILINE)
    return match[1].replace(".", "") if match else ""


def nvml_capabilities() -> list[tuple[int, int]]:
    """Return the compute capability of each visible GPU from NVML, which needs no CUDA context."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2():
        return []
    try:
        capabilities = [_nvml_capability(nvml, device) for device in _visible_devices(nvml)]
        return [capability for capability in capabilities if capability]
    finally:
        nvml.nvmlShutdown()


def _visible_devices(nvml: ctypes.CDLL) -> list[ctypes.c_void_p]:
    """Return NVML handles in the order of CUDA_VISIBLE_DEVICES, which has numbers or UUIDs."""
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    handles: list[ctypes.c_void_p] = []
    uuids: list[str] = []
    for number in range(count.value):
        handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle))
        nvml.nvmlDeviceGetUUID(handle, uuid, len(uuid))
        handles.append(handle)
        uuids.append(uuid.value.decode())
    visible = config.current().visible_devices
    if visible is None:
        return handles
    chosen = []
    for name in map(str.strip, visible.split(",")):
        if name.isdigit() and int(name) < len(handles):
            chosen.append(handles[int(name)])
        elif name and (matches := [h for h, uuid in zip(handles, uuids) if uuid.startswith(name)]):
            chosen.append(matches[0])
        else:
            break  # CUDA hides this device and all after it, if it does not know the name
    return chosen


def _nvml_capability(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> tuple[int, int] | None:
    major, minor = ctypes.c_int(), ctypes.c_int()
    failed = nvml.nvmlDeviceGetCudaComputeCapability(
        device, ctypes.byref(major), ctypes.byref(minor)
    )
    return None if failed else (major.value, minor.value)
