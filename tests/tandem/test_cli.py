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
