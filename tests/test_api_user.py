"""Users behind an API, against a real HTTP server that gives scripted answers, good and bad."""

import contextlib
import dataclasses
import functools
import json
import logging
import signal
import ssl
import sys
import threading
import time
from concurrent.futures import wait
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from test_chat import CHAT
from test_rollout import LIMITS, MODEL, Domain, Task, World, call_ids

import api_user
from api_user import FATAL, Api, ApiUser, Endpoint, Failed, ServiceError, read_answer, retry_wait, scrub
from chat import Role, Sample, UserError, turn_text
from rollout import Sampler, converse, rollout
from user_sim import MAX_HOPS, STOP, STOPS, Wait

KEY = "sk-test-0123456789abcdef"
CERTIFICATES = functools.cache(ssl.create_default_context)  # no client here needs them, and each would read them anew
INSTRUCTION = "You are Kim. You want to cancel your order W7. Hidden: you will accept 20 dollars."


# ---------------------------------------------------------------- a server that says what it is told to


@dataclasses.dataclass
class Reply:
    """One HTTP answer. cut: the connection is closed after that many bytes of it. It comes after `delay` seconds, and once
    `event` is set."""

    body: object = None
    status: int = 200
    headers: dict = dataclasses.field(default_factory=dict)
    cut: int | None = None
    delay: float = 0.0
    event: threading.Event | None = None


def said(text, calls=(), **more) -> Reply:
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    calls = [{"id": f"c{i}", "type": "function", "function": f} for i, f in enumerate(functions)]
    message = {"role": "assistant", "content": text, "tool_calls": calls or None}
    return Reply({"choices": [{"message": message, "finish_reason": "stop"}], **more})


class Server(ThreadingHTTPServer):
    """Gives `replies` in turn, the last one for ever; a function among them is asked with the request."""

    request_queue_size, daemon_threads, block_on_close = 256, True, False

    def __init__(self, *replies):
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies, self.requests, self.times, self.lock = list(replies), [], [], threading.Lock()
        self.keys = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def next(self, request) -> Reply:
        with self.lock:
            self.requests.append(request)
            self.times.append(time.monotonic())
            reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return reply(request) if callable(reply) else reply

    def handle_error(self, *_):  # a client that went away
        pass


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.keys.append(self.headers["Authorization"])
        reply = self.server.next(request)
        time.sleep(reply.delay)
        if reply.event is not None:
            reply.event.wait(20)
        text = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
        head = {"Content-Type": "application/json", "Content-Length": str(len(text.encode())), **reply.headers}
        lines = [f"HTTP/1.1 {reply.status} x", *(f"{k}: {v}" for k, v in head.items()), "", text]
        self.wfile.write("\r\n".join(lines).encode()[: reply.cut])
        self.close_connection = reply.cut is not None

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(*replies, **options):
    """→ (server, api)."""
    server = Server(*replies)
    try:
        with Api(Endpoint(**{"model": "m", "url": server.url, "timeout": 5.0, **options})) as api:
            yield server, api
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    """No proxy, a key, and a clock that runs fast: the pauses themselves are tested below."""
    monkeypatch.setattr(ssl, "create_default_context", CERTIFICATES)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    quick = lambda *a: None if (seconds := retry_wait(*a)) is None else seconds / 100
    monkeypatch.setattr(api_user, "retry_wait", quick)


def ask(api):
    return api.ask([{"role": "user", "content": "Hello?"}], None, 1).result(20)


def user_of(api, stream=(1, 2, 3)):
    return ApiUser(api, INSTRUCTION, "Good day!", stream)


def drive(turn):
    """Runs one turn of a user to its end."""
    try:
        while True:
            wait([next(turn).future], 20)
    except StopIteration as stop:
        return stop.value


def play(turns, user, domain=None):
    """One conversation in which the agent samples `turns`. → (trajectory, world)."""
    domain, turns = domain or Domain(), iter(turns)
    talk = converse(Task(), domain, user, CHAT, LIMITS, (7, 1, 2))
    try:
        request = next(talk)
        while True:
            if isinstance(request, Wait):
                wait([request.future], 20)
            else:
                text = next(turns)
                ids = call_ids(text) if "<tool_call>" in text else CHAT.encode(text)
                for token in [*ids, CHAT.end_id]:
                    request.ctx.sampled(token, -0.5)
            request = talk.send(None)
    except StopIteration as stop:
        return stop.value, domain.worlds[-1]


class Phone(World):
    def user_call(self, name, arguments):
        self.calls.append(("user", name, arguments))
        return f"{name} is on"


class Telecom(Domain):
    user_tools = tuple({"type": "function", "function": {"name": n, "parameters": {}}} for n in ("wifi", "data"))

    def world(self, task):
        self.worlds.append(Phone())
        return self.worlds[-1]


# ---------------------------------------------------------------- the network


@pytest.mark.parametrize(
    "header, expected",
    [
        *((text, float(text)) for text in ("5", "120", "0.25", " 7 ")),
        *((text, None) for text in ("121", "1" + "0" * 400, "Wed, 21 Oct 2015 07:30:00 GMT")),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 30.0),
        ("Wed, 21 Oct 2015 07:28:00 -0000", 30.0),
        *((text, "backoff") for text in ("0", "-3", "nan", "inf", "soon", "", "5, 6", "Wed, 21 Oct 2015 07:00:00 GMT")),
        ("Wed, 99 Oct 2015 07:28:00 GMT", "backoff"),
        (None, "backoff"),
    ],
)
def test_retry_after(header, expected):
    now = datetime(2015, 10, 21, 7, 27, 30, tzinfo=UTC)
    if expected != "backoff":
        assert retry_wait(header, 0, now) == expected
        return
    for attempt, longest in enumerate([0.5, 1, 2, 4, 8, 8, 8]):
        waits = [retry_wait(header, attempt, now) for _ in range(50)]
        assert longest * 0.75 <= min(waits) < max(waits) <= longest  # bounded, growing, never the same for all
    assert retry_wait(header, 5000, now) <= 8


def test_a_server_that_asks_for_a_pause_gets_it(monkeypatch):
    monkeypatch.setattr(api_user, "retry_wait", retry_wait)
    with serving(Reply({}, 429, {"Retry-After": "0.6"}), said("Hi")) as (server, api):
        assert ask(api).text == "Hi"
    assert server.times[1] - server.times[0] >= 0.6  # the back-off would have come sooner


BAD = {
    "429": Reply({"error": {"message": "slow down"}}, 429),
    "500": Reply({"error": {"message": "boom"}}, 500),
    "502 in HTML": Reply("<html>bad gateway</html>", 502, {"Content-Type": "text/html"}),
    "503 with a pause": Reply({}, 503, {"Retry-After": "2"}),
    "408": Reply({}, 408),
    "cut before the answer": Reply({}, cut=0),
    "cut in the head": Reply({}, cut=20),
    "cut in the body": Reply({"choices": []}, cut=100),
    "no JSON": Reply("{]"),
    "nothing": Reply(""),
    "HTML": Reply("<html>login</html>", headers={"Content-Type": "text/html"}),
    "too deep": Reply("[" * 100_000),
    "a list": Reply([]),
    "null": Reply("null"),
    "no choices": Reply({"choices": []}),
    "choices null": Reply({"choices": None}),
    "choice null": Reply({"choices": [None]}),
    "message null": Reply({"choices": [{"message": None, "finish_reason": "content_filter"}]}),
    "content null": Reply({"choices": [{"message": {"content": None}, "finish_reason": "stop"}]}),
    "content a number": Reply({"choices": [{"message": {"content": 3}}]}),
    "filtered half-way": Reply({"choices": [{"message": {"content": "I w"}, "finish_reason": "content_filter"}]}),
    "only reasoning": Reply({"choices": [{"message": {"content": [{"type": "reasoning", "text": "x"}]}}]}),
    "error and 200": Reply({"error": {"message": "overloaded"}}),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_trouble_is_tried_again_and_then_a_typed_failure(bad):
    with serving(bad, bad, said("Hi"), attempts=3) as (server, api):
        assert ask(api).text == "Hi"
        assert len(server.requests) == 3 and api.troubles.total() == 2
    with serving(bad, attempts=3) as (server, api):
        with pytest.raises(ServiceError, match="attempt 3 of 3"):
            ask(api)
        assert len(server.requests) == 3
        heard = drive((user := user_of(api)).open())
        assert heard.failed and heard.ended and "attempt 3 of 3" in user.failure


def test_an_answer_that_comes_too_late_is_not_waited_for():
    late = dataclasses.replace(said("Late"), delay=2.5)
    with serving(late, said("Hi"), timeout=1.0, attempts=2) as (_, api):
        assert ask(api).text == "Hi" and api.troubles == {"no answer in 1 s": 1}
    with serving(late, timeout=0.2, attempts=1) as (_, api), pytest.raises(ServiceError, match="no answer in"):
        ask(api)


def test_an_episode_whose_user_is_down_counts_for_nothing():
    with serving(Reply({}, 503), attempts=2) as (_, api):
        trajectory, _ = play([], user_of(api))
    assert trajectory.exit == "user_failed" and trajectory.reward is None
    assert trajectory.metrics["user_failure"].startswith("HTTP 503") and json.dumps(trajectory.metrics)


def test_what_asking_again_cannot_mend_is_not_asked_again():
    for status in (400, 403, 413, 422):
        with serving(Reply({"error": {"message": "prompt too long"}}, status)) as (server, api):
            with pytest.raises(ServiceError, match=f"HTTP {status}.*prompt too long"):
                ask(api)
            assert len(server.requests) == 1
    too_long = Reply({}, 429, {"Retry-After": "121"})
    with serving(too_long) as (_, api), pytest.raises(ServiceError, match="attempt 1 of 5"):
        ask(api)
    spent = Reply({"error": {"message": "pay first", "code": "insufficient_quota"}}, 429)
    for reply in (*(Reply({"error": {"message": "no such model"}}, status) for status in FATAL), spent):
        with serving(reply) as (server, api):
            with pytest.raises(UserError, match="check its URL, its model and the key in OPENAI_API_KEY") as error:
                play([], user_of(api))
            assert error.value.__context__ is None and len(server.requests) == 1


def test_a_wrong_address_is_found_before_the_run():
    with (
        Api(Endpoint("m", "http://127.0.0.1:9/v1", attempts=2)) as api,
        pytest.raises(UserError, match="no connection"),
    ):
        api.check()
    with serving(said("Hello.")) as (_, api):
        api.check()


def test_text_in_parts_and_thoughts():
    def text(content):
        return read_answer({"choices": [{"message": {"content": content}}]}).text

    assert text([{"type": "reasoning", "reasoning": "x"}, {"type": "text", "text": "Hi"}]) == "Hi"
    assert text([{"type": "text", "text": "Hi "}, None, {"type": "text", "text": "there"}]) == "Hi there"
    assert text("<think>The agent wants\nmy name.</think>\n\nKim.") == "Kim."
    assert text("my name.</think> Kim.") == "Kim." and text("Kim. <think>So") == "Kim." and text("<think>So") == ""
    assert text("caf\ud800é") == "caf?é"


def test_a_budget_of_tokens_stops_the_run():
    usage = {"usage": {"prompt_tokens": 30, "completion_tokens": 10, "total_tokens": 40}}
    with serving(said("Hi", **usage), budget=100) as (server, api):
        for _ in range(3):
            ask(api)
        with pytest.raises(UserError, match="120 tokens are spent, its budget is 100; raise it"):
            ask(api)
        assert len(server.requests) == 3 and api.tokens == 120
        with Api(api.endpoint, tokens=api.tokens) as resumed, pytest.raises(UserError, match="budget"):
            ask(resumed)
    with serving(said("Hi"), budget=10_000) as (_, api):  # no usage in the answer: guessed, never free
        ask(api)
        assert 20 < api.tokens < 200
    with serving(said("Hi", **usage), budget=100, at_once=1) as (
        server,
        api,
    ):  # checked when it is sent, not when asked
        waits = [api.ask([{"role": "user", "content": "?"}], None, 1) for _ in range(20)]
        assert sum(f.exception(20) is None for f in waits) == len(server.requests) == 3


def test_what_is_sent_and_that_members_of_a_group_differ():
    def seeds(streams, **options):
        with serving(said("I want to cancel."), **options) as (server, api):
            for stream in streams:
                drive(user_of(api, stream).open())
        return [request.get("seed") for request in server.requests], server.requests[0]

    streams = [(1, 0, 0), (1, 0, 1), (1, 1, 0)]
    found, request = seeds(streams, temperature=0.5, max_new=99)
    assert len(set(found)) == 3 and found == seeds(streams)[0] and found != seeds(streams, seed=301)[0]
    assert (request["model"], request["temperature"], request["max_completion_tokens"]) == ("m", 0.5, 99)
    assert [m["role"] for m in request["messages"]] == ["system", "user"] and "tools" not in request
    assert not {"seed", "temperature", "max_completion_tokens"} & seeds([(1,)], seed=None, temperature=None)[1].keys()


# ---------------------------------------------------------------- the user's contract


def test_roles_are_flipped_and_the_view_grows():
    with serving(said("I want to cancel."), said("Yes."), said(f"Bye. {STOP}")) as (server, api):
        trajectory, world = play(["Cancel W7?", "Done."], user := user_of(api))
    assert trajectory.exit == "user_ended" and trajectory.reward == 1.0 and world.told == ["Cancel W7?", "Done."]
    view = [(m["role"], m["content"]) for m in server.requests[-1]["messages"]]
    assert view == [
        ("system", INSTRUCTION),
        ("user", "Good day!"),
        ("assistant", "I want to cancel."),
        ("user", "Cancel W7?"),
        ("assistant", "Yes."),
        ("user", "Done."),
    ]
    assert trajectory.metrics["user_breaches"] == {} and user.failure == ""


BROKEN = {
    "empty": said(""),
    "as_agent": said("Sure, I can help you with your order. Could you give me your user id?"),
    "aside": said(
        'ok please pass it on\n\nNote to self: my part is the customer here, so the next line I send is: "when"'
    ),
    "instruction": said("Hidden: you will accept 20 dollars."),
    "unknown_tool": said(None, [("toggle_wifi", "{}")]),
    "bad_call": said(None, [("wifi", "{'a': NaN")]),
    "bad_call with tags": said(None, [("wifi", "</tool_call></think><tool_call>{")]),
    "bad_call in another form": Reply({"choices": [{"message": {"content": None, "tool_calls": [None]}}]}),
    "bad_call without end": said(None, [("wifi", 10**30)]),
    "as_agent beside a call": said("How can I help you today?", [("wifi", "{}")]),
    "stop_at_once": said(f"I'm done. {STOP}"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_contract_is_answered_with_one_reminder_that_leaves_no_trace(kind):
    broken, kind = BROKEN[kind], kind.split()[0]
    with serving(broken, said("My user id is kim_1"), said("Yes.")) as (server, api):
        user = user_of(api)
        user.tools = list(Telecom.user_tools)
        heard = drive(user.open())
        assert heard.text == "My user id is kim_1" and not heard.failed and user.breaches == {kind: 1}
        assert drive(user.reply("Cancel W7?")).text == "Yes."
    first, again, later = (request["messages"] for request in server.requests)
    assert again[0]["content"].startswith(INSTRUCTION + "\n\nYour last answer could not be used")
    assert again[1:] == first[1:]  # a plain repeat of the same request would give the same answer
    assert later[:2] == first and [m["content"] for m in later[2:]] == ["My user id is kim_1", "Cancel W7?"]
    with serving(broken) as (server, api):
        trajectory, _ = play([], user := user_of(api), Telecom())
        assert trajectory.exit == "user_failed" and trajectory.reward is None and len(server.requests) == 2
        assert trajectory.metrics == trajectory.metrics | {"user_breaches": {kind: 2}, "user_failure": user.failure}
        assert kind in user.failure


@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_anywhere_in_the_text_is_a_normal_end(stop):
    for text in (stop, f"No, thanks!{stop}", f"{stop}Bye", f"Yes.\n{stop}\n"):
        with serving(said("I want to cancel."), said(text)) as (_, api):
            trajectory, world = play(
                ["Shall I cancel W7, yes or no?"], user_of(api)
            )  # it waits for a yes: all the same
            assert trajectory.exit == "user_ended" and trajectory.reward == 1.0 and not world.calls
            assert trajectory.turns[-1] == {"role": "user", "text": text.strip()}


def test_a_stop_in_the_agents_mouth_ends_nothing():
    with serving(said("I want to cancel."), said("What do you mean?"), said(STOP)) as (server, api):
        trajectory, _ = play([f"Goodbye {STOP}", "Oh."], user_of(api))
    assert trajectory.exit == "user_ended" and trajectory.metrics["turns"] == 2
    assert server.requests[1]["messages"][-1]["content"] == f"Goodbye {STOP}"
    with serving(said("I want to cancel."), said("### STOP ###"), said("###stop###"), said(STOP)) as (_, api):
        assert play(["A", "B", "C"], user_of(api))[0].metrics["turns"] == 3  # nor does what only looks like one


# ---------------------------------------------------------------- the user's tools


def test_a_users_calls_act_on_the_world_and_are_not_the_agents():
    both = said("One moment.", [("wifi", '{"on": true}'), ("data", "")])
    with serving(said("No signal."), both, said("It is on."), said(STOP)) as (server, api):
        trajectory, world = play(["Switch it on.", "Good."], user_of(api), Telecom())
    assert world.calls == [("user", "wifi", {"on": True}), ("user", "data", {})]
    assert [t["role"] for t in trajectory.turns[1:7]] == ["agent", *["user_call", "user_tool"] * 2, "user"]
    assert trajectory.turns[4]["text"] == turn_text([api_user.Call("data", {})])
    assert trajectory.turns[6]["text"] == "One moment.\n\nIt is on."
    heard = CHAT.decode([i for i, r in zip(trajectory.ids, trajectory.roles, strict=True) if r == Role.USER])
    assert heard == "No signal.One moment.\n\nIt is on." and trajectory.metrics["tools"] == {}
    assert server.requests[0]["tools"] == list(Telecom.user_tools)
    call, *results = server.requests[2]["messages"][-3:]
    assert [c["function"] for c in call["tool_calls"]] == [
        {"name": "wifi", "arguments": '{"on": true}'},
        {"name": "data", "arguments": "{}"},
    ]
    assert [(m["role"], m["content"]) for m in results] == [("tool", "wifi is on"), ("tool", "data is on")]
    assert [m["tool_call_id"] for m in results] == [c["id"] for c in call["tool_calls"]]
    ids = [c["id"] for m in server.requests[-1]["messages"] for c in m.get("tool_calls", [])]
    assert len(ids) == len(set(ids)) == 2


def test_nothing_to_say_after_a_silent_call():
    first = said("Please transfer me.", [("wifi", "{}")])
    with serving(first, said("")) as (server, api):
        trajectory, _ = play([], user_of(api), Telecom())
        assert trajectory.exit == "user_failed" and trajectory.metrics["user_breaches"] == {"empty": 2}
        assert trajectory.turns[-1] == {"role": "user", "text": "Please transfer me."} and len(server.requests) == 3
    with serving(said("No signal."), first, said(""), said(f"Thanks, that is all. {STOP}")) as (server, api):
        trajectory, _ = play(["Hm."], user_of(api), Telecom())
        assert trajectory.exit == "user_ended" and trajectory.metrics["user_breaches"] == {"empty": 1}
        assert trajectory.turns[-1]["text"] == f"Please transfer me.\n\nThanks, that is all. {STOP}"
    with serving(said("No signal."), said(f"It works. {STOP}", [("wifi", "{}")])) as (server, api):
        trajectory, world = play(["Try now."], user_of(api), Telecom())
        assert trajectory.exit == "user_ended" and len(world.calls) == 1 and len(server.requests) == 2


def test_a_user_that_only_calls_tools_has_failed():
    with serving(said(None, [("wifi", "{}")])) as (server, api):
        trajectory, world = play([], user_of(api), Telecom())
    assert trajectory.exit == "user_failed" and len(world.calls) == len(server.requests) == MAX_HOPS


# ---------------------------------------------------------------- many at once


def awaits(user, turns):
    """A conversation whose agent only counts: `turns` of 4 tokens, each after a message of the user. → its user."""
    ctx = CHAT.start(None, None, user.api and (1,))
    heard = yield from user.open()
    for _ in range(turns):
        assert not heard.failed
        CHAT.hear(ctx, heard.text)
        yield Sample("agent", ctx, 4)
        heard = yield from user.reply("Well?")
    return user


def alone(seed, turns):
    """A conversation that waits for nobody."""
    ctx = CHAT.start(None, None, (seed,))
    for _ in range(turns):
        CHAT.hear(ctx, "go on")
        yield Sample("agent", ctx, 12)
    return ctx


def test_sixty_four_users_at_once_hold_nobody_up():
    """The server answers no one until 64 have asked, and then not until those that wait for nobody are done."""
    go, asked = threading.Event(), threading.Barrier(64, timeout=60)

    def hold(request):
        if len(request["messages"]) == 2:
            asked.wait()
            return dataclasses.replace(said("I want to cancel."), event=go)
        return said("Yes.")

    done = []

    def on_done(index, _):
        done.append(index)
        if set(done) >= set(range(64, 72)):
            go.set()

    with serving(hold) as (server, api):
        talks = [awaits(user_of(api, (i,)), 2) for i in range(64)] + [alone(i, 6) for i in range(8)]
        sampler = Sampler(MODEL, CHAT.end_ids, 72, 300)
        results = rollout(talks, {"agent": sampler}, on_done)
    assert set(done[:8]) == set(range(64, 72)) and sorted(done) == list(range(72))
    assert [user.breaches.total() for user in results[:64]] == [0] * 64 and len(server.requests) == 64 * 3
    reference = rollout([alone(i, 6) for i in range(8)], {"agent": Sampler(MODEL, CHAT.end_ids, 8, 300)})
    assert [ctx.ids for ctx in results[64:]] == [ctx.ids for ctx in reference]  # and changed nothing they said
    assert not sampler.busy and not sampler.slot_of


def test_no_more_requests_at_once_than_allowed():
    now, most, lock, three = 0, 0, threading.Lock(), threading.Barrier(3, timeout=60)

    def count(request):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        three.wait()  # three are asked at once, however slow the machine is
        time.sleep(0.02)  # and a fourth would have come by now
        with lock:
            now -= 1
        return said("Hi")

    with serving(count, at_once=3) as (_, api):
        wait([api.ask([{"role": "user", "content": "?"}], None, 1) for _ in range(12)], 60)
    assert most == 3


def test_a_finished_conversation_makes_room_though_others_wait():
    with serving(said("I want to cancel.")) as (_, api):
        talks = [awaits(user_of(api, (i,)), 2) if i % 2 else alone(i, 1) for i in range(10)]
        assert len(rollout(talks, {"agent": Sampler(MODEL, CHAT.end_ids, 2, 300)})) == 10


def test_where_all_wait_the_scheduler_sleeps():
    with serving(dataclasses.replace(said("I want to cancel."), delay=0.2)) as (_, api):
        sampler, calls = Sampler(MODEL, CHAT.end_ids, 4, 300), []
        step = sampler.step
        sampler.step = lambda: calls.append(None) or step()
        rollout([awaits(user_of(api, (i,)), 1) for i in range(4)], {"agent": sampler})
    assert len(calls) < 40  # 4 tokens, and a few arrivals, in 0.4 s


def test_an_answer_is_taken_up_while_others_decode():
    done = []
    with serving(said("I want to cancel.")) as (_, api):
        talks = [alone(0, 30), awaits(user_of(api), 1)]
        rollout(talks, {"agent": Sampler(MODEL, CHAT.end_ids, 2, 2000)}, lambda index, _: done.append(index))
    assert done == [1, 0]


def test_an_error_in_one_conversation_closes_the_others_and_drops_what_they_asked():
    never, asked = threading.Event(), threading.Event()

    def silent(_):
        asked.set()
        return dataclasses.replace(said("Hi"), event=never)

    def breaks():
        yield Sample("agent", CHAT.start("a", None, (1,)), 2)
        assert asked.wait(10)
        raise ZeroDivisionError

    with serving(silent, said("Hello"), at_once=1, timeout=20.0) as (_, api):
        talks = [awaits(user_of(api), 1), breaks()]
        with pytest.raises(ZeroDivisionError):
            rollout(talks, {"agent": Sampler(MODEL, CHAT.end_ids, 2, 300)})
        assert talks[0].gi_frame is None
        assert api.ask([{"role": "user", "content": "?"}], None, 1).result(5).text == "Hello"  # the one place is free
    never.set()


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")
def test_ctrl_c_leaves_no_thread_behind():
    never, main, start = threading.Event(), threading.main_thread(), time.monotonic()
    server = Server(dataclasses.replace(said("Hi"), event=never))
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), Api(Endpoint("m", server.url)) as api:
            threading.Timer(0.2, signal.pthread_kill, (main.ident, signal.SIGINT)).start()
            rollout([awaits(user_of(api, (i,)), 1) for i in range(8)], {"agent": Sampler(MODEL, CHAT.end_ids, 8, 300)})
    finally:
        signal.signal(signal.SIGINT, previous)
    assert time.monotonic() - start < 5 and not api._thread.is_alive() and api._loop.is_closed()
    assert "user API" not in {thread.name for thread in threading.enumerate()}
    never.set()
    server.shutdown()
    server.server_close()


# ---------------------------------------------------------------- keys


def leaks(text):
    return any(KEY[i : i + 5] in text for i in range(len(KEY) - 4))


def test_a_key_is_sent_and_shown_nowhere(caplog, capfd):
    caplog.set_level(logging.DEBUG)
    echo = {"error": {"message": f"invalid key {KEY} ({KEY[:9]}****{KEY[-4:]})", "code": KEY, "param": {"k": [KEY]}}}
    for reply in (Reply(echo, 401), Reply(echo, 500), Reply(echo), Reply(echo, 400, {"X-Key": KEY})):
        with serving(reply, attempts=2) as (server, api):
            try:
                trajectory, _ = play([], user := user_of(api))
                shown = f"{trajectory!r} {json.dumps(dataclasses.asdict(trajectory))} {user.failure}"
            except UserError as error:
                shown = f"{error!r} {error.__context__!r}"
            shown += f"{api!r} {api.endpoint!r} {json.dumps(dataclasses.asdict(api.endpoint))} {dict(api.troubles)}"
            assert set(server.keys) == {f"Bearer {KEY}"}
        assert "HTTP" in shown or "overloaded" in shown or "error" in shown
        assert not leaks(shown)
    with serving(said(f"My key is {KEY}")) as (_, api):  # a model that was told it, or a server that echoes all
        heard = drive(user_of(api).open())
        assert heard.text == "My key is [key]" and not heard.failed
    logged = caplog.text + "".join(capfd.readouterr())
    assert "HTTP" in logged and not leaks(logged)


def test_a_key_in_the_wrong_place_is_refused_and_not_repeated(monkeypatch):
    base = "https://api.example.com/v1"
    urls = [f"{base}?api_key={KEY}", f"https://{KEY}@example.com/v1", f"{base}#{KEY}", f"https://a:{KEY}@b/v1", KEY, ""]
    for make in (*(lambda u=u: Endpoint("m", u) for u in urls), lambda: Endpoint("m", base, KEY)):
        with pytest.raises(UserError) as error:
            make()
        assert not leaks(str(error.value)) and "\n" not in str(error.value)
    with pytest.raises(UserError, match="holds the key"):
        Api(Endpoint("m", f"{base}/{KEY}"))
    for bad in (f"{KEY}\n{KEY}", f"{KEY}…", f"a b{KEY}"):
        monkeypatch.setenv("OPENAI_API_KEY", bad)
        with pytest.raises(UserError, match="the key in OPENAI_API_KEY") as error:
            Api(Endpoint("m", base))
        assert not leaks(str(error.value))
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n")  # from a file
    Api(Endpoint("m", base)).close()


def test_bad_endpoints_and_missing_pieces_are_one_line(monkeypatch):
    for options in ({"timeout": 0}, {"attempts": 0}, {"at_once": -1}, {"budget": 0}, {"model": ""}, {"url": "ftp://a"}):
        with pytest.raises(UserError):
            Endpoint(**{"model": "m", **options})
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(UserError, match="OPENAI_API_KEY is not set"):
        Api(Endpoint("m"))
    with serving(said("Hi")) as (_, api):  # a server of one's own wants none
        assert ask(api).text == "Hi"
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(UserError, match="pip install openai"):
        Api(Endpoint("m", "http://127.0.0.1:9/v1"))


def test_scrubbing_keeps_the_rest():
    assert scrub(f"model 'x' not found for\n {KEY[3:12]}*** today", KEY) == "model 'x' not found for [key] today"
    assert scrub("as it is", "") == "as it is" and len(scrub("long " * 100, KEY)) == 200
    assert isinstance(read_answer({"choices": "x"}), Failed)
