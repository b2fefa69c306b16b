"""The memory plan against what torch really keeps."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import torch

import config
import mua_rl
import plan
from kernels.logprob import linear_logprob
from model import Decoder, KVCache, add_lora

SMALL = dataclasses.replace(
    plan.shape("Qwen/Qwen3-0.6B"), hidden_size=256, intermediate_size=768, num_hidden_layers=4, vocab_size=1000
)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("smollm2", 134.5), ("Qwen/Qwen3-0.6B", 596.0), ("Qwen/Qwen3-4B", 4022.5), ("Qwen/Qwen3-8B", 8190.7)],
)  # fmt: skip  (as their model cards say)
def test_known_shapes_have_the_published_number_of_parameters(name, millions):
    assert plan.parameters(plan.shape(name))[0] / 1e6 == pytest.approx(millions, rel=2e-4)


@pytest.mark.parametrize("rank", [0, 8])
def test_parameters_and_caches_are_counted_exactly(rank):
    model = Decoder(SMALL)
    if rank:
        add_lora(model, rank)
    everything = sum(p.numel() for p in model.parameters())
    assert plan.parameters(SMALL)[0] + plan.adapters(SMALL, rank) == everything
    cache = KVCache(SMALL, 3, 50)
    cfg = dataclasses.replace(config.Config(), slots=3, max_len=50, user_max_len=50, sft_steps=0)
    assert plan.need(cfg, SMALL).caches == 2 * 2 * cache.keys.numel() * 4


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_near_what_autograd_keeps(rank, checkpointing):
    model, T = Decoder(SMALL), 128
    if rank:
        add_lora(model, rank)
        model.model["embed_tokens"].weight.requires_grad_(True)  # as every layer's input: has a gradient
    model.checkpointing = checkpointing
    kept, weights = {}, {p.data_ptr() for p in model.parameters()}

    def pack(t):
        if t.data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(torch.zeros(2, T // 2, dtype=torch.long)).sum()
    cfg = dataclasses.replace(config.Config(), lora_rank=rank, micro_tokens=T, max_len=T, checkpointing=checkpointing)
    planned = plan.phase(dataclasses.replace(cfg, threads=1), SMALL).activations
    assert plan.phase(dataclasses.replace(cfg, threads=3), SMALL).activations == 3 * planned  # three batches at once
    if checkpointing:  # the one block that is recomputed at a time is not kept here
        planned -= T * 4 * plan.block_activations(SMALL, rank)
    assert planned == pytest.approx(sum(kept.values()), rel=0.3)


def allocated(work):
    """The most bytes that torch's CPU allocator handed out at a time while `work` ran, beyond what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_trained", [False, True])
@pytest.mark.parametrize("T", [300, 3000])
def test_log_probs_are_planned_as_torch_allocates_them(dtype, head_trained, T):
    m = dataclasses.replace(SMALL, vocab_size=12000)
    hidden = torch.randn(T, m.hidden_size).to(dtype).requires_grad_()
    weight = torch.randn(m.vocab_size, m.hidden_size).to(dtype).requires_grad_(head_trained)
    targets = torch.zeros(T, dtype=torch.long)
    peak = allocated(lambda: linear_logprob(hidden, weight, targets)[0].sum().backward())
    assert plan.log_probs(m, T, dtype.itemsize, "cpu", head_trained) == pytest.approx(peak, rel=0.1)


def test_a_run_that_cannot_fit_says_which_flags_are_to_blame(monkeypatch):
    cfg = dataclasses.replace(config.Config(), sft_steps=0)
    sizes = plan.need(cfg, SMALL)
    monkeypatch.setattr(plan, "free_bytes", lambda device: sizes.total() - sizes.weights)
    plan.check(cfg, SMALL)  # fits exactly
    for flags, change in (
        ("--slots 1000 --max-len 384", {"slots": 1000}),
        ("--micro-tokens 900000", {"micro_tokens": 900_000}),
        ("--max-len 90000", {"max_len": 90_000}),
    ):
        with pytest.raises(mua_rl.UserError, match=flags) as error:
            plan.check(dataclasses.replace(cfg, **change), SMALL)
        assert "GiB are free" in str(error.value) and "\n" not in str(error.value)
    monkeypatch.setattr(plan, "free_bytes", lambda device: None)
    plan.check(dataclasses.replace(cfg, slots=10**9), SMALL)  # where nobody can tell, nobody is refused


def test_frozen_copies_are_counted_where_somebody_needs_them():
    m, cfg = SMALL, dataclasses.replace(config.Config(), sft_steps=0, domain="retail", model="m", user="openai:x")
    weights, cache = 4 * plan.parameters(m)[0], 4 * 2 * m.num_hidden_layers * m.num_key_value_heads * m.head_dim
    cache *= cfg.slots * (cfg.user_max_len + 1)
    alone = plan.need(dataclasses.replace(cfg, kl=0.0), m)
    # Of the agent alone; what is only asked for log-probs is not packed.
    packed = alone.packed
    assert packed == 4 * (plan.parameters(m)[1] + m.vocab_size * m.hidden_size)
    for changes, copies, users, sampled in (
        ({}, 1, 0, 1),
        ({"kl": 0.0}, 0, 0, 1),
        ({"kl": 0.0, "user": "lm"}, 1, 1, 2),
        ({"user": "lm"}, 1, 1, 2),
        ({"lora_rank": 4, "user": "lm,frozen:a"}, 1, 2, 2),
        ({"user": "self,frozen:a,frozen:b"}, 3, 3, 3),
        ({"kl": 0.0, "user": "self", "domain": "shop"}, 1, 2, 2),
        ({"kl": 0.0, "user": "self", "domain": "shop", "test_tasks": 0}, 0, 1, 1),
        ({"user": "self", "domain": "shop", "test_tasks": 0}, 1, 1, 1),
    ):
        n = plan.need(dataclasses.replace(cfg, **changes), m)
        found = n.reference, n.caches - alone.caches, n.packed
        assert found == (copies * weights, users * cache, sampled * packed), changes


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux only")
def test_what_a_container_keeps_of_files_is_free(tmp_path, monkeypatch):
    """Else whoever has just read a model from disk would be refused."""
    monkeypatch.setattr(plan, "GROUP", tmp_path)
    most = plan.free_bytes("cpu")
    (tmp_path / "memory.max").write_text("100000\n")
    (tmp_path / "memory.current").write_text("99000\n")
    (tmp_path / "memory.stat").write_text("anon 9000\ninactive_file 70000\nactive_file 20000\n")
    assert plan.free_bytes("cpu") == 71000
    (tmp_path / "memory.max").write_text("max\n")
    assert plan.free_bytes("cpu") == pytest.approx(most, rel=0.2)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux only")
def test_free_memory_is_what_psutil_says_or_what_the_container_leaves():
    psutil = pytest.importorskip("psutil")
    assert 0 < plan.free_bytes("cpu") <= 1.1 * psutil.virtual_memory().available


def test_the_plan_names_the_phase_it_is_of_and_small_sizes_are_no_zeros(capsys):
    mua_rl.main(["plan", "--preset", "smol"])
    out = capsys.readouterr().out
    assert "all weights in the cold start, adapters of rank 16 in reinforcement learning" in out
    assert "most is needed in the cold start:" in out
    mua_rl.main(["plan"])
    out = capsys.readouterr().out
    assert "0.7 M parameters" in out and "trained: all weights\n" in out and "in reinforcement learning:" in out
    assert re.search(r"weights +2\.\d MiB", out) and re.search(r"caches +0\.23 GiB", out)


def test_every_preset_has_a_plan(capsys):
    for name in config.PRESETS:
        mua_rl.main(["plan", "--preset", name])
        out = capsys.readouterr().out
        assert out.startswith(f"{name}:") and ("fits a card of" in out) == (config.PRESETS[name].device == "cuda")
    with pytest.raises(mua_rl.UserError, match="no such folder"):
        mua_rl.main(["plan", "--model", "nothing-here"])
