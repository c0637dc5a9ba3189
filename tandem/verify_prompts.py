"""What `tandem verify` asks: prompts at the edges of blocks, long ones, chats, shared prefixes. Data only."""

from dataclasses import dataclass

from core.block_hash import HASH_BLOCK_TOKENS as BLOCK
from core.sampling import SamplingParams
from gateway.text.chat import Chat, Message
from gateway.text.tokenizer import TextTokenizer

NUM_OUTPUTS = 48
SEEDED_TEMPERATURE = 0.8

_PASSAGE = (
    "A ferry leaves the northern harbour at seven each morning, carrying bread, letters and a few sleepy people to "
    "the island. The captain knows every rock on the way, and tells new passengers about the winter when the sea "
    "froze and the post had to walk. On the island there is one road, two shops and a school with eleven pupils. "
    "Whoever arrives is asked the same three questions: how was the crossing, how long will you stay, and do you "
    "play an instrument? Most answer the last one with a laugh, and are handed a drum on Saturday anyway. "
)
_QUESTIONS = (
    "What is the capital of France?",
    "Explain in one sentence why the sky is blue.",
    "Write a short poem about a lighthouse.",
    "List three uses of a brick.",
)
_CHATS = (
    [
        ("user", "My name is Ada."),
        ("assistant", "Hello Ada, nice to meet you."),
        ("user", "What is my name?"),
    ],
    [
        ("system", "Answer in one short sentence."),
        ("user", "What is two plus two?"),
        ("assistant", "Four."),
        ("user", "And twice that?"),
    ],
)
_TEXTS = ("def fibonacci(n):\n    ", "1, 2, 3, 5, 8, 13,", "Once upon a time")
_EDGE_LENGTHS = (1, *(n * BLOCK + edge for n in (1, 2, 8) for edge in (-1, 0, 1)), 1040)


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt and how to sample its output."""

    name: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams


def make_cases(tokenizer: TextTokenizer) -> list[Case]:
    """Twenty greedy cases, then six of them again with a seed. The two with a shared prefix come last among the
    greedy ones, so that the second finds the first one's blocks."""
    passage = tokenizer.encode_text(_PASSAGE * 12)
    prompts = {f"{length} tokens": passage[:length] for length in _EDGE_LENGTHS}
    for index, chat in enumerate((*([("user", question)] for question in _QUESTIONS[:2]), *_CHATS), 1):
        prompts[f"chat {index}"] = tokenizer.encode_chat(Chat(tuple(Message(*turn) for turn in chat)))
    for text in _TEXTS:
        prompts[f"text {text[:12]!r}"] = tokenizer.encode_text(text)
    for name, question in zip(("cold", "warm"), _QUESTIONS[2:], strict=True):
        prompts[f"shared prefix, {name}"] = tokenizer.encode_text(_PASSAGE * 4 + question)
    greedy = SamplingParams(NUM_OUTPUTS, 0.0, stop_token_ids=tokenizer.eos_token_ids)
    cases = [Case(name, tuple(ids), greedy) for name, ids in prompts.items()]
    assert len(cases) == 20, len(cases)
    return cases + [_seeded(case, seed) for seed, case in enumerate(cases[::3][:6], 1)]


def _seeded(case: Case, seed: int) -> Case:
    params = SamplingParams(
        NUM_OUTPUTS,
        SEEDED_TEMPERATURE,
        top_p=0.95,
        top_k=50,
        seed=seed,
        stop_token_ids=case.params.stop_token_ids,
    )
    return Case(f"{case.name}, seed {seed}", case.prompt_ids, params)


def few(cases: list[Case]) -> list[Case]:
    """Six that cover the kinds: one token, a block and one more, over 1000 tokens, a chat, a warm prefix, a seed."""
    wanted = ("1 tokens", "16 tokens", "17 tokens", "1040 tokens", "chat 3")
    return [case for case in cases if case.name in wanted] + cases[-1:]
