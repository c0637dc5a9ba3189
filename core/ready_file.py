"""The file that says where a started system can be reached."""

import json
import os
from pathlib import Path


def write_ready_file(path: Path, content: dict[str, object]) -> None:
    """Whole or not at all: written beside and renamed."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(content), encoding="utf-8")
    beside.rename(path)
