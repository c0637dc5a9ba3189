"""Commands in any order, stale and repeated too: each stream ends with its own tokens, every block comes back."""

from hypothesis import given, settings
from hypothesis import strategies as st

from core.grant import FirstToken
from core.ids import HandoffId
from engine.messages import (
    AbortWork,
    Activate,
    AnyEvent,
    Credit,
    Quiet,
    Reserve,
    Reserved,
    WorkAborted,
    WorkFailed,
)
from tests.decode_service.rig import Rig, expected, id_of, reserve


class Story:
    """Any order of commands, as a gateway with several requests may send them, with stale and repeated ones."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.reserves: dict[HandoffId, Reserve] = {}
        self.grants: dict[HandoffId, Reserved] = {}
        self.num_aborts = self.num_answers = 0
        self.ended: set[HandoffId] = set()

    def reserve(
        self, number: int, kind: int, length: int, max_tokens: int, wait_s: float, credit: int, is_local: bool
    ) -> None:
        command = reserve(number, [kind] * length, max_tokens, wait_s, credit, is_local=is_local)
        command = self.reserves.setdefault(command.id, command)
        if not self.rig.tier._is_known(command.id):  # for the tier an id that has ended is a new one
            self.rig.tokens[command.id] = []
        self._see(self.rig.do(self.reserves[command.id]))

    def activate(self, number: int) -> None:
        reserved = self.grants.pop(id_of(number), None)
        if reserved is None:
            self._see(self.rig.do(Activate(id_of(number), [FirstToken(0, 0, 1, 0.0)])))
        else:
            self.rig.activate(self.reserves[id_of(number)], reserved)

    def credit(self, number: int, num_tokens: int) -> None:
        self._see(self.rig.do(Credit(id_of(number), num_tokens)))

    def abort(self, number: int, is_quiet: bool) -> None:
        self.num_aborts += 1
        self.grants.pop(id_of(number), None)
        self.ended.add(id_of(number))
        self._see(self.rig.do(AbortWork(id_of(number), is_quiet)))

    def quiet(self, number: int) -> None:
        self._see(self.rig.do(Quiet(id_of(number))))

    def step(self, count: int) -> None:
        for _ in range(count):
            self._see(self.rig.step())

    def fail(self) -> None:
        self.rig.runner.error = RuntimeError("told to")
        self.step(1)
        self.rig.runner.error = None

    def wait(self, duration_s: float) -> None:
        self.rig.clock.advance(duration_s)

    def _see(self, events: list[AnyEvent]) -> None:
        for event in events:
            match event:
                case Reserved():
                    self.grants[event.id] = event
                case WorkFailed():
                    self.ended.add(event.id)
                case WorkAborted():
                    self.num_answers += 1

    def finish(self) -> None:
        """Everything that may still happen does: writers fall quiet, readers take all, transfers succeed."""
        for number in range(5):
            self.quiet(number)
        for _ in range(300):
            for number in range(5):
                self.credit(number, 100)
                if id_of(number) in self.grants:
                    self.activate(number)
            self.step(1)
            self.wait(0.1)
            if self.rig.is_idle():
                return
        raise AssertionError("not done")

    def check_tokens(self) -> None:
        for handoff_id, tokens in self.rig.tokens.items():
            whole = expected(self.reserves[handoff_id])
            assert tokens == whole[: len(tokens)]


NUMBER = st.integers(0, 4)
ACTIONS = st.one_of(
    st.tuples(
        st.just(Story.reserve),
        NUMBER,
        st.integers(0, 1),
        st.integers(0, 60),
        st.integers(2, 60),
        st.sampled_from([0.0, 5.0]),
        st.sampled_from([0, 3, 256]),
        st.booleans(),
    ),
    st.tuples(st.just(Story.activate), NUMBER),
    st.tuples(st.just(Story.activate), NUMBER),
    st.tuples(st.just(Story.credit), NUMBER, st.integers(0, 9)),
    st.tuples(st.just(Story.abort), NUMBER, st.booleans()),
    st.tuples(st.just(Story.quiet), NUMBER),
    st.tuples(st.just(Story.step), st.integers(1, 5)),
    st.tuples(st.just(Story.fail)),
    st.tuples(st.just(Story.wait), st.sampled_from([1.0, 30.0])),
)


@given(actions=st.lists(ACTIONS, max_size=50), num_blocks=st.integers(6, 14), max_batch=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_in_any_order_of_commands_and_faults_each_stream_ends_with_its_own_tokens(
    actions, num_blocks, max_batch
):
    rig = Rig(num_blocks, 24, max_batch)
    story = Story(rig)
    for action, *arguments in actions:
        action(story, *arguments)
        story.check_tokens()
    story.finish()
    story.check_tokens()
    for handoff_id, command in story.reserves.items():
        assert handoff_id in story.ended or rig.tokens[handoff_id] == expected(command)
    assert story.num_answers == story.num_aborts


@given(actions=st.lists(ACTIONS, max_size=50), num_blocks=st.integers(6, 14), max_batch=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_aborting_everything_at_any_moment_leaves_every_block_free(actions, num_blocks, max_batch):
    rig = Rig(num_blocks, 24, max_batch)
    story = Story(rig)
    for action, *arguments in actions:
        action(story, *arguments)
    for number in range(5):
        story.abort(number, is_quiet=number % 2 == 0)
        story.quiet(number)
    assert rig.run() == []
    assert rig.is_idle()
