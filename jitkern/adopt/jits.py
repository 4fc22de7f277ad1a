"""The JITs that `jitkern run` knows, one row each.

Programs under `jitkern run` read this file by itself, also in environments without jitkern: it
imports nothing.
"""

from __future__ import annotations


class Jit:
    """A JIT with a cache on the disk.

    variables: those that say where the cache is.
    packages: distributions whose versions key the cache, beside Python and the machine.
    unit: how many leading folders of a path name what is only whole together; 0: each file is
        whole by itself. A unit is laid from one entry or not at all.
    renamed: whether we have it name its files, so that those made without us are of no use.
    ninja: whether units are builds by ninja, laid with what they depend on; see `shim`.
    native: whether code is compiled for the very processor of this machine.
    driver: whether the CUDA driver's version keys the cache.
    skipped: patterns of names that are not kept: locks, logs, what is only of use to a compiler.
    places: where the cache is without `jitkern run`.
    compiles: functions that compile, `module:name`, which programs have counted and refused.
    remark: what is never kept.
    also: more variables, with the values that they get unless the user has set them.
    """

    unit = 0
    ninja = native = driver = renamed = False
    skipped: tuple[str, ...] = ()
    remark = ""
    places: tuple[str, ...] = ()
    compiles: tuple[str, ...] = ()
    also: tuple[tuple[str, str], ...] = ()

    def __init__(
        self, name: str, variables: tuple[str, ...], packages: tuple[str, ...] = (), **rest: object
    ) -> None:
        self.name = name
        self.variables = variables
        self.packages = packages
        vars(self).update(rest)


# What a build by ninja needs on its own machine alone: `build.ninja` has its paths.
_BUILD = ("*.o", "*.o.d", "*.d", "build.ninja")
JITS = (
    Jit("jitkern", (), compiles=("jitkern.jit.build:build",)),
    Jit("triton", ("TRITON_CACHE_DIR",), ("triton",), unit=1,
        places=("~/.triton/cache",), compiles=("triton.compiler.compiler:ASTSource.make_ir",)),
    Jit("inductor", ("TORCHINDUCTOR_CACHE_DIR",), ("torch", "triton"), native=True,
        skipped=("locks", "*.gch", "*.pch"), places=("/tmp/torchinductor_{user}",),  # noqa: S108
        compiles=("torch._inductor.compile_fx:fx_codegen_and_compile",)),
    Jit("torch_extensions", ("TORCH_EXTENSIONS_DIR",), ("torch",), unit=1, ninja=True,
        skipped=_BUILD, places=("~/.cache/torch_extensions/*",)),
    Jit("flashinfer", ("FLASHINFER_WORKSPACE_BASE",),
        ("flashinfer-python", "torch", "apache-tvm-ffi"), unit=6, ninja=True,
        skipped=(*_BUILD, "*.log")),
    Jit("deep_gemm", ("DG_JIT_CACHE_DIR", "SGLANG_DG_CACHE_DIR"),
        ("deep-gemm", "torch"), unit=2, skipped=("tmp", "locks"), places=("~/.deep_gemm",)),
    Jit("sglang", ("SGLANG_JIT_CACHE_DIR",), ("sglang", "torch", "apache-tvm-ffi"), unit=3,
        skipped=(".staging-*",), places=("~/.cache/sglang/jit",)),
    Jit("tilelang", ("TILELANG_CACHE_DIR",), ("tilelang", "torch"), unit=4,
        skipped=(".staging",), places=("~/.tilelang/cache",)),
    Jit("tvm_ffi", ("TVM_FFI_CACHE_DIR",), ("apache-tvm-ffi",), unit=1, ninja=True,
        skipped=_BUILD, places=("~/.cache/tvm-ffi",)),
    Jit("cute_dsl", ("CUTE_DSL_CACHE_DIR",), ("nvidia-cutlass-dsl",)),
    Jit("quack", ("QUACK_CACHE_DIR",), ("quack-kernels", "nvidia-cutlass-dsl")),
    Jit("flash_attention", ("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",),
        ("flash-attn", "flash-attn-4", "nvidia-cutlass-dsl"),
        also=(("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1"),)),
    Jit("cupy", ("CUPY_CACHE_DIR",), ("cupy-cuda12x", "cupy-cuda13x", "cupy"),
        places=("~/.cupy/kernel_cache",),
        compiles=("cupy.cuda.compiler:_compile_using_nvrtc_no_warning|compile_using_nvrtc",)),
    Jit("numba", ("NUMBA_CACHE_DIR",), ("numba", "llvmlite", "numpy"), unit=1, native=True,
        renamed=True, compiles=("numba.core.dispatcher:_FunctionCompiler.compile",),
        remark="Numba keeps functions with `cache=True` alone, and no calls with functions"),
    Jit("warp", ("WARP_CACHE_PATH",), ("warp-lang",), unit=2, native=True,
        places=("~/.cache/warp",),
        compiles=("warp._src.build:build_cpu", "warp._src.build:build_cuda")),
    Jit("keops", ("KEOPS_CACHE_FOLDER",), ("pykeops", "keopscore"), unit=1, native=True,
        places=("~/.cache/keops*",)),
    Jit("jax", ("JAX_COMPILATION_CACHE_DIR",), ("jax", "jaxlib"), native=True,
        also=(("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0"),
              ("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1"),
              ("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")),  # their path is in JAX's key
        compiles=("jax._src.compiler:backend_compile_and_load|backend_compile",)),
    Jit("cuda_driver", ("CUDA_CACHE_PATH",), driver=True, places=("~/.nv/ComputeCache",)),
)  # fmt: skip
SKIPPED = ("*.lock", "lock", "*.tmp", "*.tmp.*", "tmp.*", ".ninja_*", ".nfs*", "__pycache__")
RECORD = "jitkern.json"  # what a build by ninja depends on; see `shim`
