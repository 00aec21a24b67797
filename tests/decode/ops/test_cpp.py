"""decode/ops/cpp.py: operations in C++ are built once, and what cannot be built is left out."""

from __future__ import annotations

import subprocess
import warnings
from pathlib import Path

import pytest

from decode.ops import cpp

NAME = "trellis_fill"
needs_compiler = pytest.mark.skipif(cpp._compiler() is None, reason="no C++ compiler")


class Loading:
    """Counts libraries that are loaded; a process cannot load an operation twice, so none is."""

    def __init__(self) -> None:
        self.loaded = 0

    def __call__(self, path: Path) -> None:
        if not path.read_bytes():
            raise OSError(f"{path}: file too short")
        self.loaded += 1


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Loading:
    found = Loading()
    monkeypatch.setattr(cpp.torch.ops, "load_library", found)
    monkeypatch.setattr(cpp, "_is_loaded", lambda name: False)
    return found


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loading: Loading) -> Path:
    """An empty cache of the user, in which the operations are built again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "medusa-heads" / "operations"


load = cpp.load_operations.__wrapped__


def test_an_operation_that_the_process_has_is_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would end the process."""
    monkeypatch.setattr(cpp, "_is_loaded", lambda name: True)
    monkeypatch.setattr(cpp.torch.ops, "load_library", lambda path: pytest.fail("loaded"))
    assert load(NAME)


@needs_compiler
def test_a_library_is_built_once(cache: Path, loading: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(NAME)
    (library,) = cache.iterdir()
    monkeypatch.setattr(subprocess, "run", lambda *given, **options: pytest.fail("it was built again"))
    assert load(NAME)
    assert [*cache.iterdir()] == [library]
    assert loading.loaded == 2


@needs_compiler
def test_a_damaged_library_is_built_again(cache: Path, loading: Loading) -> None:
    assert load(NAME)
    (library,) = cache.iterdir()
    library.write_bytes(b"")
    assert load(NAME)
    assert library.read_bytes()
    assert loading.loaded == 2


@pytest.mark.parametrize("changed", ["torch", "cpu", "compiler"])
def test_another_torch_cpu_or_compiler_gets_another_library(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(cpp.__file__).with_name(f"{NAME}.cpp")
    before = cpp._key(source, ["g++"])
    if changed == "torch":
        monkeypatch.setattr(cpp.torch, "__version__", "0")
    if changed == "cpu":
        monkeypatch.setattr(cpp, "cpuinfo", lambda *fields: ["avx1024"])
    assert cpp._key(source, ["clang++" if changed == "compiler" else "g++"]) != before


def test_without_a_compiler_nothing_is_built_or_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(cpp.shutil, "which", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not load(NAME)
    assert not cache.exists()


@needs_compiler
def test_a_file_that_does_not_compile_gives_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp, "FLAGS", (*cpp.FLAGS, "-DTensor=3"))
    with pytest.warns(UserWarning, match=r"trellis_fill.cpp does not compile: .*error.*") as found:
        assert not load(NAME)
    assert "\n" not in str(found[0].message)
    assert not [*cache.iterdir()], "no part of a library stays"


@needs_compiler
@pytest.mark.parametrize("broken", ["no such compiler", "no command", "no folder", "no home", "no library"])
def test_what_cannot_be_used_is_named(broken: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "no such compiler":
        monkeypatch.setenv("CXX", "no-such-compiler --fast")
    if broken == "no command":
        monkeypatch.setenv("CXX", "g++ '")
    if broken == "no folder":
        cache.parent.write_text("a file")
    if broken == "no home":
        monkeypatch.setattr(cpp, "user_cache", Path("~no-such-user").expanduser)
    if broken == "no library":
        monkeypatch.setattr(cpp, "_build", lambda source, compiler, library: library.write_text(""))
    with pytest.warns(UserWarning, match=r"trellis_fill.cpp cannot be used: \S+"):
        assert not load(NAME)
