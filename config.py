"""What a run depends on: `Config`, the presets, what values can't work together, and how flags become a Config."""

import contextlib
import dataclasses
import importlib.util
import io
import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from chat import UserError
from domains import absolute, find
from run import checkpoint_of, from_json
from user_sim import KINDS, parse_pool


@dataclass(frozen=True)
class Config:
    """Everything a run depends on. A run is a function of these values: same values, same weights."""

    preset: str = "tiny"  # tiny: from scratch on CPU in minutes; smol: SmolLM2-135M-Instruct; others want a GPU
    seed: int = 0
    run: str = ""  # the run's folder; empty: the next free runs/PRESET-seedSEED
    resume: str = ""  # a run's folder: go on where it stopped
    steps: int = 55  # reinforcement learning steps
    minutes: float = 0.0  # time budget for the whole run; 0: none. Stops cleanly, and can be resumed
    threads: int = 2  # CPU threads
    device: str = "cpu"  # or cuda
    dtype: str = "fp32"  # of weights and activations: fp32 or bf16 (trained weights then have fp32 masters)

    domain: str = "shop"  # or retail, airline, telecom (docs/evaluation.md), or your own FILE.py (docs/domains.md)
    data: str = ""  # τ²-bench's data: a folder; empty: TAU2_DATA_DIR
    task_set: str = "head"  # which of its tasks: head, small (telecom), v0.2.0 or tau1
    paper_split: bool = False  # train on τ-bench v1's tasks, as the paper did: many are test tasks in other words

    model: str = ""  # a pretrained model (folder, Hub name, GGUF file, or "smollm2"); empty: from scratch
    lora_rank: int = 0  # reinforcement learning of adapters of this rank, at ten times --lr; 0: of all weights
    checkpointing: bool = False  # recompute activations in the backward pass: less memory, a third more time
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 256
    induction: bool = True  # write an induction head into the initial weights (see new_model.wire_induction)
    prompts: bool = False  # policy and tool schemas in the agent's prompt (weights trained from scratch know them)

    sft_steps: int = 640  # cold start: optimizer steps on fresh demonstrations
    sft_talks: int = 12  # demonstrations a step, each seen from both sides
    sft_lr: float = 0.02  # Muon, for matrices
    sft_lr_rest: float = 5e-3  # AdamW, for embeddings and norms
    save_seconds: float = 10.0  # time between checkpoints in the cold start; afterwards every step is saved
    sft_cooldown: float = 0.4  # share of the steps in which the learning rate falls to 2 %

    two: float = 0.08  # share of tasks with two wishes (the world's difficulty: see domains/shop.py, Mix)
    forbidden: float = 0.33  # share of wishes that policy forbids
    changed: float = 0.33  # share of allowed writes in which the user changes its mind at the read-back
    slip: float = 0.08  # share of users who give a wrong name or number first

    # Who plays the user in training. lm: the frozen cold start; self: the policy's own current weights; frozen:PATH: another
    # run or model; scripted, stranger: the shop's scripts; openai:MODEL. Several with weights: lm=0.8,scripted=0.2
    user: str = "lm"
    user_url: str = ""  # of openai:MODEL; empty: OpenAI's own
    user_key_env: str = "OPENAI_API_KEY"  # the environment variable that holds its key
    user_budget: int = 0  # tokens that it may use in this run; 0: no cap
    tasks: int = 16  # tasks a step
    group_size: int = 8  # G: conversations of each task
    lr: float = 5e-4
    optimizer: str = "adamw"  # of reinforcement learning; adamw8bit: torchao's, moments in a quarter of the memory
    warmup: int = 5
    cooldown: float = 0.3  # share of the steps in which the learning rate falls to 10 %
    minibatches: int = 2  # optimizer steps an epoch
    epochs: int = 1  # passes over a batch (PPO, 1707.06347, algorithm 1)
    # The objective: a closed set of choices. docs/algorithm.md has each one's equation, bias, and when to use it.
    # grpo: (r − mean) / std (2402.03300 §4.1.2); dr_grpo: r − mean (2503.20783 §3.2); rloo: r − mean of the others
    # (2402.14740), the only one whose expectation is the gradient of the expected reward
    advantage: str = "grpo"
    # token: ρ_t, each token's own (2402.03300 eq. 3); sequence: their geometric mean over an episode (GSPO, 2507.18071
    # eq. 7), which wants clips of 3e-4 and 4e-4
    ratio: str = "token"
    # token: every token of a minibatch counts alike (DAPO, 2503.14476 §3.3); sequence: every episode does (2402.03300
    # eq. 3); constant: sum / (episodes · max_len), unbiased (2503.20783 §3.2)
    mean: str = "token"
    clip_low: float = 0.2  # ε_lo
    clip_high: float = 0.28  # ε_hi (Clip-Higher: DAPO, 2503.14476 §3.1)
    dual_clip: float = 0.0  # c > 1: where A < 0, no objective below c·A (1912.09729); 0: off. For stale samples
    tis: float = 0.0  # C ≥ 1: weights min(π_old / π_sampler, C), where sampler and trainer differ (Yao, 2025); 0: off
    kl: float = 0.003  # β: weight of KL(π_θ ‖ cold start); 0: no KL term
    kl_estimator: str = "k3"  # k1, k2 or k3 (Schulman, 2020). In a loss, k2 has KL's gradient, k3 that of the reverse
    kl_ratio: bool = False  # π_θ/π_sampler in front of k1 or k3: then value and gradient are exact (2512.02556 eq. 7)
    turn_credit: float = 0.0  # ω: weight of an advantage among turns that began in the same database state (2505.10978)
    refill: int = 0  # tasks a step may draw in place of those that teach nothing (Dynamic Sampling: DAPO §3.2)
    grad_clip: float = 1.0
    max_skipped: int = 5  # updates in a row whose loss or gradient is not finite, before the run stops
    temperature: float = 1.0  # of the agent, in training and in evaluation
    user_temperature: float = 0.2
    skip_equal: bool = True  # leave out groups whose rewards are all equal: only the KL term could move them
    overlong: str = "mask"  # what cut conversations teach: "mask" nothing (DAPO §3.4), "train" reward 0

    tool_faults: float = 0.0  # probability that a tool call times out or fails, in training and in evaluation
    max_turns: int = 24
    max_errors: int = 0  # tool calls that may fail in one conversation, of both sides; 0: any number
    max_new: int = 48  # tokens a turn, agent
    user_max_new: int = 40
    max_len: int = 384  # tokens of the agent's context
    user_max_len: int = 384  # tokens of the user's context
    slots: int = 160  # conversations at once
    micro_tokens: int = 1024  # tokens computed in one forward and backward
    share_prefix: bool = False  # compute once what a batch's episodes begin with in common; too dear for a tiny model

    eval_every: int = 10
    eval_tasks: int = 100  # during training
    test_tasks: int = 250  # before and after
    trials: int = 4  # conversations a task, after

    def __post_init__(self):
        object.__setattr__(self, "domain", absolute(self.domain))  # a resumed run finds it from anywhere


GPU = dict(  # noqa: C408 (reads like Config)
    # not run on a GPU yet: what is in here comes from the paper and from `plan`'s arithmetic
    device="cuda", dtype="bf16", prompts=True, sft_steps=0, steps=100, tasks=16, group_size=8, lr=1e-6, warmup=5, kl=0.001,
    clip_high=0.2, minibatches=1, temperature=1.0, user_temperature=0.7, max_turns=30, max_new=512, user_max_new=256,
    max_len=8192, user_max_len=4096, slots=24, micro_tokens=16384, share_prefix=True, checkpointing=True, eval_every=20,
    eval_tasks=50,
)  # fmt: skip


PRESETS = {
    "tiny": Config(),
    "smol": Config(
        preset="smol", model="smollm2", dtype="bf16", lora_rank=16, sft_steps=80, sft_talks=6, sft_lr_rest=4e-4, steps=8,
        tasks=2, lr=2e-5, kl=0.001, minibatches=1, max_new=80, user_max_new=60, max_len=640, user_max_len=512, slots=32,
        micro_tokens=2560, share_prefix=True, eval_every=0, eval_tasks=0, test_tasks=24, trials=1, save_seconds=120,
    ),
    "qwen3-0.6b": Config(preset="qwen3-0.6b", model="Qwen/Qwen3-0.6B", **GPU),
    "qwen3-4b": Config(preset="qwen3-4b", model="Qwen/Qwen3-4B", lora_rank=32, **GPU),
    # The paper's own settings (2508.18669): 32 tasks of 8, lr 1e-6, KL 0.001, 30 turns of 1,024 tokens, context 32k.
    "paper-8b": Config(
        preset="paper-8b", model="Qwen/Qwen3-8B", lora_rank=32,
        **GPU | {"tasks": 32, "max_turns": 30, "max_new": 1024, "max_len": 32768, "user_max_len": 8192, "slots": 10},
    ),
}  # fmt: skip


def fitted(cfg: Config, domain: str) -> Config:
    """A preset's values for a domain. Without demonstrations nothing can be learned by heart: policy and tools are shown."""
    kind = find(domain)
    untaught = {} if kind.demonstrator else {"sft_steps": 0, "prompts": True}
    try:
        return dataclasses.replace(cfg, domain=domain, **untaught | kind.sizes(cfg))
    except TypeError as error:  # a value that Config has not got
        raise UserError(f"--domain {domain}: its sizes() don't fit Config ({error})") from None


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KEYS = 4  # times micro_tokens: so many keys a micro-batch has at most; of a shared prefix each row has its own copy
AT_ONCE = 10_000_000  # up to so many fp32 parameters a CPU trains on a micro-batch for each of its threads


def check_config(cfg: Config) -> None:
    """Refuses values that can't work. Raises UserError with the value and the remedy."""
    if cfg.group_size < 2:
        raise UserError(f"--group-size {cfg.group_size}: a group's advantage compares its members; give 2 or more")
    check_domain(cfg)
    if cfg.dtype not in DTYPES:
        raise UserError(f"--dtype {cfg.dtype}: choose {' or '.join(DTYPES)}")
    check_device(cfg.device)
    if not 0 < cfg.temperature < math.inf:
        raise UserError(
            f"--temperature {cfg.temperature}: training needs exploration; give a number above 0, such as 1"
        )
    positive = (
        "tasks layers width heads kv_heads mlp sft_talks sft_lr sft_lr_rest lr max_turns max_new user_max_new max_len "
        "user_max_len slots threads micro_tokens minibatches trials grad_clip epochs max_skipped"
    )
    for name in positive.split():
        if not 0 < getattr(cfg, name) < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: give a number above 0")
    at_least_0 = (
        "lora_rank steps sft_steps minutes save_seconds kl user_temperature eval_tasks test_tasks eval_every seed warmup "
        "clip_high turn_credit refill user_budget max_errors"
    )
    for name in at_least_0.split():
        if not 0 <= getattr(cfg, name) < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: give 0 or more")
    for name in "two forbidden changed slip cooldown sft_cooldown clip_low tool_faults".split():
        if not 0 <= getattr(cfg, name) <= 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(cfg, name)}: give a share between 0 and 1")
    if cfg.width % cfg.heads or cfg.heads % cfg.kv_heads or cfg.width // cfg.heads % 2:
        raise UserError(
            f"--width {cfg.width} --heads {cfg.heads} --kv-heads {cfg.kv_heads}: width must be a multiple of heads with an "
            "even quotient, and heads a multiple of kv-heads"
        )
    if cfg.tasks < cfg.minibatches:
        raise UserError(f"--minibatches {cfg.minibatches}: at most --tasks ({cfg.tasks})")
    check_objective(cfg)


def check_device(device: str) -> None:
    if device != "cpu" and not (device.partition(":")[0] == "cuda" and torch.cuda.is_available()):
        raise UserError(f"--device {device}: there is none on this machine; choose cpu, or see --preset smol")


def check_domain(cfg: Config) -> None:
    """Refuses what a domain hasn't got. Raises UserError."""
    kind = find(cfg.domain)
    check_user(cfg)
    if cfg.sft_steps and not kind.demonstrator:
        raise UserError(f"--sft-steps {cfg.sft_steps}: {cfg.domain} has no demonstrations to start from; give 0")
    if not cfg.model and not kind.demonstrator:
        raise UserError(f"--domain {cfg.domain}: it wants a model that can read; give --model or a preset such as smol")
    if cfg.paper_split and not kind.paper_split:
        raise UserError(f"--paper-split: the paper trained on retail and airline, not on {cfg.domain}; leave it out")
    if cfg.paper_split and cfg.task_set == "tau1":
        raise UserError(
            "--paper-split --task-set tau1: the split trains on tau1 anyway; --task-set is what it tests on"
        )


def check_user(cfg: Config) -> None:
    """Refuses users that there are none of. Raises UserError."""
    missing = {"scripted", "stranger"} - set(find(cfg.domain).scripts)
    if wanted := parse_pool(cfg.user).keys() & missing:
        others = ", ".join(kind for kind in KINDS if kind not in missing)
        none = f"{cfg.domain} has no script for a {min(wanted)} user"
        raise UserError(f"--user {cfg.user}: {none}; choose among {others}")


CHOICES = {
    "advantage": ("grpo", "dr_grpo", "rloo"),
    "ratio": ("token", "sequence"),
    "mean": ("token", "sequence", "constant"),
    "kl_estimator": ("k1", "k2", "k3"),
    "overlong": ("mask", "train"),
    "optimizer": ("adamw", "adamw8bit"),
}


def check_objective(cfg: Config) -> None:
    """Refuses an unknown choice, and combinations that make no sense, with the reason. Raises UserError."""
    for name, choices in CHOICES.items():
        if getattr(cfg, name) not in choices:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} {getattr(cfg, name)}: choose {', '.join(choices[:-1])} or {choices[-1]}")
    if cfg.optimizer == "adamw8bit" and importlib.util.find_spec("torchao") is None:
        raise UserError("--optimizer adamw8bit: the package torchao is not installed; install it, or choose adamw")
    if cfg.dual_clip and not 1 < cfg.dual_clip < math.inf:
        raise UserError(f"--dual-clip {cfg.dual_clip}: at 1 or less nothing bad is unlearned; give 3, or 0 for off")
    if cfg.tis and not 1 <= cfg.tis < math.inf:
        raise UserError(f"--tis {cfg.tis}: below 1 it would cut tokens that agree; give 2, or 0 for off")
    if cfg.kl and cfg.kl_estimator == "k1" and not cfg.kl_ratio:
        raise UserError("--kl-estimator k1: as a loss its expected gradient is 0; add --kl-ratio, or choose k2 or k3")
    if cfg.kl_ratio and cfg.kl_estimator == "k2":
        raise UserError("--kl-ratio --kl-estimator k2: k2's gradient is right without a ratio; leave one of them out")
    if cfg.kl_ratio and not cfg.kl:
        raise UserError("--kl-ratio --kl 0: there is no KL term to weigh; give --kl, or leave --kl-ratio out")
    if cfg.turn_credit and cfg.ratio == "sequence":
        raise UserError(
            f"--turn-credit {cfg.turn_credit}: --ratio sequence would spread it over all turns; choose token"
        )
    if cfg.refill and not cfg.skip_equal:
        raise UserError(f"--refill {cfg.refill}: --no-skip-equal leaves no group to refill; leave one of them out")


def read_config(folder: Path) -> Config:
    """The config of a run. Errors: missing or cut file, fields of another version."""
    try:
        cfg = from_json(Config, folder / "config.json")
        if cfg.threads < 1 or cfg.dtype not in DTYPES:  # what every command takes from it; `train` checks the rest
            raise ValueError(f"threads {cfg.threads}, dtype {cfg.dtype}")
        return cfg
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{folder} is not a run folder that this version wrote ({error}); give one such as runs/tiny-seed0"
        ) from None


# What a resumed run may change; anything else would make it another run. A user's URL too: it may have moved, and is shown
# in no message.
MAY_CHANGE = {
    "data",
    "user_url",
    "user_key_env",
    "user_budget",
    "resume",
    "run",
    "steps",
    "minutes",
    "threads",
    "slots",
    "micro_tokens",
    "share_prefix",
    "eval_every",
    "eval_tasks",
    "test_tasks",
    "trials",
    "save_seconds",
}


def check_resume(before: Config, after: Config) -> None:
    """Refuses flags that would make a resumed run another run."""
    for f in dataclasses.fields(Config):
        old, new = getattr(before, f.name), getattr(after, f.name)
        if old != new and f.name not in MAY_CHANGE:
            flag = f"--{f.name.replace('_', '-')}"
            raise UserError(
                f"{flag} {new}: the run to resume was made with {old}; leave the flag out, or start a new run"
            )


def default_config(args: list[str]) -> Config:
    """The values that flags start from: the preset's, or those of the run that is resumed."""

    def value(flag: str) -> str:
        for i, arg in enumerate(args):
            if arg == flag:
                return args[i + 1] if i + 1 < len(args) else ""
            if arg.startswith(flag + "="):
                return arg.split("=", 1)[1]
        return ""

    if resume := value("--resume"):
        checkpoint_of(Path(resume))
        return read_config(Path(resume))
    if (preset := value("--preset") or "tiny") not in PRESETS:
        raise UserError(f"--preset {preset}: choose one of {', '.join(PRESETS)}")
    return fitted(PRESETS[preset], value("--domain") or "shop")


def parse(options, args: list[str], name: str, about: str | None = None):
    """Flags → a dataclass. about: what --help begins with; by default the dataclass's own words. An error is one line and
    exit 2 (tyro's own explanation, shortened).
    """
    import tyro

    error = io.StringIO()
    try:
        with contextlib.redirect_stderr(error):
            return tyro.cli(type(options), default=options, args=args, prog=f"mua_rl.py {name}", description=about)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        text = " ".join(re.sub(r"[╭╮╰╯│─]|[-+|]{3,}", " ", error.getvalue()).split())
        text = re.sub(
            r"^(Unrecognized options|Missing argument|Value error) | (Argument helptext:.* )?For full helptext,.*",
            "",
            text,
        )
        raise UserError(f"{text}; see: python mua_rl.py {name} --help") from None
