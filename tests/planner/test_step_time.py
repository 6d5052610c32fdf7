"""The stages' seconds, against what one computes by hand, and against runs that were measured."""

import json
from pathlib import Path

import pytest

from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.layout import derive_layout
from mindspeed_rl.config.memory import stage_parameters
from mindspeed_rl.planner.cluster import Cluster, load_cluster
from mindspeed_rl.planner.lengths import lognormal_lengths
from mindspeed_rl.planner.step import (
    StepTime,
    Work,
    _schedule,
    dock_seconds,
    offload_seconds,
    resharding_seconds,
    rollout_seconds,
    scoring_seconds,
    step_time,
    update_seconds,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LAYERS = ("recompute_granularity", "recompute_method", "recompute_num_layers")
# as benchmarks/step.py: 128 prompts x 8, 128 + 512 tokens, one update, nothing recomputed
MEASURED = [
    "megatron_training.global_batch_size=128",
    "megatron_training.seq_length=640",
    *(f"megatron_training.{key}=null" for key in LAYERS),
    "rl_config.mini_batch_size=128",
    "rl_config.n_samples_per_prompt=8",
    "rl_config.max_prompt_length=128",
    "rl_config.ref_forward_micro_batch_size=32",
    "actor_config.micro_batch_size=32",
    "generate_config.max_num_seqs=1024",
    "generate_config.max_model_len=640",
    "generate_config.sampling_config.max_tokens=512",
]
WORK = Work(prompt=128, responses=[512])
# rates for mental arithmetic: all that is asked for is reached, and links cost nothing unless a test says so
IDEAL = Cluster(
    device="cuda",
    memory_gib=1000,
    tflops=100,
    memory_gb_s=1e9,
    devices_per_node=8,
    node_gb_s=1e9,
    network_gb_s=1e9,
    host_gb_s=1e9,
    latency_us=0,
    training_share=1,
    scoring_share=1,
    decode_share=1,
    decode_step_ms=0,
    link_share=1,
    switch_s=0,
)


def setting(*overrides: str, name: str = "grpo_trainer_qwen25_1b5_h200"):
    cfg, _ = load_config(name, [*MEASURED, *overrides])
    return cfg, resolve_model(cfg), derive_layout(cfg)


def test_passes_take_their_flops() -> None:
    cfg, model, layout = setting()
    flops = 1024 * model.forward_flops([640])[0]
    assert scoring_seconds(cfg, model, layout, IDEAL, WORK) == pytest.approx(flops / 100e12)
    assert update_seconds(cfg, model, layout, IDEAL, WORK) == pytest.approx(3 * flops / 100e12, rel=1e-6)


def test_layers_that_are_recomputed_run_forward_once_more_the_output_layer_does_not() -> None:
    cfg, model, layout = setting(
        *(f"actor_config.{key}={value}" for key, value in zip(LAYERS, ("full", "block", 14), strict=True))
    )
    forward = model.forward_flops([640])[0]
    of_layers = 1 - 2 * model.vocab_size * model.hidden_size / model.forward_flops([1])[0]
    expected = 1024 * forward * (3 + 0.5 * of_layers) / 100e12
    assert update_seconds(cfg, model, layout, IDEAL, WORK) == pytest.approx(expected, rel=1e-6)


def test_a_pipeline_waits_at_both_ends() -> None:
    cfg, model, layout = setting("rl_config.actor_resource.num_npus=2", "actor_config.pipeline_model_parallel_size=2")
    micro_batches = 1024 / 32
    forward = 1024 * model.forward_flops([640])[0] / 2 / 100e12
    assert update_seconds(cfg, model, layout, IDEAL, WORK) == pytest.approx(3 * forward * (1 + 1 / micro_batches))


def test_gradients_and_weights_cross_the_link() -> None:
    cfg, model, layout = setting("rl_config.actor_resource.num_npus=2")
    slow = IDEAL.model_copy(update={"node_gb_s": 10})
    more = update_seconds(cfg, model, layout, slow, WORK) - update_seconds(cfg, model, layout, IDEAL, WORK)
    parameters = stage_parameters(cfg, model, layout)
    assert more == pytest.approx(parameters * (4 + 2) / 2 / 10e9)
    overlapped = setting(
        "rl_config.actor_resource.num_npus=2",
        "actor_config.overlap_grad_reduce=true",
        "actor_config.overlap_param_gather=true",
    )
    assert update_seconds(*overlapped, slow, WORK) < update_seconds(cfg, model, layout, slow, WORK)


def test_tensor_parallel_ranks_exchange_activations_in_every_layer() -> None:
    cfg, model, layout = setting(
        "rl_config.actor_resource.num_npus=2",
        "actor_config.tensor_model_parallel_size=2",
        "actor_config.sequence_parallel=true",
    )
    slow = IDEAL.model_copy(update={"node_gb_s": 10})
    more = scoring_seconds(cfg, model, layout, slow, WORK) - scoring_seconds(cfg, model, layout, IDEAL, WORK)
    assert more == pytest.approx(1024 * 640 * 28 * 4 * model.hidden_size * 2 / 2 / 10e9)


def test_decode_steps_read_weights_and_cache_and_multiply() -> None:
    cfg, model, layout = setting("generate_config.enable_prefix_caching=false")
    cluster = IDEAL.model_copy(update={"memory_gb_s": 1000})
    prefill = 1024 * model.forward_flops([128])[0] / 100e12
    cache = 2 * 28 * model.num_query_groups * model.kv_channels * 2
    step = (
        model.num_parameters * 2 + 1024 * (128 + 256) * cache
    ) / 1e12 + 2 * model.matmul_parameters * 1024 / 100e12
    assert rollout_seconds(cfg, model, layout, cluster, WORK) == pytest.approx(prefill + 512 * step)


def test_a_groups_prompt_is_computed_once() -> None:
    shared, each = setting(), setting("generate_config.enable_prefix_caching=false")
    forward = shared[1].forward_flops([128])[0] / 100e12
    saved = rollout_seconds(*each, IDEAL, WORK) - rollout_seconds(*shared, IDEAL, WORK)
    assert saved == pytest.approx((1024 - 128) * forward)


def test_a_sequence_that_is_done_makes_room() -> None:
    # two at a time of 3, 2, 2 tokens: (3, 2) until 2, then the third beside the first's last one, then alone
    assert _schedule([3, 2, 2], 2) == [(2, 2, 1.0), (1, 2, 1.5), (1, 1, 1.5)]
    assert sum(steps * running for steps, running, _ in _schedule([7, 5, 5, 1, 1], 3)) == 19


# a step of decoding takes a millisecond, whatever it does
STEPS = IDEAL.model_copy(update={"decode_step_ms": 1.0, "tflops": 1e12})


def test_an_engine_runs_as_many_sequences_as_its_cache_holds() -> None:
    def seconds(share: float) -> float:
        cfg, model, layout = setting("device_memory_gib=140", f"generate_config.gpu_memory_utilization={share}")
        return rollout_seconds(cfg, model, layout, STEPS, WORK)

    _, model, _ = setting()
    a_sequence = (128 + 512) * 2 * model.num_layers * model.num_query_groups * model.kv_channels * 2
    starved = (model.num_parameters * 2 + 256.5 * a_sequence) / (140 * 2**30)  # room for 256 of 1,024
    assert seconds(0.6) == seconds(0.5) == pytest.approx(0.512, rel=1e-3)
    assert seconds(starved) == pytest.approx(4 * 0.512, rel=1e-3)


def test_responses_come_in_no_order() -> None:
    cfg, model, layout = setting("generate_config.max_num_seqs=128", "device_memory_gib=null")
    mixed = Work(prompt=128, responses=[512] * 64 + [16] * 960)
    assert (
        sum(steps for steps, _, _ in _schedule(mixed.responses, 128)) == 512
    )  # the longest first, the others beside
    assert rollout_seconds(cfg, model, layout, STEPS, mixed) > 0.53


def test_what_leaves_the_device_comes_back() -> None:
    keys = ("offload_train_optimizer", "offload_train_grad", "offload_train_param", "offload_reference")
    cfg, model, layout = setting(*(f"generate_config.{key}=true" for key in keys))
    cluster = IDEAL.model_copy(update={"host_gb_s": 10})
    moved = model.num_parameters * (2 * 2 + 2 * 12 + 2)
    assert offload_seconds(cfg, model, layout, cluster) == pytest.approx(moved / 10e9, rel=1e-3)
    assert offload_seconds(*setting(), cluster) == 0


def test_adapters_cost_less_than_all_weights() -> None:
    """Frozen weights have no gradients, come back from a copy that the host keeps, and are the reference, too."""
    keys = ("offload_train_optimizer", "offload_train_grad", "offload_train_param", "offload_reference")
    lora = ("actor_config.lora_r=8", "actor_config.lora_target_modules=[linear_qkv]")
    cfg, model, layout = setting(*lora, *(f"generate_config.{key}=true" for key in keys))
    adapters = 28 * 8 * (1536 + (12 + 2 * 2) * 128)
    cluster = IDEAL.model_copy(update={"host_gb_s": 10})
    moved = (model.num_parameters + adapters) * 2 + 2 * 12 * adapters
    assert offload_seconds(cfg, model, layout, cluster) == pytest.approx(moved / 10e9, rel=1e-3)
    flops = 1024 * model.forward_flops([640])[0]
    assert update_seconds(cfg, model, layout, IDEAL, WORK) == pytest.approx(2 * flops / 100e12, rel=1e-6)


def test_rollout_apart_is_hidden_behind_training() -> None:
    cfg, model, layout = setting(
        "rl_config.use_integrated_worker=false",
        "rl_config.rollout_resource={num_npus: 1}",
        "rl_config.staleness=1",
    )
    times = step_time(cfg, model, layout, load_cluster("h200"), WORK)
    slower = max(times.rollout, times.scoring + times.update)
    assert times.total == pytest.approx(slower + times.resharding + times.dock + times.calls)


def test_a_step_takes_what_one_h200_took() -> None:
    """The shares in h200.yaml are of `training.py` and `rollout.py`; the whole step is another measurement."""
    found = step_time(*setting(), load_cluster("h200"), WORK)
    records = {record["metric"]: record["value"] for record in json.loads((RESULTS / "step-cuda.json").read_text())}
    measured = {
        "total": records["cuda.step_s"],
        "rollout": records["cuda.step_rollout_s"],
        "scoring": records["cuda.step_reference_model_s"],
        "update": records["cuda.step_update_s"],
    }
    for stage, seconds in measured.items():
        assert getattr(found, stage) == pytest.approx(seconds, rel=0.1), stage


def test_what_recomputation_took() -> None:
    records = {
        record["metric"]: record["value"] for record in json.loads((RESULTS / "training-cuda.json").read_text())
    }
    layers = [f"actor_config.{key}={value}" for key, value in zip(LAYERS, ("full", "block", 18), strict=True)]
    cluster, work = load_cluster("h200"), Work(512, [512])
    seconds = [update_seconds(*setting(*overrides), cluster, work) for overrides in ([], layers)]
    measured = records["cuda.train_tokens_per_s"] / records["cuda.train_tokens_per_s_recomputed"]
    assert seconds[1] / seconds[0] == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("name", ["h200", "h100", "ascend_910b", "ascend_910c"])
def test_no_stage_is_free_or_negative(name: str) -> None:
    cluster = load_cluster(name)
    cfg, model, layout = setting("rl_config.actor_resource.num_npus=8")
    times = step_time(cfg, model, layout, cluster, WORK)
    assert times.total > 0
    assert all(getattr(times, stage) >= 0 for stage in StepTime.__dataclass_fields__)
    assert resharding_seconds(cfg, model, layout, cluster) > cluster.switch_s
    assert dock_seconds(cfg, layout, cluster, WORK) > 0


def test_lengths_have_the_mean_that_is_asked_for() -> None:
    lengths = lognormal_lengths(1000, 2048, 0.8, 512)
    assert sum(lengths) / 512 == pytest.approx(1000, abs=1)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 2048
    assert set(lognormal_lengths(700, 2048, 0.0, 16)) == {700}
    with pytest.raises(ValueError, match=r"mean = 3000: must be between 1 and the longest, 2048"):
        lognormal_lengths(3000, 2048, 0.8, 4)
