"""Entry point of the `vllm.general_plugins` group: vLLM calls `register` in each of its processes."""

import os
import threading
import time
from pathlib import Path

BACKEND = "slipstream"
DIE_WITH_PARENT_ENV = "SLIPSTREAM_DIE_WITH_PARENT"
ROOT_PID_ENV = "SLIPSTREAM_SERVER_PID"  # the first process of the server; its children inherit it
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
        root = int(os.environ.setdefault(ROOT_PID_ENV, str(os.getpid())))
        watch = threading.Thread(
            target=_exit_when_orphaned, args=(root, os.getppid()), daemon=True, name="orphan-watch"
        )
        watch.start()


def _exit_when_orphaned(root: int, parent: int) -> None:
    # not PR_SET_PDEATHSIG: that is tied to the *thread* that forked, and vLLM may fork from one that ends
    while os.getppid() == parent and _alive(root):
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return not Path("/proc/self/stat").exists()  # no procfs here: the parent's pid alone must do
    return state not in ("Z", "X")
