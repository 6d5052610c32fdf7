"""Rollout in vLLM with weights resharded from training: the same tokens and log-probs under every layout."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import make_family
from support.fresh_engine import fresh_parameters, parameters
from support.ranks import run_ranks
from transformers import AutoModelForCausalLM

from examples.make_tiny_model import make_tiny_model
from mindspeed_rl.common.errors import ConfigError
from mindspeed_rl.config.generate import GenerateConfig, SamplingConfig
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.data.packing import fixed_micro_batches
from mindspeed_rl.device.cpu import CpuDevice
from mindspeed_rl.engine.vllm.engine import VllmEngine
from mindspeed_rl.types import RolloutBatch

PROMPTS = [[6, 2, 7, 5], [9, 1, 8], [10, 5], [6, 6, 6, 6, 6], [11, 3], [12, 4, 9], [*range(1, 16), *range(15, 0, -1)]]
STOP = [0]
MAX_TOKENS = 12
LOG_PROB_TOLERANCE = 5e-6  # nats, float32: training against rollout kernels


def rollout(rank: int, folder: str, train: dict[str, int], infer_tp: int, temperature: float) -> dict[str, Any]:
    """Generate with the weights of `folder` after they went through the training engine, and score what came."""
    from mindspeed_rl.checkpoint.hf import HFWeights
    from mindspeed_rl.device.select import make_device
    from mindspeed_rl.engine.base import GenerationRequest

    device = make_device("cpu")
    device.install()
    from mindspeed_rl.engine.megatron.engine import MegatronEngine, initialize_parallel_state
    from mindspeed_rl.engine.vllm.engine import VllmEngine

    sampling = SamplingConfig(max_tokens=MAX_TOKENS, temperature=temperature)
    cfg = GenerateConfig(
        infer_tensor_parallel_size=infer_tp, dtype="float32", max_model_len=64, sampling_config=sampling
    )
    engine = VllmEngine(cfg, folder, device, seed=1, stop_tokens=STOP)
    actor = MegatronConfig(**train)
    initialize_parallel_state(actor)
    with open(f"{folder}/config.json") as file:
        model = ModelConfig.from_hf(json.load(file))
    training = MegatronEngine(actor, model, device, 10, HFWeights(folder), with_reference=False)
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    requests = [GenerationRequest(row, prompt, seed=100 + row) for row, prompt in enumerate(prompts)]
    passes = []
    for _ in range(2):  # the second pass overwrites weights that were generated with
        engine.update_weights(training.export_weights(1 << 14))
        done = {g.row: g for step in engine.generate(requests) for g in step}
        passes.append([(done[row].tokens, done[row].log_probs) for row in range(len(PROMPTS))])
    assert passes[0] == passes[1]
    likeliest = [GenerationRequest(row, prompt, seed=None, greedy=True) for row, prompt in enumerate(prompts)]
    mixed = [r for pair in zip(requests, likeliest, strict=True) for r in pair]
    together = {(g.row, g.greedy): g for step in engine.generate(mixed) for g in step}
    going_on = sampling.model_copy(update={"ignore_eos": True})
    on = [replace(request, sampling=going_on) for request in requests]
    ignoring = {g.row: g.tokens for step in engine.generate(on) for g in step}
    begun = engine.generate(mixed)
    begun_ends = [generation for _ in range(4) for generation in next(begun)]
    unfinished, stopped = engine.unfinished(), engine.interrupt()
    alone = {g.row: g for step in engine.generate(likeliest) for g in step}
    batch = RolloutBatch(prompts, [torch.tensor(tokens) for tokens, _ in passes[0]])
    scored = training.score(batch, fixed_micro_batches(len(batch), 4), temperature or 1.0)
    return {
        "tokens": [t for t, _ in passes[0]],
        "log_probs": [lp for _, lp in passes[0]],
        "scored": scored.log_probs.split(batch.response_lengths.tolist()) if scored else None,
        "ignoring": [ignoring[row] for row in range(len(PROMPTS))],
        "begun": (begun_ends, unfinished, stopped),
        "all_together": together,
        "together": [together[row, False].tokens for row in range(len(PROMPTS))],
        "greedy": [together[row, True] for row in range(len(PROMPTS))],
        "greedy_alone": [alone[row] for row in range(len(PROMPTS))],
        "parameters": engine.llm.collective_rpc(parameters)[0],
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    mistral = make_family(root / "mistral", "mistral")
    for file in ("params.json", "consolidated.safetensors"):  # Mistral's own format, which its folders hold, too
        (mistral / file).write_text("{}")
    return {
        "qwen2-tied": str(make_tiny_model(root / "qwen2-tied", tie=True)),
        "qwen3": str(make_tiny_model(root / "qwen3", architecture="qwen3")),
        "llama-yarn": str(make_family(root / "llama-yarn", "llama-yarn")),
        "mistral": str(mistral),
        "qwen3_moe": str(make_tiny_model(root / "qwen3_moe", architecture="qwen3_moe")),
        "deepseek_v2": str(make_family(root / "deepseek_v2", "deepseek_v2")),
        "deepseek_v3": str(make_family(root / "deepseek_v3", "deepseek_v3")),
    }


@pytest.fixture(scope="module")
def one_rank(folders: dict[str, str]) -> dict[str, Any]:
    return run_ranks(1, rollout, folders["qwen2-tied"], {}, 1, 0.8)[0]


def assert_rollout_equals_training(result: dict[str, Any]) -> None:
    for reported, scored in zip(result["log_probs"], result["scored"], strict=True):
        torch.testing.assert_close(torch.tensor(reported), scored, atol=LOG_PROB_TOLERANCE, rtol=0)


def test_training_scores_what_rollout_sampled_the_same(one_rank: dict[str, Any]) -> None:
    assert_rollout_equals_training(one_rank)
    assert len({tuple(tokens) for tokens in one_rank["tokens"]}) > 1  # sampled, not constant


def test_a_response_ends_with_its_stop_token(one_rank: dict[str, Any]) -> None:
    for tokens in one_rank["tokens"]:
        assert tokens[-1] in STOP or len(tokens) == MAX_TOKENS
        assert not set(tokens[:-1]) & set(STOP)


def test_a_request_may_ignore_them_where_the_engine_does_not(one_rank: dict[str, Any]) -> None:
    assert any(len(tokens) < MAX_TOKENS for tokens in one_rank["tokens"])
    for tokens, longer in zip(one_rank["tokens"], one_rank["ignoring"], strict=True):
        assert len(longer) == MAX_TOKENS
        assert longer[: len(tokens)] == tokens


def test_greedy_responses_come_with_sampled_ones(one_rank: dict[str, Any], folders: dict[str, str]) -> None:
    """They are what they are alone, and in transformers; neither kind depends on the other."""
    assert one_rank["together"] == one_rank["tokens"]
    assert one_rank["greedy"] == one_rank["greedy_alone"]
    tokens = [generation.tokens for generation in one_rank["greedy"]]
    assert tokens == hf_greedy(folders["qwen2-tied"])
    assert tokens != one_rank["tokens"]
    assert all(generation.log_probs is None for generation in one_rank["greedy"])


def test_an_interrupted_engine_gives_what_there_is_of_both_kinds(one_rank: dict[str, Any]) -> None:
    ended, unfinished, stopped = one_rank["begun"]
    whole = one_rank["all_together"]
    assert sorted((g.row, g.greedy) for g in ended + stopped) == sorted(whole)
    assert {g.row: len(g.tokens) for g in stopped if not g.greedy} == unfinished
    assert any(g.greedy for g in stopped)
    for generation in stopped:
        tokens = whole[generation.row, generation.greedy].tokens
        assert 0 < len(generation.tokens) < len(tokens)
        assert generation.tokens == tokens[: len(generation.tokens)]
        assert (generation.log_probs is None) == generation.greedy
    assert all(generation == whole[generation.row, generation.greedy] for generation in ended)


def hf_greedy(folder: str) -> list[list[int]]:
    model: Any = AutoModelForCausalLM.from_pretrained(Path(folder))
    settings: dict[str, Any] = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "pad_token_id": 0}
    return [model.generate(torch.tensor([p]), **settings)[0, len(p) :].tolist() for p in PROMPTS]


TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"


@pytest.mark.parametrize(
    ("train", "infer_tp"),
    [({TP: 2}, 1), ({TP: 1}, 2), ({TP: 2}, 2), ({PP: 2}, 1)],
    ids=["TP2-to-TP1", "TP1-to-TP2", "TP2-to-TP2", "PP2-to-TP1"],
)
def test_layouts_generate_the_same(
    train: dict[str, int], infer_tp: int, folders: dict[str, str], one_rank: dict[str, Any]
) -> None:
    results = run_ranks(2, rollout, folders["qwen2-tied"], train, infer_tp, 0.8)
    for result in results:
        assert result["tokens"] == one_rank["tokens"]
        assert result["greedy"] == one_rank["greedy"]
        if result["scored"] is not None:
            assert_rollout_equals_training(result)
    assert any(result["scored"] is not None for result in results)


@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3", "llama-yarn", "mistral", "qwen3_moe", "deepseek_v2"])
def test_greedy_output_equals_that_of_transformers(family: str, folders: dict[str, str]) -> None:
    result = run_ranks(1, rollout, folders[family], {}, 1, 0.0)[0]
    assert_rollout_equals_training(result)
    assert result["tokens"] == hf_greedy(folders[family])


def test_shared_experts_of_training_are_whole_in_rollout(folders: dict[str, str]) -> None:
    """Each rank trains half of the experts; in rollout it has a slice of every one."""
    results = run_ranks(2, rollout, folders["qwen3_moe"], {"expert_model_parallel_size": 2}, 2, 0.8)
    assert results[0]["tokens"] == results[1]["tokens"]
    assert len({tuple(tokens) for tokens in results[0]["tokens"]}) > 1
    for result in results:
        assert_rollout_equals_training(result)


def test_latent_attention_of_two_ranks_is_what_a_fresh_load_gives(folders: dict[str, str]) -> None:
    folder, train = folders["deepseek_v3"], {TP: 2, "sequence_parallel": True}
    results, fresh = run_ranks(2, rollout, folder, train, 2, 0.8), run_ranks(2, fresh_parameters, folder, 2)
    for rank, (result, expected) in enumerate(zip(results, fresh, strict=True)):
        assert result["tokens"] == results[0]["tokens"]
        assert result["parameters"].keys() == expected.keys()
        assert any(name.endswith("e_score_correction_bias") for name in expected)
        for name, tensor in expected.items():
            # vLLM fills the vocabulary up to 64: all 16 tokens are on the first rank, and the rest means nothing
            rows = len(tensor) if name not in ("model.embed_tokens.weight", "lm_head.weight") else (16, 0)[rank]
            assert torch.equal(result["parameters"][name][:rows], tensor[:rows]), name
    assert_rollout_equals_training(results[0])


def test_an_engine_starts_no_process_to_look_at_its_model(folders: dict[str, str], tmp_path: Path) -> None:
    assert run_ranks(1, started_engine, folders["qwen3"], str(tmp_path)) == [[]]


def started_engine(rank: int, folder: str, cache: str) -> list[str]:
    """What vLLM caches when it had to start a process."""
    os.environ["VLLM_CACHE_ROOT"] = cache
    VllmEngine(GenerateConfig(dtype="float32", max_model_len=64), folder, CpuDevice(), seed=1, stop_tokens=STOP)
    return [path.name for path in Path(cache).rglob("*.json")]


def test_whole_experts_are_refused_on_the_cpu(folders: dict[str, str]) -> None:
    cfg = GenerateConfig(infer_tensor_parallel_size=2, enable_expert_parallel=True, dtype="float32")
    with pytest.raises(ConfigError, match="enable_expert_parallel = True: vLLM's CPU kernels"):
        VllmEngine(cfg, folders["qwen3_moe"], CpuDevice(), seed=1, stop_tokens=STOP)


def test_nothing_stays_in_shared_memory(folders: dict[str, str]) -> None:
    before = set(Path("/dev/shm").iterdir())
    run_ranks(2, rollout, folders["qwen2-tied"], {}, 2, 0.8)  # its ranks exit without any cleaning up
    new = {path for path in Path("/dev/shm").iterdir() if path not in before and "sem." not in path.name}
    deadline = time.monotonic() + 120  # what other tests use, which run at the same time, goes by itself
    while (left := [path for path in new if path.exists()]) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == []
