#!/usr/bin/env bash
# A few GRPO steps of SmolLM2-135M-Instruct on CPU, with arithmetic questions in its chat template.
# Arguments are configuration overrides: `bash examples/smollm2_cpu.sh megatron_training.train_iters=2`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=ci/setup_env.sh
. ci/setup_env.sh

model=examples/models/smollm2_135m
data=examples/data/arithmetic.jsonl

if [ ! -f "$model/model.safetensors" ]; then
    python examples/make_smollm2.py --output "$model"
fi
if [ ! -s "$data" ]; then
    python cli/make_data.py --output "$data" --task basic_arithmetic --size 1000 --seed 0 \
        --config min_terms=2 max_terms=2 min_digits=1 max_digits=1 'operators=[+]' allow_parentheses=false \
        --prompt-template 'What is {expression}?' --dedupe
fi

# shellcheck source=examples/train_and_plot.sh
. examples/train_and_plot.sh
train_and_plot grpo_trainer_smollm2_135m_cpu "$@"
