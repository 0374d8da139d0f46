"""A local OpenAI-compatible endpoint: crafted replies, a judge, and a real two-layer model with random weights."""

import json
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


def save_tiny_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer whose merges straddle the confidence tags."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["<confidence> 0.9 </confidence>\nThe answer is"] * 50, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    fast.save_pretrained(folder)
    return fast


class TinyModel:
    """A random Qwen2 of two layers that samples at the temperature asked for."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        torch.manual_seed(0)
        self.tokenizer = tokenizer
        size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        self.model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **size, **heads)).eval()
        self.lock = threading.Lock()

    def reply(self, prompt: str, temperature: float) -> str:
        """Sample eight tokens."""
        ids = self.tokenizer(prompt[-64:], return_tensors="pt")
        with self.lock, torch.no_grad():
            out = self.model.generate(ids["input_ids"], do_sample=True, temperature=temperature, max_new_tokens=8)
        return self.tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True) or "?"


class ServedModels:
    """The endpoint; ``requests`` keeps what was asked, for the test to look at."""

    def __init__(self, replies: Mapping[str, str], tokenizer: PreTrainedTokenizerFast) -> None:
        self.requests: list[dict[str, Any]] = []
        tiny = TinyModel(tokenizer)
        requests = self.requests

        def answer(body: dict[str, Any]) -> str:
            prompt = body["messages"][-1]["content"]
            if body["model"] == "judge":
                gold, predicted = re.findall(
                    r"(?s)Gold target: ([^\n]*)\nPredicted answer:(.*)", prompt.split("new example")[-1]
                )[0]
                if "know" in predicted:
                    return "NOT_ATTEMPTED"
                return "CORRECT" if gold in predicted else "INCORRECT"
            if body["model"] == "tiny":
                return tiny.reply(prompt, body["temperature"])
            [marker] = re.findall(r"\[\w+ \d+\]", prompt)
            return replies[marker]

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:  # the base class's name
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                requests.append(body)
                message = {"role": "assistant", "content": answer(body)}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                reply = {
                    "id": "0",
                    "object": "chat.completion",
                    "created": 0,
                    "model": body["model"],
                    "choices": [choice],
                }
                data = json.dumps(reply).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Silence."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> "ServedModels":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        """The endpoint's base address."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"
