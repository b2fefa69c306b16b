"""The commands that look at a run or a model: eval, chat, show, save, plan."""

import dataclasses
import math
import random
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

import explain
import model as models
import report
from chat import Chat, UserError
from config import PRESETS, Config, read_config
from domains import shop
from evaluation import Stage, evaluate, make_domain, make_samplers, null_baselines, shares, user_prompt
from rollout import Limits, converse, rollout
from run import checkpoint_of
from user_sim import STOP, Heard, ModelUser
from weights import is_run, load_pretrained, smollm2, start_of_rl, trained_weights


@dataclass(frozen=True)
class EvalOptions:
    """Success of a trained run or of any model on held-out tasks. RUN: a run folder, a model folder, or "smollm2"."""

    split: str = "test"  # val, test, combo (wish combinations never trained on), names (names never trained on)
    n: int = 250  # tasks
    trials: int = 4  # conversations of each task
    user: str = "lm"  # lm: the frozen cold start; scripted; stranger: a script in sentences nobody trained on
    temperature: float = 1.0  # of the agent; 0 is greedy
    seed: int | None = None  # of the tasks; the run's by default
    slots: int | None = None  # conversations at once; the run's by default


@dataclass(frozen=True)
class ChatOptions:
    """You are the user: talk with the trained agent about one task. The wishes are shown; an empty line ends it."""

    split: str = "test"
    task: int | None = None  # which task; any by default
    watch: bool = False  # the run's own simulated user talks in your place, and you look on
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True)
class ExplainOptions:
    """One episode that was trained on: every token's log-probs, ratio, advantage and loss, and the sum by hand."""

    episode: int | None = None  # which one, as numbered by `show`; the last that was trained on by default


@dataclass(frozen=True)
class ShowOptions:
    """Print where a run's report is, its summary, and one conversation in colour."""

    episode: int | None = None  # which one; the last by default


def opened(name: str, seed: int | None) -> tuple[Config, shop.Shop, Chat, models.Decoder, models.Decoder]:
    """A run or model to talk with: config, domain, chat, policy, user."""
    folder = Path(name)
    cfg = (
        read_config(folder)
        if is_run(folder)
        else dataclasses.replace(PRESETS["smol"], prompts=True, max_len=2800, user_max_len=2800, slots=8)
    )
    torch.set_num_threads(cfg.threads)
    if not torch.cuda.is_available():
        cfg = dataclasses.replace(cfg, device="cpu")  # wherever the run was made
    if is_run(folder):
        chat, policy = Chat.load(checkpoint_of(folder)), trained_weights(cfg, folder)
        user = models.Base(policy) if policy.lora else start_of_rl(cfg, folder)
    else:
        chat, policy = load_pretrained(name, cfg)
        user = policy
    return dataclasses.replace(cfg, seed=cfg.seed if seed is None else seed), make_domain(cfg), chat, policy, user


def eval_command(name: str, o: EvalOptions) -> None:
    """Print the null baselines, then success, interval, pass^k, exits and user faults."""
    if o.split not in shop.SPLITS:
        raise UserError(f"--split {o.split}: choose one of {', '.join(shop.SPLITS)}")
    if o.user not in ("lm", "scripted", "stranger"):
        raise UserError(f"--user {o.user}: choose lm, scripted or stranger")
    if not 0 <= o.temperature < math.inf:
        raise UserError(f"--temperature {o.temperature}: give 0 (greedy) or more")
    for flag in ("n", "trials", "slots"):
        if getattr(o, flag) is not None and getattr(o, flag) < 1:
            raise UserError(f"--{flag} {getattr(o, flag)}: give 1 or more")
    cfg, domain, chat, policy, user = opened(name, o.seed)
    for agent, rate in null_baselines(domain, cfg.seed).items():
        print(f"{agent:20} {rate:6.1%}   (scripted agent, no model)")
    cfg = dataclasses.replace(cfg, slots=o.slots or cfg.slots)
    stage = Stage(cfg, domain, chat, make_samplers(cfg, chat, policy, user, o.temperature))
    result, groups = evaluate(stage, o.split, o.n, o.trials, o.user)
    print(
        f"{'success':20} {result['success'] or 0:6.1%}   [{result['lo'] or 0:.1%}, {result['hi'] or 0:.1%}] of {result['n']} conversations"
    )
    for k, value in result["pass_k"].items():
        print(f"pass^{k:15} {value:6.1%}")
    for exit, n in Counter(t.exit for g in groups for t in g).most_common():
        print(f"exit {exit:15} {n / sum(map(len, groups)):6.1%}")
    if "user_fault_rate" in result:
        print(f"{'user faults':20} {result['user_fault_rate']:6.1%}   {shares(result['user_faults'])}")


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
    if o.split not in shop.SPLITS:
        raise UserError(f"--split {o.split}: choose one of {', '.join(shop.SPLITS)}")
    if o.task is not None and o.task < 0:
        raise UserError(f"--task {o.task}: give 0 or more")
    cfg, domain, chat, policy, user = opened(name, o.seed)
    index = random.randrange(250) if o.task is None else o.task
    task = domain.task(o.split, cfg.seed, index)
    whose = "The user's part" if o.watch else "Your part (an empty line ends the talk)"
    print(f"{whose}, --split {o.split} --task {index}:\n{domain.instruction(task)}\n", flush=True)
    heard = ("user", "agent", "call", "tool") if o.watch else ("call", "tool")  # the rest `Human` prints

    def show(who: str, text: str) -> None:
        if who in heard:
            line = report.painted(f"{who}> {text}", "soft" if who in ("call", "tool") else who, sys.stdout)
            print(line, flush=True)

    key, prompt = (cfg.seed, 9, index), user_prompt(domain, task)
    player = ModelUser(chat, prompt, domain.greeting, (*key, 1), cfg.user_max_new) if o.watch else Human()
    talk = converse(task, domain, player, chat, Limits(cfg.max_turns, cfg.max_new, cfg.max_len, 3), (*key, 0), 0, show)
    [t] = rollout([talk], make_samplers(dataclasses.replace(cfg, slots=1), chat, policy, user, o.temperature))
    print(f"exit: {t.exit}; reward: {t.reward}")
    print("\n".join(t.diff) or "the database is as it should be, and all was told")


def save_command(args: list[str]) -> None:
    """Writes what a run has learned, or a pretrained model, as a folder for transformers, peft and vLLM."""
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
        models.save_adapter(policy, folder, base)
        Chat.load(checkpoint_of(Path(name))).save(folder)
    else:
        chat, policy = load_pretrained(name, cfg)
        models.save(policy, folder)
        chat.save(folder)
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
