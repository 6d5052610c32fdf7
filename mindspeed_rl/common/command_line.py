"""The border between the program and its command lines: errors become one message and an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from mindspeed_rl.common.errors import MindSpeedRLError

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def config_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """Arguments of a command that takes a run configuration; `parse_intermixed_args` reads them."""
    parser = argparse.ArgumentParser(prog=command, description=description)
    parser.add_argument("--config-name", required=True, help="run configuration, such as grpo_trainer_tiny_cpu")
    parser.add_argument("--config-dir", help="folder of your own configurations, searched before ours")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change a key of the configuration")
    return parser


def run_command(function: Callable[[], int]) -> int:
    """Call `function` and return its exit code.

    An error of ours gives its own exit code, an error of the operating system (which names file and reason) 1, and
    Ctrl-C 130; each with its message on stderr and without a traceback. Any other error is a defect and passes.
    """
    try:
        return function()
    except MindSpeedRLError as error:  # before OSError: some of ours are both, with an exit code of their own
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
