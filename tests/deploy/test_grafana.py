"""Dashboard and alert rules against what a real gateway renders: every metric that an expression names is there, with
every label that it uses. Prometheus itself is not run."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
import pytest_asyncio
import yaml

from engine.testing import make_tiny_model
from gateway.metrics import GatewayMetrics
from proto import client_pb2 as pb
from proto import client_pb2_grpc
from tandem.testing import LocalCluster

FOLDER = Path(__file__).parents[2] / "deploy/grafana"
DASHBOARD = json.loads((FOLDER / "tandem.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))
SELECTOR = re.compile(r"(tandem_\w+)(?:\{(.*?)\})?")
GROUPING = re.compile(r"\bby \((.*?)\)")
SUFFIXES = ("_bucket", "_sum", "_count", "_total")


def panels() -> list[dict]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """Each with where it stands."""
    for panel in panels():
        for target in panel["targets"]:
            yield f"panel {panel['title']}", target["expr"]
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rendered(tmp_path_factory) -> AsyncIterator[str]:
    """After a request, so that what has labels has samples."""
    model = make_tiny_model(tmp_path_factory.mktemp("grafana") / "tiny")
    arguments = ("--dtype", "float32", "--num-blocks", "64")
    async with LocalCluster(model, worker_arguments=arguments) as cluster:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(20)), max_tokens=4, ignore_eos=True)
        async with grpc.aio.insecure_channel(cluster.grpc) as channel:
            await client_pb2_grpc.TandemStub(channel).Generate(request)
        await cluster.wait_idle()
        async with httpx.AsyncClient(base_url=cluster.http) as http:
            yield (await http.get("/metrics")).text


def labels_by_metric(text: str) -> dict[str, set[str]]:
    """The labels of every metric by its family's name: of samples, or as declared where there is none yet."""
    found: dict[str, set[str]] = {
        re.sub("_total$", "", name): set()
        for name in re.findall(r"^# TYPE (tandem_\w+) ", text, re.MULTILINE)
    }
    for name, labels in re.findall(r"^(tandem_\w+)\{(.*)\} ", text, re.MULTILINE):
        found.setdefault(family(name, found), set()).update(re.findall(r'(\w+)="', labels))
    declared = [*GatewayMetrics(list)._registry._collector_to_names]
    from cluster.store import FAILURES

    for collector in (*declared, FAILURES):
        if labels := getattr(collector, "_labelnames", ()):
            found[collector._name].update(labels)
    return found


def family(name: str, known: dict[str, set[str]]) -> str:
    for suffix in SUFFIXES:
        if name.removesuffix(suffix) in known:
            return name.removesuffix(suffix)
    return name


@pytest.mark.asyncio(loop_scope="module")
async def test_every_expression_names_metrics_and_labels_that_there_are(rendered):
    known = labels_by_metric(rendered)
    used: set[str] = set()
    for place, expression in expressions():
        metrics = SELECTOR.findall(expression)
        assert metrics or expression.startswith("up{"), place
        labels: set[str] = set()
        for name, matchers in metrics:
            base = family(name, known)
            assert base in known, f"{place}: {name}"
            used.add(base)
            labels |= known[base]
            asked = set(re.findall(r"(\w+)(?==|!|~)", matchers.replace('"', " ")))
            assert asked <= known[base], f"{place}: {name} has no {asked - known[base]}"
        grouped = {label.strip() for by in GROUPING.findall(expression) for label in by.split(",")}
        assert grouped - {""} <= labels | {"le"}, f"{place}: {grouped} of {labels}"
    assert len(used) > 25


@pytest.mark.asyncio(loop_scope="module")
async def test_a_counter_or_a_histogram_is_never_taken_for_a_gauge(rendered):
    kinds = dict(re.findall(r"^# TYPE (tandem_\w+) (\w+)$", rendered, re.MULTILINE))
    for place, expression in expressions():
        for name, _ in SELECTOR.findall(expression):
            base = name if name in kinds else re.sub("_(bucket|sum|count)$", "", name)
            is_read_as_rate = re.search(rf"(?:rate|increase)\({name}", expression) is not None
            assert is_read_as_rate == (kinds[base] != "gauge"), f"{place}: {name} is a {kinds[base]}"


@pytest.mark.parametrize(("place", "expression"), list(expressions()))
def test_parentheses_and_quotes_are_closed(place, expression):
    for opening, closing in ("()", "{}", "[]"):
        assert expression.count(opening) == expression.count(closing), place
    assert expression.count('"') % 2 == 0, place


def test_rules_say_how_bad_it_is_and_what_it_means():
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 10
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"].endswith(".")
        assert re.fullmatch(r"\d+[sm]", rule["for"])


def test_panels_do_not_overlap_and_are_numbered_once():
    places = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & places, panel["title"]
        places |= cells
    assert max(x for x, _ in places) < 24
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_what_is_scraped_and_provisioned_is_what_compose_mounts():
    compose = yaml.safe_load((FOLDER.parents[1] / "docker-compose.yml").read_text(encoding="utf-8"))
    mounts = {
        inside: source.removeprefix("./deploy/grafana/")
        for name in ("prometheus", "grafana")
        for source, inside, _ in (volume.split(":") for volume in compose["services"][name]["volumes"])
    }
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    assert [mounts[path] for path in config["rule_files"]] == ["alerts.yml"]
    (job,) = config["scrape_configs"]
    assert job["job_name"] in ALERTS["groups"][0]["rules"][0]["expr"]
    (target,) = job["static_configs"][0]["targets"]
    assert target == "gateway:8000"
    provider = yaml.safe_load((FOLDER / "provisioning/dashboards/tandem.yml").read_text(encoding="utf-8"))
    folder = provider["providers"][0]["options"]["path"]
    assert mounts[f"{folder}/tandem.json"] == "tandem.json"
    sources = yaml.safe_load((FOLDER / "provisioning/datasources/prometheus.yml").read_text(encoding="utf-8"))
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"
