"""Adapters against training of all weights, against transformers, and every layout against one rank, in float32."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import load, save
from support.ranks import Worlds, run_ranks
from support.reference import hf_log_probs, of_responses
from test_checkpoint_layouts import OVERLAP, Run, contents, worst, worst_metric
from test_experts import EP
from test_training_layouts import PP, RECOMPUTED, RING, SEQUENCES, TEMPERATURE, TP, VPP, Layout, layout, make_batch
from transformers import AutoModelForCausalLM

from examples.make_tiny_model import make_tiny_model
from mindspeed_rl.checkpoint.hf import HFWeights
from mindspeed_rl.checkpoint.state import open_checkpoint
from mindspeed_rl.common.errors import CheckpointError
from mindspeed_rl.config.lora import adapter_parameters
from mindspeed_rl.config.model import ModelConfig
from mindspeed_rl.config.schema import MegatronConfig
from mindspeed_rl.resharding.checksums import differing, with_checksums
from mindspeed_rl.resharding.names import parameter_table

torch.set_num_threads(1)
RANKS = 4
LORA = {"lora_r": 4, "lora_alpha": 6.0}
ATTENTION = {**LORA, "lora_target_modules": ["linear_proj", "linear_qkv"]}
TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 5e-5  # after Adam steps of 1e-3, see test_training_layouts
ONE = layout(1)
DENSE = [
    ONE,
    layout(2, use_distributed_optimizer=False),
    layout(2, **{TP: 2}),
    layout(2, **{TP: 2}, sequence_parallel=True),
    layout(2, **{PP: 2}),
    layout(4, **{TP: 2, PP: 2}, **RECOMPUTED),
    layout(2, context_parallel_size=2),
    layout(4, context_parallel_size=2, **{TP: 2}, sequence_parallel=True, **RING),
    layout(4, **{PP: 2, VPP: 1}, **OVERLAP),
    layout(1, **RECOMPUTED),
]
EXPERTS = [
    ONE,
    layout(2, **{EP: 2}),
    layout(4, **{EP: 2, TP: 2}, sequence_parallel=True),
    layout(4, **{EP: 2, PP: 2}),
]


def scores(run: Run, reference: bool = False) -> torch.Tensor | None:
    """Log-probs of this data-parallel rank's share of the batch, [R]; None off the output rank."""
    engine = run.engine
    mine = make_batch().select(range(engine.data_parallel_rank, SEQUENCES, engine.data_parallel_size))
    outputs = engine.score(mine, [[index] for index in range(len(mine))], TEMPERATURE, reference=reference)
    return None if outputs is None else outputs.log_probs


def assert_bits_arrive(run: Run) -> dict[str, torch.Tensor]:
    """What is exported has the checksums that `validate_weight` expects, although both are merged apart."""
    sums: dict[str, torch.Tensor] = {}
    weights = {name: tensor.clone() for name, tensor in with_checksums(run.engine.export_weights(1 << 14), sums)}
    assert differing(run.engine.weight_checksums(), sums) == []
    return weights


def train_in(run: Run, root: Path, start: str) -> dict[str, Any]:
    """Two steps, a checkpoint, and one more."""
    base = scores(run, reference=True)
    steps = [run.step(), run.step()]
    again, now = scores(run, reference=True), scores(run)
    if base is not None:
        assert torch.equal(base, again)  # the reference stays what training began with
        assert not torch.equal(base, now)
    weights = assert_bits_arrive(run)
    save(run.engine, root, start_weights=start)
    return {"steps": steps, "weights": weights, "log_probs": now, "next": run.step()}


def layouts(rank: int, folder: str, root: str, cases: list[Layout], settings: dict[str, Any]) -> None:
    ranks = Worlds(rank, RANKS, root)
    for number, case in enumerate(cases):
        path = Path(root, str(number))
        with ranks.world(case.world) as here:
            if not here:
                continue
            run = Run(ranks.device, folder, case, **settings)
            found = train_in(run, path, folder)
            if rank == 0:
                torch.save(found, path / "found")
            # what one rank has saved is loaded bit for bit, and training goes on as it did there
            first = torch.load(Path(root, "0", "found"))
            load(run.engine, Path(root, "0", "iter_0000001"))
            expected = contents(Path(root, "0", "iter_0000001"))
            for piece in run.engine.pieces(optimizer=True):
                where = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.data.shape, strict=True))
                assert torch.equal(piece.data, expected[piece.name][where]), piece.name
            compared = ("actor/loss", "actor/grad_norm", "actor/kl", "actor/lr")
            for one, other in zip([*found["steps"], run.step()], [*first["steps"], first["next"]], strict=True):
                assert worst_metric(one, {name: other[name] for name in compared}) < TOLERANCE, case
            assert worst(found["weights"], first["weights"]) < WEIGHT_TOLERANCE, case


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the folder in which every layout of `DENSE` has trained adapters for it."""
    root = tmp_path_factory.mktemp("lora")
    folder = make_tiny_model(root / "model", tie=True, layers=4, ffn=96)
    run_ranks(RANKS, layouts, str(folder), str(root), DENSE, LORA)
    return folder, root


def test_layouts_agree_with_one_rank(trained: tuple[Path, Path]) -> None:
    _, root = trained
    one = contents(root / "0" / "iter_0000001")
    prefixes = ("lora.model.", "lora.optimizer.exp_avg.", "lora.optimizer.exp_avg_sq.")
    assert all(name.startswith(prefixes) for name in one)  # nothing of what is frozen is saved
    for number, case in enumerate(DENSE):
        other = contents(root / str(number) / "iter_0000001")
        assert other.keys() == one.keys()
        weights = [name for name in one if name.startswith("lora.model.")]
        assert max(float((one[name] - other[name]).abs().max()) for name in weights) < WEIGHT_TOLERANCE, case


def test_experts_keep_their_weights_and_attention_has_adapters(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3_moe", hidden=64, experts=4)
    run_ranks(RANKS, layouts, str(folder), str(tmp_path), EXPERTS, ATTENTION)
    names = contents(tmp_path / "0" / "iter_0000001")
    assert names
    assert not any("mlp" in name for name in names)


def peft_applied(model: torch.nn.Module, folder: Path) -> None:
    """PEFT's documented rule for a linear layer: result + (lora_alpha / r) * B(A(x)); names as in its files."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    assert (config["peft_type"], config["bias"], config["use_rslora"]) == ("LORA", "none", False)
    scale = config["lora_alpha"] / config["r"]
    modules = {
        name: module for name, module in model.named_modules() if name.split(".")[-1] in config["target_modules"]
    }
    for name, module in modules.items():
        a = tensors.pop(f"base_model.model.{name}.lora_A.weight")
        b = tensors.pop(f"base_model.model.{name}.lora_B.weight")
        assert a.shape == (config["r"], module.in_features)
        assert b.shape == (module.out_features, config["r"])
        module.register_forward_hook(lambda _, x, y, a=a, b=b: y + scale * (x[0] @ a.t() @ b.t()))
    assert not tensors


@torch.no_grad()
def test_files_say_the_same_as_the_engine(trained: tuple[Path, Path]) -> None:
    folder, root = trained
    for number in (0, DENSE.index(layout(4, **{TP: 2, PP: 2}, **RECOMPUTED))):
        checkpoint = root / str(number) / "iter_0000001"
        found = torch.load(root / str(number) / "found")
        base, merged = (AutoModelForCausalLM.from_pretrained(f) for f in (folder, checkpoint / "hf"))
        peft_applied(base, checkpoint / "adapter")
        batch = make_batch()
        of_adapter, of_merged = (of_responses(hf_log_probs(m, batch, TEMPERATURE), batch) for m in (base, merged))
        torch.testing.assert_close(of_adapter, of_merged, atol=TOLERANCE, rtol=0)
        if found["log_probs"] is not None:
            torch.testing.assert_close(of_adapter, found["log_probs"], atol=TOLERANCE, rtol=0)
        stored = HFWeights(checkpoint / "hf")
        for name, tensor in found["weights"].items():
            torch.testing.assert_close(stored.tensor(name), tensor, atol=1e-7, rtol=1e-6)
        changed = {n for n in found["weights"] if not torch.equal(stored.tensor(n), HFWeights(folder).tensor(n))}
        assert {name.split(".")[-2] for name in changed} == {
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        }  # fmt: skip
        reader = open_checkpoint(checkpoint)
        assert dict(reader.weights()).keys() == set(stored.names)
        reader.trainer["start_weights"] = "gone"
        with pytest.raises(CheckpointError, match="gone does not exist"):
            dict(reader.weights())


PROMPTS = [[7, 1, 8, 5], [9, 1, 10]]
Responses = list[tuple[list[int], list[float]]]  # greedy tokens, and the log-prob of each


def generate(rank: int, base: str, adapter: str) -> tuple[Responses, Responses]:
    """What vLLM says with the base's weights, and with the adapter that it loads beside them."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(base, dtype="float32", enforce_eager=True, max_model_len=32, enable_lora=True, max_lora_rank=8)

    def of(request: Any) -> Responses:
        sampling = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        found = [o.outputs[0] for o in llm.generate(prompts, sampling, lora_request=request, use_tqdm=False)]
        return [
            (list(o.token_ids), [steps[t].logprob for t, steps in zip(o.token_ids, o.logprobs, strict=True)])
            for o in found
        ]

    return of(None), of(LoRARequest("trained", 1, adapter))


@torch.no_grad()
def test_vllm_loads_the_adapter(trained: tuple[Path, Path]) -> None:
    folder, root = trained
    checkpoint = root / "0" / "iter_0000001"
    (found,) = run_ranks(1, generate, str(folder), str(checkpoint / "adapter"))
    log_probs = []
    for path, responses in zip((folder, checkpoint / "hf"), found, strict=True):
        model = AutoModelForCausalLM.from_pretrained(path)
        for prompt, (tokens, of_tokens) in zip(PROMPTS, responses, strict=True):
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == tokens
            expected = logits.log_softmax(-1).max(-1).values
            torch.testing.assert_close(torch.tensor(of_tokens), expected, atol=TOLERANCE, rtol=0)
            log_probs.append(of_tokens)
    assert not torch.allclose(torch.tensor(log_probs[:2]), torch.tensor(log_probs[2:]), atol=1e-3)


def gradients(rank: int, folder: str, merged: str, checkpoint: str) -> None:
    """With W' = W + s B A: dL/dB = s dL/dW' A^T and dL/dA = s B^T dL/dW' (the chain rule), and the same outputs."""
    from mindspeed_rl.engine.megatron.model import named_parameters

    ranks = Worlds(rank, 1, folder + "-meeting")
    found: list[dict[str, torch.Tensor]] = []
    log_probs = []
    with ranks.world(1):
        for path, settings in ((folder, LORA), (merged, {})):
            run = Run(ranks.device, path, layout(1, use_distributed_optimizer=False), clip_grad=0.0, **settings)
            if settings:
                load(run.engine, checkpoint, optimizer=False, rng=False)
                values = {name: p.detach().clone() for name, p in run.engine._actor_parameters().items()}
            log_probs.append(scores(run))
            run.step()
            named = named_parameters([c.module for c in run.engine.actor], run.engine.model_config, run.engine.layout)
            found.append({name: p.main_grad.clone() for name, p in named if p.requires_grad})
            from support.ranks import leave_parallel_state

            leave_parallel_state()
        torch.testing.assert_close(log_probs[0], log_probs[1], atol=TOLERANCE, rtol=0)
        of_adapters, of_all = found
        scale = LORA["lora_alpha"] / LORA["lora_r"]
        modules = [name.removesuffix("adapter.a") for name in of_adapters if name.endswith("adapter.a")]
        assert len(modules) == 16
        assert len(of_adapters) == 32  # nothing else has gradients
        for module in modules:
            a, b, whole = values[f"{module}adapter.a"], values[f"{module}adapter.b"], of_all[f"{module}weight"]
            assert whole.abs().max() > 100 * TOLERANCE
            for end, expected in (("a", scale * b.t() @ whole), ("b", scale * whole @ a.t())):
                torch.testing.assert_close(of_adapters[f"{module}adapter.{end}"], expected, atol=TOLERANCE, rtol=0)


def test_gradients_are_those_of_all_weights_by_the_chain_rule(trained: tuple[Path, Path]) -> None:
    folder, root = trained
    (Path(f"{folder}-meeting")).mkdir()
    checkpoint = root / "0" / "iter_0000001"
    run_ranks(1, gradients, str(folder), str(checkpoint / "hf"), str(checkpoint))


@pytest.mark.parametrize("tp", [1, 2])
def test_the_estimate_counts_every_element(tp: int, trained: tuple[Path, Path]) -> None:
    model = ModelConfig.from_hf(json.loads((trained[0] / "config.json").read_text()))
    adapted = model.with_adapters(4, ["linear_qkv", "linear_fc2"])
    table = [p for p in parameter_table(adapted) if "adapter" in p.name]
    cfg = MegatronConfig(lora_r=4, lora_target_modules=["linear_qkv", "linear_fc2"])
    count = sum(torch.Size(p.local_shape(tp)).numel() for p in table)
    assert adapter_parameters(model, cfg, model.num_layers, tp) == count
