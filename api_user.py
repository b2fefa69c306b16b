"""A simulated user behind an OpenAI-compatible endpoint: `Endpoint` says where, `Api` asks it many things at once,
`ApiUser` is the user of one conversation.

    conversation → ApiUser → Api → HTTP, in a thread of its own
        ↑ Wait(future): the scheduler decodes for the others until it is done

Three kinds of trouble are kept apart. The network's is tried again, a bounded number of times; then the user has failed,
and the episode counts for nothing. A broken contract (`breach`) is answered with one reminder; then the same. A
wrong key or address, or a spent budget, stops the run with one line.
Left out: streaming, other APIs, pictures.
"""

import asyncio
import json
import logging
import os
import random
import re
import threading
from collections import Counter
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from chat import Call, Malformed, UserError, parse
from user_sim import REMINDER, STOPS, Answer, Contracted, Turn, Wait

# ---------------------------------------------------------------- an API: many questions at once, and what goes wrong

MAX_WAIT = 120.0  # seconds; a server that asks for a longer pause is not waited for
RETRIED = {408, 409, 429}  # and all from 500 on
FATAL = {401, 402, 404}  # key, funds, address or model: only the person at the keyboard can put that right


class ServiceError(Exception):
    """The endpoint gave no usable answer, however often it was asked. Its text holds no key."""


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible endpoint, and how to ask it. The key isn't here, only the name of the environment variable
    that holds it: what prints or saves this cannot leak it. Errors: UserError.
    """

    model: str
    url: str = "https://api.openai.com/v1"
    key_env: str = "OPENAI_API_KEY"
    temperature: float | None = 0.0  # None: the server's own
    seed: int | None = 300  # each episode derives its own from it; None: none is sent
    max_new: int | None = None  # tokens an answer, thoughts included; None: the server's limit
    timeout: float = 60.0  # seconds that one attempt may take in all
    attempts: int = 5
    at_once: int = 64
    budget: int | None = None  # tokens of the whole run, prompts included; None: no cap

    def __post_init__(self):
        if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#@]*)?", self.url):  # not shown: a key may be in it
            raise UserError(f"a user's URL is like {Endpoint.url}, without a key: that belongs in the environment")
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.key_env):
            raise UserError(f"key_env names an environment variable, like {Endpoint.key_env}; it's no key itself")
        if not self.model:
            raise UserError("the user's endpoint has no model: name one that it serves")
        for name in ("max_new", "timeout", "attempts", "at_once", "budget"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise UserError(f"{name} {value} of the user's endpoint: it must be above 0")


class Failed(NamedTuple):
    """One attempt without an answer. retry: another may help. remedy: where only the person at the keyboard can help, what
    to do; the run stops. after: the Retry-After header.
    """

    why: str
    retry: bool = True
    remedy: str = ""
    after: str | None = None


class Api:
    """Asks one endpoint many things at once, from one event loop in a thread of its own. Close it, or use it in a `with`.

    tokens: used so far, to be handed over by a resumed run; troubles: attempts that failed, by reason.
    """

    def __init__(self, endpoint: Endpoint, tokens: int = 0):
        try:
            import openai
        except ImportError:
            raise UserError("a user behind an API needs the openai client: pip install openai") from None
        self.endpoint, self.tokens, self.troubles = endpoint, tokens, Counter()
        for name in ("openai", "httpx", "httpx2", "httpcore", "httpcore2"):  # what they log below INFO can hold a key
            logging.getLogger(name).setLevel(max(logging.INFO, logging.getLogger(name).level))
        self._openai, self._key = openai, read_key(endpoint)
        self._client = openai.AsyncOpenAI(api_key=self._key or "none", base_url=endpoint.url, max_retries=0)
        self._gate = asyncio.Semaphore(endpoint.at_once)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="user API", daemon=True)
        self._thread.start()

    def ask(self, messages: list[dict], tools: list[dict] | None, seed: int | None) -> Future:
        """A future of the `Answer`; it may be cancelled. It raises ServiceError, and UserError if the run must stop."""
        e = self.endpoint
        options = {"temperature": e.temperature, "seed": seed, "max_completion_tokens": e.max_new, "tools": tools}
        body = {"model": e.model, "messages": messages} | {k: v for k, v in options.items() if v is not None}
        return asyncio.run_coroutine_threadsafe(self._ask(body), self._loop)

    def check(self) -> None:
        """Asks one short question: a wrong address, key or model is found before the run starts. Errors: UserError."""
        try:
            self.ask([{"role": "user", "content": "Say hello."}], None, self.endpoint.seed).result()
        except ServiceError as error:
            raise UserError(f"the user at {self.endpoint.url} does not answer: {error}; check URL and model") from None

    async def _ask(self, body: dict) -> Answer:
        for attempt in range(self.endpoint.attempts):
            found = await self._attempt(body)
            if isinstance(found, Answer):
                return found
            why = scrub(found.why, self._key)
            self.troubles[why.split(":")[0]] += 1
            if found.remedy:
                raise UserError(f"the simulated user stops the run: {why}; {found.remedy}")
            wait = retry_wait(found.after, attempt, datetime.now(UTC))
            if not found.retry or wait is None:
                break
            if attempt + 1 < self.endpoint.attempts:
                await asyncio.sleep(wait)
        raise ServiceError(f"{why} (attempt {attempt + 1} of {self.endpoint.attempts})")

    async def _attempt(self, body: dict) -> Answer | Failed:
        """The client's exceptions end here: they hold the request's headers, and whatever the server echoes."""
        e, openai = self.endpoint, self._openai
        try:
            async with self._gate:
                if e.budget is not None and self.tokens >= e.budget:
                    return Failed(f"{self.tokens} tokens are spent, its budget is {e.budget}", remedy="raise it")
                async with asyncio.timeout(e.timeout):
                    reply = await self._client.chat.completions.with_raw_response.create(**body)
        except (TimeoutError, openai.APITimeoutError):
            return Failed(f"no answer in {e.timeout:g} s")
        except openai.APIStatusError as error:
            code, after = error.status_code, error.response.headers.get("retry-after")
            fatal = code in FATAL or error.code == "insufficient_quota"
            remedy = f"check its URL, its model and the key in {e.key_env}" if fatal else ""
            return Failed(f"HTTP {code}: {error.message}", code in RETRIED or code >= 500, remedy, after)
        except openai.OpenAIError as error:
            return Failed(f"no connection ({type(error.__cause__ or error).__name__})")
        try:
            content = json.loads(hide(json.dumps(json.loads(reply.text)), self._key))
        except (ValueError, RecursionError):
            return Failed("an answer that is not JSON")
        self.tokens += used_tokens(content, body)
        return read_answer(content)

    def close(self) -> None:
        """Drops what is still being asked, and ends the thread."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._drop(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _drop(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def __enter__(self) -> "Api":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def read_key(endpoint: Endpoint) -> str:
    """The key, or "" for a server that wants none. Errors: UserError, which does not show it."""
    key = os.environ.get(endpoint.key_env, "").strip()
    if not key and endpoint.url == Endpoint.url:
        raise UserError(f"{endpoint.key_env} is not set: export it, or name a server that needs no key")
    if not re.fullmatch(r"[!-~]*", key):  # the HTTP client would show it in its complaint
        raise UserError(f"the key in {endpoint.key_env} holds blanks or other characters that no key has: set it again")
    if len(key) >= 8 and key in endpoint.url:
        raise UserError("the user's URL holds the key: leave it out, the environment has it")
    return key


def hide(text: str, key: str) -> str:
    """`text` without the key. Keys shorter than 8 characters are words such as "none", for servers that want no key."""
    return text.replace(key, "[key]") if len(key) >= 8 else text


def scrub(text: str, key: str) -> str:
    """A complaint on one short line, without any word that shares more than 4 characters with the key."""
    parts = {key[i : i + 5] for i in range(len(key) - 4)}
    words = ("[key]" if any(part in word for part in parts) else word for word in text.split())
    return " ".join(words)[:200]


def retry_wait(header: str | None, attempt: int, now: datetime) -> float | None:
    """Seconds until the next attempt, or None: the server asks for more than MAX_WAIT, so give up.

    header: Retry-After, seconds or a date (RFC 9110 §10.2.3). One that isn't there, makes no sense or lies in the past
    leaves it to the back-off, which doubles from ½ s to 8 s, less up to a quarter so that not all come back at once.
    """
    text, seconds = (header or "").strip(), 0.0
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        seconds = float(text)
    else:
        try:
            date = parsedate_to_datetime(text)
            seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now.timestamp()
        except (ValueError, TypeError, OverflowError):
            pass
    if seconds > 0:
        return seconds if seconds <= MAX_WAIT else None
    return 0.5 * 2.0 ** min(attempt, 4) * random.SystemRandom().uniform(0.75, 1.0)


def used_tokens(content: object, body: dict) -> int:
    """Tokens that an answer cost: what the server says, else a guess of 4 characters a token."""
    usage = content.get("usage") if isinstance(content, dict) else None
    total = usage.get("total_tokens") if isinstance(usage, dict) else None
    return total if type(total) is int and total > 0 else (len(json.dumps(body)) + len(json.dumps(content))) // 4


def read_answer(content: object) -> Answer | Failed:
    """The first choice of a chat completion. A 200 answer can be an error, can have no choice or nothing in it."""
    content = content if isinstance(content, dict) else {}
    choices = content.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    message = choice.get("message") if isinstance(choice.get("message"), dict) else {}
    text, calls = message.get("content"), message.get("tool_calls")
    if isinstance(text, list):  # in parts, of which reasoning is not said
        parts = [p.get("text") for p in text if isinstance(p, dict) and p.get("type") == "text"]
        text = "".join(p for p in parts if isinstance(p, str)) or None
    calls = tuple(map(read_call, calls)) if isinstance(calls, list) else ()
    reason = choice.get("finish_reason")
    if reason == "content_filter" or not (isinstance(text, str) or calls):
        return Failed(f"no message in the answer: error {content.get('error')!r:.200}, finish_reason {reason!r:.40}")
    text = re.sub(r"<think>.*?(</think>|$)", "", text or "", flags=re.S).rpartition("</think>")[2].strip()
    return Answer(text.encode("utf-8", "replace").decode(), calls)  # a lone surrogate could not be sent back


def read_call(value: object) -> Call | Malformed:
    """A tool call as the API writes it, read by the rules that hold for the agent's (`chat.parse`)."""
    function = value.get("function") if isinstance(value, dict) else None
    function = function if isinstance(function, dict) else {}
    call = json.dumps({key: function.get(key) for key in ("name", "arguments")}).replace(
        "<", "\\u003c"
    )  # no tags within
    return parse(f"<tool_call>\n{call}\n</tool_call>").calls[0]


# ---------------------------------------------------------------- a user behind an API


class ApiUser(Contracted):
    """A user played by a model behind an `Api`. `messages` is its view, in which the agent is the API's "user"."""

    def __init__(
        self, api: Api, instruction: str, greeting: str, stream: tuple[int, ...], stops: tuple[str, ...] = STOPS
    ):
        super().__init__(instruction)
        self.api, self.greeting, self.stops = api, greeting, stops
        self.messages = [{"role": "system", "content": instruction}]
        seed = api.endpoint.seed  # the members of a group ask the same: with one seed all would hear the same
        self.seed = None if seed is None else random.Random(f"user {seed} {stream}").randrange(2**31)

    def open(self) -> Turn:
        self.messages.append({"role": "user", "content": self.greeting})
        return self.turn(opening=True)

    def reply(self, text: str) -> Turn:
        self.messages.append({"role": "user", "content": text})
        return self.turn()

    def results(self, answer: Answer, texts: list[str]) -> None:
        """Adds an answer to the view, and what its calls gave."""
        message, results = {"role": "assistant", "content": answer.text}, []
        for i, (call, text) in enumerate(zip(answer.calls, texts, strict=True)):
            id, function = (
                f"call_{len(self.messages)}_{i}",
                {"name": call.name, "arguments": json.dumps(call.arguments)},
            )
            message.setdefault("tool_calls", []).append({"id": id, "type": "function", "function": function})
            results.append({"role": "tool", "tool_call_id": id, "content": text})
        self.messages += [message, *results]

    def answer(self, opening: bool) -> Generator[Wait, None, Answer | None]:
        """An answer that keeps the contract, or None. One that breaks it is asked for again, once, with a reminder that
        stays out of the view: a model at temperature 0 would only repeat itself.
        """
        reminder = ""
        for _ in range(2):
            question = [{"role": "system", "content": self.instruction + reminder}, *self.messages[1:]]
            future = self.api.ask(question, self.tools or None, self.seed)
            try:
                yield Wait(future)
                answer = future.result()
            except ServiceError as error:
                self.failure = str(error)
                return None
            finally:
                future.cancel()  # the conversation may have been closed; a finished future does not mind
            if (found := self.breach_in(answer, opening)) is None:
                return answer
            self.breaches[found[0]] += 1
            reminder = "\n\n" + REMINDER.format(found[1])
        self.failure = f"broke its contract twice, at last so: {found[0]}"
        return None
