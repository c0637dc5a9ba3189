"""Compiling the native bodies: cached by content, whole or not at all, and optional."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import build as building
from kernels.cpu.build import CompileError, build, compiler, library_path

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler on this machine")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tandem"


def fake_compiler(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_a_library_is_compiled_once(cache, tmp_path):
    log = tmp_path / "log"
    script = (
        f'[ "$1" = --version ] && echo v1 && exit; echo ran >> {log}; for last; do :; done; echo so > "$last"'
    )
    command = fake_compiler(tmp_path / "cxx", script)
    assert build(command) == build(command)
    assert log.read_text(encoding="utf-8") == "ran\n"
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_another_compiler_is_another_library(cache, tmp_path):
    first, second = (fake_compiler(tmp_path / name, f"echo {name}") for name in ("one", "two"))
    assert library_path(first) != library_path(second)


def test_a_failed_compilation_leaves_nothing(cache, tmp_path):
    command = fake_compiler(tmp_path / "cxx", '[ "$1" = --version ] && exit; echo no such flag >&2; exit 1')
    with pytest.raises(CompileError, match="no such flag"):
        build(command)
    assert list(cache.iterdir()) == []


def test_set_up_without_a_compiler_goes_on(cache, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    building.main()
    assert "no C++ compiler" in caplog.text
    assert not cache.exists()


def test_set_up_with_a_broken_compiler_stops(cache, monkeypatch, tmp_path):
    broken = fake_compiler(tmp_path / "cxx", '[ "$1" = --version ] && exit; echo no such flag >&2; exit 1')
    monkeypatch.setenv("CXX", broken)
    with pytest.raises(SystemExit, match="no such flag"):
        building.main()


def run_engine_probe(**environment):
    code = "import logging; logging.basicConfig(); from kernels.cpu import library; print(bool(library.native()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip(), done.stderr.strip().splitlines()


def test_without_a_compiler_the_torch_bodies_run_and_one_line_says_so():
    available, log = run_engine_probe(CXX="no-such-compiler")
    assert available == "False"
    assert len(log) == 1
    assert "no C++ compiler" in log[0]


@needs_compiler
def test_processes_may_race(cache):
    command = [sys.executable, "-m", "kernels.cpu.build"]
    racers = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [racer.wait(timeout=170) for racer in racers] == [0, 0]
    assert [path.suffix for path in cache.iterdir()] == [".so"]
    assert run_engine_probe() == ("True", [])
