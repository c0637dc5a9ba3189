"""What an orchestrator asks: who serves, and under which address a worker can be reached."""

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from core.child import free_port
from core.errors import Unavailable
from tandem.cli import main
from tandem.health import address_towards, check


async def test_health_follows_what_the_server_says():
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        await check(address, timeout_s=5)
        await servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        with pytest.raises(Unavailable, match="NOT_SERVING"):
            await check(address, timeout_s=5)
    finally:
        await server.stop(None)


def test_health_command_of_a_server_that_is_not_there_exits_with_1():
    result = CliRunner().invoke(main, ["health", f"127.0.0.1:{free_port()}"])
    assert result.exit_code == 1
    assert "UNAVAILABLE" in result.output


async def test_address_towards_redis_is_that_of_the_interface_in_between():
    assert await address_towards("redis://localhost:6379/0") == "127.0.0.1"
    assert await address_towards("rediss://:secret@127.0.0.2") == "127.0.0.1"


async def test_address_towards_needs_a_host_that_exists():
    with pytest.raises(ValueError, match="host name"):
        await address_towards("unix:///run/redis.sock")
    with pytest.raises(OSError, match=r"cannot resolve nowhere\.invalid"):
        await address_towards("redis://nowhere.invalid:6379")


def test_worker_that_cannot_tell_its_address_is_a_configuration_mistake():
    result = CliRunner().invoke(
        main, ["decode", "--advertise", "auto", "--redis-url", "unix:///run/redis.sock"]
    )
    assert result.exit_code == 2
    assert result.output.startswith("tandem: --advertise auto needs")
