"""Engines of a further server node, without an API server: `vllm serve --headless`, also for vLLM's CPU distribution.

    python -m slipstream.serving.headless --model NAME --headless …

`vllm serve` looks up its own distribution by the name "vllm", which the CPU distribution does not have. Runs in the
environment that has vLLM.
"""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(description="vLLM engines without an API server."))
    arguments = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
    validate_parsed_serve_args(arguments)
    arguments.api_server_count = 0
    run_headless(arguments)


if __name__ == "__main__":
    main()
