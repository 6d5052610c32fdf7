"""`validate_weight` in a run as a user starts it: a bit that flips on the way to rollout ends it."""

import os
import subprocess
from pathlib import Path

from tests.support.runs import command

VICTIM = "model.layers.1.self_attn.o_proj.weight"
# runs at the start of every Python process: weights come out of the object store with another bit
FAULT = f'''
import importlib.abc, importlib.machinery, sys

class Faulty(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "mindspeed_rl.workers.weights":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            unpack = module.unpack_weights

            def faulty(buckets):
                for name, tensor in unpack(buckets):
                    if name == "{VICTIM}":
                        tensor = tensor.clone()
                        tensor.flatten().view(module.torch.uint8)[9] ^= 2
                    yield name, tensor

            module.unpack_weights = faulty

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Faulty())
'''


def test_a_flipped_bit_ends_the_run_and_is_named(inputs: Path, tmp_path: Path) -> None:
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(FAULT)
    overrides = (
        "rl_config.actor_resource.num_npus=1",
        "rl_config.use_integrated_worker=false",
        "rl_config.rollout_resource.num_npus=1",
        "generate_config.validate_weight=true",
    )
    path = os.pathsep.join([str(hook), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command(inputs, tmp_path, *overrides),
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-4000:]
    assert "validate_weight, rank 1, weights of iteration 0" in done.stderr
    assert f"1 tensors did not arrive as the training ranks hold them: {VICTIM}" in done.stderr
    assert "Traceback" not in done.stderr
