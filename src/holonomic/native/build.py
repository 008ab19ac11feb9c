"""The compiled kernels: built once with the compiler of the machine, kept in the user's cache.

They are never needed. Where there is no compiler, `library()` says why and everything goes on in torch.
Three environment variables are read: ``HOLONOMIC_NATIVE=0`` does without kernels, ``CXX`` names the
compiler, and ``HOLONOMIC_CXXFLAGS`` has flags for it that come after the usual ones, such as
``-march=x86-64-v3``.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math")
#: With threads (the OpenMP library is the one torch has loaded), or else without.
_THREADS = (("-fopenmp",), ("-fopenmp-simd",), ())
_COMPILERS = ("c++", "g++", "clang++")


class Unavailable(Exception):
    """Why there are no compiled kernels here."""


def library() -> ctypes.CDLL:
    """The kernels, compiled on first use; raises `Unavailable` with the reason if they cannot be."""
    found = _library()
    if isinstance(found, str):
        raise Unavailable(found)
    return found


def reason() -> str | None:
    """None if the kernels are there, else why not."""
    found = _library()
    return found if isinstance(found, str) else None


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The kernels, or why there are none: looked for once."""
    if os.environ.get("HOLONOMIC_NATIVE") == "0":
        return "HOLONOMIC_NATIVE=0 is set"
    try:
        compiler, flags = _compiler(), _flags()
        parts = (_SOURCE.read_text(), *flags, compiler, _machine())
        name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
        path = _folder() / f"{name}.so"
        try:
            found = ctypes.CDLL(str(path))
        except OSError:  # not there, or of a machine that had another OpenMP library
            _compile([compiler, *flags], path)
            found = ctypes.CDLL(str(path))
        return _declared(found)
    except (Unavailable, OSError, RuntimeError, ValueError) as error:  # no home directory, say
        return str(error)


def _compiler() -> str:
    named = os.environ.get("CXX")
    for candidate in (named,) if named else _COMPILERS:
        if found := shutil.which(candidate):
            return found
    wanted = f"CXX={named}" if named else ", ".join(_COMPILERS)
    raise Unavailable(f"no C++ compiler was found ({wanted})")


def _flags() -> list[str]:
    return [*_FLAGS, *shlex.split(os.environ.get("HOLONOMIC_CXXFLAGS", ""))]


def _machine() -> str:
    """What -march=native depends on: a home directory may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor() + platform.machine()


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "holonomic" / "native"


def _compile(compiler: list[str], path: Path) -> None:
    """Write the library whole or not at all: other processes may be doing the same. It must load, too: a
    compiler may leave out the OpenMP library in silence."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        for threads in _THREADS:
            command = [*compiler, *threads, "-shared", "-fPIC", str(_SOURCE)]
            done = subprocess.run(
                [*command, "-o", temporary],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=120,
                check=False,
            )
            said = done.stderr.strip() or "no message"
            if not done.returncode:
                try:
                    ctypes.CDLL(temporary)
                except OSError as error:
                    said = str(error).replace(temporary, path.name)
                else:
                    os.replace(temporary, path)
                    return
        raise Unavailable(f"{compiler[0]} could not compile the kernels: {said.splitlines()[0]}")
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{compiler[0]} took more than two minutes for the kernels") from None
    finally:
        Path(temporary).unlink(missing_ok=True)


LETTERS = 16  # that a word may have


class Word(ctypes.Structure):
    """As in ``kernels.cpp``: letters with their numbers, and what all tensors of a group share."""

    _fields_ = (
        ("count", ctypes.c_int32),
        ("letters", ctypes.c_char * LETTERS),
        ("x", ctypes.c_float * LETTERS),
        ("y", ctypes.c_float * LETTERS),
        ("noisy", ctypes.c_uint8 * LETTERS),
        ("radius", ctypes.c_float),
        ("sign", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("within", ctypes.c_float),
    )


class Leap(ctypes.Structure):
    """As in ``kernels.cpp``: a step of orthogonal matrices."""

    _fields_ = (
        *(
            (name, ctypes.c_float)
            for name in ("h", "a", "b", "c", "enough", "rounding", "per", "large")
        ),
        ("iterations", ctypes.c_int32),
    )


def _declared(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """Say what the functions take, so that a wrong call raises instead of crashing."""
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    u64, u32, f32, f64 = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float, ctypes.c_double
    for name, result, arguments in (
        ("step", i64, [pointer, i64, pointer, u64, pointer, i32]),
        ("sphere_step", i64, [pointer, i64, pointer, u64, pointer, i32]),
        ("normal", None, [i64, i64, pointer, pointer, i64, u64, u32, i32]),
        ("words", None, [pointer, pointer, u32, u64, u32]),
        ("finite", i32, [i64, pointer, i32]),
        ("orthogonal_near", i32, [i64, i64, i64, pointer, pointer, f64, f64, i32]),
        ("orthogonal_kick", None, [i64, *[pointer] * 5, i32]),
        ("orthogonal_begin", None, [i64, i64, *[pointer] * 4, i32]),
        ("orthogonal_update", i64, [i64, i64, *[pointer] * 7, i32]),
        ("orthogonal_leap", None, [pointer, i64, i64, i64, *[pointer] * 4, i32]),
        ("orthogonal_move", None, [i64, f32, *[pointer] * 3, i32]),
    ):
        function = getattr(kernels, f"holonomic_{name}")
        function.argtypes, function.restype = arguments, result
    return kernels
