"""What the benchmarks share: variants that take turns, each measurement in a process of its own, a table, and a JSON list.

A row of the list is {name, value, unit, against, promise, met}: `against` is the same value of what we are compared with,
`promise` says in words what was promised, and `met` is null where nothing was.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


def start(
    parser: argparse.ArgumentParser, setup: Callable[..., Callable[[], dict | None]] | None
) -> argparse.Namespace:
    """Parse the flags; say what is measured on what. In a process that `compare` started: measure setup(*args), and exit.
    setup: None for a script that starts no processes."""
    parser.add_argument("--quick", action="store_true", help="toy sizes, one round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--python", default=sys.executable, help="of an environment that has the peers (extra `bench`)")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    if o.measure:
        run = setup(*json.loads(o.measure))
        first = once(run)  # warms up, which is nothing beside minutes; memory is clean only there
        second = first if first["wall"] > 60 else once(run)
        print(json.dumps(second | {"bytes": first["bytes"]}))
        sys.exit()
    print(f"torch {torch.__version__}, {platform.machine()}, {o.threads} threads; seconds: the best of the rounds")
    return o


def resident(key: str) -> int:
    """Bytes of VmRSS (resident now) or VmHWM (the most so far); 0 where there is no /proc."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith(key)), 0)


def once(run: Callable[[], dict | None]) -> dict[str, float]:
    """{"wall", "cpu" (seconds), "bytes" (the peak above what was resident before)} and what `run` returns.

    With one thread, CPU time hardly depends on the neighbours; several wait for each other by spinning, so there it does.
    """
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")  # VmHWM begins anew
    before, wall, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    more = run() or {}
    spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    return spent | {"bytes": max(0, resident("VmHWM") - before)} | more


def in_a_process(name: str, command: list[str]) -> dict | None:
    """The JSON of the command's last line; None, and a line that says why, where a package or a compiler is missing."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    why = (done.stderr.strip().splitlines() or ["no message"])[-1][:160]
    print(f"{name}: not here ({why})", file=sys.stderr)
    return None


def compare(
    script: str, variants: dict[str, list], o, rounds: int = 2, others: dict[str, list[str]] | None = None
) -> dict[str, dict[str, float]]:
    """{variant: measured} for the arguments of each one's `setup`; the variants take turns, so that a slow minute of the
    machine hits all. Least time, least memory, most of all else. One that can't run here is named, and left out.
    others: {variant: command that prints the same} for what runs in an environment of its own."""
    mine = [o.python, script, "--threads", str(o.threads), "--measure"]
    commands = {name: [*mine, json.dumps(args)] for name, args in variants.items()} | (others or {})
    best: dict[str, dict[str, float]] = {}
    for i in range(1 if o.quick else rounds):
        for name, command in commands.items():
            if i and name not in best:
                continue
            if (got := in_a_process(name, command)) is None:
                continue
            old = best.get(name, got)
            best[name] = {k: (min if k in ("wall", "cpu", "bytes") else max)(v, old[k]) for k, v in got.items()}
    return best


def row(name: str, value: float, unit: str, against: float | None = None, promise: str | None = None, met=None) -> dict:
    short = lambda x: x if x is None else float(f"{x:.4g}")
    out = {"name": name, "value": short(value), "unit": unit, "against": short(against), "promise": promise}
    return out | {"met": None if met is None else bool(met)}


def finish(rows: list[dict], o) -> None:
    """Print the table and write the JSON; exit 1 if a promise was not kept, unless at toy sizes, which promise nothing."""
    if o.quick:
        rows = [r | {"promise": None, "met": None} for r in rows]
    width = max((len(r["name"]) for r in rows), default=0)
    for r in rows:
        against = "" if r["against"] is None else f"against {r['against']:g}"
        verdict = {None: "", True: "met", False: "NOT met"}[r["met"]]
        print(
            f"{r['name']:{width}} {r['value']:>10g} {r['unit']:8} {against:18} {r['promise'] or '':18} {verdict}".rstrip()
        )
    if o.json:
        o.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    sys.exit(any(r["met"] is False for r in rows))


TOY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512} | {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def shape(name: str, quick: bool):
    """The shape of a model: "tiny" (the main job's) or "smollm2" (SmolLM2-135M); with `quick` a toy."""
    import dataclasses

    import plan
    from config import Config
    from new_model import from_scratch_shape

    cfg = from_scratch_shape(Config(), 630) if name == "tiny" else plan.shape("smollm2")
    return dataclasses.replace(cfg, max_position_embeddings=8192, **(TOY if quick else {}))


def decoder(name: str, dtype: str, quick: bool):
    """Our model of that shape, with random weights."""
    from config import DTYPES
    from model import Decoder

    torch.manual_seed(0)
    return Decoder(shape(name, quick)).to(DTYPES[dtype])


def twin(name: str, dtype: str, quick: bool, folder: str):
    """The same weights opened by transformers."""
    import transformers

    from config import DTYPES
    from model_files import save_model

    save_model(decoder(name, dtype, quick), folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])


def trl_trainer(model, quick: bool, **settings):
    """TRL's own GRPOTrainer around a transformers model, with a tokenizer that is never asked for anything."""
    import tempfile

    import tokenizers
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    words = {f"w{i}": i for i in range(model.config.vocab_size)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2")
    cfg = GRPOConfig(
        tempfile.mkdtemp(), use_cpu=True, report_to=[], bf16=False, gradient_checkpointing=False, **settings
    )
    trainer = GRPOTrainer(
        model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=cfg, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": ["w3"] * 8}),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    return trainer
