"""The tables of other projects' keys: complete, and true to our schema."""

import json
from pathlib import Path

import pytest

from ci.generate_coverage_docs import TARGET, TITLES, field_of, load, our_keys, render
from ci.generate_coverage_docs import tested_in as file_of
from mindspeed_rl.config.migration_values import CONVERTERS

TESTS = Path(__file__).resolve().parents[1]
REFERENCE = json.loads((TESTS / "config" / "reference_keys.json").read_text())


@pytest.mark.parametrize("name", TITLES)
def test_every_key_of_theirs_is_there(name: str) -> None:
    table, reference = load(name), REFERENCE[name]
    assert len(set(reference)) == len(reference)
    assert set(table) == set(reference)


@pytest.mark.parametrize("name", TITLES)
def test_each_has_keys_of_ours_or_a_reason(name: str) -> None:
    for key, entry in load(name).items():
        assert set(entry) <= {"ours", "convert", "note", "refused"}, key
        assert entry.get("convert") in {None, *CONVERTERS}, key
        assert bool(our_keys(entry)) != bool(entry.get("refused")), key
        for ours in our_keys(entry):
            field = field_of(ours)
            assert field is not None, f"{key}: the schema has no {ours}"
            assert field.description, ours


@pytest.mark.parametrize("name", TITLES)
def test_a_test_names_each_key_of_ours(name: str) -> None:
    for key in {key for entry in load(name).values() for key in our_keys(entry)}:
        assert (TESTS.parent / file_of(key)).is_file()
    with pytest.raises(ValueError, match="no test names rl_config"):
        file_of("rl_config.no_such_" + "key_of_ours")


def test_the_page_is_up_to_date() -> None:
    assert TARGET.read_text(encoding="utf-8") == render()


def test_no_such_key() -> None:
    assert field_of("rl_config.nothing") is None
    assert field_of("megatron_training.lr.more") is None
