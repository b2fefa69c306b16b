"""τ²-bench (arXiv 2506.07982): what its three domains share. The domains themselves are retail.py, airline.py, telecom.py.

Read in this order: the data folder, values (what a database and a call may hold), a task, a world (one episode), the
reward, the domain object, the two tools that all domains have.

Behaviour is that of github.com/sierra-research/tau2-bench at commit a2c0247 (version 1.0.1, MIT licence), to the letter
of every observation, except that
- the text of an error that upstream does not raise on purpose (a wrong type, a missing argument) is our own;
- arguments nested deeper than 32 levels, integers of thousands of digits, and expressions of more than 1,000 characters
  are refused (`plain`, `calculate`): 9**9**9 would not end, and upstream's own digest of such a state fails.
Left out: the user simulator, and the model that judges natural-language claims (one can be given: `judge`).
"""

import ast
import contextlib
import functools
import json
import operator
import os
import random
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tools
from chat import MAX_DEPTH, Call, UserError
from tools import Reward, ToolError, schema

# ── The data folder ──────────────────────────────────────────────────────────────────────────────────────────────────
REMEDY = (
    "bring it with `git clone --depth 1 https://github.com/sierra-research/tau2-bench`,"
    " then give --data tau2-bench or set TAU2_DATA_DIR=tau2-bench"
)


def locate(data: str | Path | None, name: str) -> Path:
    """The folder of a domain's files, in upstream's layout (a checkout, or its data folder) or with the domains side by side."""
    data = data or os.environ.get("TAU2_DATA_DIR")
    if not data:
        raise UserError(f"no folder with τ²-bench's data was given: {REMEDY}")
    for place in ("data/tau2/domains", "tau2/domains", "domains", "."):
        if (folder := Path(data).resolve() / place / name).is_dir():
            return folder
    raise UserError(f"{data} has no domain {name}: {REMEDY}")


def read_file(*choices: Path) -> Any:
    """What is in the first of these files that exists: JSON, TOML, or text. Errors: UserError if none can be read."""
    path = next((p for p in choices if p.is_file()), choices[0])
    try:
        with intact(path):
            parse = {".json": json.loads, ".toml": tomllib.loads}.get(path.suffix, str)
            return parse(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{path} is missing: {REMEDY}") from None


@contextlib.contextmanager
def intact(place: Path) -> Iterator[None]:
    """For reading what a file or folder holds: whatever goes wrong with it is a UserError."""
    try:
        yield
    except (ToolError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{place} is damaged ({type(error).__name__}: {error}): {REMEDY}") from None


# ── Values ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def conform(value: Any, kind: Any) -> Any:
    """`value` as a field of type `kind` holds it; the database and some arguments go through here.

    kind: str, int, float, bool, list[…], dict[str, …], Literal[…], a union, or a TypedDict, whose fields come out in
    declared order, unknown ones dropped, missing ones null where they may be. Numbers and flags may come as text, as
    upstream's models (pydantic 2.12, lax mode) take them. Errors: ToolError.
    """
    if kind in SCALARS:
        return SCALARS[kind](value)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value if isinstance(value, str) and value in inner else refuse(value, f"one of {', '.join(inner)}")
    if origin is list:
        return [conform(v, inner[0]) for v in (value if isinstance(value, list) else refuse(value, "a list"))]
    if origin in (Union, UnionType):
        return conform_union(value, inner)
    if not isinstance(value, dict):
        refuse(value, "an object")
    if origin is dict:
        return {k: conform(v, inner[1]) for k, v in value.items()}
    return {name: conform_field(value, name, hint) for name, hint in fields(kind).items()}


def conform_field(record: dict, name: str, kind: Any) -> Any:
    if name not in record and NoneType not in get_args(kind):
        raise ToolError(f"{name}: field required")
    try:
        return conform(record.get(name), kind)
    except ToolError as error:
        raise ToolError(f"{name}: {error}") from None


def conform_union(value: Any, kinds: tuple) -> Any:
    """By the first kind that fits."""
    for kind in kinds:
        try:
            return conform(value, kind)
        except ToolError as error:
            why = error
    raise why


fields = functools.cache(get_type_hints)


def refuse(value: Any, wanted: str) -> Any:
    raise ToolError(f"{str(value)[:40]!r} is not {wanted}")


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else refuse(value, "text")


def as_int(value: Any) -> int:
    """Whole floats and whole numbers in text too; floats only as far as 64 bits."""
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 2**63):
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(_\d+)*(\.0+)?", value.strip(), re.ASCII):
        return int(value.strip().split(".")[0])
    return refuse(value, "a whole number")


def as_float(value: Any) -> float:
    if isinstance(value, int | float) or (isinstance(value, str) and value.strip().isascii()):
        return float(value)
    return refuse(value, "a number")


def as_bool(value: Any) -> bool:
    text = value.lower() if isinstance(value, str) else value
    if text in (True, "true", "t", "yes", "y", "on", "1"):
        return True
    return False if text in (False, "false", "f", "no", "n", "off", "0") else refuse(value, "true or false")


def as_none(value: Any) -> None:
    return None if value is None else refuse(value, "null")


SCALARS = {str: as_text, int: as_int, float: as_float, bool: as_bool, NoneType: as_none}


MAX_BITS = 10_000  # of an integer, some 3,000 digits: Python prints no more than 4,300


def plain(value: Any, room: int = MAX_DEPTH + 1) -> bool:
    """Whether a value is JSON of a sane size, which can be stored, printed, copied and compared."""
    if isinstance(value, dict | list):
        inner = value if isinstance(value, list) else value.values()
        named = isinstance(value, list) or all(isinstance(key, str) for key in value)
        return named and room > 1 and all(plain(v, room - 1) for v in inner)
    return (
        value is None or isinstance(value, str | float) or (isinstance(value, int) and value.bit_length() <= MAX_BITS)
    )


CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def canonical(value: Any) -> str:
    """JSON text that is equal for two values if and only if upstream's digests are: keys in any order are the same, but
    1, 1.0 and "1" differ, 0.0 and -0.0 too, and so do lists in another order.
    """
    return CANONICAL.encode(value)


def unordered(value: Any) -> Any:
    """The value with every list sorted."""
    if isinstance(value, dict):
        return {k: unordered(v) for k, v in value.items()}
    return sorted(map(unordered, value), key=canonical) if isinstance(value, list) else value


# ── A task ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True)
class Action:
    """A call that the task's author made. compare: which arguments count; None: those that the actual call gives."""

    requestor: str  # "assistant" or "user"
    name: str
    arguments: dict
    compare: tuple[str, ...] | None = None

    def matches(self, call: Call) -> bool:
        """Values compare as in Python (1 == 1.0). With nothing to compare, the name is enough."""
        keys = call.arguments.keys() if self.compare is None else set(self.compare)
        mine, theirs = ({k: v for k, v in a.items() if k in keys} for a in (self.arguments, call.arguments))
        return call.name == self.name and mine == theirs


@dataclass(frozen=True)
class Task:
    """One task. `db` {table: {key: row}} is the state it starts in: shared by all its worlds and never written to."""

    id: str
    split: str
    kind: str
    db: dict[str, dict[Any, Any]] = field(repr=False)
    scenario: str = field(default="", repr=False)  # only the user sees it
    gold: tuple[Action, ...] = ()
    assertions: tuple[dict, ...] = ()  # functions of the world that must give a value (telecom)
    told: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()  # about the agent's conduct; only a judge model can tell
    basis: tuple[str, ...] = ()  # which components the reward is the product of


BASIS = ("DB", "COMMUNICATE")  # where a task names none


def read_task(record: dict, split: str, db: dict) -> Task:
    """A task from τ²-bench's tasks.json."""
    for key in ("initialization_data", "message_history"):
        if (record.get("initial_state") or {}).get(key):
            raise UserError(f"task {record['id']}: {key} is not supported; leave this task out")
    criteria = record.get("evaluation_criteria")
    basis = () if criteria is None else tuple(criteria.get("reward_basis") or BASIS)
    criteria = criteria or {}
    if criteria.get("actions") is None and criteria.get("env_assertions") is None:
        basis = tuple(b for b in basis if b not in ("DB", "ENV_ASSERTION"))  # nothing to compare the end state with
    return Task(
        id=record["id"],
        split=split,
        kind="",
        db=db,
        scenario=scenario_text(record["user_scenario"]),
        gold=tuple(map(read_action, criteria.get("actions") or ())),
        assertions=tuple(criteria.get("env_assertions") or ()),
        told=tuple(criteria.get("communicate_info") or ()),
        claims=tuple(criteria.get("nl_assertions") or ()),
        basis=basis,
    )


def read_action(record: dict) -> Action:
    compare = record.get("compare_args")
    requestor = record.get("requestor") or "assistant"
    return Action(requestor, as_text(record["name"]), record["arguments"], None if compare is None else tuple(compare))


def read_tau1_task(record: dict, split: str, db: dict) -> Task:
    """A task of τ-bench v1, the set that the paper trains on: plain instruction, gold actions, outputs to be told."""
    gold = tuple(Action("assistant", as_text(a["name"]), a["arguments"]) for a in record["actions"])
    told = tuple(record["outputs"])
    return Task(record["task_id"], split, "", db, record["instruction"], gold, told=told, basis=BASIS)


def scenario_text(scenario: dict) -> str:
    """What the simulated user is told, laid out as upstream does: blocks indented by one tab."""
    block = lambda title, text: f"{title}:\n{textwrap.indent(text, chr(9))}"
    body = scenario["instructions"]
    if isinstance(body, dict):
        lines = [f"Domain: {body['domain']}", block("Reason for call", body["reason_for_call"])]
        lines += [
            block(title, body[key])
            for title, key in (("Known info", "known_info"), ("Unknown info", "unknown_info"))
            if body.get(key) is not None
        ]
        body = "\n".join([*lines, block("Task instructions", body["task_instructions"])])
    persona = scenario.get("persona")
    start = "" if persona is None else block("Persona", persona) + "\n"
    return start + block("Instructions", body)


# ── A world ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class World(tools.World):
    """One episode. What a tool wrote before it refused stays written: upstream has no rollback.

    `transferred` stays False: a transfer is a call like any other here. The agent then says so, and it is the *user* who
    ends the conversation, with one of `user_sim.STOPS`.
    """

    def __init__(self, task: Task, domain: "Domain"):
        super().__init__(task, domain.functions)
        self.domain = domain

    def rows(self, table: str) -> Iterator[tuple[Any, Any]]:
        """(key, row) in the database's order; rows of this episode come last."""
        base = self.task.db[table]
        yield from ((key, self.read(table, key)) for key in base)
        yield from [(key, row) for (t, key), row in self.written.items() if t == table and key not in base]

    def call(self, name: str, arguments: dict) -> str:
        """Run a tool of the agent. Always returns an observation."""
        return self.execute("assistant", name, arguments)[0]

    def user_call(self, name: str, arguments: dict) -> str:
        """Run a tool of the user (telecom)."""
        return self.execute("user", name, arguments)[0]

    def execute(self, requestor: str, name: str, arguments: dict) -> tuple[str, bool]:
        """Run a call of the "assistant" or the "user". Returns the observation and whether it is an error.

        Arguments are bound by name and not checked against the schema; whatever goes wrong in a tool because of them is
        an observation, so no exception passes.
        """
        try:
            if not isinstance(arguments, dict) or not plain(arguments):
                raise ToolError(f"arguments must be an object, at most {MAX_DEPTH} levels deep, without huge integers")
            self.calls.append(Call(name, arguments))
            result = self.domain.tool(requestor, name)(self, **arguments)
            self.domain.sync(self)
            return result if isinstance(result, str) else json.dumps(result), False
        except Exception as error:
            return f"Error: {error}", True

    def tell_beside(self, text: str) -> None:
        """A message beside calls: upstream does not deliver it, and yet looks for facts in it."""
        self.tell(text)

    # The reward: a product of components. A component is 1 if all its checks are true.

    def checks(self, component: str) -> list[tuple[str, bool]]:
        """What a component looks at, in words, and whether each holds. Changes nothing. Errors: NL_ASSERTION needs a judge."""
        task, domain = self.task, self.domain
        match component:
            case "DB":
                return [(line, False) for line in self.differences()]
            case "ENV_ASSERTION":
                return [(f"{a['func_name']} {a['arguments']}", domain.holds(self, a)) for a in task.assertions]
            case "ACTION":
                return [(f"{a.name} {a.arguments} was called", any(map(a.matches, self.calls))) for a in task.gold]
            case "COMMUNICATE":
                return [(fact, any(says(text, fact, domain.rule) for text in self.messages)) for fact in task.told]
            case "NL_ASSERTION":
                return [(claim, bool(domain.judge(claim, self))) for claim in task.claims]
        raise UserError(f"task {task.id}: unknown reward basis {component}")

    def differences(self) -> list[str]:
        """One line for each field in which the database differs from the one that the gold actions give."""
        (goal, forms), base, lines = self.domain.goal(self.task), self.task.db, []
        for table, key in sorted(goal.keys() | self.written.keys()):
            want, have = (rows.get((table, key), base[table].get(key)) for rows in (goal, self.written))
            form = forms.get((table, key)) or self.domain.form(want)
            if table not in self.domain.hidden and form != self.domain.form(have):
                lines += tools.difference({(table, key): want}, {(table, key): have}, base) or [f"{table} {key}"]
        return lines

    def reward(self) -> Reward:
        """The product of the task's own components; which of them only a judge could give is said in `left_out`."""
        unjudged = bool(self.task.claims) and self.domain.judge is None
        left_out = tuple(name for name in self.task.basis if name == "NL_ASSERTION" and unjudged)
        checks = {name: self.checks(name) for name in self.task.basis if name not in left_out}
        parts = {name: float(all(ok for _, ok in found)) for name, found in checks.items()}
        failed = {name: tuple(text for text, ok in found if not ok) for name, found in checks.items()}
        untold = failed.pop("COMMUNICATE", ())
        diff = tuple(f"{name}: {line}" for name, lines in failed.items() for line in lines)
        return Reward(float(all(parts.values())), diff, untold, parts, left_out, self.domain.rule)


def says(text: str, fact: str, rule: str) -> bool:
    """Whether a message tells a fact. Officially any substring does, so that "100" tells "10"; carefully, whole words."""
    text, fact = text.lower(), fact.lower()
    if rule == "official":
        return fact in text.replace(",", "")
    text = re.sub(r"(?<=\d),(?=\d)", "", text)
    return re.search(rf"(?<![\w.]){re.escape(fact)}(?!\w|\.\d)", text) is not None


# ── The domain object ────────────────────────────────────────────────────────────────────────────────────────────────
TASK_SETS = {
    "head": "tasks.json",
    "small": "tasks_small.json",
    "v0.2.0": "tasks_v0.2.0.json",
    "tau1": "tau1_{}_tasks.json",
}
ROLE = """You are a customer service agent. Help the user, and keep to the policy below.
In each turn either send the user a message or call a tool, never both. Calls must be valid JSON."""
# What suits these domains better than a preset's values. Policy and tools take 3,800 to 7,400 tokens, and there is no split to
# validate on. With the CPU's preset nothing is measured in `train`: that takes hours.
SIZES = dict(  # noqa: C408
    prompts=True, eval_every=0, eval_tasks=0, max_errors=10, minibatches=1, micro_tokens=8192, checkpointing=True,
)  # fmt: skip
ON_CPU = dict(  # noqa: C408
    tasks=2, group_size=4, slots=4, max_turns=12, max_new=128, user_max_new=96, max_len=8192, user_max_len=4096, test_tasks=0,
)  # fmt: skip
ON_GPU = dict(  # noqa: C408
    tasks=16, group_size=8, max_new=1024, max_len=16384, user_max_len=8192, slots=12, test_tasks=40, micro_tokens=16384,
)  # fmt: skip
AS_PAPER = dict(max_len=32768, user_max_len=16384, slots=8, test_tasks=40, micro_tokens=32768)  # noqa: C408


def transfer_at_once() -> tools.Agent:
    """Null baseline."""
    yield ""
    yield Call("transfer_to_human_agents", {"summary": ""})


class Domain(tools.Domain):
    """A domain of τ²-bench, read from a folder (`locate`).

    task_set: "head", "small" (telecom's tasks with one trouble each), "v0.2.0" (the tasks of autumn 2025, which need no
    judge) or "tau1" (τ-bench v1).
    judge(claim, world) → bool decides the natural-language claims; without one that component is left out, and said so.
    rule: how databases and facts compare: "official" is upstream's, for scores to be compared with published ones;
    "careful" ignores the order of lists and wants facts as whole words.
    The splits of split_tasks.json hold; train and test share no task. "tau1" has "train" only, which is all of it: most
    of its tasks are those of the head's train *and test* splits in other words, so a model trained on it, as in the
    paper, has seen the test tasks.
    """

    name: str
    database: Any  # a TypedDict of the tables
    reads: tuple[Callable, ...] = ()
    writes: tuple[Callable, ...] = ()
    generic: tuple[Callable, ...] = ()
    user_reads: tuple[Callable, ...] = ()
    user_writes: tuple[Callable, ...] = ()
    hidden: tuple[str, ...] = ()  # tables that are no part of the database
    greeting = "Hi! How can I help you today?"
    limits = {"max_turns": 100, "max_errors": 10}  # noqa: RUF012  # the benchmark's: 200 steps of both
    paper_split = True
    baselines = tools.Domain.baselines | {"transfer": lambda rng: transfer_at_once()}

    def __init__(
        self,
        data: str | Path | None = None,
        task_set: str = "head",
        judge: Callable[[str, World], bool] | None = None,
        rule: str = "official",
    ):
        if task_set not in TASK_SETS or rule not in ("official", "careful"):
            raise UserError(f"{task_set}, {rule}: task sets are {', '.join(TASK_SETS)}, rules official and careful")
        self.judge, self.rule, self.task_set = judge, rule, task_set
        self.folder = locate(data, self.name)
        self.functions = {t.__name__: t for t in (*self.reads, *self.writes, *self.generic)}
        self.user_functions = {t.__name__: t for t in (*self.user_reads, *self.user_writes)}
        self.policy = self.read_policy()
        self.read_task = read_tau1_task if task_set == "tau1" else read_task
        with intact(self.folder):
            self.base = self.load()
            self.records = self.read_records()
            self.split_ids = self.read_splits()
        self.splits = {split: len(ids) for split, ids in self.split_ids.items()}
        self._tasks: dict[str, Task] = {}
        self._goals: dict[str, tuple[dict, dict]] = {}

    @classmethod
    def sizes(cls, preset) -> dict[str, Any]:
        size = ON_CPU if preset.device == "cpu" else AS_PAPER if preset.max_len > 16384 else ON_GPU
        return SIZES | size

    @classmethod
    def from_config(cls, cfg) -> "Domain | PaperSplit":
        tested = cls(cfg.data or None, cfg.task_set)
        return PaperSplit(cls(cfg.data or None, "tau1"), tested) if cfg.paper_split else tested

    # Reading the folder

    def load(self) -> dict[str, dict[Any, Any]]:
        """The shared base, {table: {key: row}}: never written to."""
        return conform(read_file(self.folder / "db.json"), self.database)

    def read_records(self) -> dict[str, dict]:
        """The tasks by id, as they are in the file; what τ-bench v1 left lies beside the domains."""
        file = TASK_SETS[self.task_set].format(self.name)
        records = read_file(self.folder / file, self.folder.parent / file, self.folder.parents[1] / file)
        return {r["task_id" if self.task_set == "tau1" else "id"]: r for r in records}

    def read_policy(self) -> str:
        return read_file(self.folder / "policy.md")

    def read_splits(self) -> dict[str, tuple[str, ...]]:
        if self.task_set == "tau1":
            return {"train": tuple(self.records)}
        splits = read_file(self.folder / "split_tasks.json")
        return {split: tuple(i for i in ids if i in self.records) for split, ids in splits.items()}

    # What conversations need

    @functools.cached_property
    def system(self) -> str:
        return f"<instructions>\n{ROLE}\n</instructions>\n<policy>\n{self.policy}\n</policy>"

    @functools.cached_property
    def tools(self) -> list[dict]:
        return [schema(tool) for tool in self.functions.values()]

    @functools.cached_property
    def user_tools(self) -> list[dict]:
        """Schemas of the user's own tools (telecom)."""
        return [schema(tool) for tool in self.user_functions.values()]

    def ids(self, split: str) -> tuple[str, ...]:
        """The ids of a split's tasks."""
        if not self.split_ids.get(split):
            raise UserError(f"{self.name}, {self.task_set}: no split {split}; choose one of {', '.join(self.splits)}")
        return self.split_ids[split]

    def task(self, split: str, seed: int, index: int) -> Task:
        """Task `index` of a split in an order drawn from the seed. Each pass over the split has each task once."""
        ids = self.ids(split)
        turn, at = divmod(index, len(ids))
        order = random.Random(f"{self.name} {split} {seed} {turn}").sample(ids, len(ids))
        return replace(self.task_by_id(order[at]), split=split)

    def task_by_id(self, id: str) -> Task:
        """A task outside of any split; read once. Errors: UserError if there is none, or if it is damaged."""
        if id not in self._tasks:
            if (record := self.records.get(id)) is None:
                raise UserError(f"{self.name}, {self.task_set}: no task {id}; it has {len(self.records)} others")
            with intact(self.folder):
                task = self.read_task(record, "", self.base)
            names = {t.__name__ for t in (*self.writes, *self.user_writes)}
            n = sum(action.name in names for action in task.gold)
            kind = ("no write", "one write", "more writes")[min(n, 2)]
            actions = (record.get("initial_state") or {}).get("initialization_actions")
            self._tasks[id] = replace(task, kind=kind, db=self.initial(actions or ()))
        return self._tasks[id]

    def initial(self, actions: Any) -> dict[str, dict[Any, Any]]:
        """The base, after the initialisation actions of a task (telecom)."""
        world = World(Task("", "", "", self.base), self)
        for action in actions:
            try:
                self.set_up(world, action)
            except (ToolError, TypeError, LookupError) as error:
                raise UserError(f"{self.name}: initialisation {action} failed: {error}") from None
        new = {table: {k: row for (t, k), row in world.written.items() if t == table} for table in self.base}
        return {table: rows | new[table] if new[table] else rows for table, rows in self.base.items()}

    def task_from(self, actions: Any) -> Task:
        """A task without a goal, for its state: the base after some initialisation actions."""
        return Task("", "", "", self.initial(actions))

    def world(self, task: Task) -> World:
        return World(task, self)

    def instruction(self, task: Task) -> str:
        """The simulated user's system prompt. Only the user sees it."""
        file = "simulation_guidelines_tools.md" if self.user_functions else "simulation_guidelines.md"
        parents = self.folder.parents
        guide = read_file(parents[1] / "user_simulator" / file, parents[0] / "user_simulator" / file)
        return f"{guide}\n\n<scenario>\n{task.scenario}\n</scenario>"

    # What worlds need

    def tool(self, requestor: str, name: str) -> Callable:
        """A registered tool of the "assistant" or the "user". Errors: ToolError."""
        functions = self.user_functions if requestor == "user" else self.functions
        if not functions:
            raise ToolError("User tools not available")
        if name not in functions:
            raise ToolError(f"Tool '{name}' not found.")
        return functions[name]

    def form(self, row: dict | None) -> str:
        """A row as it is compared."""
        return canonical(row if self.rule == "official" else unordered(row))

    def goal(self, task: Task) -> tuple[dict[tuple[str, Any], dict], dict[tuple[str, Any], str]]:
        """The rows that the gold actions write, and their forms, computed once per task. What fails among the actions is
        passed over, and there is no `sync` between them: so upstream computes its goal, though it syncs every real call.
        """
        if task.id not in self._goals:
            world = World(task, self)
            for action in task.gold:
                try:
                    self.tool(action.requestor, action.name)(world, **action.arguments)
                except Exception:
                    continue
            self._goals[task.id] = world.written, {key: self.form(row) for key, row in world.written.items()}
        return self._goals[task.id]

    # What only telecom has: a second side

    def sync(self, world: World) -> None:
        """Bring the user's side in step with the agent's; runs after every call that succeeds."""

    def set_up(self, world: World, action: dict) -> None:
        """Run one of a task's initialisation actions, {env_type, func_name, arguments}."""
        raise UserError(f"{self.name} has no initialisation action {action['func_name']}")

    def holds(self, world: World, assertion: dict) -> bool:
        """Whether one of a task's assertions, {func_name, arguments, assert_value}, is met."""
        raise UserError(f"{self.name} has no assertion {assertion['func_name']}")


class PaperSplit:
    """A domain that trains on all tasks of τ-bench v1 (`trained`), as the paper did, and tests on those of `tested`."""

    def __init__(self, trained: Domain, tested: Domain):
        self.trained, self.tested = trained, tested
        self.splits = tested.splits | trained.splits

    def of(self, task: Task) -> Domain:
        return self.trained if task.split == "train" else self.tested

    def ids(self, split: str) -> tuple[str, ...]:
        return (self.trained if split == "train" else self.tested).ids(split)

    def task(self, split: str, seed: int, index: int) -> Task:
        return (self.trained if split == "train" else self.tested).task(split, seed, index)

    def world(self, task: Task) -> World:
        return self.of(task).world(task)

    def instruction(self, task: Task) -> str:
        return self.of(task).instruction(task)

    def overlap(self) -> int:
        """How many tests want just the writes that a training task wants."""
        writes = {tool.__name__ for tool in self.tested.writes}
        wanted = lambda task: canonical([[a.name, a.arguments] for a in task.gold if a.name in writes])
        seen = {wanted(self.trained.task_by_id(id)) for id in self.trained.records} - {canonical([])}
        return sum(wanted(self.tested.task_by_id(id)) in seen for id in self.tested.ids("test"))

    def notices(self) -> list[str]:
        return [
            "warning: --paper-split trains on all tasks of τ-bench v1, as the paper did. They overlap with the test tasks: "
            f"{self.overlap()} of the {len(self.ids('test'))} want the very writes that a training task wants. Success on "
            "them is no success on unseen tasks"
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tested, name)


# ── Tools that every domain has ──────────────────────────────────────────────────────────────────────────────────────
def transfer_to_human_agents(world: World, summary: str):
    """Hand the user over to a human agent, when the policy leaves no other way. Tell the user afterwards.
    summary: what the user wants and what was done so far"""
    return "Transfer successful"


MAX_EXPRESSION = 1000  # characters


def calculate(world: World, expression: str):
    """Evaluate an arithmetic expression, rounded to two decimals.
    expression: numbers, + - * / ( ) and spaces, such as 2 * (3 + 4)"""
    if not all(char in "0123456789+-*/(). " for char in expression):
        raise ToolError("Invalid characters in expression")
    if len(expression) > MAX_EXPRESSION:
        raise ToolError(f"the expression has more than {MAX_EXPRESSION} characters")
    return str(round(float(evaluate(ast.parse(expression.strip(" "), mode="eval").body)), 2))


def evaluate(node: ast.AST) -> Any:
    """A number from a syntax tree of numbers and OPERATORS; anything else, a call or a tuple, is refused."""
    match node:
        case ast.Constant(value=int() | float()):
            return node.value
        case ast.UnaryOp(op=ast.UAdd() | ast.USub()):
            return OPERATORS[type(node.op)](evaluate(node.operand))
        case ast.BinOp() if type(node.op) in OPERATORS:
            value = OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
            if isinstance(value, int) and value.bit_length() > MAX_BITS:
                raise ToolError("the result is too large")
            return value
    raise ToolError("not an arithmetic expression")


def power(base: Any, exponent: Any) -> Any:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(base) > 1 and exponent * base.bit_length() > MAX_BITS:
        raise ToolError("the result is too large")
    return base**exponent


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: power,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
