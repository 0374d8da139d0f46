"""The HTTP call whose result goes into the prompt: retrieval, or a tool."""

import json

import aiohttp
import anyio

from coca_mindspeed.serving.backend_error import BackendError
from coca_mindspeed.serving.serving_config import HookConfig
from coca_mindspeed.serving.tier import Messages
from coca_mindspeed.serving.trace import Trace


async def with_context(session: aiohttp.ClientSession, hook: HookConfig, messages: Messages, trace: Trace) -> Messages:
    """The messages with the hook's context before the last one's text.

    Raises:
        BackendError: it failed, or returned no context of the allowed length.
    """
    body = {"messages": list(messages), "confidence": trace.confidence, "tier": trace.tier}
    try:
        with anyio.fail_after(hook.timeout_s):
            async with session.post(hook.url, json=body, allow_redirects=False) as response:
                context = json.loads(await response.read())["context"] if response.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BackendError("failed", f"the hook failed: {type(error).__name__}") from error
    if not isinstance(context, str) or len(context) > hook.max_characters:
        raise BackendError("failed", f"the hook returned no context of at most {hook.max_characters} characters")
    last = messages[-1]
    return [*messages[:-1], {**last, "content": f"{context}\n\n{last['content']}"}]
