#!/usr/bin/env bash
# All checks: lint, format, types, layers, device API, sizes, tests. Arguments go to pytest: `bash ci/test.sh -k dock -x`.
# Every step runs even if one before it failed; the exit code is 1 if any failed. pytest comes last.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
# shellcheck source=ci/setup_env.sh
. ci/setup_env.sh || exit 1

failed=()

# step NAME COMMAND...: a line of summary; the output only of a step that failed
step() {
    local name=$1 output started=$SECONDS
    shift
    if output=$("$@" 2>&1 </dev/null); then
        echo "ok      $name  ($((SECONDS - started)) s)  $(tail -n 1 <<<"$output")"
    else
        echo "FAILED  $name  ($((SECONDS - started)) s)"
        echo "$output"
        failed+=("$name")
    fi
}

step lint ruff check .
step format ruff format --check .
step types mypy
step layers python ci/check_layers.py
step device-api python ci/check_device_api.py
step sizes python ci/check_size.py
step coverage python ci/generate_coverage_docs.py --check

# one computing thread a process: the tests start several ranks at a time
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false

# what there is of Megatron in the tests, on the version that MindSpeed patches; not if arguments choose tests
older() {
    local engine=() name
    export PYTHONPATH="$VENV/older${PYTHONPATH:+:$PYTHONPATH}" # of the subshell that `step` runs this in
    grep -qx "megatron-core==$(python -c 'import megatron.core as core; print(core.__version__)')" \
        requirements/npu.txt || return 1
    for name in training_layouts latent_attention experts families checkpoint_layouts engine_state critic_engine \
        shared_critic ring_attention lora lora_state; do
        engine+=("tests/engine/test_$name.py")
    done
    python -m pytest -q -p no:cacheprovider "${engine[@]}" tests/device tests/trainer/test_simulated_npu_run.py \
        "tests/trainer/test_training_run.py::test_layouts_train_the_same[DP2-to-TP2]"
}
workers=()
case "$* " in
    "" | " " | --durations=*)
        step "Megatron-core of requirements/npu.txt" older
        # files side by side: much of a test is waiting for processes to start
        workers=(-n 2 --dist loadfile)
        ;;
esac

# said before the tests, so that pytest's closing line is the last one
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed before the tests: ${failed[*]}"
fi
python -m pytest "${workers[@]}" "$@" </dev/null || failed+=(tests)
[ ${#failed[@]} -eq 0 ]
