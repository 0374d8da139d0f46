"""Memory estimate of a local run by formula, from its configuration and the shapes of its model; nothing is built."""

import math
from typing import Any, NamedTuple

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.local.disk_space import Shapes, trained_bytes
from coca_mindspeed.local.respond import largest_evaluation_batch
from coca_mindspeed.local.update import largest_group_sizes

# Fitted (docs/training.md): numbers that a layer keeps per token, in widths of it and of its MLP; bytes of the LM head.
_OF_HIDDEN, _OF_MLP, _LM_HEAD = 11, 4, 6 * 2**25


class Batch(NamedTuple):
    """Prompts of ``prompt`` tokens, and ``rows`` responses of ``response`` tokens to them."""

    prompts: int
    rows: int
    prompt: int
    response: int


class MemoryEstimate(NamedTuple):
    """Bytes that a run needs besides the process and its libraries, in float32."""

    weights: int
    moments: int
    logits: int
    gradients: int
    activations: int
    cache: int

    @property
    def peak(self) -> int:
        return self.weights + self.moments + self.logits + max(self.gradients + self.activations, self.cache)


def largest_microbatch(config: RunConfig) -> Batch:
    """The microbatch of the longest prompts and responses."""
    rollout, prompt, response = config.rollout, config.rollout.max_prompt_tokens, config.rollout.max_new_tokens
    prompts = rollout.prompts // config.trainer.minibatches
    sizes = largest_group_sizes(prompts, rollout.group_size, response, prompt, config.trainer)
    return Batch(len(sizes), sum(sizes), prompt, response)


def largest_sample(config: RunConfig) -> Batch:
    """The most and longest responses that a step or an evaluation samples at once."""
    rollout, questions = config.rollout, largest_evaluation_batch(config)
    rows, lengths = rollout.prompts * rollout.group_size, (rollout.max_prompt_tokens, rollout.max_new_tokens)
    prompts = min(rows, rollout.batch_responses or rows) // rollout.group_size or 1
    batches = Batch(prompts, prompts * rollout.group_size, *lengths), Batch(questions, questions, *lengths)
    return max(batches, key=lambda batch: (batch.rows, batch.prompts))


def estimate_memory(config: RunConfig, architecture: Any, shapes: Shapes) -> MemoryEstimate:
    """Estimate from the model's Hugging Face configuration and the shapes of its weights (empty: it has none yet)."""
    lora, batch, sample = config.model.lora, largest_microbatch(config), largest_sample(config)
    hidden, layers, heads = architecture.hidden_size, architecture.num_hidden_layers, architecture.num_attention_heads
    head = getattr(architecture, "head_dim", None) or hidden // heads
    keys = 2 * head * (getattr(architecture, "num_key_value_heads", None) or heads)  # and values
    mlp = getattr(architecture, "intermediate_size", None) or 4 * hidden
    if not shapes:  # a dense decoder with a gated MLP
        numbers = hidden * (2 * head * heads + keys + 3 * mlp * (getattr(architecture, "num_experts", None) or 1))
        embeddings = (2 - architecture.tie_word_embeddings) * architecture.vocab_size * hidden
        shapes = {"embedding": [embeddings], "layers": [layers * numbers]}
    gradients, moments = trained_bytes(shapes, lora, config.optimizer.name)
    frozen, adapters = (4, 0) if lora.rank is None else (2 if lora.base_dtype == "bfloat16" else 4, gradients)
    tokens = batch.rows * batch.response
    tokens += batch.prompt * (batch.prompts if config.trainer.share_prompts else batch.rows)
    layer = 4 * tokens * (_OF_HIDDEN * hidden + _OF_MLP * mlp)
    logits = min(_LM_HEAD, 24 * architecture.vocab_size * max(batch.rows * batch.response, sample.rows))
    return MemoryEstimate(
        weights=frozen * sum(map(math.prod, shapes.values())) + adapters,
        moments=moments,
        logits=max(logits, layer) if config.model.gradient_checkpointing else logits,  # or one layer that runs again
        gradients=gradients,
        activations=layers * (4 * tokens * (hidden + keys) if config.model.gradient_checkpointing else layer),
        cache=4 * layers * keys * sample.rows * (sample.prompt + sample.response),
    )
