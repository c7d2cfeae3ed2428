"""Both ways to the C++ kernels: compiled on first use, and built ahead by setup.py; and what happens without either."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from embcache import kernels
from embcache.kernels import build, native

ROOT = Path(__file__).resolve().parent.parent.parent
compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def stub_compiler(tmp_path: Path) -> Path:
    """A "compiler" that notes each call and writes an empty file where it is asked to."""
    script = tmp_path / "c++"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n[ "$1" = --version ] && echo stub 1.0 && exit 0\n'
        'while [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done\nexit 0\n'
    )
    script.chmod(0o755)
    return script


def links(tmp_path: Path) -> int:
    return sum("-shared" in line for line in (tmp_path / "calls").read_text().splitlines())


def test_first_use_compiles_once_and_then_finds_its_library(tmp_path: Path, stub_compiler: Path) -> None:
    first = build.build_on_first_use(tmp_path / "cache", str(stub_compiler))
    assert first is not None
    assert first.exists()
    assert build.source_hash(ROOT / "csrc") in first.name
    assert torch.__version__.split("+")[0] in first.parent.name
    assert build.build_on_first_use(tmp_path / "cache", str(stub_compiler)) == first
    assert links(tmp_path) == 1
    assert not list(first.parent.glob(".build-*"))


def test_two_processes_at_once_compile_once(tmp_path: Path, stub_compiler: Path) -> None:
    code = (
        "from pathlib import Path; from embcache.kernels import build;"
        f"print(build.build_on_first_use(Path({str(tmp_path / 'cache')!r}), {str(stub_compiler)!r}))"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in "ab"]
    paths = {process.communicate()[0].strip() for process in both}
    assert len(paths) == 1
    assert Path(paths.pop()).exists()
    assert links(tmp_path) == 1


def test_a_failing_compiler_gives_a_warning_and_no_library(tmp_path: Path) -> None:
    script = tmp_path / "g++"
    script.write_text("#!/bin/sh\necho 'error: not today' >&2\nexit 3\n")
    script.chmod(0o755)
    with pytest.warns(UserWarning, match="not today"):
        assert build.build_on_first_use(tmp_path / "cache", str(script)) is None
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_without_a_compiler_plain_torch_runs(tmp_path: Path) -> None:
    """In an interpreter that finds no compiler, no prebuilt library and no cache."""
    package = tmp_path / "embcache"
    shutil.copytree(ROOT / "embcache", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    code = (
        "import warnings; warnings.simplefilter('always'); from embcache import kernels;"
        "print(kernels.get().__name__); print(kernels.get().__name__)"
    )
    environment = {**os.environ, "PATH": str(tmp_path), "CXX": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = str(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["embcache.kernels.reference"] * 2
    assert result.stderr.count("C++ compiler") == 1


def test_get_refuses_unknown_names() -> None:
    assert kernels.get("reference").__name__ == "embcache.kernels.reference"
    with pytest.raises(ValueError, match="'cuda', must be"):
        kernels.get("cuda")  # type: ignore[arg-type]


def test_a_prebuilt_library_counts_only_for_its_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = tmp_path / "embcache" / "kernels"
    here.mkdir(parents=True)
    monkeypatch.setattr(build, "__file__", str(here / "build.py"))
    stale, fresh = here / build.library_name("0" * 16), here / build.library_name(build.source_hash(ROOT / "csrc"))
    stale.touch()
    assert build.prebuilt() == stale  # no sources beside it: it is all there is
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    assert build.prebuilt() is None
    fresh.touch()
    assert build.prebuilt() == fresh


@pytest.mark.skipif(sys.platform != "linux", reason="wheels are tested on Linux")
def test_setup_builds_a_wheel_that_runs_without_a_compiler(tmp_path: Path, stub_compiler: Path) -> None:
    """A wheel holds the library and the sources; unpacked, it loads the one and could compile the other.

    The compiler here links by copying the library that was compiled on first use, which is made of the same sources.
    """
    if not native.load():
        pytest.skip("no C++ kernels")
    library = native.library()[0]
    stub_compiler.write_text(stub_compiler.read_text().replace(': > "$2"', f'cp {library} "$2"'))
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for name in ("embcache", "dlrm", "csrc"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    result = subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel"], cwd=source, capture_output=True, text=True,
        env={**os.environ, "CXX": str(stub_compiler)},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    (wheel,) = (source / "dist").glob("*.whl")
    assert wheel.name.startswith("embcache-")
    assert "-py3-none-" in wheel.name
    target = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    digest = build.source_hash(source / "csrc")
    assert build.library_name(digest) in [path.name for path in (target / "embcache" / "kernels").iterdir()]
    assert build.source_hash(target / "embcache" / "_csrc") == digest
    code = (
        "from embcache import kernels; from embcache.kernels import native;"
        "print(kernels.get('native').__name__, native.library()[1], native.isa())"
    )
    environment = {**os.environ, "PATH": str(tmp_path), "CXX": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment["PYTHONPATH"] = str(target)
    ran = subprocess.run([sys.executable, "-c", code], cwd=target, env=environment, capture_output=True, text=True)
    assert ran.stdout.split()[:3] == ["embcache.kernels.native", "built", "ahead"], ran.stderr


@compiler
@pytest.mark.slow
def test_selftest_prints_equal_checksums_for_all_instruction_sets(tmp_path: Path) -> None:
    """With AVX-512 restated in AVX2 where the processor lacks it, so that its path runs everywhere on x86-64."""
    sets = native.isas() if native.load() else ["portable"]
    emulate = "avx2" in sets and "avx512" not in sets
    header = Path(__file__).with_name("avx512_emulated.h") if emulate else None
    program = build.build_selftest(tmp_path / "selftest", static=False, optimize="-O1", avx512=header)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stdout
    assert lines[-1] == "equal"
    assert {line.split()[0] for line in lines[:-1]} == {*sets, *(["avx512"] if emulate else [])}


def test_doctor_reports_and_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from embcache import doctor

    monkeypatch.setitem(doctor.PARTS, "no_such_module", ("nothing at all", "pip install no-such-module"))
    text = doctor.report()
    assert torch.__version__ in text
    assert "no_such_module" in text
    assert "pip install no-such-module" in text
    assert ("kernels        C++" in text) == (native.library()[0] is not None)

    def torch_report() -> list[str]:
        raise OSError("a driver that is broken")

    monkeypatch.setattr(doctor, "torch_report", torch_report)
    assert "torch_report: OSError: a driver that is broken" in doctor.report()


def test_huge_memory_is_aligned_zero_and_lazy() -> None:
    from embcache.kernels.memory import HUGE_PAGE, huge_empty

    block = huge_empty(1 << 38)  # 256 GiB of address space
    assert block.data_ptr() % HUGE_PAGE == 0
    assert block.numel() == 1 << 38
    assert int(block[-1]) == 0
    assert huge_empty(0).numel() == 0
    assert huge_empty(100).data_ptr() % 16 == 0
    with pytest.raises(ValueError, match="nbytes"):
        huge_empty(-1)


def test_a_compiler_may_have_a_launcher(tmp_path: Path, stub_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "launch er"
    launcher.write_text('#!/bin/sh\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{launcher}' {stub_compiler} --flag")
    found = build.find_compiler()
    assert found == f"'{launcher}' {stub_compiler} --flag"
    assert build.build_on_first_use(tmp_path / "cache", found) is not None
    assert all("--flag" in line for line in (tmp_path / "calls").read_text().splitlines()[1:])


def test_a_process_tries_to_load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[None] = []
    monkeypatch.setattr(native, "_loaded", None)
    monkeypatch.setattr(build, "prebuilt", lambda: None)
    monkeypatch.setattr(build, "build_on_first_use", lambda: tries.append(None))
    assert [native.load(), native.load(), kernels.get()] == [False, False, kernels.get("reference")]
    assert len(tries) == 1
