"""The smoke of `make serve`: start it as a user would, ask through every door, stop it: `python -m tests.smoke`."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
import openai

from proto import client_pb2 as pb
from proto import client_pb2_grpc

QUESTION = "What is the capital of France?"
START_TIMEOUT_S = 300.0


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        ready = Path(directory) / "ready.json"
        arguments = f"--http 127.0.0.1:0 --grpc 127.0.0.1:0 --ready-file {ready}"
        process = subprocess.Popen(["make", "serve", f"ARGS={arguments}"], start_new_session=True)
        try:
            addresses = wait_ready(process, ready)
            check("HTTP", ask_http(addresses["http"]))
            check("HTTP, streamed", ask_http_streamed(addresses["http"]))
            check("gRPC", ask_grpc(addresses["grpc"]))
        finally:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(60)
    return 0


def wait_ready(process: subprocess.Popen[bytes], ready: Path) -> dict[str, str]:
    until_s = time.monotonic() + START_TIMEOUT_S
    while not ready.exists():
        assert process.poll() is None, "make serve ended"
        assert time.monotonic() < until_s, "make serve did not become ready"
        time.sleep(0.1)
    return dict(json.loads(ready.read_text()))


def check(way: str, answer: str) -> None:
    sys.stdout.write(f"{way}: {answer!r}\n")
    assert "Paris" in answer, answer


def ask_http(url: str) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    messages = [{"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=32)
    return answer.choices[0].message.content or ""


def ask_http_streamed(url: str) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    messages = [{"role": "user", "content": QUESTION}]
    stream = client.chat.completions.create(
        model="smollm2", messages=messages, temperature=0, max_tokens=32, stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def ask_grpc(address: str) -> str:
    message = pb.ChatMessage(role="user", content=QUESTION)
    request = pb.GenerateRequest(chat=pb.Chat(messages=[message]), temperature=0, max_tokens=32)
    with grpc.insecure_channel(address) as channel:
        return str(client_pb2_grpc.TandemStub(channel).Generate(request).choices[0].text)


if __name__ == "__main__":
    sys.exit(main())
