"""Simulated users. One interface: `open()` and `reply(text)` are coroutines that yield requests and return what was `Heard`.
A scripted user yields nothing; one played by a language model in this process yields a `Sample` a turn; one behind an API
(api_user.py) yields `Wait`s, and the scheduler decodes for the others until its answer is there.

A user sees its instruction and the agent's messages, never the agent's tool calls; the agent never sees the instruction.
Not here: what a domain's scripted user says (that is the domain's).
"""

import random
import re
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass

from chat import Chat, Context, Sample, UserError

UNJUDGED = "unjudged"
STOP = "###STOP###"  # a user's message that holds it ends the conversation
STOPS = STOP, "###TRANSFER###", "###OUT-OF-SCOPE###"  # τ²-bench's; all three are normal ends

GUIDE = f"""You are a customer in a chat with a shop's service agent. Stay in that role: write only what the customer says, one or two short sentences at a time. Give a detail only when you are asked for it, and invent nothing. When the agent reads back what it is going to do, say the detail as you want it, and yes if that is it. When all your wishes are done or refused, answer with {STOP} and nothing else. This is what you want:
"""


@dataclass(frozen=True)
class Heard:
    """A user's message. ended: the conversation is over. failed: the simulator broke its contract (no reward, no training)."""

    text: str
    ended: bool = False
    failed: bool = False


@dataclass(frozen=True)
class Wait:
    """What a conversation yields: please come back when `future` is done, and let the others go on meanwhile."""

    future: Future


Turn = Generator[Sample | Wait, None, Heard]


class ScriptedUser:
    """A domain's script (`begin`, `answer`) behind the common interface."""

    ctx: Context | None = None

    def __init__(self, script):
        self.script = script

    def open(self) -> Turn:
        return self.script.begin()
        yield  # makes this a generator: it asks for no tokens

    def reply(self, text: str) -> Turn:
        return self.script.answer(text)
        yield


class ModelUser:
    """A user played by a language model: its own context, in which the agent is the other side."""

    def __init__(self, chat: Chat, instruction: str, greeting: str, stream: tuple[int, ...], max_new: int):
        self.chat, self.greeting, self.max_new = chat, greeting, max_new
        self.ctx = chat.start(instruction, None, stream)

    def open(self) -> Turn:
        heard = yield from self.reply(self.greeting)  # a stop before the first wish is a failure too
        return Heard(heard.text, True, True) if heard.ended else heard

    def reply(self, text: str) -> Turn:
        """A message cut at `max_new` tokens is heard as far as it goes. An empty one is a failure, and so is a full context
        (`ctx.full` says that it was that).
        """
        self.chat.hear(self.ctx, text)
        yield Sample("user", self.ctx, self.max_new)
        said = self.chat.said(self.ctx).strip()
        failed = self.ctx.full or not said
        return Heard(said, STOP in said or failed, failed)


# ---------------------------------------------------------------- a pool


def parse_pool(text: str, kinds: tuple[str, ...]) -> dict[str, float]:
    """ "lm:0.8,scripted:0.2" → {"lm": 0.8, "scripted": 0.2}; "lm" alone has weight 1. Errors: UserError."""
    pool: dict[str, float] = {}
    for part in text.split(","):
        kind, _, weight = (piece.strip() for piece in part.partition(":"))
        if kind not in kinds or kind in pool:
            raise UserError(f"user {kind!r} in {text!r}: choose among {', '.join(kinds)}, each at most once")
        if not re.fullmatch(r"[0-9]*\.?[0-9]+", weight or "1") or not float(weight or 1):
            raise UserError(f"weight {weight!r} in {text!r}: give a positive number, as in lm:0.8,scripted:0.2")
        pool[kind] = float(weight or 1)
    return pool


def choose(pool: dict[str, float], stream: tuple[int, ...]) -> str:
    """The kind of user of one episode, drawn by the weights. The same stream always draws the same kind."""
    return random.Random(f"pool {stream}").choices(list(pool), list(pool.values()))[0]


# ---------------------------------------------------------------- audits

AS_AGENT = (  # what a service agent says and a customer does not
    r"\bhow (can|may) i (help|assist) you\b",
    r"\bi( can|'ll| will|'d| would)( be (happy|glad) to)? (help|assist) you\b",
    r"\banything else i can (help|assist|do)\b",
    r"\b(can|could|will|would|may) (you|i)( please| kindly)? (provide|share|give|tell|confirm|verify|have)( me)?( with)? your "
    r"(full |first |last )?(name|user|customer|account|order|reservation|booking|phone|e-?mail|zip|address|date of)\b",
    r"\bplease (provide|share|confirm|verify) your\b",
    r"\blet me (just )?(look up|check|pull up|verify) your\b",
    r"\bi('ve| have) ((now|just|successfully) )?(cancell?ed|processed|updated|refunded|issued|booked|exchanged|modified) your\b",
    r"\bthank you for (calling|contacting|reaching out)\b",
    r"\btransfer(ring)? you to\b",
)
ASIDE = (  # what is not said aloud: thoughts, notes, a script with the names of those who speak, markup
    r"\bnote to self\b",
    r"\bmy (part|role) (here )?(is|as)\b",
    r"\b(i'm|i am) (now )?(playing|simulating|role-?playing)\b",
    r"\bnext (line|message|reply|response) (that )?(is|i)\b",
    r"\bi (should|need to|must) (now )?(respond|reply|stay)\b",
    r"\b(if|when) the agent (asks|offers|says|does|can)",
    r"\bin character\b|\bsystem prompt\b|\blanguage model\b|\bas an ai\b",
    r"\b(my|the) (instructions|scenario|persona) (say|state|tell|do)",
    r"^\W*(user|customer|agent|assistant|representative|system|thoughts?|thinking|reasoning|analysis)\W*:",
    r"</?(think|scenario|instructions|tool_call|tool_response)>|<\|\w+\|>",
)
STAGE = set("you your yours yourself you're you'll you've you'd hidden secret secretly".split())


def contract_fault(text: str, instruction: str, opening: bool = False) -> tuple[str, str] | None:
    """How a message breaks the contract of a simulated user: (kind, what it did), or None.

    Judged by patterns, so it proves nothing; what it finds is asked for again before an episode ends. A customer may use
    the instruction's words, but does not speak to itself as "you": six words in a row of it, one of them from STAGE, are
    the instruction shown, and so are forty of any kind.
    """
    plain = text.lower().replace("’", "'")
    if not plain.strip():
        return "empty", "it was empty"
    if opening and any(stop in text for stop in STOPS):
        return "stop_at_once", "it ended the conversation before saying what the customer wants"
    if any(re.search(pattern, plain) for pattern in AS_AGENT):
        return "as_agent", "it spoke as the agent does, and you are the customer"
    if any(re.search(pattern, plain, re.M) for pattern in ASIDE):
        return "aside", "it held more than what the customer says aloud"
    if any(not STAGE.isdisjoint(run) for run in shared_runs(plain, instruction, 6)) or shared_runs(
        plain, instruction, 40
    ):
        return "instruction", "it showed the instruction, which only you may see"
    return None


def shared_runs(text: str, other: str, n: int) -> list[list[str]]:
    """All n words in a row of `text` that are also in `other`."""
    words, others = (re.findall(r"[\w']+", t.lower().replace("’", "'")) for t in (text, other))
    line, runs = f" {' '.join(others)} ", (words[i : i + n] for i in range(len(words) - n + 1))
    return [run for run in runs if f" {' '.join(run)} " in line]


def user_fault(domain, task, messages: list[str], replies: list[str]) -> str | None:
    """Where a simulated user first departs from what the domain's script would have said, or None.

    messages: what the agent said to it, in order; replies: what the user said (replies[0] opens). Compared by
    `domain.meaning`, so other words are no fault. Returns the script's act there ("yes", "name", …). Judging ends where
    the script itself can't make sense of the agent's message, and the answer is UNJUDGED: what follows is nobody's fault.
    """
    script = domain.script(task, random.Random(0))
    for message, reply in zip([None, *messages], replies, strict=False):
        expected = script.begin() if message is None else script.answer(message)
        if script.act == "pardon":
            return UNJUDGED
        if domain.meaning(expected.text) != domain.meaning(reply):
            return script.act
        if expected.ended:
            return None
    return None
