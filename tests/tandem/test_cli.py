"""Mistakes on the command line end with status 2 and name the option."""

import pytest
from click.testing import CliRunner

from tandem.cli import main


@pytest.mark.parametrize("cores", ["x", "0,-1", "1000000"])
def test_cores_to_borrow_are_cores_of_this_host(cores):
    result = CliRunner().invoke(main, ["decode", "--borrow", cores])
    assert result.exit_code == 2
    assert "--borrow" in result.output
    assert repr(cores) in result.output


@pytest.mark.parametrize("command", ["gateway", "serve"])
@pytest.mark.parametrize(
    ("content", "told"), [("a key\nwrong\n", "{}, line 2: "), ("", "{}: "), (None, "{}")]
)
def test_a_mistake_in_the_file_of_keys_is_one_line_before_anything_starts(
    command, content, told, tiny_model, tmp_path
):
    keys = tmp_path / "keys"
    if content is not None:
        keys.write_text(content)
    model = [str(tiny_model)] if command == "serve" else ["--model", str(tiny_model)]
    result = CliRunner().invoke(main, [command, *model, "--api-keys", str(keys)])
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith("tandem: ")
    assert told.format(keys) in line
