"""Simulated users. One interface: `open()` and `reply(text)` are coroutines that yield requests and return what was `Heard`.
A scripted user yields nothing; one played by a language model in this process yields `Sample`s; one behind an API
(api_user.py) yields `Wait`s, and the scheduler decodes for the others until its answer is there.

A user sees its instruction and the agent's messages, never the agent's tool calls; the agent never sees the instruction.
Not here: what a domain's scripted user says (that is the domain's).
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from chat import Call, Chat, Context, Malformed, Sample, ToolCalls, UserError

UNJUDGED = "unjudged"
STOP = "###STOP###"  # a user's message that holds it ends the conversation
STOPS = STOP, "###TRANSFER###", "###OUT-OF-SCOPE###"  # τ²-bench's; all three are normal ends

GUIDE = f"""You are a customer in a chat with a shop's service agent. Stay in that role: write only what the customer says, one or two short sentences at a time. Give a detail only when you are asked for it, and invent nothing. When the agent reads back what it is going to do, say the detail as you want it, and yes if that is it. When all your wishes are done or refused, answer with {STOP} and nothing else. This is what you want:
"""


@dataclass(frozen=True)
class Heard:
    """A user's message. ended: the conversation is over. failed: the user had no usable one; `rollout.ending` says what
    that is worth (docs/users.md has all that can go wrong on the user's side, in one table)."""

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
    """A user played by a language model in this process: its own context, in which the agent is the other side.

    speaker: whose weights play it (a name among the samplers).
    """

    def __init__(
        self, chat: Chat, instruction: str, greeting: str, stream: tuple[int, ...], max_new: int, speaker: str = "user",
        tools: list[dict] | None = None,
    ):  # fmt: skip
        self.chat, self.greeting, self.max_new, self.speaker = chat, greeting, max_new, speaker
        self.instruction, self.ctx = instruction, chat.start(instruction, tools, stream)

    def open(self) -> Turn:
        heard = yield from self.reply(self.greeting)  # a stop before the first wish is a failure too
        return Heard(heard.text, True, True) if heard.ended else heard

    def reply(self, text: str) -> Turn:
        """A message cut at `max_new` tokens is heard as far as it goes. An empty one is a failure, and so is a full context
        (`ctx.full` says that it was that).
        """
        self.chat.hear(self.ctx, text)
        yield Sample(self.speaker, self.ctx, self.max_new)
        said = self.chat.said(self.ctx).strip()
        failed = self.ctx.full or not said
        return Heard(said, STOP in said or failed, failed)


# ---------------------------------------------------------------- users that must keep a contract

MAX_HOPS = 20  # answers a turn; a user that never stops calling tools is broken
REMINDER = f"""Your last answer could not be used: {{}}. Write only the customer's next message to the agent, or call a tool of the customer's, if there is any. With nothing left to say, write {STOP}."""


@dataclass(frozen=True)
class Answer:
    """What a user's model said, without its thoughts, and which of the user's tools it called."""

    text: str
    calls: tuple[Call | Malformed, ...] = ()


class Contracted:
    """What users have in common whose answers are looked at before anybody hears them, and who may have tools.

    breaches: answers that broke the contract, by kind; failure: why the user failed, if it did. A user brings `answer(opening)`,
    a coroutine of an Answer or None, and `results(answer, texts)`, which adds its calls' results to its view.
    """

    ctx: Context | None = None
    stops: tuple[str, ...] = STOPS
    tools: list[dict] | None = None  # where the world has tools for the user, `converse` sets these two
    act: Callable[[Call], str] | None = None

    def __init__(self, instruction: str):
        self.instruction, self.breaches, self.failure = instruction, Counter[str](), ""

    @property
    def metrics(self) -> dict:
        """What the episode's record says of its user."""
        return {"user_breaches": dict(self.breaches), "user_failure": self.failure}

    def turn(self, opening: bool = False) -> Turn:
        """Calls of the user's tools, which the agent doesn't see, then a message. What stands beside a call is said as well:
        a model that has spoken there often has nothing to add when the result comes.
        """
        said = ""
        for _ in range(MAX_HOPS):
            answer = yield from self.answer(opening)
            if answer is None:
                return Heard(said, True, True)
            self.results(answer, [self.act(call) for call in answer.calls])
            said = f"{said}\n\n{answer.text}".strip()
            ended = any(stop in said for stop in self.stops)
            if ended or not answer.calls:
                return Heard(said, ended)
        self.failure = f"called tools {MAX_HOPS} times in a row"
        return Heard(said, True, True)

    def breach_in(self, answer: Answer, opening: bool) -> tuple[str, str] | None:
        """`breach`, and what is wrong with the calls: (kind, what the model did), or None."""
        names = {tool["function"]["name"] for tool in self.tools or ()}
        for call in answer.calls:
            if isinstance(call, Malformed):
                return "bad_call", f"a tool call could not be read ({call.why})"
            if call.name not in names:
                return "unknown_tool", f"the customer has no tool {call.name[:40]!r}"
        if answer.calls and not answer.text:
            return None
        return breach(answer.text, self.instruction, opening)


class ContractedModelUser(Contracted, ModelUser):
    """A `ModelUser` that was not trained for the part, so its answers are looked at, and that may have tools.

    A context only grows: an answer that broke the contract and the reminder that followed stay in its view.
    """

    def __init__(self, *args, stops: tuple[str, ...] = STOPS, **options):
        ModelUser.__init__(self, *args, **options)
        Contracted.__init__(self, self.instruction)
        self.stops = stops

    def open(self) -> Turn:
        self.chat.hear(self.ctx, self.greeting)
        return self.turn(opening=True)

    def reply(self, text: str) -> Turn:
        self.chat.hear(self.ctx, text)
        return self.turn()

    def answer(self, opening: bool) -> Generator[Sample, None, Answer | None]:
        """An answer that keeps the contract, or None. One that breaks it is asked for again, once."""
        for attempt in range(2):
            yield Sample(self.speaker, self.ctx, self.max_new)
            if self.ctx.full:
                self.failure = "its context is full"
                return None
            answer = read_turn(self.chat.parse(self.chat.said(self.ctx)))
            if (found := self.breach_in(answer, opening)) is None:
                return answer
            self.breaches[found[0]] += 1
            if not attempt:
                self.chat.hear(self.ctx, REMINDER.format(found[1]))
        self.failure = f"broke its contract twice, at last so: {found[0]}"
        return None

    def results(self, answer: Answer, texts: list[str]) -> None:
        if texts:
            self.chat.observe(self.ctx, texts)


def read_turn(action: Any) -> Answer:
    """A sampled turn as a user's answer. An unclosed thought is an empty one."""
    if isinstance(action, ToolCalls):
        return Answer(action.text, action.calls)
    return Answer("" if isinstance(action, Malformed) else action.text)


# ---------------------------------------------------------------- a pool

KINDS = "lm", "self", "frozen:PATH", "scripted", "stranger", "openai:MODEL"


def parse_pool(text: str) -> dict[str, float]:
    """ "lm=0.8,scripted=0.2" → {"lm": 0.8, "scripted": 0.2}; without a number the weight is 1. Errors: UserError."""
    pool: dict[str, float] = {}
    for part in text.split(","):
        kind, _, weight = (piece.strip() for piece in (part if "=" in part else part + "=1").rpartition("="))
        if not any(
            kind == k or (":" in k and kind.startswith(k.partition(":")[0] + ":") and kind[-1] != ":") for k in KINDS
        ):
            raise UserError(
                f"--user {text}: no user {kind!r}; choose among {', '.join(KINDS)}, such as lm=0.8,scripted=0.2"
            )
        if kind in pool or (kind.startswith("openai:") and any(k.startswith("openai:") for k in pool)):
            raise UserError(f"--user {text}: {kind} comes twice; name each kind once, and one openai:MODEL at most")
        if not re.fullmatch(r"[0-9]*\.?[0-9]+", weight) or not 0 < float(weight) < 1e9:
            raise UserError(
                f"--user {text}: weight {weight!r}; give a number above 0 and below 1e9, as in lm=0.8,scripted=0.2"
            )
        pool[kind] = float(weight)
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


def breach(text: str, instruction: str, opening: bool = False) -> tuple[str, str] | None:
    """How a message breaks the contract of any simulated user: (kind, what it did), or None.

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


def departure(domain, task, messages: list[str], replies: list[str]) -> str | None:
    """Where a simulated user first departs from what the domain's script would have said, or None.

    messages: what the agent said to it, in order; replies: what the user said (replies[0] opens). Compared by
    `domain.meaning`, so other words are no departure. Returns the script's act there ("yes", "name", …). Judging ends where
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
