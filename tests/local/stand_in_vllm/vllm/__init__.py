"""As much of vLLM as the rollout's process asks for, by transformers: so that the process can be tested anywhere.

Like vLLM it remembers what it has computed of a text until it is told to forget, and so shows a cache of old weights.
``STAND_IN`` in the environment has it misbehave: ``refusing`` to start, ``deaf`` to weights, or ``remembering``.
"""

import os
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import torch

_MANNER = os.environ.get("STAND_IN", "")


@dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
    seed: int
    stop_token_ids: list
    ignore_eos: bool
    logprobs: int
    flat_logprobs: bool
    detokenize: bool
    logit_bias: dict | None = None


class LLM:
    def __init__(self, model, *, dtype, max_model_len, kv_cache_memory_bytes, load_format, logprobs_mode, **others):
        assert (load_format, logprobs_mode, others["generation_config"]) == ("dummy", "processed_logprobs", "vllm")
        assert others["skip_tokenizer_init"]
        assert kv_cache_memory_bytes > 0
        if _MANNER == "refusing":
            raise ValueError("this architecture is not known")
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(others["seed"])
        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=getattr(torch, dtype))
        self._model.eval()
        self._longest = max_model_len
        self._remembered = {}

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        known = self._model.state_dict()
        for name, weight in kwargs["weights_iterator"]:
            assert (known[name].shape, known[name].dtype) == (weight.shape, weight.dtype), name
            if _MANNER != "deaf":
                known[name].copy_(weight)

    def apply_model(self, function):
        function(self._model)

    def reset_prefix_cache(self):
        if _MANNER != "remembering":
            self._remembered.clear()
        return True

    @torch.inference_mode()
    def generate(self, prompts, params, use_tqdm):
        assert not use_tqdm
        rows = [_Row(prompt["prompt_token_ids"], each) for prompt, each in zip(prompts, params, strict=True)]
        assert all(len(row.text) + row.params.max_tokens <= self._longest for row in rows)
        while going := [row for row in rows if not row.ended]:
            self._compute({row.text for row in going} - self._remembered.keys())
            for row in going:
                row.go_on(self._remembered[row.text].clone())
        return [SimpleNamespace(outputs=[row.completion()]) for row in rows]

    def _compute(self, texts):
        by_length = defaultdict(list)
        for text in sorted(texts):
            by_length[len(text)].append(text)
        for batch in by_length.values():
            logits = self._model(input_ids=torch.tensor(batch), logits_to_keep=1).logits[:, -1].float()
            self._remembered.update(zip(batch, logits, strict=True))


class _Row:
    def __init__(self, prompt, params):
        self.text, self.params = tuple(prompt), params
        self._draw = torch.Generator().manual_seed(params.seed)
        self._tokens, self._log_probs = [], []

    @property
    def ended(self):
        tokens, params = self._tokens, self.params
        return len(tokens) == params.max_tokens or bool(tokens and tokens[-1] in params.stop_token_ids)

    def go_on(self, logits):
        for token, bias in (self.params.logit_bias or {}).items():
            logits[token] += bias
        distribution = (logits / (self.params.temperature or 1.0)).log_softmax(-1)
        if self.params.temperature:
            token = int(torch.multinomial(distribution.exp(), 1, generator=self._draw))
        else:
            token = int(distribution.argmax())
        self._tokens.append(token)
        self._log_probs.append(float(distribution[token]))
        self.text = (*self.text, token)

    def completion(self):
        return SimpleNamespace(token_ids=self._tokens, logprobs=SimpleNamespace(logprobs=self._log_probs))
