"""Tiny reward models, and the scores that transformers computes with them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, Qwen2Tokenizer

from examples.make_tiny_model import EOS, TOKENS, make_tiny_model, make_tokenizer


def make_reward_model(folder: Path, labels: int = 1, **shape: Any) -> Path:
    """A model of another shape than tiny actors have, with scores far apart, and the tokenizer of 16 characters."""
    tiny = make_tiny_model(folder.with_name("language"), **{"hidden": 64, "heads": 2, "seed": 7, **shape})
    config = AutoConfig.from_pretrained(tiny)
    config.num_labels, config.pad_token_id = labels, EOS
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForSequenceClassification.from_config(config)
        for name, parameter in model.named_parameters():
            if name == "score.weight" or "q_proj" in name:
                parameter.data *= 10
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def write_other_tokenizer(folder: Path, template: str | None = None) -> Path:
    """The characters of `make_tokenizer` in another order."""
    vocabulary = {token: index for index, token in enumerate(reversed(TOKENS))}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], eos_token="<eos>", pad_token="<eos>", unk_token="<eos>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def scores_of(folder: Path, sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    """[B] float32, one sequence at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    return torch.stack([model(sequence[None]).logits[0, 0] for sequence in sequences])
