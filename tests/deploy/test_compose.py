"""docker-compose.yml without a container engine: it validates, and its services, started as plain processes with the
very commands and environment that it gives them, serve."""

import asyncio
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import pytest_asyncio
import yaml

from cluster.valkey import EmbeddedValkey, valkey_binary
from core.child import dying_with_parent, free_port
from engine.testing import make_tiny_model
from proto import client_pb2 as pb
from proto import client_pb2_grpc
from tandem.testing import POLL_S, START_TIMEOUT_S, ManagedProcess

FILE = Path(__file__).parents[2] / "docker-compose.yml"
OURS = ("prefill", "decode", "gateway")
REPLICAS = {"prefill": 2, "decode": 2, "gateway": 1}
MODEL_ID = "tiny"
PUBLISHED = {"gateway": ["50051", "8000"], "grafana": ["3000"]}
# With this geometry 1 GiB holds about as many blocks as the default model's.
LARGE_BLOCKS = {"num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 64}


def read_compose(variables: Mapping[str, str]) -> dict[str, Any]:
    """The file with `${NAME:-default}` filled in from `variables` alone."""
    text = re.sub(
        r"\$\{(\w+):-([^}]*)\}", lambda m: variables.get(m[1], m[2]), FILE.read_text(encoding="utf-8")
    )
    content: dict[str, Any] = yaml.safe_load(text)
    return content


@dataclass
class Composed:
    """The running services."""

    processes: list[ManagedProcess] = field(default_factory=list)
    redis_url: str = ""
    http: str = ""
    grpc: str = ""
    healthchecks: dict[str, list[str]] = field(default_factory=dict)

    def logs(self) -> str:
        return "\n".join(f"--- {process.name}\n{process.tail()}" for process in self.processes)

    async def workers(self) -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=self.http) as client:
            found: list[dict[str, Any]] = (await client.get("/cluster")).raise_for_status().json()["workers"]
        return found

    async def wait_workers(self, num_workers: int) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while True:
                    assert all(process.process.returncode is None for process in self.processes), self.logs()
                    try:
                        if sum(worker["is_up"] for worker in await self.workers()) == num_workers:
                            return
                    except httpx.TransportError:
                        pass  # the gateway does not listen yet
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            pytest.fail(f"not all workers came up\n{self.logs()}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def composed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Composed]:
    directory = tmp_path_factory.mktemp("compose")
    model = make_tiny_model(directory / MODEL_ID, **LARGE_BLOCKS)
    services = read_compose({"TANDEM_MODEL": str(model)})["services"]
    async with AsyncExitStack() as stack:
        valkey = await EmbeddedValkey.start()
        stack.push_async_callback(valkey.stop)
        running = Composed(redis_url=valkey.url)
        # Everything in which a process here differs from a container there: each container has its own address.
        replaced = {
            "redis://redis:6379/0": valkey.url,
            "0.0.0.0:8000": f"127.0.0.1:{free_port()}",
            "0.0.0.0:50051": f"127.0.0.1:{free_port()}",
            "0.0.0.0:50052": "127.0.0.1:0",
            "50053": "0",
        }
        running.http = f"http://{replaced['0.0.0.0:8000']}"
        running.grpc = replaced["0.0.0.0:50051"]
        for service in OURS:
            arguments = [replaced.get(argument, argument) for argument in services[service]["command"]]
            environment = {k: replaced.get(v, v) for k, v in services[service]["environment"].items()}
            running.healthchecks[service] = services[service]["healthcheck"]["test"]
            for index in range(REPLICAS[service]):
                process = ManagedProcess(f"{service}-{index}", arguments, directory, environment)
                await process.start()
                running.processes.append(process)
                stack.push_async_callback(process.kill)
        await running.wait_workers(REPLICAS["prefill"] + REPLICAS["decode"])
        yield running


@pytest.mark.asyncio(loop_scope="module")
async def test_scaled_services_answer_openai_clients(composed):
    async with openai.AsyncOpenAI(base_url=f"{composed.http}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model=MODEL_ID,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=8,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8


@pytest.mark.asyncio(loop_scope="module")
async def test_scaled_services_answer_grpc_clients_and_hand_over_by_tcp(composed):
    prompt = pb.TokenIds(ids=range(40))
    request = pb.GenerateRequest(token_ids=prompt, max_tokens=8, temperature=0, ignore_eos=True)
    async with grpc.aio.insecure_channel(composed.grpc) as channel:
        answer = await client_pb2_grpc.TandemStub(channel).Generate(request)
    (choice,) = answer.choices
    assert len(choice.token_ids) == 8
    assert choice.timing.connector == "tcp"
    assert choice.timing.kv_bytes > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_every_replica_registers_an_address_of_its_own(composed):
    workers = await composed.workers()
    roles = sorted(worker["record"]["role"] for worker in workers)
    assert roles == ["decode"] * REPLICAS["decode"] + ["prefill"] * REPLICAS["prefill"]
    assert len({worker["record"]["address"] for worker in workers}) == len(workers)
    assert all(worker["record"]["address"].startswith("127.0.0.1:") for worker in workers)


@pytest.mark.asyncio(loop_scope="module")
async def test_healthchecks_tell_who_serves(composed):
    async def status(service: str, address: str) -> int:
        kind, _, *arguments, _ = composed.healthchecks[service]
        assert (kind, arguments) == ("CMD", ["-m", "tandem.cli", "health"])
        process = ManagedProcess(
            f"health-of-{service}", ["health", address], composed.processes[0].log.parent, {}
        )
        await process.start()
        return await process.process.wait()

    worker = (await composed.workers())[0]["record"]
    assert await status("gateway", composed.grpc) == 0
    assert await status(worker["role"], worker["address"]) == 0
    assert await status("gateway", f"127.0.0.1:{free_port()}") == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_services_stop_cleanly_on_request(composed):
    """The last test of this module: the gateway first, as compose does."""
    for process in reversed(composed.processes):
        assert await process.stop() == 0, process.tail()


@pytest.mark.parametrize("service", OURS)
def test_service_runs_a_command_with_options_that_exist(service, check_command):
    check_command(read_compose({})["services"][service]["command"])


def test_services_can_be_scaled_and_what_is_published_is_on_loopback():
    content = read_compose({})
    assert "name" not in content
    assert "version" not in content
    for name, service in content["services"].items():
        assert "container_name" not in service
        assert name in PUBLISHED or "ports" not in service
        assert name in PUBLISHED or service["networks"] == ["workers"]
    assert content["networks"]["workers"] == {"internal": True}
    for name, ports in PUBLISHED.items():
        published = content["services"][name]["ports"]
        assert all(port.startswith("127.0.0.1:") for port in published)
        assert sorted(port.rpartition(":")[2] for port in published) == ports


def test_what_observes_starts_only_on_request_and_finds_its_files():
    services = read_compose({})["services"]
    assert {name for name, spec in services.items() if "profiles" in spec} == {"prometheus", "grafana"}
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["observe"]
        for volume in services[name]["volumes"]:
            assert (FILE.parent / volume.partition(":")[0]).exists(), volume


@pytest.mark.parametrize("service", OURS)
def test_service_is_watched_restarted_and_given_time_to_drain(service):
    spec = read_compose({})["services"][service]
    assert spec["restart"] == "unless-stopped"
    assert spec["healthcheck"]["test"][0] == "CMD"
    options = dict(zip(spec["command"][1::2], spec["command"][2::2], strict=True))
    assert float(spec["stop_grace_period"].removesuffix("s")) > float(options.get("--drain", 20))
    listening = {value.rpartition(":")[2] for value in options.values() if value.startswith("0.0.0.0:")}
    assert spec["healthcheck"]["test"][-1].removeprefix("127.0.0.1:") in listening


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
def test_docker_compose_accepts_the_file_and_reads_it_as_we_do():
    done = subprocess.run(
        ["docker-compose", "-f", str(FILE), "--profile", "observe", "config"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    theirs, ours = yaml.safe_load(done.stdout)["services"], read_compose({})["services"]
    assert set(theirs) == set(ours)
    for name, service in ours.items():
        assert theirs[name].get("command") == service.get("command")
        assert theirs[name].get("environment") == service.get("environment")


async def test_redis_starts_with_the_options_it_is_given(tmp_path):
    server, *options = read_compose({})["services"]["redis"]["command"]
    assert server == "valkey-server"
    here = ["--bind", "127.0.0.1", "--port", str(free_port()), "--dir", str(tmp_path)]
    process = await asyncio.create_subprocess_exec(
        *dying_with_parent([str(valkey_binary()), *options, *here]), stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(10):
            lines = [line async for line in _until_ready(process)]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    assert "Ready to accept connections" in lines[-1], lines


async def _until_ready(process: asyncio.subprocess.Process) -> AsyncIterator[str]:
    assert process.stdout is not None
    async for line in process.stdout:
        yield line.decode()
        if b"Ready to accept" in line:
            return
