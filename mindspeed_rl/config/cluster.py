"""Keys of `ray`: what a run asks of Ray, the engine of the cluster."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mindspeed_rl.config.section import Positive, Section


class RayConfig(Section):
    """Keys of `ray`."""

    object_store_gib: Positive | None = Field(
        None, description="shared memory for samples, of a Ray started here; null: a share of the memory, as Ray says"
    )
    spill_folder: str | None = Field(
        None, description="where a Ray started here puts samples that its shared memory cannot hold; null: /tmp/ray"
    )
    nodes_timeout_minutes: Annotated[float, Field(ge=0, le=100_000)] = Field(
        0,
        description="how long a cluster that is joined may take to add the nodes that the run needs (an autoscaler "
        "is asked for them); 0: they must be there",
    )
