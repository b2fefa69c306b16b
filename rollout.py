"""Rollout: conversations written as coroutines, and the sampler that decodes hundreds of them together.

`converse` is one episode, to be read like the paper's trajectory: o_user, (tool call, o_db)*, message,
o_user, … It yields a `Sample` whenever it wants tokens, and a `Wait` where its user is not in this process. `rollout`
drives many such coroutines: all that ask the same `Sampler` decode in one batch, and one that finishes makes room for the
next. `EXITS` says what each way to end is worth.

Deliberately not here: what a user says (user_sim.py), what a tool does (tools.py), and anything about
training.
"""

import functools
import heapq
import itertools
import math
import queue
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from chat import Call, Chat, Context, Malformed, Role, Sample, Say, ToolCalls, turn_text
from model import Decoder, KVCache, keep_to_cores, logits_of
from packed import LONG, Packed
from user_sim import Wait

# ---------------------------------------------------------------- how a conversation ends


class Exit(NamedTuple):
    """What an ending is worth. `trained` is "overlong" where the option `--overlong train|mask` decides."""

    reward: str  # "graded": the world's verdict; "zero"; "none": nobody's mistake, no reward
    counts: bool  # in the group's mean and standard deviation
    trained: bool | str


EXITS = {
    "user_ended": Exit("graded", True, True),
    "transferred": Exit("graded", True, True),
    "turn_limit": Exit("zero", True, True),
    "malformed": Exit("zero", True, True),
    "too_many_errors": Exit("zero", True, True),
    "reply_full": Exit("zero", True, "overlong"),
    "context_full": Exit("zero", True, "overlong"),
    "user_failed": Exit("none", False, False),
}  # our own bug is no exit: it raises


@dataclass(frozen=True)
class Limits:
    """max_turns: agent's turns an episode; max_new: tokens a turn; max_len: tokens of the agent's whole
    context; max_malformed: malformed turns in a row that end the episode; max_errors: calls of both sides that failed, as
    many end it too (0: any number)."""

    max_turns: int
    max_new: int
    max_len: int
    max_malformed: int
    max_errors: int = 0


@dataclass(frozen=True)
class Trajectory:
    """One finished episode: the agent's context, at most max_len tokens long, and how it went."""

    task: str
    kind: str
    split: str
    member: int  # which of the group's G
    stream: tuple[int, ...]
    ids: tuple[int, ...]
    roles: tuple[int, ...]
    logprobs: tuple[float, ...]  # nan where nothing was sampled
    exit: str
    reward: float | None  # None: the episode says nothing about the agent
    diff: tuple[str, ...]  # how the final database differs from the goal, and what was left untold
    turns: tuple[dict, ...] = field(repr=False)  # {"role", "text"}: user, agent, call, tool, user_call or user_tool
    metrics: dict[str, Any] = field(repr=False)
    user_ids: tuple[int, ...] = field(repr=False, default=())  # the language-model user's context, if there was one
    states: tuple[str, ...] = field(repr=False, default=())  # the world's state() as each turn of the agent began


def converse(
    task, domain, user, chat: Chat, limits: Limits, stream: tuple[int, ...], member: int = 0, on_turn=None
) -> Generator[Sample | Wait, None, Trajectory]:
    """One episode, from the user's first words to an exit.

    `user` is the simulated user of this task; its `open()` and `reply(text)` are coroutines too. A turn of
    the agent is one message or some tool calls, which are executed in order and each get a result; prose
    beside calls is not said to the user. Where the user has tools of its own, it acts on the same world, and the agent
    sees none of it. `on_turn(role, text)` hears of each turn as it happens. What `domain` or `user` raise is a bug of ours
    and propagates.
    """
    world, ctx, log = domain.world(task), chat.start(domain.system, domain.tools, stream), Log(on_turn)
    user.tools, user.act = domain.user_tools, functools.partial(_act, world, log)

    def finish(exit: str) -> Trajectory:
        return _finish(task, world, user, chat, limits, ctx, log, exit, member)

    heard = yield from user.open()
    log.add("user", heard.text)
    if heard.ended or heard.failed:
        return finish(ending(heard, user))
    chat.hear(ctx, heard.text)
    for _ in range(limits.max_turns):
        if (room := limits.max_len - len(ctx.ids)) <= 0:
            return finish("context_full")
        if hasattr(world, "state"):  # for credit by turn; a world need not have it
            log.states.append(world.state())
        yield Sample("agent", ctx, min(limits.max_new, room))
        text = chat.said(ctx)
        if len(ctx.ids) == ctx.open_turn or ctx.ids[-1] not in chat.end_ids:  # the turn was cut
            log.add("agent", text)
            return finish("context_full" if ctx.full or len(ctx.ids) >= limits.max_len else "reply_full")
        action = chat.parse(text)
        log.turn(action, text)
        match action:
            case ToolCalls(calls, beside):
                if beside and hasattr(world, "tell_beside"):
                    world.tell_beside(beside)
                results = [_execute(world, call, log) for call in calls if not world.transferred]
                if world.transferred:
                    return finish("transferred")
                chat.observe(ctx, results)
            case Malformed(why):
                chat.observe(ctx, [log.add("tool", f"Error: {why}")])
            case Say(text):
                world.tell(text)
                heard = yield from user.reply(text)
                log.add("user", heard.text)
                if heard.ended or heard.failed:
                    return finish(ending(heard, user))
                chat.hear(ctx, heard.text)
        if log.malformed_in_a_row >= limits.max_malformed:
            return finish("malformed")
        if limits.max_errors and log.errors >= limits.max_errors:
            return finish("too_many_errors")
    return finish("turn_limit")


def ending(heard, user) -> str:
    """The exit of a talk that the user's side ended. A user whose context is full was talked to for too long: that is the
    agent's doing, and no failure of the user."""
    if heard.failed:
        return "context_full" if user.ctx is not None and user.ctx.full else "user_failed"
    return "user_ended"


class Log:
    """What was said and done, for people and for the curves. Nothing in it is trained on."""

    def __init__(self, on_turn: Callable[[str, str], None] | None = None):
        self.on_turn = on_turn
        self.turns: list[dict] = []
        self.states: list[str] = []
        self.tools: Counter[str] = Counter()
        self.agent_turns = self.malformed = self.malformed_in_a_row = self.errors = 0

    def add(self, role: str, text: str | None) -> str:
        if text:
            self.errors += role in ("tool", "user_tool") and text.startswith("Error: ")
            self.turns.append({"role": role, "text": text})
            if self.on_turn is not None:
                self.on_turn(role, text)
        return text or ""

    def turn(self, action: Say | ToolCalls | Malformed, text: str) -> None:
        """Counts a turn. Malformed is one in which nothing could be used: no message, no good call."""
        self.agent_turns += 1
        bad = isinstance(action, Malformed)
        if isinstance(action, ToolCalls):
            bad = not any(isinstance(call, Call) for call in action.calls)
            self.tools.update(call.name for call in action.calls if isinstance(call, Call))
        self.malformed += bad
        self.malformed_in_a_row = self.malformed_in_a_row + 1 if bad else 0
        if isinstance(action, Say):  # what the user hears: without thoughts
            self.add("agent", action.text)
        else:
            self.add("call", text)


def _execute(world, call: Call | Malformed, log: Log) -> str:
    if isinstance(call, Malformed):
        return log.add("tool", f"Error: {call.why}")
    return log.add("tool", world.call(call.name, call.arguments))


def _act(world, log: Log, call: Call) -> str:
    """A call of the user's own tools."""
    log.add("user_call", turn_text([call]))
    return log.add("user_tool", world.user_call(call.name, call.arguments))


def _finish(task, world, user, chat, limits, ctx: Context, log: Log, exit: str, member: int) -> Trajectory:
    chat.close(ctx)  # a cut turn gets the template's end, which is never trained
    verdict = world.reward()
    reward = {"graded": verdict.value, "zero": 0.0, "none": None}[EXITS[exit].reward]
    n = limits.max_len  # a result that did not fit brought the context over; nothing beyond was sampled
    sampled = ctx.roles.count(Role.AGENT)
    user_ctx = getattr(user, "ctx", None)
    metrics = {
        "turns": log.agent_turns,
        "tokens": min(n, len(ctx.ids)),
        "agent_tokens": sampled,
        "malformed": log.malformed,
        "tools": dict(log.tools),
    } | getattr(user, "metrics", {})
    return Trajectory(
        task.id,
        task.kind,
        task.split,
        member,
        tuple(ctx.stream),
        tuple(ctx.ids[:n]),
        tuple(ctx.roles[:n]),
        tuple(ctx.logprobs[:n]),
        exit,
        reward,
        (*verdict.diff, *(f"not told: {fact}" for fact in verdict.untold)),
        tuple(log.turns),
        metrics,
        tuple(user_ctx.ids) if user_ctx is not None else (),
        tuple(log.states),
    )


# ---------------------------------------------------------------- the scheduler


def rollout(
    conversations: Iterable[Generator[Sample | Wait, Any, Any]],
    samplers: dict[str, "Sampler"],
    on_done: Callable[[int, Any], None] | None = None,
) -> list:
    """Runs every conversation to its end; returns what each returned, in the order given.

    At most as many are open at a time as the samplers have slots for; `samplers` goes by speaker, and two
    speakers may share one. One that waits keeps its slot, and so its keys and values, and nobody waits with it.
    `on_done(index, result)` is called as each ends. An exception in any of them ends the rollout: it is a bug of
    ours, and every open conversation is closed.
    """
    waiting, results = enumerate(conversations), {}
    engines = list(dict.fromkeys(samplers.values()))
    room = min(s.slots // sum(other is s for other in samplers.values()) for s in engines)
    opened: dict[int, tuple[Generator, dict[Context, Sampler]]] = {}
    owner: dict[Context, int] = {}
    arrived: queue.SimpleQueue[int] = queue.SimpleQueue()  # conversations whose future is done, put in by its thread
    pool = _apart(engines)

    def advance(index: int, ctx: Context | None) -> None:
        talk, contexts = opened[index]
        try:
            request = talk.send(ctx)
        except StopIteration as stop:
            results[index] = stop.value
            for used, sampler in opened.pop(index)[1].items():
                sampler.release(used)
                owner.pop(used, None)
            if on_done is not None:
                on_done(index, stop.value)
            return
        if isinstance(request, Wait):
            request.future.add_done_callback(lambda _: arrived.put(index))
            return
        contexts[request.ctx] = samplers[request.speaker]
        owner[request.ctx] = index
        samplers[request.speaker].submit(request)

    try:
        while True:
            while len(opened) < max(1, room) and (new := next(waiting, None)) is not None:
                opened[new[0]] = (new[1], {})
                advance(new[0], None)
            if not opened:
                return [results[i] for i in sorted(results)]
            all_wait = not any(sampler.busy for sampler in engines)
            for _ in range(max(all_wait, arrived.qsize())):
                advance(arrived.get(), None)  # sleeps only where all wait
            for ctx in _step(engines, pool):
                advance(owner[ctx], ctx)
    finally:
        if pool is not None:
            pool.shutdown()  # first: a step that still runs needs its contexts
        for talk, contexts in opened.values():
            talk.close()
            for ctx, sampler in contexts.items():
                sampler.release(ctx)


def _apart(engines: list["Sampler"]) -> ThreadPoolExecutor | None:
    """Threads in which samplers step at the same time, each on its share of the cores. None unless all of them compute on
    CPU cores, with weights of their own (`Base` switches adapters)."""
    n, threads = len(engines), torch.get_num_threads()
    whole = all(isinstance(s.model, Decoder) and s.device.type == "cpu" for s in engines)
    if not whole or len({id(s.model) for s in engines}) < n or not 1 < n <= threads:
        return None
    return ThreadPoolExecutor(n, initializer=keep_to_cores, initargs=(threads // n,))


def _step(engines: list["Sampler"], pool: ThreadPoolExecutor | None) -> Iterable[Context]:
    """One step of every sampler; the contexts whose turn ended.

    Where two have work, agent and user decode side by side: the products of a small model are too short to be worth
    splitting among the cores. What each computes, and in which order, is the same every time.
    """
    busy = [s for s in engines if s.busy]
    if pool is None or len(busy) < 2:
        for sampler in engines:
            yield from sampler.step()
        return
    ended = list(pool.map(lambda s: s.step(1 / len(busy)), busy))  # all of them, before anybody submits anything new
    yield from itertools.chain.from_iterable(ended)


def sampling_seconds(samplers: dict[str, "Sampler"]) -> dict[str, float]:
    """Seconds since last asked, by speaker and what was done: {"agent decode": …}. Of a time in which n samplers worked
    side by side each has 1/n. Speakers that share a sampler are one, since their tokens were made together:
    "agent+user decode"."""
    out = {}
    for sampler in dict.fromkeys(samplers.values()):
        who = "+".join(name for name, its in samplers.items() if its is sampler)
        out |= {f"{who} {what}": seconds for what, seconds in sampler.seconds.items()}
        sampler.seconds.clear()
    return out


# ---------------------------------------------------------------- the sampler

FRACTION = 8
CHUNK = 512  # of a longer prompt so much is fed at a time; more than LONG
SHARED = 32  # a shared beginning shorter than this is not worth copying


# What the cache holds, always. Slot s belongs to a context c = held[s]; with n = cached[s]:
#   Positions 0 … n−1 are the keys and values of c.ids[:n]. What lies at n and beyond is stale; it is overwritten before
#   anything reads that far, since a query at position p reads 0 … p only.
#   In a turn (s in active) c.ids[n:] is what `step` feeds next: the newest token, which is sampled but not yet fed; at a
#   turn's beginning all that was heard; of a long prompt the rest.
#   After a turn, however it ended, its last token is not yet fed: it is, with what comes next.
#   Between turns c only grows (template, messages, tool results), so 0 … n−1 stay right; the next turn feeds c.ids[n:].
#   A released slot keeps its keys until `_claim` gives it to a context: n = 0, or the length of a beginning both share.
#   prefixes[key] = s: once cached[s] reaches len(key), s holds that beginning at 0 … len(key)−1, whoever has or had the
#   slot, until it goes to a context with another beginning. Others copy it.
# New weights make all of it wrong: `weights_changed`.


class Sampler:
    """Batched sampling with one set of weights and a static KV cache of `slots` rows, `max_len` tokens each.

    A context keeps its slot, and so its keys and values, between turns until `release`; when slots run out,
    the one longest idle is dropped and computed again when it comes back. `temperature` 0 is greedy
    (log-probs are then those at temperature 1). A turn ends with a token of `end_ids`, after `max_new`
    tokens, or when the context is full.
    """

    def __init__(self, model: Decoder, end_ids: Iterable[int], slots: int, max_len: int, temperature: float = 1.0):
        self.model, self.end_ids = model, frozenset(end_ids)
        self.slots, self.max_len, self.temperature = slots, max_len, temperature
        head = model.head
        self.device = head.device
        self.packed = Packed(model) if Packed.serves(model) else None  # None: plain torch, padded
        self.cache = KVCache(model.cfg, slots, max_len, head.dtype, head.device, transposed=self.packed is not None)
        self.held: list[Context | None] = [None] * slots
        self.slot_of: dict[Context, int] = {}  # in order of use: the first has been idle longest
        self.cached = np.zeros(slots, dtype=np.int64)  # how many of its context's tokens a slot holds
        self.left = [0] * slots  # tokens the open turn may still take
        self.free = list(range(slots))  # a heap: low slots first keeps the decoded block dense
        self.pending: list[Sample] = []
        self.active: list[int] = []  # slots in a turn, ascending
        self.prefixes: dict[tuple[int, ...], int] = {}  # shared beginning → a slot that holds it
        self.sampled_tokens = self.prefilled_tokens = self.steps = 0
        self.seconds: Counter[str] = Counter()  # by what was done: prefill, decode

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self.active or self.pending)

    def submit(self, sample: Sample) -> None:
        """Asks for one turn; `step` will return the context when it is finished."""
        self.pending.append(sample)

    def release(self, ctx: Context) -> None:
        """The context will not come back: its slot is free (unknown contexts are ignored)."""
        self.pending = [s for s in self.pending if s.ctx is not ctx]
        if (slot := self.slot_of.pop(ctx, None)) is not None:
            self.active = [s for s in self.active if s != slot]
            self.held[slot] = None
            heapq.heappush(self.free, slot)

    def weights_changed(self) -> None:
        """Forgets every key and value: they were made by other weights. Not in the middle of a turn."""
        assert not self.active, "weights changed while a turn was being sampled"
        self.cached[:] = 0
        self.prefixes.clear()
        if self.packed:
            self.packed.weights_changed()

    @torch.inference_mode()
    def step(self, share: float = 1.0) -> list[Context]:
        """Feeds every row in a turn what its context gained (one token, more at a turn's beginning), and samples one token
        for each that has nothing left to feed. Returns the contexts whose turn ended.

        Context.full is set where room ran out. share: how much of the step's time counts in `seconds`.
        """
        began, done = time.perf_counter(), []
        # A padded batch of beginnings costs a pass through the weights of its own: it waits until it is worth that.
        if self.pending and (self.packed or FRACTION * len(self.pending) >= len(self.active)):
            done = self._begin()
        fed = [s for s in self.active if self._share(s)]
        lengths = {s: min(len(self.held[s].ids) - int(self.cached[s]), CHUNK) for s in fed}
        # The newest token, an end token before it included, is never cached yet.
        assert all(n > 0 for n in lengths.values()), "the cache lost step with a context"
        if lengths:
            done += self._feed(lengths)  # ends with tokens on the host, so that a GPU is done too
            self.steps += 1
            each = share * (time.perf_counter() - began) / sum(lengths.values())  # a token's share of the time
            for n in lengths.values():
                self.seconds["decode" if n == 1 else "prefill"] += n * each
        return done

    # ------------------------------------------------------------ beginning a turn

    def _begin(self) -> list[Context]:
        """Gives slots to the pending turns, as far as they go. Returns those without room for a single token."""
        done, later = [], []
        wanted, active = {s.ctx for s in self.pending}, set(self.active)
        idle = (c for c in list(self.slot_of) if c not in wanted and self.slot_of[c] not in active)
        for sample in self.pending:
            ctx, slot = sample.ctx, self.slot_of.pop(sample.ctx, None)
            if slot is None and not self.free and (oldest := next(idle, None)) is not None:
                self.release(oldest)
            if slot is None and not self.free:
                later.append(sample)
                continue
            if slot is None:
                slot = self._claim(heapq.heappop(self.free), ctx)
            self.slot_of[ctx] = slot  # the last in order of use
            ctx.full = len(ctx.ids) >= self.max_len
            self.left[slot] = 0 if ctx.full else sample.max_new
            if self.left[slot] > 0:
                active.add(slot)
            else:
                done.append(ctx)
        self.pending, self.active = later, sorted(active)
        return done

    def _claim(self, slot: int, ctx: Context) -> int:
        """A free slot for a new context; what it held is forgotten, unless it begins just like this one."""
        key = _beginning(ctx)
        keep = len(key) if self.prefixes.get(key) == slot and self.cached[slot] >= len(key) else 0
        if not keep:
            self.prefixes = {k: s for k, s in self.prefixes.items() if s != slot}
        self.held[slot], self.cached[slot] = ctx, keep
        return slot

    def _share(self, slot: int) -> bool:
        """Copies a beginning that another slot holds. False: that slot is not fed yet; ask again in the next step."""
        if self.cached[slot] > 0 or len(key := _beginning(self.held[slot])) < SHARED:
            return True
        holder = self.prefixes.setdefault(key, slot)
        if holder != slot and self.cached[holder] < len(key) and holder not in self.active:
            holder = self.prefixes[key] = slot  # it was released before it was fed
        if holder == slot:
            return True
        if self.cached[holder] < len(key):
            return False
        self.cache.copy(holder, torch.tensor([slot], device=self.device), len(key))
        self.cached[slot] = len(key)
        return True

    # ------------------------------------------------------------ one token more

    def _feed(self, lengths: dict[int, int]) -> list[Context]:
        """Caches the next lengths[slot] tokens of each slot, and samples a token for those that then have everything
        cached (not those of which a long prompt's piece was fed). Returns the contexts whose turn is over."""
        short = [s for s, n in lengths.items() if n <= LONG] if self.packed else []
        done, long = [], {s: n for s, n in lengths.items() if n > LONG or not self.packed}
        for batch in [*_batches(long), *([short] if short else [])]:
            n, starts = [lengths[s] for s in batch], self.cached[batch]
            new = [self.held[s].ids[at : at + k] for s, at, k in zip(batch, starts.tolist(), n, strict=True)]
            whole = [r for r, s in enumerate(batch) if starts[r] + n[r] == len(self.held[s].ids)]
            rows = [batch[r] for r in whole]
            u = np.array([self.held[s].uniform() if self.temperature else 0.0 for s in rows])
            if batch is short:  # each of them whole
                tokens, logprobs = self.packed.sample(new, np.array(batch), starts, u, self.temperature, self.cache)
            else:
                hidden = self._padded(batch, starts, new)[whole]
                tokens, logprobs = draw(logits_of(hidden, self.model.head), torch.from_numpy(u), self.temperature)
            self.cached[batch] += n
            self.prefilled_tokens += sum(k for k in n if k > 1)
            done += self._take(rows, tokens.tolist(), logprobs.tolist())
        return done

    def _padded(self, slots: list[int], starts: np.ndarray, new: list[list[int]]) -> Tensor:
        """Caches row r's tokens new[r] behind the starts[r] of its slot → hidden states of each row's last [R, H]. The rows
        are right-padded to a block; what padding leaves in the cache is never read."""
        R, reach, n = len(slots), max(slots) + 1, [len(tokens) for tokens in new]
        every = max(n) == 1 and 2 * reach < 3 * R  # feed idle slots too: cheaper than gathering keys and values
        rows = slots if every else list(range(R))
        fed = np.zeros((reach if every else R, max(n) + 2), dtype=np.int64)  # ids, start, slot: one transfer
        for row, tokens in zip(rows, new, strict=True):
            fed[row, : len(tokens)] = tokens
        fed[:, -2] = self.cached[:reach] if every else starts  # an idle row writes past its own end
        fed[rows, -1] = slots
        upto = int(fed[:, -2].max()) + max(n)
        fed = torch.from_numpy(fed).to(self.device)
        which = None if every else fed[:, -1]
        hidden = self.model.forward_cached(fed[:, :-2], self.cache, which, fed[:, -2], upto=upto)  # [R, L, H]
        return hidden[rows, [k - 1 for k in n]]

    def _take(self, rows: list[int], tokens: list[int], logprobs: list[float]) -> list[Context]:
        """Each row gets its token. Returns the contexts whose turn is over."""
        done, over = [], set()
        for slot, token, logprob in zip(rows, tokens, logprobs, strict=True):
            if not math.isfinite(logprob):
                raise FloatingPointError(f"sampled a token with log-prob {logprob}: the weights are broken")
            ctx = self.held[slot]
            ctx.sampled(token, logprob)
            self.left[slot] -= 1
            ended = token in self.end_ids
            ctx.full = not ended and len(ctx.ids) >= self.max_len
            if ended or ctx.full or not self.left[slot]:
                done.append(ctx)
                over.add(slot)
        self.sampled_tokens += len(rows)
        self.active = [s for s in self.active if s not in over]
        return done


def draw(logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """A token for each row of logits [R, V] by its u [R], and its log-prob; at temperature 0 the greatest, with its
    log-prob at 1."""
    logp = torch.log_softmax(logits / (temperature or 1.0), -1)
    greedy = not temperature
    token = logits.argmax(-1, keepdim=True) if greedy else inverse_cdf(logp, u.to(logits.device)[:, None])  # [R, 1]
    pairs = torch.cat([token.double(), logp.gather(-1, token).double()], -1).cpu()  # one transfer
    return pairs[:, 0].long(), pairs[:, 1]


def inverse_cdf(logp: Tensor, u: Tensor) -> Tensor:
    """The token where the cumulated probability first exceeds u. logp [R, V], u [R, 1] in [0, 1) → [R, 1].

    In float64, and never a token of probability 0.
    """
    cdf = logp.exp().cumsum(-1, dtype=torch.float64)  # [R, V]
    below = torch.nextafter(cdf[:, -1:], torch.zeros_like(u))
    # The clamp is for NaN only, which is to be reported by its log-prob.
    return torch.searchsorted(cdf, torch.minimum(u * cdf[:, -1:], below), right=True).clamp_(max=logp.shape[1] - 1)


def _beginning(ctx: Context) -> tuple[int, ...]:
    """What contexts of one domain or task may have in common: all up to the first word anybody said."""
    said = (i for i, role in enumerate(ctx.roles) if role not in (Role.SYSTEM, Role.TEMPLATE))
    return tuple(ctx.ids[: min(next(said, len(ctx.ids)), len(ctx.ids) - 1)])  # one token is left to feed


def _batches(lengths: dict[int, int], tokens: int = 4096) -> list[list[int]]:
    """Slots in batches of like length, so padding stays below about half, of at most `tokens` tokens."""
    batches: list[list[int]] = []
    for slot in sorted(lengths, key=lambda s: (lengths[s], s)):
        n, last = lengths[slot], batches[-1] if batches else []
        alike = last and n <= (2 * lengths[last[0]] + 8 if lengths[last[0]] > 1 else 1)  # rows that decode: none longer
        if alike and n * (len(last) + 1) <= tokens:
            last.append(slot)
        else:
            batches.append([slot])
    return batches
