"""A library's desk: renew a loan, unless somebody waits for the book.

A domain as small as can be, which the program knows only by its file's name (docs/domains.md).
"""

import json
import random
import re

from chat import Call
from tools import Domain, Fact, Task, ToolError, silent
from user_sim import GUIDE, STOP, Heard

SHARE = {"train": range(7), "val": range(7, 8), "test": range(8, 10)}
# No reader is in two splits, but every letter and number is in each: a model trained from scratch can copy only what it has met.
CARDS = {
    split: [f"#{letter}{n}" for i, letter in enumerate("BCDFGHJKLM") for n in range(10, 40) if (i + n) % 10 in share]
    for split, share in SHARE.items()
}
DAYS = "Monday", "Tuesday", "Wednesday", "Thursday", "Friday"


def get_loan(world, card: str):
    """Look at a reader's loan: the day it is due, and whether somebody waits for the book.
    card: the number of the reader's card, such as #K10"""
    if (row := world.read("loans", card)) is None:
        raise ToolError("no such card")
    return row


def renew_loan(world, card: str):
    """Renew a reader's loan.
    card: the number of the reader's card"""
    get_loan(world, card)
    world.edit("loans", card)["renewed"] = True
    return "ok"


class Reader:
    """The scripted user: gives its card when it is asked for, and ends when it hears what became of its wish."""

    def __init__(self, task, rng):
        self.card, self.rng, self.lost, self.act = task.wants, rng, 0, ""

    def begin(self):
        self.act = "wish"
        return Heard(self.rng.choice(("Hello, I want to renew my loan.", "Can I keep my book for longer?")))

    def answer(self, text):
        self.act = "card" if "card" in text else "bye" if "nything else" in text else "pardon"
        self.lost += self.act == "pardon"
        said = {"card": f"It is {self.card}.", "bye": f"No, thanks. {STOP}", "pardon": "Pardon?"}[self.act]
        return Heard(said if self.lost < 3 else f"Goodbye. {STOP}", ended=self.act == "bye" or self.lost == 3)


def clerk(rng, careless: float):
    """A scripted agent: yields calls and messages, and is sent what comes back. If careless, it renews without looking."""
    yield ""  # the reader's first message comes here
    card = re.search(r"#[A-Z]\d\d", (yield "What is the number of your card?"))[0]
    if rng.random() >= careless:
        loan = json.loads((yield Call("get_loan", {"card": card})))
        if loan["waiting"]:
            yield f"Sorry, somebody waits for it. It is due on {loan['due']}. Anything else?"
            return
    yield Call("renew_loan", {"card": card})
    yield "It is renewed. Anything else?"


class Desk(Domain):
    name = "desk"
    policy = "You are at a library's desk. Renew a loan, unless somebody waits for the book: then say on which day it is due."
    functions = {f.__name__: f for f in (get_loan, renew_loan)}  # noqa: RUF012
    splits = dict.fromkeys(CARDS)  # None each: there is no end of tasks
    greeting, guide, scripts = "Hello!", GUIDE, ("scripted",)
    baselines = {"do_nothing": lambda rng: silent(), "careless": lambda rng: clerk(rng, 1.0)}  # noqa: RUF012

    def task(self, split, seed, index):
        rng = random.Random(f"desk {seed} {split} {index}")
        cards = rng.sample(CARDS[split], 3)
        loans = {c: {"due": rng.choice(DAYS), "waiting": rng.random() < 0.5, "renewed": False} for c in cards}
        mine = loans[cards[0]]
        gold = () if mine["waiting"] else (Call("renew_loan", {"card": cards[0]}),)
        told = (Fact(mine["due"], DAYS),) if mine["waiting"] else ()
        kind = "refuse" if mine["waiting"] else "renew"
        return Task(f"{split}-{seed}-{index}", split, kind, {"loans": loans}, gold, told, cards[0])

    def instruction(self, task):
        return f"You want to renew your loan. Your card is {task.wants}."

    def script(self, task, rng, style="scripted"):
        return Reader(task, rng)

    def meaning(self, text):
        return re.findall(r"#[A-Z]\d\d", text), STOP in text

    def demonstrator(self, rng, side):
        return clerk(rng, 0.6 if side == "agent" else 0.0)
