"""DeepSeek-V2 and V3: the published files, what transformers writes, sizes against its models, and refusals."""

import json

import pytest
import torch
from omegaconf import OmegaConf
from test_model_from_hf import CONFIGS
from transformers import AutoConfig, AutoModelForCausalLM

from examples.make_tiny_model import make_tiny_model
from mindspeed_rl.config.model import ModelConfig

_SHARED = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}
_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
V3 = {
    **_SHARED,
    "architectures": ["DeepseekV3ForCausalLM"],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
V2_LITE = {
    **_SHARED,
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
PUBLISHED_FILES = {"deepseekv3_671b": V3, "deepseekv2_lite": V2_LITE}


@pytest.mark.parametrize("preset", PUBLISHED_FILES)
def test_presets_say_what_the_published_files_say(preset):
    content = OmegaConf.to_container(OmegaConf.load(CONFIGS / "model" / f"{preset}.yaml"))[preset]
    model = ModelConfig.from_hf(PUBLISHED_FILES[preset])
    assert ModelConfig(**content) == model
    assert ModelConfig(**json.loads(model.model_dump_json())) == model  # as a checkpoint records it


@pytest.mark.parametrize(
    ("preset", "model_type"), [("deepseekv3_671b", "deepseek_v3"), ("deepseekv2_lite", "deepseek_v2")]
)
def test_sizes_are_those_of_the_model_that_transformers_builds(preset, model_type, tmp_path):
    config = AutoConfig.for_model(model_type, **PUBLISHED_FILES[preset])
    config.save_pretrained(tmp_path)
    model = ModelConfig.from_hf(PUBLISHED_FILES[preset])
    assert ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text())) == model
    with torch.device("meta"):
        reference = AutoModelForCausalLM.from_config(config)
    biases = sum(
        value.numel() for name, value in reference.named_buffers() if name.endswith("e_score_correction_bias")
    )
    assert model.num_parameters == sum(value.numel() for value in reference.parameters()) + biases
    replicated = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "mlp.gate.weight")
    found = sum(value.numel() for name, value in reference.named_parameters() if name.endswith(replicated))
    assert model.replicated_parameters == found + biases


def test_the_tiny_preset_is_the_tiny_model(tmp_path):
    preset = OmegaConf.to_container(OmegaConf.load(CONFIGS / "model" / "tiny_deepseek_v3.yaml"))["tiny_deepseek_v3"]
    folder = make_tiny_model(tmp_path / "model", "deepseek_v3")
    assert ModelConfig.from_hf(json.loads((folder / "config.json").read_text())) == ModelConfig(**preset)


def test_work_of_the_large_model_by_hand():
    """Of V3's 671 B weights a token uses 37 B (arXiv:2412.19437, section 1)."""
    model = ModelConfig.from_hf(V3)
    query, key_value = 7168 * 1536 + 1536 + 1536 * 128 * 192, 7168 * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    attention = query + key_value + 128 * 128 * 7168 + 2 * 7168
    expert, router = 3 * 7168 * 2048, 7168 * 256 + 256
    active = 61 * attention + 3 * 3 * 7168 * 18432 + 58 * (9 * expert + router) + 2 * 129280 * 7168 + 7168
    assert model.active_parameters == active == pytest.approx(37.5e9, rel=0.01)
    assert model.num_parameters == active + 58 * (256 - 8) * expert
    one, two = model.forward_flops([1000, 2000])
    # scores of 192 channels, sums of 128; half of the tokens on average are visible
    assert two - 2 * one == 61 * 128 * (192 + 128) * 2 * 1000**2
    assert one == 2 * (active - 129280 * 7168) * 1000 + (two - 2 * one) // 2


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (
            V3,
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config = .*fp8.* convert the weights to bf",
        ),
        (
            V3,
            {"scoring_func": None},
            "scoring_func = None is not supported for DeepseekV3ForCausalLM .only 'sigmoid'",
        ),
        (V3, {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        (V3, {"rope_interleave": False}, "rope_interleave = False"),
        (V3, {"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05"),
        (V3, {"head_dim": 128}, "head_dim = 128 .* .only 64"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        (V3, {"attention_bias": True}, "attention_bias = True"),
        (V3, {"num_key_value_heads": 64}, "num_key_value_heads = 64"),
        (V3, {"n_group": 8, "topk_group": 9}, "moe_router_group_topk = 9 cannot hold moe_router_topk = 8"),
        (V3, {"num_experts_per_tok": 200}, "cannot hold moe_router_topk = 200 of num_moe_experts = 256"),
        (V3, {"v_head_dim": 256}, "v_head_dim = 256 is more than kv_channels = 192"),
        (V3, {"first_k_dense_replace": 61}, "both of them occurring"),
        (V3, {"n_shared_experts": None, "kv_lora_rank": None}, "lacks kv_lora_rank, n_shared_experts"),
        (V3, {"rope_scaling": {**_YARN, "attention_factor": 1.5}}, "attention_factor = 1.5"),
        (V3, {"rope_scaling": {**_YARN, "truncate": False}}, "truncate = False"),
        (V3, {"rope_scaling": {"type": "linear", "factor": 40.0}}, "rope_type = 'linear'"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob = True"),
        (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        (V2_LITE, {"n_group": 8, "topk_group": 3}, "topk_method = 'greedy' .* .only 'group_limited_greedy'"),
        (V2_LITE, {"topk_method": "group_limited_greedy"}, "topk_method = 'group_limited_greedy' .* .only 'greedy'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(file, changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**file, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias = False.* has True and 'sigmoid'"),
        ({"moe_router_score_function": "softmax"}, "moe_router_score_function = 'softmax'.* has True and 'sigmoid'"),
        ({"moe_router_group_topk": None}, "moe_router_num_groups = 8, moe_router_group_topk = None"),
        ({"moe_router_num_groups": 256, "moe_router_group_topk": 8}, "moe_router_num_groups = 256"),
        ({"qk_layernorm": True}, "qk_layernorm = True, but DeepseekV3ForCausalLM has latent attention"),
        ({"num_query_groups": 64}, "num_query_groups = 64: latent attention has as many"),
        ({"v_head_dim": None}, "v_head_dim is required for DeepseekV3ForCausalLM"),
        (
            {"architecture": "Qwen3MoeForCausalLM"},
            "kv_lora_rank = 512, but Qwen3MoeForCausalLM has no latent attention",
        ),
    ],
)
def test_presets_that_contradict_their_architecture_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**ModelConfig.from_hf(V3).model_dump(), **changes})


def test_shared_experts_and_groups_are_for_deepseek(tmp_path):
    plain = {
        "architecture": "Qwen3MoeForCausalLM",
        "num_layers": 2,
        "hidden_size": 8,
        "ffn_hidden_size": 8,
        "num_attention_heads": 2,
        "num_query_groups": 2,
        "kv_channels": 4,
        "vocab_size": 8,
        "max_position_embeddings": 8,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 4,
    }
    ModelConfig(**plain)
    for key, value in {"moe_shared_expert_intermediate_size": 4, "moe_router_topk_scaling_factor": 2.0}.items():
        with pytest.raises(ValueError, match=f"{key} = .* is not supported for Qwen3MoeForCausalLM"):
            ModelConfig(**plain, **{key: value})
