"""Compiling ``csrc/`` into one shared library, ahead of time (setup.py) or on first use.

The sources know nothing of Python and the binding uses torch's stable ABI, so compiling takes seconds and one library
serves torch 2.10 and later. Files named ``*_isa.cpp`` are compiled once per instruction set; every other ``.cpp`` but
``selftest.cpp`` once; dropping a file into ``csrc/`` is enough to have it built.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

log = logging.getLogger("embcache")

LIBRARY_STEM = "_embcache_native"
STABLE_ABI = 0x020A000000000000  # torch 2.10: the oldest torch the library runs with
# No contraction and no fast-math: every instruction set must give the same bits.
FLAGS = [
    "-std=c++17", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden",
    "-Wall", "-Wno-maybe-uninitialized", "-Wno-uninitialized",
]  # fmt: skip
ISA_FLAGS = {
    "portable": (0, []),
    "avx2": (1, ["-mavx2", "-mfma", "-mf16c"]),
    "avx512": (2, ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]),
}


class BuildError(RuntimeError):
    """The compiler failed; the message holds its command and the end of its output."""


def source_folder() -> Path | None:
    """Where the C++ sources are: ``csrc/`` of a checkout, ``embcache/_csrc/`` of an installed package, or None."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package.parent / "csrc", package / "_csrc"):
        if (folder / "binding.cpp").exists():
            return folder
    return None


def source_hash(folder: Path) -> str:
    """16 hex digits over names and contents of all sources and the flags."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr((FLAGS, ISA_FLAGS, STABLE_ABI)).encode())
    for path in sorted(folder.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def instruction_sets(machine: str | None = None) -> list[str]:
    """The instruction sets compiled for a machine (default: this one): all, whatever this processor has.

    >>> instruction_sets("x86_64"), instruction_sets("aarch64")
    (['portable', 'avx2', 'avx512'], ['portable'])
    """
    return list(ISA_FLAGS) if (machine or platform.machine()).lower() in ("x86_64", "amd64") else ["portable"]


def find_compiler() -> str | None:
    """``$CXX``, g++, clang++ or c++, whichever is found first, with arguments (CXX="ccache g++"); None without one."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        words = shlex.split(name)
        if words and (found := shutil.which(words[0])):
            return shlex.join([found, *words[1:]])
    return None


def library_name(sources: str) -> str:
    """File name of the library made of the sources with this hash."""
    return f"{LIBRARY_STEM}-{sources}.so"


def compile_commands(folder: Path, objects: Path, compiler: str, torch_include: Path) -> list[tuple[list[str], Path]]:
    """(command, object file) for every translation unit, the slow ones first."""
    commands = []
    for source in sorted(folder.glob("*.cpp"), key=lambda p: (not p.stem.endswith("_isa"), p.name)):
        if source.name == "selftest.cpp":
            continue
        variants: list[tuple[str, list[str]]] = [("", [])]
        if source.stem.endswith("_isa"):
            variants = [
                (name, [f"-DEC_ISA={ISA_FLAGS[name][0]}", f"-DEC_NS={name}", *ISA_FLAGS[name][1]])
                for name in instruction_sets()
            ]
        for name, extra in variants:
            target = objects / f"{source.stem}{'.' + name if name else ''}.o"
            include = [f"-DTORCH_TARGET_VERSION=0x{STABLE_ABI:016x}", "-isystem", str(torch_include)]
            command = [*shlex.split(compiler), *FLAGS, *extra, *include, "-c", str(source), "-o", str(target)]
            commands.append((command, target))
    return commands


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        tail = "\n".join((result.stderr or result.stdout).splitlines()[-20:])
        raise BuildError(f"{shlex.join(command)}\nended with status {result.returncode}:\n{tail}")


def compile_library(target: Path, compiler: str | None = None, jobs: int | None = None) -> Path:
    """Compiles the sources against the installed torch into `target`, replaced atomically; or :class:`BuildError`."""
    import torch

    folder = source_folder()
    if folder is None:
        raise BuildError("the C++ sources are not installed")
    compiler = compiler or find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler: install g++ or clang++, or name one in CXX")
    root = Path(torch.__file__).parent
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as temporary:
        objects = Path(temporary)
        commands = compile_commands(folder, objects, compiler, root / "include")
        with ThreadPoolExecutor(jobs or min(len(commands), os.cpu_count() or 1)) as pool:
            list(pool.map(_run, [command for command, _ in commands]))
        library = objects / target.name
        link = ["-shared", "-pthread", *(str(o) for _, o in commands), "-o", str(library), f"-L{root / 'lib'}"]
        if sys.platform == "darwin":
            link += ["-undefined", "dynamic_lookup"]
        _run([*shlex.split(compiler), *link, "-ltorch_cpu", "-lc10"])
        os.replace(library, target)
    return target


def cache_folder() -> Path:
    """The user's cache of compiled libraries; a private folder of the temporary directory where home is read-only."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "embcache"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    folder = Path(tempfile.gettempdir()) / f"embcache-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
        raise BuildError(f"{folder} belongs to somebody else")
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _compiler_version(compiler: str) -> str:
    result = subprocess.run([*shlex.split(compiler), "--version"], capture_output=True, text=True)
    return result.stdout.splitlines()[0] if result.stdout else compiler


def cached_path(folder: Path, compiler: str, cache: Path | None = None) -> Path:
    """Where the library compiled on first use lies: keyed by torch, compiler, machine, Python platform and sources."""
    import torch

    key = hashlib.blake2b(
        repr((torch.__version__, _compiler_version(compiler), sysconfig.get_platform())).encode(), digest_size=4
    ).hexdigest()
    version = torch.__version__.replace("+", "-")
    return (cache or cache_folder()) / f"torch-{version}-{platform.machine()}-{key}" / library_name(source_hash(folder))


def prebuilt() -> Path | None:
    """The library built by setup.py, where it was made of the sources that are here (or where no sources are)."""
    here = Path(__file__).resolve().parent
    folder = source_folder()
    if folder is None:
        found = sorted(here.glob(f"{LIBRARY_STEM}-*.so"))
        return found[0] if found else None
    path = here / library_name(source_hash(folder))
    return path if path.exists() else None


def build_on_first_use(cache: Path | None = None, compiler: str | None = None) -> Path | None:
    """Path of the library, compiled now if the cache lacks it; None, with one warning, where it cannot be compiled.

    Two processes that come at once: one compiles, the other waits for it. ``cache`` and ``compiler`` default to
    :func:`cache_folder` and :func:`find_compiler`.
    """
    folder = source_folder()
    compiler = compiler or find_compiler()
    if folder is None or compiler is None:
        missing = "the C++ sources" if folder is None else "a C++ compiler (g++ or clang++)"
        warn_slow(f"{missing} not found")
        return None
    try:
        path = cached_path(folder, compiler, cache)
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / ".lock"):
            if not path.exists():
                start = time.perf_counter()
                sys.stderr.write("embcache: compiling its C++ kernels once (about half a minute) ...\n")
                sys.stderr.flush()
                compile_library(path, compiler)
                log.info("compiled %s in %.1f s", path, time.perf_counter() - start)
        return path
    except (BuildError, OSError) as error:
        warn_slow(f"compiling them failed: {error}")
        return None


_warned: set[str] = set()


def warn_slow(reason: str) -> None:
    """One warning a reason: the C++ kernels are not in use."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"embcache runs without its C++ kernels, slower: {reason}", stacklevel=3)


def build_selftest(
    target: Path, compiler: str | None = None, static: bool = True, optimize: str = "-O3", avx512: Path | None = None
) -> Path:
    """Compiles ``csrc/selftest.cpp`` with the kernels of every instruction set into a program that needs no torch.

    It prints a checksum an instruction set and ends with status 1 where they differ; static, it runs in an emulator of
    processors with other instruction sets. ``avx512`` names a header that restates those intrinsics for AVX2: then the
    AVX-512 kernels run on any processor with AVX2.
    """
    folder = source_folder()
    compiler = compiler or find_compiler()
    if folder is None or compiler is None:
        raise BuildError("the self-test needs the C++ sources and a compiler")
    with tempfile.TemporaryDirectory() as temporary:
        objects = Path(temporary)
        wanted = ("kernels_isa", "dispatch", "lookup", "update")
        commands = [
            (command, target)
            for command, target in compile_commands(folder, objects, compiler, objects)
            if target.name.split(".")[0] in wanted
        ]
        for command, _ in commands:
            command[command.index("-O3")] = optimize
            if avx512 is not None and "-DEC_NS=avx512" in command:
                command[:] = [a for a in command if not a.startswith("-mavx512")] + ["-mavx2", "-include", str(avx512)]
            if avx512 is not None:
                command.append("-DEC_EMULATED_AVX512")
        main = objects / "selftest.o"
        commands.append(([*shlex.split(compiler), *FLAGS, "-c", str(folder / "selftest.cpp"), "-o", str(main)], main))
        with ThreadPoolExecutor(min(len(commands), os.cpu_count() or 1)) as pool:
            list(pool.map(_run, [command for command, _ in commands]))
        link = [*(["-static"] if static else []), "-pthread", *(str(o) for _, o in commands), "-o", str(target)]
        _run([*shlex.split(compiler), *link])
    return target
