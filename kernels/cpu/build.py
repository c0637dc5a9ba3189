"""Compiling the native bodies, once a user and machine. Knows nothing of what the sources do, imports no torch.

`python -m kernels.cpu.build` compiles ahead; otherwise the first process that needs them does. The library lies in
the user's cache under a name that hashes the sources, the compiler and the processor's features, and is renamed
into place whole: processes may race, the last one wins with the same bytes.
"""

import logging
import os
import shutil
import subprocess
import tempfile
from hashlib import blake2b
from pathlib import Path

logger = logging.getLogger(__name__)

FLAGS = (
    "-std=gnu++17",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
    "-shared",
)
SOURCES = Path(__file__).parent
COMPILE_DEADLINE_S = 300


class CompileError(Exception):
    """The compiler refused or did not finish; the message is its own."""


def compiler() -> str | None:
    """The C++ compiler to use: $CXX, else g++; None when there is none. (The sources need GCC's vector types.)"""
    return shutil.which(os.environ.get("CXX", "g++"))


def library_path(command: str) -> Path:
    """Where the library of these sources, this compiler and this processor lies or will lie."""
    identity = blake2b(digest_size=12)
    for path in _source_files():
        identity.update(path.name.encode() + b"\0" + path.read_bytes())
    for text in (*FLAGS, _compiler_version(command), _processor_features()):
        identity.update(text.encode() + b"\0")
    return _cache_directory() / f"kernels-{identity.hexdigest()}.so"


def build(command: str) -> Path:
    """Compile unless it is done already; returns the library. Raises CompileError, or OSError for the cache."""
    target = library_path(command)
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        units = [str(path) for path in _source_files() if path.suffix == ".cpp"]
        _run([command, *FLAGS, *units, "-o", name])
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)
    logger.info("compiled the CPU kernels into %s", target)
    return target


def _run(arguments: list[str]) -> str:
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, check=False, timeout=COMPILE_DEADLINE_S
        )
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"{arguments[0]} did not finish within {COMPILE_DEADLINE_S} s") from error
    if done.returncode != 0:
        raise CompileError(done.stderr.strip()[:2000] or f"{arguments[0]} exited with {done.returncode}")
    return done.stdout


def _source_files() -> list[Path]:
    return sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))


def _compiler_version(command: str) -> str:
    return _run([command, "--version"])


def _processor_features() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith(("flags", "Features")):
            return line
    return ""


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tandem"


def main() -> None:
    """Without a compiler it says so and returns: the torch bodies will do. A failed compilation exits with 1."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    command = compiler()
    if command is None:
        logger.warning("no C++ compiler: the slower torch kernels will be used on CPU")
        return
    try:
        build(command)
    except CompileError as error:
        raise SystemExit(f"cannot compile the CPU kernels: {error}") from error


if __name__ == "__main__":
    main()
