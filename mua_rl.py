"""MUA-RL: reinforcement learning for an agent that talks with a simulated user and calls tools (arXiv 2508.18669).

The whole job, from nothing to a trained agent, in the order of this file:

    Config → cold start (SFT on demonstrations) → for each step: Task → conversation ×G → Trajectory ×G → Batch → loss
    → evaluation, with the user it trained with and with one it never met

What it leaves out: more than one process or node. The same environment can be handed to a framework for that.

    python mua_rl.py train [--preset tiny|smol] [--seed N] [--steps N] [--minutes M] [--resume RUN]
    python mua_rl.py train --domain retail|airline|telecom --data FOLDER --preset smol|qwen3-4b|…
    python mua_rl.py train --domain FILE.py    a domain of your own: docs/domains.md
    python mua_rl.py sft                       only the cold start
    python mua_rl.py eval RUN_OR_MODEL         success on held-out tasks   [--split test --trials 4 --user lm --out FOLDER]
    python mua_rl.py chat RUN [--watch]        you are the user; or look on while the simulated user talks
    python mua_rl.py show RUN                  where the report is, and one conversation in colour
    python mua_rl.py explain RUN               one episode token by token, from log-probs to the loss, and that by hand
    python mua_rl.py save RUN FOLDER [--merge] trained weights for transformers and vLLM; of a LoRA run an adapter, or merged
    python mua_rl.py plan --preset NAME        what it takes in memory, and which card it fits
Each takes --help.
"""

import errno
import itertools
import json
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__" and sys.argv[1:] in ([], ["-h"], ["--help"]):  # before torch, which takes seconds to load
    print(__doc__)
    sys.exit()

try:
    import torch
except ModuleNotFoundError as error:
    print(
        f"mua_rl: {error}: `make train` installs what is needed into .venv; activate it with `. .venv/bin/activate`",
        file=sys.stderr,
    )
    sys.exit(2)

import commands
import model as models
import plan
import report
from api_user import Api
from chat import CHATML_TEMPLATE, Chat, Role, UserError
from config import DTYPES, Config, check_config, check_resume, default_config, parse, read_config
from domains import find
from evaluation import (
    Stage,
    check_room,
    check_splits,
    endpoint,
    evaluate,
    make_domain,
    make_samplers,
    null_baselines,
    open_api,
    percent,
    told_of_faults,
    user_faults,
)
from grpo import Guard, adamw, advantages, ramp, set_lr, trained_rows, update
from new_model import from_scratch_shape, train_tokenizer, wire_induction
from rollout import Trajectory, sampling_seconds
from run import (
    Clock,
    Progress,
    Run,
    State,
    check_new,
    checkpoint_of,
    load_state,
    lock,
    restore_optimizers,
    save_checkpoint,
    save_state,
    write_whole,
)
from sft import sft_optimizers, sft_rows, sft_step, tokenizer_texts
from tools import Domain, Task
from user_sim import parse_pool
from weights import load_pretrained, load_run, other_users, shape_of, start_of_rl

PROCESS_START = time.time() - time.process_time()  # imports included, more or less


def rollout_metrics(groups: list[list[Trajectory]]) -> dict:
    """What the conversations of one step were like. Definitions: docs/metrics.md."""
    everyone = [t for g in groups for t in g]
    rewards = [t.reward for t in everyone if t.reward is not None]
    agent = [[i for i, r in zip(t.ids, t.roles, strict=True) if r == Role.AGENT] for t in everyone]
    grams = {tuple(a[i : i + 4]) for a in agent for i in range(len(a) - 3)}
    turns = sum(t.metrics["turns"] for t in everyone)
    known = [[t.reward for t in g if t.reward is not None] for g in groups]
    known = [g for g in known if len(g) > 1]  # the others are dropped, and counted
    return {
        "reward": sum(rewards) / max(1, len(rewards)),
        "success": sum(r == 1 for r in rewards) / max(1, len(rewards)),
        "turns": turns / len(everyone),
        "tokens_per_turn": sum(map(len, agent)) / max(1, turns),
        "unique_4grams": len(grams),
        "all_right": sum(all(r == 1 for r in g) for g in known) / max(1, len(known)),
        "all_wrong": sum(all(r == 0 for r in g) for g in known) / max(1, len(known)),
        "dropped_groups": len(groups) - len(known),
        "malformed": sum(t.metrics["malformed"] for t in everyone) / max(1, turns),
        "exits": dict(Counter(t.exit for t in everyone)),
        "tools": dict(sum((Counter(t.metrics["tools"]) for t in everyone), Counter())),
        "tokens": sum(len(t.ids) for t in everyone),
    }


class Stop(Exception):
    """The run ends early and cleanly, with a checkpoint to go on from. The text says why."""


@dataclass
class Job:
    """A run in progress: what the phases of `train` hand on to each other."""

    cfg: Config
    run: Run
    domain: Domain
    chat: Chat
    policy: models.Decoder
    state: State
    clock: Clock
    progress: Progress
    optimizers: list[torch.optim.Optimizer]
    frozen: models.Decoder | None = None  # the cold start: KL reference and the user's weights
    users: dict[str, tuple[models.Decoder, Chat]] = field(default_factory=dict)  # weights of other users, by kind
    api: Api | None = None  # of the user openai:MODEL
    stage: Stage | None = None
    interrupted: bool = False
    before: float = 0.0  # seconds that earlier processes spent on this run
    rollout_seconds: float = 0.0  # of the last rollout
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self):
        self.guard = Guard(self.run.folder / "skipped", self.cfg.max_skipped)

    def wall(self) -> float:
        """Seconds this run has taken, from the start of each process that worked on it."""
        return self.before + time.time() - PROCESS_START

    def save(self, whole: bool = True) -> None:
        """whole: weights and optimizer too; without them only the state, where they have not changed since."""
        self.state.wall = self.wall()
        if self.api:
            self.state.user_tokens, self.state.user_troubles = self.api.tokens, dict(self.api.troubles)
        with self.clock("saving"):
            self.state.seconds = dict(self.clock.seconds)
            if whole:
                save_checkpoint(self.run.folder, self.policy, self.chat, self.optimizers, self.state)
            else:
                save_state(self.run.folder, self.state)

    def steps(self, phase: str, total: int) -> Iterable[int]:
        """The steps of a phase that are still to do, saving as they are done: after every step of RL, and in the cold
        start, whose steps are much shorter, every `save_seconds`. Raises Stop on Ctrl-C and when the time is up.
        """
        saved = time.monotonic()
        while self.state.phase == phase and self.state.step < total:
            yield self.state.step
            self.state.step += 1
            late = self.cfg.minutes and self.wall() > 60 * self.cfg.minutes
            if phase == "rl" or late or self.interrupted or time.monotonic() - saved > self.cfg.save_seconds:
                self.save()
                saved = time.monotonic()
            if late or self.interrupted:
                why = "Ctrl-C" if self.interrupted else f"--minutes {self.cfg.minutes:g} are over"
                raise Stop(f"{why}: stopped after {phase} step {self.state.step} of {total}")

    def result(self, name: str, stage: str, make) -> dict:
        """An evaluation under its name; made once, and taken from the checkpoint by a resumed run."""
        if name not in self.state.results:
            with self.clock("evaluation"):
                self.state.results[name] = make()
            row = {k: v for k, v in self.state.results[name].items() if k != "step"}
            at = {"cold_start": 0, "during": self.state.step + 1}.get(stage, self.state.step)
            self.run.log("eval", at, stage=stage, name=name, **row)
            if stage == "final":
                self.save(whole=False)  # a kill in the next one does not take it along
            if self.interrupted and stage != "during":  # there the step that is done isn't counted yet: `steps` stops
                self.save()
                raise Stop("Ctrl-C: stopped after an evaluation")
        return self.state.results[name]


def prepare(cfg: Config) -> Job:
    """Everything before the first step, new or resumed."""
    check_config(cfg)
    torch.set_num_threads(cfg.threads)
    given = cfg.resume or cfg.run
    folder = Path(given) if given else next(f for f in names(cfg) if not f.exists())
    domain, clock = make_domain(cfg), Clock()
    check_splits(cfg, domain)
    place = endpoint(cfg)  # what is wrong with it is found before anything is written
    with clock("setup"):
        locked = None
        if cfg.resume:
            locked = lock(folder)
            chat, policy, state, tensors = load_run(cfg, folder)
            if state.step < cfg.steps:  # goes on: what was measured at its end no longer holds
                state.results = {
                    k: v for k, v in state.results.items() if k.startswith(("null", "cold_start", "step_"))
                }
        else:
            check_new(folder)
            (chat, policy), state = start_model(cfg, domain), State()
        check_room(cfg, domain, chat, policy.cfg.max_position_embeddings)
        chat.check(domain.tools, domain.system)
        plan.check(cfg, policy.cfg)
        memory = plan.summary(cfg, policy.cfg)
        users = other_users(parse_pool(cfg.user), cfg, chat, policy)
        api = open_api(place, state.user_tokens, state.user_troubles)
        run = Run(folder, cfg, locked)
        run.forget_after(state)  # a new run's, too: a kill during set-up left a line, and nothing to resume
        clock.seconds.update(state.seconds)
        job = Job(cfg, run, domain, chat, policy, state, clock, Progress(), [], users=users, api=api)
        job.before, job.policy.checkpointing = state.wall, cfg.checkpointing
        if not cfg.resume and not cfg.sft_steps:
            start_rl(job)
        else:
            job.optimizers = optimizers_for(job)
        if cfg.resume:
            restore_optimizers(job.optimizers, tensors, folder)
        job.result("null", "cold_start", lambda: null_baselines(domain, cfg.seed))
    job.progress.say(
        f"run folder {run.folder}; null baselines "
        + ", ".join(f"{k} {v:.0%}" for k, v in state.results["null"].items())
    )
    for line in (*notices(job), memory):
        job.progress.say(line)
    catch_ctrl_c(job)
    if not cfg.resume:
        job.save()  # from here on there is something to resume
    return job


def notices(job: Job) -> Iterable[str]:
    """What a person should know before the run goes on."""
    cfg, load = job.cfg, os.getloadavg()[0]
    for folder in () if cfg.run or cfg.resume else itertools.takewhile(lambda f: f != job.run.folder, names(cfg)):
        if halfway(folder):
            yield f"this is a new run; {folder} is not finished: to go on with it, stop this one, and {resume_hint(folder)}"
    if cfg.threads > 1 and load > (os.cpu_count() or 1):
        yield f"this machine is busy (load {load:.0f} on {os.cpu_count()} cores): --threads 1 may well be faster"
    if job.state.results["null"].get("do_nothing", 0) > 0.1:
        yield "warning: doing nothing pays in more than 10 % of the tasks"
    yield from job.domain.notices()


def start_model(cfg: Config, domain: Domain) -> tuple[Chat, models.Decoder]:
    """A pretrained model with its chat format, or a new tokenizer and random weights."""
    if cfg.model:
        return load_pretrained(cfg.model, cfg)
    chat = Chat(train_tokenizer(tokenizer_texts(domain, cfg.seed)), CHATML_TEMPLATE)
    shape = from_scratch_shape(cfg, chat.vocab_size)
    plan.check(cfg, shape, ("weights",))  # a loaded model's are there already when the rest is checked
    torch.manual_seed(cfg.seed)
    policy = models.Decoder(shape)
    if cfg.induction:
        wire_induction(policy, cfg.seed)
    return chat, policy.to(cfg.device, DTYPES[cfg.dtype])


def catch_ctrl_c(job: Job) -> None:
    """The first Ctrl-C lets the step in progress finish and saves; a second one stops at once."""

    def handler(signum, frame):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        job.interrupted = True
        job.progress.say("Ctrl-C: finishing this step; press again to stop at once")

    signal.signal(signal.SIGINT, handler)


def names(cfg: Config) -> Iterable[Path]:
    """The folders of runs that were given none, in the order in which they are taken."""
    base = f"runs/{cfg.preset}-seed{cfg.seed}"
    return itertools.chain([Path(base)], (Path(f"{base}-{i}") for i in itertools.count(2)))


def halfway(folder: Path) -> bool:
    """Whether a run can be resumed, and has steps left."""
    try:
        state = load_state(checkpoint_of(folder))
        return state.phase == "sft" or state.step < read_config(folder).steps
    except UserError:
        return False


def resume_hint(folder: Path, command: str = "train") -> str:
    """The command that goes on with a run, for a shell in which `.venv` need not be active."""
    here = Path.cwd()
    python, script = (
        p.relative_to(here) if p.is_relative_to(here) else p for p in map(Path, (sys.executable, __file__))
    )
    return f"run: {python} {script} {command} --resume {folder}"


def optimizers_for(job: Job) -> list[torch.optim.Optimizer]:
    """Muon and AdamW for the cold start, AdamW for reinforcement learning."""
    if job.state.phase == "sft":
        return sft_optimizers(job.policy, job.cfg)
    return [adamw([p for p in job.policy.parameters() if p.requires_grad], rl_lr(job.cfg), job.cfg.optimizer)]


def rl_lr(cfg: Config) -> float:
    """Adapters want about ten times the learning rate of full training (Schulman et al. 2025, "LoRA Without Regret")."""
    return cfg.lr * (10 if cfg.lora_rank else 1)


def cold_start(job: Job) -> None:
    """SFT on fresh demonstrations of a careless agent and a faultless user, both sides in one set of weights."""
    cfg, state = job.cfg, job.state
    for step in job.steps("sft", cfg.sft_steps):
        with job.clock("demonstrations"):
            rows = sft_rows(job.domain, job.chat, cfg, step)
        with job.clock("cold start"):
            began = time.monotonic()
            values = sft_step(job.policy, job.optimizers, rows, cfg, step, job.guard)
        state.trained_tokens += values["tokens"]
        values["train_tok_s"] = values.pop("all_tokens") / (time.monotonic() - began)
        job.run.log("sft", step, seconds=time.monotonic() - job.began, **values)
        job.progress.step("cold start", step + 1, cfg.sft_steps, loss=values["loss"], tok_s=values["train_tok_s"])
    if state.phase == "sft":
        save_checkpoint(job.run.folder, job.policy, job.chat, [], state, "cold_start")
        start_rl(job)


def start_rl(job: Job) -> None:
    """From the cold start, or the pretrained weights, to reinforcement learning: adapters if asked for, a new optimizer."""
    job.state.phase, job.state.step = "rl", 0
    for p in job.policy.parameters():
        if hasattr(p, "collector"):  # the cold start's masters go with its optimizer
            p.collector.remove()
            del p.collector
    if job.cfg.lora_rank:
        models.add_lora(job.policy, job.cfg.lora_rank, seed=job.cfg.seed)
    job.optimizers = optimizers_for(job)


def freeze_reference_and_user(job: Job) -> None:
    """A frozen copy of the cold start is the KL reference, and plays the user. Measures both before RL begins."""
    cfg = job.cfg
    with job.clock("setup"):
        plays = "lm" in plan.voices(cfg)
        if cfg.lora_rank:
            job.frozen = models.Base(job.policy)  # the same weights, adapters off
        elif cfg.kl or plays:
            job.frozen = start_of_rl(cfg, job.run.folder).requires_grad_(False)
        samplers = make_samplers(cfg, job.chat, job.policy, job.frozen if plays else None, users=job.users)
        chats = {kind: chat for kind, (_, chat) in job.users.items()}
        job.stage = Stage(cfg, job.domain, job.chat, samplers, job.api, chats)
    if cfg.test_tasks:
        measure(job, "cold_start", "test", main_user(job), 1)
        if "scripted" in job.domain.scripts:
            measure(job, "cold_start_scripted", "test", "scripted", 1)
    if job.state.step == 0:
        job.save()


def main_user(job: Job) -> str:
    """Whom evaluations meet: "lm", whatever it trains with, if there are demonstrations for its part; else cfg.user."""
    return "lm" if job.domain.demonstrator else job.cfg.user


def measure(job: Job, name: str, split: str, user: str, trials: int, n: int = 0) -> dict:
    """Evaluate, log, say it in a line, and keep a few conversations."""

    def make() -> dict:
        result, groups = evaluate(job.stage, split, n or job.cfg.test_tasks, trials, user)
        tasks = [job.domain.task(split, job.cfg.seed, i) for i in range(min(25, len(groups)))]
        where = {"phase": "eval", "step": 0, "stage": "cold_start" if name.startswith("cold_start") else "final"}
        who = user if job.stage.samplers["agent"].temperature else f"{user}, greedy"
        job.run.episodes(job.domain, job.chat, groups[: len(tasks)], tasks, who, advantages, name=name, **where)
        return result | {"user": who}

    r = job.result(name, "cold_start" if name.startswith("cold_start") else "final", make)
    found = f"{percent(r['success'])} [{percent(r['lo'])}, {percent(r['hi'])}] of {r['n']}"
    job.progress.say("; ".join(filter(None, (f"{name}: {split}, {user} user: success {found}", told_of_faults(r)))))
    return r


def collect(job: Job, step: int) -> tuple[list[list[Trajectory]], list[Task]]:
    """One rollout: G conversations of each of the step's tasks, with users of the pool `user`. For groups that teach
    nothing, up to `refill` further tasks are played (Dynamic Sampling: DAPO, 2503.14476 §3.2); a resumed run plays the
    same ones.
    """
    cfg = job.cfg
    first = 1_000_000 + step * cfg.tasks  # beyond the demonstrations' tasks
    tasks = [job.domain.task("train", cfg.seed, first + i) for i in range(cfg.tasks)]
    for sampler in job.stage.samplers.values():
        sampler.weights_changed()  # the user's too: a resumed run must not differ by what an earlier step left in the cache
    began = time.monotonic()
    sampling_seconds(job.stage.samplers)  # what evaluations took is theirs
    with job.clock("rollout"):
        groups = job.stage.play(tasks, cfg.group_size, cfg.user, "rl", step)
        spare = iter(range(step * cfg.refill, (step + 1) * cfg.refill))
        while missing := cfg.tasks - sum(bool(trained_rows(g, cfg)) for g in groups):
            fresh = [job.domain.task("train", cfg.seed, 1_000_000_000 + i) for i in itertools.islice(spare, missing)]
            if not fresh:
                break
            groups += job.stage.play(fresh, cfg.group_size, cfg.user, "rl", step, first=len(tasks))
            tasks += fresh
    job.rollout_seconds = time.monotonic() - began
    job.clock.split("rollout", sampling_seconds(job.stage.samplers))
    return groups, tasks


def learn(job: Job, step: int, groups: list[list[Trajectory]], tasks: list[Task]) -> None:
    """Groups → advantages → loss → step, and what is logged about it."""
    cfg, clock, before = job.cfg, job.clock, Counter(job.clock.seconds)
    set_lr(job.optimizers[0], rl_lr(cfg) * ramp(step, cfg.steps, cfg.warmup, cfg.cooldown, 0.1))
    rows = [pair for group in groups for pair in trained_rows(group, cfg)]
    values = {"trained_tokens": 0}
    if rows:
        values = update(job.policy, job.frozen, job.optimizers[0], rows, cfg, step, clock, job.guard)
    metrics = rollout_metrics(groups) | {"refilled_groups": len(groups) - cfg.tasks}
    spent = Counter(clock.seconds) - before
    sampled = sum(len(t.ids) + len(t.user_ids) for g in groups for t in g)
    job.state.sampled_tokens += sum(t.metrics["agent_tokens"] for g in groups for t in g)
    job.state.trained_tokens += values["trained_tokens"]
    metrics |= values | {
        "user_fault": user_faults(job.domain, tasks, groups).get("user_fault_rate", 0.0),
        "sample_tok_s": sampled / max(1e-9, job.rollout_seconds),
        "train_tok_s": sum(len(t.ids) for t, _ in rows) / max(1e-9, spent["training"] + spent["reference"]),
        "rss_mb": peak_mb(),
        "seconds": time.monotonic() - job.began,
    }
    job.run.log("rl", step, **metrics)
    if step % 5 == 0 or step == cfg.steps - 1:
        A = lambda rewards: advantages(rewards, cfg.advantage)
        job.run.episodes(job.domain, job.chat, groups[:4], tasks[:4], cfg.user, A, phase="rl", step=step, stage="train")
    shown = {
        k: metrics.get(k) for k in ("success", "reward", "kl", "entropy", "gap_max", "sample_tok_s", "train_tok_s")
    }
    job.progress.step("GRPO", step + 1, cfg.steps, **{k: v for k, v in shown.items() if v is not None})


def look(job: Job, step: int) -> None:
    """A small evaluation on the way, on the validation split."""

    def make() -> dict:
        return evaluate(job.stage, "val", job.cfg.eval_tasks, 1, job.cfg.user, step)[0]

    r = job.result(f"step_{step}", "during", make)
    found = f"{percent(r['success'])} [{percent(r['lo'])}, {percent(r['hi'])}]"
    job.progress.say("; ".join(filter(None, (f"step {step}: validation success {found}", told_of_faults(r)))))


def final_evaluation(job: Job) -> None:
    """Held-out tasks: the user it trained with, users it never met, combinations and names it never met, and greedy."""
    cfg, domain = job.cfg, job.domain
    if not cfg.test_tasks:
        return
    measure(job, "final", "test", main_user(job), cfg.trials)
    if "scripted" in domain.scripts:
        measure(job, "scripted_user", "test", "scripted", 1)
    if "stranger" in domain.scripts:
        measure(job, "unseen_user", "test", "stranger", 1)
    for name, (split, most) in domain.unseen.items():
        measure(job, name, split, main_user(job), 1, n=min(most, cfg.test_tasks))
    job.stage.samplers["agent"].temperature = 0.0  # the last things measured
    measure(job, "greedy", "test", main_user(job), 1)
    if "stranger" in domain.scripts:
        measure(job, "greedy_unseen_user", "test", "stranger", 1)


def finish(job: Job, stopped: bool = False) -> dict:
    """Save, and leave the summary, the curves and the page of conversations."""
    state, cfg = job.state, job.cfg
    job.save()
    wall = job.wall()
    seconds = job.clock.shares(wall)
    rl = [r for r in report.read_metrics(job.run.folder / "metrics.jsonl") if r.get("phase") == "rl"]
    results = dict(state.results)
    null = results.pop("null")
    summary = {
        "preset": cfg.preset, "seed": cfg.seed, "wall_s": round(wall, 1), "peak_rss_mb": peak_mb(),
        "null": {k: v for k, v in null.items() if k != "careless"}, **{k: v for k, v in null.items() if k == "careless"}, **results,
        "user_fault_rate": results.get("cold_start", {}).get("user_fault_rate"),
        "sampled_tokens": state.sampled_tokens, "trained_tokens": state.trained_tokens,
        "sample_tok_s": mean(r.get("sample_tok_s") for r in rl), "train_tok_s": mean(r.get("train_tok_s") for r in rl),
        "seconds_by_phase": {k: round(v, 1) for k, v in seconds.items()}, "torch": torch.__version__, "threads": cfg.threads,
    }  # fmt: skip
    write_whole(job.run.folder / "summary.json", json.dumps(summary, indent=1))
    report.curves(job.run.folder)
    report.html(job.run.folder)
    job.progress.say("time: " + ", ".join(f"{k} {v / wall:.0%}" for k, v in seconds.items() if v > 0.005 * wall))
    ended = "stopped after" if stopped else "done in"
    job.progress.say(f"{ended} {summary['wall_s'] / 60:.1f} minutes; look at {job.run.folder / 'report.html'}")
    return summary


def mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def peak_mb() -> int:
    """Peak resident memory of this process, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 * 1024 if sys.platform == "darwin" else 1024)


def train(cfg: Config, stop_after: str = "rl") -> dict:
    """The main job, as in the paper: a cold start, then reinforcement learning with a user in the loop."""
    job, stopped = prepare(cfg), False
    with job.progress:
        try:
            cold_start(job)
            if stop_after == "rl":
                freeze_reference_and_user(job)
                for step in job.steps("rl", cfg.steps):
                    groups, tasks = collect(job, step)
                    learn(job, step, groups, tasks)
                    if cfg.eval_every and cfg.eval_tasks and (step + 1) % cfg.eval_every == 0 and step + 1 < cfg.steps:
                        look(job, step + 1)
                final_evaluation(job)
        except Stop as stop:
            stopped = True
            job.progress.say(
                f"{stop}; to go on, {resume_hint(job.run.folder, 'train' if stop_after == 'rl' else 'sft')}"
            )
        finally:
            if job.api:
                job.api.close()
        return finish(job, stopped)


def main(argv: list[str]) -> None:
    command, *args = argv
    if command in ("train", "sft"):
        default = default_config(args)
        cfg = parse(default, args, command, train.__doc__ if command == "train" else cold_start.__doc__)
        if command == "sft" and not find(cfg.domain).demonstrator:
            raise UserError(f"sft --domain {cfg.domain}: it has no demonstrations to learn from; use train")
        if cfg.resume:
            check_resume(default, cfg)
        train(cfg, stop_after="rl" if command == "train" else "sft")
    elif command == "plan":
        cfg = parse(default_config(args), args, command, plan.table.__doc__)
        print(plan.table(cfg, shape_of(cfg)))
    elif command == "save":
        commands.save_command(args)
    elif command in commands.COMMANDS:
        options, run = commands.COMMANDS[command]
        if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
            raise UserError(f"{command} needs a run first: python mua_rl.py {command} runs/tiny-seed0")
        help_only = args[0] in ("-h", "--help")
        run(args[0], parse(options, args if help_only else args[1:], f"{command} RUN"))
    else:
        raise UserError(f"{command}: no such command; choose train, sft, eval, chat, show, explain, save or plan")


FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO  # of the disk: no file or folder is named then


def command_line(argv: list[str]) -> None:
    """`main`, with the user's mistakes as one line and exit 2."""
    try:
        main(argv)
    except UserError as error:
        print(f"mua_rl: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # `show RUN | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return
        if error.filename is None and error.errno not in FULL:  # no file or folder is at fault
            raise
        print(
            f"mua_rl: {error.filename or 'the run folder'}: {error.strerror}; make room or fix the folder, then use --resume",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    command_line(sys.argv[1:])
