"""``python -m embcache.doctor``: what is installed, which fast paths are on, and how to get what is missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

# module -> (what it is for, how to get it)
PARTS = {
    "torch": ("everything", "pip install torch --index-url https://download.pytorch.org/whl/cpu"),
    "numpy": ("everything", "pip install numpy"),
    "numba": ("index, eviction and row movement", "pip install numba"),
    "lmdb": ("the disk tier", "pip install lmdb"),
    "pyarrow": ("Parquet files", "pip install pyarrow"),
    "safetensors": ("checkpoints", "pip install safetensors"),
    "yaml": ("config.yaml of a run", "pip install pyyaml"),
    "tensorboard": ("TensorBoard scalars", "pip install tensorboard"),
    "fbgemm_gpu": ("a benchmark peer", "pip install fbgemm-gpu-cpu"),
    "torchrec": ("a benchmark peer", "pip install --no-deps torchrec"),
    "cupy": ("GPU memory and streams", "pip install cupy-cuda13x"),
}
DISTRIBUTIONS = {"yaml": "pyyaml", "fbgemm_gpu": "fbgemm-gpu-cpu", "cupy": "cupy-cuda13x"}
OPTIONAL = {"fbgemm_gpu", "torchrec", "cupy"}
CPU_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512_bf16",
    "amx_bf16",
    "asimd",
    "sve",
)


def version_of(module: str) -> str | None:
    """Version of an installed module without importing it, or None."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(module, module))
    except importlib.metadata.PackageNotFoundError:
        return "version unknown"


def processor() -> tuple[str, list[str]]:
    """Name of the processor and those of its vector extensions that matter here."""
    try:
        lines = (line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
        info = {key.strip(): value.strip() for key, value in lines}
    except OSError:
        info = {}
    flags = set(info.get("flags", info.get("Features", "")).split())
    return info.get("model name", platform.processor() or platform.machine()), [f for f in CPU_FLAGS if f in flags]


def kernels_report() -> list[str]:
    """Which kernels run, from where, and with which instruction set. May compile them: that is the first use."""
    from .kernels import build, memory, native

    compiler = build.find_compiler()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = native.load()
    lines = []
    if loaded:
        path, how = native.library()
        lines.append(f"kernels        C++, {how}, {native.isa()} (of {', '.join(native.isas())})")
        lines.append(f"               {path}")
    else:
        lines.append("kernels        plain torch, slower: " + "; ".join(str(w.message) for w in caught))
        if compiler is None:
            lines.append("               to get the C++ kernels: apt install g++   (or any g++ or clang++ on PATH)")
    lines.append(f"compiler       {compiler or 'none found'}")
    pages = memory.huge_pages()
    lines.append(f"huge pages     {pages}")
    if pages == "never":
        lines.append("               random reads of large tables are slower so; as root:")
        lines.append("               echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
    return lines


def torch_report() -> list[str]:
    """Threads and devices torch sees."""
    import torch

    lines = [f"threads        {torch.get_num_threads()} of {os.cpu_count()} processors"]
    try:
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except Exception as error:  # a driver that is broken must not break the report
        names = [f"unusable: {error}"]
    lines.append(f"GPUs           {', '.join(names) if names else 'none'}")
    return lines


def _section(lines: list[str], report: Callable[[], list[str]]) -> None:
    try:
        lines += report()
    except Exception as error:  # the doctor reports, it does not fail
        lines.append(f"{report.__name__}: {type(error).__name__}: {error}")


def report() -> str:
    """The whole report as text."""
    name, flags = processor()
    lines = [
        f"python         {platform.python_version()} ({sys.executable})",
        f"system         {platform.platform()}",
        f"processor      {name}",
        f"               {', '.join(flags) or 'no vector extension that matters here'}",
    ]
    missing = []
    for module, (purpose, command) in PARTS.items():
        version = version_of(module)
        lines.append(f"{module:<14} {version or 'missing'}" + ("" if version else f" ({purpose})"))
        if version is None:
            missing.append((module, purpose, command))
    if version_of("torch"):
        _section(lines, torch_report)
        _section(lines, kernels_report)
    if missing:
        lines.append("")
        lines.append("missing, and how to get it:")
        for module, purpose, command in missing:
            lines.append(f"  {module:<12} {'optional, ' if module in OPTIONAL else ''}for {purpose}: {command}")
    return "\n".join(lines)


def main() -> None:
    sys.stdout.write(report() + "\n")


if __name__ == "__main__":
    main()
