"""The rollout loop by itself, against a scripted generation server; shared values and queues are plain objects."""

import asyncio
import queue
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest

from slipstream.rollout.loop import AsyncRolloutLoop
from slipstream.rollout.setup import LoopSetup
from slipstream.rollout.types import EndOfData, GroupResult
from slipstream.trainer_section import TrainerSection
from tests.generation_server import Answer, GenerationServer

DEADLINE_S = 30.0
LABEL = "run/a1/0"
EOS = 9


class CharTokenizer:
    """One token per character; the chat template puts `>` before the last message's text."""

    def apply_chat_template(self, prompt, *, add_generation_prompt, tokenize, return_dict, **kwargs):
        assert add_generation_prompt
        assert tokenize
        return {"input_ids": [ord(c) for c in ">" + prompt[-1]["content"]]}

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(i) for i in ids if i != EOS)


def rows(*texts):
    return [{"prompt": [{"role": "user", "content": text}], "gold": text.upper()} for text in texts]


def text_of(body):
    return "".join(chr(i) for i in body["token_ids"])[1:]


def counting(body, index, label=LABEL):
    """Answer k of a group is k+1 letters and EOS: the rewards of a group differ."""
    ids = [ord("a")] * (index + 1) + [EOS]
    return Answer(ids, [(label, 0, len(ids))])


def equal(body, index):
    return Answer([ord("a"), EOS], [(LABEL, 0, 2)])


def by_seed(body, index):
    """For groups of single requests: some length that the seed decides."""
    return counting(body, body["sampling_params"]["seed"] % 3)


def length_reward(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


class Harness:
    """Runs a loop in a thread, and its server on the test's event loop."""

    def __init__(
        self,
        dataset,
        script=counting,
        *,
        loop_cls=AsyncRolloutLoop,
        fault=None,
        rewards=(length_reward,),
        setup=None,
        allowance=10**9,
        **config,
    ):
        self.server = GenerationServer(script, fault)
        self.dataset = dataset
        self.loop_cls = loop_cls
        self.rewards = list(rewards)
        self.buffer = queue.Queue()
        self.metrics = queue.Queue()
        self.commands = queue.Queue()
        self.version = SimpleNamespace(value=0)
        self.allowance = SimpleNamespace(value=allowance)
        self.heartbeat = SimpleNamespace(value=0.0)
        self.stop_event = threading.Event()
        defaults = {name: field.default for name, field in TrainerSection.model_fields.items()}
        extra = {
            "vllm_server_token_file": None,
            "chat_template_kwargs": None,
            "num_generations": 3,
            "log_completions": False,
        }
        self.config = SimpleNamespace(**{**defaults, **extra, **config})
        fields = {"run_id": "run", "attempt": 1, "served_model": "m", "use_generate_route": True, "max_model_len": 64}
        self.setup = LoopSetup(**{**fields, "shuffle": False, "end": len(dataset), **(setup or {})})
        self.trainer_waits = SimpleNamespace(value=1)

    async def __aenter__(self):
        await self.server.__aenter__()
        self.config.vllm_server_base_url = self.server.url
        self.loop = self.loop_cls(
            config=self.config,
            model_name="m",
            dataset=self.dataset,
            reward_funcs=self.rewards,
            processing_class=CharTokenizer(),
            eos_token_ids=[EOS],
            rollout_buffer=self.buffer,
            model_version_value=self.version,
            token_allowance=self.allowance,
            heartbeat_value=self.heartbeat,
            failed_event=threading.Event(),
            exception_info_queue=queue.Queue(),
            metrics_queue=self.metrics,
            setup=self.setup,
            trainer_waits=self.trainer_waits,
            stop_event=self.stop_event,
            commands=self.commands,
        )
        self.running = asyncio.create_task(asyncio.to_thread(self.loop.run))
        return self

    async def __aexit__(self, *error):
        self.stop_event.set()
        try:
            await asyncio.wait_for(asyncio.shield(self.running), DEADLINE_S)
        except Exception:
            if error[0] is None:
                raise
        finally:
            await self.server.__aexit__()

    async def until(self, condition, what):
        end = time.monotonic() + DEADLINE_S
        while not (value := condition()):
            if self.running.done():
                self.running.result()
            assert time.monotonic() < end, f"not within {DEADLINE_S:g} s: {what}"
            await asyncio.sleep(0.002)
        return value

    async def message(self):
        await self.until(lambda: not self.buffer.empty(), "a message")
        return self.buffer.get()

    async def results(self, count=None):
        """So many group results, or all up to the end of the data; by number."""
        found = {}
        while count is None or len(found) < count:
            message = await self.message()
            if isinstance(message, EndOfData):
                assert count is None
                assert message.groups == len(found)
                return found
            assert isinstance(message, GroupResult)
            assert message.number not in found, "handed over twice"
            found[message.number] = message
        return found

    async def beats(self, count=3):
        """Let the loop do whatever it would do now."""
        for _ in range(count):
            last = self.heartbeat.value
            await self.until(lambda last=last: self.heartbeat.value != last, "a heartbeat")


def drive(harness, steps):
    async def run():
        async with harness:
            return await asyncio.wait_for(steps(harness), 2 * DEADLINE_S)

    return asyncio.run(run())


def all_results(harness):
    return drive(harness, lambda h: h.results())


def fails(harness, error, match):
    async def run():
        with pytest.raises(error, match=match):
            async with harness:
                await asyncio.wait_for(asyncio.shield(harness.running), DEADLINE_S)

    asyncio.run(run())


class Lifecycle(AsyncRolloutLoop):
    """Notes what it is asked for, and has a state."""

    events: ClassVar[list] = []

    async def setup(self):
        self.events.append("setup")

    async def close(self):
        self.events.append("close")

    def state_dict(self):
        return {"seen": 5}

    def load_state_dict(self, state):
        self.events.append(state)
