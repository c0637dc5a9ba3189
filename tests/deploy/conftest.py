"""What the tests of compose and of Kubernetes share."""

from collections.abc import Callable, Sequence

import pytest

from tandem.cli import main


@pytest.fixture(scope="session")
def check_command() -> Callable[[Sequence[str]], None]:
    """Asserts that `tandem ARGUMENTS` names a command and only options that it has."""

    def check(arguments: Sequence[str]) -> None:
        command = main.commands[arguments[0]]
        known = {option for parameter in command.params for option in parameter.opts}
        given = {argument.partition("=")[0] for argument in arguments[1:] if argument.startswith("--")}
        assert given <= known, f"{arguments[0]}: {given - known}"

    return check
