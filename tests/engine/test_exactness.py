"""Every training layout against every rollout layout, for each family: vLLM has the bits that were trained."""

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.families import make_family
from support.ranks import Worlds, process_groups, run_ranks

from examples.make_tiny_model import make_tiny_model
from mindspeed_rl.checkpoint.hf import SINGLE_FILE, HFWeights
from mindspeed_rl.config.generate import GenerateConfig, SamplingConfig
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig

RANKS = 4
PROMPTS = [[6, 2, 7, 5], [9, 1, 8], [*range(1, 16), *range(15, 0, -1)]]
MAX_TOKENS = 4
LOG_PROB_TOLERANCE = 5e-6  # nats, float32: the order of summation over tensor-parallel ranks
FAMILIES = ["qwen2", "qwen3", "llama-llama3", "mistral", "smollm", "qwen3_moe", "deepseek_v3"]
LAYERS = 4  # may be shared among four stages, or two of two chunks

TP, PP, EP = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert"))
CP = "context_parallel_size"
VPP = "num_layers_per_virtual_pipeline_stage"


def training_layouts(world: int, experts: bool) -> list[dict[str, Any]]:
    """All ways to divide the model among `world` ranks that differ in what a rank holds."""
    found: list[dict[str, Any]] = []
    for tp, pp, cp, ep in itertools.product((1, 2), (1, 2, 4), (1, 2), (1, 2, 4)):
        dp, rest = divmod(world, tp * pp * cp)
        if rest or not dp or dp * cp % ep or (ep > 1 and not experts):
            continue
        sizes = {TP: tp, PP: pp, CP: cp, EP: ep, "sequence_parallel": tp > 1}
        found.append(sizes)
        if pp == 2:
            found.append({**sizes, VPP: 1})
    return found


def rollout_layouts(world: int) -> list[int]:
    """Tensor parallelism of the engines that `world` ranks form; 4 is more than the models' two key/value heads."""
    return [tp for tp in (1, 2, 4) if world % tp == 0]


def make_models(folder: Path, family: str) -> tuple[str, str]:
    """Folders of a model and of another one, with its weights in another order."""
    one, other = folder / family, folder / f"{family}-flipped"
    if family == "qwen3_moe":
        make_tiny_model(one, family, layers=LAYERS, expert_ffn=128)
    else:
        make_family(one, family, num_hidden_layers=LAYERS)
    shutil.copytree(one, other)
    stored = HFWeights(one)
    save_file({name: stored.tensor(name).flip(0) for name in stored.names}, other / SINGLE_FILE, {"format": "pt"})
    return str(one), str(other)


@contextmanager
def rollout_engine(folder: str, infer_tp: int, device: Any) -> Iterator[Any]:
    """Ends the world that it runs in, too."""
    from mindspeed_rl.engine.vllm.engine import VllmEngine

    sampling = SamplingConfig(max_tokens=MAX_TOKENS)
    cfg = GenerateConfig(
        infer_tensor_parallel_size=infer_tp, dtype="float32", max_model_len=64, sampling_config=sampling
    )
    engine = VllmEngine(cfg, folder, device, seed=1, stop_tokens=[0])
    yield engine
    engine.llm.llm_engine.engine_core.shutdown()


def generated(engine: Any) -> list[tuple[list[int], list[float]]]:
    from mindspeed_rl.engine.base import GenerationRequest

    requests = [GenerationRequest(row, torch.tensor(prompt), seed=100 + row) for row, prompt in enumerate(PROMPTS)]
    done = {g.row: g for step in engine.generate(requests) for g in step}
    return [(done[row].tokens, done[row].log_probs) for row in range(len(PROMPTS))]


def pairs(size: int, experts: bool, every: bool) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Rollout layouts of a world, each with training layouts: with all, or with its share of them."""
    rollouts = rollout_layouts(size)
    for number, infer_tp in enumerate(rollouts):
        layouts = training_layouts(size, experts)
        yield infer_tp, layouts if every else layouts[number :: len(rollouts)]


def exchange(rank: int, root: str, folders: dict[str, tuple[str, str]], every: bool) -> dict[str, list[Any]]:
    """(training layout, pair, which model, what it generates) by family; all weights are compared on the way."""
    worlds = Worlds(rank, RANKS, root)
    from mindspeed_rl.engine.megatron.engine import MegatronEngine, initialize_parallel_state

    found: dict[str, list[Any]] = {}
    for family, models in folders.items():
        stored = [HFWeights(folder) for folder in models]
        model = ModelConfig.from_hf(stored[0].config())
        found[family] = []
        for size in (1, 2, 4) if every else (4,):
            for infer_tp, layouts in pairs(size, model.num_moe_experts is not None, every):
                with worlds.world(size) as here:
                    if not here:
                        continue
                    with rollout_engine(models[0], infer_tp, worlds.device) as engine:
                        for number, settings in enumerate(layouts):
                            which = number % 2  # other weights than before: what does not arrive is seen
                            cfg = MegatronConfig(**settings)
                            with process_groups():
                                initialize_parallel_state(cfg)
                                training = MegatronEngine(
                                    cfg, model, worlds.device, 1, stored[which], with_reference=False
                                )
                                exported = training.export_weights(1 << 14)
                                engine.update_weights(checked(exported, stored[which]))
                                fresh = ((name, stored[which].tensor(name)) for name in stored[which].names)
                                layout = f"{size} ranks, {settings}"
                                pair = f"{family}, {layout} to TP {infer_tp}"
                                assert engine.differing_weights(fresh) == [], pair
                                found[family].append((layout, pair, which, generated(engine)))
    return found


def checked(exported: Iterator[tuple[str, torch.Tensor]], stored: HFWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, if they are all that is stored, bit for bit."""
    names = set(stored.names)
    for name, tensor in exported:
        assert torch.equal(tensor, stored.tensor(name)), name
        names.remove(name)
        yield name, tensor
    assert not names


def assert_all_generate_the_same(folder: Path, families: list[str], every: bool) -> None:
    folders = {family: make_models(folder, family) for family in families}
    results = run_ranks(RANKS, exchange, str(folder), folders, every)
    for family in families:
        reference: dict[int, Any] = {}  # the first pair that had the model: with `every`, of one rank or two
        for _, _, which, outputs in results[0][family]:
            reference.setdefault(which, outputs)
        assert reference[0] != reference[1]
        for _, pair, which, outputs in (found for result in results for found in result[family]):
            for (tokens, log_probs), (same, expected) in zip(outputs, reference[which], strict=True):
                assert tokens == same, pair
                assert log_probs == pytest.approx(expected, abs=LOG_PROB_TOLERANCE), pair
        assert len({layout for layout, *_ in results[0][family]}) >= (12 if every else 11)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_every_layout_of_four_ranks_brings_rollout_its_weights(tmp_path: Path) -> None:
    assert_all_generate_the_same(tmp_path, ["llama-llama3", "qwen3_moe", "deepseek_v3"], every=False)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_pair_of_layouts(family: str, tmp_path: Path) -> None:
    assert_all_generate_the_same(tmp_path, [family], every=True)
