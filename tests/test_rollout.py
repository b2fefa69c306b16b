"""Conversations end as the table says, and the sampler's tokens are those of one full forward pass."""

import math
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from test_chat import CHAT, TOOLS

import packed
from chat import Call, Context, Role, Sample, turn_text
from model import Base, Decoder, KVCache, ModelConfig, add_lora, keep_to_cores
from rollout import EXITS, Limits, Sampler, _apart, _batches, converse, inverse_cdf, rollout, sampling_seconds

LIMITS = Limits(max_turns=4, max_new=60, max_len=400, max_malformed=2)


# ---------------------------------------------------------------- a tiny domain, user and policy that follow a script


@dataclass
class Heard:
    text: str
    ended: bool = False
    failed: bool = False


@dataclass
class Verdict:
    value: float
    diff: tuple = ("row: 1, goal 2",)
    untold: tuple = ("Monday",)


@dataclass
class World:
    value: float = 1.0
    transferred: bool = False
    calls: list = field(default_factory=list)
    told: list = field(default_factory=list)

    def call(self, name, arguments):
        self.calls.append((name, arguments))
        if name == "crash":
            raise ZeroDivisionError("a bug in a tool")
        self.transferred |= name == "transfer"
        return arguments.get("answer", f"{name} done")

    def tell(self, text):
        self.told.append(text)

    def reward(self):
        return Verdict(self.value)


@dataclass
class Task:
    id: str = "t1"
    kind: str = "kind"
    split: str = "train"


class Domain:
    system, tools, user_tools = "Rules.", TOOLS, None

    def __init__(self):
        self.worlds = []

    def world(self, task):
        self.worlds.append(World())
        return self.worlds[-1]


class User:
    """Says `lines` in turn; a Heard among them is passed on as it is. Yields requests if it has a context."""

    def __init__(self, *lines, ctx=None):
        self.lines, self.ctx, self.heard = list(lines), ctx, []

    def open(self):
        return (yield from self.reply(None))

    def reply(self, text):
        self.heard.append(text)
        if self.ctx is not None:
            CHAT.hear(self.ctx, text or "Good day!")
            yield Sample("user", self.ctx, 8)
            return Heard(CHAT.said(self.ctx) or "…")
        line = self.lines.pop(0) if self.lines else Heard("", ended=True)
        return line if isinstance(line, Heard) else Heard(line)


def play(turns, user, limits=LIMITS, domain=None, cut=()):
    """Drives one conversation; `turns` are what the agent samples, those whose index is in `cut` without an end."""
    domain = domain or Domain()
    seen = []
    talk = converse(Task(), domain, user, CHAT, limits, (7, 1, 2), 3, lambda role, text: seen.append((role, text)))
    turns = iter(enumerate(turns))
    try:
        sample = next(talk)
        while True:
            assert sample.speaker == "agent" and sample.max_new <= limits.max_new
            index, text = next(turns)
            ids = CHAT.encode(text) if "<tool_call>" not in text else call_ids(text)
            ids = ids[: sample.max_new] if index in cut else [*ids, CHAT.end_id]
            assert len(ids) <= sample.max_new
            for token in ids:
                sample.ctx.sampled(token, -0.5)
            sample = talk.send(None)
    except StopIteration as stop:
        assert seen == [(turn["role"], turn["text"]) for turn in stop.value.turns]
        return stop.value, domain.worlds[-1]


def call_ids(text):
    ctx = Context((0,))
    CHAT.hear(ctx, "Hi")
    n = len(ctx.ids)
    CHAT.speak(ctx, text)
    return ctx.ids[n:-1]


def agent_text(t):
    return CHAT.decode([i for i, r in zip(t.ids, t.roles, strict=True) if r == Role.AGENT])


def check_whole(t, limits=LIMITS):
    assert len(t.ids) == len(t.roles) == len(t.logprobs) <= limits.max_len
    assert all(math.isnan(lp) == (r != Role.AGENT) for lp, r in zip(t.logprobs, t.roles, strict=True))
    assert (t.task, t.kind, t.split, t.member, t.stream) == ("t1", "kind", "train", 3, (7, 1, 2))
    assert t.reward == {"graded": 1.0, "zero": 0.0, "none": None}[EXITS[t.exit].reward]
    assert t.diff == ("row: 1, goal 2", "not told: Monday")


LOOK, BYE = turn_text([Call("look", {"key": "a"})]), turn_text([Call("transfer", {})])


def test_user_ends_it():
    t, world = play(["Hello.", LOOK, "Bye."], user := User("Hi", "Look, please", Heard("Thanks", ended=True)))
    check_whole(t)
    assert t.exit == "user_ended" and t.metrics["turns"] == 3 and t.metrics["tools"] == {"look": 1}
    assert user.heard == [None, "Hello.", "Bye."] and world.told == ["Hello.", "Bye."]
    assert world.calls == [("look", {"key": "a"})]
    assert agent_text(t) == f"Hello.<|im_end|>{LOOK}<|im_end|>Bye.<|im_end|>"
    assert [turn["role"] for turn in t.turns] == ["user", "agent", "user", "call", "tool", "agent", "user"]
    ctx = CHAT.start(Domain.system, Domain.tools, (0,))  # what was sampled is what a demonstration would be
    for hear, speak in [("Hi", "Hello."), ("Look, please", LOOK), (None, "Bye.")]:
        CHAT.hear(ctx, hear) if hear else CHAT.observe(ctx, ["look done"])
        CHAT.speak(ctx, speak)
    CHAT.close(ctx)
    assert list(t.ids) == ctx.ids and list(t.roles) == ctx.roles


def test_user_ends_or_fails_before_the_agent_spoke():
    t, _ = play([], User(Heard("Never mind", ended=True)))
    assert t.exit == "user_ended" and t.metrics["agent_tokens"] == 0
    t, _ = play([], User(Heard("", ended=True, failed=True)))
    assert t.exit == "user_failed" and t.reward is None


def test_user_fails():
    t, _ = play(["Hello."], User("Hi", Heard("", ended=True, failed=True)))
    check_whole(t)
    assert t.exit == "user_failed" and EXITS[t.exit] == ("none", False, False)


def test_several_calls_are_executed_in_order_and_a_transfer_ends_it():
    turn = turn_text([Call("a", {}), Call("b", {})], "One moment.") + '\n<tool_call>\n{"name": 1}\n</tool_call>'
    stop = turn_text([Call("c", {}), Call("transfer", {}), Call("d", {})])
    t, world = play([turn, stop], user := User("Hi"))
    check_whole(t)
    assert [name for name, _ in world.calls] == ["a", "b", "c", "transfer"] and t.exit == "transferred"
    assert user.heard == [None]  # prose beside calls is not said
    results = CHAT.decode([i for i, r in zip(t.ids, t.roles, strict=True) if r == Role.TOOL])
    assert results == "a doneb doneError: the call has no name"
    assert t.metrics["malformed"] == 0


def test_turn_limit():
    t, _ = play(["Hello."] * 4, User(*["Hi"] * 9))
    check_whole(t)
    assert t.exit == "turn_limit" and t.metrics["turns"] == 4 and EXITS[t.exit] == ("zero", True, True)
    t, _ = play(["Hello."] * 3 + [BYE], User(*["Hi"] * 9))
    assert t.exit == "transferred"  # in the last turn allowed


def test_malformed_turns_in_a_row():
    bad = "<tool_call>\n{\n</tool_call>"
    t, world = play([bad, LOOK, bad, "", "no"], User(*["Hi"] * 9))
    check_whole(t)
    assert t.exit == "malformed" and t.metrics["malformed"] == 3 and len(world.calls) == 1
    assert "Error: the call is not valid JSON" in t.turns[2]["text"]


def test_a_cut_turn_ends_it_and_its_end_is_not_the_agents():
    t, world = play(["Hello.", "x" * 200], User("Hi", "What?"), cut=[1])
    check_whole(t)
    assert t.exit == "reply_full" and world.told == ["Hello."] and t.metrics["agent_tokens"] > 60
    assert CHAT.decode(t.ids).endswith("x<|im_end|>") and t.roles[-2:] == (Role.AGENT, Role.TEMPLATE)
    assert agent_text(t).count("<|im_end|>") == 1


def test_context_full_by_the_agent_and_by_a_result():
    start = len(CHAT.start(Domain.system, Domain.tools, (0,)).ids)
    limits = Limits(4, 500, start + 80, 2)
    t, _ = play(["y" * 500], User("Hi"), limits, cut=[0])
    check_whole(t, limits)
    assert t.exit == "context_full" and len(t.ids) == limits.max_len and t.roles[-1] == Role.AGENT
    long = turn_text([Call("look", {"answer": "z" * 60})])
    limits = Limits(4, 500, start + 150, 2)
    t, _ = play([long], User("Hi"), limits)
    check_whole(t, limits)
    assert t.exit == "context_full" and len(t.ids) == limits.max_len and t.roles[-1] != Role.AGENT
    assert EXITS[t.exit].trained == "overlong"


def test_our_own_bug_raises():
    with pytest.raises(ZeroDivisionError):
        play([turn_text([Call("crash", {})])], User("Hi"))


# ---------------------------------------------------------------- the sampler


def make_model(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": CHAT.vocab_size, "max_position_embeddings": 2048}
    rest = {
        "model_type": "qwen3",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "rope_scaling": None,
        "tie_word_embeddings": True,
    }
    rest |= {"attention_bias": False, "qk_norm": True}
    model = Decoder(ModelConfig(**(sizes | rest | changes)))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(0, 0.25)
    return model


MODEL = make_model()


def talk(seed, turns, speaker="agent", system=None, max_new=12):
    """A conversation with itself: prompts and turns of very different lengths. Returns its context."""
    rng = random.Random(seed)
    ctx = CHAT.start(system, None, (seed,))
    for _ in range(turns):
        CHAT.hear(ctx, "word " * rng.choice([0, 1, 3, 40]) + str(rng.random())[: rng.randrange(2, 9)])
        yield Sample(speaker, ctx, max_new)
    return ctx


@torch.no_grad()
def full_forward(model, ctx, temperature=1.0):
    """Log-prob of every token but the first, from one pass over the whole context. [L − 1]"""
    ids = torch.tensor([ctx.ids])
    logits = model(ids)[0, :-1] @ model.head.T
    return (logits / temperature).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]


def worst_gap(model, contexts, temperature=1.0):
    gaps = []
    for ctx in contexts:
        ours = torch.tensor(ctx.logprobs)[1:]
        gaps.append((full_forward(model, ctx, temperature) - ours)[~ours.isnan()].abs().max())
    return float(max(gaps))


@pytest.fixture(params=["packed", "padded"])
def way(request, monkeypatch):
    """Both ways through the decoder: of CPUs with numba, and of all else (GPUs too)."""
    if request.param == "padded":
        monkeypatch.setattr(packed, "numba", None)
    assert (Sampler(MODEL, CHAT.end_ids, 1, 9).packed is not None) == (request.param == "packed")


@pytest.mark.parametrize("slots, temperature", [(3, 0.7), (20, 1.0), (40, 1.0)])
def test_ragged_turns_equal_one_full_forward(slots, temperature, way):
    sampler = Sampler(MODEL, CHAT.end_ids, slots, 600, temperature)
    contexts = rollout([talk(i, 1 + i % 7) for i in range(28)], {"agent": sampler})
    assert worst_gap(MODEL, contexts, temperature) <= 1e-5
    assert not sampler.busy and sorted(sampler.free) == list(range(slots)) and not sampler.slot_of
    sampled = sum(c.roles.count(Role.AGENT) for c in contexts)
    assert sampled == sampler.sampled_tokens and sampler.prefilled_tokens <= sum(len(c.ids) for c in contexts)
    assert any(c.ids[-1] not in CHAT.end_ids for c in contexts)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES = {
    "qwen2": {"model_type": "qwen2", "qk_norm": False, "attention_bias": True},
    "llama": {
        "model_type": "llama",
        "qk_norm": False,
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32},
    },
    "smollm2": {"model_type": "llama", "qk_norm": False, "num_attention_heads": 9, "num_key_value_heads": 3},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_decodes_like_one_full_forward(family, way):
    """Ragged turns over reused slots, shared beginnings, and one row fifty times as long as the shortest."""
    model = make_model(2, **FAMILIES[family])
    sampler = Sampler(model, CHAT.end_ids, 5, 1500)
    talks = [talk(i, 1 + i % 4, system="Rules. " * (120 if i == 3 else 1)) for i in range(14)]
    contexts = rollout(talks, {"agent": sampler})
    lengths = sorted(len(c.ids) for c in contexts)
    assert lengths[-1] > 8 * lengths[0] and worst_gap(model, contexts) <= 1e-5


def test_rows_of_lengths_fifty_times_apart_and_every_boundary(way):
    """Contexts of 1, 2, 3 … and 600 tokens, with every length around the prefill's chunks, each sampled beside the others."""
    lengths = [1, 2, 3, 7, 8, 31, 32, 33, 600, 63, 64, 65, 511, 512, 513, 576, 577, 12]
    contexts = []
    for i, n in enumerate(lengths):
        ctx = Context((i,))
        ctx.extend([(7 * j + i) % CHAT.vocab_size for j in range(n)], Role.USER)
        ctx.open_turn = n
        contexts.append(ctx)
    sampler = Sampler(MODEL, (), len(lengths), 640)
    for ctx in contexts:
        sampler.submit(Sample("agent", ctx, 10))
    while sampler.busy:
        sampler.step()
    assert all(ctx.roles.count(Role.AGENT) == 10 for ctx in contexts) and worst_gap(MODEL, contexts) <= 1e-5


def test_end_tokens_are_cached_with_the_next_message(way):
    """An end token is sampled last and never fed: it must come first in the next prefill."""
    ends = frozenset(range(0, CHAT.vocab_size, 3))  # every third token ends a turn
    contexts = rollout([talk(i, 6) for i in range(20)], {"agent": Sampler(MODEL, ends, 20, 800)})
    assert (
        sum(token in ends and r == Role.AGENT for c in contexts for token, r in zip(c.ids, c.roles, strict=True)) > 50
    )
    assert worst_gap(MODEL, contexts) <= 1e-5


def episodes(order, slots, speakers=("agent", "user"), samplers=None):
    """ids of conversations by seed, run in this order over this many slots, with other speakers beside."""
    models = {"agent": MODEL, "user": make_model(1), "self": MODEL, "other": make_model(2)}
    samplers = samplers or {name: Sampler(models[name], CHAT.end_ids, slots, 600) for name in speakers}
    talks = [talk(seed, 1 + seed % 5, speaker=speakers[seed % len(speakers)]) for seed in order]
    contexts = rollout(talks, samplers)
    return {seed: ctx.ids for seed, ctx in zip(order, contexts, strict=True)}


def test_an_episode_does_not_depend_on_its_neighbours():
    order = list(range(64))
    together = episodes(order, 64)
    random.Random(1).shuffle(order)
    assert episodes(order, 64) == together == episodes(order, 5)
    for seed in range(0, 64, 16):
        assert episodes([seed], 1)[seed] == together[seed]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "speakers", [("agent", "user"), ("agent", "user", "self"), ("agent", "user", "other")], ids="+".join
)
def test_samplers_that_step_at_the_same_time_make_the_same_episodes(threads, speakers):
    """One thread: one after the other. Two, three: side by side, where there is a core for each and none shares weights."""
    order = list(range(40))
    threads(1)
    alone = episodes(order, 12, speakers)
    for n in (2, 3):
        threads(n)
        assert episodes(order, 12, speakers) == alone and torch.get_num_threads() == n


def test_samplers_step_apart_only_with_cores_and_weights_of_their_own(threads):
    other = make_model(1)
    a, b, c = (Sampler(m, CHAT.end_ids, 2, 50) for m in (MODEL, other, MODEL))
    lora = make_model(3)
    add_lora(lora, 2)
    adapters = [Sampler(m, CHAT.end_ids, 2, 50) for m in (lora, Base(lora))]
    threads(2)
    assert _apart([a, b]) and not any(map(_apart, ([a, c], [a], [a, b, c], adapters)))
    threads(1)
    assert not _apart([a, b])


def test_a_threads_cores_are_its_own(threads):
    """torch hands a thread that has never asked what any other thread set last."""
    threads(4)
    with ThreadPoolExecutor(1, initializer=keep_to_cores, initargs=(2,)) as pool:
        pool.submit(int).result()
        with ThreadPoolExecutor(1, initializer=keep_to_cores, initargs=(1,)) as other:
            assert other.submit(torch.get_num_threads).result() == 1
        assert pool.submit(torch.get_num_threads).result() == 2 and torch.get_num_threads() == 4


def test_each_sampler_has_its_share_of_the_cores_and_the_scheduler_keeps_its_own(threads):
    threads(4)
    with _apart([Sampler(m, CHAT.end_ids, 2, 50) for m in (MODEL, make_model(1))]) as pool:
        threads(3)  # what the scheduler does meanwhile
        assert [pool.submit(torch.get_num_threads).result() for _ in range(4)] == [2] * 4
    assert torch.get_num_threads() == 3


def test_seconds_of_samplers_side_by_side_add_up_to_no_more_than_the_wall_clock(threads, monkeypatch):
    """Each step of either takes 10 ms, in which both sleep: half of that is each one's."""
    real = Sampler._feed
    monkeypatch.setattr(Sampler, "_feed", lambda self, lengths: time.sleep(0.01) or real(self, lengths))
    samplers = {name: Sampler(m, CHAT.end_ids, 12, 600) for name, m in (("agent", MODEL), ("user", make_model(1)))}
    threads(2)
    began = time.perf_counter()
    episodes(range(12), 12, samplers=samplers)
    wall = time.perf_counter() - began
    spent, steps = sampling_seconds(samplers), [s.steps for s in samplers.values()]
    assert sum(spent.values()) <= wall
    assert spent["agent decode"] + spent["agent prefill"] >= 0.005 * steps[0] and not sampling_seconds(samplers)


def test_a_step_that_fails_waits_for_the_one_beside_it(threads, monkeypatch):
    """Else the scheduler would close the contexts of a sampler that is still at work."""
    agent, user = (Sampler(m, CHAT.end_ids, 4, 600) for m in (MODEL, make_model(1)))
    real, ran = Sampler._feed, []

    def feed(self, lengths):
        time.sleep(0.05 if self is agent else 0.1)  # both have begun
        if self is agent:
            raise ZeroDivisionError
        ended = real(self, lengths)
        ran.append(all(self.held[slot] is not None for slot in self.active))
        return ended

    monkeypatch.setattr(Sampler, "_feed", feed)
    threads(2)
    with pytest.raises(ZeroDivisionError):
        rollout([talk(i, 2, speaker=("agent", "user")[i % 2]) for i in range(8)], {"agent": agent, "user": user})
    assert ran == [True] and sorted(user.free) == [0, 1, 2, 3] and not user.busy


def test_greedy_draws_nothing_and_takes_the_best():
    contexts = rollout([talk(i, 3) for i in range(8)], {"agent": Sampler(MODEL, CHAT.end_ids, 8, 600, 0.0)})
    assert worst_gap(MODEL, contexts) <= 1e-5
    for ctx in contexts:
        with torch.no_grad():
            best = (MODEL(torch.tensor([ctx.ids]))[0, :-1] @ MODEL.head.T).argmax(-1).tolist()
        sampled = [i for i, r in enumerate(ctx.roles) if r == Role.AGENT]
        assert [best[i - 1] for i in sampled] == [ctx.ids[i] for i in sampled] and ctx._random is None


def test_every_end_id_ends_a_turn_and_other_turns_are_cut_at_max_new():
    ends = frozenset(range(0, CHAT.vocab_size, 5))
    for ctx in rollout([talk(i, 1, max_new=4) for i in range(50)], {"agent": Sampler(MODEL, ends, 50, 600)}):
        turn = [t for t, r in zip(ctx.ids, ctx.roles, strict=True) if r == Role.AGENT]
        assert not set(turn[:-1]) & ends and (turn[-1] in ends or len(turn) == 4) and not ctx.full


def test_a_full_context_says_so():
    sampler = Sampler(MODEL, CHAT.end_ids, 4, 64)
    contexts = rollout([talk(i, 4, max_new=40) for i in range(12)], {"agent": sampler})
    for ctx in contexts:
        last = max((i for i, r in enumerate(ctx.roles) if r == Role.AGENT), default=0)
        assert ctx.full and last < 64
    assert worst_gap(MODEL, [c for c in contexts if Role.AGENT in c.roles]) <= 1e-5
    ctx = Context((0,))
    ctx.extend([5] * 64, Role.USER)
    sampler.submit(Sample("agent", ctx, 4))
    assert sampler.step() == [ctx] and ctx.full and len(ctx.ids) == 64


def test_weights_changed_forgets_every_key():
    model, sampler = make_model(2), None
    ctx = Context((5,))
    sampler = Sampler(model, CHAT.end_ids, 2, 200)
    for turn in range(3):
        CHAT.hear(ctx, f"message {turn}")
        sampler.submit(Sample("agent", ctx, 5))
        while sampler.busy:
            sampler.step()
        now = list(range(ctx.open_turn, len(ctx.ids)))
        want = full_forward(model, ctx)
        assert max(abs(float(want[i - 1]) - ctx.logprobs[i]) for i in now) <= 1e-5
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.05)
        sampler.weights_changed()


def test_a_shared_beginning_is_prefilled_once_and_changes_nothing(way):
    system = "You serve a small shop. " * 8

    def run(slots, systems):
        sampler = Sampler(MODEL, CHAT.end_ids, slots, 600)
        talks = [talk(i, 2, system=systems[i % len(systems)]) for i in range(24)]
        return rollout(talks, {"agent": sampler}), sampler

    shared = len(CHAT.start(system, None, (0,)).ids)
    contexts, sampler = run(24, [system])
    assert worst_gap(MODEL, contexts) <= 1e-5
    assert sampler.prefilled_tokens <= sum(len(c.ids) for c in contexts) - 23 * shared
    contexts, sampler = run(3, [system, system + "Be kind.", system])  # slots go from one beginning to another
    assert worst_gap(MODEL, contexts) <= 1e-5
    assert sampler.prefilled_tokens < sum(len(c.ids) for c in contexts) - 8 * shared


def test_the_cache_holds_what_its_invariant_says_at_every_step(monkeypatch, way):
    """Few slots, shared beginnings, turns that end and turns that are cut: each slot's keys are those of its context's first
    n tokens, computed alone; a context being decoded has all but its newest; a shared beginning is where it is said to be."""
    sampler, seen = Sampler(MODEL, CHAT.end_ids, 4, 400), 0
    step = sampler.step

    def keys(ids):
        cache, n = KVCache(MODEL.cfg, 1, 400), len(ids)
        MODEL.forward_cached(torch.tensor([ids]), cache, None, torch.tensor([0]), upto=n)
        return cache.keys[:, 0, :, :n]

    @torch.no_grad()
    def checked():
        nonlocal seen
        done = step()
        for slot, ctx in enumerate(sampler.held):
            n = int(sampler.cached[slot])
            if ctx is not None and n and sampler.steps % 5 == 0:
                assert torch.allclose(sampler.cache.keys[:, slot, :, :n], keys(ctx.ids[:n]), atol=1e-5)
                began = len(ctx.ids) > ctx.open_turn and (slot in sampler.active or ctx in done)  # it sampled a token
                assert n == len(ctx.ids) - 1 if began else n < len(ctx.ids)
                seen += 1
        for beginning, slot in sampler.prefixes.items():
            if sampler.steps % 5 == 0 and sampler.cached[slot] >= (n := len(beginning)):
                assert torch.allclose(sampler.cache.keys[:, slot, :, :n], keys(beginning), atol=1e-5)
        return done

    monkeypatch.setattr(sampler, "step", checked)
    contexts = rollout([talk(i, 1 + i % 4, system="Rules. " * 9) for i in range(12)], {"agent": sampler})
    assert seen > 50 and any(c.ids[-1] not in CHAT.end_ids for c in contexts)


def test_long_prompts_are_prefilled_in_pieces(way):
    contexts = []
    for n in (3, 700, 1300):
        ctx = Context((n,))
        ctx.extend([(i * 7) % CHAT.vocab_size for i in range(n)], Role.USER)
        contexts.append(ctx)
    sampler = Sampler(MODEL, CHAT.end_ids, 3, 1400)
    for ctx in contexts:
        sampler.submit(Sample("agent", ctx, 6))
    while sampler.busy:
        sampler.step()
    assert worst_gap(MODEL, contexts) <= 1e-5


def test_two_speakers_with_few_slots_or_one_sampler_never_wait_for_each_other():
    def talks():
        return [
            converse(Task(), Domain(), User(ctx=CHAT.start(None, None, (i, 1))), CHAT, LIMITS, (i, 0))
            for i in range(12)
        ]

    wide = {"agent": Sampler(MODEL, CHAT.end_ids, 12, 400), "user": Sampler(MODEL, CHAT.end_ids, 12, 400)}
    want = [(t.ids, t.exit) for t in rollout(talks(), wide)]
    one = Sampler(MODEL, CHAT.end_ids, 3, 400)
    for samplers in [
        {"agent": one, "user": one},
        {"agent": one, "user": Sampler(MODEL, CHAT.end_ids, 1, 400)},
    ]:
        assert [(t.ids, t.exit) for t in rollout(talks(), samplers)] == want


def test_idle_contexts_give_way_and_come_back(way):
    """More open contexts than slots: the one longest idle is dropped, and computed again."""
    sampler = Sampler(MODEL, CHAT.end_ids, 2, 300)
    contexts = [Context((i,)) for i in range(5)]
    for turn in range(3):
        for ctx in contexts:
            CHAT.hear(ctx, f"message {turn}")
            sampler.submit(Sample("agent", ctx, 4))
        while sampler.busy:
            sampler.step()
    assert worst_gap(MODEL, contexts) <= 1e-5


def test_results_keep_the_order_given_and_bugs_close_everything():
    done = []
    sampler = Sampler(MODEL, CHAT.end_ids, 4, 300)
    contexts = rollout(
        (talk(i, 1 + (i * 5) % 4) for i in range(20)), {"agent": sampler}, lambda i, c: done.append((i, c))
    )
    assert [c.stream for c in contexts] == [(i,) for i in range(20)]
    assert sorted(i for i, _ in done) == list(range(20)) and [i for i, _ in done] != list(range(20))
    assert all(contexts[i] is c for i, c in done)

    closed = []

    def bug():
        yield from talk(1, 1)
        raise ZeroDivisionError

    def careful():
        try:
            yield from talk(2, 50)
        finally:
            closed.append(True)

    with pytest.raises(ZeroDivisionError):
        rollout([careful(), bug(), careful()], {"agent": sampler})
    assert closed == [True, True] and sorted(sampler.free) == [0, 1, 2, 3] and not sampler.busy
    assert rollout([], {"agent": sampler}) == []


def test_broken_weights_raise():
    model = make_model(3)
    with torch.no_grad():
        model.model["norm"].weight.fill_(math.nan)
    with pytest.raises(FloatingPointError):
        rollout([talk(0, 1)], {"agent": Sampler(model, CHAT.end_ids, 1, 200)})


def test_inverse_cdf_follows_the_distribution_and_skips_what_is_impossible():
    p = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    u = torch.tensor([[0.0], [0.2499], [0.25], [0.7499], [0.75], [1 - 2.0**-53]], dtype=torch.float64)
    assert inverse_cdf(p.log().expand(6, -1), u)[:, 0].tolist() == [1, 1, 3, 3, 4, 4]
    torch.manual_seed(0)
    logp = torch.randn(50).log_softmax(-1)
    u = torch.rand(40_000, 1, dtype=torch.float64)
    share = inverse_cdf(logp.expand(40_000, -1), u).flatten().bincount(minlength=50) / 40_000
    assert (share - logp.exp()).abs().max() < 0.01


def test_batches_bound_padding_and_size():
    rng = random.Random(0)
    lengths = {slot: rng.choice([1, 2, 9, 30, 31, 200, 512]) for slot in range(200)}
    batches = _batches(lengths)
    assert sorted(s for b in batches for s in b) == list(range(200))
    for batch in batches:
        longest = max(lengths[s] for s in batch)
        assert longest <= 2 * min(lengths[s] for s in batch) + 8 and longest * len(batch) <= 4096
