"""The embedded shop: what a task is made of, that splits leak nothing, what agents without skill get."""

import random
import re
import time

import pytest

from chat import Call
from domains import shop
from tools import World, play, same, schema

SHOP = shop.Shop()
N = 400


def run(agent, split="train", n=N, style="scripted"):
    """→ [(task, talk, world)] of a scripted agent with the scripted user."""
    out = []
    for i in range(n):
        task, rng = SHOP.task(split, 0, i), random.Random(i)
        world = SHOP.world(task)
        out.append((task, play(agent(rng), SHOP.script(task, rng, style), world), world))
    return out


def success(talks):
    return sum(world.reward().value for _, _, world in talks) / len(talks)


@pytest.mark.parametrize("split", shop.SPLITS)
@pytest.mark.parametrize("style", ["scripted", "stranger"])
def test_a_careful_agent_solves_every_task(split, style):
    failed = [
        (t.id, w.reward())
        for t, _, w in run(lambda r: shop.demonstrator(shop.CAREFUL, r), split, 200, style)
        if w.reward().value < 1
    ]
    assert not failed


def test_null_baselines_are_low_and_carelessness_does_not_pay():
    for name in ("do_nothing", "transfer", "act_without_asking", "refuse_blindly"):
        assert success(run(shop.BASELINES[name])) < 0.10, name
    assert success(run(shop.BASELINES["careless"], n=1000)) <= 0.60


def test_every_kind_and_trait_occurs():
    tasks = [SHOP.task("train", 0, i) for i in range(N)]
    kinds = {t.kind for t in tasks}
    assert kinds == {"cancel", "return", "exchange", "address", "track", "price", "paid", "refuse", "two"}
    assert {t.wants.knows for t in tasks} == {"name", "order", "both"}
    assert any(t.wants.slip for t in tasks)
    changed = {w.kind for t in tasks for w in t.wants.wishes if w.final}
    assert changed == set(shop.WRITES)


def words_of(task):
    """Everything in a task that a split owns: full names, order numbers, addresses."""
    names = set(task.db["customers"])
    orders = set(task.db["orders"])
    places = {row["address"] for row in task.db["orders"].values()}
    places |= {row["address"] for row in task.db["customers"].values()}
    for wish in task.wants.wishes:
        places |= {p for p in (wish.new, wish.final) if wish.kind == "address" and p}
    slip = {task.wants.slip} - {""}
    return names | {s for s in slip if "#" not in s}, orders | {s for s in slip if "#" in s}, places


def test_splits_share_no_customer_order_or_address():
    seen = {}
    for split in ("train", "val", "test"):
        parts = [words_of(SHOP.task(split, seed, i)) for seed in (0, 1) for i in range(N)]
        seen[split] = [set().union(*column) for column in zip(*parts, strict=True)]
    for a, b in (("train", "val"), ("train", "test"), ("val", "test")):
        for mine, theirs in zip(seen[a], seen[b], strict=True):
            assert mine and theirs and not mine & theirs
    for kind in ("name", "order", "address"):  # and not only in what was drawn
        owned = [set(shop.VOCABULARY[s][kind]) for s in ("train", "val", "test")]
        assert not owned[0] & owned[1] and not owned[0] & owned[2] and not owned[1] & owned[2]


def test_demonstrations_hold_only_words_of_their_own_split():
    """The leak test on the text itself: nothing that test or val owns is ever said, shown or called in training talks."""
    text = ""
    for task, talk, _ in run(lambda r: shop.demonstrator(shop.TEACHER, r)):
        text += shop.instruction(task) + "\n" + "\n".join(map(str, (what for _, what in talk))) + "\n"
    for split in ("val", "test"):
        for words in shop.VOCABULARY[split].values():
            assert not [w for w in words if w in text]
    for piece in shop.UNSEEN_FIRST + shop.UNSEEN_LAST:
        assert not re.search(rf"\b{piece}\b", text)


def test_pieces_of_held_out_words_are_all_seen_in_training():
    pieces = {p for words in shop.VOCABULARY["train"].values() for w in words for p in re.findall(r"#[A-Z]|\d+|\w+", w)}
    for split in ("val", "test", "combo"):
        for words in shop.VOCABULARY[split].values():
            assert {p for w in words for p in re.findall(r"#[A-Z]|\d+|\w+", w)} <= pieces
    assert not {p for w in shop.VOCABULARY["names"]["name"] for p in w.split()} & pieces


def test_combination_split_has_pairs_never_trained_on():
    pairs = {
        s: {tuple(w.kind for w in SHOP.task(s, 0, i).wants.wishes) for i in range(2000 if s == "train" else 200)}
        for s in ("train", "val", "test", "combo")
    }
    assert pairs["combo"] == set(shop.COMBOS)
    for split in ("train", "val", "test"):
        assert not pairs[split] & pairs["combo"]


def test_stranger_says_no_sentence_of_the_scripted_user():
    for act, phrases in shop.STRANGER.items():
        common = set(phrases) & set(shop.PHRASES[act])
        assert not common, (act, common)
    assert shop.STRANGER.keys() == shop.PHRASES.keys()


def test_every_sentence_means_the_same_to_meaning():
    """`meaning` reads kind, polarity and end from the words alone, for both phrase books."""
    for phrases in (shop.PHRASES, shop.STRANGER):
        for kind in (*shop.WRITES, *shop.READS):
            assert phrases[kind] and {shop.asked(p) for p in phrases[kind]} == {kind}
        assert {shop.meaning(p)[1] for p in phrases["yes"]} == {"yes"}
        assert {shop.meaning(p.format("x"))[1] for p in phrases["no"]} == {"no"}
        assert all(shop.meaning(p)[2] for p in phrases["bye"])


def test_a_task_is_a_function_of_its_seed():
    assert SHOP.task("train", 3, 7) == SHOP.task("train", 3, 7)
    assert SHOP.task("train", 3, 7) != SHOP.task("train", 4, 7)


def test_worlds_are_private_and_the_shared_base_is_never_written():
    task = next(t for i in range(N) if (t := SHOP.task("train", 0, i)).kind == "cancel")
    before = repr(task.db)
    a, b = SHOP.world(task), SHOP.world(task)
    for world in (a, b):
        world.call("get_order", {"order": task.gold[0].arguments["order"]})
    assert a.call(task.gold[0].name, task.gold[0].arguments) == "ok"
    assert a.reward().value == 1 and b.reward().value == 0
    assert repr(task.db) == before
    assert a.reward() == a.reward()  # asking changes nothing


def test_reset_is_quick_whatever_the_size():
    small = SHOP.task("train", 0, 0)
    big = {"customers": {}, "orders": {str(i): {"customer": "x", "items": {}} for i in range(200_000)}, "products": {}}
    task = type(small)("big", "train", "cancel", big, (), (), small.wants)
    began = time.perf_counter()
    for _ in range(100):
        World(task, shop.TOOLS)
    assert (time.perf_counter() - began) / 100 < 1e-3


def test_goal_equality_is_exact():
    assert same({"a": 1, "b": [1, 2]}, {"b": [1, 2], "a": 1})
    assert not same([1, 2], [2, 1])
    for a, b in ((1, 1.0), (1, "1"), (1, True), (0, False), (0, None), ("", None), ([], {})):
        assert not same(a, b) and not same({"x": [a]}, {"x": [b]})


def order_of(task, status):
    return next(o for o, row in task.db["orders"].items() if row["status"] == status)


def test_tools_refuse_before_identification_and_change_nothing():
    task = SHOP.task("train", 0, 0)
    order, item = next((o, next(iter(r["items"]))) for o, r in task.db["orders"].items())
    world = SHOP.world(task)
    for name, arguments in (
        ("cancel_order", {"order": order}),
        ("return_item", {"order": order, "item": item}),
        ("change_address", {"order": order, "address": "X"}),
        ("get_payment", {"order": order}),
    ):
        assert world.call(name, arguments).startswith("Error: identify")
    assert not world.written


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("no_such_tool", {}),
        ("cancel_order", {}),
        ("cancel_order", {"order": "#Z00"}),
        ("cancel_order", {"order": 1}),
        ("cancel_order", {"order": None}),
        ("cancel_order", {"order": ["#A10"]}),
        ("cancel_order", {"order": "#A10", "extra": 1}),
        ("find_customer", {"name": ""}),
        ("exchange_item", {"order": "#A10", "item": "red bag", "color": ""}),
    ],
)
def test_bad_calls_are_observations_and_change_nothing(name, arguments):
    world = SHOP.world(SHOP.task("train", 0, 1))
    assert world.call(name, arguments).startswith("Error: ")
    assert not world.written


def test_an_exchange_needs_a_color_that_exists():
    task = next(t for i in range(N) if (t := SHOP.task("train", 0, i)).kind == "exchange" and not t.wants.slip)
    world, good = SHOP.world(task), task.gold[0].arguments
    world.call("get_order", {"order": good["order"]})
    for color in ("purple", "", "blue bag", "BLUE"):
        assert world.call("exchange_item", good | {"color": color}).startswith("Error: ")
    assert not world.written


def test_naming_every_weekday_tells_none():
    task = next(t for i in range(N) if (t := SHOP.task("train", 0, i)).kind == "track")
    day = task.told[0].value
    for messages, reward in (
        ([f"The day is {day}."], 1),
        (["The day is Monday, or Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday."], 0),
        ([next(d for d in shop.DAYS if d != day), day], 0),
        ([day.upper()], 0),
        ([], 0),
    ):
        world = SHOP.world(task)
        for message in messages:
            world.tell(message)
        assert world.reward().value == reward, messages


def test_extra_writes_cost_the_reward():
    task = next(t for i in range(N) if (t := SHOP.task("train", 0, i)).kind == "track")
    world = SHOP.world(task)
    world.tell(f"The day is {task.told[0].value}.")
    order = order_of(task, "pending") if any(r["status"] == "pending" for r in task.db["orders"].values()) else None
    world.call("get_order", {"order": order or next(iter(task.db["orders"]))})
    world.call("change_address", {"order": order or next(iter(task.db["orders"])), "address": "Elsewhere"})
    assert world.reward().value == 0 and world.reward().diff


def test_schemas_come_from_signature_and_docstring():
    made = {s["function"]["name"]: s["function"] for s in map(schema, shop.TOOLS.values())}
    assert 6 <= len(made) <= 10
    exchange = made["exchange_item"]["parameters"]
    assert exchange["required"] == ["order", "item", "color"]
    assert exchange["properties"]["item"] == {"type": "string", "description": "color and kind, such as red bag"}
    assert all("world" not in f["parameters"]["properties"] for f in made.values())


def test_calls_are_recorded_in_order():
    world = SHOP.world(SHOP.task("train", 0, 0))
    world.call("a", {})
    world.call("b", {"x": 1})
    assert world.calls == [Call("a", {}), Call("b", {"x": 1})]


def carelessly(change):
    """A careful demonstrator whose messages and calls go through `change(act, rng)` → a list of acts."""

    def agent(rng):
        inner = shop.demonstrator(shop.CAREFUL, rng)
        heard = yield next(inner)
        while True:
            try:
                act = inner.send(heard)
            except StopIteration:
                return
            for step in change(act):
                heard = yield step

    return agent


def test_saying_why_not_and_then_doing_it_is_not_paid():
    """Refusing first and acting afterwards must not earn what either earns."""
    hedge = lambda act: [f"It is already delivered. {act}" if act == "What is the new address?" else act]
    talks = [t for t in run(carelessly(hedge)) if t[0].kind == "address"]
    assert talks and success(talks) == 0


def test_a_write_before_the_read_back_is_not_repaired_by_a_second_one():
    """The user changes its mind at the read-back: who writes first and asks afterwards must lose."""
    for kind in ("exchange", "address"):
        task = next(t for i in range(N) if (t := SHOP.task("train", 0, i)).kind == kind and t.wants.wishes[0].final)
        wish, gold = task.wants.wishes[0], task.gold[0]
        world = SHOP.world(task)
        world.call("get_order", {"order": wish.order})
        early = gold.arguments | {"color" if kind == "exchange" else "address": wish.new}
        assert world.call(gold.name, early) == "ok"
        assert world.call(gold.name, gold.arguments).startswith("Error: already changed")
        assert world.reward().value == 0


def test_a_read_back_must_name_a_detail():
    task = next(t for i in range(N) if (t := SHOP.task("train", 0, i)).kind == "return" and not t.wants.slip)
    script = SHOP.script(task, random.Random(0))
    script.begin()
    assert "yes" not in script.answer("Shall I?").text and script.act == "pardon"
    assert "yes" not in script.answer("Shall I do it?").text and script.act == "pardon"


def test_a_refusal_needs_the_day_that_only_the_order_tells():
    task = next(t for i in range(N) if (t := SHOP.task("train", 0, i)).kind == "refuse")
    reason, day = (f.value for f in task.told)
    for text, reward in (
        (f"Sorry, it is {reason}. The day is {day}.", 1),
        (f"Sorry, it is {reason}.", 0),
        (f"Sorry, it is {' or '.join(shop.REFUSALS)}. The day is {day}.", 0),
        (f"Sorry, it is {reason}. The day is {' or '.join(shop.DAYS)}.", 0),
    ):
        world = SHOP.world(task)
        world.tell(text)
        assert world.reward().value == reward, text


def test_find_order_knows_only_identified_customers():
    task = SHOP.task("train", 0, 0)
    (name, row), other = next(iter(task.db["customers"].items())), list(task.db["customers"])[1]
    world, item = SHOP.world(task), next(iter(task.db["orders"][row["orders"][1]]["items"]))
    assert world.call("find_order", {"name": name, "item": item}).startswith("Error: identify")
    world.call("find_customer", {"name": name})
    assert row["orders"][1] in world.call("find_order", {"name": name, "item": item})
    assert world.call("find_order", {"name": name, "item": "red spoon"}).startswith("Error: no such item")
    assert world.call("find_order", {"name": other, "item": item}).startswith("Error: identify")
