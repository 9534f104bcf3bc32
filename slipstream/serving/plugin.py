"""Entry point of the `vllm.general_plugins` group: vLLM calls `register` in each of its processes."""

import os

from slipstream.serving.auth import TOKEN_FILE_ENV, read_token

BACKEND = "slipstream"


def register() -> None:
    """Add the weight transfer backend "slipstream" to vLLM's registry; callable any number of times.

    Raises TokenError in a server that names a token file which is missing or empty: it must not start open.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "slipstream.serving.engine", "SlipstreamEngine")
    if TOKEN_FILE_ENV in os.environ:
        read_token(os.environ[TOKEN_FILE_ENV])
