"""Errors on their way from a worker to the user."""

import pickle

from mindspeed_rl.common.errors import ConfigError, Violation


def test_a_configuration_error_keeps_its_text_between_processes() -> None:
    error = ConfigError([Violation("device", "npu", "package mindspeed is not installed", "install it")])
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.violations, copy.exit_code) == (str(error), error.violations, 2)
