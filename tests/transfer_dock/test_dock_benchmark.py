"""The TransferDock's benchmark still runs, and measures what it says; at sizes that mean nothing."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import records
import transfer_dock
from dock import metadata
from dock.workload import GROUP, TENSOR_COLUMNS, Workload, checksum

TINY = transfer_dock.Settings({64: (0, 1)}, (1,), wake_ups=3, table_rows=(640,), claims=20, batch_rows=16)
HEADLINES = {
    "dock.iteration_vs_ray",
    "dock.iteration_vs_ray_from_rows",
    "dock.iteration_vs_transferqueue",
    "dock.wakeup_p50_ms",
    "dock.wakeup_p99_ms",
    "dock.controller_mb_per_million_rows",
}


def test_workload_has_the_bytes_it_states_and_shares_prompts_within_a_group():
    workload = Workload(64)
    columns = workload.columns(workload.rows(1, 2))
    assert set(columns) == set(TENSOR_COLUMNS)
    prompts = columns["prompt_ids"]
    assert len({id(prompt) for prompt in prompts}) == len(prompts) // GROUP
    jagged = [values for name, values in columns.items() if name != "rewards"]
    unique = {id(tensor): tensor.nbytes for values in jagged for tensor in values}
    assert workload.nbytes(workload.rows(1, 2)) == sum(unique.values()) + columns["rewards"].nbytes
    for name, values in columns.items():
        assert str(values[0].dtype) == f"torch.{TENSOR_COLUMNS[name].dtype}", name
    assert checksum(columns) == sum(int(t.sum()) for name in ("prompt_ids", "responses") for t in columns[name])
    assert Workload(64).response_lengths.tolist() == Workload(64).response_lengths.tolist()
    assert max(Workload(16384).response_lengths) <= 8192
    assert max(Workload(16384).prompt_lengths) < 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads memory use from /proc")
def test_whole_benchmark_runs_without_the_peer_and_says_that_it_is_absent():
    found = [*transfer_dock.measure_idle(TINY), *transfer_dock.measure_throughput(TINY, with_queue=False)]
    assert {record.metric for record in found} >= HEADLINES
    by_name = {record.metric: record for record in found if record.metric in HEADLINES}
    absent = by_name.pop("dock.iteration_vs_transferqueue")
    assert absent.value == 0
    assert "NOT MEASURED" in absent.note
    assert all(record.value > 0 for record in by_name.values())
    assert all(record.peer is None for record in found)
    cases = {record.note for record in found if record.metric == "dock.iteration_samples_per_s"}
    assert len(cases) == 2, "all rows at once, and 16 at a time"


def test_records_that_are_not_to_be_kept_are_only_printed(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ROOT", tmp_path)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    figures = [records.Record("a.b", 1.5, "s")]
    records.publish("short", figures, "here", write=False)
    assert "a.b" in capsys.readouterr().out
    assert not list((tmp_path / "benchmarks" / "results").iterdir())
    records.publish("long", figures, "here")
    (kept,) = json.loads((tmp_path / "benchmarks" / "results" / "long.json").read_text())
    assert (kept["metric"], kept["value"], kept["hardware"]) == ("a.b", 1.5, "here")


def test_plot_is_the_same_for_the_same_figures(tmp_path):
    figures = {1000: 40.0, 10_000: 42.0}
    for name in ("a.svg", "b.svg"):
        metadata.plot(figures, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
