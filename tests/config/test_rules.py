"""Every rule: an example that breaks it, and an error that names key path, value and a way out."""

import pytest
from algorithm_examples import ALGORITHM_EXAMPLES, CLIP_HIGHER, PPO
from ascend_examples import ASCEND_EXAMPLES
from cluster_examples import CLUSTER_EXAMPLES
from data_examples import DATA_EXAMPLES
from expert_examples import EXPERT_EXAMPLES
from lora_examples import LORA_EXAMPLES
from profiler_examples import PROFILER_EXAMPLES
from reward_model_examples import REWARD_MODEL_EXAMPLES
from supervised_examples import SUPERVISED_EXAMPLES
from tools_examples import TOOLS_EXAMPLES
from validation_examples import VALIDATION_EXAMPLES
from violations import BASE, DYNAMIC, SEPARATE, violations_of

from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.rules import RULES, check

RING = ["actor_config.context_parallel_size=2", "actor_config.context_parallel_algo=megatron_cp_algo"]

# micro-batches by tokens, and none of the sizes that the preset sets

# rule -> (overrides, key path, value, part of the message, part of the suggestion)
EXAMPLES = {
    "required_paths": (
        ["megatron_training.data_path=null"],
        "megatron_training.data_path", None, "required", "jsonl or parquet",
    ),
    "model_is_known": (
        ["actor_config.model=qwen25_70b"],
        "actor_config.model", "qwen25_70b", "no such model preset", "did you mean qwen25_7b?",
    ),
    "resume_needs_save": (
        ["actor_config.resume=auto", "actor_config.save=null"],
        "actor_config.resume", "auto", "`save`, which is not set", "set actor_config.save",
    ),
    "run_name_is_one_folder": (
        ["run_name=a/b"],
        "run_name", "a/b", "name of one folder", "set output_dir",
    ),
    "shuffling_needs_order": (
        ["rl_config.shuffle_mini_batch=true", "rl_config.guarantee_order=false"],
        "rl_config.shuffle_mini_batch", True, "needs guarantee_order", "guarantee_order: true",
    ),
    "greedy_responses_are_whole": (
        ["rl_config.adv_estimator=remax", "rl_config.partial_rollout_max_split=2"],
        "rl_config.adv_estimator", "remax", "partial_rollout_max_split = 2", "partial_rollout_max_split: 1",
    ),
    "world_holds_training_layout": (
        ["rl_config.actor_resource.num_npus=6", "generate_config.infer_tensor_parallel_size=1"],
        "rl_config.actor_resource.num_npus", 6, "TP x CP x PP = 4 x 1 x 1", "4 or 8",
    ),
    "world_holds_rollout_layout": (
        ["generate_config.infer_tensor_parallel_size=7"],
        "generate_config.infer_tensor_parallel_size", 7, "num_npus = 8", "possible: 2, 4, 8",
    ),
    "rollout_has_devices": (
        [*SEPARATE, "rl_config.rollout_resource=null"],
        "rl_config.rollout_resource", None, "devices of its own", "rollout_resource: {num_npus: …}",
    ),
    "offload_makes_room_for_rollout": (
        [*SEPARATE, "generate_config.offload_train_grad=true"],
        "generate_config.offload_train_grad", True, "makes room for rollout", "set it to false",
    ),
    "staleness_needs_devices_for_rollout": (
        ["rl_config.staleness=1"],
        "rl_config.staleness", 1, "cannot generate at the same time", "use_integrated_worker: false",
    ),
    "balance_needs_order": (
        ["rl_config.balance_batch=true", "rl_config.guarantee_order=false"],
        "rl_config.balance_batch", True, "guarantee_order = False", "guarantee_order: true",
    ),
    "partial_rollout_keys_are_used": (
        ["rl_config.partial_rollout_threshold=0.7"],
        "rl_config.partial_rollout_threshold", 0.7, "partial_rollout_max_split = 1", "above 1, or remove",
    ),
    "partial_rollout_is_synchronous": (
        [*SEPARATE, "rl_config.staleness=1", "rl_config.partial_rollout_max_split=2", "rl_config.blocking=false"],
        "rl_config.partial_rollout_max_split", 2, "staleness = 1", "staleness: 0",
    ),
    "partial_rollout_has_a_surplus": (
        ["rl_config.partial_rollout_max_split=2", "rl_config.partial_rollout_threshold=1"],
        "rl_config.partial_rollout_threshold", 1.0, "prompts in generation", "below 1",
    ),
    "partial_rollout_keeps_tokens": (
        ["rl_config.partial_rollout_max_split=2", "generate_config.sampling_config.detokenize=true"],
        "generate_config.sampling_config.detokenize", True, "partial_rollout_max_split = 2", "set it to false",
    ),
    "filtered_iterations_are_whole": (
        ["rl_config.filter_groups_enable=true", "rl_config.partial_rollout_max_split=2"],
        "rl_config.filter_groups_enable", True, "judges whole groups", "partial_rollout_max_split: 1",
    ),
    "filtered_groups_can_differ": (
        ["rl_config.filter_groups_enable=true", "rl_config.n_samples_per_prompt=1"],
        "rl_config.filter_groups_enable", True, "n_samples_per_prompt = 1", "above 1",
    ),
    "filter_metric_is_known": (
        ["rl_config.filter_groups_enable=true", "rl_config.filter_groups_metric=rewards"],
        "rl_config.filter_groups_metric", "rewards", "nor in verifier_function", "did you mean reward?",
    ),
    "rollout_memory_key_fits_device": (
        ["generate_config.cpu_kv_cache_gib=2"],
        "generate_config.cpu_kv_cache_gib", 2, "device = 'npu'", "gpu_memory_utilization",
    ),
    "training_tp_divides_model": (
        ["actor_config.tensor_model_parallel_size=8"],
        "actor_config.tensor_model_parallel_size", 8, "num_query_groups = 4", "possible: 1, 2, 4",
    ),
    "rollout_tp_divides_model": (
        ["generate_config.infer_tensor_parallel_size=8"],
        "generate_config.infer_tensor_parallel_size", 8, "num_attention_heads = 28", "possible:",
    ),
    "checkpoint_keys_are_used": (
        ["actor_config.save=null", "actor_config.keep_last=3"],
        "actor_config.keep_last", 3, "save is not set", "set actor_config.save",
    ),
    "overlaps_have_what_they_need": (
        ["actor_config.overlap_param_gather=true"],
        "actor_config.overlap_param_gather", True, "needs overlap_grad_reduce: true", "overlap_param_gather: false",
    ),
    "pipeline_divides_layers": (
        ["actor_config.pipeline_model_parallel_size=3", "rl_config.actor_resource.num_npus=12"],
        "actor_config.pipeline_model_parallel_size", 3, "num_layers = 28", "2, 4",
    ),
    "sequence_parallel_needs_tp": (
        ["actor_config.tensor_model_parallel_size=1"],
        "megatron_training.sequence_parallel", True, "needs tensor_model_parallel_size", "sequence_parallel: false",
    ),
    "mini_batches_fill_iteration": (
        ["rl_config.mini_batch_size=48"],
        "rl_config.mini_batch_size", 48, "megatron_training.global_batch_size = 64", "32",
    ),
    "mini_batch_fills_ranks": (
        ["actor_config.global_batch_size=63", "rl_config.mini_batch_size=63", "rl_config.n_samples_per_prompt=3"],
        "rl_config.mini_batch_size", 63, "189 sequences", "multiple of 2",
    ),
    "sequence_fits_rollout": (
        ["generate_config.max_model_len=4095"],
        "generate_config.max_model_len", 4095, "max_prompt_length = 1024", "4096",
    ),
    "sequence_fits_training": (
        ["megatron_training.seq_length=4000"],
        "megatron_training.seq_length", 4000, "together 4096", "set it to 4096",
    ),
    "packing_size_is_given_and_used": (
        ["rl_config.max_packing_token_size=8192"],
        "rl_config.max_packing_token_size", 8192, "which is False", "use_dynamic_bsz: true",
    ),
    "packing_size_holds_a_sequence": (
        [*DYNAMIC, "rl_config.max_packing_token_size=4095"],
        "rl_config.max_packing_token_size", 4095, "together 4096", "set it to 4096",
    ),
    "micro_batch_sizes_are_used": (
        [*DYNAMIC, "+rl_config.ref_forward_micro_batch_size=4"],
        "rl_config.ref_forward_micro_batch_size", 4, "limits micro-batches", "~rl_config.ref_forward",
    ),
    "training_length_fits_model": (
        ["megatron_training.seq_length=40000"],
        "megatron_training.seq_length", 40000, "max_position_embeddings = 32768", "at most 32768",
    ),
    "rollout_length_fits_model": (
        ["generate_config.max_model_len=40000"],
        "generate_config.max_model_len", 40000, "max_position_embeddings = 32768", "at most 32768",
    ),
    "batched_tokens_hold_sequences": (
        ["generate_config.max_num_batched_tokens=100"],
        "generate_config.max_num_batched_tokens", 100, "max_num_seqs = 256", "at least 256",
    ),
    "temperature_is_positive": (
        ["generate_config.sampling_config.temperature=0"],
        "generate_config.sampling_config.temperature", 0.0, "no distribution", "above 0",
    ),
    "sources_weigh_verifiers_that_run": (
        ["rl_config.verifier_function=[acc]", "rl_config.source_verifier_weight={gsm8k: {math_verify: 1.0}}"],
        "rl_config.source_verifier_weight.gsm8k.math_verify", 1.0, "not in verifier_function", "known: acc",
    ),
    "recompute_keys_agree": (
        ["megatron_training.recompute_granularity=selective", "megatron_training.recompute_num_layers=null"],
        "megatron_training.recompute_method", "block", "which is 'selective'", "recompute_granularity: full",
    ),
    "recompute_layers_exist": (
        ["megatron_training.recompute_num_layers=29"],
        "megatron_training.recompute_num_layers", 29, "only 28", "at most 28",
    ),
    "uniform_recomputation_divides_layers": (
        ["megatron_training.recompute_method=uniform", "megatron_training.recompute_num_layers=8"],
        "megatron_training.recompute_num_layers", 8, "does not divide 28", "possible: 1, 2, 4, 7, 14, 28",
    ),
    "min_lr_below_lr": (
        ["actor_config.min_lr=2e-6"],
        "actor_config.min_lr", 2e-6, "actor_config.lr = 1e-06", "lower it",
    ),
    "critic_min_lr_below_lr": (
        ["megatron_training.stage=ray_ppo", "rl_config.adv_estimator=gae", "critic_config.min_lr=2e-6"],
        "critic_config.min_lr", 2e-6, "the critic's lr = 1e-06", "lower it",
    ),
    "adaptive_kl_starts_above_zero": (
        ["rl_config.kl_ctrl_type=adaptive", "rl_config.init_kl_coef=0"],
        "rl_config.init_kl_coef", 0.0, "0 stays 0", "positive",
    ),
    "verifiers_are_known": (
        ["rl_config.verifier_function=[math_verify,strict_fromat]"],
        "rl_config.verifier_function.1", "strict_fromat", "no such verifier", "did you mean strict_format?",
    ),
    "verifiers_are_given_once": (
        ["rl_config.verifier_function=[acc,acc]"],
        "rl_config.verifier_function", ["acc", "acc"], "twice", "sum of the weights",
    ),
    "one_weight_per_verifier": (
        ["rl_config.verifier_function=[math_verify,acc]"],
        "rl_config.verifier_weight", [1.0], "1 weights for 2 verifiers", "[1.0, 1.0]",
    ),
    "custom_reward_is_complete": (
        ["rl_config.verifier_function=[acc,custom]"],
        "rl_config.custom_reward_function", None, "needs a file", "path: my_reward.py",
    ),
    "wandb_keys_are_used": (
        ["rl_config.wandb_project=math"],
        "rl_config.wandb_project", "math", "use_wandb = False", "use_wandb: true",
    ),
    "trackers_are_installed": (
        ["rl_config.use_swanlab=true"],
        "rl_config.use_swanlab", True, "swanlab is not installed", "mindspeed_rl[swanlab]",
    ),
    "cpu_trains_in_float32": (
        ["device=cpu"],
        "megatron_training.bf16", True, "float32 only", "bf16: false",
    ),
    "cpu_generates_in_float32": (
        ["device=cpu"],
        "generate_config.dtype", "bfloat16", "float32 only", "dtype: float32",
    ),
    "context_parallel_divides_heads": (
        ["actor_config.context_parallel_size=2"],
        "actor_config.context_parallel_size", 2, "heads of a tensor-parallel rank = 7", "possible: 1, 7",
    ),
    "ring_attention_has_kernels": (
        RING,
        "actor_config.context_parallel_algo", "megatron_cp_algo", "not built for device = 'npu'", "ulysses_cp_algo",
    ),
    "refuse_infer_pipeline_parallel_size": (
        ["generate_config.infer_pipeline_parallel_size=2"],
        "generate_config.infer_pipeline_parallel_size", 2, "not supported by this version", "set it to 1",
    ),
    "refuse_num_scheduler_steps": (
        ["generate_config.num_scheduler_steps=8"],
        "generate_config.num_scheduler_steps", 8, "V1 engine", "set it to 1",
    ),
    "refuse_use_remove_padding": (
        ["rl_config.use_remove_padding=false"],
        "rl_config.use_remove_padding", False, "always packed", "set it to true",
    ),
    **ASCEND_EXAMPLES,
    **CLUSTER_EXAMPLES,
    **DATA_EXAMPLES,
    **EXPERT_EXAMPLES,
    **LORA_EXAMPLES,
    **ALGORITHM_EXAMPLES,
    **VALIDATION_EXAMPLES,
    **PROFILER_EXAMPLES,
    **REWARD_MODEL_EXAMPLES,
    **SUPERVISED_EXAMPLES,
    **TOOLS_EXAMPLES,
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_has_an_example_that_breaks_it(rule, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # as on a machine without trackers
    overrides, path, value, message, suggestion = EXAMPLES[rule.name]
    found = violations_of(*overrides)
    (violation,) = [v for v in found if v.path == path and message in v.message]
    assert violation.value == value
    assert suggestion in (violation.suggestion or "")
    for part in (path, repr(value), message, suggestion):
        assert part in str(violation)


def test_examples_are_of_rules_that_exist():
    assert set(EXAMPLES) == {rule.name for rule in RULES}


def test_rules_read_the_keys_they_declare():
    """A rule whose keys are declared broken is left out, so a wrong type never leads to a second complaint."""
    cfg, _ = load_config(BASE)
    everything = ["megatron_training", "rl_config", "generate_config", "device", "model"]
    assert check(cfg, broken=everything) == []
    assert all(rule.keys for rule in RULES)


@pytest.mark.parametrize(
    "overrides",
    [
        # one response a prompt: the advantage is the reward itself
        ["rl_config.n_samples_per_prompt=1"],
        ["generate_config.infer_tensor_parallel_size=2"],
        ["generate_config.dtype=float16"],
        ["rl_config.wandb_project=''"],
        ["rl_config.kl_ctrl_type=adaptive", "rl_config.kl_target=0.05"],
        ["rl_config.lam=0.95", "rl_config.gamma=1.0"],
        ["actor_config.resume=auto", "actor_config.finetune=true"],
        ["actor_config.tensor_model_parallel_size=2", "actor_config.context_parallel_size=2"],
        ["device=cuda", *RING],  # two parts of 7 heads
        ["actor_config.context_parallel_algo=megatron_cp_algo"],  # one part: no ring
        ["actor_config.pipeline_model_parallel_size=2", "actor_config.num_layer_list='10,18'"],
        ["actor_config.pipeline_model_parallel_size=2", "actor_config.num_layers_per_virtual_pipeline_stage=7"],
        ["actor_config.pipeline_model_parallel_size=2", "actor_config.noop_layers=[0,29]"],
        ["actor_config.overlap_grad_reduce=true", "actor_config.overlap_param_gather=true"],
        ["rl_config.shuffle_mini_batch=true", "rl_config.guarantee_order=true"],
        [f"run_name={'x' * 200}"],
        ["run_name=.hidden"],
        DYNAMIC,
        [*DYNAMIC, "rl_config.max_packing_token_size=4096"],
        SEPARATE,
        [*SEPARATE, "rl_config.blocking=false", "rl_config.staleness=2", "rl_config.rollout_is_threshold=1.5"],
        ["rl_config.rollout_is=all", "rl_config.rollout_is_threshold=1.1"],
        ["rl_config.adv_estimator=reinforce_plus_plus", "rl_config.gamma=0.9"],
        ["rl_config.custom_algorithm_file=mine.py", "rl_config.adv_estimator=mine", "rl_config.gamma=0.9"],
        [*CLIP_HIGHER, "rl_config.clip_ratio_c=3"],
        [*CLIP_HIGHER, "rl_config.loss_type=gspo"],
        ["rl_config.recompute_logprobs=false"],
        ["rl_config.recompute_logprobs=false", "rl_config.rollout_is=all", "rl_config.rollout_is_mode=mask"],
        [*PPO, "critic_config.lr=1e-5", "rl_config.gamma=0.99", "rl_config.lam=0.9", "rl_config.critic_warmup=5"],
        ["rl_config.use_kl_in_reward=true", "rl_config.kl_penalty=k1", "rl_config.kl_ctrl_type=adaptive"],
        ["rl_config.overlong_buffer_enable=true", "rl_config.overlong_buffer=64"],
        ["rl_config.partial_rollout_max_split=3", "rl_config.require_max_age_all_finished=false"],
        ["rl_config.partial_rollout_max_split=3", "rl_config.rollout_is_threshold=1.5"],
        ["generate_config.sampling_config.logprobs=false"],  # no token is of an older policy
        ["rl_config.verifier_function=[custom]", "+rl_config.custom_reward_function={path: reward.py}"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_allowed(overrides):
    load_config(BASE, overrides)


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["num_layer_list='14,13'"], "num_layer_list", "add up to the model's 28 layers"),
        (["num_layer_list=28"], "num_layer_list", "2 numbers above 0"),
        (["num_layer_list=[28,0]"], "num_layer_list", "2 numbers above 0"),
        (["num_layer_list='a,b'"], "num_layer_list", "integer"),
        (["num_layer_list='14,14'", "noop_layers=28"], "noop_layers", "only one of them can be set"),
        (["noop_layers=28"], "pipeline_model_parallel_size", "num_layers and noop_layers together = 29"),
        (["noop_layers=[28,28]"], "noop_layers", "different positions below 30"),
        (["noop_layers=[3,30]"], "noop_layers", "different positions below 30"),
        (["noop_layers=-1"], "noop_layers", "greater than or equal to 0"),
        (["num_layers_per_virtual_pipeline_stage=4"], "num_layers_per_virtual_pipeline_stage", "14 layers of a"),
        (["num_layers_per_virtual_pipeline_stage=14"], "num_layers_per_virtual_pipeline_stage", "two parts or more"),
        (
            ["num_layers_per_virtual_pipeline_stage=7", "pipeline_model_parallel_size=1"],
            "num_layers_per_virtual_pipeline_stage",
            "needs pipeline_model_parallel_size > 1",
        ),
        (
            ["num_layers_per_virtual_pipeline_stage=1", "noop_layers=[0,29]"],
            "noop_layers",
            "without any layer",
        ),
    ],
)
def test_pipelines_that_do_not_fit_the_model(overrides, key, message):
    two_stages = [*(f"actor_config.{override}" for override in overrides)]
    if not any("pipeline_model_parallel_size" in override for override in overrides):
        two_stages.append("actor_config.pipeline_model_parallel_size=2")
    (violation,) = violations_of(*two_stages)
    assert violation.path == f"actor_config.{key}"
    assert message in str(violation)


def test_other_ways_to_share_tokens_are_refused():
    (violation,) = violations_of("actor_config.context_parallel_algo=hybrid_cp_algo")
    assert violation.path == "actor_config.context_parallel_algo"
    assert "'ulysses_cp_algo' or 'megatron_cp_algo'" in str(violation)


@pytest.mark.parametrize("name", ["''", "' '", "'.'", "..", "latest", "/tmp/x", "x/", "x" * 201, "名" * 67])
def test_run_names_that_are_no_folder_of_their_own(name):
    (violation,) = violations_of(f"run_name={name}")
    assert violation.path == "run_name"


@pytest.mark.parametrize(
    ("names", "path", "message"),
    [
        ("[]", "rl_config.verifier_function", "needs at least one verifier"),
        ("[zzz,acc]", "rl_config.verifier_function.0", "known: acc, format, "),
    ],
)
def test_no_verifier_and_one_unlike_any_are_refused(names, path, message):
    found = violations_of(f"rl_config.verifier_function={names}", name=BASE)
    (violation,) = [v for v in found if v.path == path]
    assert message in str(violation)


def test_devices_of_rollout_are_for_rollout_apart_from_training():
    (violation,) = violations_of("rl_config.rollout_resource={num_npus: 4}")
    assert (violation.path, violation.value) == ("rl_config.rollout_resource.num_npus", 4)
    assert "use_integrated_worker: false" in violation.suggestion


def test_stages_in_turn_leave_nothing_to_be_stale():
    (violation,) = violations_of(*SEPARATE, "rl_config.blocking=true", "rl_config.staleness=1")
    assert (violation.path, violation.value) == ("rl_config.staleness", 1)
    assert "blocking: false" in violation.suggestion


def test_correction_of_stale_tokens_needs_their_log_probs():
    logprobs = "generate_config.sampling_config.logprobs=false"
    found = violations_of(*SEPARATE, "rl_config.blocking=false", "rl_config.staleness=1", logprobs)
    assert [(v.path, v.value) for v in found] == [("rl_config.rollout_is", "stale")]
    load_config(
        BASE, [*SEPARATE, "rl_config.blocking=false", "rl_config.staleness=1", logprobs, "rl_config.rollout_is=off"]
    )


@pytest.mark.parametrize(
    "key", ["rl_config.staleness=-1", "rl_config.rollout_is_threshold=1", "rl_config.rollout_is=token"]
)
def test_values_that_mean_nothing_for_stale_tokens(key):
    assert [violation.path for violation in violations_of(key)] == [key.partition("=")[0]]


def test_uniform_recomputation_is_by_chunks_of_stages():
    uniform = ["megatron_training.recompute_method=uniform", "actor_config.tensor_model_parallel_size=2"]
    uneven = [*uniform, "actor_config.pipeline_model_parallel_size=2", "actor_config.num_layer_list=[15,13]"]
    (violation,) = violations_of(*uneven, "megatron_training.recompute_num_layers=5")
    assert (violation.message.startswith("does not divide 13"), violation.suggestion.startswith("possible: 1;")) == (
        True,
        True,
    )
    load_config(BASE, [*uneven, "megatron_training.recompute_num_layers=1"])
    virtual = "actor_config.num_layers_per_virtual_pipeline_stage=7"
    interleaved = [*uniform, "actor_config.pipeline_model_parallel_size=2", virtual]
    assert violations_of(*interleaved, "megatron_training.recompute_num_layers=14")[0].value == 14
    load_config(BASE, [*interleaved, "megatron_training.recompute_num_layers=7"])


def test_rollout_apart_divides_its_own_devices():
    (violation,) = violations_of(*SEPARATE, "rl_config.rollout_resource.num_npus=6")
    assert (violation.path, violation.value) == ("generate_config.infer_tensor_parallel_size", 4)
    assert "rl_config.rollout_resource.num_npus = 6" in violation.message
    load_config(BASE, [*SEPARATE, "rl_config.actor_resource.num_npus=4", "rl_config.rollout_resource.num_npus=12"])


@pytest.mark.parametrize(
    ("override", "value", "suggestion"),
    [
        ("megatron_training.global_batch_size=10000000000000000000000001", 32, "possible: 1, 11, 251"),
        ("rl_config.mini_batch_size=100000000000000000000", 10**20, "possible: 16, 32, 64"),
    ],
)
def test_divisors_of_numbers_of_any_size_are_found_at_once(override, value, suggestion):
    found = {violation.path: violation for violation in violations_of(override)}
    assert found["rl_config.mini_batch_size"].value == value
    assert found["rl_config.mini_batch_size"].suggestion == suggestion


def test_token_capped_micro_batches_need_their_cap():
    (violation,) = violations_of(*DYNAMIC, "rl_config.max_packing_token_size=null")
    assert (violation.path, violation.value) == ("rl_config.max_packing_token_size", None)
    assert violation.suggestion.startswith("at least 4096")


def test_every_micro_batch_size_without_effect_is_named():
    found = violations_of(*DYNAMIC[:2], "megatron_training.micro_batch_size=2")
    assert {violation.path: violation.value for violation in found} == {
        "megatron_training.micro_batch_size": 2,
        "actor_config.micro_batch_size": 2,
        "rl_config.actor_forward_micro_batch_size": 4,
        "rl_config.ref_forward_micro_batch_size": 4,
    }


def test_custom_reward_without_its_verifier_is_refused():
    (violation,) = violations_of("rl_config.custom_reward_function={path: reward.py}")
    assert violation.path == "rl_config.custom_reward_function"
    assert "add custom" in violation.suggestion


def test_rollout_tp_above_the_number_of_key_value_heads():
    base = ["rl_config.actor_resource.num_npus=12", "rl_config.mini_batch_size=48", "rl_config.verifier_parallel=1"]
    shape = ["model.qwen25_7b.num_attention_heads=48", "model.qwen25_7b.ffn_hidden_size=1536"]
    common = [*base, *shape, "megatron_training.global_batch_size=48"]
    load_config(BASE, [*common, "generate_config.infer_tensor_parallel_size=12"])  # each of 4 groups on 3 ranks
    (violation,) = violations_of(*common, "generate_config.infer_tensor_parallel_size=6")
    assert (violation.value, violation.suggestion) == (6, "possible: 4 or 8")


def test_every_key_about_checkpoints_needs_a_place_for_them():
    found = violations_of("actor_config.save=null", "actor_config.save_hf=true", "actor_config.async_save=true")
    assert [violation.path for violation in found] == ["actor_config.save_hf", "actor_config.async_save"]
