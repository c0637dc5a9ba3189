"""Asking a gateway or a worker over gRPC whether it serves, and finding the address that others reach this host by:
what an orchestrator of containers needs. Knows nothing of requests."""

import asyncio
import socket
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.errors import Unavailable

DEFAULT_REDIS_PORT = 6379


async def check(address: str, timeout_s: float) -> None:
    """Returns when the server at host:port says SERVING. Raises Unavailable with the reason otherwise."""
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest()
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"{address}: {error.code().name}: {error.details()}") from error
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise Unavailable(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")


async def address_towards(redis_url: str) -> str:
    """The IPv4 address of the interface by which this host reaches Redis, where the whole cluster meets: right in a
    container, in a pod and on a host with several networks. Sends nothing. Raises ValueError when `redis_url` names
    no host, OSError when the name does not resolve."""
    parts = urlsplit(redis_url)
    if not parts.hostname:
        raise ValueError(f"--advertise auto needs a Redis with a host name, not {redis_url}")
    loop = asyncio.get_running_loop()
    port = parts.port or DEFAULT_REDIS_PORT
    try:
        found = await loop.getaddrinfo(parts.hostname, port, family=socket.AF_INET, type=socket.SOCK_DGRAM)
    except socket.gaierror as error:
        raise OSError(error.errno, f"cannot resolve {parts.hostname}: {error.strerror}") from error
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(found[0][4])
        address: str = probe.getsockname()[0]
    return address
