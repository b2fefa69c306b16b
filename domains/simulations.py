"""Conversations in τ²-bench's own result format (its `Results`, version 1.0.1), so that its viewer and its metrics read them.

A conversation comes as it was recorded: a list of turns {"role", "text"} (rollout.Log). It is played again in a world of its
own, for what each check of the reward found; the verdict must be the recorded one.
"""

from datetime import UTC, datetime

from chat import Call, Malformed, ToolCalls, parse
from domains.tau2 import Domain, World
from tools import TOOL_FAULTS

# Ours → τ²-bench's. What it calls context_window_exceeded it leaves out of its means, and here that counts as 0.
TERMINATION = {
    "user_ended": "user_stop",
    "turn_limit": "max_steps",
    "too_many_errors": "too_many_errors",
    "malformed": "agent_error",
    "reply_full": "agent_error",
    "context_full": "agent_error",
    "user_failed": "infrastructure_error",  # left out of its means, as of ours
}


def results(domain: Domain, rows: list[dict], what: dict, style: str) -> dict:
    """The whole file. rows: conversations with task, member, turns, exit, reward, started and seconds (Unix time); what: the
    evaluation's settings; style: how the agent writes calls (see chat.parse).
    """
    user = {"implementation": "user_simulator", "llm": what["user"]}
    user |= {"llm_args": {"temperature": what["user_temperature"]}}
    agent = {"implementation": "mua_rl", "llm": what["model"], "llm_args": {"temperature": what["temperature"]}}
    return {
        "timestamp": stamp(max((row["started"] + row["seconds"] for row in rows), default=0.0)),
        "info": {
            "git_commit": "unknown", "num_trials": what["trials"], "max_steps": 2 * what["max_turns"],
            "max_errors": what["max_errors"], "user_info": user, "agent_info": agent, "seed": what["seed"],
            "environment_info": {"domain_name": domain.name, "policy": domain.policy, "tool_defs": None},
        },
        "tasks": [record(domain, id) for id in dict.fromkeys(row["task"] for row in rows)],
        "simulations": [simulation(domain, row, what["seed"], style) for row in rows],
    }  # fmt: skip


def record(domain: Domain, id: str) -> dict:
    """A task as tasks.json has it; one of τ-bench v1 is put in that form."""
    found = domain.records[id]
    if "user_scenario" in found:
        return found
    actions = [{"action_id": str(i), "requestor": "assistant", **a} for i, a in enumerate(found["actions"])]
    criteria = {"actions": actions, "communicate_info": found["outputs"], "reward_basis": ["DB", "COMMUNICATE"]}
    return {"id": id, "user_scenario": {"instructions": found["instruction"]}, "evaluation_criteria": criteria}


def simulation(domain: Domain, row: dict, seed: int, style: str) -> dict:
    """One conversation."""
    talk = [{"role": "assistant", "content": domain.greeting}, *messages(row["turns"], style)]
    reason, end = TERMINATION[row["exit"]], row["started"] + row["seconds"]
    if row["reward"] is None:
        verdict = None
    elif reason == "user_stop":
        verdict = reward_info(domain, row, talk)
    else:
        note = f"Simulation terminated prematurely. Termination reason: {reason}"
        verdict = {"reward": 0.0, "reward_basis": None, "info": {"note": note, "exit": row["exit"]}}
    return {
        "id": f"{row['task']}-{row['member']}", "task_id": row["task"], "timestamp": stamp(end), "trial": row["member"],
        "start_time": stamp(row["started"]), "end_time": stamp(end), "duration": row["seconds"], "seed": seed,
        "termination_reason": reason, "agent_cost": None, "user_cost": None, "reward_info": verdict,
        "messages": [m | {"turn_idx": i} for i, m in enumerate(talk)],
    }  # fmt: skip


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def messages(turns: list[dict], style: str) -> list[dict]:
    """Turns as messages. What can't be read as a call has no place in the format: it's a call of "malformed", which fails."""
    out, waiting = [], []
    for at, turn in enumerate(turns):
        role, text = turn["role"], turn["text"]
        side = "user" if role.startswith("user") else "assistant"
        if role in ("user", "agent"):
            out.append({"role": side, "content": text})
            continue
        if role in ("call", "user_call") or not waiting:  # an empty turn was not logged, only what came back
            action = parse(text if role.endswith("call") else "", style if side == "assistant" else "hermes")
            items, beside = (action.calls, action.text) if isinstance(action, ToolCalls) else ([action], "")
            waiting = [{"id": f"call_{at}_{i}", "requestor": side} | as_call(c, text) for i, c in enumerate(items)]
            out.append({"role": side, "content": beside or None, "tool_calls": list(waiting)})
        if role in ("tool", "user_tool"):
            failed, call = text.startswith("Error: "), waiting.pop(0)
            out.append({"role": "tool", "id": call["id"], "content": text, "requestor": side, "error": failed})
    return out


def as_call(item: Call | Malformed, text: str) -> dict:
    if isinstance(item, Malformed):
        return {"name": "malformed", "arguments": {"text": text}}
    return {"name": item.name, "arguments": item.arguments}


def replayed(domain: Domain, task: str, talk: list[dict]) -> World:
    """The world at the end of a conversation."""
    world = domain.world(domain.task_by_id(task))
    undone = {m["id"] for m in talk if m["role"] == "tool" and m["content"] in TOOL_FAULTS}
    for message in talk[1:]:
        if message["role"] == "assistant" and message["content"]:
            world.tell(message["content"])
        for call in message.get("tool_calls") or ():
            if call["id"] not in undone:
                world.execute(call["requestor"], call["name"], call["arguments"])
    return world


def reward_info(domain: Domain, row: dict, talk: list[dict]) -> dict:
    """What each check of the reward found. Raises AssertionError if the verdict is not the recorded one."""
    world = replayed(domain, row["task"], talk)
    reward, task, criteria = world.reward(), world.task, record(domain, row["task"])["evaluation_criteria"] or {}
    assert reward.value == row["reward"], (
        f"task {row['task']}: {row['reward']} recorded, {reward.value} when played again"
    )
    db, *checks = ([ok for _, ok in world.checks(name)] for name in ("DB", "ENV_ASSERTION", "ACTION", "COMMUNICATE"))
    assertions, actions, told = (
        list(zip(criteria.get(key) or (), found, strict=True))
        for key, found in zip(("env_assertions", "actions", "communicate_info"), checks, strict=True)
    )
    return {
        "reward": reward.value,
        "db_check": {"db_match": all(db), "db_reward": float(all(db))},
        "env_assertions": [{"env_assertion": a, "met": ok, "reward": float(ok)} for a, ok in assertions],
        "action_checks": [{"action": a, "action_match": ok, "action_reward": float(ok)} for a, ok in actions],
        "communicate_checks": [{"info": f, "met": ok, "justification": "by substring"} for f, ok in told],
        "nl_assertions": None,
        "reward_basis": list(task.basis),
        "reward_breakdown": reward.parts,
        "info": {"left_out": list(reward.left_out)} if reward.left_out else None,
    }
