"""What a node of doctor's test job looks at: `python -m cluster.doctor_node FOLDER`, once on each node.

Needs nothing but Python, so that it can say what is missing. FOLDER is on the shared storage: `request.json` says what to
look at, facts go to `facts-<index>.json`.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LEARNER = "import json, torch, slipstream; print(json.dumps({'version': torch.__version__, 'gpus': torch.cuda.device_count()}))"
VLLM = "import json, vllm; print(json.dumps({'version': vllm.__version__}))"
FIND_VLLM = "from slipstream.serving.command import vllm_python; print(vllm_python())"
ADDRESS = "import os; from cluster.node import address; print(address(os.environ.get('SLIPSTREAM_INTERFACE')))"
POLL_S = 0.05


def write(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


def fingerprint(salt: str, value: str) -> str:
    return hashlib.sha256((salt + value).encode()).hexdigest()


def asked(python: str, code: str, timeout_s: float) -> tuple[str, str]:
    """(last line that `python -c code` prints, '') or ('', why it does not)."""
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return "", f"it took longer than {timeout_s:g} s"
    except OSError as error:
        return "", str(error)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or [""]
    return (lines[-1], "") if done.returncode == 0 else ("", lines[-1] or f"exit code {done.returncode}")


def program(python: str, code: str, timeout_s: float) -> dict[str, Any]:
    line, error = asked(python, code, timeout_s)
    return {"error": error} if error else dict(json.loads(line))


def vllm(timeout_s: float) -> dict[str, Any]:
    python, error = asked(sys.executable, FIND_VLLM, timeout_s)
    return {"error": error} if error else program(python, VLLM, timeout_s)


def free_ports(ports: str) -> int:
    """How many of `first-last` nobody listens on."""
    if not ports:
        return 0
    first, last = map(int, ports.split("-"))
    free = 0
    for port in range(first, last + 1):
        with socket.socket() as one:
            try:
                one.bind(("", port))
                free += 1
            except OSError:
                pass
    return free


def scratch() -> dict[str, Any]:
    path = os.environ.get("TMPDIR") or "/tmp"
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"slipstream")
        return {"path": path, "free_gb": shutil.disk_usage(path).free / 1e9}
    except OSError as error:
        return {"path": path, "error": error.strerror or str(error), "free_gb": 0.0}


def meet(folder: Path, me: str, others: list[str], patience_s: float) -> dict[str, float | None]:
    """Seconds until each of `others` has answered that it sees a file of `me`, there and back; None: not within that."""
    begun = time.monotonic()
    write(folder / f"hello-{me}", {})
    seen: dict[str, float | None] = dict.fromkeys(others)
    answered: set[str] = set()
    while time.monotonic() < begun + patience_s and (None in seen.values() or answered != set(others)):
        os.listdir(folder)  # a directory's cached content is asked for again
        answer(folder, me, others, answered)
        for other in others:
            if seen[other] is None and (folder / f"seen-{me}-by-{other}").exists():
                seen[other] = time.monotonic() - begun
        time.sleep(POLL_S)
    return seen


def answer(folder: Path, me: str, others: list[str], answered: set[str]) -> None:
    """Say of each of `others` whose file is seen that it is."""
    for other in others:
        if other not in answered and (folder / f"hello-{other}").exists():
            answered.add(other)
            write(folder / f"seen-{other}-by-{me}", {})


def bound_gpus() -> int:
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len([one for one in devices.split(",") if one.strip()]) if devices else 0


def facts(folder: Path, request: dict[str, Any], umask: int) -> dict[str, Any]:
    index, nodes = int(os.environ.get("SLURM_NODEID", "0")), int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
    secret, salt = re.compile(request["secret"], re.IGNORECASE), request["salt"]
    marks = {name: fingerprint(salt, value) for name, value in os.environ.items() if secret.search(name)}
    peers = [str(one) for one in range(nodes) if one != index]
    seen = meet(folder, str(index), [*peers, "here"], request["patience_s"]) if request["meet"] else {}
    with contextlib.suppress(FileNotFoundError):
        os.environ.update(json.loads((folder / "environment.json").read_text()))
    own, error = asked(sys.executable, ADDRESS, request["import_s"])
    return {
        "host": socket.gethostname(),
        "python": sys.executable,
        "version": ".".join(map(str, sys.version_info[:3])),
        "umask": umask,
        "secrets": marks,
        "seen_s": {("here" if name == "here" else f"node {name}"): value for name, value in seen.items()},
        "address": {"error": error} if error else {"address": own},
        "ports": {"free": free_ports(os.environ.get("SLIPSTREAM_PORTS", ""))},
        "scratch": scratch(),
        "bound": bound_gpus(),
        "learner": program(request.get("learner_python") or sys.executable, LEARNER, request["import_s"]),
        "vllm": vllm(request["import_s"]) if request["vllm"] else {},
    }


def main(folder: Path) -> None:
    umask = os.umask(0o077)
    request = json.loads((folder / "request.json").read_text())
    index = os.environ.get("SLURM_NODEID", "0")
    write(folder / f"facts-{index}.json", facts(folder, request, umask))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
