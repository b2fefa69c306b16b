"""τ²-bench's domains and users as the command line reaches them: settings, splits, baselines, training, evaluation, keys.

Needs τ²-bench's data in ../shared/tau2; what needs none runs without.
"""

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch
from test_api_user import KEY, Server, said, surroundings  # noqa: F401  (a fixture)
from test_chat import CHAT
from test_rollout import call_ids

import commands
import config
import evaluation
import grpo
import mua_rl
import report
import rollout
import sft
from chat import CHATML_TEMPLATE, Call, Chat, UserError, turn_text
from evaluation import Stage, make_domain, null_baselines
from model import Decoder, ModelConfig
from model_files import load_chat, save_chat, save_model
from new_model import train_tokenizer
from tools import Domain
from user_sim import MAX_HOPS, STOP, STOPS

TAU2 = Path(__file__).parents[2] / "shared/tau2"
needs_data = pytest.mark.skipif(not TAU2.is_dir(), reason="needs ../shared/tau2")


@functools.cache
def domain_of(name, task_set="head", paper_split=False):
    cfg = config.Config(domain=name, data=str(TAU2), task_set=task_set, paper_split=paper_split)
    return make_domain(cfg)


def options(text):
    args = text.split()
    return config.parse(config.default_config(args), args, "train")


def refused(args, capsys):
    """Runs a command in this process; it must exit with 2 and say one line, which is returned."""
    with pytest.raises(SystemExit) as stop:
        mua_rl.command_line([str(a) for a in args])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mua_rl:")]
    assert stop.value.code == 2 and len(lines) == 1
    return lines[0]


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("preset", ["smol", "qwen3-0.6b", "qwen3-4b", "paper-8b"])
def test_a_domain_fits_the_preset_and_flags_come_last(preset):
    cfg = options(f"--preset {preset} --domain retail --max-turns 7")
    assert (cfg.domain, cfg.sft_steps, cfg.eval_every, cfg.max_turns, cfg.max_errors) == ("retail", 0, 0, 7, 10)
    assert cfg.max_len >= 8192 and cfg.prompts and cfg.model == config.PRESETS[preset].model
    assert options(f"--preset {preset}") == config.PRESETS[preset]


REFUSED = {
    "--domain mars": "--domain mars",
    "--domain retail": "--model",  # from scratch
    "--preset smol --domain retail --sft-steps 5": "no demonstrations",
    "--preset smol --domain retail --eval-every 1 --eval-tasks 2 --data DATA": "no validation split",
    "--preset smol --domain retail --user scripted": "no script",
    "--preset smol --domain retail --user lm=1,stranger=2": "no script",
    "--preset smol --domain telecom --paper-split": "not on telecom",
    "--preset smol --domain retail --paper-split --task-set tau1": "tests on",
    "--preset smol --paper-split": "not on shop",
    "--preset smol --domain retail --task-set tau1 --test-tasks 1 --data DATA": "--split test",
    "--preset smol --domain retail --user-key-env sk-abcdefgh --user openai:m --data DATA": "environment variable",
    "--preset smol --domain retail --user-url http://k@h/ --user openai:m --data DATA": "without a key",
    "--preset smol --domain retail --data nowhere": "git clone --depth 1 https://github.com/sierra-research/tau2-bench",
    "--preset smol --domain retail": "git clone",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_makes_no_sense_is_refused_in_one_line(line, tmp_path, capsys, monkeypatch):
    if "DATA" in line and not TAU2.is_dir():
        pytest.skip("needs ../shared/tau2")
    monkeypatch.delenv("TAU2_DATA_DIR", raising=False)
    args = line.replace("DATA", str(TAU2)).split()
    said = refused(["train", *args, "--run", tmp_path / "run"], capsys)
    assert REFUSED[line] in said and "sk-abc" not in said and "k@h" not in said
    assert not (tmp_path / "run").exists()


def test_the_cold_start_alone_is_refused(capsys):
    assert "no demonstrations" in refused(["sft", "--preset", "smol", "--domain", "airline"], capsys)


# ---------------------------------------------------------------- splits, baselines


@needs_data
@pytest.mark.parametrize("name", ["retail", "airline", "telecom"])
def test_default_splits_never_train_on_what_they_test(name):
    domain = domain_of(name)
    ids = {split: {domain.task(split, 5, i).id for i in range(400)} for split in ("train", "test")}
    assert ids["train"] and ids["test"] and not ids["train"] & ids["test"]


@needs_data
def test_the_papers_split_trains_on_tau_bench_1_tests_on_the_head_and_says_what_they_share(monkeypatch):
    domain = domain_of("retail", paper_split=True)
    train, test = domain.task("train", 0, 0), domain.task("test", 0, 0)
    old = json.loads((TAU2 / "tau1_retail_tasks.json").read_text())
    head = json.loads((TAU2 / "retail/tasks.json").read_text())
    assert domain.instruction(train).count(old[int(train.id)]["instruction"]) == 1
    assert len(domain.ids("train")) == len(old) == 115 and len(domain.ids("test")) == 40
    assert domain.world(train).domain is domain.trained and domain.world(test).domain is domain.tested
    # how many share their writes, counted from the files
    schema = json.loads((TAU2 / "retail/tools_schema.json").read_text())
    writes = {tool["name"] for tool in schema if tool["mutates_state"]}
    key = lambda actions: json.dumps(
        [[a["name"], a["arguments"]] for a in actions if a["name"] in writes], sort_keys=True
    )
    seen = {key(t["actions"]) for t in old} - {"[]"}
    tests = set(json.loads((TAU2 / "retail/split_tasks.json").read_text())["test"])
    same = sum(key(t["evaluation_criteria"]["actions"]) in seen for t in head if t["id"] in tests)
    assert domain.overlap() == same > 20
    job = type("Job", (), {"domain": domain, "state": mua_rl.State(results={"null": {"do_nothing": 0.0}})})
    job.cfg = config.Config(run="here", threads=1)
    [notice] = mua_rl.notices(job)
    assert f"{same} of the 40" in notice and "overlap with the test tasks" in notice


@needs_data
@pytest.mark.parametrize(  # as measured with upstream's program (the natural-language component left out)
    "name, task_set, paid",
    [("retail", "head", 11 / 114), ("retail", "v0.2.0", 7 / 114), ("airline", "head", 0.46), ("airline", "v0.2.0", 0.38),
     ("telecom", "head", 0.0)],
)  # fmt: skip
def test_doing_nothing_pays_what_it_pays_upstream(name, task_set, paid):
    assert null_baselines(domain_of(name, task_set), 3, split="base")["do_nothing"] == pytest.approx(paid)


# ---------------------------------------------------------------- conversations with a forced sampler


def stage_of(name, **changes):
    cfg = dataclasses.replace(config.fitted(config.PRESETS["smol"], name), max_len=10**6, user_max_len=10**6, **changes)
    return Stage(cfg, domain_of(name), CHAT, {})


def played(stage, task, lines, user="lm"):
    """One conversation in which each speaker samples its `lines` in turn; None: its context is full. → trajectory."""
    lines = {who: iter(texts) for who, texts in lines.items()}
    talk = stage.conversation(task, user, "rl", 0, 0, 0)
    try:
        request = next(talk)
        while True:
            text = next(lines[request.speaker])
            request.ctx.full = text is None
            for token in (
                [] if text is None else [*(call_ids(text) if "<tool_call>" in text else CHAT.encode(text)), CHAT.end_id]
            ):
                request.ctx.sampled(token, -0.5)
            request = talk.send(None)
    except StopIteration as stop:
        return stop.value


def call(name, text="", **arguments):
    return turn_text([Call(name, arguments)], text)


def view_of(t):
    return CHAT.decode(t.ids)


@needs_data
def test_telecoms_user_has_a_phone_of_which_the_agent_sees_nothing():
    stage = stage_of("telecom")
    task = next(t for i in range(99) if "airplane" in str(t := stage.domain.task("train", 0, i)).lower())
    lines = {
        "agent": ["Please check your phone.", "And now?", "Fine."],
        "user": [
            "My phone has no signal.",
            call("check_status_bar"),
            call("toggle_airplane_mode", "One moment."),
            "It changed something.",
            f"Thanks. {STOP}",
        ],
    }
    t = played(stage, task, lines)
    assert t.exit == "user_ended" and t.metrics["user_breaches"] == {} and t.reward in (0.0, 1.0)
    roles = [turn["role"] for turn in t.turns]
    assert roles == "user agent user_call user_tool user_call user_tool user agent user".split()
    assert "Airplane Mode is now" in t.turns[5]["text"] and t.turns[6]["text"] == "One moment.\n\nIt changed something."
    for hidden in ("check_status_bar", "toggle_airplane_mode", "Airplane Mode is now"):
        assert hidden not in view_of(t).replace(stage.domain.system, "")
    user_view = CHAT.decode(t.user_ids)
    assert (
        "toggle_airplane_mode" in user_view and "Airplane Mode is now" in user_view and task.scenario[:80] in user_view
    )
    assert stage.domain.policy[:200] not in user_view
    assert (
        t.states[0] != t.states[1] == t.states[1]
    )  # what the user did is part of the state that turns are credited by


@needs_data
def test_a_model_user_that_breaks_its_contract_is_asked_once_more_and_then_has_failed():
    stage = stage_of("telecom")
    task, agent = stage.domain.task("train", 0, 0), ["Hello."]
    bad = [("as_agent", "How can I help you today?"), ("unknown_tool", call("resume_line")), ("empty", "")]
    bad += [("bad_call", "<tool_call>\n{\n</tool_call>"), ("stop_at_once", STOP)]
    for kind, text in bad:
        t = played(stage, task, {"agent": agent, "user": [text, "My data is slow.", f"Bye. {STOP}"]})
        assert t.exit == "user_ended" and t.metrics["user_breaches"] == {kind: 1}, kind
        assert evaluation.fault_of(stage.domain, task, t) == kind
        t = played(stage, task, {"agent": agent, "user": [text, text]})
        assert t.exit == "user_failed" and t.reward is None and kind in t.metrics["user_failure"], kind
    t = played(stage, task, {"agent": agent, "user": ["Hi there", *[call("check_sim_status")] * MAX_HOPS]})
    assert t.exit == "user_failed" and "in a row" in t.metrics["user_failure"]


@needs_data
def test_every_stop_of_the_domain_ends_it_and_only_a_user_can():
    stage = stage_of("retail")
    task = stage.domain.task("train", 0, 0)
    for stop in STOPS:
        t = played(stage, task, {"agent": [f"Bye {stop}"], "user": ["Hello, I'm Kim.", f"yes{stop}"]})
        assert t.exit == "user_ended" and t.metrics["turns"] == 1 and t.turns[-1]["text"] == f"yes{stop}"


@needs_data
@pytest.mark.parametrize("side", ["beside", "said", "neither"])
def test_what_stands_beside_calls_counts_as_told_and_is_not_delivered(side):
    stage = stage_of("airline")
    domain = stage.domain
    task = next(t for i in domain.ids("base") if (t := domain.task_by_id(i)).told)
    fact, look = "; ".join(task.told), functools.partial(call, "list_all_airports")
    first = look(fact if side == "beside" else "")
    lines = {"agent": [first, fact if side == "said" else "Done."], "user": ["I need to fly.", f"ok {STOP}"]}
    t = played(stage, task, lines)
    assert ("not told" in str(t.diff)) == (side == "neither")
    assert (fact in CHAT.decode(t.user_ids)) == (side == "said")


@needs_data
def test_ten_failed_calls_end_a_conversation_as_upstream():
    stage = stage_of("retail", max_turns=30)
    assert stage.cfg.max_errors == 10
    miss = call("get_order_details", order_id="none")
    t = played(stage, stage.domain.task("train", 0, 0), {"agent": [miss] * 12, "user": ["Hello, I'm Kim."]})
    assert t.exit == "too_many_errors" and t.metrics["turns"] == 10 and rollout.EXITS[t.exit] == ("zero", True, True)


@needs_data
@pytest.mark.parametrize("name", ["retail", "airline", "telecom"])
def test_states_of_a_world_are_equal_when_nothing_was_written_and_differ_when_something_was(name):
    domain = domain_of(name)
    seen = 0
    for id in domain.ids("base"):
        task = domain.task_by_id(id)
        world, before = domain.world(task), domain.world(task).state()
        assert world.state() == before
        writes = {t.__name__ for t in (*domain.writes, *domain.user_writes)}
        for action in task.gold:
            world.execute(action.requestor, action.name, action.arguments)
            if action.name not in writes and world.written == {}:
                assert world.state() == before
        wrote = any(commands.models is not None and row != task.db[t].get(k) for (t, k), row in world.written.items())
        assert (world.state() != before) == wrote
        seen += wrote
    assert seen > 20


# ---------------------------------------------------------------- pools


class Words(Domain):
    """A domain of which only the users matter."""

    name, policy, functions, splits, greeting = "words", "", {}, {}, "Hi!"

    def task(self, split, seed, index):
        raise AssertionError

    world = task

    def instruction(self, task):
        return "You want a hat."


def test_a_pool_is_drawn_from_for_each_conversation():
    stage = Stage(dataclasses.replace(config.Config(), seed=3), Words(), CHAT, {})
    drawn = []
    stage.player = lambda task, kind, key: drawn.append(kind) or (_ for _ in ()).throw(StopAsyncIteration)
    for index in range(40):
        for member in range(4):
            with pytest.raises(StopAsyncIteration):
                next(stage.conversation(None, "lm=3,self=1", "rl", 0, index, member))
    assert 0.15 < drawn.count("self") / len(drawn) < 0.35
    groups = [drawn[i : i + 4] for i in range(0, 160, 4)]
    assert any(len(set(g)) == 2 for g in groups)  # members of a group meet different users


def test_each_kind_of_user_speaks_through_its_own_sampler_and_in_its_own_format():
    stage = Stage(
        config.Config(), Words(), CHAT, {}, chats={"frozen:x": (other := Chat(CHAT.tokenizer, CHATML_TEMPLATE))}
    )
    for kind, speaker, chat in (("lm", "user", CHAT), ("self", "self", CHAT), ("frozen:x", "frozen:x", other)):
        player = stage.player(None, kind, (0, 0))
        request = next(player.open())
        assert request.speaker == speaker and player.chat is chat and request.ctx is player.ctx


# ---------------------------------------------------------------- training and evaluation, from the command line


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random model whose tokenizer knows the airline's words."""
    if not TAU2.is_dir():
        pytest.skip("needs ../shared/tau2")
    domain = domain_of("airline")
    texts = [
        domain.system,
        json.dumps(domain.tools),
        *(domain.instruction(domain.task_by_id(i)) for i in domain.ids("base")),
    ]
    chat = Chat(train_tokenizer(texts * 2), CHATML_TEMPLATE)
    shape = ModelConfig(
        model_type="qwen3", vocab_size=chat.vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, qk_norm=True,
        max_position_embeddings=16384,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    save_model(Decoder(shape), folder)
    save_chat(chat, folder)
    return folder


@pytest.fixture
def short_turns(monkeypatch, model):
    """A random model hardly ever ends a turn: here a third of the uniform numbers do. The data is read once for all."""
    end, inner = load_chat(model).end_id, rollout.inverse_cdf

    def ending(logp, u):
        return torch.where(u < 0.3, torch.full_like(u, end, dtype=torch.long), inner(logp, u))

    monkeypatch.setattr(rollout, "inverse_cdf", ending)
    monkeypatch.setattr(report, "curves", lambda run: None)  # two seconds of drawing
    for module in (mua_rl, commands):
        monkeypatch.setattr(module, "make_domain", lambda cfg: domain_of(cfg.domain))


SMALL = "--domain airline --threads 1 --max-turns 3 --max-new 8 --user-max-new 8 --slots 4 --max-len 6000 --user-max-len 3000"
TRAIN = (
    f"{SMALL} --steps 1 --tasks 1 --group-size 2 --test-tasks 0 --dtype fp32 --kl 0.1 --overlong train --no-skip-equal"
)


def train(model, folder, *flags):
    args = ["train", *TRAIN.split(), "--model", str(model), "--data", str(TAU2), "--run", str(folder), *flags]
    mua_rl.main(list(map(str, args)))
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_step_of_training_on_the_airline(model, tmp_path, short_turns, capsys):
    rows = train(model, tmp_path / "run", "--turn-credit", "0.5", "--user", "lm=1,self=1")
    [step] = [r for r in rows if r["phase"] == "rl"]
    assert step["gap_max"] < 1e-4 and sum(step["exits"].values()) == 2
    spoken = capsys.readouterr().err
    assert "keys and values" in spoken and "doing nothing pays" in spoken
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["null"]["do_nothing"] > 0.3 and "careless" not in summary
    assert (tmp_path / "run/report.html").stat().st_size > 1000


def test_a_user_behind_an_api_trains_keeps_its_cap_and_leaks_no_key(model, tmp_path, short_turns, capsys, caplog):
    server = Server(said("I want to fly, please.", usage={"total_tokens": 100}))
    run = tmp_path / "run"
    users = ["--user", "openai:m", "--user-url", server.url, "--user-budget", "100000"]
    train(model, run, *users)
    state = json.loads((run / "checkpoint/state.json").read_text())
    asked = len(server.requests)
    assert asked >= 3 and state["user_tokens"] == 100 * asked  # a check, and two openings at least
    assert "flight" in server.requests[-1]["messages"][0]["content"].lower()
    line = refused(["train", "--resume", run, "--steps", "2", "--user-budget", str(100 * asked)], capsys)
    assert "budget" in line and len(server.requests) == asked  # the cap holds over both processes
    server.shutdown()
    everything = [p.read_bytes() for p in run.rglob("*") if p.is_file()]
    assert len(everything) > 8 and not any(KEY.encode() in data for data in everything)
    assert KEY not in line + capsys.readouterr().err + caplog.text and server.keys[0] == f"Bearer {KEY}"


def evaluated(model, out, *flags):
    args = ["eval", model, *SMALL.replace("--threads 1 ", "").replace("--user-max-new 8 ", "").split(), "--data", TAU2]
    mua_rl.main([str(a) for a in (*args, "--n", "3", "--trials", "2", "--out", out, *flags)])
    return json.loads((out / "results.json").read_text())


def test_an_evaluation_that_was_killed_goes_on_to_the_same_result(model, tmp_path, short_turns, monkeypatch, capsys):
    whole = evaluated(model, tmp_path / "whole")
    text = capsys.readouterr().out
    assert "do_nothing" in text and "pass^2" in text and "tokens:" in text
    assert whole["planned"] == 6 and sum(whole["exits"].values()) == 6
    played, died, add = [], [], commands.Records.add

    def dying(self, stage, index, *rest):
        if len(played) == 2 and not died:
            died.append(True)
            with open(self.path, "a") as file:
                file.write('{"half a li')
            raise InterruptedError
        played.append(index)
        add(self, stage, index, *rest)

    monkeypatch.setattr(commands.Records, "add", dying)
    out = tmp_path / "broken"
    with pytest.raises(InterruptedError):
        evaluated(model, out)
    assert len((out / "conversations.jsonl").read_text().splitlines()) == 3
    again = evaluated(model, out)
    assert len(played) == 6  # none twice
    timeless = lambda r: {k: v for k, v in r.items() if k not in ("seconds", "wall_s")}
    assert timeless(again) == timeless(whole)
    assert "temperature" in refused(
        ["eval", model, *SMALL.split()[:2], "--data", TAU2, "--out", out, "--temperature", 0], capsys
    )


def test_tau2_json_holds_the_conversations_and_what_each_check_found(model, tmp_path, short_turns):
    out = tmp_path / "out"
    evaluated(model, out)
    theirs = json.loads((out / "tau2.json").read_text())
    rows = [json.loads(line) for line in (out / "conversations.jsonl").read_text().splitlines()]
    assert len(theirs["simulations"]) == len(rows) == 6 and {t["id"] for t in theirs["tasks"]} == {
        r["task"] for r in rows
    }
    for s in theirs["simulations"]:
        [row] = [r for r in rows if (r["task"], r["member"]) == (s["task_id"], s["trial"])]
        assert (s["reward_info"] or {"reward": None})["reward"] == row["reward"]
        open_calls = []
        for m in s["messages"]:
            open_calls += [c["id"] for c in m.get("tool_calls") or ()]
            if m["role"] == "tool":
                assert m["id"] == open_calls.pop(0)
        texts = [m["content"] for m in s["messages"] if m["role"] == "user"]
        assert texts == [turn["text"] for turn in row["turns"] if turn["role"] == "user"]


@needs_data
def test_a_recorded_reward_is_found_again_in_the_export():
    """Upstream's recorded conversations, as turns of ours: the exported verdict is the recorded one, part by part."""
    from domains import simulations

    seen = 0
    for line in (TAU2 / "vectors/reward_airline.jsonl").read_text().splitlines():
        v = json.loads(line)
        if v["termination_reason"] != "user_stop" or v["task_set"] != "head":
            continue
        turns = []
        for m in v["messages"]:
            calls = [Call(c["name"], c["arguments"]) for c in m.get("tool_calls") or ()]
            role = {"assistant": "agent", "user": "user", "tool": "tool"}[m["role"]]
            turns.append(
                {
                    "role": "call" if calls else role,
                    "text": turn_text(calls, m["content"] or "") if calls else m["content"],
                }
            )
        turns = [t for t in turns if t["text"]]
        row = {"task": v["task_id"], "member": 0, "turns": turns, "exit": "user_ended", "started": 0.0, "seconds": 1.0}
        info = simulations.simulation(domain_of("airline"), row | {"reward": v["expected"]["reward"]}, 0, "hermes")[
            "reward_info"
        ]
        want = v["expected"]
        assert info["db_check"]["db_match"] == want["db_match"] and info["reward"] == want["reward"], v["id"]
        assert [c["action_match"] for c in info["action_checks"]] == want["action_checks"], v["id"]
        assert [c["met"] for c in info["communicate_checks"]] == [c["met"] for c in want["communicate_checks"]]
        seen += 1
    assert seen > 50


# ---------------------------------------------------------------- the cold start's guard


def test_a_cold_start_step_that_is_not_finite_is_skipped_and_its_batch_kept(tmp_path):
    cfg = dataclasses.replace(config.Config(), sft_steps=4)
    shape = ModelConfig(
        model_type="qwen3", vocab_size=CHAT.vocab_size, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=4, tie_word_embeddings=True, qk_norm=True,
    )  # fmt: skip
    policy, guard = Decoder(shape), grpo.Guard(tmp_path / "skipped", 2)
    ctx = CHAT.start(None, None, (0,))
    CHAT.hear(ctx, "Hi")
    CHAT.speak(ctx, "Hello.")
    optimizers = sft.sft_optimizers(policy, cfg)
    assert "skipped_updates" not in sft.sft_step(policy, optimizers, [ctx], cfg, 0, guard)
    norm = policy.model["norm"].weight
    kept, norm.data[0] = policy.head.clone(), float("nan")
    assert sft.sft_step(policy, optimizers, [ctx], cfg, 1, guard)["skipped_updates"] == 1
    assert torch.equal(policy.head, kept) and (tmp_path / "skipped/cold-start1.safetensors").exists()
    with pytest.raises(UserError, match="not finite 2 times"):
        sft.sft_step(policy, optimizers, [ctx], cfg, 2, guard)
