"""kill -9 at fifty moments, mid-write among them: no training but the step in progress is lost, and the run ends with the same bits.

`pytest -m slow tests/test_kills.py`, some four minutes. Each child is forked from one process that has all modules loaded.
"""

import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from test_run import SMALL, quicken, rows, same_run

import mua_rl
import run as runs

KILLS, BETWEEN = 50, 2  # every run is killed twice, then left alone
WRITES = "sync remove write_whole write_tensors"  # of run.py: each is a moment at which files are half there

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")]


def forked(args: list[str], log: Path, die_at_write: int | None = None, die_after: float | None = None):
    """Train in a child. It kills itself before its n-th write, or is killed after some seconds. Returns (writes begun or
    None, seconds, whether it was killed)."""
    read, write = os.pipe()
    began, child = time.monotonic(), os.fork()
    if child == 0:
        os.close(read)
        with open(log, "a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        begun = 0

        def counted(do):
            def call(*args, **kwargs):
                nonlocal begun
                begun += 1
                if begun == die_at_write:
                    os.kill(os.getpid(), signal.SIGKILL)
                return do(*args, **kwargs)

            return call

        for name in WRITES.split():
            setattr(runs, name, counted(getattr(runs, name)))
        quicken(setattr)
        mua_rl.PROCESS_START = time.time()
        code = 1
        try:
            mua_rl.command_line(args)
            os.write(write, str(begun).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    if die_after is not None:
        time.sleep(die_after)
        os.kill(child, signal.SIGKILL)  # at worst of a child that is done, and not yet waited for
    _, status = os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        begun = pipe.read()
    killed = os.WIFSIGNALED(status)
    assert killed or os.waitstatus_to_exitcode(status) == 0, log.read_text()[-2000:]
    return int(begun) if begun else None, time.monotonic() - began, killed


def onward(folder: Path) -> list[str]:
    """Resume where there is something to resume; a run that was killed before that begins anew in the same folder."""
    return ["train", "--resume", str(folder)] if reached(folder) else ["train", *SMALL, "--run", str(folder)]


def reached(folder: Path) -> tuple[str, int] | None:
    """Phase and finished steps of what a resumed run goes on from."""
    try:
        state = runs.load_state(runs.checkpoint_of(folder))
    except runs.UserError:
        return None
    return state.phase, state.step


def lost(folder: Path) -> int:
    """Steps that were logged and would have to be made again."""
    order = {"sft": 0, "rl": 1, "done": 2}
    logged = [r for r in rows(folder) if r["phase"] != "eval"] if (folder / "metrics.jsonl").exists() else []
    held = reached(folder) or ("sft", 0)
    return sum((order[r["phase"]], r["step"]) >= (order[held[0]], held[1]) for r in logged)


def test_fifty_kills_lose_at_most_the_step_in_progress(tmp_path):
    assert torch.get_num_threads() == 1, "forked children need OMP_NUM_THREADS=1"
    log, rng, whole = tmp_path / "log", random.Random(0), tmp_path / "whole"
    writes, seconds, _ = forked(onward(whole), log)
    moments = []
    for i in itertools.count():  # a child may be done before its moment: that is none of the fifty
        if sum(killed for killed, *_ in moments) >= KILLS:
            break
        folder = tmp_path / str(i)
        for kill in range(BETWEEN):
            args = onward(folder)
            if (i + kill) % 2:
                how = {"die_at_write": rng.randrange(1, writes // (1 + kill))}
            else:
                how = {"die_after": rng.uniform(0, 0.95 * seconds / (1 + kill))}
            _, _, killed = forked(args, log, **how)
            moments.append((killed, reached(folder), *how.items()))
            assert lost(folder) <= 1, moments[-1]
        forked(onward(folder), log)
        same_run(whole, folder)
    for moment in moments:
        print(*moment, file=sys.stderr)
    assert len(moments) < 2 * KILLS and len({m[1] for m in moments}) >= 6
