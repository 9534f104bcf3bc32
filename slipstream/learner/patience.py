"""How long a learner waits for a server that has gone. Pure."""

from slipstream.run_config import RunConfig

MARGIN_S = 300.0


def server_patience_s(config: RunConfig, supervised: bool) -> float:
    """Seconds without a server after which a learner that had one fails.

    By hand, and with a server of somebody else's (`server.url`), that is `trainer.vllm_server_timeout`. Where a supervisor
    starts the server again, its deadlines come first: until it knows of the loss (`recovery.heartbeat_timeout`), until it
    submits the next one (`recovery.backoff_max`), in the queue (`recovery.max_idle_gpu_minutes`, then the learner is told
    to leave) and until that one answers (`server.startup_timeout`).
    """
    own = config.trainer.vllm_server_timeout
    if not supervised or config.server.url:
        return own
    recovery = config.recovery
    found = recovery.heartbeat_timeout + recovery.backoff_max
    return max(own, found + 60 * recovery.max_idle_gpu_minutes + config.server.startup_timeout + MARGIN_S)
