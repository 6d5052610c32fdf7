"""What a configuration that must be refused is refused for."""

import pytest

from mindspeed_rl.common.errors import ConfigError, Violation
from mindspeed_rl.config.compose import load_config

BASE = "grpo_trainer_qwen25_7b"  # 8 devices, TP 4, DP 2, rollout TP 4; 28 heads, 4 groups, 28 layers
DYNAMIC = [
    "rl_config.use_dynamic_bsz=true",
    "rl_config.max_packing_token_size=8192",
    "~actor_config.micro_batch_size",
    "~rl_config.actor_forward_micro_batch_size",
    "~rl_config.ref_forward_micro_batch_size",
]

# rollout on 4 further devices
SEPARATE = [
    "rl_config.use_integrated_worker=false",
    "rl_config.rollout_resource={num_npus: 4}",
    *(
        f"generate_config.offload_{part}=false"
        for part in ("train_optimizer", "train_grad", "train_param", "reference")
    ),
]


def violations_of(*overrides: str, name: str = BASE) -> list[Violation]:
    with pytest.raises(ConfigError) as caught:
        load_config(name, overrides)
    return caught.value.violations
