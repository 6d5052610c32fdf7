"""Examples that break the rules on the profiler, as in `test_rules.py`."""

# rule -> (overrides, key path, value, part of the message, part of the suggestion)
PROFILER_EXAMPLES = {
    "profiled_steps_come": (
        ["profiler.steps=[1,501]"],
        "profiler.steps", 501, "train_iters = 500 is the last step", "from 1 to 500",
    ),
    "profiled_ranks_exist": (
        ["profiler.steps=[1]", "profiler.ranks=[7,8]"],
        "profiler.ranks", 8, "there are 8 workers", "from 0 to 7",
    ),
    "profiler_records_something": (
        ["profiler.with_shapes=true"],
        "profiler.with_shapes", True, "names no steps", "set profiler.steps",
    ),
}  # fmt: skip
