"""A rollout loop in a thread of the test, for what it measures; against the scripted generation server or a real one."""

import asyncio
import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

from slipstream.metrics.window import Window
from slipstream.rollout.loop import AsyncRolloutLoop
from slipstream.rollout.setup import LoopSetup
from slipstream.rollout.types import EndOfData, EvalResult, GroupResult, Rollout
from slipstream.trainer_section import TrainerSection
from tests.generation_server import GenerationServer

DEADLINE_S = 60.0
EOS = 9


class Tokenizer:
    """One token per character."""

    def apply_chat_template(self, prompt: Any, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in ">" + prompt[-1]["content"]]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(i) for i in ids if i != EOS)


class FrequentReports(AsyncRolloutLoop):
    """Reports and polls many times a second."""

    server_poll_s = 0.05
    report_s = 0.05


class TwoTurns(FrequentReports):
    """The second turn renders the first anew."""

    async def generate_one(self, prompt: Any, tools: Any, group_id: int = 0) -> Rollout:
        first = await self.generate_one_turn(self.render(prompt))
        second = await self.generate_one_turn([*first.prompt_ids, ord("?"), *first.output_ids])
        return Rollout([], [*first.output_ids, *second.output_ids], [first, second])


class Running:
    """A server that runs already."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model

    async def __aenter__(self) -> "Running":
        return self

    async def __aexit__(self, *_: object) -> None:
        """Others use it too."""


def length_reward(completion_ids: Any, **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


class Double:
    """The loop, its server and what it measures, as a context.

    `measured` is the window of everything reported so far; `allowance.value` may be raised while it runs.
    """

    def __init__(
        self,
        server: "GenerationServer | Running",
        prompts: int,
        loop_cls: type,
        setup: Any = None,
        tokenizer: Any = None,
        eos_token_ids: Any = (EOS,),
        **config: Any,
    ) -> None:
        self.server = server
        self._tokenizer = tokenizer or Tokenizer()
        self._eos = list(eos_token_ids)
        self.window = Window()
        self.groups: list[GroupResult] = []
        self.ended = False
        self.allowance = SimpleNamespace(value=config.pop("allowance", 10**9))
        self._buffer: Any = queue.Queue()
        self._metrics: Any = queue.Queue()
        self._commands: Any = queue.Queue()
        self.evaluations: list[EvalResult] = []
        self._stop = threading.Event()
        settings = {name: field.default for name, field in TrainerSection.model_fields.items()}
        extra = {"vllm_server_token_file": None, "chat_template_kwargs": None, "num_generations": 3}
        self._config = SimpleNamespace(**{**settings, **extra, **config})
        fields = {"run_id": "run", "attempt": 1, "served_model": "m", "use_generate_route": True, "max_model_len": 64}
        self._setup = LoopSetup(**{**fields, "shuffle": False, "end": prompts, **(setup or {})})
        self._dataset = [{"prompt": [{"role": "user", "content": chr(97 + i % 26)}]} for i in range(prompts)]
        self._loop_cls = loop_cls

    async def __aenter__(self) -> "Double":
        await self.server.__aenter__()
        self._config.vllm_server_base_url = self.server.url
        self.loop = self._loop_cls(
            config=self._config,
            model_name=self.server.model,
            dataset=self._dataset,
            reward_funcs=[length_reward],
            processing_class=self._tokenizer,
            eos_token_ids=self._eos,
            rollout_buffer=self._buffer,
            model_version_value=SimpleNamespace(value=0),
            token_allowance=self.allowance,
            heartbeat_value=SimpleNamespace(value=0.0),
            failed_event=threading.Event(),
            exception_info_queue=queue.Queue(),
            metrics_queue=self._metrics,
            setup=self._setup,
            trainer_waits=SimpleNamespace(value=0),
            stop_event=self._stop,
            commands=self._commands,
        )
        self._running = asyncio.create_task(asyncio.to_thread(self.loop.run))
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._stop.set()
        try:
            await asyncio.wait_for(asyncio.shield(self._running), DEADLINE_S)
        finally:
            await self.server.__aexit__()

    def ask(self, kind: str, argument: int) -> None:
        """Send the loop a command."""
        self._commands.put((kind, argument))

    def collect(self) -> None:
        """Take in what was handed over and reported by now."""
        while not self._buffer.empty():
            message = self._buffer.get()
            if isinstance(message, GroupResult):
                self.groups.append(message)
                self.window.add_all(message.observations)
            if isinstance(message, EvalResult):
                self.evaluations.append(message)
            if isinstance(message, EndOfData):
                self.ended = True
                self.window.add_all(message.observations)
        while not self._metrics.empty():
            self.window.add_all(self._metrics.get())

    async def until(self, condition: Any, what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while True:
            self.collect()
            if condition():
                return
            if self._running.done():
                self._running.result()
            assert time.monotonic() < end, f"not within {DEADLINE_S:g} s: {what}"
            await asyncio.sleep(0.002)
