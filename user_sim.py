"""Simulated users. One interface: `open()` and `reply(text)` are coroutines that yield requests for tokens (`Sample`)
and return what was `Heard`. A scripted user yields nothing; a user played by a language model yields one request a turn.

A user sees its instruction and the agent's messages, never tool calls; the agent never sees the instruction.
Not here: what a domain's scripted user says (that is the domain's), users behind an API.
"""

import random
from collections.abc import Generator
from dataclasses import dataclass

from chat import Chat, Context, Sample

UNJUDGED = "unjudged"
STOP = "###STOP###"  # a user's message that holds it ends the conversation

GUIDE = f"""You are a customer in a chat with a shop's service agent. Stay in that role: write only what the customer says, one or two short sentences at a time. Give a detail only when you are asked for it, and invent nothing. When the agent reads back what it is going to do, say the detail as you want it, and yes if that is it. When all your wishes are done or refused, answer with {STOP} and nothing else. This is what you want:
"""


@dataclass(frozen=True)
class Heard:
    """A user's message. ended: the conversation is over. failed: the simulator broke its contract (no reward, no training)."""

    text: str
    ended: bool = False
    failed: bool = False


Turn = Generator[Sample, None, Heard]


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
