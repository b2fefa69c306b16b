"""Users: the common interface, the script's answers, and the audit of a simulated user."""

import dataclasses
import json
import random
import re
from pathlib import Path

import pytest
from test_chat import CHAT
from test_domains_wired import played

import config
import evaluation
from chat import UserError, turn_text
from domains import shop
from tools import play
from user_sim import GUIDE, STOP, STOPS, UNJUDGED, Heard, ScriptedUser, breach, choose, departure, parse_pool

SHOP, CFG = shop.Shop(), config.Config(max_turns=1, max_len=10**6)
TAU2 = Path(__file__).parents[2] / "shared/tau2"


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
        assert departure(SHOP, task, said["agent"], said["user"]) is None, talk
        replies = list(said["user"])
        replies[-1] = "I want to cancel an order."
        assert departure(SHOP, task, said["agent"], replies) is not None
        replies = list(said["user"])
        replies[0] = f"That is all. {STOP}"
        assert departure(SHOP, task, said["agent"], replies) is not None


def test_a_yes_to_the_wrong_thing_is_a_fault_of_kind_no():
    task = task_of("address", changed=True, slip=False)
    wish = task.wants.wishes[0]
    ask = f"Shall I send {wish.order} to {wish.new}?"
    who = task.wants.name if task.wants.knows != "order" else wish.order
    replies = ["I need to redirect an order.", f"{who}.", f"To {wish.final}, yes."]
    assert departure(SHOP, task, ["What is your name or order number?", ask], replies) == "no"


def test_what_the_script_cannot_understand_is_not_the_users_fault():
    task = task_of("cancel")
    assert departure(SHOP, task, ["Gnarf."], ["I want to cancel an order, please.", "Hm?"]) == UNJUDGED


def test_failed_users_count_as_faults_and_unjudged_talks_do_not():
    shares = evaluation.fault_shares(["failed", None, None, UNJUDGED, "yes"])
    assert shares["user_fault_rate"] == 0.5 and shares["user_unjudged"] == 0.2
    told = evaluation.told_of_faults(shares)
    assert told == "user faults 50.0% (failed 25.0%, yes 25.0%); 20.0% of the talks not judged"
    assert evaluation.told_of_faults({"success": 1.0}) == ""  # nobody was played by a model


def test_what_a_trained_user_that_says_nothing_or_has_no_room_is_worth():
    """The table in docs/users.md: the agent can do nothing for the one, and has talked too long for the other."""
    stage, task = evaluation.Stage(CFG, SHOP, CHAT, {}), task_of("cancel", knows="name")
    first = SHOP.script(task, random.Random(0)).begin().text
    for said, exit, fault in [
        ([first, ""], "user_failed", "failed"),
        ([first, None], "context_full", None),
        ([None], "context_full", None),
        ([first, "I am Zoe Zhou."], "turn_limit", "name"),
    ]:
        t = played(stage, task, {"agent": ["What is your name or order number?"], "user": said})
        assert (t.exit, t.reward) == (exit, None if exit == "user_failed" else 0.0), said
        assert evaluation.fault_of(SHOP, task, t) == fault, said
    t = played(stage, task, {"agent": [], "user": [STOP]})
    assert t.exit == "user_failed" and evaluation.fault_of(SHOP, task, t) == "cancel"  # a departure comes first


def test_a_departure_is_counted_and_changes_no_reward():
    stage, task, said = (
        evaluation.Stage(dataclasses.replace(CFG, max_turns=24), SHOP, CHAT, {}),
        task_of("cancel", knows="name"),
        {"agent": [], "user": []},
    )
    agent, script = shop.demonstrator(shop.CAREFUL, random.Random(0)), SHOP.script(task, random.Random(0))
    for who, what in play(agent, script, SHOP.world(task)):
        if who != "tool":
            said["user" if who == "user" else "agent"].append(turn_text([what]) if who == "call" else what)
    t = played(stage, task, said)
    assert (t.exit, t.reward, evaluation.fault_of(SHOP, task, t)) == ("user_ended", 1.0, None)
    t = played(stage, task, said | {"user": [*said["user"][:-1], f"I want to cancel an order. {STOP}"]})
    assert (t.exit, t.reward) == ("user_ended", 1.0) and evaluation.fault_of(SHOP, task, t) is not None


# ---------------------------------------------------------------- a pool


def test_a_pool_is_drawn_by_its_weights_and_by_the_episodes_stream():
    pool = parse_pool("lm=3, scripted")
    assert pool == {"lm": 3.0, "scripted": 1.0} and parse_pool("lm") == {"lm": 1.0}
    assert parse_pool("frozen:runs/a,self=.5,openai:org/m:free=2") == {
        "frozen:runs/a": 1,
        "self": 0.5,
        "openai:org/m:free": 2,
    }
    drawn = [choose(pool, (0, 1, i, 2)) for i in range(4000)]
    assert drawn == [choose(pool, (0, 1, i, 2)) for i in range(4000)]
    assert abs(drawn.count("lm") - 3000) < 5 * (4000 * 0.75 * 0.25) ** 0.5  # five standard deviations
    assert len({tuple(choose(pool, (0, i, m)) for m in range(8)) for i in range(20)}) > 15  # members differ
    random.seed(1)
    state = random.getstate()
    choose(pool, (1,))
    assert random.getstate() == state  # nobody else's numbers are used up


BAD_POOLS = [
    "",
    "lm=0",
    "lm=-1",
    "lm=nan",
    "lm=inf",
    "lm=x",
    "bot",
    "lm=1,lm=2",
    "lm,",
    "lm=",
    "lm:1",
    "frozen:",
    "openai",
]


@pytest.mark.parametrize("text", [*BAD_POOLS, "openai:a,openai:b"])
def test_a_bad_pool_is_refused_in_one_line(text):
    with pytest.raises(UserError) as error:
        parse_pool(text)
    assert f"--user {text}:" in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------- the contract

KIM = "You are Kim, and your user id is kim_1. You want your money back. Hidden: you will accept 20 dollars."


@pytest.mark.parametrize(
    "kind, text",
    [
        ("empty", ""),
        ("empty", " \n"),
        ("as_agent", "Sure, I can help you with your order. Could you give me your user id?"),
        ("as_agent", "Hello! How may I help you today?"),
        ("as_agent", "Please confirm your order number."),
        ("as_agent", "I’ve cancelled your order. Is there anything else I can help with?"),
        ("as_agent", "I'll be happy to help you."),
        ("as_agent", "May I have your full name, please?"),
        (
            "aside",
            'ok please pass it on\n\nNote to self: my part is the customer here, so the next line I send is: "when"',
        ),
        ("aside", "Customer: I want my money back."),
        ("aside", "I want my money back.\nAgent: Of course!"),
        ("aside", "**Reasoning:** they asked for my id."),
        ("aside", "<think>They want my id."),
        ("aside", "As an AI language model, I have no orders."),
        ("aside", "I should respond with my id. kim_1"),
        ("aside", "if the agent asks for a reason, it is too large"),
        ("aside", '<tool_call>\n{"name": "wifi"}\n</tool_call>'),
        ("instruction", "Hidden: you will accept 20 dollars."),
        ("instruction", "My task: You are KIM and your  user id is kim_1!"),
    ],
)
def test_a_broken_contract_is_seen(kind, text):
    assert breach(text, KIM)[0] == kind


def test_a_customers_own_words_are_no_fault():
    for text in (
        "My user id is kim_1",
        "I'm Kim, and my user id is kim_1. I want my money back.",
        "Can you help me with my order? I will accept 20 dollars.",
        "Could you tell me what you need from me?",
        "Please cancel it. Thank you for your help!",
        "The agent I spoke to yesterday promised a refund.",
        f"Yes, please. {STOP}",
        "No.",
    ):
        assert breach(text, KIM) is None, text
    assert breach(f"Yes. {STOPS[1]}", KIM, opening=True)[0] == "stop_at_once"
    words = [f"w{i}" for i in range(100)]
    assert breach(" ".join(words[9:48]), " ".join(words)) is None  # a customer may say how it was put to it
    assert breach(" ".join(words[9:49]), " ".join(words))[0] == "instruction"  # but not forty words of it


def test_the_scripted_customers_of_the_shop_keep_the_contract():
    for i in range(200):
        task, rng = SHOP.task("train", 0, i), random.Random(i)
        script = SHOP.script(task, rng, rng.choice(["scripted", "stranger"]))
        for who, text in play(shop.demonstrator(shop.TEACHER, rng), script, SHOP.world(task)):
            assert who != "user" or breach(text, GUIDE + SHOP.instruction(task)) is None, text


MINE = (
    (r"\byou are\b", "I am"),
    (r"\byou've\b", "I've"),
    (r"\byou\b", "I"),
    (r"\byour\b", "my"),
    (r"\byourself\b", "me"),
)


@pytest.mark.skipif(not TAU2.is_dir(), reason="needs ../shared/tau2")
@pytest.mark.parametrize("domain, end", [("retail", ""), ("airline", ""), ("telecom", "_tools")])
def test_on_real_scenarios_reading_out_is_seen_and_retelling_is_not(domain, end):
    """The most literal of honest customers repeats its scenario sentence by sentence, with I for you."""
    guide = (TAU2 / f"user_simulator/simulation_guidelines{end}.md").read_text()
    for task in json.loads((TAU2 / domain / "tasks.json").read_text()):
        parts = task["user_scenario"]["instructions"]
        prompt = f"{guide}\n\n<scenario>\n{json.dumps(parts, ensure_ascii=False)}\n</scenario>"
        for key in ("reason_for_call", "known_info"):
            for sentence in re.split(r"(?<=[.!?])\s+", parts[key] or ""):
                mine = sentence
                for you, me in MINE:
                    mine = re.sub(you, me, mine, flags=re.I)
                if "the agent" not in mine and "{" not in mine:  # how to play it; what nobody says aloud
                    assert breach(mine or "-", prompt) is None, mine
        assert breach("\n".join(v for v in parts.values() if v), prompt)
        assert breach(guide[200:500], prompt)
