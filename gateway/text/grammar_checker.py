"""Judges what clients ask of an output's form before any work is done for them, in a process of its own
(gateway.text.grammar_child). Knows no protocol."""

import asyncio
import contextlib
import signal
import sys
from collections import OrderedDict
from pathlib import Path

from core.child import dying_with_parent
from core.errors import Busy, EngineFailed, InvalidRequest
from gateway.text.grammar import FormKind, OutputForm
from gateway.text.grammar_child import CPU_LIMIT_S, HEADER, Verdict, decode_verdict, encode

ANSWER_LIMIT_S = 10.0
"""Of the clock: a child that got no processor time to spend is no fault of the form that it has."""
START_LIMIT_S = 60.0
ALL_CHOICES_LIMIT_S = 2 * CPU_LIMIT_S
MAX_WAITING = 64
MAX_REMEMBERED_CHARACTERS = 8 << 20
MAX_CHILDREN = 2
"""That one form may cost: a second one when the first was killed by somebody else."""
_BEYOND = "cannot be compiled within the limits"
_ENDS = {
    -signal.SIGPROF: f"takes longer than {CPU_LIMIT_S:g} s to compile",
    -signal.SIGSEGV: "is nested too deeply",
    -signal.SIGABRT: _BEYOND,
}
"""What a child's end says of the form that it had. Any other end may have come before the form did."""


class GrammarChecker:
    """One per gateway. Starts its child with the first form that it does not know, and again after one that was the
    child's last; close() ends it. Verdicts are remembered, but for those that cost a child its life."""

    def __init__(self, model: Path) -> None:
        self._command = (sys.executable, "-m", "gateway.text.grammar_child", str(model))
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._known = _Verdicts()

    async def check(self, form: OutputForm, num_choices: int = 1) -> str:
        """The form's grammar, which an engine compiles for each choice. Raises InvalidRequest naming its field when
        it has none within the limits, or the model none at all; Busy when too many forms wait to be judged;
        EngineFailed when none can be."""
        verdict = self._known.get(form)
        if verdict is None:
            verdict = await self._wait_turn(form)
        if verdict.error:
            raise InvalidRequest(form.field, f"{form.field}: {verdict.error}")
        if num_choices > 1 and verdict.cpu_s * num_choices > ALL_CHOICES_LIMIT_S:
            message = f"takes {verdict.cpu_s:.2g} s to compile, too long for {num_choices} choices"
            raise InvalidRequest(form.field, f"{form.field}: {message}")
        return verdict.grammar

    async def close(self) -> None:
        if self._child is not None:
            await self._end(self._child)

    async def _wait_turn(self, form: OutputForm) -> Verdict:
        if self._num_waiting >= MAX_WAITING:
            raise Busy("too many grammars wait to be compiled")
        self._num_waiting += 1
        try:
            async with self._turn:
                return self._known.get(form) or await self._judge(form)
        finally:
            self._num_waiting -= 1

    async def _judge(self, form: OutputForm) -> Verdict:
        """Ask the child; whatever ends it, or this wait, leaves none that owes an answer."""
        for _ in range(MAX_CHILDREN):
            child = self._child or await self._start(form.field)
            try:
                async with asyncio.timeout(ANSWER_LIMIT_S):
                    verdict = await _ask(child, form)
            except (ConnectionError, asyncio.IncompleteReadError):
                if reason := _ENDS.get(await self._end(child)):
                    return Verdict(error=reason)
            except TimeoutError:
                await self._end(child)
                break
            except asyncio.CancelledError:
                await self._end(child)
                raise
            else:
                self._known.add(form, verdict)
                return verdict
        return Verdict(error=_BEYOND)

    async def _start(self, field: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        command = dying_with_parent(self._command)
        child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                verdict: Verdict | None = await _read(child)
        except (TimeoutError, asyncio.IncompleteReadError):
            verdict = None
        except asyncio.CancelledError:
            await self._end(child)
            raise
        if verdict is None or verdict.error:
            await self._end(child)
            if verdict is None:
                raise EngineFailed("the process that compiles grammars does not start")
            raise InvalidRequest(field, f"{field}: {verdict.error}")
        self._child = child
        return child

    async def _end(self, child: asyncio.subprocess.Process) -> int:
        """Its exit status: why it ended, if it had already."""
        self._child = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(
                0.2
            ):  # its end of the pipe closes a little before it can be waited for
                return await child.wait()
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        return await child.wait()


class _Verdicts:
    """The latest used, as many as have MAX_REMEMBERED_CHARACTERS together."""

    def __init__(self) -> None:
        self._by_form: OrderedDict[tuple[FormKind, str], Verdict] = OrderedDict()
        self._size = 0

    def get(self, form: OutputForm) -> Verdict | None:
        key = (form.kind, form.text)
        if key in self._by_form:
            self._by_form.move_to_end(key)
        return self._by_form.get(key)

    def add(self, form: OutputForm, verdict: Verdict) -> None:
        self._by_form[form.kind, form.text] = verdict
        self._size += len(form.text) + len(verdict.grammar)
        while self._size > MAX_REMEMBERED_CHARACTERS:
            (_, text), dropped = self._by_form.popitem(last=False)
            self._size -= len(text) + len(dropped.grammar)


async def _ask(child: asyncio.subprocess.Process, form: OutputForm) -> Verdict:
    assert child.stdin is not None
    child.stdin.write(encode(form))
    await child.stdin.drain()
    return await _read(child)


async def _read(child: asyncio.subprocess.Process) -> Verdict:
    assert child.stdout is not None
    (length,) = HEADER.unpack(await child.stdout.readexactly(HEADER.size))
    return decode_verdict(await child.stdout.readexactly(length))
