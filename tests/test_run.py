"""Whole runs from the command line: artefacts, resuming bit for bit after a kill, bad input, and a run that learns."""

import contextlib
import functools
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import commands
import config
import evaluation
import grpo
import mua_rl
import report
import run as runs
import sft
import weights
from domains import shop
from evaluation import null_baselines
from model_files import load_model
from new_model import train_tokenizer

ROOT = Path(__file__).parents[1]
SMALL = (
    "--threads 1 --save-seconds 0 --layers 2 --width 32 --heads 2 --kv-heads 1 --mlp 32 --sft-steps 4 --sft-talks 2 --steps 4 --tasks 2 "
    "--group-size 3 --max-turns 3 --max-new 12 --user-max-new 12 --slots 6 --eval-every 2 --eval-tasks 2 --test-tasks 3 "
    "--trials 2 --kl 0.1 --user scripted --overlong train"
).split()
DRIVER = f"""
import sys
sys.path[:0] = {[str(ROOT), str(ROOT / "tests")]!r}
import mua_rl, test_run
test_run.quicken(setattr)
mua_rl.command_line(sys.argv[1:])
"""


@functools.cache
def small_tokenizer():
    return train_tokenizer(sft.tokenizer_texts(shop.Shop(), 0, n=300))


def quicken(put):
    """What makes these runs quick, and each of their steps one that moves the weights. put: setattr, or a monkeypatch's."""
    put(mua_rl, "train_tokenizer", lambda texts: small_tokenizer())
    put(mua_rl, "null_baselines", functools.partial(null_baselines, n=50))
    put(report, "curves", lambda run: None)  # two seconds of drawing
    # A policy that knows nothing never earns a reward, and without rewards nothing is learned: each member of a group gets an
    # advantage of its own.
    put(grpo, "advantages", lambda rewards, *_: [(-1.0) ** i * (1 + i / 10) for i in range(len(rewards))])


def command(tmp_path, *args, driver=True):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    return [sys.executable, str(script if driver else ROOT / "mua_rl.py"), *map(str, args)]


def finished(args, **kwargs):
    return subprocess.run(args, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL, **kwargs)


def here(*args, curves=False):
    """The same command in this process: a new one takes seconds to import torch."""
    with pytest.MonkeyPatch.context() as patch:
        drawn = report.curves
        quicken(patch.setattr)
        if curves:
            patch.setattr(report, "curves", drawn)
        mua_rl.main([str(a) for a in args])


def rows(run, phase=None):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    return [r for r in lines if phase in (None, r["phase"])]


def timeless(row):
    clocked = ("seconds", "tok_s", "rss_mb")
    return {k: v for k, v in row.items() if not k.endswith(clocked)}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    run = tmp_path_factory.mktemp("unbroken") / "run"
    here("train", "--run", run, *SMALL, curves=True)
    return run


def same_run(a: Path, b: Path):
    """Weights, optimizer and metrics are equal, bit for bit (times aside)."""
    for name in ("model.safetensors", "optimizer.safetensors"):
        x, y = load_file(a / "checkpoint" / name), load_file(b / "checkpoint" / name)
        assert x.keys() == y.keys() and x
        assert all(torch.equal(x[k], y[k]) for k in x), name
    assert [timeless(r) for r in rows(a)] == [timeless(r) for r in rows(b)]


def wait_for(process, run, phase, n):
    """Until the run has logged n steps of a phase and holds a checkpoint."""
    for _ in range(3000):
        if (run / "checkpoint").exists() and len(rows(run, phase)) >= n:
            return
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    raise AssertionError("the run made no progress")


def test_a_run_leaves_everything_a_person_looks_at(unbroken):
    made = {p.name for p in unbroken.iterdir()}
    assert made >= {
        "config.json",
        "metrics.jsonl",
        "episodes.jsonl.gz",
        "checkpoint",
        "curves.png",
        "report.html",
        "summary.json",
    }
    summary = json.loads((unbroken / "summary.json").read_text())
    assert summary.keys() >= set(
        "preset seed wall_s peak_rss_mb null careless cold_start final unseen_user unseen_combination user_fault_rate "
        "sampled_tokens trained_tokens sample_tok_s train_tok_s seconds_by_phase".split()
    )
    parts = summary["seconds_by_phase"]
    assert parts.keys() >= set("training reference rollout evaluation saving setup other".split())
    assert {"agent prefill", "agent decode"} <= parts.keys() and min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(summary["wall_s"], abs=0.1 * len(parts))
    assert summary["null"].keys() >= {"do_nothing", "transfer", "act_without_asking"}
    assert summary["final"].keys() >= {"success", "lo", "hi", "n", "pass_k"} and "2" in summary["final"]["pass_k"]
    assert len(rows(unbroken, "sft")) == 4 and len(rows(unbroken, "rl")) == 4
    with gzip.open(unbroken / "episodes.jsonl.gz", "rt") as file:
        assert all({"turns", "tokens", "roles"} <= json.loads(line).keys() for line in file)


def test_every_rl_step_moved_the_weights_and_the_ratio_began_at_one(unbroken):
    for row in rows(unbroken, "rl"):
        assert row["grad_norm"] > 0 and row["gap_max"] <= 1e-4, row
    start, end = (load_file(unbroken / n / "model.safetensors") for n in ("cold_start", "checkpoint"))
    assert any(not torch.equal(start[k], end[k]) for k in start)


def test_transformers_opens_the_checkpoint_with_equal_logits(unbroken):
    transformers = pytest.importorskip("transformers")

    folder = unbroken / "checkpoint"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer("Please cancel #A10 for Ada Adler.")["input_ids"]])
    ours = load_model(folder)
    with torch.no_grad():
        a, b = theirs(ids).logits, ours(ids) @ ours.head.T
    assert (a - b).abs().max() <= 1e-5 * a.abs().max()


@pytest.mark.parametrize("phase, after", [("sft", 1), ("rl", 2)])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, unbroken, phase, after):
    run = tmp_path / "run"
    process = subprocess.Popen(command(tmp_path, "train", "--run", run, *SMALL), stderr=subprocess.PIPE, text=True)
    wait_for(process, run, phase, after)
    process.send_signal(signal.SIGKILL)
    process.wait()
    here("train", "--resume", run)
    same_run(unbroken, run)


def test_ctrl_c_finishes_the_step_and_resumes_to_the_same_bits(tmp_path, unbroken):
    run = tmp_path / "run"
    process = subprocess.Popen(command(tmp_path, "train", "--run", run, *SMALL), stderr=subprocess.PIPE, text=True)
    wait_for(process, run, "sft", 1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    [hint] = re.findall(r"run: (\S+) (\S+) train --resume (\S+)$", stderr, re.M)  # as seen from where the test runs
    assert [Path(p).resolve() for p in hint[1:]] == [ROOT / "mua_rl.py", run] and Path(hint[0]).samefile(sys.executable)
    assert "Traceback" not in stderr, stderr
    assert stderr.splitlines()[-1].startswith("stopped after "), stderr
    here("train", "--resume", run)
    same_run(unbroken, run)


def small_run(folder, monkeypatch, *flags, stop_at=None):
    """A small run in this process, which dies before a step of reinforcement learning is saved, if told so."""
    quicken(monkeypatch.setattr)
    monkeypatch.setattr(mua_rl, "learn", LEARN if stop_at is None else functools.partial(die_at, stop_at))
    args = ["--run", str(folder), *SMALL, "--test-tasks", "0", "--eval-tasks", "0", "--threads", "1", *flags]
    args = ["--resume", str(folder)] if (folder / "checkpoint").exists() else args
    cfg = config.parse(config.default_config(args), args, "train")
    with contextlib.suppress(ZeroDivisionError):
        mua_rl.train(cfg)
    return folder


LEARN = mua_rl.learn


def die_at(stop_at, job, step, groups, tasks):
    LEARN(job, step, groups, tasks)
    if step == stop_at:
        raise ZeroDivisionError


HALF = ["--dtype", "bf16"]


@pytest.mark.parametrize("flags", [HALF, [*HALF, "--lora-rank", "2", "--checkpointing"]], ids=["masters", "lora"])
def test_half_precision_and_adapters_resume_to_the_same_bits(tmp_path, monkeypatch, flags):
    whole = small_run(tmp_path / "whole", monkeypatch, *flags)
    broken = small_run(tmp_path / "broken", monkeypatch, *flags, stop_at=2)
    assert json.loads((broken / "checkpoint" / "state.json").read_text())["step"] == 2
    small_run(broken, monkeypatch)
    weights = "adapter_model.safetensors" if "--lora-rank" in flags else "model.safetensors"
    for name in (weights, "optimizer.safetensors"):
        x, y = load_file(whole / "checkpoint" / name), load_file(broken / "checkpoint" / name)
        assert x.keys() == y.keys() and x and all(torch.equal(x[k], y[k]) for k in x), name
    stripped = [[timeless(r) for r in rows(run, "rl")] for run in (whole, broken)]
    assert stripped[0] == stripped[1] and all(r["grad_norm"] > 0 for r in stripped[0])
    if "--lora-rank" not in flags:  # the fp32 masters move where bf16 weights would stand still
        masters = [k for k in load_file(whole / "checkpoint" / "optimizer.safetensors") if k.endswith(".master")]
        assert masters


def test_ctrl_c_in_an_evaluation_on_the_way_resumes_to_the_same_bits(tmp_path, monkeypatch):
    """The step before it has moved the weights: it must not be made a second time."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    small_run(whole, monkeypatch, "--eval-tasks", "2")
    inner = mua_rl.look

    def look(job, step):
        job.interrupted = True
        inner(job, step)

    with monkeypatch.context() as patch:
        patch.setattr(mua_rl, "look", look)
        small_run(broken, patch, "--eval-tasks", "2")
    assert json.loads((broken / "checkpoint" / "state.json").read_text())["step"] == 2
    small_run(broken, monkeypatch)
    same_run(whole, broken)


@pytest.mark.parametrize("rank", ["0", "2"])
def test_a_pretrained_model_without_a_cold_start_trains_and_resumes_to_the_same_bits(
    tmp_path, unbroken, monkeypatch, rank
):
    """The way of every GPU preset: --model FOLDER --sft-steps 0, in bf16, with and without adapters."""
    flags = ["--model", str(unbroken / "cold_start"), "--sft-steps", "0", *HALF, "--lora-rank", rank]
    whole = small_run(tmp_path / "whole", monkeypatch, *flags)
    broken = small_run(tmp_path / "broken", monkeypatch, *flags, stop_at=1)
    small_run(broken, monkeypatch)
    weights = "adapter_model.safetensors" if rank != "0" else "model.safetensors"
    for name in (weights, "optimizer.safetensors"):
        x, y = load_file(whole / "checkpoint" / name), load_file(broken / "checkpoint" / name)
        assert x.keys() == y.keys() and x and all(torch.equal(x[k], y[k]) for k in x), name


def test_masters_step_as_fp32_weights_would_and_the_weights_follow():
    """Two micro-batches and a step: the gradients add up in fp32, the masters move as an fp32 twin, bf16 weights follow."""
    torch.manual_seed(0)
    half = torch.nn.Parameter(torch.randn(6, 5).bfloat16())
    twin = torch.nn.Parameter(half.detach().float())
    [master] = grpo.masters([half])
    optimizers = grpo.followed(torch.optim.AdamW([master], lr=1e-4)), torch.optim.AdamW([twin], lr=1e-4)
    for _ in range(3):
        for pull in (torch.randn(6, 5).bfloat16(), torch.randn(6, 5).bfloat16()):
            (half * pull).sum().backward()
            assert half.grad is None
            twin.grad = pull.float() if twin.grad is None else twin.grad + pull.float()
        assert torch.equal(master.grad, twin.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        assert torch.equal(master, twin) and torch.equal(half, master.bfloat16())


@pytest.mark.parametrize("kl, frozen", [("0", False), ("0.1", True)])
def test_the_start_is_kept_only_where_it_is_needed(tmp_path, monkeypatch, kl, frozen):
    held = []
    monkeypatch.setattr(
        mua_rl, "collect", lambda job, step, inner=mua_rl.collect: held.append(job.frozen) or inner(job, step)
    )
    small_run(tmp_path / "run", monkeypatch, "--kl", kl, "--steps", "1")
    assert [model is not None for model in held] == [frozen]


def test_no_master_outlives_its_optimizer(tmp_path, unbroken, monkeypatch):
    flags = ["--model", str(unbroken / "cold_start"), "--sft-steps", "2", "--steps", "1", *HALF, "--lora-rank", "2"]
    made, inner = [], grpo.masters

    def watched(parameters):
        found = inner(parameters)
        made.extend(weakref.ref(m) for m in found if hasattr(m, "follower"))
        return found

    for module in (grpo, sft):
        monkeypatch.setattr(module, "masters", watched)
    alive = []
    monkeypatch.setattr(
        mua_rl,
        "collect",
        lambda job, step, inner=mua_rl.collect: alive.append(sum(m() is not None for m in made)) or inner(job, step),
    )
    small_run(tmp_path / "run", monkeypatch, *flags)
    assert made and alive == [0]


def test_weights_that_cannot_fit_are_not_made(tmp_path, monkeypatch):
    monkeypatch.setattr(mua_rl.plan, "free_bytes", lambda device: 100_000)
    monkeypatch.setattr(mua_rl.models, "Decoder", None)
    with pytest.raises(mua_rl.UserError, match=r"--layers 2 --width 4096 .* of which weights"):
        small_run(tmp_path / "run", monkeypatch, "--width", "4096")
    assert not (tmp_path / "run").exists()


def test_contexts_longer_than_the_model_are_refused(tmp_path, unbroken, monkeypatch):
    with pytest.raises(mua_rl.UserError, match="1024 positions"):
        small_run(tmp_path / "run", monkeypatch, "--model", str(unbroken / "cold_start"), "--max-len", "2000")


def test_save_gives_peft_an_adapter_and_transformers_the_merged_weights(tmp_path, monkeypatch, capsys):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    run = small_run(
        tmp_path / "run", monkeypatch, "--lora-rank", "2", "--lr", "0.002", "--no-induction"
    )  # it magnifies rounding
    mua_rl.main(["save", str(run), str(tmp_path / "adapter")])
    mua_rl.main(["save", str(run), str(tmp_path / "merged"), "--merge"])
    # In float64, since these weights magnify the rounding of every operation; transformers' RoPE stays in fp32.
    ours = weights.trained_weights(config.read_config(run), run).double()
    ids = torch.arange(40)[None]
    base = transformers.AutoModelForCausalLM.from_pretrained(run / "cold_start")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval().double()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval().double()
    with torch.no_grad():
        logits, start = ours(ids) @ ours.head.T, mua_rl.models.Base(ours)(ids) @ ours.head.T
        assert (logits - start).abs().max() > 1e-3  # the adapter has learned something
        for theirs in (adapted, merged):
            assert (theirs(ids).logits - logits).abs().max() < 1e-5 * logits.abs().max()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert tokenizer.chat_template and "eos_token_id" in (tmp_path / "merged" / "generation_config.json").read_text()
    with pytest.raises(mua_rl.UserError, match="not empty"):
        mua_rl.main(["save", str(run), str(tmp_path / "merged")])


def test_a_checkpoint_cut_by_a_kill_is_passed_over(tmp_path, unbroken):
    from run import checkpoint_of

    for name in ("checkpoint.new", "checkpoint.old"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint.new" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "checkpoint.old" / "state.json").write_text("{}")
    assert checkpoint_of(tmp_path).name == "checkpoint.old"


BAD = {
    "train --preset huge": "huge",
    "train --group-size 1": "--group-size 1",
    "train --steps many": "many",
    "train --no-such-flag 3": "no-such-flag",
    "train --overlong maybe": "maybe",
    "train --dtype fp8": "--dtype fp8",
    "train --device cuda:9": "--device cuda:9",
    "train --lora-rank -1": "--lora-rank -1",
    "train --slots 99999999": "--slots 99999999 --max-len 384",
    "eval RUN --slots 99999999": "--slots 99999999 --max-len 384",
    "save nowhere": "save needs a run and a new folder",
    "save nowhere there": "nowhere",
    "plan --preset none": "none",
    "train --width 30": "--width 30",
    "train --temperature 0": "--temperature 0",
    "train --two 1.5": "--two 1.5",
    "train --lr nan": "--lr nan",
    "train --temperature nan": "--temperature nan",
    "train --sft-lr -1": "--sft-lr",
    "eval RUN --temperature -1": "--temperature -1",
    "train --resume nowhere": "nowhere",
    "train --model nowhere": "nowhere",
    "train --run /proc/x": "/proc/x",
    "eval nowhere": "nowhere",
    "eval": "eval needs a run",
    "eval RUN --split secret": "secret",
    "eval RUN --user bob": "bob",
    f"eval RUN --user lm={'9' * 400}": "below 1e9",
    "eval RUN --trials 0": "--trials 0",
    "chat nowhere": "nowhere",
    "show nowhere": "nowhere",
    "show RUN --episode 99999": "99999",
    "fly": "fly",
}


def refused(args, capsys) -> str:
    """Runs a command in this process; it must exit with 2 and say one line, which is returned."""
    with pytest.raises(SystemExit) as stop:
        mua_rl.command_line([str(a) for a in args])
    out = capsys.readouterr()
    assert stop.value.code == 2 and len(out.err.strip().splitlines()) == 1, out.err
    return out.err


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line_and_exit_2(tmp_path, unbroken, line, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quicken(monkeypatch.setattr)
    args = [str(unbroken) if a == "RUN" else a for a in line.split()]
    if args[0] == "train" and "--run" not in args and "--resume" not in args:
        args += ["--run", str(tmp_path / "new")]
    assert BAD[line] in refused(args, capsys)
    assert not (tmp_path / "new" / "checkpoint").exists()


def test_bad_input_from_the_shell_has_no_traceback(tmp_path):
    done = finished(command(tmp_path, "train", "--group-size", 1, driver=False), cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("mua_rl: --group-size 1") and not done.stdout


def test_an_unknown_flag_is_named_once(capsys):
    assert refused(["train", "--no-such-flag", 3], capsys).startswith(
        "mua_rl: Unrecognized options: --no-such-flag, 3; see"
    )


def test_without_torch_there_is_help_and_one_line_that_says_what_to_do(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    at = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(tmp_path)}}
    assert "mua_rl.py train" in finished(command(tmp_path, "--help", driver=False), **at).stdout
    done = finished(command(tmp_path, "train", driver=False), **at)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and ". .venv/bin/activate" in done.stderr


@pytest.mark.parametrize("name, words", [("train", "The main job"), ("plan", "memory"), ("save", "--merge")])
def test_help_begins_with_what_the_command_does(name, words, capsys):
    with contextlib.suppress(SystemExit):
        mua_rl.main([name, "--help"])
    out = capsys.readouterr().out
    assert out.startswith(f"usage: mua_rl.py {name}") and words in "\n".join(out.splitlines()[:5])


def test_a_new_run_names_an_unfinished_one_and_a_busy_machine(tmp_path, unbroken, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    old, new = Path("runs/tiny-seed0"), Path("runs/tiny-seed0-2")
    shutil.copytree(unbroken, old)
    job = SimpleNamespace(cfg=config.Config(), run=SimpleNamespace(folder=new))
    job.domain = SimpleNamespace(notices=lambda: ())
    job.state = SimpleNamespace(results={"null": {"do_nothing": 0.0}})
    assert next(f for f in mua_rl.names(job.cfg) if not f.exists()) == new
    assert not list(mua_rl.notices(job))  # it is finished
    damaged(old / "checkpoint" / "state.json", lambda state: state | {"step": 3})
    [line] = mua_rl.notices(job)
    assert f"{old} is not finished" in line and line.endswith(f"train --resume {old}")
    monkeypatch.setattr(os, "getloadavg", lambda: (1e4, 0.0, 0.0))
    assert "--threads 1" in list(mua_rl.notices(job))[1]


def test_damaged_checkpoints_are_one_line_and_exit_2(tmp_path, unbroken, capsys):
    for name, content in (
        ("model.safetensors", b"\x00" * 50),
        ("config.json", b"{}"),
        ("tokenizer.json", b"{"),
        ("state.json", b"{"),
        ("optimizer.safetensors", b"no"),
    ):
        run = tmp_path / name
        shutil.copytree(unbroken, run)
        (run / "checkpoint" / name).write_bytes(content)
        assert name in refused(["train", "--resume", run], capsys)


def without(cfg: dict, key: str) -> dict:
    return {k: v for k, v in cfg.items() if k != key}


def damaged(path: Path, how):
    """Changes a JSON file: `how` takes what it held."""
    path.write_text(json.dumps(how(json.loads(path.read_text()))))


DAMAGE = {  # file: (what is done to its JSON, or its new bytes; what the line must name)
    "config: a list": ("config.json", lambda c: [c], "not a run folder"),
    "config: text for a number": ("config.json", lambda c: c | {"lr": "fast"}, "lr is 'fast'"),
    "config: null": ("config.json", lambda c: c | {"steps": None}, "steps is 'None'"),
    "config: a value that no flag takes": ("config.json", lambda c: c | {"threads": -5}, "threads -5"),
    "config: another version's": ("config.json", lambda c: c | {"fast": 1}, "fast"),
    "config: nested": ("config.json", b"[" * 100_000, "not a run folder"),
    "state: phase": ("checkpoint/state.json", lambda s: s | {"phase": "nap"}, "state.json is damaged"),
    "state: step": ("checkpoint/state.json", lambda s: s | {"step": "4"}, "state.json is damaged"),
    "state: results": ("checkpoint/state.json", lambda s: s | {"results": {"null": 3}}, "state.json is damaged"),
    "state: seconds": ("checkpoint/state.json", lambda s: s | {"seconds": {"x": "y"}}, "state.json is damaged"),
    "metrics: no object": ("metrics.jsonl", b"[]\n", "metrics.jsonl holds a line"),
    "metrics: no phase": ("metrics.jsonl", b"{}\n", "metrics.jsonl holds a line"),
    "metrics: no number": ("metrics.jsonl", b'{"phase": "rl", "step": "4"}\n', "metrics.jsonl holds a line"),
    "metrics: garbage": ("metrics.jsonl", b"\xff\xfe\n", "metrics.jsonl holds broken JSON"),
    "episodes: no object": ("episodes.jsonl.gz", gzip.compress(b"3\n"), "episodes.jsonl.gz holds a line"),
    "episodes: no phase": ("episodes.jsonl.gz", gzip.compress(b"{}\n"), "episodes.jsonl.gz holds a line"),
    "template: no text": ("checkpoint/chat_template.jinja", b"\xff", "chat template"),
    "template: empty list": ("checkpoint/tokenizer_config.json", lambda c: c | {"chat_template": []}, "chat template"),
    "template: odd list": ("checkpoint/tokenizer_config.json", lambda c: c | {"chat_template": [3]}, "chat template"),
    "model: kind": ("checkpoint/config.json", lambda c: c | {"model_type": ["qwen3"]}, "config.json"),
    "model: layer kinds": ("checkpoint/config.json", lambda c: c | {"layer_types": 3}, "config.json"),
    "model: endless layers": (
        "checkpoint/config.json",
        lambda c: c | {"num_hidden_layers": 10**9},
        "num_hidden_layers",
    ),
    "model: huge": ("checkpoint/config.json", lambda c: c | {"hidden_size": 2**70}, "hidden_size"),
    "model: no float": (
        "checkpoint/config.json",
        lambda c: without(c, "rope_parameters") | {"rope_theta": 10**400},
        "rope_theta",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_of_a_run_are_one_line_and_exit_2(tmp_path, unbroken, name, capsys):
    file, how, words = DAMAGE[name]
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    if isinstance(how, bytes):
        (run / file).write_bytes(how)
    else:
        damaged(run / file, how)
    assert words in refused(["train", "--resume", run], capsys)


def test_another_files_tensors_are_no_optimizer_state(tmp_path, unbroken, capsys):
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    shutil.copy(run / "checkpoint" / "model.safetensors", run / "checkpoint" / "optimizer.safetensors")
    assert "optimizer state" in refused(["train", "--resume", run], capsys)


@pytest.mark.parametrize("left_out", [r"0\.1\..*", r"0\.0\.exp_avg_sq"])
def test_an_optimizer_state_with_holes_is_refused(tmp_path, unbroken, left_out, capsys):
    """Its moments would begin at nothing, silently."""
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    path = run / "checkpoint" / "optimizer.safetensors"
    tensors = load_file(path)
    kept = {k: v for k, v in tensors.items() if not re.fullmatch(left_out, k)}
    assert len(kept) < len(tensors)
    save_file(kept, path)
    assert "not there for all parameters" in refused(["train", "--resume", run], capsys)


def test_a_folder_in_a_files_place_is_one_line_and_exit_2(tmp_path, unbroken, capsys):
    for file in ("config.json", "metrics.jsonl", "episodes.jsonl.gz", "checkpoint/state.json"):
        run = tmp_path / file.replace("/", "-")
        shutil.copytree(unbroken, run)
        (run / file).unlink()
        (run / file).mkdir()
        assert Path(file).name in refused(["train", "--resume", run], capsys)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory, unbroken):
    """Arguments of an evaluation, and the folder it left."""
    out, args = tmp_path_factory.mktemp("evaluation") / "out", ["eval", unbroken, "--n", 1, "--trials", 1]
    args += ["--user", "scripted", "--out"]
    here(*args, out)
    return args, out


@pytest.mark.parametrize(
    "file, content",
    [("config.json", "{"), ("config.json", "[]"), ("conversations.jsonl", "{\n"), ("conversations.jsonl", "{}\n")],
)
def test_a_damaged_evaluation_is_one_line_and_exit_2(tmp_path, evaluated, file, content, capsys):
    (args, whole), out = evaluated, tmp_path / "out"
    shutil.copytree(whole, out)
    (out / file).write_text(content)
    with pytest.raises(SystemExit) as stop:
        mua_rl.command_line([str(a) for a in [*args, out]])
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and file in last and last.startswith("mua_rl: ")


def test_a_run_is_not_overwritten(unbroken, capsys):
    kept = ("metrics.jsonl", "config.json", "summary.json")
    before = [(unbroken / name).read_bytes() for name in kept]
    assert "--resume" in refused(["train", "--run", unbroken, *SMALL], capsys)
    assert [(unbroken / name).read_bytes() for name in kept] == before


def test_two_processes_do_not_work_in_one_folder(tmp_path, unbroken):
    """The one that came first is named; show needs no lock; and a killed one leaves nothing that stands in the way."""
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    args = command(tmp_path, "train", "--resume", run, "--steps", 2000)
    first = subprocess.Popen(args, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(first, run, "rl", 5)
        for other in (args, command(tmp_path, "train", "--run", tmp_path / "new" / ".." / "run", *SMALL)):
            second = finished(other)
            assert second.returncode == 2 and second.stderr.count("\n") == 1, second.stderr
            assert f"run: process {first.pid} is working in it" in second.stderr
        shown = finished(command(tmp_path, "show", run, driver=False))
        assert shown.returncode == 0, shown.stderr
    finally:
        first.kill()
        first.wait()
    done = finished(command(tmp_path, "train", "--resume", run, "--steps", len(rows(run, "rl")) + 1))
    assert done.returncode == 0, done.stderr


def test_two_evaluations_do_not_write_in_one_folder(tmp_path, unbroken, capsys):
    """A lock of this process would not stop it: another one holds it."""
    out, args = tmp_path / "out", ["eval", unbroken, "--n", 1, "--trials", 1, "--user", "scripted", "--out"]
    mua_rl.command_line([str(a) for a in [*args, out]])
    held = f"import time, pathlib, run; file = run.lock(pathlib.Path({str(out)!r})); print(flush=True); time.sleep(99)"
    other = subprocess.Popen([sys.executable, "-c", held], cwd=ROOT, stdout=subprocess.PIPE)
    other.stdout.readline()
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        mua_rl.command_line([str(a) for a in [*args, out]])
    assert stop.value.code == 2 and f"process {other.pid} is working in it" in capsys.readouterr().err
    other.kill()
    other.wait()


def test_a_kill_in_the_last_evaluations_loses_none_that_is_complete(tmp_path, unbroken, monkeypatch):
    run, measured = tmp_path / "run", []
    shutil.copytree(unbroken, run)

    def evaluate(stage, split, n, trials, user, *rest, **more):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append((split, user))
        return evaluation.evaluate(stage, split, n, trials, user, *rest, **more)

    monkeypatch.setattr(mua_rl, "evaluate", evaluate)
    args = ["train", "--resume", str(run), "--steps", "5", "--eval-every", "0"]
    with pytest.raises(KeyboardInterrupt):
        mua_rl.main(args)
    at_kill = {k: v for k, v in runs.load_state(run / "checkpoint").results.items() if k in ("final", "scripted_user")}
    assert len(at_kill) == 2 == len(measured)
    monkeypatch.setattr(mua_rl, "evaluate", lambda *a, **k: measured.append(a[1]) or evaluation.evaluate(*a, **k))
    mua_rl.main(args)
    results = runs.load_state(run / "checkpoint").results
    assert len(measured) == 7 and at_kill.items() <= results.items()  # seven in all: none was made twice
    names = [r["name"] for r in rows(run, "eval") if r["stage"] == "final"]
    assert len(names) == len(set(names)) == 7


def test_users_are_looked_for_before_anything_long_begins(tmp_path, unbroken, capsys, monkeypatch):
    """A user that is not there, or whose key is not set: not found out after a cold start, nor after the baselines."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(mua_rl, "cold_start", None)
    for module in (mua_rl, commands):
        monkeypatch.setattr(module, "null_baselines", None)
    for user, words in {"frozen:nowhere": "nowhere", "openai:m": "OPENAI_API_KEY is not set"}.items():
        assert words in refused(["train", "--run", tmp_path / "new", *SMALL, "--user", user], capsys)
        assert not (tmp_path / "new").exists()
        with pytest.raises(SystemExit) as stop:
            mua_rl.command_line(["eval", str(unbroken), "--n", "1", "--user", user])
        assert stop.value.code == 2 and words in capsys.readouterr().err.splitlines()[-1]


def test_a_tokenizer_larger_than_the_model_is_one_line(tmp_path, unbroken, capsys):
    run, model = tmp_path / "run", tmp_path / "model"
    shutil.copytree(unbroken, run)
    mua_rl.command_line(["save", str(unbroken), str(model)])
    capsys.readouterr()
    for folder in (run / "checkpoint", model):
        config = json.loads((folder / "tokenizer.json").read_text())
        size = max(config["model"]["vocab"].values())
        token = {
            "content": "<|more|>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        config["added_tokens"].append(token | {"id": size + 40})
        config["model"]["vocab"] |= {f"<|more{i}|>": size + i for i in range(1, 41)}
        (folder / "tokenizer.json").write_text(json.dumps(config))
    for args in (
        ["train", "--resume", run],
        ["eval", run],
        ["eval", model],
        ["train", "--run", tmp_path / "x", "--model", model],
    ):
        assert "its tokenizer has" in refused(args, capsys), args


@pytest.mark.parametrize("flags", ["--width 64", "--seed 5", "--group-size 4", "--lr 1"])
def test_a_resumed_run_stays_the_same_run(unbroken, flags, capsys):
    before = (unbroken / "config.json").read_bytes()
    assert flags.split()[0] in refused(["train", "--resume", unbroken, *flags.split()], capsys)
    assert (unbroken / "config.json").read_bytes() == before


def test_a_finished_run_can_be_made_longer_and_is_measured_again(tmp_path, unbroken):
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    here("train", "--resume", run, "--steps", 5)
    assert len(rows(run, "rl")) == 5
    finals = [r for r in rows(run, "eval") if r["stage"] == "final"]
    assert {r["step"] for r in finals} == {5} and len({r["name"] for r in finals}) == len(finals)


def test_eval_chat_and_show_work_on_a_run(tmp_path, unbroken, capsys, monkeypatch):
    mua_rl.command_line(["eval", str(unbroken), "--n", "4", "--trials", "2"])
    out = capsys.readouterr().out
    assert "pass^2" in out and "do_nothing" in out
    talk = subprocess.run(
        command(tmp_path, "chat", unbroken, driver=False),
        input="Hello\n\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert talk.returncode == 0 and "reward" in talk.stdout, talk.stderr
    assert "you speak first" in talk.stdout and f"agent> {shop.GREETING}\nyou> " in talk.stdout
    monkeypatch.setenv("NO_COLOR", "1")
    mua_rl.command_line(["show", str(unbroken)])
    shown = capsys.readouterr().out
    assert "report.html" in shown and "\x1b" not in shown
