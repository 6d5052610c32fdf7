"""Search at an endpoint of the user's."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

from mindspeed_rl.tools.registry import Tool, ToolError

_LARGEST = 2**20  # bytes of an answer that are read


def search(query: str, url: str, seconds: float) -> str:
    """What `url` answers to a POST of `{"query": ...}`: its body, or of JSON the entry `result`, if there is one.

    Raises:
        ToolError: there is no answer, or one that says so by its status.
        TimeoutError: none came within `seconds`.
    """
    if not isinstance(query, str):
        raise ToolError("the query must be text")
    body = json.dumps({"query": query}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            text: str = response.read(_LARGEST).decode(errors="replace")
    except TimeoutError:
        raise
    except (urllib.error.URLError, OSError) as error:
        if isinstance(getattr(error, "reason", None), TimeoutError):
            raise TimeoutError(f"no answer within {seconds:g} s") from error
        raise ToolError(f"search failed: {error}") from error
    try:
        found = json.loads(text)
    except ValueError:
        return text
    result = found.get("result", found) if isinstance(found, dict) else found
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def search_tool(url: str, seconds: float) -> Tool:
    """The tool `search` at that endpoint."""
    return Tool(
        "search",
        "Searches for documents.",
        {"query": {"type": "string", "description": "what to search for"}},
        lambda query: search(query, url, seconds),
    )
