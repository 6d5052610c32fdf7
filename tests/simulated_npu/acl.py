"""AscendCL, as far as Ray asks it: how many NPUs this host has, and of what kind."""

import os


class rt:
    @staticmethod
    def get_device_count() -> tuple[int, int]:
        return int(os.environ.get("SIMULATED_NPUS", "0")), 0


def get_soc_name() -> str:
    return "Ascend910B"
