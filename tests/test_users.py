"""Users: the common interface, the script's answers, and the audit of a simulated user."""

import random

import pytest

import mua_rl
from domains import shop
from tools import play
from user_sim import STOP, UNJUDGED, Heard, ScriptedUser, user_fault

SHOP = shop.Shop()


def finished(turn) -> Heard:
    """The result of a coroutine that asks for no tokens."""
    with pytest.raises(StopIteration) as stop:
        next(turn)
    return stop.value.value


def task_of(kind, **traits):
    for i in range(5000):
        task = SHOP.task("train", 0, i)
        wish = task.wants.wishes[0]
        facts = {"knows": task.wants.knows, "changed": bool(wish.final), "slip": bool(task.wants.slip)}
        if task.kind == kind and all(facts[k] == v for k, v in traits.items()):
            return task
    raise AssertionError("no such task")


def test_scripted_user_yields_no_requests():
    user = ScriptedUser(SHOP.script(task_of("cancel"), random.Random(0)))
    assert not finished(user.open()).ended
    assert STOP in finished(user.reply("Done. Anything else?")).text


def test_the_change_of_mind_comes_at_the_first_read_back():
    task = task_of("exchange", changed=True, slip=False)
    wish, script = task.wants.wishes[0], SHOP.script(task, random.Random(0))
    script.begin()
    assert wish.new in script.answer("Which item is it, and which color instead?").text
    first = script.answer(f"Shall I exchange in {wish.order} the {wish.item}, to {wish.new}?").text
    assert shop.meaning(first)[1] == "no" and wish.final in first
    second = script.answer(f"Shall I exchange in {wish.order} the {wish.item}, to {wish.final}?").text
    assert shop.meaning(second)[1] == "yes"


def test_the_answer_to_a_read_back_says_what_is_wanted_whatever_was_heard():
    task = task_of("return", changed=False)
    wish, script = task.wants.wishes[0], SHOP.script(task, random.Random(0))
    script.begin()
    text = script.answer(f"Shall I return from {wish.order} the pink tent?").text
    assert shop.meaning(text)[1] == "yes" and wish.item in text


def test_the_wrong_detail_comes_first_and_once():
    task = task_of("cancel", knows="name", slip=True)
    script = SHOP.script(task, random.Random(0))
    script.begin()
    assert task.wants.slip in script.answer("What is your name or order number?").text
    assert task.wants.name in script.answer("There is no such customer. What is the right one?").text


def test_a_user_who_goes_by_order_number_never_says_a_name():
    for i in range(300):
        task, rng = SHOP.task("train", 0, i), random.Random(i)
        if task.wants.knows != "order":
            continue
        talk = play(shop.demonstrator(shop.TEACHER, rng), SHOP.script(task, rng), SHOP.world(task))
        assert not any(task.wants.name in text for who, text in talk if who == "user")
        assert task.wants.name not in SHOP.instruction(task)


def test_the_audit_passes_the_script_in_other_words_and_finds_planted_faults():
    for i in range(300):
        task = SHOP.task("train", 0, i)
        rng = random.Random(i + 1)
        style = rng.choice(["scripted", "stranger"])
        talk = play(shop.demonstrator(shop.TEACHER, rng), SHOP.script(task, rng, style), SHOP.world(task))
        said = {who: [text for w, text in talk if w == who] for who in ("agent", "user")}
        assert user_fault(SHOP, task, said["agent"], said["user"]) is None, talk
        replies = list(said["user"])
        replies[-1] = "I want to cancel an order."
        assert user_fault(SHOP, task, said["agent"], replies) is not None
        replies = list(said["user"])
        replies[0] = f"That is all. {STOP}"
        assert user_fault(SHOP, task, said["agent"], replies) is not None


def test_a_yes_to_the_wrong_thing_is_a_fault_of_kind_no():
    task = task_of("address", changed=True, slip=False)
    wish = task.wants.wishes[0]
    ask = f"Shall I send {wish.order} to {wish.new}?"
    who = task.wants.name if task.wants.knows != "order" else wish.order
    replies = ["I need to redirect an order.", f"{who}.", f"To {wish.final}, yes."]
    assert user_fault(SHOP, task, ["What is your name or order number?", ask], replies) == "no"


def test_what_the_script_cannot_understand_is_not_the_users_fault():
    task = task_of("cancel")
    assert user_fault(SHOP, task, ["Gnarf."], ["I want to cancel an order, please.", "Hm?"]) == UNJUDGED


def test_failed_users_count_as_faults_and_unjudged_talks_do_not():
    shares = mua_rl.fault_shares(["failed", None, None, UNJUDGED, "yes"])
    assert shares["user_fault_rate"] == 0.5 and shares["user_unjudged"] == 0.2
