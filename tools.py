"""What a domain is made of: tools, tasks, private worlds and rewards. No torch, no conversation, no model.

`Domain` says what a domain must have, what it may have, and what that enables; domains/desk.py is a small one (docs/domains.md).
What it leaves out: words about *how* an agent or a user speaks; those are the domain's own.
"""

import copy
import hashlib
import inspect
import json
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

from chat import Call


class ToolError(Exception):
    """A tool refuses. The text goes to the agent as an observation; the database must be unchanged (but see tau2.World)."""


@dataclass(frozen=True)
class Fact:
    """Something the agent must tell the user: of `values` (a closed list) this one and no other; "": none of them."""

    value: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """One thing to do. `db` is {table: {key: row}}; it is shared by all worlds of the task and never written to."""

    id: str
    split: str
    kind: str
    db: dict[str, dict[str, Any]] = field(repr=False)
    gold: tuple[Call, ...]
    told: tuple[Fact, ...]
    wants: Any = field(repr=False)  # what the user wants, in the domain's own terms


@dataclass(frozen=True)
class Reward:
    """The verdict on a finished episode. value ∈ {0., 1.}: 1 iff `diff` and `untold` are both empty."""

    value: float
    diff: tuple[str, ...]  # how the final database differs from the goal
    untold: tuple[str, ...]  # facts that had to be told and were not
    parts: dict[str, float] = field(default_factory=dict)  # where value is a product: its factors by name
    left_out: tuple[str, ...] = ()  # factors that only a judge model can give, and none was asked
    rule: str = ""  # how databases and facts were compared, where there is more than one way


def schema(tool: Callable) -> dict:
    """The JSON schema of a tool from its signature and docstring (first line; `name: text` lines describe arguments)."""
    lines = inspect.getdoc(tool).splitlines()
    notes = dict(re.findall(r"^(\w+): (.+)$", "\n".join(lines[1:]), re.M))
    hints = get_type_hints(tool)
    arguments = {name: p for name, p in inspect.signature(tool).parameters.items() if name != "world"}
    properties = {name: json_type(hints[name]) | {"description": notes.get(name, name)} for name in arguments}
    required = [name for name, p in arguments.items() if p.default is p.empty]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": tool.__name__, "description": lines[0], "parameters": parameters},
    }


def json_type(hint: Any) -> dict:
    """The JSON schema of a type: str, int, float, bool, None, list[…], Literal[…] of strings, a TypedDict, a union."""
    names = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
    if hint in names:
        return {"type": names[hint]}
    if get_origin(hint) is list:
        return {"type": "array", "items": json_type(*get_args(hint))}
    if get_origin(hint) is Literal:
        return {"type": "string", "enum": list(get_args(hint))}
    if is_typeddict(hint):
        fields = get_type_hints(hint)
        required = [name for name in fields if name in hint.__required_keys__]
        properties = {name: json_type(kind) for name, kind in fields.items()}
        return {"type": "object", "properties": properties, "required": required}
    return {"anyOf": [json_type(kind) for kind in get_args(hint)]}


def same(a: Any, b: Any) -> bool:
    """Exact equality of JSON values: key order never matters, list order does, and 1, 1.0, "1", True all differ."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


class World:
    """One episode's private database: a shared base plus the rows this episode has written (copy on write).

    Resetting costs nothing whatever the database's size, and comparing two worlds looks at written rows only.
    """

    def __init__(self, task: Task, tools: dict[str, Callable]):
        self.task, self.tools = task, tools
        self.written: dict[tuple[str, str], Any] = {}  # (table, key) → this episode's own row
        self.identified: set[str] = set()  # customers the agent has identified
        self.transferred = False
        self.calls: list[Call] = []
        self.messages: list[str] = []  # what the agent told the user

    def read(self, table: str, key: str) -> Any:
        """A row, to look at and not to touch, or None."""
        return self.written.get((table, key), self.task.db[table].get(key))

    def edit(self, table: str, key: str) -> Any:
        """A row, to write to: the first time it is copied out of the shared base."""
        if (table, key) not in self.written:
            self.written[table, key] = copy.deepcopy(self.task.db[table][key])
        return self.written[table, key]

    def call(self, name: str, arguments: dict) -> str:
        """Run a tool. Always returns an observation; a call that the tool refuses changes nothing."""
        self.calls.append(Call(name, arguments))
        try:
            return self._call(name, arguments)
        except ToolError as error:
            return f"Error: {error}"

    def _call(self, name: str, arguments: dict) -> str:
        if name not in self.tools:
            raise ToolError("unknown tool")
        tool = self.tools[name]
        hints = {k: t for k, t in get_type_hints(tool).items() if k not in ("world", "return")}
        if arguments.keys() != hints.keys():
            raise ToolError(f"{name} takes {', '.join(hints) or 'nothing'}")
        for key, value in arguments.items():
            if type(value) is not hints[key]:
                raise ToolError(f"{key} must be {hints[key].__name__}")
        result = tool(self, **arguments)
        return result if isinstance(result, str) else json.dumps(result)

    def tell(self, text: str) -> None:
        """Record a message from the agent to the user; facts are looked for in these."""
        self.messages.append(text)

    def state(self) -> str:
        """A key of the state of the database and of who is identified: equal keys if and only if equal states."""
        changed = {k: row for k, row in self.written.items() if not same(row, self.task.db[k[0]].get(k[1]))}
        text = json.dumps([sorted(changed.items()), sorted(self.identified)], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def reward(self) -> Reward:
        """1 iff the database equals the one that the gold actions give and every fact was told. Changes nothing."""
        diff = tuple(difference(goal_rows(self.task, self.tools), self.written, self.task.db))
        untold = tuple(missing_facts(self.task.told, self.messages))
        return Reward(float(not diff and not untold), diff, untold)


Agent = Generator[Call | str, str, None]  # a scripted agent (see `play`)


def silent() -> Agent:
    """The null baseline of every domain: no call and no word."""
    yield ""


class Domain(ABC):
    """What a conversation, an evaluation and a training run ask of a domain. The first six it must have; each of the rest
    may be left out, and what needs it is then refused in one line. Questions are put to the class where they come before
    a run (`find`), so what is not set in `__init__` is set in the class.
    """

    name: str
    policy: str  # the agent's rules
    functions: dict[str, Callable]  # the agent's tools by name: f(world, …) → text or JSON, or a ToolError (`schema`)
    splits: dict[str, int | None]  # how many tasks "train", "test", "val" and others have; None: any number

    @abstractmethod
    def task(self, split: str, seed: int, index: int) -> Task:
        """Task `index` (0 and up, without end) of a split; the same arguments always give the same task."""

    @abstractmethod
    def instruction(self, task: Task) -> str:
        """What the user wants and knows: the system prompt of a user played by a model. The agent never sees it."""

    # A script: users "scripted" and "stranger" (those of them it names), and demonstrations. script(task, rng, style) has
    # `begin()` and `answer(text)`, both → user_sim.Heard, and `act`: what its last message does, "pardon" if it did not
    # understand the agent. With meaning(text), equal for messages that do the same whatever their words, it judges others.
    scripts: tuple[str, ...] = ()
    script: Callable | None = None
    meaning: Callable[[str], Any] | None = None
    # Demonstrations, for training from scratch or a cold start: demonstrator(rng, side) → an Agent that talks with the
    # script, for the "agent" or the "user" to learn from. The user "lm" is then trained for its part, and evaluations meet it.
    demonstrator: Callable[[random.Random, str], Agent] | None = None
    # Agents that no one would want, each made of an rng. Where there is a script they talk with it, else with nobody.
    baselines: dict[str, Callable[[random.Random], Agent]] = {"do_nothing": lambda rng: silent()}  # noqa: RUF012

    greeting = "Hello, how can I help you?"  # what a user hears first
    guide = ""  # how to play a user: goes before the instruction, for models that were not trained for the part
    prompts = True  # policy and tool schemas are in the agent's prompt (weights trained from scratch know them)
    user_tools: list[dict] | None = None  # schemas of tools that the user has; worlds then have `user_call`, as `call`
    unseen: dict[str, tuple[str, float]] = {}  # noqa: RUF012  # tests after training: {name: (split, tasks at most)}
    limits: dict[str, Any] = {}  # noqa: RUF012  # values of Config that `eval` and `chat` take: a benchmark's own
    records: dict[str, dict] | None = None  # tasks by id, as in τ²-bench's files: results in its format
    paper_split = False  # whether τ-bench v1 has tasks of it to train on

    @classmethod
    def sizes(cls, preset) -> dict[str, Any]:
        """Values of Config that suit the domain better than those of a preset, which are the shop's. Flags come last."""
        return {}

    @classmethod
    def from_config(cls, cfg) -> "Domain":
        """The domain of a run."""
        domain = cls()
        domain.prompts = cfg.prompts
        return domain

    def world(self, task: Task) -> World:
        """A world of its own for each episode."""
        return World(task, self.functions)

    def practice_task(self, side: str, seed: int, index: int) -> Task:
        """A task to demonstrate for a side; what is hard for it may come more often than in "train"."""
        return self.task("train", seed, index)

    def notices(self) -> list[str]:
        """What a person should know before a run begins."""
        return []

    @property
    def system(self) -> str | None:
        return self.policy if self.prompts else None

    @property
    def tools(self) -> list[dict] | None:
        return [schema(f) for f in self.functions.values()] if self.prompts else None


TOOL_FAULTS = ("Error: the call timed out; nothing was done", "Error: internal server error; nothing was done")


@dataclass(frozen=True)
class FaultyTools:
    """A domain whose tools fail: with probability p a call does nothing and returns one of TOOL_FAULTS. Which ones is drawn
    from the world's own `seed`, so an episode plays again the same. The goal is found with tools that work.
    """

    domain: Domain
    p: float
    seed: tuple[int, ...]

    def world(self, task: Task) -> Any:
        world, rng = self.domain.world(task), random.Random(f"tool faults {self.seed}")
        works = world.call
        world.call = lambda name, arguments: (
            rng.choice(TOOL_FAULTS) if rng.random() < self.p else works(name, arguments)
        )
        return world

    def __getattr__(self, name: str) -> Any:
        return getattr(self.domain, name)


def goal_rows(task: Task, tools: dict[str, Callable]) -> dict[tuple[str, str], Any]:
    """The rows that the gold actions write, found by playing them in a world of their own. Errors: a refused gold action."""
    world = World(task, tools)
    world.identified = set(task.db.get("customers", ()))
    for call in task.gold:
        if (result := world.call(call.name, call.arguments)).startswith("Error"):
            raise AssertionError(f"task {task.id}: gold action {call} is refused: {result}")
    return world.written


def difference(goal: dict, written: dict, base: dict) -> list[str]:
    """One line for each field in which the written rows differ from the goal's; rows nobody wrote are equal by nature."""
    lines = []
    for table, key in sorted(goal.keys() | written.keys()):
        want = goal.get((table, key), base[table].get(key))
        have = written.get((table, key), base[table].get(key))
        if same(want, have):
            continue
        if isinstance(want, dict) and isinstance(have, dict):
            fields = [f for f in sorted(want.keys() | have.keys()) if not same(want.get(f), have.get(f))]
            lines += [f"{table} {key} {f}: {have.get(f)!r}, goal {want.get(f)!r}" for f in fields]
        else:
            lines.append(f"{table} {key}: {have!r}, goal {want!r}")
    return lines


def missing_facts(told: tuple[Fact, ...], messages: list[str]) -> list[str]:
    """The facts that were not told. For each closed list of values, what the agent ever named must be exactly what had
    to be told: an agent that names every weekday has told none. Values match as whole words: "$42" does not tell "$4".
    """
    text, missing = "\n".join(messages), []
    for values in dict.fromkeys(f.values for f in told):
        needed = {f.value for f in told if f.values == values} - {""}
        named = {v for v in values if re.search(rf"(?<![\w$]){re.escape(v)}(?!\w)", text)}
        if named != needed:
            missing += sorted(needed) or [f"none of {', '.join(values)}"]
    return missing


def play(agent: Agent, user, world: World, max_turns: int = 24) -> list[tuple[str, Any]]:
    """Let a scripted agent talk with a scripted user: the cold start's demonstrations and the null baselines.

    agent: a generator that yields a Call or a message (str) and is sent the result or the reply; it ends by returning.
    user: has `begin() → Heard`, `answer(text) → Heard`.
    Returns the talk: [("user" | "agent", text) | ("call", Call) | ("tool", text), …].
    """
    heard = user.begin()
    talk, reply = [("user", heard.text)], heard.text
    next(agent)
    for _ in range(max_turns):
        try:
            act = agent.send(reply)
        except StopIteration:
            break
        if isinstance(act, Call):
            reply = world.call(act.name, act.arguments)
            talk += [("call", act), ("tool", reply)]
            if world.transferred:
                break
        else:
            world.tell(act)
            heard = user.answer(act)
            talk += [("agent", act), ("user", heard.text)]
            reply = heard.text
            if heard.ended:
                break
    return talk
