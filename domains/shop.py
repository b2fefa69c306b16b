"""The embedded domain: a small retail shop, generated from a seed. No file, no network, no torch.

Read in this order: the words (what names, orders and addresses are made of, and which combinations each split owns),
the tools, the tasks (a wish list and the database it lives in), the user's instruction and script, the demonstrator and
the null baselines. Field values are as small as copying needs; every value that must be copied is made of one or two
pieces from unlike alphabets (see `pieces` in chat.py for how they become tokens).

Deliberately left out: stock keeping and money movements. Payment is read, never moved.
"""

import itertools
import json
import math
import random
import re
from dataclasses import dataclass, replace

from chat import Call
from tools import Agent, Domain, Fact, Task, ToolError, World
from user_sim import GUIDE, STOP, Heard

# ── Words ────────────────────────────────────────────────────────────────────────────────────────────────────────────
FIRST = """Ada Amir Bela Boris Carla Chen Dora Dirk Elif Emil Farah Felix Gina Goran Hana Hugo Ines Ivan Jana Jonas Kira Kofi
Lena Luis Maya Milo Nora Nils Olga Omar Petra Pavel Rosa Ravi Sara Sven Tara Tomas Uma Vera""".split()
LAST = """Abel Adler Bauer Blum Cole Cruz Dahl Diaz Eker Evans Falk Ferro Gatti Grant Haas Hill Ito Ivers Jung Jansen
Klein Kumar Lang Lopez Marsh Moss Nagy Novak Okafor Olsen Pace Popov Quist Reed Rossi Sato Stone Tanaka Ueda Weber""".split()
UNSEEN_FIRST = "Zoe Ximena Wanda Yusuf Quentin Bao Thea Idris Freya Leif".split()
UNSEEN_LAST = "Zhou Yates Wolff Ibarra Quinn Murphy Schmidt Fontaine Ozturk Larsen".split()
STREETS = """Elmgate Oakway Millside Kingsroad Parkview Hightown Lakeside Bridgend Churchway Foxhill Greenway Harbour
Ironlane Millgate Newmarket Orchard Pinewood Quayside Riverside Southgate""".split()
TOWNS = "York Perth Leeds Derby Truro Wells Ripon Luton Dover Bath Crewe Stoke Poole Hull Ely Rugby".split()
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
NUMBERS = range(10, 100)
NOUNS = "bag shirt hat lamp chair mug rug clock scarf belt tent vase".split()
COLORS = "red blue green black white brown pink grey".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
PAYMENTS = "visa paypal giftcard cash".split()
PRICES = [f"${n}" for n in range(10, 95, 5)]
REFUSALS = ("already delivered", "not delivered yet")
GREETING = "Hello, how can I help you?"

POLICY = """You are the service agent of a small shop. You help one customer at a time, with tools that read and write the shop's database.
- Identify the customer first: by full name (find_customer) or by an order number (get_order).
- If the customer does not know an order's number, find it by an item in it (find_order).
- Look at an order (get_order) before you promise anything about it.
- A pending order can be cancelled, or, once, sent to another address. Nothing in it can be returned or exchanged: say it is "not delivered yet", and its day.
- Each item of a delivered order can, once, be returned or exchanged for another color. The order cannot be cancelled or redirected: say it is "already delivered", and its day.
- Before any write, read back what you are going to do and get a yes. If the customer corrects you, read back again.
- Answer questions about delivery (get_order) and payment (get_payment) with what the tool says.
- Refuse anything else. Transfer to a human only if the customer asks for one.
- When a wish is done or refused, ask whether there is anything else."""

# Which combinations a split owns: the sum of the two pieces' indices modulo 5.
RESIDUES = {"train": (1, 2, 3), "val": (4,), "test": (0,), "combo": (0,), "names": (0,)}
SPLITS = tuple(RESIDUES)
# Ordered pairs of wishes in one talk that only the split "combo" has.
COMBOS = (
    ("cancel", "track"),
    ("return", "address"),
    ("exchange", "cancel"),
    ("paid", "return"),
    ("address", "exchange"),
)
WRITES = ("cancel", "return", "exchange", "address")
READS = ("track", "price", "paid")


def combinations(first: list, second: list, split: str) -> list[tuple]:
    """The (first, second) pairs that belong to a split."""
    owned = RESIDUES[split]
    return [(a, b) for i, a in enumerate(first) for j, b in enumerate(second) if (i + j) % 5 in owned]


VOCABULARY = {
    split: {
        "name": [
            " ".join(c)
            for c in (
                combinations(UNSEEN_FIRST, UNSEEN_LAST, split) if split == "names" else combinations(FIRST, LAST, split)
            )
        ],
        "order": [f"#{a}{b}" for a, b in combinations(list(LETTERS), list(NUMBERS), split)],
        "address": [" ".join(c) for c in combinations(STREETS, TOWNS, split)],
    }
    for split in SPLITS
}


# ── Tools ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def order_row(world: World, order: str, identified: bool = True) -> dict:
    """An order's row. Errors: unknown; its customer not identified. Policy is the agent's to keep, not the tools'."""
    row = world.read("orders", order)
    if row is None:
        raise ToolError("no such order")
    if identified and row["customer"] not in world.identified:
        raise ToolError("identify the customer first")
    return row


def find_customer(world: World, name: str):
    """Find a customer by full name. Identifies the customer.
    name: first and last name"""
    row = world.read("customers", name)
    if row is None:
        raise ToolError("no such customer")
    world.identified.add(name)
    return {"orders": row["orders"]}


def find_order(world: World, name: str, item: str):
    """Find the order of an identified customer that holds an item.
    name: first and last name
    item: color and kind, such as red bag"""
    if name not in world.identified:
        raise ToolError("identify the customer first")
    for order in world.read("customers", name)["orders"]:
        if item in world.read("orders", order)["items"]:
            return {"order": order}
    raise ToolError("no such item")


def get_order(world: World, order: str):
    """Look at an order: its status, day of delivery and items. Identifies the customer it belongs to.
    order: the order's number, such as #A10"""
    row = order_row(world, order, identified=False)
    world.identified.add(row["customer"])
    return {"status": row["status"], "day": row["day"], "items": list(row["items"])}


def get_payment(world: World, order: str):
    """What an order cost, and how it was paid.
    order: the order's number"""
    row = order_row(world, order)
    return {"total": row["total"], "paid": row["paid"]}


def cancel_order(world: World, order: str):
    """Cancel an order.
    order: the order's number"""
    order_row(world, order)
    world.edit("orders", order)["status"] = "cancelled"
    return "ok"


def change_address(world: World, order: str, address: str):
    """Send an order to another address. Once for each order.
    order: the order's number
    address: street and town"""
    if order_row(world, order)["moved"]:
        raise ToolError("already changed once")
    world.edit("orders", order).update(address=address, moved=True)
    return "ok"


def bought_item(world: World, order: str, item: str) -> None:
    """Errors: the order has no such item, or it was returned or exchanged before."""
    items = order_row(world, order)["items"]
    if item not in items:
        raise ToolError("no such item")
    if items[item]["state"] != "bought":
        raise ToolError("already changed once")


def return_item(world: World, order: str, item: str):
    """Take one item of an order back.
    order: the order's number
    item: color and kind, such as red bag"""
    bought_item(world, order, item)
    world.edit("orders", order)["items"][item]["state"] = "returned"
    return "ok"


def exchange_item(world: World, order: str, item: str, color: str):
    """Exchange one item of an order for the same kind in another color.
    order: the order's number
    item: color and kind, such as red bag
    color: the new color, such as blue"""
    bought_item(world, order, item)
    if color not in world.read("products", item.split()[1])["colors"]:
        raise ToolError("no such color")
    world.edit("orders", order)["items"][item]["state"] = f"exchanged for {color}"
    return "ok"


def transfer_to_human(world: World):
    """Hand the conversation over to a human colleague. Ends it."""
    world.transferred = True
    world.written["log", "transfer"] = True
    return "ok"


TOOLS = {
    t.__name__: t
    for t in (
        find_customer,
        find_order,
        get_order,
        get_payment,
        cancel_order,
        change_address,
        return_item,
        exchange_item,
        transfer_to_human,
    )
}


# ── Tasks ────────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Wish:
    """One wish. `final` is what it must end as: until a write is read back the user says the rest."""

    kind: str  # cancel, return, exchange, address, track, price, paid
    order: str
    item: str = ""  # return, exchange: which item
    new: str = ""  # exchange: the new color; address: the new address
    final: str = ""  # the detail after the change of mind ("" = no change): order, item or new, by kind
    hint: str = ""  # an item that tells the order apart, for a user who does not know the number
    final_hint: str = ""
    forbidden: str = ""  # what the agent must say instead of doing it


@dataclass(frozen=True)
class Wants:
    """What a user wants and knows. knows: "name", "order" or "both"; slip: a wrong detail given first ("" = none)."""

    name: str
    knows: str
    slip: str
    wishes: tuple[Wish, ...]


@dataclass(frozen=True)
class Mix:
    """How often tasks have each trait (shares, 0 to 1)."""

    two: float = 0.08
    forbidden: float = 0.33
    changed: float = 0.33
    slip: float = 0.08
    kinds: tuple[str, ...] = WRITES * 3 + READS


def make_task(split: str, seed: int, index: int, mix: Mix) -> Task:
    """Task `index` of a split: its own database, wish list, gold actions and facts, all drawn from (seed, split, index)."""
    rng = random.Random(f"shop {seed} {split} {index}")
    two = split == "combo" or rng.random() < mix.two
    kinds = draw_kinds(rng, split, two, mix)
    forbid = [k in WRITES and rng.random() < mix.forbidden for k in kinds]
    change = [k in WRITES and not f and rng.random() < mix.changed for k, f in zip(kinds, forbid, strict=True)]
    change = [c and not (two and k == "cancel") for c, k in zip(change, kinds, strict=True)]
    statuses = [wanted_status(k, f, rng) for k, f in zip(kinds, forbid, strict=True)]
    if len(statuses) == 1:  # a changed cancellation moves on to the customer's other order
        other = "pending" if change[0] and kinds[0] == "cancel" else rng.choice(("pending", "delivered"))
        statuses.append(other)
    db, name, orders = make_database(rng, split, statuses)
    swapped = len(kinds) == 1 and rng.random() < 0.5  # the wanted order is not always the first one listed
    if swapped:
        db["customers"][name]["orders"].reverse()
    knows = rng.choice(("name", "order", "both"))
    wishes = tuple(
        make_wish(rng, split, kinds[i], db, orders[i], orders[1 - i], forbid[i], change[i], knows)
        for i in range(len(kinds))
    )
    slip = wrong_detail(rng, split, db, knows) if rng.random() < mix.slip else ""
    kind = "two" if two else "refuse" if forbid[0] else kinds[0]
    gold = tuple(call for wish in wishes for call in gold_actions(wish))
    told = tuple(fact for wish in wishes for fact in facts(wish, db))
    return Task(f"{split}-{seed}-{index}", split, kind, db, gold, told, Wants(name, knows, slip, wishes))


def draw_kinds(rng: random.Random, split: str, two: bool, mix: Mix) -> tuple[str, ...]:
    """The kinds of a task's wishes; a pair of COMBOS if and only if the split is "combo"."""
    if split == "combo":
        return rng.choice(COMBOS)
    while True:
        kinds = tuple(rng.choice(mix.kinds) for _ in range(1 + two))
        if kinds not in COMBOS:
            return kinds


def wanted_status(kind: str, forbidden: bool, rng: random.Random) -> str:
    """The order status under which a wish is allowed (or, if `forbidden`, is not)."""
    if kind in READS:
        return rng.choice(("pending", "delivered"))
    return "pending" if (kind in ("cancel", "address")) != forbidden else "delivered"


def make_database(rng: random.Random, split: str, statuses: list[str]) -> tuple[dict, str, list[str]]:
    """Three customers with two orders of two or three items each. → (database, the user's name, the user's two orders).

    Within a customer no noun and no color repeats, and within the database no two orders share a letter or a number and
    no two customers a first or last name: each piece leads to one continuation.
    """
    words = VOCABULARY[split]
    names = distinct(rng, words["name"], 3, lambda n: n.split())
    numbers = distinct(rng, words["order"], 6, lambda o: [o[1], o[2:]])
    addresses = distinct(rng, words["address"], 3, str.split)
    db = {"customers": {}, "orders": {}, "products": {}, "log": {"transfer": False}}
    for i, name in enumerate(names):
        mine = numbers[2 * i : 2 * i + 2]
        db["customers"][name] = {"address": addresses[i], "payment": rng.choice(PAYMENTS), "orders": list(mine)}
        nouns, colors = rng.sample(NOUNS, 6), rng.sample(COLORS, 6)
        for j, order in enumerate(mine):
            count = rng.choice((2, 3))
            goods = [
                f"{c} {n}" for c, n in zip(colors[3 * j : 3 * j + count], nouns[3 * j : 3 * j + count], strict=True)
            ]
            status = statuses[j] if i == 0 else rng.choice(("pending", "delivered"))
            prices = [rng.randrange(5, 35, 5) for _ in goods]
            db["orders"][order] = {
                "customer": name,
                "status": status,
                "items": {g: {"price": p, "state": "bought"} for g, p in zip(goods, prices, strict=True)},
                "day": rng.choice(DAYS),
                "total": f"${sum(prices)}",
                "paid": rng.choice(PAYMENTS),
                "address": addresses[i],
                "moved": False,
            }
    db["products"] = {noun: {"colors": list(COLORS)} for noun in NOUNS}
    return db, names[0], numbers[:2]


def distinct(rng: random.Random, words: list[str], n: int, parts) -> list[str]:
    """n words that share no part."""
    chosen, used = [], set()
    while len(chosen) < n:
        word = rng.choice(words)
        if used.isdisjoint(parts(word)):
            chosen.append(word)
            used.update(parts(word))
    return chosen


def make_wish(rng, split, kind, db, order, other, forbidden, changed, knows) -> Wish:
    """A wish about `order`; if `changed`, the detail that the user moves to when the write is read back."""
    items = list(db["orders"][order]["items"])
    hint = rng.choice(items) if knows == "name" else ""
    wish = Wish(kind, order, hint=hint)
    if kind in ("return", "exchange"):
        wish = replace(wish, item=rng.choice(items))
    if kind == "exchange":
        first, second = rng.sample([c for c in COLORS if c != wish.item.split()[0]], 2)
        wish = replace(wish, new=first, final=second if changed else "")
    elif kind == "address":
        home = db["orders"][order]["address"].split()
        free = [a for a in VOCABULARY[split]["address"] if not set(home) & set(a.split())]
        first, second = distinct(rng, free, 2, str.split)
        wish = replace(wish, new=first, final=second if changed else "")
    elif kind == "return" and changed:
        wish = replace(wish, final=rng.choice([i for i in items if i != wish.item]))
    elif kind == "cancel" and changed:
        final_hint = rng.choice(list(db["orders"][other]["items"])) if knows == "name" else ""
        wish = replace(wish, final=other, final_hint=final_hint)
    if forbidden:
        wish = replace(wish, forbidden=REFUSALS[kind in ("return", "exchange")])
    return wish


def wrong_detail(rng: random.Random, split: str, db: dict, knows: str) -> str:
    """A name or order number that the database does not hold and that shares no piece with one it holds."""
    if knows == "order":
        used = {p for o in db["orders"] for p in (o[1], o[2:])}
        return rng.choice([o for o in VOCABULARY[split]["order"] if not used & {o[1], o[2:]}])
    used = {p for n in db["customers"] for p in n.split()}
    return rng.choice([n for n in VOCABULARY[split]["name"] if not used & set(n.split())])


def outcome(wish: Wish) -> Wish:
    """The wish after the change of mind."""
    if not wish.final:
        return wish
    if wish.kind == "cancel":
        return replace(wish, order=wish.final, hint=wish.final_hint, final="")
    return replace(wish, **{"item" if wish.kind == "return" else "new": wish.final}, final="")


def gold_actions(wish: Wish) -> list[Call]:
    """The writes that fulfil a wish: none for a question or a forbidden wish."""
    if wish.forbidden or wish.kind in READS:
        return []
    w = outcome(wish)
    name = {"cancel": "cancel_order", "return": "return_item", "exchange": "exchange_item", "address": "change_address"}
    arguments = {
        "cancel": {"order": w.order},
        "return": {"order": w.order, "item": w.item},
        "exchange": {"order": w.order, "item": w.item, "color": w.new},
        "address": {"order": w.order, "address": w.new},
    }
    return [Call(name[w.kind], arguments[w.kind])]


def facts(wish: Wish, db: dict) -> list[Fact]:
    """What must be told: the answer to a question; why a forbidden wish is refused, with the day, which only who looked
    at the order can know. While a wish is allowed, neither reason may be given ("": nothing of this list).
    """
    row = db["orders"][wish.order]
    if wish.forbidden:
        return [Fact(wish.forbidden, REFUSALS), Fact(row["day"], tuple(DAYS))]
    if wish.kind in WRITES:
        return [Fact("", REFUSALS)]
    if wish.kind == "track":
        return [Fact(row["day"], tuple(DAYS))]
    return [Fact(row["total"], tuple(PRICES)) if wish.kind == "price" else Fact(row["paid"], tuple(PAYMENTS))]


# ── The user: instruction and script ─────────────────────────────────────────────────────────────────────────────────
def instruction(task: Task) -> str:
    """What only the user sees. Plain lines; `Changed` is what the user wants instead once it hears the read-back."""
    w = task.wants
    lines = [f"You are {w.name}." if w.knows != "order" else "You do not give your name."]
    if w.slip:
        lines.append(f"At first you say {w.slip}.")
    for i, wish in enumerate(w.wishes):
        order = f"the one with the {wish.hint}" if wish.hint else wish.order
        final = f"the one with the {wish.final_hint}" if wish.final_hint else wish.final
        fields = {"wish": wish.kind, "order": order, "item": wish.item, "new": wish.new, "changed": final}
        label = (lambda key: f"Next {key}") if i else str.capitalize  # each label once, so that it leads to one detail
        lines.append(" ".join(f"{label(key)}: {value}." for key, value in fields.items() if value))
    return "\n".join(lines)


# A sentence is a beginning, a middle and an end. Which combinations a user says is decided like everything else here: those
# whose indices add up to 0 modulo 4 belong to the stranger, a user whose sentences no demonstration ever held.
WANT = ("I want to ", "I need to ", "I would like to ", "Kindly help me ", "Can you help me ")
PLAIN = (".", ", please.", ", thank you.")
PARTS = {
    "cancel": (WANT, ("cancel an order", "cancel my order", "call off an order"), PLAIN),
    "return": (WANT, ("return an item", "return something", "give an item back"), PLAIN),
    "exchange": (WANT, ("exchange an item", "exchange something", "swap an item"), PLAIN),
    "address": (WANT, ("change an address", "change my address", "redirect an order"), PLAIN),
    "track": (WANT, ("learn when my order arrives", "track an order", "track my order"), PLAIN),
    "price": (WANT, ("learn what my order cost", "learn the price of an order", "learn my price"), PLAIN),
    "paid": (WANT, ("learn how I paid", "look up a payment", "look up my payment"), PLAIN),
    "hello": (("", "Hello. ", "Hi! ", "Good day. "),),
    "also": (("Yes. ", "One more thing. ", "There is more. ", "Yes, one thing. "),),
    "name": (("", "It is ", "My name is ", "I am ", "This is "), ("{}",), PLAIN),
    "number": (("", "It is ", "The number is ", "I have ", "That is "), ("{}",), PLAIN),
    "hint": (("The one ", "It is the one ", "I mean the one ", "That is the one "), ("with the {}",), PLAIN),
    "sorry": (("Sorry, ", "My mistake, ", "Oh, ", "I was wrong, "), ("{}", "it is {}", "I mean {}"), PLAIN),
    "item": (("The {}", "It is the {}", "I mean the {}", "That is the {}"), PLAIN),
    "swap": (
        ("The {}", "It is the {}", "I have the {}", "I mean the {}"),
        (", in {}", ", and I want {}", ", to {}"),
        PLAIN,
    ),
    "place": (("", "To ", "It is ", "Send it to ", "That is "), ("{}",), PLAIN),
    "yes": (("{}",), (", yes", ", yes indeed", ", yes, do that", ", yes, right"), PLAIN),
    "no": (("{}",), (". I changed my mind", ". Not that", ". Change it", ". I mean that now"), PLAIN),
    "pardon": (("Pardon?", "Sorry?", "What?", "Excuse me?"),),
    "bye": (
        ("No, ", "Thanks, ", "Well, "),
        ("that is all", "that was all", "nothing else"),
        (f". {STOP}", f", thank you. {STOP}"),
    ),
}


def sentences(stranger: bool) -> dict[str, tuple[str, ...]]:
    """The phrase book of the scripted user, or of the stranger: {act: sentences}."""
    book = {}
    for act, parts in PARTS.items():
        combos = itertools.product(*(enumerate(p) for p in parts))
        book[act] = tuple("".join(w for _, w in c) for c in combos if (sum(i for i, _ in c) % 4 == 0) == stranger)
    return book


PHRASES, STRANGER = sentences(stranger=False), sentences(stranger=True)


class Script:
    """A scripted user: what it says is a function of the task and of what the agent has said so far; only the choice
    of sentence is random. It hears key words, answers what it is asked, may change its mind when a write is read back,
    and ends when its wishes are through.
    """

    def __init__(self, task: Task, rng: random.Random, phrases: dict = PHRASES):
        self.wants, self.rng, self.phrases = task.wants, rng, phrases
        self.index = 0  # which wish
        self.identified = False  # has given its name or number rightly
        self.slipped = not self.wants.slip  # has given the wrong detail
        self.mind = self.wants.wishes[0]  # the wish as it now stands
        self.lost = 0  # messages it could not make sense of
        self.act = ""  # what its last message does; "pardon" when it did not understand

    def begin(self) -> Heard:
        """The opening message."""
        return Heard(self.say("hello") + self.say(self.mind.kind))

    def say(self, act: str, *details: str) -> str:
        """A sentence for an act."""
        self.act = act
        return self.rng.choice(self.phrases[act]).format(*details)

    def answer(self, text: str) -> Heard:
        """The reply to an agent's message."""
        if "Anything else" in text:
            return self.next_wish()
        if text.startswith("Shall I"):
            return Heard(self.confirm(text))
        if "no such" in text:
            self.slipped = True
            return Heard(self.say("sorry", self.identity()))
        if "name" in text and "number" in text:
            return Heard(self.identify())
        if "Which order" in text:
            hint = self.mind.hint
            return Heard(self.say("hint", hint) if hint else self.say("number", self.mind.order))
        if "Which item" in text and self.mind.item:
            swap = self.mind.kind == "exchange"
            return Heard(self.say("swap", self.mind.item, self.mind.new) if swap else self.say("item", self.mind.item))
        if "new address" in text and self.mind.kind == "address":
            return Heard(self.say("place", self.mind.new))
        self.lost += 1
        return self.goodbye() if self.lost > 2 else Heard(self.say("pardon"))

    def identity(self) -> str:
        """What this user is identified by."""
        return self.wants.name if self.wants.knows != "order" else self.mind.order

    def identify(self) -> str:
        wrong = "" if self.slipped else self.wants.slip
        self.slipped = True
        return self.say("name" if self.wants.knows != "order" else "number", wrong or self.identity())

    def confirm(self, text: str) -> str:
        """The answer to a read-back: the detail as it is wanted, and yes; or, if the mind changes now, the new detail.

        It does not check the detail it hears, it says the one it wants: whether they agree is the agent's business. But
        there must be one: "Shall I?" asks nothing.
        """
        read = {"cancel": "order", "return": "item", "exchange": "color", "address": "address"}.get(self.mind.kind)
        if not read or not mentions(text)[read]:
            return self.say("pardon")
        changed, self.mind = bool(self.mind.final), outcome(self.mind)
        m = self.mind
        if m.kind == "cancel":
            detail = f"The one with the {m.hint}" if m.hint else m.order
        else:
            detail = f"The {m.item}" if m.kind == "return" else f"To {m.new}"
        return self.say("no" if changed else "yes", detail)

    def next_wish(self) -> Heard:
        self.index += 1
        if self.index == len(self.wants.wishes):
            return self.goodbye()
        self.mind = self.wants.wishes[self.index]
        return Heard(self.say("also") + self.say(self.mind.kind))

    def goodbye(self) -> Heard:
        return Heard(self.say("bye"), ended=True)


def mentions(text: str) -> dict[str, list[str]]:
    """The details in a text, in order: {"order": […], "item": […], "address": […], "color": […], "name": […]}."""
    pair = rf"\b(?:{'|'.join(COLORS)}) (?:{'|'.join(NOUNS)})\b"
    place = rf"\b(?:{'|'.join(STREETS)}) (?:{'|'.join(TOWNS)})\b"
    name = r"\b[A-Z][a-z]+ [A-Z][a-z]+\b"
    found = {
        "order": re.findall(r"#[A-Z]\d\d", text),
        "item": re.findall(pair, text),
        "address": re.findall(place, text),
    }
    found["color"] = re.findall(rf"\b(?:{'|'.join(COLORS)})\b", re.sub(pair, "", text))
    return found | {"name": re.findall(name, re.sub(place, "", text))}


ASKS = {  # key words that tell a wish's kind
    "exchange": ("exchange", "swap"),
    "cancel": ("cancel", "call off"),
    "return": ("return", "back"),
    "address": ("address", "redirect"),
    "track": ("arrives", "track"),
    "paid": ("paid", "payment"),
    "price": ("cost", "price"),
}


def asked(text: str) -> str:
    """The kind of wish a sentence voices, or ""."""
    return next((kind for kind, keys in ASKS.items() if any(k in text for k in keys)), "")


def meaning(text: str) -> tuple:
    """What a user's message does, whatever its words: wish, yes or no, details, whether it ends the talk.

    Two replies with equal meaning are the same reply to a careful agent; `user_sim.departure` compares by it.
    """
    details = tuple(map(tuple, mentions(text).values()))
    wish = "" if any(details) else asked(text)
    said = re.search(r"\b(yes|Not that|Change it|I changed|that now)\b", text)
    polarity = "" if not said else "yes" if said[0] == "yes" else "no"
    return wish, polarity, STOP in text, details, text in PHRASES["pardon"] + STRANGER["pardon"]


# ── Agents: the demonstrator and the null baselines ──────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Care:
    """How careless a demonstrator is: the probability of each bad habit, drawn anew for each wish."""

    no_check: float = 0.0  # writes without reading back
    no_refusal: float = 0.0  # acts on what the policy forbids
    no_action: float = 0.0  # says "Done" without having done it
    no_look: float = 0.0  # takes the first order listed without looking into it
    mixup: float = 0.0  # picks another item of the order


CAREFUL = Care()
# The cold start's teacher: its success is what imitation alone can reach.
TEACHER = Care(no_check=0.6, no_refusal=0.6, no_action=0.04, no_look=0.3, mixup=0.08)
# Whom the user's side practises with: mostly reads back.
PRACTICE = Care(no_check=0.2, no_refusal=0.4, no_action=0.04, no_look=0.3, mixup=0.08)
CARELESS = Care(no_check=1.0, no_refusal=1.0)
# What each side practises more often than it occurs, as changes to the domain's mix.
TEACHER_MIX = {"two": 0.2, "slip": 0.15, "kinds": WRITES * 3 + READS * 2}
PRACTICE_MIX = {"two": 0.4, "slip": 0.3, "forbidden": 0.15, "changed": 0.5}


def demonstrator(care: Care, rng: random.Random) -> Agent:
    """An agent that knows the job: identify, look, refuse or ask, read back, act, go on. Yields calls and messages."""
    text = yield ""
    customer: dict = {}  # once identified: "name" and "orders", or nothing known but that there is one
    while True:
        kind = asked(text)
        order, row, hint, customer = yield from find(text, customer, care, rng)
        text = yield from serve(kind, order, row, hint, customer, care, rng)
        if STOP in text:
            return


def find(text: str, customer: dict, care: Care, rng: random.Random):
    """Identify the customer if need be and find the order meant. → (order, its row as text, the item named, customer)."""
    order = hint = ""
    if not customer:
        text = yield rng.choice(("May I have your name or order number?", "What is your name or order number?"))
    while not customer and not order:
        found = mentions(text)
        if found["name"]:
            result = yield Call("find_customer", {"name": found["name"][0]})
            orders = mentions(result)["order"]
            customer = {"name": found["name"][0], "orders": orders} if orders else {}
        elif found["order"]:
            result = yield Call("get_order", {"order": found["order"][0]})
            order = "" if "Error" in result else found["order"][0]
        if not customer and not order:
            what = "customer" if found["name"] else "order"
            text = yield f"There is no such {what}. What is the right one?"
    if not order:
        text = yield rng.choice(("Which order is it?", "Which order do you mean?"))
        hint = (mentions(text)["item"] or [""])[0]
        order, result = yield from look_up(text, customer, care, rng)
    return order, result, hint, customer or {"name": "", "orders": [order]}


def look_up(text: str, customer: dict, care: Care, rng: random.Random):
    """Find the order a reply means, by number or by an item in it. → (order, the order's row as text)."""
    found = mentions(text)
    if found["order"]:
        order = found["order"][0]
    elif rng.random() < care.no_look:
        order = customer["orders"][0]
    else:
        result = yield Call("find_order", {"name": customer["name"], "item": found["item"][0]})
        order = mentions(result)["order"][0]
    result = yield Call("get_order", {"order": order})
    return order, result


def serve(kind: str, order: str, row: str, hint: str, customer: dict, care: Care, rng: random.Random):
    """One wish, from the looked-up order to "Anything else?". → the user's next message."""
    day = next((d for d in DAYS if d in row), "")
    if kind == "track":
        return (yield f"Delivery day: {day}. Anything else?")
    if kind in READS:
        result = json.loads((yield Call("get_payment", {"order": order})))
        answer = f"It cost {result['total']}." if kind == "price" else f"It was paid by {result['paid']}."
        return (yield f"{answer} Anything else?")
    wanted = "pending" if kind in ("cancel", "address") else "delivered"
    if wanted not in row and rng.random() >= care.no_refusal:
        return (yield f"Sorry, {order} is {REFUSALS[wanted == 'delivered']}. Delivery day: {day}. Anything else?")
    detail = yield from ask_details(kind, row, care, rng)
    order, detail = yield from read_back(kind, order, detail, hint, customer, care, rng)
    if rng.random() >= care.no_action:
        yield write(kind, order, detail)
    return (yield rng.choice(("Done. Anything else?", "That is done. Anything else?")))


def ask_details(kind: str, row: str, care: Care, rng: random.Random):
    """What the write needs beside the order: () or (item,) or (item, color) or (address,)."""
    if kind == "cancel":
        return ()
    if kind == "address":
        text = yield "What is the new address?"
        return tuple(mentions(text)["address"][:1])
    text = yield "Which item is it?" if kind == "return" else "Which item is it, and which color instead?"
    found = mentions(text)
    item = rng.choice(mentions(row)["item"]) if rng.random() < care.mixup else found["item"][0]
    return (item, *found["color"][:1])


def describe(kind: str, order: str, detail: tuple[str, ...], hint: str) -> str:
    """A write in words, for the read-back. It ends with the detail that the user may want to correct."""
    if kind == "cancel":
        return f"Shall I cancel {order}{', with the ' + hint if hint else ''}?"
    if kind == "address":
        return f"Shall I send {order} to {detail[0]}?"
    if kind == "return":
        return f"Shall I return from {order} the {detail[0]}?"
    return f"Shall I exchange in {order} the {detail[0]}, to {detail[1]}?"


def write(kind: str, order: str, detail: tuple[str, ...]) -> Call:
    """The tool call of a wish."""
    wish = Wish(kind, order, item=detail[0] if kind in ("return", "exchange") else "", new=detail[-1] if detail else "")
    return gold_actions(wish)[0]


def read_back(kind: str, order: str, detail: tuple, hint: str, customer: dict, care: Care, rng: random.Random):
    """Read the write back until the user says yes, taking corrections in. → (order, detail)."""
    if rng.random() < care.no_check:
        return order, detail
    for _ in range(4):
        text = yield describe(kind, order, detail, hint)
        if meaning(text)[1] != "no":
            break
        found = mentions(text)
        if kind == "cancel":
            hint = (found["item"] or [""])[0]
            order, _ = yield from look_up(text, customer, care, rng)
        elif kind == "exchange":
            detail = (detail[0], *(found["color"][:1] or detail[1:]))
        else:
            detail = tuple(found["address" if kind == "address" else "item"][:1]) or detail
    return order, detail


def do_nothing() -> Agent:
    """Null baseline: lets the user talk and never acts."""
    yield ""
    while True:
        yield "Anything else?"


def transfer_at_once() -> Agent:
    """Null baseline."""
    yield ""
    yield Call("transfer_to_human", {})


def refuse_blindly() -> Agent:
    """Null baseline: says why it can't be done, and some day, without having looked at anything."""
    text = yield ""
    kind = asked(text)
    yield f"Sorry, it is {REFUSALS[kind in ('return', 'exchange')]}. Delivery day: Monday. Anything else?"


def act_without_asking() -> Agent:
    """Null baseline: does what the first message seems to ask, with what it holds, without looking or asking."""
    text = yield ""
    found = mentions(text)
    order = (found["order"] or ["#A10"])[0]
    kind = asked(text) or "cancel"
    if kind in READS:
        yield "It arrives on Monday, cost $42, paid by visa."
    else:
        item = (found["item"] or ["red bag"])[0]
        detail = {"cancel": (), "return": (item,), "exchange": (item, "blue"), "address": ("Elmgate York",)}[kind]
        yield Call("get_order", {"order": order})
        yield write(kind, order, detail)
    yield "Done. Anything else?"


BASELINES = {
    "do_nothing": lambda rng: do_nothing(),
    "transfer": lambda rng: transfer_at_once(),
    "act_without_asking": lambda rng: act_without_asking(),
    "refuse_blindly": lambda rng: refuse_blindly(),
    "careless": lambda rng: demonstrator(CARELESS, rng),
}


@dataclass(frozen=True)
class Shop(Domain):
    """The domain (see `tools.Domain`)."""

    prompts: bool = False
    mix: Mix = Mix()
    name = "shop"
    policy, functions, splits, baselines = POLICY, TOOLS, dict.fromkeys(SPLITS), BASELINES
    greeting, guide, scripts = GREETING, GUIDE, ("scripted", "stranger")
    unseen = {"unseen_combination": ("combo", math.inf), "unseen_names": ("names", 100)}  # noqa: RUF012

    @classmethod
    def from_config(cls, cfg) -> "Shop":
        return cls(cfg.prompts, Mix(cfg.two, cfg.forbidden, cfg.changed, cfg.slip))

    def task(self, split: str, seed: int, index: int) -> Task:
        return make_task(split, seed, index, self.mix)

    def practice_task(self, side: str, seed: int, index: int) -> Task:
        changes = TEACHER_MIX if side == "agent" else PRACTICE_MIX
        return make_task("train", seed, index, replace(self.mix, **changes))

    def demonstrator(self, rng: random.Random, side: str) -> Agent:
        return demonstrator(TEACHER if side == "agent" else PRACTICE, rng)

    def instruction(self, task: Task) -> str:
        return instruction(task)

    def script(self, task: Task, rng: random.Random, style: str = "scripted") -> Script:
        return Script(task, rng, STRANGER if style == "stranger" else PHRASES)

    def meaning(self, text: str) -> tuple:
        return meaning(text)
