"""`Metric` and `MetricSet` under the name of the package that users look in; see `mindspeed_rl.common.metric`."""

from mindspeed_rl.common.metric import Metric, MetricSet, Reduction

__all__ = ["Metric", "MetricSet", "Reduction"]
