"""Rendering, token for token, against each family's own chat template applied by `transformers`, over a generated corpus.

The templates are not ours to ship: they are read as data from the package trl, and Qwen3's also from ../shared.
"""

import importlib.util
import json
import random
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import sft
from chat import CHATML_TEMPLATE, Call, Chat, Role, turn_text
from domains import shop
from model_files import load_chat, save_chat

transformers = pytest.importorskip("transformers")

SMOL_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
LLAMA = "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|>".split()
FAMILIES = "chatml smollm2 qwen3 qwen3_shared qwen3_instruct_2507 qwen2_5 llama3_1 llama3_2".split()
# How Llama 3 and Qwen cut text before merging; SmolLM2 does it as GPT-2 did. It matters: line breaks never stick to words.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
THINK = "<think>\n\n</think>\n\n"


def template(family):
    shared = Path(__file__).parents[2] / "shared" / "templates" / "qwen3.jinja"
    if family in ("chatml", "smollm2"):
        return CHATML_TEMPLATE if family == "chatml" else SMOL_TEMPLATE
    if family == "qwen3_shared":
        return shared.read_text(encoding="utf-8") if shared.exists() else pytest.skip("../shared/templates is not here")
    if not (spec := importlib.util.find_spec("trl")):
        pytest.skip("the package trl, whose chat templates are the reference here, is not installed")
    return (Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{family}.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=FAMILIES)
def both(request, tmp_path_factory):
    """The family's Chat, and the same folder opened by transformers."""
    folder, text = tmp_path_factory.mktemp("model"), template(request.param)
    tokenizer = Tokenizer(models.BPE())
    split = (
        pre_tokenizers.Split(Regex(SPLIT), "isolated") if "llama" in request.param or "qwen" in request.param else None
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level]) if split else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text * 2, *WORDS * 3, "\n\n ".join(WORDS), '"}\n'] * 2, trainer)
    llama = "llama" in request.param
    tokenizer.add_special_tokens(LLAMA if llama else CHATML)
    tokenizer.add_tokens([] if llama else TAGS)  # not special, as in Qwen3
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"} if llama else {"eos_token": "<|im_end|>"}
    save_chat(Chat(tokenizer, text, config=config), folder)
    return load_chat(folder), transformers.AutoTokenizer.from_pretrained(folder)


WORDS = [
    "Hello, where is it?",
    "naïve 🪙 ok",
    "  two\n\nlines ",
    '{"a": "b\\n"}',
    "",
    "\n",
    "Tag <b> & 'q'",
    "日本語",
    "7",
]


def words(rng):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(0, 3)))


def conversation(rng, chat):
    """(system, tools, messages) as a model of this family would live them; ends with something to answer."""
    value = lambda: rng.choice([words(rng), rng.randint(-9, 9), 2.5, True, None, [1, words(rng)], {"k": words(rng)}])
    parameters = {"type": "object", "properties": {"key": {"type": "string", "description": words(rng)}}}
    tool = {"name": "look", "description": words(rng), "parameters": parameters}
    tools = [{"type": "function", "function": tool | {"name": f"look{i}"}} for i in range(rng.randint(0, 3))]
    system = rng.choice([None, "Be brief.", words(rng)])
    messages = [{"role": "user", "content": words(rng)}]
    for _ in range(rng.randint(0, 5)):
        if tools and rng.random() < 0.6:
            several = 1 if chat.style == "llama" else rng.randint(1, 3)
            calls = [Call(f"look{i}", {"x": value(), "é": value()}) for i in range(several)]
            said = "" if chat.style == "llama" or not chat.native_tools else rng.choice(["", "One moment."])
            written = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls]
            messages.append({"role": "assistant", "content": said, "tool_calls": written})
            messages += [{"role": "tool", "content": words(rng)} for _ in calls]
        else:
            messages.append({"role": "assistant", "content": words(rng).strip()})
            messages.append({"role": "user", "content": words(rng)})
    return system, tools or None, messages


def ours(chat, system, tools, messages):
    """The conversation as it is lived: heard, spoken and observed in turn."""
    ctx = chat.start(system, tools, (0,))
    results = []
    for message in [*messages, {"role": "end"}]:
        if message["role"] != "tool" and results:
            chat.observe(ctx, results)
            results = []
        if message["role"] == "user":
            chat.hear(ctx, message["content"])
        elif message["role"] == "tool":
            results.append(message["content"])
        elif message["role"] == "assistant":
            calls = [Call(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
            chat.speak(ctx, turn_text(calls, message["content"], chat.style))
    return ctx


def theirs(chat, tokenizer, system, tools, messages, **options):
    """The same as one rendering by transformers. What a template without tools gets instead is written out in `plainly`."""
    if "tools" not in chat.template:
        system, tools, messages = plainly(system, tools, messages)
    opening = [] if system is None else [{"role": "system", "content": system}]
    return tokenizer.apply_chat_template(
        [*opening, *messages], tools=tools, add_generation_prompt=True, enable_thinking=False, date_string="26 Jul 2024",
        return_dict=False, **options,
    )  # fmt: skip


PLAIN = """You can use these tools, one JSON schema a line:
%sTo use a tool, answer with its name and arguments only, like this:
<tool_call>
{"name": "lookup", "arguments": {"key": "value"}}
</tool_call>
The result comes back in <tool_response> tags."""


def plainly(system, tools, messages):
    """Tools, calls and results as ordinary words, for a template that knows only speakers; without any of chat.py's code."""
    said = lambda value: json.dumps(value, ensure_ascii=False)
    if tools:
        told = PLAIN % "".join(said(tool) + "\n" for tool in tools)
        system = f"{system}\n\n{told}" if system else told
    plain = []
    for message, before in zip(messages, [None, *messages], strict=False):
        text = message["content"]
        for c in message.get("tool_calls", []):
            body = said({key: c["function"][key] for key in ("name", "arguments")})
            text += ("\n" if text else "") + f"<tool_call>\n{body}\n</tool_call>"
        if message["role"] != "tool":
            plain.append({"role": message["role"], "content": text})
            continue
        text = f"<tool_response>\n{text}\n</tool_response>"
        if before["role"] == "tool":  # results in a row share one turn
            plain[-1]["content"] += "\n" + text
        else:
            plain.append({"role": "user", "content": text})
    return system, None, plain


def without(ids, block):
    """`ids` without every occurrence of `block`: the one documented difference, hybrid Qwen3's empty think blocks."""
    out = []
    for token in ids:
        out.append(token)
        if block and out[-len(block) :] == block:
            del out[-len(block) :]
    return out


def test_a_lived_conversation_equals_its_rendering(both):
    chat, tokenizer = both
    think = tokenizer(THINK, add_special_tokens=False).input_ids if "<think>" in chat._controls else []
    for seed in range(80):
        talk = conversation(random.Random(seed), chat)
        found, right = ours(chat, *talk).ids, theirs(chat, tokenizer, *talk)
        if chat.template.count("enable_thinking"):
            found, right = without(found, think), without(right, think)
        assert found == right, f"seed {seed}:\n{chat.decode(found)!r}\n{chat.decode(right)!r}"


def test_a_demonstrated_call_is_read_as_a_call(both):
    """What the cold start teaches, in each family's own style, is what `parse` understands."""
    chat, _ = both
    domain, call = shop.Shop(prompts=True), Call("get_order", {"order": "#A1"})
    ctx = sft.agent_view(domain, chat, [("user", "Hi"), ("call", call)])
    assert chat.parse(chat.said(ctx)).calls == (call,)


def test_control_strings_in_any_payload_stay_text(both):
    """Text that holds control strings renders to the same text, and every control token in it is the template's own."""
    chat, tokenizer = both
    controls = set(chat._controls.values())
    for seed in range(40):
        system, tools, messages = conversation(random.Random(seed), chat)
        rng = random.Random(seed)
        forge = lambda text, rng=rng: text + rng.choice(["", *chat._controls, "</s> <|im_end"]) + "!"

        def forged(change, system=system, tools=tools, messages=messages):
            told = [m | {"content": change(m["content"])} if m["role"] in ("user", "tool") else m for m in messages]
            spec = json.loads(json.dumps(tools))
            for tool in spec or []:
                tool["function"]["description"] = change(tool["function"]["description"])
            return None if system is None else change(system), spec, told

        talk = forged(forge)
        ctx = ours(chat, *talk)
        text, right = chat.decode(ctx.ids), theirs(chat, tokenizer, *talk, tokenize=False)
        assert text.replace(THINK, "") == right.replace(THINK, "")
        plain = ours(chat, *forged(lambda text: text + "!"))
        assert [i for i in ctx.ids if i in controls] == [i for i in plain.ids if i in controls]


def test_the_check_at_start_accepts_every_family(both):
    chat, _ = both
    tools = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}]
    for system in (None, "Be brief."):
        chat.check(None, system)
        chat.check(tools, system)


def test_what_is_written_as_a_call_is_read_back(both):
    chat, _ = both
    for seed in range(20):
        rng = random.Random(seed)
        call = Call("look", {"x": rng.choice([words(rng), 3, [None, {"y": words(rng)}]])})
        ctx = chat.start(None, None, (0,))
        chat.hear(ctx, "Hi")
        chat.speak(ctx, turn_text([call], "", chat.style))
        assert chat.parse(chat.said(ctx)).calls == (call,)
        assert ctx.roles[ctx.open_turn :] == [Role.AGENT] * (len(ctx.ids) - ctx.open_turn)


def test_every_published_end_token_ends_a_turn(both, tmp_path):
    """generation_config.json and config.json name ends as an id or a list; ids of ordinary text, or of nothing, are none."""
    chat, _ = both
    names = LLAMA[1:2] + LLAMA[4:6] if "<|eot_id|>" in chat._controls else ["<|im_end|>", "<|endoftext|>"]
    ids = [chat.tokenizer.token_to_id(name) for name in names]
    save_chat(chat, tmp_path)
    for generation, model, ends in [
        ({"eos_token_id": ids}, {}, ids),
        ({}, {"eos_token_id": ids}, ids),
        ({"eos_token_id": ids[0]}, {"eos_token_id": ids[1:]}, ids),
        ({"eos_token_id": None}, {"eos_token_id": ids[1]}, ids[1:2]),
        ({"eos_token_id": [chat.tokenizer.token_to_id("e")]}, {"eos_token_id": chat.vocab_size}, []),
    ]:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        (tmp_path / "config.json").write_text(json.dumps(model))
        assert load_chat(tmp_path).end_ids == {chat.end_id, *ends}
