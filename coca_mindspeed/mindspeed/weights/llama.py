"""Llama 3 in MindSpeed-RL's rollout.

Releases 2.3.0 and master have no weight adaptor for ``LlamaForCausalLM``, and their loader for it skips ``lm_head``
although Llama 3 does not tie it to the embedding.
"""

from typing import Any


def weight_adaptor(model_config: Any) -> Any:
    """MindSpeed-RL's general adaptor, whose parameter names are those of Llama."""
    from mindspeed_rl.workers.resharding.weight_adaptor import MegatronVLLMWeightAdaptor

    return MegatronVLLMWeightAdaptor(model_config)


def load_weights(actor_weights: Any, vllm_model: Any, parallel: Any, hf_config: Any) -> Any:
    """MindSpeed-RL's loader for Qwen 2.5, which loads every parameter of vLLM's model."""
    from mindspeed_rl.models.rollout.vllm_adapter.megatron_weight_loaders import qwen_megatron_weight_loader

    return qwen_megatron_weight_loader(actor_weights, vllm_model, parallel, hf_config)
