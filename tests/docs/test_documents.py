"""The documents against the code, as far as a machine can tell: paths, commands, options, metrics, limits."""

import importlib
import inspect
import re
import shlex
from pathlib import Path

import click
import pytest
from prometheus_client import Counter, Gauge, Histogram

from cluster import block_feed, store
from gateway.front import openai_schema, responses_schema
from gateway.metrics import GatewayMetrics
from gateway.routing import prefix_index, pulls
from tandem.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "docs/architecture.md"]
COMMANDS_OF = {"serve": ["serve"], "gateway": ["gateway"], "workers": ["prefill", "decode"]}
COMMANDS_OF["all"] = [name for names in COMMANDS_OF.values() for name in names]
COMMANDS_OF |= {"prefill": ["prefill"], "decode": ["decode"]}
LIMIT = re.compile(r"\| ([\d.]+)(?: s)? \| `([\w/]+)\.py` `([\w.]+)` \|$", re.MULTILINE)


def options_of(command: str) -> dict[str, click.Parameter]:
    return {option: p for p in main.commands[command].params for option in p.opts if option.startswith("--")}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_a_document_names_exists(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[\w.]+/)+[\w.]*)`", text))
    linked = set(re.findall(r"\]\(([^)#:]+)\)", text))
    assert named or linked
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [name for name in linked if not ((ROOT / document).parent / name).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_that_a_document_shows_exists_with_its_options(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    for line in re.findall(r"^(?:\.venv/bin/)?tandem (.+)$", text, re.MULTILINE):
        words = shlex.split(line, comments=True)
        command: click.Command = main
        while isinstance(command, click.Group):
            found = command.get_command(click.Context(command), words.pop(0))
            assert found is not None, line
            command = found
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= {option for parameter in command.params for option in parameter.opts}, line


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_target_that_a_document_names_exists(document):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_table_of_options_is_complete_and_right():
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \| (.*?) \|", README, re.MULTILINE)
    told: set[tuple[str, str]] = set()
    for options, of, default in rows:
        names = [name for group in of.split(", ") for name in COMMANDS_OF[group]]
        for name in names:
            for option in re.findall(r"`(--[\w-]+)`", options):
                told.add((name, option))
                parameter = options_of(name).get(option)
                value = parameter.default if parameter is not None else None
                if isinstance(value, int | float | str) and value:
                    assert str(value).removesuffix(".0") in default, (name, option)
    exist = {(name, option) for name in COMMANDS_OF["all"] for option in options_of(name)}
    assert exist <= told
    assert told - exist == {("serve", "--model")}  # an argument there


def test_every_refused_field_is_named():
    section = README.partition("## What it does not do")[2]
    refused = (*openai_schema._UNSUPPORTED, *responses_schema.UNSUPPORTED)
    assert all(f"`{field}`" in section for field in refused)


def test_the_metrics_that_are_named_are_the_metrics_that_there_are():
    text = GatewayMetrics(lambda: []).render().decode()
    exported = set(re.findall(r"^# TYPE (tandem_\w+) ", text, re.MULTILINE))
    named = set(re.findall(r"`(tandem_\w+)`", README))
    assert named == {name for name in exported if not name.endswith("_created")}


def test_the_labels_that_are_named_are_the_labels_that_metrics_have():
    metrics = GatewayMetrics(lambda: [])
    of_modules = [
        value for module in (store, block_feed, prefix_index, pulls) for value in vars(module).values()
    ]
    others = [value for value in of_modules if isinstance(value, Counter | Gauge | Histogram)]
    collectors = [*metrics._registry._collector_to_names, *others]
    labels = {c._name: set(c._labelnames) for c in collectors if hasattr(c, "_labelnames")}
    labels |= {family.name: set(family._labelnames) for c in collectors[:2] for family in c.collect()}
    rows = re.findall(r"^\| (`tandem_.*?) \|(.*?)\|", README, re.MULTILINE)
    assert len(rows) > 20
    for names, told in rows:
        for name in re.findall(r"`(\w+)`", names):
            assert labels[name.removesuffix("_total")] == set(filter(None, told.strip().split(", "))), name


def test_every_limit_has_the_value_that_the_table_says():
    rows = LIMIT.findall(ARCHITECTURE)
    assert len(rows) == ARCHITECTURE.partition("## Limits")[2].partition("\n## ")[0].count(".py` `")
    for value, path, name in rows:
        module = importlib.import_module(path.replace("/", "."))
        owner, _, field = name.rpartition(".")
        if owner:
            actual = inspect.signature(getattr(module, owner)).parameters[field].default
        else:
            actual = getattr(module, name)
        assert float(value) == actual, f"{path} {name}"
