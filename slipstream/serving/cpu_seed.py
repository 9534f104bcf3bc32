"""Keep vLLM's CPU worker alive when a seeded request is prefilled in more than one step.

After a step whose sample is thrown away (a partial prefill, or the recomputation after a pause) vLLM's runner moves the
request's random generator back by an offset. CPU generators have no offset and raise, which ends the engine
(seen with vLLM 0.32.0: "CPU Generator does not use offset"). Here such generators are told to ignore the move: the next
draw of that request comes from further on in its stream, which is as random.
"""

from typing import Any

_MARK = "_slipstream_seed_mended"


class _NoOffset:
    """Stands in for a generator for as long as the runner moves offsets."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        pass


def mend() -> None:
    """Wrap the runner's bookkeeping once per process; does nothing where this vLLM has none of that name."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    original = getattr(CPUModelRunner, "_bookkeeping_sync", None)
    if original is None or getattr(original, _MARK, False):
        return

    def bookkeeping(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        discarded = self.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        kept = {i: batch.generators[i] for i in discarded if i in batch.generators}
        batch.generators.update(dict.fromkeys(kept, _NoOffset()))
        try:
            return original(self, *args, **kwargs)
        finally:
            batch.generators.update(kept)

    setattr(bookkeeping, _MARK, True)
    CPUModelRunner._bookkeeping_sync = bookkeeping
