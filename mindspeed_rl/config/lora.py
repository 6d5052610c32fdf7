"""Keys of `megatron_training` on low-rank adapters (LoRA, arXiv:2106.09685), and what follows from them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.section import Positive, Section

# Megatron's linear layers, and the Hugging Face modules whose weights each holds
FUSED_MODULES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
FUSED_OF = {module: fused for fused, modules in FUSED_MODULES.items() for module in modules}
# of these tensor parallelism cuts the outputs, of the others the inputs
COLUMN_PARALLEL = ("linear_qkv", "linear_fc1")
LORA_A, LORA_B = "lora_A.weight", "lora_B.weight"  # ends of the names of stored adapters, as in PEFT's files


class LoraConfig(Section):
    """Part of `MegatronConfig`."""

    lora_r: Annotated[int, Field(ge=0)] = Field(
        0, description="rank of adapters, which train in place of the model's weights (LoRA); 0: all weights train"
    )
    lora_alpha: Positive = Field(32.0, description="adapters count lora_alpha / lora_r times")
    lora_target_modules: list[str] = Field(
        list(FUSED_MODULES), description=f"linear layers with adapters, some of {', '.join(FUSED_MODULES)}"
    )

    @property
    def lora_scale(self) -> float:
        """What the product of an adapter's matrices is multiplied with."""
        return self.lora_alpha / self.lora_r if self.lora_r else 0.0

    @property
    def lora_settings(self) -> dict[str, Any] | None:
        """What adapters must agree on to be the same, as checkpoints record it; None without."""
        if not self.lora_r:
            return None
        modules = [name for name in FUSED_MODULES if name in self.lora_target_modules]
        return {"r": self.lora_r, "alpha": self.lora_alpha, "target_modules": modules}


def adapted(model: ModelConfig, cfg: LoraConfig) -> ModelConfig:
    """The model as it is trained: with adapters, if there are any."""
    return model.with_adapters(cfg.lora_r, cfg.lora_target_modules) if cfg.lora_r else model


def module_sizes(model: ModelConfig, module: str) -> tuple[int, int]:
    """Input and output of a linear layer that may have an adapter."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    return {
        "linear_qkv": (hidden, (heads + 2 * model.num_query_groups) * model.kv_channels),
        "linear_proj": (heads * model.value_channels, hidden),
        "linear_fc1": (hidden, 2 * model.ffn_hidden_size),
        "linear_fc2": (model.ffn_hidden_size, hidden),
    }[module]


def adapter_parameters(model: ModelConfig, cfg: LoraConfig, layers: int, tp: int) -> int:
    """Of so many layers on one tensor-parallel rank: one of an adapter's matrices is divided, the other is not."""
    if not cfg.lora_r:
        return 0
    elements = 0
    for module in cfg.lora_target_modules:
        inputs, outputs = module_sizes(model, module)
        divided, whole = (outputs, inputs) if module in COLUMN_PARALLEL else (inputs, outputs)
        elements += divided // tp + whole
    return layers * cfg.lora_r * elements
