#!/usr/bin/env bash
# GRPO on Qwen2.5-7B on one node of 8 NPUs; needs requirements/npu.txt, MindSpeed and CANN.
# MODEL: Hugging Face folder of the model and its tokenizer. DATA: jsonl or parquet file.
# OUTPUT: folder for checkpoints (default outputs/qwen25_7b). Arguments are further overrides.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${MODEL:?set MODEL to the Hugging Face folder of Qwen2.5-7B}"
: "${DATA:?set DATA to a jsonl or parquet file of prompts and answers}"
output=${OUTPUT:-outputs/qwen25_7b}
# shellcheck source=examples/ascend_env.sh
. examples/ascend_env.sh

exec python cli/train_grpo.py --config-name grpo_trainer_qwen25_7b \
    megatron_training.data_path="$DATA" \
    megatron_training.tokenizer_name_or_path="$MODEL" \
    actor_config.load="$MODEL" \
    actor_config.save="$output/checkpoints" \
    "$@"
