import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

cuda = torch.version.cuda is not None and CUDA_HOME is not None

setup(
    name="mathops",
    version="1.0",
    packages=["mathops"],
    ext_modules=[
        (CUDAExtension if cuda else CppExtension)(
            name="mathops._C",
            sources=[
                "mathops/csrc/ops.cpp",
                *(["mathops/csrc/axpy.cu", "mathops/csrc/half_squares.cu"] if cuda else []),
            ],
            libraries=["vendor"],
            library_dirs=["mathops/lib"],
            runtime_library_dirs=["$ORIGIN/lib"],
            extra_compile_args={
                "cxx": ["-O3", *(["-DWITH_CUDA"] if cuda else [])],
                "nvcc": ["-O3", "--use_fast_math"],
            },
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
