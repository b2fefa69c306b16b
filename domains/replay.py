"""Replay recorded τ²-bench calls and conversations: `python -m domains.replay VECTORS.jsonl … --data DIR`.

A line is one case. With `calls`: start from the database, run the initialisation actions, then the calls; every
observation, whether it is an error, and the digests of the final databases must agree. With `messages`: play a
conversation and compare every component of the reward. Prints `N of M vectors agree` and the first differences; exits 1
if there are any.
"""

import argparse
import functools
import hashlib
import math
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

from chat import UserError, parse_json
from domains.airline import Airline
from domains.retail import Retail
from domains.tau2 import Domain, World, canonical, fields
from domains.telecom import Telecom

DOMAINS = {"retail": Retail, "airline": Airline, "telecom": Telecom}
EXACT = (None, "domain")  # kinds of errors whose text is upstream's own; others are incidental, their text is ours


# ── Digests ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class Digests:
    """sha256 of a world's databases as canonical JSON. The base has megabytes and an episode writes a few rows, so the
    texts of the base's rows are kept."""

    def __init__(self, domain: Domain):
        self.domain, self.kinds = domain, fields(domain.database)
        self.base_texts = functools.cache(lambda table: self.texts(table, domain.base[table]))

    def of(self, world: World) -> dict[str, str]:
        agent = ",".join(f"{canonical(table)}:{self.table(world, table)}" for table in sorted(self.kinds))
        databases = {"final_db_sha256": f"{{{agent}}}"}
        if "user" in self.domain.base:
            databases["final_user_db_sha256"] = self.table(world, "user")
        return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in databases.items()}

    def table(self, world: World, table: str) -> str:
        began = world.task.db[table]
        own = {} if began is self.domain.base[table] else began
        own = own | {key: row for (t, key), row in world.written.items() if t == table}
        texts = self.base_texts(table) | self.texts(table, own)
        body = ",".join(texts[key] for key in sorted(texts))
        return f"[{body}]" if self.is_list(table) else f"{{{body}}}"

    def texts(self, table: str, rows: dict) -> dict[Any, str]:
        kind = get_args(self.kinds.get(table))
        texts = {key: canonical(dumped(row, kind[-1]) if kind else row) for key, row in rows.items()}
        return texts if self.is_list(table) else {key: f"{canonical(key)}:{text}" for key, text in texts.items()}

    def is_list(self, table: str) -> bool:
        return get_origin(self.kinds.get(table)) is list


def dumped(row: dict, kind: Any) -> dict:
    """A row as upstream's JSON dump has it: where a tool stored a value unchecked, an integer in a field for floats comes
    out as a float, a flag in a field for integers as 0 or 1, and NaN or infinity there as null."""
    row = dict(row)
    for name, hint in fields(kind).items():
        if float in (hint, *get_args(hint)) and isinstance(row[name], int):
            row[name] = float(row[name])
        elif hint is int and isinstance(row[name], bool):
            row[name] = int(row[name])
        elif hint is int and isinstance(row[name], float) and not math.isfinite(row[name]):
            row[name] = None
    return row


# ── Replaying ────────────────────────────────────────────────────────────────────────────────────────────────────────
def replay_calls(vector: dict, domain: Domain, digests: Digests) -> list[str]:
    """→ what differs."""
    world, lines = domain.world(domain.task_from(vector["initialization_actions"] or ())), []
    for i, call in enumerate(vector["calls"]):
        seen, error = world.execute(call["requestor"], call["name"], call["arguments"])
        exact = call.get("error_kind") in EXACT
        if error != call["error"] or (exact and seen != call["observation"]):
            lines.append(f"call {i} {call['name']} {call['arguments']}: {seen!r}, recorded {call['observation']!r}")
    got = digests.of(world)
    return lines + [f"{name} differs" for name in got if name in vector and got[name] != vector[name]]


def replay_conversation(vector: dict, domain: Domain) -> list[str]:
    """→ what differs."""
    world, calls, lines = domain.world(domain.task_by_id(vector["task_id"])), {}, []
    for message in vector["messages"]:
        if message["role"] == "assistant" and message["content"]:
            world.tell(message["content"])
        for call in message.get("tool_calls") or ():
            calls[call["id"]] = world.execute(call["requestor"], call["name"], call["arguments"])
        if message["role"] == "tool":
            (seen, error), recorded = calls[message["id"]], message["content"]
            if error != message["error"] or (not error and seen != recorded):
                lines.append(f"{message['id']}: {seen!r}, recorded {recorded!r}")
    reason, want = vector["termination_reason"], vector["expected"]
    got = graded(world) if reason in ("user_stop", "agent_stop") else cut_short(reason)
    return lines + [f"{k} {got[k]}, recorded {want[k]}" for k in got if k in want and got[k] != want[k]]


def cut_short(reason: str) -> dict[str, Any]:
    """The verdict on a conversation that neither side ended (in training: rollout.EXITS)."""
    note = f"Simulation terminated prematurely. Termination reason: {reason}"
    return {"reward": 0.0, "reward_without_nl": 0.0, "reward_basis": None, "info": {"note": note}}


def graded(world: World) -> dict[str, Any]:
    """A world's verdict in the terms of a recorded one."""
    task, reward = world.task, world.reward()
    names = ("DB", "ENV_ASSERTION", "ACTION", "COMMUNICATE")
    met = {name: [ok for _, ok in world.checks(name)] for name in names}
    factor = {name: float(all(checks)) for name, checks in met.items()}
    breakdown = {name: factor[name] for name in ("DB", "ENV_ASSERTION") if name in task.basis}
    env = float(all(breakdown.values()))
    others = {name: v for name, v in reward.parts.items() if name != "NL_ASSERTION"}
    verdict = {
        "reward_basis": list(task.basis),
        "db_match": bool(factor["DB"]),
        "db_reward": factor["DB"],
        "env_reward": env,
        "env_breakdown": breakdown,
        "env_assertions": [
            {"func_name": a["func_name"], "met": ok}
            for a, ok in zip(task.assertions, met["ENV_ASSERTION"], strict=True)
        ],
        "action_reward": factor["ACTION"],
        "action_checks": met["ACTION"],
        "communicate_reward": factor["COMMUNICATE"],
        "communicate_checks": [
            {"info": info, "met": ok} for info, ok in zip(task.told, met["COMMUNICATE"], strict=True)
        ],
        "reward_without_nl": float(all(others.values())),
    }
    return verdict if "NL_ASSERTION" in task.basis else verdict | {"reward": reward.value}


def replay(lines: list[dict], domain: Domain) -> dict[str, list[str]]:
    """→ {id: what differs} of the vectors that do not agree."""
    digests = Digests(domain)
    found = {
        v["id"]: replay_calls(v, domain, digests) if "calls" in v else replay_conversation(v, domain) for v in lines
    }
    return {id: differences for id, differences in found.items() if differences}


# ── Command line ─────────────────────────────────────────────────────────────────────────────────────────────────────
def read_vectors(path: str) -> list[dict]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        vectors = [parse_json(line) for line in lines if line.strip()]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON Lines: {error}") from None
    if odd := [v for v in vectors if not isinstance(v, dict) or not isinstance(v.get("id"), str)]:
        raise UserError(
            f"{path} holds {str(odd[0])[:40]}: a vector is an object with an id that begins with its domain"
        )
    for v in vectors:
        check_fields(v)
    return vectors


def check_fields(vector: dict) -> None:
    """Raises UserError with the first field that the replay of a vector would miss."""

    def need(value: Any, what: str, *names: str) -> None:
        for name in names:
            if not isinstance(value, dict) or name not in value:
                raise UserError(f"vector {vector['id']}: {what} has no {name}; a recorded one has")

    def each(values: Any, what: str, *names: str) -> list:
        values = values if isinstance(values, list) else [values]
        for value in values:
            need(value, what, *names)
            if not isinstance(value.get("arguments", {}), dict):
                raise UserError(f"vector {vector['id']}: arguments {str(value['arguments'])[:40]} are no object")
        return values

    call = ("requestor", "name", "arguments")
    if "calls" in vector:
        need(vector, "it", "initialization_actions")
        each(vector["calls"], "a call", *call, "observation", "error")
        return
    need(vector, "it", "messages", "task_id", "termination_reason", "expected")
    called = set()
    for message in each(vector["messages"], "a message", "role", "content"):
        called |= {str(c["id"]) for c in each(message.get("tool_calls") or [], "a call", "id", *call)}
        if message["role"] == "tool":
            need(message, "a tool's message", "id", "error")
            if str(message["id"]) not in called:
                raise UserError(f"vector {vector['id']}: result {str(message['id'])[:40]} comes before its call")


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns the exit status: 0 all agree, 1 some do not, 2 bad input."""
    parser = argparse.ArgumentParser(prog="python -m domains.replay", description=__doc__.splitlines()[0])
    parser.add_argument("vectors", nargs="+", help="JSON Lines; the id of a line begins with its domain")
    parser.add_argument("--data", help="folder with τ²-bench's data (or TAU2_DATA_DIR)")
    parser.add_argument("--show", type=int, default=5, help="how many of the vectors that differ are shown")
    options = parser.parse_args(arguments)
    try:
        vectors = [v for path in options.vectors for v in read_vectors(path)]
        groups: dict[tuple[str, str], list[dict]] = {}
        for vector in vectors:
            name = vector["id"].split("-")[0]
            if name not in DOMAINS:
                raise UserError(f"vector {vector['id']}: the id must begin with {', '.join(DOMAINS)}")
            groups.setdefault((name, vector.get("task_set") or "head"), []).append(vector)
        differing: dict[str, list[str]] = {}
        for (name, task_set), group in groups.items():
            differing |= replay(group, DOMAINS[name](options.data, task_set))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for id, differences in list(differing.items())[: options.show]:
        print(f"{id}: {'; '.join(differences)[:1000]}")
    print(f"{len(vectors) - len(differing)} of {len(vectors)} vectors agree")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
