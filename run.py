"""The run folder: checkpoints that survive a kill, metrics and episodes that a resumed run continues, a clock, a live bar.

Nothing here knows what is trained. Weights and optimizer state are safetensors, the rest is JSON; nothing is unpickled.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

import report
from chat import Chat, UserError, parse_json
from model_files import replace_file, save_adapter, save_chat, save_model, sync, write_tensors


class Clock:
    """Seconds by phase: `with clock("training"): …`. Time inside an inner phase is not counted twice."""

    def __init__(self):
        self.seconds: Counter[str] = Counter()
        self.stack: list[str] = []
        self.since = time.monotonic()

    def _lap(self) -> None:
        now = time.monotonic()
        if self.stack:
            self.seconds[self.stack[-1]] += now - self.since
        self.since = now

    @contextlib.contextmanager
    def __call__(self, phase: str):
        self._lap()
        self.stack.append(phase)
        try:
            yield
        finally:
            self._lap()
            self.stack.pop()

    def split(self, phase: str, parts: dict[str, float]) -> None:
        """Seconds of a finished phase that were measured elsewhere get names of their own."""
        for name, seconds in parts.items():
            self.seconds[name] += seconds
            self.seconds[phase] -= seconds

    def shares(self, wall: float) -> dict[str, float]:
        """Seconds by phase, the longest first, and what is left of `wall` as "other": they add up to it."""
        return dict(self.seconds.most_common()) | {"other": max(0.0, wall - sum(self.seconds.values()))}


@dataclass
class State:
    """How far a run is: what, with the weights and the optimizer, a resumed run goes on from."""

    phase: str = "sft"  # the phase that `step` counts in: sft, rl, done
    step: int = 0  # finished steps of that phase
    sampled_tokens: int = 0
    trained_tokens: int = 0
    wall: float = 0.0  # seconds of all processes that worked on the run
    seconds: dict[str, float] = field(default_factory=dict)
    results: dict = field(default_factory=dict)  # evaluations and baselines so far
    user_tokens: int = 0  # that the user behind an API has used, of --user-budget
    user_troubles: dict[str, int] = field(default_factory=dict)  # its attempts without an answer, by reason


def optimizer_tensors(optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Optimizer state as named tensors "optimizer.parameter.name"."""
    out = {}
    for i, optimizer in enumerate(optimizers):
        for p, values in optimizer.state_dict()["state"].items():
            for k, v in values.items():
                if hasattr(v, "__tensor_flatten__"):  # a quantised moment: codes and scales, which safetensors can hold
                    out |= {f"{i}.{p}.{k}.{part}": getattr(v, part) for part in v.__tensor_flatten__()[0]}
                elif v is not None:
                    out[f"{i}.{p}.{k}"] = torch.as_tensor(v).contiguous()
        for p, parameter in enumerate(_parameters(optimizer)):
            if hasattr(parameter, "follower"):  # an fp32 master: the checkpoint's own weights are rounded
                out[f"{i}.{p}.master"] = parameter.detach()
    return out


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def restore_optimizers(optimizers: list[torch.optim.Optimizer], tensors: dict[str, Tensor], run: Path) -> None:
    """The reverse of `optimizer_tensors`. Raises UserError if the tensors are another model's, or not all there."""
    states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
    for key, value in tensors.items():
        if not (found := re.fullmatch(r"(\d+)\.(\d+)\.(.+)", key)):
            raise UserError(f"{run}: the optimizer state holds {key!r}, which is no part of one; start a new run")
        if (i := int(found[1])) < len(states):
            states[i].setdefault(int(found[2]), {})[found[3]] = value
    misfit = UserError(f"{run}: the optimizer state does not fit the model; start a new run")
    for optimizer, state in zip(optimizers, states, strict=True):
        parameters = _parameters(optimizer)
        for p, values in state.items():
            if p >= len(parameters):
                raise misfit
            for k, like in optimizer.state[parameters[p]].items():
                if hasattr(like, "__tensor_flatten__"):
                    parts, how = like.__tensor_flatten__()
                    found = {part: values.pop(f"{k}.{part}", None) for part in parts}
                    if any(v is None or v.shape != getattr(like, part).shape for part, v in found.items()):
                        raise misfit
                    values[k] = like.__tensor_unflatten__(found, how)
            if any(v.dim() and v.shape != parameters[p].shape for v in values.values()):
                raise misfit
        for p, parameter in enumerate(parameters):
            if hasattr(parameter, "follower") != ("master" in state.get(p, {})):
                raise UserError(f"{run}: the optimizer state has not the right fp32 masters; start a new run")
            if hasattr(parameter, "follower"):
                parameter.data.copy_(state[p].pop("master"))
        if len({frozenset(state.get(p, {})) for p in range(len(parameters))}) > 1:  # a step is of all of them
            raise UserError(f"{run}: the optimizer state is not there for all parameters; start a new run")
        optimizer.load_state_dict(optimizer.state_dict() | {"state": {p: v for p, v in state.items() if v}})


def save_checkpoint(run: Path, policy, chat: Chat, optimizers: list, state: State, name: str = "checkpoint") -> None:
    """Write run/NAME whole beside the old one, sync it, and only then put it in the old one's place."""
    new, old, target = run / f"{name}.new", run / f"{name}.old", run / name
    remove(new)
    new.mkdir()
    if policy.lora:
        save_adapter(policy, new, "the run's cold_start folder, or its --model")
    else:
        save_model(policy, new)
    save_chat(chat, new)
    write_tensors(new, "optimizer.safetensors", optimizer_tensors(optimizers), "state.json", dataclasses.asdict(state))
    for path in [*new.iterdir(), new]:
        sync(path)
    if target.exists():
        remove(old)
        target.rename(old)
    new.rename(target)
    sync(run)
    remove(old)


def save_state(run: Path, state: State) -> None:
    """Renew the checkpoint's state, where its weights and optimizer are still the run's."""
    write_whole(checkpoint_of(run) / "state.json", json.dumps(dataclasses.asdict(state), indent=1))


def write_whole(path: Path, text: str) -> None:
    """Write a file beside the old one and put it in its place: a kill leaves one or the other."""
    replace_file(path, lambda beside: beside.write_text(text))


def remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def checkpoint_of(run: Path, name: str = "checkpoint") -> Path:
    """The newest whole checkpoint: a kill between the two renames of `save_checkpoint` leaves it under `.old`."""
    for folder in (run / name, run / f"{name}.old"):
        if (folder / "state.json").exists():
            return folder
    raise UserError(
        f"{run} holds no whole {name}: give a run's folder that has made its first, such as runs/tiny-seed0"
    )


def begun(run: Path) -> bool:
    """Whether a folder holds a run that has come further than its set-up."""
    metrics = run / "metrics.jsonl"
    if any((run / name).exists() for name in ("checkpoint", "checkpoint.old", "cold_start")):
        return True
    return metrics.exists() and any(row["phase"] != "eval" for row in report.read_metrics(metrics, needed=True))


def from_json(kind: type, path: Path):
    """A dataclass whose fields all have defaults, from a JSON file. Raises OSError, and ValueError or TypeError for what is
    no such record: a field of another type than its default's, too."""
    record, like = kind(**parse_json(path.read_text(encoding="utf-8"))), kind()
    for f in dataclasses.fields(kind):
        value, default = getattr(record, f.name), getattr(like, f.name)
        if type(value) is not type(default) and not (isinstance(default, float) and type(value) is int):
            raise TypeError(f"{f.name} is {str(value)[:40]!r}, which is no {type(default).__name__}")
    return record


def load_state(folder: Path) -> State:
    try:
        state = from_json(State, folder / "state.json")
        if state.phase not in ("sft", "rl", "done") or state.step < 0:
            raise ValueError(f"no phase {state.phase!r} has a step {state.step}")
        if not all(isinstance(v, int | float) for v in [*state.seconds.values(), *state.user_troubles.values()]):
            raise TypeError("seconds and user_troubles hold numbers")
        if not all(isinstance(v, dict) for v in state.results.values()):
            raise TypeError("results hold an object for each evaluation")
        return state
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder / 'state.json'} is damaged ({error}); start a new run") from None


def lock(folder: Path) -> IO:
    """Keeps other processes from writing in a folder while what is returned is open. The kernel takes it back from a process
    that dies. Raises UserError if another has it, and OSError."""
    file = open(folder / "lock", "a+")  # noqa: SIM115 (open as long as the process works)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise UserError(
            f"{folder}: process {file.read().strip() or '?'} is working in it; wait for it, end it, or name another folder"
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def check_new(folder: Path) -> None:
    """Raises UserError if a folder holds a run already."""
    if begun(folder):
        raise UserError(f"--run {folder} already holds a run: go on with --resume {folder}, or name another")


class Run:
    """A run's folder: appends metrics and episodes, and cuts off what a resumed run will write again. locked: by whom has
    read it before."""

    def __init__(self, folder: Path, cfg, locked: IO | None = None):
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.lock = locked or lock(folder)
            if not locked:
                check_new(folder)  # again: another process may have begun and ended a run there meanwhile
            write_whole(folder / "config.json", json.dumps(dataclasses.asdict(cfg), indent=1))
        except OSError as error:
            raise UserError(f"--run {folder}: {error.strerror}; give a folder that can be written to") from None

    def log(self, phase: str, step: int, **values) -> None:
        with open(self.folder / "metrics.jsonl", "a") as file:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            file.write(json.dumps({"phase": phase, "step": step} | finite) + "\n")  # JSON has no NaN
            file.flush()

    def forget_after(self, state: State) -> None:
        """Drop the metrics and episodes of steps that a checkpoint does not hold."""

        def kept(row: dict) -> bool:
            if row["phase"] == "eval":
                return row.get("name") in state.results
            earlier = row["phase"] == "sft" and state.phase == "rl"
            return earlier or (row["phase"] == state.phase and row["step"] < state.step)

        metrics, episodes = self.folder / "metrics.jsonl", self.folder / "episodes.jsonl.gz"
        if metrics.exists():
            rows = [r for r in report.read_metrics(metrics, needed=True) if kept(r)]
            write_whole(metrics, "".join(json.dumps(r) + "\n" for r in rows))
        if episodes.exists():
            rows = [e for e in report.read_episodes(episodes, needed=True) if kept(e)]
            part = episodes.with_suffix(".part")
            part.unlink(missing_ok=True)
            report.append_episodes(part, rows)
            os.replace(part, episodes)

    def episodes(self, domain, chat: Chat, groups: list[list], tasks: list, user: str, advantages, **where) -> None:
        """Append groups of conversations to episodes.jsonl.gz, with their tokens, to be looked at. advantages: a function."""
        rows = []
        for task, group in zip(tasks, groups, strict=True):
            for t, A in zip(group, advantages([t.reward for t in group]), strict=True):
                rows.append(where | episode(domain, chat, task, t, user) | {"advantage": A})
        report.append_episodes(self.folder / "episodes.jsonl.gz", rows)


def episode(domain, chat: Chat, task, t, user: str) -> dict:
    """A conversation as it is kept, with its tokens, to be looked at."""
    return (
        {"task": t.task, "kind": t.kind, "split": t.split, "member": t.member, "user": user}
        | {"reward": t.reward, "exit": t.exit, "diff": list(t.diff), "turns": list(t.turns)}
        | {"instruction": domain.instruction(task), "tokens": [chat.decode([i]) for i in t.ids]}
        | {"roles": list(t.roles), "logprobs": [None if math.isnan(p) else round(p, 6) for p in t.logprobs]}
        | {"ids": t.ids, "states": t.states}  # for `explain`: a token's text need not tell which it was
    )


class Progress:
    """A live bar on a terminal, plain lines elsewhere (every 20 seconds or at a phase's end)."""

    def __init__(self):
        from rich.console import Console  # here: only what runs for long shows progress

        self.console = Console(stderr=True)
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.bar = self.task = None
        self.phase, self.began, self.first, self.printed = "", 0.0, 0, 0.0

    def __enter__(self):
        if self.live:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                "{task.description}",
                BarColumn(20),
                "{task.completed}/{task.total}",
                TextColumn("{task.fields[note]}"),
            )
            self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console)
            self.bar.start()
        return self

    def __exit__(self, *_):
        if self.bar:
            self.bar.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def step(self, phase: str, done: int, total: int, **values: float) -> None:
        """One more step of a phase is done."""
        now = time.monotonic()
        if phase != self.phase:
            self.phase, self.began, self.first = phase, now, done
            if self.bar:
                self.task = self.bar.add_task(phase, total=total, note="")
        note = " ".join(f"{k} {v:,.0f}" if abs(v) >= 100 else f"{k} {v:.3g}" for k, v in values.items())
        if self.bar:
            self.bar.update(self.task, completed=done, note=note)
        elif now - self.printed > 20 or done == total:
            self.printed = now
            minutes = (now - self.began) / max(1, done - self.first) * (total - done) / 60
            left = f", about {minutes:.1f} minutes left" if done > self.first else ""
            self.say(f"{phase} {done}/{total} {note}{left}")
