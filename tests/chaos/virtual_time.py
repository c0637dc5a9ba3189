"""An event loop whose time is virtual: it stands still while anything can run and jumps to the next timer when
nothing can. Work for threads runs inline. When nothing can ever happen again, that is a deadlock and raises."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Deadlock(Exception):
    """Nothing is ready and no timer is set, yet the main task has not ended."""


class _InlineExecutor(ThreadPoolExecutor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - it belongs to the future
            future.set_exception(error)
        return future


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: what would have been waited for is added to the loop's time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_rounds = 0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.num_rounds += 1
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise Deadlock
            self.now_s += max(timeout, 0.0)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.virtual = _JumpingSelector()
        super().__init__(self.virtual)
        self.set_default_executor(_InlineExecutor(1))

    def time(self) -> float:
        return self.virtual.now_s


def run_virtually(main: Coroutine[Any, Any, Any]) -> Any:
    """The result of `main`, however much virtual time it takes."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
