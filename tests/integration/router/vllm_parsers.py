"""Run vLLM's reasoning parsers on token ids: ``python -m ... TOKENIZER`` reads cases, writes fields, as JSON.

A case is ``[parser, ids]``; its result has the ``[field, text]`` of each token as it is streamed, and the fields of the
whole reply.
"""

import json
import sys

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager

REQUEST = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "?"}])


def fields_of(tokenizer, name, ids):
    parser = ReasoningParserManager.get_reasoning_parser(name)
    streaming, streamed, text = parser(tokenizer), [], ""
    for end in range(1, len(ids) + 1):
        now = tokenizer.decode(ids[:end])
        delta = streaming.extract_reasoning_streaming(
            text, now, now[len(text) :], ids[: end - 1], ids[:end], ids[end - 1 : end]
        )
        text = now
        for field in ("reasoning", "content"):
            if delta is not None and getattr(delta, field):
                streamed.append([field, getattr(delta, field)])
    reasoning, content = parser(tokenizer).extract_reasoning(text, REQUEST)
    return {"streamed": streamed, "whole": {"reasoning": reasoning, "content": content}}


def main(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    print(json.dumps([fields_of(tokenizer, name, ids) for name, ids in json.load(sys.stdin)]))


if __name__ == "__main__":
    main(sys.argv[1])
