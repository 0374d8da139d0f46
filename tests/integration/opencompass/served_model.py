"""A local OpenAI-compatible endpoint: crafted replies, and a judge."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def save_tiny_tokenizer(folder):
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
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)


class ServedModels:
    """The endpoint; ``requests`` keeps what was asked, for the test to look at."""

    def __init__(self, replies):
        self.requests = []
        requests = self.requests

        def answer(body):
            prompt = body["messages"][-1]["content"]
            if body["model"] == "judge":
                gold, predicted = re.findall(
                    r"(?s)Gold target: ([^\n]*)\nPredicted answer:(.*)", prompt.split("new example")[-1]
                )[0]
                if "know" in predicted:
                    return "NOT_ATTEMPTED"
                return "CORRECT" if gold in predicted else "INCORRECT"
            [marker] = re.findall(r"\[\w+ \d+\]", prompt)
            return replies[marker]

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):  # the base class's name
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                requests.append(body)
                message = {"role": "assistant", "content": answer(body)}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                head = {"id": "0", "object": "chat.completion", "created": 0, "model": body["model"]}
                reply = {**head, "choices": [choice]}
                data = json.dumps(reply).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                """Silence."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self):
        """The endpoint's base address."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"
