"""What a profiler is to record must be there."""

from violations import BASE, SEPARATE, violations_of

from mindspeed_rl.config.compose import load_config


def test_a_profiler_needs_ranks_and_something_to_record():
    found = violations_of("profiler.steps=[2]", "profiler.ranks=[]", "profiler.what=[]")
    assert [violation.path for violation in found] == ["profiler.ranks", "profiler.what"]
    apart = [*SEPARATE, "profiler.steps=[2]"]
    load_config(BASE, [*apart, "profiler.ranks=[11]"])  # the last one that generates
    (violation,) = violations_of(*apart, "profiler.ranks=[12]")
    assert violation.message == "there are 12 workers"
