"""The files under deploy/ without a container engine: what they copy exists and suffices, what they run is a command
of ours with options that it has, and the manifests fit together."""

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
IMAGES = {
    "Dockerfile.gateway": ("tandem.cli", "gateway.main", "tandem.health"),
    "Dockerfile.worker": (
        "tandem.cli",
        "prefill_service.main",
        "prefill_service.worker",
        "decode_service.main",
        "decode_service.worker",
        "engine.build",
        "kernels.cpu.build",
        "tandem.health",
    ),
}


def copied(dockerfile: str) -> list[str]:
    """Every path of the checkout that the file copies."""
    lines = (ROOT / "deploy" / dockerfile).read_text(encoding="utf-8").splitlines()
    return [source for line in lines if line.startswith("COPY ") for source in shlex.split(line)[1:-1]]


def is_sent_to_the_builder(path: str) -> bool:
    """What .dockerignore says of a top-level path: the last pattern that fits wins."""
    patterns = [
        line
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line[:1] not in ("", "#")
    ]
    fitting = [pattern for pattern in patterns if fnmatch.fnmatch(path, pattern.removeprefix("!"))]
    return not fitting or fitting[-1].startswith("!")


@pytest.mark.parametrize("dockerfile", IMAGES)
def test_image_copies_what_is_there_and_nothing_that_is_ignored(dockerfile):
    assert copied(dockerfile)
    for path in copied(dockerfile):
        assert (ROOT / path).exists(), path
        assert is_sent_to_the_builder(path), path
    assert not is_sent_to_the_builder(".git")
    assert not is_sent_to_the_builder(".venv")


@pytest.mark.parametrize("dockerfile", IMAGES)
def test_image_holds_every_package_that_its_commands_import(dockerfile, tmp_path):
    for path in copied(dockerfile):
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, tmp_path / path, ignore=shutil.ignore_patterns("__pycache__"))
    places = [str(tmp_path), sysconfig.get_path("purelib")]
    imports = ", ".join(IMAGES[dockerfile])
    code = f"import sys; sys.path += {places!r}; import {imports}"
    # -I -S: neither this checkout nor its editable install is on the path.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dockerfile", IMAGES)
def test_image_runs_as_an_ordinary_user_from_a_pinned_base(dockerfile):
    text = (ROOT / "deploy" / dockerfile).read_text(encoding="utf-8")
    assert re.search(r"^FROM python:3\.11\.\d+-slim-bookworm$", text, re.MULTILINE)
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["tandem"]
    assert all("--no-cache-dir" in line for line in text.splitlines() if "pip install" in line)


def documents() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        yield from yaml.safe_load_all(path.read_text(encoding="utf-8"))


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {entry["metadata"]["name"]: entry for entry in documents() if entry["kind"] == kind}


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    (only,) = deployment["spec"]["template"]["spec"]["containers"]
    return only


TIERS = ["tandem-decode", "tandem-gateway", "tandem-prefill"]


def test_there_is_a_deployment_for_each_tier():
    assert sorted(named("Deployment")) == sorted([*TIERS, "tandem-redis"])


@pytest.mark.parametrize("tier", TIERS)
def test_deployment_runs_a_command_with_options_that_exist_and_variables_that_are_set(tier, check_command):
    spec = container(named("Deployment")[tier])
    check_command(spec["args"])
    variables = set(named("ConfigMap")["tandem"]["data"]) | {entry["name"] for entry in spec.get("env", [])}
    used = {name for argument in spec["args"] for name in re.findall(r"\$\((\w+)\)", argument)}
    assert used <= variables
    assert spec["envFrom"] == [{"configMapRef": {"name": "tandem"}}]


@pytest.mark.parametrize("tier", TIERS)
def test_deployment_listens_on_the_ports_it_declares_and_is_probed(tier):
    spec = container(named("Deployment")[tier])
    listening = {
        int(port)
        for argument in spec["args"]
        for port in re.findall(r"(?:0\.0\.0\.0:|port=)(\d+)$", argument)
    }
    ports = {entry["name"]: entry["containerPort"] for entry in spec["ports"]}
    assert listening == set(ports.values())
    for probe in ("readinessProbe", "livenessProbe"):
        (check,) = [value for key, value in spec[probe].items() if key in ("grpc", "httpGet", "tcpSocket")]
        assert check["port"] in {*ports, *ports.values()}


@pytest.mark.parametrize("tier", TIERS)
def test_deployment_gives_time_to_drain_and_drops_privileges(tier):
    deployment = named("Deployment")[tier]
    drain_s = next(
        (float(a.partition("=")[2]) for a in container(deployment)["args"] if a.startswith("--drain=")), 20
    )
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > drain_s
    security = container(deployment)["securityContext"]
    assert security["runAsNonRoot"] and not security["allowPrivilegeEscalation"]


def test_labels_selectors_services_and_policies_fit_together():
    labels = {
        name: entry["spec"]["template"]["metadata"]["labels"] for name, entry in named("Deployment").items()
    }
    for name, deployment in named("Deployment").items():
        assert deployment["spec"]["selector"]["matchLabels"] == labels[name]
    for name, service in named("Service").items():
        assert service["spec"]["selector"] == labels[name]
        targets = {entry["name"] for entry in container(named("Deployment")[name])["ports"]}
        assert {entry["targetPort"] for entry in service["spec"]["ports"]} == targets
    for name, policy in named("NetworkPolicy").items():
        assert policy["spec"]["podSelector"]["matchLabels"] == labels[name]


def test_sessions_and_transfers_are_open_to_the_right_tier_only():
    def sources(name: str) -> dict[int, list[str]]:
        rules = named("NetworkPolicy")[name]["spec"]["ingress"]
        return {
            port["port"]: [peer["podSelector"]["matchLabels"].get("tier", "any") for peer in rule["from"]]
            for rule in rules
            for port in rule["ports"]
        }

    for tier in ("tandem-prefill", "tandem-decode"):
        assert sources(tier) == {50052: ["gateway"], 50053: ["prefill", "decode"]}
    assert sources("tandem-redis") == {6379: ["any"]}
