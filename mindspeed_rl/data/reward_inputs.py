"""What a reward model reads of samples: the ids as they were generated, or their text in tokens of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from mindspeed_rl.common.errors import DataError
from mindspeed_rl.config.files import resolve_reward_model
from mindspeed_rl.config.schema import Config
from mindspeed_rl.data.chat import read_template, render
from mindspeed_rl.data.prompts import PromptSample, shorten
from mindspeed_rl.data.tokenizer import check_tokenizer, load_tokenizer


class RewardInputs:
    """Turns samples into the sequences whose last token's value is the score.

    If the reward model's tokens are the actor's and no template is configured, ids are taken as they are. Else
    messages and response are rendered with the reward model's chat template, or, where neither side has one, prompt
    and response are joined as texts; that is tokenised again.

    Transformers takes the value of the last token that is no padding, so padding at the end is left out: where an
    end-of-sequence token is the padding token, too, the score is that of the token before it.

    Args:
        config: the run's configuration.
        actor: the actor's tokenizer.

    Raises:
        DataError: tokenizer or template cannot be used, or do not fit.
    """

    def __init__(self, config: Config, actor: PreTrainedTokenizerBase):
        self.cfg, self.actor = config.reward_config, actor
        shape = resolve_reward_model(config)
        assert shape is not None, "the reward model's folder was found before"
        assert self.cfg.load is not None, "as above"
        folder, key = self.cfg.tokenizer_name_or_path or self.cfg.load, "reward_config.tokenizer_name_or_path"
        trust, use_fast = config.generate_config.trust_remote_code, config.actor.use_fast_tokenizer
        self.tokenizer = load_tokenizer(folder, trust, use_fast, key)
        check_tokenizer(self.tokenizer, shape)
        self.template = read_template(self.cfg.chat_template, "reward_config.chat_template")
        self.limit = self.cfg.max_length or shape.longest_sequence
        self.padding = json.loads((Path(self.cfg.load) / "config.json").read_text(encoding="utf-8")).get(
            "pad_token_id"
        )
        self.as_generated = self.template is None and self.tokenizer.get_vocab() == actor.get_vocab()
        self.renders = bool(self.template or self.tokenizer.chat_template)
        if config.actor.apply_chat_template and not self.as_generated and not self.renders:
            message = f"{key} = {str(folder)!r}: has other tokens than the actor's tokenizer, and no chat template"
            raise DataError(f"{message}: set reward_config.chat_template")

    def __call__(
        self, prompts: Sequence[torch.Tensor], responses: Sequence[torch.Tensor], samples: Sequence[PromptSample]
    ) -> tuple[list[torch.Tensor], list[bool]]:
        """Sequences of ids, B x [length] int64 with length > 0, and whether each is one to be scored.

        Of those that are too long, and not to be shortened, one token stands for all.
        """
        if self.as_generated:
            whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
        else:
            texts = self.actor.batch_decode([ids.tolist() for ids in responses], skip_special_tokens=True)
            whole = [self.tokenised(*pair) for pair in zip(samples, texts, strict=True)]
        sequences, fits = [self._without_padding(ids) for ids in whole], list[bool]()
        for number, ids in enumerate(sequences):
            too_long = len(ids) > self.limit
            fits.append(not too_long or self.cfg.truncation != "drop")
            if not fits[-1]:
                sequences[number] = ids[:1]
            elif too_long:
                shortened = torch.from_numpy(shorten(ids.numpy(), self.limit, self.cfg.truncation))
                sequences[number] = self._without_padding(shortened)
        return sequences, fits

    def tokenised(self, sample: PromptSample, response: str) -> torch.Tensor:
        """A prompt and a response in the reward model's tokens, [length] int64.

        Raises:
            DataError: the template refuses them, or nothing is left.
        """
        text = sample.prompt_text + response
        if self.renders:
            messages = [*sample.messages, {"role": "assistant", "content": response}]
            refusal = f"the reward model's chat template refuses {messages!r:.200}"
            text = render(self.tokenizer, messages, self.template, refusal)
        ids = self.tokenizer(text, add_special_tokens=not self.renders)["input_ids"]
        if not ids:
            raise DataError(f"the reward model's tokenizer makes no tokens of {text!r:.200}")
        return torch.from_numpy(np.array(ids, dtype=np.int64))

    def _without_padding(self, ids: torch.Tensor) -> torch.Tensor:
        """Up to the last token that is no padding; of padding alone the first, as in transformers."""
        if self.padding is None:
            return ids
        others = torch.nonzero(ids != self.padding)
        return ids[: int(others[-1]) + 1] if len(others) else ids[:1]
