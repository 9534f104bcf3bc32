"""`--dry-run`: the resolved configuration and every command, without starting or writing anything."""

import shlex
import sys
from pathlib import Path

from cluster.backends import backend_of
from cluster.profile import ClusterError
from cluster.submit import describe
from slipstream.config_file import ConfigError, Problem, dump_config
from slipstream.nodes import LOOPBACK, Place
from slipstream.run_config import RunConfig
from slipstream.run_folder import RunFolder
from tasks.prepare import profile_of

PORT = 8000  # stands for the free port that a real run takes
HOST = "NODE0"  # and this for the address of a job's first node


def dry_run(config: RunConfig) -> str:
    """The text that is printed. Raises ConfigError where the profile is wrong."""
    from slipstream.learner.leader import torchrun_command

    profile = profile_of(config)
    try:
        backend_of(profile).check_values(config)
    except ClusterError as error:
        raise ConfigError([Problem("", None, str(error))]) from None
    first = Place(0, config.learner.nodes, HOST if config.learner.nodes > 1 else LOOPBACK, "INCARNATION")
    run = RunFolder(Path(config.storage.root).expanduser() / f"{config.name}-dry-run")
    parts = ["# --- configuration", dump_config(config).strip()]
    one = config.cluster.shape == "one_allocation"
    if one:
        parts += ["", "# --- one allocation: job", describe(profile, run, "allocation", 1, config)]
    if config.server.url:
        parts += ["", f"# --- server: runs already, {config.server.url}"]
    else:
        parts += [] if one else ["", "# --- server: job", describe(profile, run, "server", 1, config)]
        for node in range(config.server.nodes):
            where = f" on node {node}" if config.server.nodes > 1 else ""
            parts += ["", f"# --- server: command of its leader{where}", _server(config, run, node)]
    parts += [] if one else ["", "# --- learner: job", describe(profile, run, "learner", 1, config)]
    parts += ["", "# --- learner: command of its leader", shlex.join(torchrun_command(config, run, 1, first))]
    return "\n".join(parts) + "\n"


def _server(config: RunConfig, run: RunFolder, node: int) -> str:
    from slipstream.serving.command import CommandError, server_command, vllm_python

    try:
        python = vllm_python()
    except CommandError:
        python = f"{Path(sys.prefix).parent}/.venv-vllm/bin/python"
    several = config.server.nodes > 1
    place = Place(node, config.server.nodes, HOST if several else LOOPBACK, "INCARNATION")
    meeting = {"host": HOST, "rpc_port": PORT + 1, "master_port": PORT + 2}
    argv, environment = server_command(config, run, PORT, python, place.host, place, meeting)
    lines = [f"{name}={shlex.quote(value)} \\" for name, value in sorted(environment.items())]
    return "\n".join([*lines, shlex.join(argv)])
