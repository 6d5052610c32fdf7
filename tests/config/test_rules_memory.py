"""A plan that cannot fit into its devices is refused, with what takes the memory and which change would do."""

import pytest
from violations import BASE, DYNAMIC

from mindspeed_rl.common.errors import ConfigError
from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.layout import derive_layout
from mindspeed_rl.config.memory import GIB, LOGIT_CHUNK, pass_bytes
from mindspeed_rl.config.rules_memory import estimate

H200 = "grpo_trainer_qwen25_1b5_h200"


def refused(config: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(config, overrides)
    found = error.value.violations
    assert {violation.path for violation in found} == {"device_memory_gib"}
    return [str(violation) for violation in found]


def test_an_update_says_what_takes_how_much_and_which_micro_batch_would_do() -> None:
    """1,543.7 M parameters: 2 + 4 + 12 bytes each, and 2 for the reference, which stays."""
    update, generation = refused(H200, "device_memory_gib=46")
    cfg, _ = load_config(H200)
    memory = estimate(cfg, resolve_model(cfg))
    state = 1_543_714_304 * 18 / GIB
    assert (memory.weights + memory.gradients + memory.optimizer) / GIB == pytest.approx(state)
    total = (memory.training + memory.reference) / GIB
    assert f"an update takes {total:.1f} GiB (weights 2.9, gradients 5.8, optimizer 17.3," in update
    assert "and there are 46.0 (actor_config.micro_batch_size: 2" in update
    # 0.6 of 46 GiB for rollout, all that training keeps, and the reference's passes in between
    taken = 27.6 + (memory.training_kept + memory.beside_rollout) / GIB
    assert f"generation takes {taken:.1f} GiB (the rollout engine 27.6," in generation
    for key in ("offload_train_optimizer: true", "gpu_memory_utilization: 0.3"):
        assert f"generate_config.{key}" in generation


def test_what_is_proposed_is_accepted() -> None:
    changes = ("actor_config.micro_batch_size=2", "generate_config.offload_train_optimizer=true")
    cfg, _ = load_config(H200, ["device_memory_gib=46", *changes])
    assert cfg.device_memory_gib == 46


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (("device_memory_gib=12",), "more devices, as with a larger tensor_model_parallel_size"),
        (("device_memory_gib=35", "actor_config.micro_batch_size=1"), "recompute_granularity: full"),
        (("device_memory_gib=3.6", "generate_config.gpu_memory_utilization=0.5"), "gpu_memory_utilization: 0.9"),
        (("device_memory_gib=3", "generate_config.gpu_memory_utilization=0.5"), "a larger generate_config.infer_"),
    ],
)
def test_other_remedies(overrides: tuple[str, ...], remedy: str) -> None:
    assert any(remedy in violation for violation in refused(H200, *overrides))


def test_the_kl_over_the_vocabulary_has_the_reference_beside_the_actor() -> None:
    stays = [f"generate_config.offload_{part}=true" for part in ("reference", "train_param", "train_optimizer")]
    full = ["rl_config.kl_penalty=full", "~rl_config.ref_forward_micro_batch_size"]
    (cfg, _), (plain, _) = load_config(H200, [*stays, *full]), load_config(H200, stays)
    model = resolve_model(cfg)
    memory, before = (estimate(each, resolve_model(each)) for each in (cfg, plain))
    responses = cfg.rl_config.mini_batch_size * cfg.rl_config.n_samples_per_prompt // derive_layout(cfg).dp
    hidden = responses * cfg.generate_config.sampling_config.max_tokens * 1536 * 2  # bfloat16
    head = model.padded_vocab_size(1) * (LOGIT_CHUNK * (2 + 4) + 1536 * 2)  # one more of each kind
    assert memory.logits == before.logits + head + hidden
    limit = f"device_memory_gib={(memory.training + memory.reference / 2) / GIB}"
    assert any("reference 2.9" in violation for violation in refused(H200, *stays, *full, limit))
    load_config(H200, [*stays, limit])


def test_both_engines_weights_and_the_buckets_have_room_while_they_are_exchanged() -> None:
    """Of 7.6 B parameters, TP 4 trains and TP 4 generates: a quarter each, and buckets."""
    cfg, _ = load_config(BASE)
    model = resolve_model(cfg)
    memory = estimate(cfg, model)
    largest = model.vocab_size * model.hidden_size * 2
    assert memory.buckets == 2 * 256 * 2**20 + largest
    # a bucket of 40,000 MiB would hold all parameters
    whole = memory.weights + memory.rollout_weights + 2 * model.num_parameters * 2 + largest
    found = refused(BASE, "generate_config.resharding_bucket_mb=40000", "device_memory_gib=36")
    (resharding,) = [violation for violation in found if "resharding takes" in violation]
    assert f"resharding takes {whole / GIB:.1f} GiB" in resharding
    assert "generate_config.resharding_bucket_mb: 10000.0" in resharding
    one = ["actor_config.tensor_model_parallel_size=1", "megatron_training.sequence_parallel=false"]
    alone, _ = load_config(BASE, [*one, "device_memory_gib=null", "generate_config.infer_tensor_parallel_size=1"])
    assert estimate(alone, model).buckets == 0


def test_a_scoring_pass_has_room_with_the_weights_and_while_generating() -> None:
    """A layer: residual, norm and a product 3 x 1,536, gate, up and what they make 3 x 8,960."""
    per_token = (3 * 1536 + 3 * 8960) * 2
    sizes = ["rl_config.ref_forward_micro_batch_size=64", "rl_config.actor_forward_micro_batch_size=16"]
    for more, beside in (([], 64), (["generate_config.offload_reference=true"], 16)):  # old log-probs need no move
        cfg, _ = load_config(H200, ["device_memory_gib=null", *sizes, *more])
        memory = estimate(cfg, resolve_model(cfg))
        comes = 2 * 1_543_714_304 if more else 0  # the reference
        assert memory.scoring == 64 * cfg.actor.seq_length * per_token + comes
        assert memory.beside_rollout == beside * cfg.actor.seq_length * per_token


def test_a_smaller_scoring_pass_is_proposed() -> None:
    state = [f"generate_config.offload_{part}=true" for part in ("train_param", "train_grad", "train_optimizer")]
    found = refused(
        H200,
        *state,
        "generate_config.offload_reference=true",
        "device_memory_gib=44",
        "actor_config.micro_batch_size=1",
        *(f"rl_config.{model}_forward_micro_batch_size=512" for model in ("actor", "ref")),
    )
    assert ["scoring takes" in each for each in found] == [True]
    assert "rl_config.*_forward_micro_batch_size: 128 at most" in found[0]
    # where both stay, passes have to fit beside the cache
    (generation,) = (
        each
        for each in refused(H200, "device_memory_gib=130", "rl_config.ref_forward_micro_batch_size=128")
        if "generation takes" in each
    )
    assert f"scoring in between {128 * 4096 * (3 * 1536 + 3 * 8960) * 2 / GIB:.1f}" in generation
    assert "rl_config.blocking: true" in generation
    load_config(
        H200, ["device_memory_gib=130", "rl_config.ref_forward_micro_batch_size=128", "rl_config.blocking=true"]
    )


def test_scoring_with_sequence_parallelism_and_experts() -> None:
    """Per token: 3 h / 8, one whole h put together, 3 f / 8; with experts, a dense layer is the largest."""
    cfg, _ = load_config("grpo_trainer_qwen25_7b", ["rl_config.ref_forward_micro_batch_size=8"])
    model, layout = resolve_model(cfg), derive_layout(cfg)
    assert cfg.actor.sequence_parallel
    tp = layout.tp
    per_token = 3 * model.hidden_size / tp + model.hidden_size + 3 * model.ffn_hidden_size / tp
    assert pass_bytes(cfg, model, layout, "reference") == pytest.approx(8 * cfg.actor.seq_length * per_token * 2)
    cfg, _ = load_config("grpo_trainer_deepseekv2_lite_h200", ["rl_config.ref_forward_micro_batch_size=8"])
    model, layout = resolve_model(cfg), derive_layout(cfg)
    assert model.num_moe_layers < model.num_layers
    largest = max(model.ffn_hidden_size * 3, 6 * (2 * model.hidden_size + 3 * model.moe_ffn_hidden_size) + 3 * 2816)
    found = pass_bytes(cfg, model, layout, "reference") / (8 * cfg.actor.seq_length) / 2
    assert found == pytest.approx(3 * model.hidden_size + largest, rel=1e-3)


def test_a_smaller_token_cap_is_proposed() -> None:
    found = refused(
        H200, "device_memory_gib=44", *DYNAMIC[:1], "rl_config.max_packing_token_size=131072", *DYNAMIC[2:]
    )
    (update,) = [violation for violation in found if "an update takes" in violation]
    assert "rl_config.max_packing_token_size: 8192" in update


def test_recomputation_is_counted_by_chunks() -> None:
    """Seven layers of each chunk of seven are all layers, whatever the number of chunks."""
    base = ["megatron_training.recompute_method=block", "actor_config.pipeline_model_parallel_size=2"]
    chunks = [*base, "actor_config.tensor_model_parallel_size=2", "megatron_training.recompute_num_layers=7"]
    plain = [*base, "actor_config.tensor_model_parallel_size=2", "megatron_training.recompute_num_layers=14"]
    virtual = "actor_config.num_layers_per_virtual_pipeline_stage=7"
    cfgs = [load_config(BASE, overrides)[0] for overrides in ([*chunks, virtual], plain)]
    interleaved, whole = (estimate(cfg, resolve_model(cfg)).activations for cfg in cfgs)
    # (2 + 1/2) micro-batches of 2 x 4,096 tokens in flight instead of 2, inputs of 14 layers in bfloat16, over TP
    assert interleaved - whole == 0.5 * 2 * 4096 * 14 * 3584 / 2 * 2


def test_an_engine_needs_room_for_one_sequence() -> None:
    found = refused(H200, "device_memory_gib=3", "generate_config.gpu_memory_utilization=0.5")
    (engine,) = [violation for violation in found if "the rollout engine takes" in violation]
    assert "(weights 2.9, cache of one sequence 0.1), and there are 1.5" in engine


def test_rollout_on_a_cpu_cannot_sleep() -> None:
    update, scoring, generation, resharding = refused("grpo_trainer_tiny_cpu", "device_memory_gib=0.5")
    assert "resharding takes 1.0 GiB" in resharding
    assert "rollout, which cannot sleep 1.0" in update
    assert "rollout, which cannot sleep 1.0" in scoring
    assert "generation takes 1.0 GiB" in generation


def test_wrong_divisions_are_reported_before_memory() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(H200, ["device_memory_gib=1", "rl_config.mini_batch_size=7"])
    assert "device_memory_gib" not in {violation.path for violation in error.value.violations}


@pytest.mark.parametrize("value", ["0", "-1", "much"])
def test_a_memory_that_is_none(value: str) -> None:
    with pytest.raises(ConfigError, match="device_memory_gib"):
        load_config(H200, [f"device_memory_gib={value}"])


@pytest.mark.parametrize("limit", [30, 45, 60, 90, 140])
def test_a_plan_is_refused_exactly_when_it_does_not_fit(limit: int) -> None:
    cfg, _ = load_config(H200, ["device_memory_gib=1000"])
    memory = estimate(cfg, resolve_model(cfg))
    share = cfg.generate_config.gpu_memory_utilization * limit
    generating = share * GIB + memory.training_kept + memory.beside_rollout
    fits = max(memory.training + memory.reference, generating) <= limit * GIB
    if fits:
        load_config(H200, [f"device_memory_gib={limit}"])
    else:
        refused(H200, f"device_memory_gib={limit}")
