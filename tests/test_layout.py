"""The import table of docs/architecture.md, and what the package files may hold."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "bench",
    "cluster",
    "core",
    "decode_service",
    "engine",
    "gateway",
    "kernels",
    "kv_cache",
    "kv_transfer",
    "prefill_service",
    "proto",
    "tandem",
    "tokenizer",
}
SERVICE = {"core", "engine", "kv_transfer", "proto", "cluster", "tokenizer"}
MAY_IMPORT = {
    "core": {"core"},
    "proto": {"core", "proto"},
    "kernels": {"core", "kernels"},
    "tokenizer": {"core", "tokenizer"},
    "engine": {"core", "engine", "kernels", "tokenizer"},
    "kv_transfer": {"core", "kernels", "kv_transfer"},
    "cluster": {"core", "cluster"},
    "gateway": {"core", "cluster", "gateway", "proto", "tokenizer"},
    "kv_cache": SERVICE - {"tokenizer"} | {"kv_cache"},
    "prefill_service": SERVICE | {"kv_cache", "prefill_service"},
    "decode_service": SERVICE | {"kv_cache", "decode_service"},
    "tandem": PACKAGES,
    "bench": PACKAGES,
}
NEVER = {
    "core": {"torch", "numpy", "grpc", "redis", "msgspec"},
    "kv_transfer": {"torch", "grpc", "redis"},
    "engine": {"grpc", "redis"},
    "cluster": {"torch", "transformers"},
    "gateway": {"torch", "transformers"},
    "tokenizer": {"torch", "transformers", "grpc", "redis"},
}
RUNS_WHAT_IT_READS = {"pickle", "marshal", "shelve", "multiprocessing"}
TORCH_FREE = (
    "engine.scheduler",
    "engine.block_pool",
    "engine.sequence",
    "engine.engine_process",
    "engine.engine_geometry",
    "prefill_service.scheduler",
    "prefill_service.main",
    "decode_service.scheduler",
    "decode_service.main",
    "gateway.main",
    "gateway.routing.router",
    "cluster.registry",
    "kv_transfer.connectors",
    "tandem.cli",
    "tandem.client",
    "kernels",
)


PARTS_OF_GATEWAY = {"front": {"front", "text"}, "routing": {"routing"}, "text": {"text"}}
"""What each folder of the gateway may import of the others; modules beside them may import any."""


def modules_imported(path: Path) -> set[str]:
    """The dotted names that a file imports from, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


def imported(path: Path) -> set[str]:
    """The top-level ones."""
    return {name.split(".")[0] for name in modules_imported(path)}


@pytest.mark.parametrize("part", sorted(PARTS_OF_GATEWAY))
def test_parts_of_the_gateway_import_only_what_they_may(part: str) -> None:
    paths = list((ROOT / "gateway" / part).glob("*.py"))
    assert len(paths) > 5
    for path in paths:
        used = {name.split(".")[1] for name in modules_imported(path) if name.startswith("gateway.")}
        assert used & PARTS_OF_GATEWAY.keys() <= PARTS_OF_GATEWAY[part], path


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_package_imports_only_what_the_table_allows(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        names = imported(path)
        assert names & PACKAGES <= MAY_IMPORT[package], f"{path.relative_to(ROOT)}: {names & PACKAGES}"
        assert not names & NEVER.get(package, set()), f"{path.relative_to(ROOT)}: {names}"
        assert not names & RUNS_WHAT_IT_READS, f"{path.relative_to(ROOT)}: {names}"


def test_core_needs_only_the_standard_library_and_xxhash() -> None:
    for path in (ROOT / "core").rglob("*.py"):
        assert imported(path) <= set(sys.stdlib_module_names) | {"core", "xxhash"}, path


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_package_file_is_a_docstring_and_nothing_else(package: str) -> None:
    body = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8")).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)
    assert isinstance(body[0].value, ast.Constant)


def test_test_folders_are_no_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("module", TORCH_FREE)
def test_module_loads_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
