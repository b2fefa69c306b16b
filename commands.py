"""The commands that look at a run or a model: eval, chat, show, save, plan."""

import dataclasses
import hashlib
import json
import math
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

import explain
import model as models
import plan
import report
from api_user import Api
from chat import Chat, UserError, parse_json
from config import PRESETS, Config, check_device, check_user, fitted, read_config
from domains import absolute, find, simulations
from evaluation import (
    PHASE,
    SPEAKER,
    Stage,
    check_room,
    check_split,
    endpoint,
    evaluate,
    make_domain,
    make_samplers,
    null_baselines,
    open_api,
    shares,
    split_size,
)
from grpo import advantages
from model_files import load_chat, save_adapter, save_chat, save_model
from rollout import Limits, Trajectory, converse, rollout
from run import Progress, checkpoint_of, episode, load_state, lock, sync, write_whole
from tools import Domain
from user_sim import STOP, Heard, parse_pool
from weights import check_vocabulary, is_run, load_pretrained, other_users, smollm2, start_of_rl, trained_weights


@dataclass(frozen=True)
class Place:
    """Where and on what a run or a model is tried. What is left out is the run's own."""

    domain: str | None = None  # shop, retail, airline, telecom, or FILE.py
    data: str | None = None  # τ²-bench's data: a folder; TAU2_DATA_DIR by default
    task_set: str | None = None  # head, small (telecom), v0.2.0 or tau1
    seed: int | None = None  # of the tasks
    device: str | None = None  # cpu or cuda
    max_turns: int | None = None  # of the agent; on τ²-bench 100, its own limit of 200 steps
    max_new: int | None = None  # tokens a turn
    max_len: int | None = None  # tokens of the agent's context
    user_max_len: int | None = None


@dataclass(frozen=True)
class EvalOptions(Place):
    """Success of a trained run or of any model on held-out tasks. RUN: a run folder, a model folder, or "smollm2"."""

    split: str = "test"  # shop: val, test, combo (wish combinations never trained on), names (names never trained on)
    n: int | None = None  # tasks; by default 250 of the shop's, and all of another domain's split
    trials: int = 4  # conversations of each task
    # lm: the frozen cold start; self: the agent's own weights; frozen:PATH; openai:MODEL; scripted; stranger: a script in
    # sentences nobody trained on. Several with weights: lm=0.8,scripted=0.2
    user: str = "lm"
    user_url: str | None = None  # of openai:MODEL; OpenAI's own by default
    user_key_env: str | None = None  # the environment variable that holds its key
    user_budget: int | None = None  # tokens that it may use; no cap by default
    user_temperature: float | None = None  # by default the run's, and 0 for openai:MODEL
    temperature: float = 1.0  # of the agent; 0 is greedy
    slots: int | None = None  # conversations at once
    out: str = ""  # a folder for results, conversations and their page; the same command goes on where it was stopped


@dataclass(frozen=True)
class ChatOptions(Place):
    """You are the user: talk with the trained agent about one task. The wishes are shown; an empty line ends it."""

    split: str = "test"
    task: int | None = None  # which task; any by default
    watch: bool = False  # the run's own simulated user talks in your place, and you look on
    temperature: float = 0.0


@dataclass(frozen=True)
class ExplainOptions:
    """One episode that was trained on: every token's log-probs, ratio, advantage and loss, and the sum by hand."""

    episode: int | None = None  # which one, as numbered by `show`; the last that was trained on by default


@dataclass(frozen=True)
class ShowOptions:
    """Print where a run's report is, its summary, and one conversation in colour."""

    episode: int | None = None  # which one; the last by default


UNTRAINED = {"prompts": True, "slots": 8, "sft_steps": 0, "max_len": 2800, "user_max_len": 2800}  # for a model


def opened(name: str, o: Place, pool: dict[str, float]) -> tuple[Config, Domain, Chat, models.Decoder, dict]:
    """A run or model to talk with: config, domain, chat, policy, and the weights of users by sampler {name: (model, chat)}."""
    folder, run = Path(name), is_run(Path(name))
    cfg = read_config(folder) if run else dataclasses.replace(PRESETS["smol"], **UNTRAINED)
    check_device(o.device or "cpu")
    device = o.device or (cfg.device if torch.cuda.is_available() else "cpu")  # wherever the run was made
    cfg = dataclasses.replace(cfg, device=device)
    torch.set_num_threads(cfg.threads)
    here = placed(cfg, o)
    check_user(dataclasses.replace(here, user=",".join(pool)) if pool else here)
    domain = make_domain(here)
    if run:
        policy = trained_weights(cfg, folder)
        chat = check_vocabulary(load_chat(checkpoint_of(folder)), policy, folder)
    else:
        chat, policy = load_pretrained(name, cfg)
    voices = other_users(pool, cfg, chat, policy)
    if "lm" in pool:
        voices["user"] = (models.Base(policy) if policy.lora else start_of_rl(cfg, folder)) if run else policy, chat
    return here, domain, chat, policy, voices


def placed(cfg: Config, o: Place) -> Config:
    """The settings of a trial: the run's, or a model's on that domain, and what was asked for."""
    given = {f.name: getattr(o, f.name) for f in dataclasses.fields(Config) if getattr(o, f.name, None) is not None}
    if (name := absolute(given.pop("domain", cfg.domain))) != cfg.domain:
        cfg = fitted(cfg, name)
    cfg = dataclasses.replace(cfg, paper_split=False, **find(name).limits)
    for flag, value in given.items():
        if isinstance(value, int | float) and not 0 <= value < math.inf:
            raise UserError(f"--{flag.replace('_', '-')} {value}: give 0 or more")
        if flag in ("trials", "slots", "max_turns", "max_new", "max_len", "user_max_len") and value < 1:
            raise UserError(f"--{flag.replace('_', '-')} {value}: give 1 or more")
    return dataclasses.replace(cfg, **given)


def eval_command(name: str, o: EvalOptions) -> None:
    """Print the null baselines, then success, interval, pass^k, exits and user faults; and leave all that in --out."""
    pool = parse_pool(o.user)
    if o.user_temperature is None and any(kind.startswith("openai:") for kind in pool):
        o = dataclasses.replace(o, user_temperature=0.0)
    if o.n is not None and o.n < 1:
        raise UserError(f"--n {o.n}: give 1 or more")
    cfg, domain, chat, policy, voices = opened(name, o, pool)
    check_split(domain, o.split)
    check_room(cfg, domain, chat, policy.cfg.max_position_embeddings)
    plan.check(cfg, policy.cfg, ("caches",))  # the weights are there already
    print(plan.summary(cfg, policy.cfg), file=sys.stderr)
    n, what = split_size(domain, o.split, o.n), settings(name, o, cfg, domain)
    records = Records(Path(o.out), what | {"n": n}) if o.out else None
    api = open_api(endpoint(cfg), records.user_tokens if records else 0)
    try:
        null = null_baselines(domain, cfg.seed, split=o.split)
        for agent, rate in null.items():
            print(f"{agent:20} {rate:6.1%}   (scripted agent, no model)", flush=True)
        samplers = make_samplers(cfg, chat, policy, None, o.temperature, voices)
        stage = Stage(cfg, domain, chat, samplers, api, {k: its for k, (_, its) in voices.items() if k != "user"})
        result, groups = watched(stage, o, n, records)
    finally:
        if api:
            api.close()
    result |= {"exits": dict(Counter(t.exit for g in groups for t in g)), "null": null}
    result |= costs(groups, api)
    print_result(result)
    if records:
        records.finish(domain, chat.style, result)


def settings(name: str, o: EvalOptions, cfg: Config, domain: Domain) -> dict:
    """What makes an evaluation this one: conversations of another can't stand beside its own."""
    step = load_state(checkpoint_of(Path(name))).step if is_run(Path(name)) else None
    tasks = hashlib.sha256(json.dumps(domain.records).encode()).hexdigest()[:16] if domain.records else None
    what = {"model": name, "model_step": step, "split": o.split, "tasks": tasks, "temperature": o.temperature}
    kept = (
        "domain task_set trials seed user user_url user_temperature max_turns max_errors max_new max_len user_max_new"
    )
    return what | {k: getattr(cfg, k) for k in f"{kept} user_max_len tool_faults dtype".split()}


def watched(stage: Stage, o: EvalOptions, n: int, records: "Records | None") -> tuple[dict, list]:
    """`evaluate`, with each conversation written down as it ends, those written before taken as they are, and progress shown."""
    done = dict(records.done) if records else {}
    tasks = [stage.domain.task(o.split, stage.cfg.seed, i) for i in range(n)]
    rewards = [t.reward for t in done.values()]

    with Progress() as progress:
        if done:
            progress.say(f"{len(done)} of {n * o.trials} conversations were there already")

        def on_done(index: int, member: int, t: Trajectory) -> None:
            rewards.append(t.reward)
            if records:
                row = episode(stage.domain, stage.chat, tasks[index], t, t.metrics["user"])
                records.add(stage, index, row, t.metrics, stage.began.pop((index, member)))
            known = [r for r in rewards if r is not None]
            success = sum(known) / max(1, len(known))
            progress.step("conversations", len(rewards), n * o.trials, success=success)

        return evaluate(stage, o.split, n, o.trials, o.user, done=done, on_done=on_done)


def costs(groups: list[list], api: Api | None) -> dict:
    """Tokens, and seconds a conversation took (many run at once)."""
    talks = [t.metrics for g in groups for t in g]
    tokens = {"agent": sum(m["agent_tokens"] for m in talks), "user": sum(m.get("user_tokens", 0) for m in talks)}
    tokens |= {"user_api": api.tokens} if api else {}
    return {"tokens": tokens, "user_troubles": dict(api.troubles) if api else {}}


def print_result(r: dict) -> None:
    """The table."""
    line = lambda name, value, note="": print(f"{name:20} {value:6.1%}   {note}".rstrip())
    line("success", r["success"] or 0, f"[{r['lo'] or 0:.1%}, {r['hi'] or 0:.1%}] of {r['n']} conversations")
    if r["planned"] > r["n"]:
        missing = f", and of {len(r['without_result'])} tasks no conversation does" * bool(r["without_result"])
        print(
            f"{r['planned'] - r['n']} of {r['planned']} conversations have no result{missing}: the user's side failed"
        )
    for k, value in r["pass_k"].items():
        lo, hi = r["pass_k_interval"][k]
        line(f"pass^{k}", value, f"[{lo:.1%}, {hi:.1%}] of {r['pass_k_tasks'][k]} tasks")
    for exit, n in Counter(r["exits"]).most_common():
        line(f"exit {exit}", n / r["planned"])
    if "user_fault_rate" in r:
        line("user faults", r["user_fault_rate"], shares(r["user_faults"]))
        line("user unjudged", r["user_unjudged"], "of the talks: the script can't follow them, or there is none")
    print("tokens: " + ", ".join(f"{k.replace('_', ' ')} {n:,}" for k, n in r["tokens"].items()))


def whole_json(path: Path, text: bytes) -> dict:
    """An object of an evaluation's files. Raises UserError if it is none."""
    try:
        if isinstance(value := parse_json(text), dict):
            return value
        error = f"{str(value)[:40]} is no object"
    except ValueError as broken:
        error = broken
    raise UserError(f"{path} is damaged ({error}); restore it, or give another --out")


class Records:
    """An evaluation's folder. conversations.jsonl has a line for each conversation, synced as it ended: a killed evaluation
    goes on with the others.
    """

    def __init__(self, folder: Path, what: dict):
        self.folder, self.what, self.path = folder, json.loads(json.dumps(what)), folder / "conversations.jsonl"
        config, self.began = folder / "config.json", time.time()
        if config.exists():
            before = whole_json(config, config.read_bytes())
            for key in self.what:
                if before.get(key) != self.what[key]:
                    shown = "another" if key == "user_url" else f"{before.get(key)}, not {self.what[key]}"
                    raise UserError(f"--out {folder}: holds an evaluation with {key} {shown}; give another folder")
        elif folder.exists() and any(folder.iterdir()):
            raise UserError(f"--out {folder}: it is not empty, and holds no evaluation; give another folder")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(config, json.dumps(self.what, indent=1))
        self.lock = lock(folder)
        self.rows = self.read()

    def read(self) -> list[dict]:
        """The whole lines; what a kill cut is cut off for good."""
        if not self.path.exists():
            return []
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            os.truncate(self.path, len(whole))
        rows = [whole_json(self.path, line) for line in whole.splitlines()]
        wanted = {"index", "member", "user_tokens", "seconds", "reward", "metrics"}
        if any(missing := wanted - row.keys() for row in rows):
            raise UserError(f"{self.path}: a line has no {min(missing)}; take that line out, or give another --out")
        return rows

    @property
    def done(self) -> dict[tuple[int, int], SimpleNamespace]:
        return {(row["index"], row["member"]): SimpleNamespace(**row) for row in self.rows}

    @property
    def user_tokens(self) -> int:
        """What the user behind an API had used when the last conversation ended."""
        return max((row["user_tokens"] for row in self.rows), default=0)

    def add(self, stage: Stage, index: int, row: dict, metrics: dict, began: float) -> None:
        used = stage.api.tokens if stage.api else 0
        row |= {
            "index": index,
            "metrics": metrics,
            "started": began,
            "seconds": time.time() - began,
            "user_tokens": used,
        }
        self.rows.append(json.loads(json.dumps(row)))
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self, domain: Domain, style: str, result: dict) -> None:
        """results.json, the page, and the conversations in τ²-bench's format."""
        self.rows.sort(key=lambda row: (row["index"], row["member"]))
        for index in {row["index"] for row in self.rows}:
            group = [row for row in self.rows if row["index"] == index]
            for row, A in zip(group, advantages([row["reward"] for row in group]), strict=True):
                row["advantage"] = A
        result |= {"seconds": sum(row["seconds"] for row in self.rows), "wall_s": round(time.time() - self.began, 1)}
        write_whole(self.folder / "results.json", json.dumps(self.what | result, indent=1))
        shown = {"null": result.pop("null"), self.what["split"]: result, "wall_s": result["wall_s"]}
        write_whole(self.folder / "summary.json", json.dumps(shown, indent=1))
        (self.folder / "episodes.jsonl.gz").unlink(missing_ok=True)
        report.append_episodes(self.folder / "episodes.jsonl.gz", self.rows)
        made = [self.folder / "results.json", report.html(self.folder)]
        if domain.records:
            made.append(self.folder / "tau2.json")
            write_whole(made[-1], json.dumps(simulations.results(domain, self.rows, self.what, style), indent=1))
        sync(self.folder)
        print("written: " + ", ".join(map(str, made)))


class Human:
    """The person at the keyboard as a user."""

    ctx = None

    def open(self):
        return self.hear("you> ")
        yield

    def reply(self, text: str):
        print(f"agent> {text}")
        return self.hear("you> ")
        yield

    def hear(self, prompt: str) -> Heard:
        try:
            text = input(prompt).strip()
        except EOFError:
            text = ""
        return Heard(text or STOP, ended=not text)


def chat_command(name: str, o: ChatOptions) -> None:
    """You or the simulated user talk, the agent answers, tool calls are shown dimly; at the end the verdict."""
    if o.task is not None and o.task < 0:
        raise UserError(f"--task {o.task}: give 0 or more")
    cfg, domain, chat, policy, voices = opened(name, o, {"lm": 1.0} if o.watch else {})
    check_split(domain, o.split)
    index = random.randrange(split_size(domain, o.split, None)) if o.task is None else o.task
    task = domain.task(o.split, cfg.seed, index)
    whose = "The user's part" if o.watch else "Your part: you speak first, and an empty line ends the talk"
    print(
        f"{whose} (--split {o.split} --task {index}):\n{domain.instruction(task)}\n\nagent> {domain.greeting}",
        flush=True,
    )
    heard = ("user", "agent", "call", "tool") if o.watch else ("call", "tool")  # the rest `Human` prints

    def show(who: str, text: str) -> None:
        if who in heard:
            line = report.painted(f"{who}> {text}", "soft" if who in ("call", "tool") else who, sys.stdout)
            print(line, flush=True)

    key, limits = (cfg.seed, PHASE["chat"], index), Limits(cfg.max_turns, cfg.max_new, cfg.max_len, 3, cfg.max_errors)
    samplers = make_samplers(dataclasses.replace(cfg, slots=1), chat, policy, None, o.temperature, voices)
    player = Stage(cfg, domain, chat, samplers).player(task, "lm", key) if o.watch else Human()
    [t] = rollout([converse(task, domain, player, chat, limits, (*key, SPEAKER["agent"]), 0, show)], samplers)
    print(f"exit: {t.exit}; reward: {t.reward}")
    print("\n".join(t.diff) or "the database is as it should be, and all was told")


SAVE_HELP = """usage: mua_rl.py save RUN_OR_MODEL FOLDER [--merge]

Write trained weights, and the tokenizer, to a new folder: full weights, which transformers and vLLM open, or, of a run with
--lora-rank, an adapter that peft opens. --merge: full weights of such a run, too."""


def save_command(args: list[str]) -> None:
    """Writes what a run has learned, or a pretrained model, as a folder for transformers, peft and vLLM."""
    if {"-h", "--help"} & {*args}:
        print(SAVE_HELP)
        return
    merge, places = "--merge" in args, [a for a in args if a != "--merge"]
    if len(places) != 2 or any(p.startswith("-") for p in places):
        raise UserError("save needs a run and a new folder: python mua_rl.py save runs/tiny-seed0 my-model [--merge]")
    name, folder = places[0], Path(places[1])
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; give a new folder")
    cfg = read_config(Path(name)) if is_run(Path(name)) else Config(model=name)
    cfg = dataclasses.replace(cfg, device="cpu")
    if is_run(Path(name)) and cfg.lora_rank and not merge:
        policy = trained_weights(cfg, Path(name))
        base = checkpoint_of(Path(name), "cold_start") if cfg.sft_steps else cfg.model
        base = smollm2() if base == "smollm2" else Path(base)
        if base.is_file() or (not cfg.sft_steps and is_run(base)):
            raise UserError(f"{name}: its base {base} is no folder that peft can open; add --merge")
        base = str(base.resolve()) if base.exists() else str(base)  # or a Hub name
        save_adapter(policy, folder, base)
        save_chat(load_chat(checkpoint_of(Path(name))), folder)
    else:
        chat, policy = load_pretrained(name, cfg)
        save_model(policy, folder)
        save_chat(chat, folder)
    print(f"saved to {folder}")


def show_command(name: str, o: ShowOptions) -> None:
    report.show(Path(name), o.episode)


def explain_command(name: str, o: ExplainOptions) -> None:
    explain.explain(Path(name), o.episode)


COMMANDS = {  # of a run or a model: what it may be asked, and what answers
    "eval": (EvalOptions(), eval_command),
    "chat": (ChatOptions(), chat_command),
    "show": (ShowOptions(), show_command),
    "explain": (ExplainOptions(), explain_command),
}
