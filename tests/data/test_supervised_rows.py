"""Rows of SFT and DPO: which ids they become, which of them count, and every input that is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from mindspeed_rl.common.errors import DataError
from mindspeed_rl.config.schema import Config
from mindspeed_rl.data.supervised import load_supervised

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "+{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
FORGETS = "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    """Of the tiny model, which knows digits and `+`; other characters are its unknown token."""
    return AutoTokenizer.from_pretrained(tiny_model_dir)


@pytest.fixture
def load(tokenizer, tmp_path):
    def load(rows, stage="sft", sections=None, **keys):
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        training = {"stage": stage, "data_path": str(path), "seq_length": 64, **keys}
        config = Config(megatron_training=training, **(sections or {}))
        return load_supervised(config.actor, config, tokenizer)

    return load


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def template(tmp_path: Path, text: str) -> dict[str, object]:
    (tmp_path / "template.jinja").write_text(text)
    return {"apply_chat_template": True, "chat_template": str(tmp_path / "template.jinja")}


def test_a_response_is_learned_with_its_end(load, tokenizer):
    (row,) = load([{"prompt": "3+4=", "answer": 7, "data_source": "sums"}]).rows
    assert row.data_source == "sums"
    assert row.prompt.tolist() == tokenizer("3+4=")["input_ids"]
    (response,) = row.responses
    assert response.ids.tolist() == [*ids(tokenizer, "7"), tokenizer.eos_token_id]
    assert response.learned.tolist() == [True, True]
    assert row.lengths == [6]
    assert not row.unlearned().responses[0].learned.any()


def test_a_pair_shares_its_prompt(load, tokenizer):
    rows = [{"prompt": "3+4=", "good": "7", "bad": "12"}]
    (row,) = load(rows, "dpo", {"dpo_config": {"chosen_key": "good", "rejected_key": "bad"}}).rows
    end = tokenizer.eos_token_id
    assert [response.ids.tolist() for response in row.responses] == [
        [*ids(tokenizer, "7"), end],
        [*ids(tokenizer, "12"), end],
    ]
    assert row.lengths == [6, 7]


def test_every_turn_of_the_assistant_is_learned_and_nothing_else(load, tokenizer, tmp_path):
    def message(role, content):
        return {"role": role, "content": content}

    talk = [message("user", "1"), message("assistant", "23"), message("user", "4"), message("assistant", "5")]
    sections = {"sft_config": {"messages_key": "talk"}}
    (row,) = load([{"talk": talk}], sections=sections, **template(tmp_path, TEMPLATE)).rows
    end = tokenizer.eos_token
    assert row.prompt.tolist() == ids(tokenizer, "u1+a")
    (response,) = row.responses
    # what the template writes after the end of a turn is there, and not learned
    assert response.ids.tolist() == [
        *ids(tokenizer, f"23{end}+"),
        *ids(tokenizer, "u4+a"),
        *ids(tokenizer, f"5{end}+"),
    ]
    turns = [1] * len(ids(tokenizer, f"23{end}")) + [0] + [0] * len(ids(tokenizer, "u4+a"))
    assert response.learned.astype(int).tolist() == [*turns, *[1] * len(ids(tokenizer, f"5{end}")), 0]
    # the whole is what the template makes of the conversation
    whole = tokenizer.apply_chat_template(talk, chat_template=TEMPLATE, tokenize=False)
    assert [*row.prompt, *response.ids] == ids(tokenizer, whole)

    # with an answer of its own, earlier turns are part of the prompt
    (single,) = load([{"prompt": talk[:3], "answer": "5"}], **template(tmp_path, TEMPLATE)).rows
    assert single.prompt.tolist() == ids(tokenizer, f"u1+a23{end}+u4+a")
    assert single.responses[0].ids.tolist() == ids(tokenizer, f"5{end}+")
    assert single.responses[0].learned.tolist() == [True, True, False]


def test_only_the_end_gets_an_end_that_the_template_lacks(load, tokenizer, tmp_path):
    """As with Qwen2.5's base models, whose template ends turns with another token than the tokenizer's end."""
    turns = (("user", "1"), ("assistant", "23"), ("user", "4"), ("assistant", "5"))
    talk = [{"role": role, "content": content} for role, content in turns]
    text = "{% for m in messages %}{{ m.content }}+{% endfor %}"
    sections = {"sft_config": {"messages_key": "talk"}}
    (row,) = load([{"talk": talk}], sections=sections, **template(tmp_path, text)).rows
    assert [*row.prompt, *row.responses[0].ids] == [*ids(tokenizer, "1+23+4+5+"), tokenizer.eos_token_id]
    learned = [1, 1, 1, 0, 0, 1, 1, 1]  # 23+, not 4+, 5+ and the end
    assert row.responses[0].learned.astype(int).tolist() == learned


ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1+1+1=", "answer": "4"}]  # 6 and 10 tokens


def test_rows_that_are_too_long(load, tokenizer):
    assert [len(load(ROWS, seq_length=size, truncation="drop")) for size in (10, 9)] == [2, 1]
    assert load(ROWS, seq_length=9).dropped_too_long == 1
    left = load(ROWS, seq_length=8, truncation="left")
    assert (left.truncated, left.rows[1].prompt.tolist()) == (1, ids(tokenizer, "1+1+1+1=")[2:])
    assert left.rows[1].responses[0].ids.tolist() == [*ids(tokenizer, "4"), tokenizer.eos_token_id]
    right = load(ROWS, seq_length=9, truncation="right")
    assert right.rows[1].responses[0].ids.tolist() == ids(tokenizer, "4")
    with pytest.raises(DataError, match=r"data.jsonl:2: the row has 10 tokens, seq_length = 9; see truncation"):
        load(ROWS, seq_length=9, truncation="error")
    with pytest.raises(DataError, match="no room for a token to learn"):
        load(ROWS, seq_length=7, truncation="right")
    with pytest.raises(DataError, match="no room for a token of the prompt"):
        load([{"prompt": "1", "answer": "2345"}], seq_length=5, truncation="left")
    with pytest.raises(DataError, match="all 2 rows are longer than seq_length = 3 tokens"):
        load(ROWS, seq_length=3)


def test_several_processes_and_a_limit_give_the_same(load):
    first = load(ROWS * 3, train_max_samples=4)
    second = load(ROWS * 3, train_max_samples=4, num_workers=2)
    assert len(first) == len(second) == 4
    for one, other in zip(first.rows, second.rows, strict=True):
        assert np.array_equal(one.prompt, other.prompt)
        assert np.array_equal(one.responses[0].ids, other.responses[0].ids)


@pytest.mark.parametrize(
    ("rows", "stage", "sections", "message"),
    [
        ([{"prompt": "1"}], "sft", {}, "answer_key = 'answer': no such column"),
        ([{"prompt": "1", "answer": ["2"]}], "sft", {}, "answer_key = 'answer': must be text or a number"),
        ([{"prompt": ["1"], "answer": "2"}], "sft", {}, "prompt_key = 'prompt': must be text, or a list of messages"),
        ([{"prompt": "1", "chosen": "2"}], "dpo", {}, "rejected_key = 'rejected': no such column"),
        ([{"talk": "1"}], "sft", {"sft_config": {"messages_key": "talk"}}, "must be a list of {role, content}"),
        ([], "sft", {}, "the data set is empty"),
    ],
)
def test_refused(load, rows, stage, sections, message):
    with pytest.raises(DataError, match=message):
        load(rows, stage, sections)


@pytest.mark.parametrize(
    ("talk", "text", "message"),
    [
        ([("user", "1")], TEMPLATE, "needs a turn of the assistant"),
        ([("assistant", "1")], TEMPLATE, "one of somebody else before it"),
        ([("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4")], FORGETS, "writes earlier turns"),
        ([("user", "1"), ("assistant", "2")], "{{ raise_exception('no') }}", "the chat template refuses it: no"),
    ],
)
def test_conversations_that_are_refused(load, tmp_path, talk, text, message):
    rows = [{"talk": [{"role": role, "content": content} for role, content in talk]}]
    with pytest.raises(DataError, match=message):
        load(rows, sections={"sft_config": {"messages_key": "talk"}}, **template(tmp_path, text))
