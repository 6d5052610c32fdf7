"""Keys of `tools_config`: what a model may call while it answers, and how far such an answer goes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mindspeed_rl.config.section import Count, Section

BUILT_IN = ("calculator", "python", "search")


class ToolsConfig(Section):
    """Off without any name in `tools`."""

    tools: list[str] = Field([], description="calculator, python, search, or names that tool_file registers")
    tool_file: str | None = Field(None, description="Python file that registers tools of your own (docs/tools.md)")
    max_tool_calls: Count = Field(4, description="calls in one response; the turn that asks for more is its last")
    max_total_response_length: Count | None = Field(
        None,
        description="longest response in tokens, all turns and tools' answers together; max_tokens is that of a turn",
    )
    tool_timeout: Annotated[float, Field(gt=0, le=3600)] = Field(10.0, description="seconds that a call may take")
    tool_parallel: Count = Field(8, description="calls that a rollout engine has running at once; others wait")
    max_answer_length: Count = Field(
        1024, description="characters of a tool's answer that the model gets to see, longer ones lose their middle"
    )
    python_memory_mib: Annotated[int, Field(ge=64, strict=True)] = Field(
        512, description="address space that a program of the tool python may take, MiB"
    )
    search_url: str | None = Field(None, description="endpoint that the tool search sends queries to")

    @property
    def enabled(self) -> bool:
        """Whether there are any."""
        return bool(self.tools)
