"""Values of other projects' keys in ours: units, opposites, what several of their keys say together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed_rl.config.compose import shipped_configs

Values = dict[str, Any]  # key path -> value
Converter = Callable[[Any, Values, list[str]], Values]  # their value, all of theirs, our keys of the entry
CONVERTERS: dict[str, Converter] = {}
_UNLIMITED = -1
_PRECISIONS = {"bf16": True, "bfloat16": True, "bf16-mixed": True, "fp32": False, "float32": False, "32": False}


class ByHand(Exception):
    """A value that the file alone does not determine; says what to do."""


def _converter(function: Converter) -> Converter:
    CONVERTERS[function.__name__] = function
    return function


def _table_of(name: str, values: dict[Any, Any]) -> None:
    """A converter of values one by one."""

    def convert(value: Any, _: Values, ours: list[str]) -> Values:
        if value not in values:
            raise ByHand(f"is none of {', '.join(map(str, values))}")
        return dict.fromkeys(ours, values[value]) if values[value] is not None else {}

    CONVERTERS[name] = convert


_table_of("opposite", {True: False, False: True})
_table_of("drop_if_true", {True: "drop", False: None})
_table_of("one_if_true", {True: 1, False: None})
_table_of("if_true", {True: True, False: None})
_table_of("precision", _PRECISIONS)
_table_of("resume", {"auto": "auto", "disable": "never", "resume_path": "never"})
_table_of("backend", {"nccl": "cuda", "hccl": "npu", "gloo": "cpu"})


@_converter
def by_hand(value: Any, theirs: Values, ours: list[str]) -> Values:
    """What no value of theirs says; a switch that is off says nothing."""
    if value is False:
        return {}
    raise ByHand("decide it, see the note in docs/coverage.md")


@_converter
def unless_negative(value: Any, theirs: Values, ours: list[str]) -> Values:
    """-1 stands for null."""
    return {} if value == _UNLIMITED else dict.fromkeys(ours, value)


@_converter
def truncation(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Prompts that are filtered out first are not truncated."""
    return {} if theirs.get("data.filter_overlong_prompts") is True else dict.fromkeys(ours, value)


@_converter
def checkpointing(value: Any, theirs: Values, ours: list[str]) -> Values:
    """All layers' activations are computed again."""
    section = "megatron_training.recompute_"
    return (
        {f"{section}granularity": "full", f"{section}method": "uniform", f"{section}num_layers": 1} if value else {}
    )


def _devices(theirs: Values) -> int:
    return int(theirs.get("trainer.nnodes") or 1) * int(theirs.get("trainer.n_gpus_per_node") or 1)


@_converter
def devices(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Of all nodes."""
    if theirs.get("trainer.n_gpus_per_node") is None:
        raise ByHand("trainer.n_gpus_per_node is not there: set the devices of all nodes")
    return dict.fromkeys(ours, _devices(theirs))


@_converter
def of_all_devices(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Sequences of all devices there, of a rank here."""
    if theirs.get("trainer.n_gpus_per_node") is None:
        raise ByHand("is of all devices, and trainer.n_gpus_per_node is not there")
    return dict.fromkeys(ours, max(1, int(value) // _devices(theirs)))


@_converter
def kl_coefficient(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Of the loss with use_kl_loss, of the reward with use_kl_in_reward; without both there is no KL."""
    if theirs.get("actor_rollout_ref.actor.use_kl_loss"):
        coefficient = theirs.get("actor_rollout_ref.actor.kl_loss_coef", 0.001)
    else:
        in_reward = theirs.get("algorithm.use_kl_in_reward")
        coefficient = theirs.get("algorithm.kl_ctrl.kl_coef", 0.001) if in_reward else 0.0
    return dict.fromkeys(ours, coefficient)


@_converter
def kl_estimator(value: Any, theirs: Values, ours: list[str]) -> Values:
    """That of the loss, or of the reward."""
    in_loss = theirs.get("actor_rollout_ref.actor.use_kl_loss")
    key = "actor_rollout_ref.actor.kl_loss_type" if in_loss else "algorithm.kl_penalty"
    return dict.fromkeys(ours, theirs[key]) if theirs.get(key) else {}


def _corrects(theirs: Values) -> bool:
    return any(theirs.get(f"{section}.rollout_is") for section in ("actor_rollout_ref.actor", "algorithm"))


@_converter
def corrected_tokens(value: Any, theirs: Values, ours: list[str]) -> Values:
    """They correct all tokens, or none."""
    return dict.fromkeys(ours, "all" if _corrects(theirs) else "off")


@_converter
def of_correction(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Thresholds and levels say something only where tokens are corrected."""
    return dict.fromkeys(ours, value) if _corrects(theirs) else {}


@_converter
def of_mask(value: Any, theirs: Values, ours: list[str]) -> Values:
    """A lower threshold is of the mode `mask`."""
    modes = (theirs.get(f"{section}.rollout_is_mode") for section in ("actor_rollout_ref.actor", "algorithm"))
    return of_correction(value, theirs, ours) if "mask" in modes else {}


@_converter
def warmup_steps(value: Any, theirs: Values, ours: list[str]) -> Values:
    """As a share of all steps."""
    if value < 0 or value == 0:
        return {}
    steps = theirs.get("actor_rollout_ref.actor.optim.total_training_steps") or 0
    if steps <= 0:
        raise ByHand("divide it by the optimizer steps of the run, which the file does not say")
    return dict.fromkeys(ours, value / steps)


@_converter
def warmup_share(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Steps come first, where they are given."""
    steps = theirs.get("actor_rollout_ref.actor.optim.lr_warmup_steps")
    return {} if steps is not None and steps >= 0 else dict.fromkeys(ours, value)


@_converter
def times_lr(value: Any, theirs: Values, ours: list[str]) -> Values:
    """A ratio of theirs, a learning rate of ours."""
    if not value:
        return {}
    lr = theirs.get("actor_rollout_ref.actor.optim.lr")
    if lr is None:
        raise ByHand("is a share of optim.lr, which is not there")
    return dict.fromkeys(ours, float(value) * float(lr))


@_converter
def decay_style(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Words are joined by hyphens; WSD needs the share of its decay."""
    if value == "wsd":
        raise ByHand("set lr_decay_style: WSD and lr_wsd_decay_fraction, the share of steps that decay")
    return dict.fromkeys(ours, str(value).replace("_", "-"))


def _contents(prefix: str) -> Converter:
    def convert(value: Any, theirs: Values, ours: list[str]) -> Values:
        named = set(value)
        said = {f"{prefix}_optim": "optimizer" not in named, f"{prefix}_rng": "extra" not in named}
        if prefix == "no_save":
            said["save_hf"] = "hf_model" in named
        return {f"megatron_training.{key}": on for key, on in said.items()}

    return convert


CONVERTERS["saved"] = _contents("no_save")
CONVERTERS["loaded"] = _contents("no_load")


@_converter
def greedy(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Validation without sampling has the temperature 0."""
    return {} if value else dict.fromkeys(ours, 0.0)


@_converter
def validation_temperature(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Without sampling it says nothing."""
    key = "actor_rollout_ref.rollout.val_kwargs.do_sample"
    return {} if theirs.get(key) is False else dict.fromkeys(ours, value)


@_converter
def of_reward_model(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Says something only where a reward model is on."""
    return dict.fromkeys(ours, value) if theirs.get("reward_model.enable") else {}


@_converter
def first_of_reward_model(value: Any, theirs: Values, ours: list[str]) -> Values:
    """The same, for the first of our keys."""
    return of_reward_model(value, theirs, ours[:1])


@_converter
def by_hand_of_reward_model(value: Any, theirs: Values, ours: list[str]) -> Values:
    """The same, where their value is of another model."""
    if not theirs.get("reward_model.enable"):
        return {}
    raise ByHand("there the policy's tokenizer, here the reward model's")


@_converter
def trust(value: Any, theirs: Values, ours: list[str]) -> Values:
    """One switch for all folders, on if one of theirs is."""
    said = [on for path, on in theirs.items() if path.endswith("trust_remote_code")]
    return dict.fromkeys(ours, any(said))


@_converter
def manager(value: Any, theirs: Values, ours: list[str]) -> Values:
    """`naive` is one process."""
    if value != "naive":
        raise ByHand("choose how many processes run verifiers")
    return {"rl_config.verifier_parallel": 1}


@_converter
def total_epochs(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Steps come first, where they are given."""
    if (theirs.get("actor_rollout_ref.actor.optim.total_training_steps") or 0) > 0:
        return {}
    raise ByHand(f"train_iters is {value} x prompts of the data / global_batch_size")


@_converter
def warmup_iterations(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Above 0 they come before the share."""
    if value:
        raise ByHand("divide it by the optimizer steps of the run, which the file does not say")
    return {}


@_converter
def reward_model(value: Any, theirs: Values, ours: list[str]) -> Values:
    """On: its folder is another key; off: there is none."""
    if value and theirs.get("reward_model.model.path") is None:
        raise ByHand("reward_model.model.path is not there")
    return {}


@_converter
def custom_reward(value: Any, theirs: Values, ours: list[str]) -> Values:
    """A file of one's own is the only verifier."""
    one = {"rl_config.verifier_function": ["custom"], "rl_config.verifier_weight": [1.0]}
    return {**dict.fromkeys(ours, value), **one}


@_converter
def custom_reward_name(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Says something only beside a file."""
    return dict.fromkeys(ours, value) if theirs.get("custom_reward_function.path") else {}


@_converter
def custom_dataset_name(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Says something only beside a file."""
    return dict.fromkeys(ours, value) if theirs.get("data.custom_cls.path") else {}


@_converter
def estimator(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Vectorised ones compute the same."""
    return dict.fromkeys(ours, str(value).removesuffix("_vectorized"))


@_converter
def loggers(value: Any, theirs: Values, ours: list[str]) -> Values:
    """A list of names there, a switch each here; console and metrics.jsonl are always on."""
    names = [value] if isinstance(value, str) else list(value)
    if "trackio" in names:
        raise ByHand("there is no trackio: set the others")
    return {path: path.rpartition("use_")[2] in names for path in ours}


@_converter
def experiment(value: Any, theirs: Values, ours: list[str]) -> Values:
    """A name for the run, and for Weights & Biases where that is on."""
    has_wandb = "wandb" in (theirs.get("trainer.logger") or [])
    return dict.fromkeys(ours if has_wandb else ours[:1], value)


@_converter
def if_wandb(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Says something only with Weights & Biases."""
    return dict.fromkeys(ours, value) if "wandb" in (theirs.get("trainer.logger") or []) else {}


@_converter
def checkpoint_folder(value: Any, theirs: Values, ours: list[str]) -> Values:
    """No folder where nothing is saved."""
    return {} if theirs.get("trainer.save_freq") == _UNLIMITED else {"actor_config.save": value}


@_converter
def seconds(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Minutes here."""
    return dict.fromkeys(ours, value / 60)


@_converter
def resume_path(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Says something only where it is what a run goes on from."""
    return dict.fromkeys(ours, value) if theirs.get("trainer.resume_mode") == "resume_path" else {}


@_converter
def model_path(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Weights, and the tokenizer that is with them; a run may go on from elsewhere."""
    goes_on = theirs.get("trainer.resume_mode") == "resume_path" and theirs.get("trainer.resume_from_path")
    tokenizer = {} if theirs.get("data.tokenizer") else {"megatron_training.tokenizer_name_or_path": value}
    return {**({} if goes_on else dict.fromkeys(ours, value)), **tokenizer}


@_converter
def engine_arguments(value: Any, theirs: Values, ours: list[str]) -> Values:
    """vLLM's own names are ours."""
    from mindspeed_rl.config.generate import GenerateConfig

    if unknown := sorted(set(value) - set(GenerateConfig.model_fields)):
        raise ByHand(f"generate_config has no {', '.join(unknown)}")
    return {f"generate_config.{key}": argument for key, argument in value.items()}


@_converter
def ground_truth(value: Any, theirs: Values, ours: list[str]) -> Values:
    """The answer within their column."""
    return dict.fromkeys(ours, f"{value}.ground_truth")


@_converter
def command_line(value: Any, theirs: Values, ours: list[str]) -> Values:
    """An argument of `cli/evaluate.py`, no key."""
    raise ByHand("no key, an argument: python cli/evaluate.py --responses FILE --response-key COLUMN")


@_converter
def presets(value: Any, theirs: Values, ours: list[str]) -> Values:
    """`defaults`: presets of models that there are here, too."""
    known = {path.stem for path in (shipped_configs() / "model").glob("*.yaml")}
    named = [item["model"] for item in value if isinstance(item, dict) and "model" in item]
    names = [name for item in named for name in (item if isinstance(item, list) else [item])]
    if unknown := sorted(set(names) - known):
        raise ByHand(f"no preset is called {', '.join(unknown)}: model: auto reads the shape from `load`")
    return {"defaults": [*({"model": name} for name in names), "_self_"]} if names else {}


@_converter
def mini_batches(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Their number; ours is the size of one, in prompts."""
    prompts = theirs.get("data.rollout_batch_size")
    if prompts is None:
        raise ByHand("divide the prompts of an iteration by it: data.rollout_batch_size is not there")
    if prompts % value:
        raise ByHand(f"does not divide data.rollout_batch_size = {prompts}")
    return dict.fromkeys(ours, prompts // value)


@_converter
def clip_higher(value: Any, theirs: Values, ours: list[str]) -> Values:
    """A bound of its own needs the switch."""
    return {**dict.fromkeys(ours, value), "rl_config.clip_higher_enable": True}


@_converter
def task(value: Any, theirs: Values, ours: list[str]) -> Values:
    """What checks answers."""
    if value != "math":
        raise ByHand("choose verifiers")
    return {"rl_config.verifier_function": ["math_verify"], "rl_config.verifier_weight": [1.0]}


@_converter
def printed(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Every step, or never."""
    return dict.fromkeys(ours, 1 if value else 0)


@_converter
def nothing(value: Any, theirs: Values, ours: list[str]) -> Values:
    """What says no more than another key of theirs."""
    return {}


@_converter
def unless_all(value: Any, theirs: Values, ours: list[str]) -> Values:
    """All linear layers are our default."""
    if value == "all-linear":
        return {}
    raise ByHand("name Megatron's layers, see docs/lora.md")


@_converter
def rank(value: Any, theirs: Values, ours: list[str]) -> Values:
    """0 is no adapter."""
    return dict.fromkeys(ours, value) if value else {}


@_converter
def alpha(value: Any, theirs: Values, ours: list[str]) -> Values:
    """Says something only with a rank."""
    return dict.fromkeys(ours, value) if theirs.get("model.lora_rank") else {}


def implied(project: str, theirs: Values, found: Values) -> Values:
    """What is no key of theirs, but the way they work; and lengths that follow from others."""
    said: Values = {}
    prompt = found.get("rl_config.max_prompt_length")
    response = found.get("generate_config.sampling_config.max_tokens")
    if isinstance(prompt, int) and isinstance(response, int):
        said["megatron_training.seq_length"] = prompt + response
    longest = found.get("megatron_training.seq_length", said.get("megatron_training.seq_length"))
    if longest:
        said["generate_config.max_model_len"] = longest
    if found.get("generate_config.dtype") == "bfloat16" and project != "mindspeed_rl":
        said["megatron_training.bf16"] = True
    if found.get("rl_config.adv_estimator") == "gae" and project != "mindspeed_rl":
        said["megatron_training.stage"] = "ray_ppo"
    if project == "verl" and "actor_rollout_ref.model.path" in theirs:
        said["megatron_training.answer_key"] = "reward_model.ground_truth"
        said["megatron_training.apply_chat_template"] = True
    if "model.partial_pretrain" in theirs:
        said["megatron_training.stage"] = "sft"
        said["megatron_training.tokenizer_name_or_path"] = theirs["model.partial_pretrain"]
    if "data.response_key" in theirs:  # there is nothing else to do than to validate
        said["rl_config.val_before_train"] = True
    return said
