#!/usr/bin/env bash
# Train a tiny model with GRPO on CPU: makes the environment, the model and the data, trains, shows the curve.
# Arguments are configuration overrides: `bash examples/quickstart.sh megatron_training.train_iters=50`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=ci/setup_env.sh
. ci/setup_env.sh

model=examples/models/tiny_qwen2
data=examples/data/addition.jsonl

if [ ! -f "$model/model.safetensors" ]; then
    python examples/make_tiny_model.py --output "$model"
fi
if [ ! -s "$data" ]; then
    # all additions of two digits whose sum has one digit
    python cli/make_data.py --output "$data" --task basic_arithmetic --size 4000 --seed 0 \
        --config min_terms=2 max_terms=2 min_digits=1 max_digits=1 'operators=[+]' allow_parentheses=false \
        --prompt-template '{expression}=' --strip-spaces --answer-pattern '^\d$' --dedupe
fi

# shellcheck source=examples/train_and_plot.sh
. examples/train_and_plot.sh
train_and_plot grpo_trainer_tiny_cpu "$@"
