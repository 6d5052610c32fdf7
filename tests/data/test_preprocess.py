"""Published data sets' layouts, through the command, to the prompts that training loads."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from cli.preprocess_data import main
from mindspeed_rl.config.schema import MegatronConfig, RLConfig
from mindspeed_rl.data.preprocess import PreprocessConfig
from mindspeed_rl.data.prompts import load_prompts
from mindspeed_rl.data.tokenizer import load_tokenizer

DATASETS = Path(__file__).resolve().parents[2] / "configs" / "datasets"


@pytest.fixture
def run(tmp_path, tiny_model_dir):
    """Runs the command on rows and loads what it wrote."""

    def run(name, rows, *overrides, suffix=".json", apply_chat_template=True):
        source = tmp_path / f"source{suffix}"
        if suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
        elif suffix == ".jsonl":
            source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            source.write_text(json.dumps(rows))
        prefix = tmp_path / "out" / "set"
        assert main([name, f"input={source}", f"output_prefix={prefix}", *overrides]) == 0
        actor = MegatronConfig(data_path=str(prefix), apply_chat_template=apply_chat_template)
        return load_prompts(actor, RLConfig(max_prompt_length=2000), load_tokenizer(tiny_model_dir)).samples

    return run


def test_gsm8k(run):
    rows = [{"question": "1+1?", "answer": "one and one\n#### 2"}, {"question": "2", "answer": "#### 1\n#### 1,000"}]
    samples = run("gsm8k", rows, suffix=".jsonl")
    assert [sample.label for sample in samples] == ["2", "1,000"]
    assert samples[0].prompt_text.startswith("1+1?\n")
    assert r"\boxed{}" in samples[0].prompt_text
    assert samples[0].data_source == "gsm8k"


def test_gsm8k_as_plain_text(run):
    rows = [{"question": "1+1=", "answer": "#### 2"}]
    samples = run("gsm8k", rows, "prompt_type=empty", "data_source=x", apply_chat_template=False)
    assert (samples[0].prompt_text, samples[0].data_source) == ("1+1=", "x")


def test_deepscaler(run):
    samples = run("deepscaler", [{"problem": "8", "answer": "-\\frac{2}{3}", "solution": "s"}])
    assert samples[0].label == "-\\frac{2}{3}"
    assert "<think>" in samples[0].prompt_text
    assert "8 Put the final" in samples[0].prompt_text


def test_dapo(run):
    row = {
        "prompt": [{"role": "user", "content": "8"}],
        "reward_model": {"ground_truth": "34", "style": "rule"},
        "data_source": "math_dapo",
    }
    samples = run("dapo_math_17k", [row], suffix=".parquet")
    assert (samples[0].prompt_text, samples[0].label, samples[0].data_source) == ("8", "34", "math_dapo")


def test_orz(run):
    row = [{"from": "human", "value": "8"}, {"from": "assistant", "ground_truth": {"value": "6"}}]
    samples = run("orz_math", [row])
    assert samples[0].label == "6"
    assert samples[0].data_source == "orz_math"


def test_arithmetic_keeps_extra(run):
    extra = {"reasoning_gym": {"dataset": "chain_sum", "entry": {"answer": "7", "metadata": {"x": [1, "a"]}}}}
    samples = run("arithmetic", [{"prompt": "8", "answer": "7", "data_source": "chain_sum", "extra": extra}])
    assert samples[0].extra == extra
    assert samples[0].data_source == "chain_sum"


def test_query_is_appended(run):
    rows = [{"prompt": "1", "answer": "3", "q": "2"}, {"prompt": "1", "answer": "3", "q": ""}]
    samples = run("arithmetic", rows, "map_keys.query=q", "prompt_type=empty", apply_chat_template=False)
    assert [sample.prompt_text for sample in samples] == ["1\n2", "1"]


@pytest.mark.parametrize("kind", ["empty", "qwen"])
def test_long_prompts_are_dropped_and_counted(run, capsys, tiny_model_dir, kind):
    rows = [{"prompt": "1" * n, "answer": "3"} for n in range(1, 6)]
    limit = ["seq_length=3", f"tokenizer_name_or_path={tiny_model_dir}", f"prompt_type={kind}"]
    assert len(run("arithmetic", rows, *limit, apply_chat_template=kind != "empty")) == 3
    assert "3 rows (2 too long and dropped)" in capsys.readouterr().out


def test_shipped_settings_are_valid():
    files = list(DATASETS.glob("*.yaml"))
    assert {file.stem for file in files} >= {"gsm8k", "deepscaler", "dapo_math_17k", "orz_math", "arithmetic"}
    for file in files:
        PreprocessConfig.model_validate(yaml.safe_load(file.read_text()))


GOOD = [{"prompt": "P", "answer": "7"}]


@pytest.mark.parametrize(
    ("name", "rows", "overrides", "code", "expected"),
    [
        ("gsm9k", GOOD, [], 2, "known: arithmetic, "),
        ("arithmetic", GOOD, ["handler=x"], 2, "handler = 'x': unknown key (did you mean handler_name?)"),
        ("arithmetic", GOOD, ["zzz=x"], 2, "zzz = 'x': unknown key (known: input, output_prefix, "),
        ("arithmetic", GOOD, ["prompt_typ=x"], 2, "prompt_typ = 'x': unknown key (did you mean prompt_type?)"),
        ("arithmetic", GOOD, ["map_keys.promt=x"], 2, "promt = 'x': unknown key (did you mean map_keys.prompt?)"),
        ("arithmetic", GOOD, ["seq_length=0"], 2, "1 configuration error:\n  - seq_length = 0: should be greater"),
        ("arithmetic", GOOD, ["input=3"], 2, "input = 3: should be a valid string; or: should be a valid list"),
        ("arithmetic", GOOD, ["handler_name=x"], 2, "AlpacaStyleInstructionHandler"),
        ("arithmetic", GOOD, ["prompt_type=x"], 2, "prompt_type = 'x': no such prompt type; known are empty, "),
        ("arithmetic", GOOD, ["seq_length=9"], 2, "tokenizer_name_or_path = None: seq_length = 9: set both"),
        ("arithmetic", GOOD, ["answer_pattern=x"], 2, "answer_pattern = 'x': must have one group"),
        ("arithmetic", GOOD, ["answer_pattern=("], 2, "not a regular expression"),
        ("arithmetic", GOOD, ["answer_pattern"], 2, "must be key=value"),
        ("arithmetic", GOOD, ["map_keys.prompt=text"], 1, "source.json:1: map_keys.prompt = 'text': no such column"),
        ("arithmetic", GOOD, ["map_keys.response=text"], 1, "source.json:1: map_keys.response = 'text'"),
        ("arithmetic", [], [], 1, "the data set is empty"),
        ("arithmetic", [{"prompt": [{"role": "x"}], "answer": "7"}], [], 1, "source.json:1: a turn needs role"),
        ("arithmetic", [{"prompt": "P", "answer": [7]}], [], 1, "must be text or a number"),
        ("gsm8k", [{"question": "P", "answer": "7"}], [], 1, "not found in '7'"),
        ("orz_math", [[{"from": "human", "value": "P"}]], [], 1, "list of two turns"),
        ("orz_math", GOOD, [], 1, "must be a list of two turns"),
    ],
)
def test_refused(tmp_path, capsys, name, rows, overrides, code, expected):
    source = tmp_path / "source.json"
    source.write_text(json.dumps(rows))
    assert main([name, f"input={source}", f"output_prefix={tmp_path / 'out'}", *overrides]) == code
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize(("prefix", "named"), [("file/set", "file"), ("set", "set.parquet")])
def test_an_output_that_cannot_be_written(tmp_path, capsys, prefix, named):
    source = tmp_path / "file.json"
    source.write_text(json.dumps(GOOD))
    (tmp_path / "file").touch()
    (tmp_path / "set.parquet").mkdir()
    arguments = [f"input={source}", f"output_prefix={tmp_path / prefix}", "prompt_type=empty"]
    assert main(["arithmetic", *arguments]) == 1
    error = capsys.readouterr().err
    assert str(tmp_path / named) in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "file.json", "set.parquet"]


@pytest.mark.parametrize(
    ("content", "reason"), [(b"- 1", ""), (b"a: [", "cannot be read"), (b"\xff\xfe\xff", "read")]
)
def test_a_file_of_settings_that_is_none(tmp_path, capsys, content, reason):
    file = tmp_path / "mine.yaml"
    file.write_bytes(content)
    assert main([str(file), "input=x"]) == 2
    error = capsys.readouterr().err
    assert str(file) in error
    assert reason in error


def test_missing_input(tmp_path, capsys):
    assert main(["gsm8k", f"input={tmp_path / 'none.jsonl'}"]) == 1
    assert "no such file" in capsys.readouterr().err
