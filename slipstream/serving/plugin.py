"""Entry point of the `vllm.general_plugins` group: vLLM calls `register` in each of its processes."""

import os
import threading
import time

BACKEND = "slipstream"
DIE_WITH_PARENT_ENV = "SLIPSTREAM_DIE_WITH_PARENT"
PARENT_CHECK_S = 1.0


def register() -> None:
    """Add the weight transfer backend "slipstream" to vLLM's registry; callable any number of times.

    In a server that a leader of ours started, also refuse to start without a token, and make vLLM's worker processes
    end when the process that started them was killed.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "slipstream.serving.engine", "SlipstreamEngine")
    if os.environ.get(DIE_WITH_PARENT_ENV) == "1":
        from slipstream.serving.auth import TOKEN_FILE_ENV, read_token

        read_token(os.environ.get(TOKEN_FILE_ENV))
        threading.Thread(target=_exit_when_orphaned, args=(os.getppid(),), daemon=True, name="orphan-watch").start()


def _exit_when_orphaned(parent: int) -> None:
    # not PR_SET_PDEATHSIG: that is tied to the *thread* that forked, and vLLM may fork from one that ends
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)
