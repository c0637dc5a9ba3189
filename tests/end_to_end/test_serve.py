"""`tandem serve` as a user runs it: one command, everything up, nothing left afterwards."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from tests.end_to_end.served import TIMEOUT_S, serve


async def complete(url: str) -> str:
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0}
        answer = await client.post("/v1/completions", json=body)
        return answer.raise_for_status().json()["choices"][0]["text"]


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


async def test_ctrl_c_stops_everything_with_status_0(tiny_model, tmp_path):
    async with serve(tiny_model, tmp_path) as (process, addresses):
        assert set(addresses) == {"http", "grpc", "redis_url", "pids"}
        assert await complete(addresses["http"])
        children = descendants(process.pid)
        assert len(children) == 6  # valkey, gateway, two services with an engine each
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(TIMEOUT_S):
            assert await process.wait() == 0
        assert not [child for child in children if child.is_running()]
    assert "Ctrl-C stops everything" in (tmp_path / "log").read_text()


async def test_a_child_that_dies_is_reported_and_started_again(tiny_model, tmp_path):
    async with serve(tiny_model, tmp_path) as (process, addresses):
        before = await complete(addresses["http"])
        for pid in addresses["pids"][:-1]:  # both workers; the gateway holds the port that is asked
            os.kill(pid, signal.SIGKILL)
        valkey = next(child for child in descendants(process.pid) if child.name().startswith("valkey"))
        valkey.kill()
        async with asyncio.timeout(TIMEOUT_S):
            while await is_ready(addresses["http"]):
                await asyncio.sleep(0.05)
            while not await is_ready(addresses["http"]):
                await asyncio.sleep(0.05)
        assert await complete(addresses["http"]) == before
        log = (tmp_path / "log").read_text()
        for name in ("prefill-0", "decode-0", "valkey"):
            assert f"{name} (pid" in log
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(TIMEOUT_S):
            assert await process.wait() == 0


async def is_ready(url: str) -> bool:
    async with httpx.AsyncClient(base_url=url) as client:
        return (await client.get("/ready")).status_code == 200


async def test_a_killed_launcher_takes_its_children_with_it(tiny_model, tmp_path):
    async with serve(tiny_model, tmp_path) as (process, _):
        children = descendants(process.pid)
        process.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, 10)
        assert not alive


async def test_a_configuration_mistake_is_one_line_and_status_2(tmp_path):
    async def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "tandem.cli", *arguments]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        return process.returncode or 0, output.decode()

    status, output = await run("serve", str(tmp_path / "nowhere"))
    assert status == 2
    assert output.count("\n") == 1 and "nowhere" in output
    status, output = await run("prefill", "--connector", "pigeon")
    assert status == 2
    assert "pigeon" in output and "shm" in output
    status, output = await run("decode", "--block-size", "7")
    assert status == 2 and "block_size" in output


async def test_ports_are_on_loopback_only(tiny_model, tmp_path):
    async with serve(tiny_model, tmp_path) as (process, _):
        listening = [
            connection
            for child in [psutil.Process(process.pid), *descendants(process.pid)]
            for connection in child.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening
        assert {connection.laddr.ip.removeprefix("::ffff:") for connection in listening} == {"127.0.0.1"}


async def test_the_gateway_process_has_no_torch(tiny_model, tmp_path):
    async with serve(tiny_model, tmp_path) as (_, addresses):
        await complete(addresses["http"])
        maps = await asyncio.to_thread(Path(f"/proc/{addresses['pids'][-1]}/maps").read_text)
        assert "torch" not in maps
        assert "tokenizers" in maps


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
async def test_what_an_engine_finds_missing_as_it_loads_ends_everything_with_one_line(tiny_model, tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-m", "tandem.cli", "serve", str(tiny_model), "--device", "cuda"]
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *command, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", stdout=sink, stderr=sink
        )
    async with asyncio.timeout(TIMEOUT_S):
        assert await process.wait() == 2
    assert "torch finds no GPU here" in log.read_text()
    assert "Traceback" not in log.read_text()
