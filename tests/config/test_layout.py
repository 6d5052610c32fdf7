"""Layout arithmetic against definitions, exhaustively for small worlds; the memory estimate against sums by hand."""

import io
import itertools
from dataclasses import replace

import pytest
from rich.console import Console

from mindspeed_rl.config.compose import load_config
from mindspeed_rl.config.files import resolve_model
from mindspeed_rl.config.layout import Layout, derive_layout, pipeline_chunks
from mindspeed_rl.config.memory import (
    FLOAT32,
    LOGIT_CHUNK,
    activation_bytes,
    estimate_memory,
    kv_bytes_per_token,
    logit_bytes,
    stage_parameters,
)
from mindspeed_rl.config.report import print_report
from mindspeed_rl.config.schema import MegatronConfig


def make_layout(tp: int, pp: int, dp: int, infer_tp: int, cp: int = 1) -> Layout:
    world = tp * cp * pp * dp
    return Layout(
        world=world,
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        infer_tp=infer_tp,
        rollout_replicas=world // infer_tp,
        prompts_per_iteration=8,
        prompts_in_generation=8,
        samples_per_prompt=4,
        prompts_per_mini_batch=4,
        micro_batch_size=3,
        epochs=2,
        train_iters=5,
    )


SMALL = [
    make_layout(tp, pp, dp, infer_tp, cp)
    for tp, pp, dp, cp in itertools.product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2))
    for infer_tp in range(1, tp * cp * pp * dp + 1)
    if tp * cp * pp * dp <= 16 and tp * cp * pp * dp % infer_tp == 0
]


@pytest.mark.parametrize("layout", SMALL, ids=lambda x: f"tp{x.tp}-cp{x.cp}-pp{x.pp}-dp{x.dp}-infer{x.infer_tp}")
def test_every_small_layout(layout):
    ranks = range(layout.world)
    sizes = (layout.pp, layout.dp, layout.cp, layout.tp)
    places = list(itertools.product(*map(range, sizes)))  # tp runs fastest
    found = [(layout.pp_rank(r), layout.dp_rank(r), layout.cp_rank(r), layout.tp_rank(r)) for r in ranks]
    assert found == places

    replicas = [set(replica) for replica in layout.model_replicas()]
    assert replicas == [{r for r in ranks if layout.dp_rank(r) == d} for d in range(layout.dp)]
    engines = [set(ranks[i : i + layout.infer_tp]) for i in ranks[:: layout.infer_tp]]
    assert [{r for r in ranks if layout.rollout_replica(r) == e} for e in range(layout.rollout_replicas)] == engines

    # cells by another way: join overlapping groups until none overlap
    expected = [*replicas, *engines]
    while pair := next(((a, b) for a, b in itertools.combinations(expected, 2) if a & b), None):
        expected = [group for group in expected if group not in pair] + [pair[0] | pair[1]]
    assert layout.cells() == sorted(tuple(sorted(group)) for group in expected)


def test_cells_of_layouts_one_meets():
    assert make_layout(tp=4, pp=1, dp=2, infer_tp=4).cells() == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert make_layout(tp=2, pp=1, dp=2, infer_tp=1).cells() == [(0, 1), (2, 3)]
    assert make_layout(tp=1, pp=1, dp=4, infer_tp=2).cells() == [(0, 1), (2, 3)]
    assert make_layout(tp=1, pp=2, dp=2, infer_tp=2).cells() == [(0, 1, 2, 3)]


def test_ranks_that_share_experts():
    layout = replace(make_layout(tp=2, pp=1, dp=4, infer_tp=2), ep=2)
    assert [layout.ep_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert layout.cells() == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert layout.model_replicas() == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert replace(make_layout(tp=1, pp=2, dp=2, infer_tp=1), ep=2).cells() == [(0, 1, 2, 3)]
    parts = make_layout(tp=1, pp=1, dp=4, infer_tp=1, cp=2)
    assert [replace(parts, ep=4).ep_rank(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert replace(parts, ep=4).cells() == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert replace(parts, ep=2).cells() == parts.cells() == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_batch_arithmetic():
    layout = make_layout(tp=1, pp=1, dp=2, infer_tp=1)
    assert layout.sequences_per_iteration == 32
    assert layout.mini_batches == 2
    assert layout.optimizer_steps_per_iteration == 4
    assert layout.total_optimizer_steps == 20
    assert layout.sequences_per_mini_batch_per_rank == 8
    assert layout.micro_batches == 3  # of 3, 3 and 2 sequences


def test_layout_of_the_7b_run():
    cfg, _ = load_config("grpo_trainer_qwen25_7b")
    layout = derive_layout(cfg)
    assert (layout.world, layout.tp, layout.pp, layout.dp) == (8, 4, 1, 2)
    assert (layout.infer_tp, layout.rollout_replicas) == (4, 2)
    assert layout.sequences_per_iteration == cfg.actor.global_batch_size * cfg.rl_config.n_samples_per_prompt


SEPARATE = ("rl_config.use_integrated_worker=false", "rl_config.rollout_resource={num_npus: 6}")


def test_rollout_on_devices_of_its_own():
    infer_tp = "generate_config.infer_tensor_parallel_size=2"
    layout = derive_layout(load_config("grpo_trainer_tiny_cpu", [*SEPARATE, infer_tp])[0])
    assert (layout.world, layout.dp, layout.rollout_world, layout.devices) == (2, 2, 6, 8)
    assert layout.rollout_engines() == [(0, 1), (2, 3), (4, 5)]
    shared = derive_layout(load_config("grpo_trainer_tiny_cpu", [infer_tp])[0])
    assert (shared.world, shared.rollout_world, shared.devices) == (2, 2, 2)


def test_a_device_of_one_role_holds_nothing_of_the_other():
    cfg, model, layout = loaded("grpo_trainer_tiny_cpu", *SEPARATE)
    memory = estimate_memory(cfg, model, layout)
    assert memory.training_kept == 0
    assert memory.generating == memory.rollout_weights + memory.kv_full
    console = Console(file=io.StringIO(), width=120)
    print_report(cfg, console)
    text = console.file.getvalue()
    for part in ("Training ranks", "Rollout ranks", "rl_config.rollout_resource.num_npus", "rl_config.staleness"):
        assert part in text
    for part in ("resharding cells", "kept while generating"):
        assert part not in text


def loaded(name: str, *overrides: str):
    cfg, _ = load_config(name, overrides)
    return cfg, resolve_model(cfg), derive_layout(cfg)


def test_memory_of_the_tiny_model_on_one_device():
    cfg, model, layout = loaded("grpo_trainer_tiny_cpu", "rl_config.actor_resource.num_npus=1")
    memory, count = estimate_memory(cfg, model, layout), model.num_parameters
    assert stage_parameters(cfg, model, layout) == count
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * count, 4 * count, 8 * count)
    assert memory.reference == (4 * count if cfg.rl_config.init_kl_coef else 0)
    assert memory.rollout_weights == 4 * count
    keys_and_values = 2
    assert memory.kv_per_token == (
        keys_and_values * model.num_layers * model.num_query_groups * model.kv_channels * FLOAT32
    )
    assert memory.training_kept == memory.weights + memory.gradients + memory.optimizer


def test_memory_is_divided_by_the_layout():
    cfg, model, layout = loaded("grpo_trainer_qwen25_7b")
    memory, parameters = estimate_memory(cfg, model, layout), model.num_parameters // 4
    assert stage_parameters(cfg, model, layout) == pytest.approx(parameters, rel=1e-3)
    assert memory.weights == pytest.approx(2 * parameters, rel=1e-3)
    assert memory.gradients == pytest.approx(4 * parameters, rel=1e-3)
    assert memory.optimizer == pytest.approx(12 * parameters / 2, rel=1e-3)
    assert memory.training_kept == 0  # everything is offloaded
    assert memory.kv_per_token == 2 * 28 * 1 * 128 * 2  # one of 4 groups on each of 4 ranks


def test_every_offload_switch_moves_its_own_share():
    cfg, model, layout = loaded("grpo_trainer_qwen25_7b")
    full = estimate_memory(cfg, model, layout)
    shares = {
        "offload_train_param": full.weights,
        "offload_train_grad": full.gradients,
        "offload_train_optimizer": full.optimizer,
        "offload_reference": full.reference,
    }
    for switch, share in shares.items():
        cfg, *_ = loaded("grpo_trainer_qwen25_7b", f"generate_config.{switch}=false")
        assert estimate_memory(cfg, model, layout).training_kept == share


def test_replicated_key_value_heads_are_counted():
    heads = ["model.tiny_qwen2.num_attention_heads=4", "model.tiny_qwen2.num_query_groups=2"]
    cfg, model, _ = loaded("grpo_trainer_tiny_cpu", *heads, "generate_config.infer_tensor_parallel_size=1")
    alone = kv_bytes_per_token(cfg, model)
    sizes = {}
    for infer_tp in (2, 4):
        cfg, _ = load_config(
            "grpo_trainer_tiny_cpu",
            [*heads, "rl_config.actor_resource.num_npus=4", f"generate_config.infer_tensor_parallel_size={infer_tp}"],
        )
        sizes[infer_tp] = kv_bytes_per_token(cfg, model)
    assert sizes == {2: alone // 2, 4: alone // 2}  # two groups: four ranks hold each twice


def test_recomputation_and_sequence_parallel_save_activations():
    def size(*overrides: str) -> int:
        return activation_bytes(*loaded("grpo_trainer_qwen25_7b", *(f"megatron_training.{o}" for o in overrides)))

    none = size("recompute_granularity=null", "recompute_method=null", "recompute_num_layers=null")
    block = size("recompute_method=block", "recompute_num_layers=14")
    all_layers = size("recompute_method=block", "recompute_num_layers=28")
    uniform = size("recompute_method=uniform", "recompute_num_layers=1")
    assert none > block > all_layers == uniform
    assert size("sequence_parallel=false") > size("sequence_parallel=true")
    # one layer redone, and the input of 28 layers: 2 sequences of 4096 tokens in bfloat16, TP 4, sequence parallel
    hidden, heads, mlp = 3584 / 4, (2 * 28 + 2 * 4) * 128 / 4, 3 * 18944 / 4
    assert uniform == pytest.approx(2 * 4096 * 2 * (28 * hidden + 4 * hidden + heads + mlp))


def test_context_parallelism_divides_tokens_and_optimizer_state():
    layout = ["actor_config.tensor_model_parallel_size=2", "rl_config.actor_resource.num_npus=8"]
    sizes = {
        cp: estimate_memory(*loaded("grpo_trainer_qwen25_7b", *layout, f"actor_config.context_parallel_size={cp}"))
        for cp in (1, 2)
    }
    assert sizes[2].logits == sizes[1].logits  # of a chunk of tokens, whatever there is
    assert sizes[2].activations * 2 == pytest.approx(sizes[1].activations)
    assert (sizes[2].optimizer, sizes[2].weights) == (sizes[1].optimizer, sizes[1].weights)  # DP 4, or DP 2 x CP 2


def test_logits_are_those_of_a_chunk_beside_the_gradient_of_their_weights():
    cfg, model, layout = loaded("grpo_trainer_qwen25_7b")
    columns, bf16, fp32 = 152064 // 4, 2, 4
    expected = LOGIT_CHUNK * columns * (2 * bf16 + 2 * fp32) + columns * 3584 * (fp32 + bf16)
    assert logit_bytes(cfg, model, layout) == expected


def test_a_token_cap_limits_activations():
    def sizes(*overrides: str) -> tuple[int, int]:
        # sizes beyond any device are wanted here: without the limit that refuses them
        loaded_run = loaded("grpo_trainer_qwen25_7b", "device_memory_gib=null", *overrides)
        return activation_bytes(*loaded_run), logit_bytes(*loaded_run)

    forward = [f"~rl_config.{model}_forward_micro_batch_size" for model in ("actor", "ref")]
    dynamic = ["rl_config.use_dynamic_bsz=true", "~actor_config.micro_batch_size", *forward]
    fixed = sizes("actor_config.micro_batch_size=2")  # of 4,096 tokens each
    assert sizes(*dynamic, "rl_config.max_packing_token_size=8192") == fixed
    half = sizes(*dynamic, "rl_config.max_packing_token_size=4096")
    assert (half[0] * 2, half[1]) == fixed  # logits are those of a chunk
    # a mini-batch has 128 sequences on a rank: a larger cap changes nothing
    most = sizes("actor_config.micro_batch_size=128")
    assert sizes(*dynamic, "rl_config.max_packing_token_size=1000000") == most


def test_pipeline_stages_share_layers_and_keep_embeddings_apart():
    cfg, model, layout = loaded("grpo_trainer_qwen25_7b", "actor_config.pipeline_model_parallel_size=2")
    embedding = 152064 * 3584
    layers = model.num_parameters - 2 * embedding
    assert stage_parameters(cfg, model, layout) == (layers // 2 + embedding) // 4
    assert layout.dp == 1


def chunks(num_layers: int, **settings) -> list[list[list[int]]]:
    return [[list(c) for c in stage] for stage in pipeline_chunks(num_layers, MegatronConfig(**settings))]


def test_layers_of_pipeline_stages():
    pp = {"pipeline_model_parallel_size": 2}
    assert chunks(4, **pp) == [[[0, 1]], [[2, 3]]]
    assert chunks(4, **pp, num_layer_list="3,1") == [[[0, 1, 2]], [[3]]]
    assert chunks(8, **pp, num_layers_per_virtual_pipeline_stage=2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    # positions 1 and 5 of six are empty
    assert chunks(4, **pp, noop_layers=[1, 5]) == [[[0, 1]], [[2, 3]]]
    assert chunks(3, **pp, noop_layers=3) == [[[0, 1]], [[2]]]
    assert chunks(7, **pp, noop_layers="7", num_layers_per_virtual_pipeline_stage=2) == [
        [[0, 1], [4, 5]],
        [[2, 3], [6]],
    ]


def test_the_report_shows_the_layers_of_every_stage():
    console = Console(file=io.StringIO(), width=200)
    overrides = ["pipeline_model_parallel_size=2", "num_layers_per_virtual_pipeline_stage=7"]
    print_report(load_config("grpo_trainer_qwen25_7b", [f"actor_config.{o}" for o in overrides])[0], console)
    assert "Layers of the pipeline stages: 0-6, 14-20 | 7-13, 21-27" in console.file.getvalue()


def test_memory_is_that_of_the_largest_stage_and_of_interleaving():
    def loaded_with(*overrides: str):
        return loaded("grpo_trainer_qwen25_7b", "actor_config.pipeline_model_parallel_size=2", *overrides)

    even, uneven = loaded_with(), loaded_with("actor_config.num_layer_list=[10,18]")
    interleaved = loaded_with("actor_config.num_layers_per_virtual_pipeline_stage=7")
    embedding = 152064 * 3584
    layers = even[1].num_parameters - 2 * embedding
    assert stage_parameters(*uneven) == (layers * 18 // 28 + embedding) // 4
    assert stage_parameters(*interleaved) == stage_parameters(*even)
    none = ["recompute_granularity=null", "recompute_method=null", "recompute_num_layers=null"]
    none = [f"megatron_training.{override}" for override in none]
    plain = activation_bytes(*loaded_with(*none))
    of_18 = activation_bytes(*loaded_with(*none, "actor_config.num_layer_list=[10,18]"))
    assert of_18 == pytest.approx(plain * 18 / 14)
    # two stages, two chunks each: a quarter more than without
    in_chunks = activation_bytes(*loaded_with(*none, "actor_config.num_layers_per_virtual_pipeline_stage=7"))
    assert in_chunks == pytest.approx(plain * 1.25)


def test_experts_are_divided_further():
    cfg, model, layout = loaded("grpo_trainer_qwen3_30b_a3b")
    assert (layout.tp, layout.dp, layout.ep) == (4, 4, 4)
    experts = 48 * 128 * 3 * 2048 * 768
    assert model.expert_parameters == experts
    routers = 48 * 128 * 2048
    assert model.replicated_parameters == routers
    others = (model.num_parameters - experts - routers) // 4 + routers
    assert stage_parameters(cfg, model, layout) == pytest.approx(others + experts // 16, rel=1e-3)
    memory = estimate_memory(cfg, model, layout)
    assert memory.optimizer == pytest.approx(12 * (others / 4 + experts / 16), rel=1e-3)  # one replica of each expert
    whole = estimate_memory(cfg, model, replace(layout, ep=1))
    assert whole.optimizer == pytest.approx(12 * (others / 4 + experts / 16), rel=1e-3)  # four, each keeps a quarter
    assert whole.weights - memory.weights == pytest.approx(2 * experts / 4 * 3 / 4, rel=1e-3)


def test_activations_of_experts_are_those_of_the_tokens_sent_to_them():
    name, everything = "grpo_trainer_qwen3_30b_a3b", ["recompute_method=uniform", "recompute_num_layers=1"]
    found = activation_bytes(*loaded(name, *(f"megatron_training.{setting}" for setting in everything)))
    hidden, heads = 2048 / 4, (2 * 32 + 2 * 4) * 128 / 4
    routed = 8 * (2 * 2048 + 3 * 768 / 4)
    assert found == pytest.approx(2 * 4096 * 2 * (48 * hidden + 4 * hidden + heads + routed))


def test_memory_of_latent_attention_and_shared_experts():
    cfg, model, layout = loaded("grpo_trainer_deepseekv3_671b")
    assert (layout.tp, layout.pp, layout.dp, layout.ep) == (8, 16, 2, 2)
    whole = 7168 * (1536 + 512 + 64) + 58 / 61 * 256 * 7168  # of a layer: down-projections, and most have a router
    attention = 1536 * 128 * 192 + 512 * 128 * (128 + 128) + 128 * 128 * 7168
    expert, mlp = 3 * 7168 * 2048, 3 * 7168 * 18432
    others = (4 * (attention + (3 * mlp + 58 * expert) / 61) + 129280 * 7168) / 8 + 4 * whole
    experts = 4 * 256 * expert / (8 * 2)  # no layer of the fullest stage is without
    assert stage_parameters(cfg, model, layout) == pytest.approx(others + experts, rel=1e-3)
    memory = estimate_memory(cfg, model, layout)
    assert memory.optimizer == pytest.approx(12 * (others / 2 + experts), rel=1e-3)
    assert memory.kv_per_token == 61 * (512 + 64) * 2
    divided = model.num_parameters - 61 * whole
    assert memory.rollout_weights == pytest.approx(2 * (divided / 32 + 61 * whole), rel=1e-3)


def test_activations_of_latent_attention_and_shared_experts():
    changes = ["megatron_training.recompute_method=uniform", "megatron_training.recompute_num_layers=1"]
    found = activation_bytes(*loaded("grpo_trainer_deepseekv3_671b", *changes))
    hidden, latents, heads = 7168 / 8, 2 * (1536 + 512) / 8, 4 * 128 * 192 / 8
    routed = 8 * (2 * 7168 + 3 * 2048 / 8) + 3 * 2048 / 8
    layer = 4 * hidden + latents + heads + 3 / 61 * 3 * 18432 / 8 + 58 / 61 * routed
    # 16 micro-batches of one sequence in flight, of whose four layers the input is kept; one layer is redone
    assert found == pytest.approx(4096 * 2 * (16 * 4 * hidden + layer))


def test_report_of_a_mixture_of_experts():
    console = Console(file=io.StringIO(), width=140)
    print_report(loaded("grpo_trainer_qwen3_30b_a3b")[0], console)
    text = " ".join(console.file.getvalue().split())  # titles are broken to the width of their tables
    for part in ("30,532.1 M parameters, of which a token uses 3,353.0 M", "expert_model_parallel_size", " EP "):
        assert part in text
