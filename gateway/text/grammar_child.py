"""The process that judges grammars: what is pathological may cost it its life, and nothing else. Knows no requests.

    python -m gateway.text.grammar_child MODEL

    in   [ u32 length | JSON: field, kind, text ] ...      out  [ u32 length | JSON: grammar or error ] ...

Says an empty object first, when the vocabulary is loaded. Each grammar has CPU_LIMIT_S of processor time, a stack of
CHECK_STACK_BYTES and MEMORY_BYTES; beyond any of them the process ends (SIGPROF, SIGSEGV, SIGABRT).
"""

import json
import resource
import signal
import struct
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from llguidance import LLTokenizer

from core.errors import InvalidRequest, TandemError
from gateway.text.grammar import FormKind, OutputForm, to_grammar
from tokenizer.files import load_tokenizer_files
from tokenizer.grammar import CHECK_STACK_BYTES, build_tokenizer, compile_grammar

CPU_LIMIT_S = 1.0
MEMORY_BYTES = 2 << 30
HEADER = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one form: its grammar and the processor time that compiling it took, or why there is none. Of the
    vocabulary: nothing, or why there are no grammars."""

    grammar: str = ""
    error: str = ""
    cpu_s: float = 0.0


def encode(message: OutputForm | Verdict) -> bytes:
    body = json.dumps(asdict(message)).encode()
    return HEADER.pack(len(body)) + body


def decode_verdict(body: bytes) -> Verdict:
    return Verdict(**json.loads(body))


def judge(tokenizer: LLTokenizer, form: OutputForm) -> Verdict:
    began_s = time.process_time()
    try:
        grammar = to_grammar(form)
        compile_grammar(tokenizer, grammar)
    except InvalidRequest as error:
        return Verdict(error=str(error))
    return Verdict(grammar, cpu_s=time.process_time() - began_s)


def _serve(tokenizer: LLTokenizer, source: BinaryIO, sink: BinaryIO) -> None:
    while header := source.read(HEADER.size):
        fields = json.loads(source.read(HEADER.unpack(header)[0]))
        form = OutputForm(fields["field"], FormKind(fields["kind"]), fields["text"])
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
        verdict = judge(tokenizer, form)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(encode(verdict))
        sink.flush()


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sink = sys.stdout.buffer
    try:
        tokenizer = build_tokenizer(load_tokenizer_files(Path(sys.argv[1])))
    except TandemError as error:
        sink.write(encode(Verdict(error=str(error))))
        return 2
    sink.write(encode(Verdict()))
    sink.flush()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(CHECK_STACK_BYTES)
    worker = threading.Thread(target=_serve, args=(tokenizer, sys.stdin.buffer, sink))
    worker.start()
    worker.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
