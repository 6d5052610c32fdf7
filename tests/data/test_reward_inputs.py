"""What a reward model reads: ids as generated where tokens are the same, else texts in its tokens and template."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reward_models import make_reward_model, write_other_tokenizer

from examples.make_tiny_model import EOS, TOKENS, make_tokenizer
from mindspeed_rl.common.errors import DataError
from mindspeed_rl.config.schema import Config
from mindspeed_rl.data.prompts import PromptSample, load_prompts
from mindspeed_rl.data.reward_inputs import RewardInputs

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}={% else %}*{% endif %}{{ m['content'] }}{% endfor %}/"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward") / "model")


def inputs(folder: Path, training: dict[str, Any] | None = None, **reward: Any) -> RewardInputs:
    raw = {"megatron_training": training or {}, "reward_config": {"load": str(folder), **reward}}
    return RewardInputs(Config.model_validate(raw), make_tokenizer())


def ids(text: str, *more: int) -> torch.Tensor:
    return torch.tensor([*make_tokenizer()(text)["input_ids"], *more])


def sample(text: str = "1+2=", **fields: Any) -> PromptSample:
    return PromptSample([], text, "3", "sums", **fields)


def read(found: RewardInputs, responses: list[torch.Tensor], of: PromptSample | None = None) -> list[str]:
    """Texts of the sequences, in the reward model's tokens; none for those that get no score."""
    sequences, fits = found([ids("1+2=")] * len(responses), responses, [of or sample()] * len(responses))
    assert all(len(sequence) for sequence in sequences)
    assert all(sequence.dtype == torch.int64 for sequence in sequences)
    texts = found.tokenizer.batch_decode([sequence.tolist() for sequence in sequences])
    return [text if is_scored else "" for text, is_scored in zip(texts, fits, strict=True)]


def test_the_same_tokens_are_taken_as_they_are(folder: Path) -> None:
    found = inputs(folder)
    assert found.as_generated
    # padding ends nothing in transformers: the score is that of the last token before it
    assert read(found, [ids("3", EOS), ids("33"), ids("", EOS), ids("3", EOS, EOS)]) == [
        "1+2=3",
        "1+2=33",
        "1+2=",
        "1+2=3",
    ]


def test_padding_alone_and_no_padding(folder: Path, tmp_path: Path) -> None:
    nothing, _ = inputs(folder)([torch.tensor([EOS])], [torch.tensor([EOS, EOS])], [sample()])
    assert nothing[0].tolist() == [EOS]
    unpadded = tmp_path / "unpadded"
    unpadded.mkdir()
    for file in folder.iterdir():
        (unpadded / file.name).symlink_to(file)
    config = {**json.loads((folder / "config.json").read_text()), "pad_token_id": None}
    (unpadded / "config.json").unlink()
    (unpadded / "config.json").write_text(json.dumps(config))
    assert read(inputs(unpadded), [ids("3", EOS)]) == ["1+2=3<eos>"]


def test_other_tokens_and_templates_are_rendered_anew(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "template").write_text(TEMPLATE)
    rendered = ["*1+2==3/", "*1+2==/"]
    responses = [ids("3", EOS), ids("", EOS)]
    assert read(inputs(folder, chat_template=str(tmp_path / "template")), responses) == rendered
    own = inputs(folder, tokenizer_name_or_path=str(write_other_tokenizer(tmp_path / "own", TEMPLATE)))
    assert not own.as_generated
    assert read(own, responses) == rendered
    plain = inputs(folder, tokenizer_name_or_path=str(write_other_tokenizer(tmp_path / "plain", None)))
    assert read(plain, responses) == ["1+2=3", "1+2="]
    assert plain.tokenised(sample(), "3").tolist() == [len(TOKENS) - 1 - i for i in ids("1+2=3").tolist()]


def test_messages_are_those_that_the_actor_sees(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "1+2="}], "answer": 3}, {"prompt": "4+5=", "answer": 9}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = {"data_path": str(tmp_path / "data.jsonl"), "apply_chat_template": True, "system_prompt": "7"}
    config = Config.model_validate({"megatron_training": training})
    first, second = load_prompts(config.actor, config.rl_config, make_tokenizer()).samples
    (tmp_path / "template").write_text(TEMPLATE)
    found = inputs(folder, training, chat_template=str(tmp_path / "template"))
    assert (first.prompt_text, second.prompt_text) == ("71+2=", "74+5=")
    assert read(found, [ids("3")], first) == ["*7*1+2==3/"]
    assert read(found, [ids("9")], second) == ["*7*4+5==9/"]


@pytest.mark.parametrize(
    ("truncation", "text"), [("drop", ""), ("left", "=345"), ("right", "1+2="), ("middle", "1+45")]
)
def test_more_tokens_than_allowed(folder: Path, truncation: str, text: str) -> None:
    found = inputs(folder, max_length=4, truncation=truncation)
    assert read(found, [ids("345", EOS), ids("", EOS)]) == [text, "1+2="]


def test_without_a_limit_it_is_that_of_the_positions(folder: Path) -> None:
    assert inputs(folder).limit == 64
    assert read(inputs(folder), [torch.full((60,), 5), torch.full((61,), 5)])[1] == ""


def test_what_cannot_be_used_is_named(folder: Path, tmp_path: Path) -> None:
    key = "reward_config.tokenizer_name_or_path"
    with pytest.raises(DataError, match=f"{key} = '.*none': no such folder"):
        inputs(folder, tokenizer_name_or_path=str(tmp_path / "none"))
    with pytest.raises(DataError, match=r"reward_config\.chat_template = 'none': cannot be read"):
        inputs(folder, chat_template="none")
    plain = str(write_other_tokenizer(tmp_path / "plain", None))
    with pytest.raises(DataError, match=f"{key} = '.*plain': has other tokens .* set reward_config.chat_template"):
        inputs(folder, {"apply_chat_template": True}, tokenizer_name_or_path=plain)
    larger = make_tokenizer()
    larger.add_tokens(["new"])
    larger.save_pretrained(tmp_path / "larger")
    with pytest.raises(DataError, match="ids up to 16, the model has vocab_size = 16"):
        inputs(folder, tokenizer_name_or_path=str(tmp_path / "larger"))
    (tmp_path / "template").write_text("{{ raise_exception('only users speak') }}")
    with pytest.raises(DataError, match=r"the reward model's chat template refuses .*only users speak"):
        inputs(folder, chat_template=str(tmp_path / "template")).tokenised(sample(), "3")
    (tmp_path / "template").write_text("{# nothing #}")
    with pytest.raises(DataError, match="makes no tokens of ''"):
        inputs(folder, chat_template=str(tmp_path / "template")).tokenised(sample(), "3")
