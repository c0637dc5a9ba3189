"""The generated code is that of the .proto files, and every message and field is described."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROTOS = sorted((ROOT / "proto").glob("*.proto"))


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    names = [f"proto/{path.name}" for path in PROTOS]
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *names], cwd=ROOT, check=True)
    generated = sorted((tmp_path / "proto").iterdir())
    assert len(generated) == 3 * len(PROTOS)
    for path in generated:
        assert path.read_text() == (ROOT / "proto" / path.name).read_text(), f"{path.name}: run `make proto`"


def test_every_message_field_and_call_has_a_comment() -> None:
    for path in PROTOS:
        previous = ""
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            is_item = re.match(r"\s*(message|enum|service|rpc|oneof)\b|.*=\s*\d+;$", line)
            in_oneof_of_messages = re.match(r"    [A-Z]\w* \w+ = \d+;$", line)
            if is_item and not in_oneof_of_messages:
                assert previous.strip().startswith("//"), f"{path.name}:{number} is not described: {line}"
            previous = line
