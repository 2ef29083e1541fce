"""Runs in litellm's own environment: makes the calls that stdin lists and prints what litellm makes of each answer.

`test_litellm` starts it. Nothing of ours is imported: it is not there.
"""

import json
import sys
from typing import Any

import litellm

CALLS = {"chat": litellm.completion, "text": litellm.text_completion}
PROVIDERS = {"chat": "openai", "text": "text-completion-openai"}


def told(call: dict[str, Any], url: str) -> list[Any]:
    """The replies, one or the chunks of a stream, or the exception's name and what it says."""
    kind, options = call["kind"], {"model": "llama", **call["options"]}
    options["model"] = f"{PROVIDERS[kind]}/{options['model']}"
    try:
        answer = CALLS[kind](api_base=f"{url}/v1", api_key="none", num_retries=0, max_retries=0, timeout=60, **options)
        return [each.model_dump() for each in (answer if options.get("stream") else [answer])]
    except litellm.exceptions.APIError as error:
        return [type(error).__name__, error.status_code, str(error)]
    except Exception as error:
        return [type(error).__name__, getattr(error, "status_code", None), str(error)]


def main() -> None:
    asked = json.load(sys.stdin)
    json.dump([told(call, asked["url"]) for call in asked["calls"]], sys.stdout, default=str)


main()
