"""Examples that break the rules on the Ray cluster, as in `test_rules.py`."""

# rule -> (overrides, key path, value, part of the message, part of the suggestion)
CLUSTER_EXAMPLES = {
    "ray_keys_act_on_a_ray_of_ours": (
        ["ray_address=10.0.0.1:6379", "ray.object_store_gib=8"],
        "ray.object_store_gib", 8, "the cluster at 10.0.0.1:6379", "--object-store-memory",
    ),
}  # fmt: skip
