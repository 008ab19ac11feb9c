"""Builds the compiled kernels, if there is a C++ compiler; without one the package installs all the same.

One source becomes one library per instruction set; which of them is used is decided when the package is
loaded. They have a plain C interface, and know nothing of torch or Python.
"""

import hashlib
import os
import platform
import shlex
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = "src/holonomic/native/kernels.cpp"
COMMON = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
THREADS = (["-fopenmp"], ["-fopenmp-simd"], [])  # the first that compiles and links
AVX2 = ["-mavx2", "-mfma", "-mbmi2"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mprefer-vector-width=512"]
X86 = {"baseline": [], "avx2": AVX2, "avx512": AVX512}
with open(SOURCE, "rb") as file:
    DIGEST = hashlib.sha256(file.read()).hexdigest()[:16]
SETS = X86 if platform.machine().lower() in ("x86_64", "amd64") else {"baseline": []}


class BuildKernels(build_ext):
    """With threads if the compiler has OpenMP, else without."""

    def build_extension(self, extension: Extension) -> None:
        own = extension.extra_compile_args
        extra = shlex.split(os.environ.get("HOLONOMIC_CXXFLAGS", ""))
        for attempt, threads in enumerate(THREADS):
            extension.extra_compile_args = [*COMMON, *own, *threads, *extra]
            extension.extra_link_args = [*threads, *extra]
            try:
                self.force = True  # the flags may have changed
                return super().build_extension(extension)
            except Exception as error:
                if attempt == len(THREADS) - 1:
                    raise
                print(f"{extension.name} with {threads[0]}: {error}", file=sys.stderr)


setup(
    ext_modules=[
        Extension(
            f"holonomic.native._kernels_{name}",
            [SOURCE],
            language="c++",
            extra_compile_args=flags,
            define_macros=[("HOLONOMIC_SOURCE", f'"{DIGEST}"')],
            optional=True,
            py_limited_api=True,
        )
        for name, flags in SETS.items()
    ],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},  # one wheel for every Python
)
