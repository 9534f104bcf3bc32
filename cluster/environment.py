"""The environment that a job inherits: what its processes need, without secrets and without the flow's own settings."""

import re
import site
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|AUTH|PRIVATE", re.IGNORECASE)
NOT_SECRET = frozenset({"SSH_AUTH_SOCK", "TOKENIZERS_PARALLELISM", "XAUTHORITY"})
# A job of one run must not believe that it is part of another flow, another job, or another torchrun.
FOREIGN = re.compile(
    r"^(PREFECT_|SUBMITIT_|SLURM_|TORCHELASTIC_)|^(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$"
)


def job_environment(environment: Mapping[str, str], keep: Iterable[str] = ()) -> dict[str, str]:
    """`environment` without variables that look like secrets (except `keep`) and those of foreign launchers."""
    kept = set(keep)

    def wanted(name: str) -> bool:
        if name in kept:
            return True
        return not FOREIGN.search(name) and (name in NOT_SECRET or not SECRET.search(name))

    return {name: value for name, value in environment.items() if wanted(name)}


def code_root() -> str | None:
    """The folder that a job's PYTHONPATH must name so that it runs this very code; None where it is installed."""
    return None if str(ROOT) in {str(Path(path).resolve()) for path in site.getsitepackages()} else str(ROOT)


def local_devices(gpus_of: Mapping[str, int], visible: str | None) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES per role: disjoint, in the order of `gpus_of`, out of `visible` (the variable's value here).

    Raises ValueError where `visible` names fewer devices than the roles need.
    """
    total = sum(gpus_of.values())
    devices = [d for d in visible.split(",") if d.strip()] if visible is not None else [str(i) for i in range(total)]
    if total > len(devices):
        need = " + ".join(f"{role} {count}" for role, count in gpus_of.items())
        raise ValueError(f"the roles need {need} GPUs, but CUDA_VISIBLE_DEVICES = {visible!r} has {len(devices)}")
    assigned, start = {}, 0
    for role, count in gpus_of.items():
        assigned[role] = ",".join(devices[start : start + count])
        start += count
    return assigned
