"""Llama 3 in MindSpeed-RL's rollout: it trains this architecture, but has no way to hand its weights to vLLM.

Release 2.3.0 and master have no weight adaptor for ``LlamaForCausalLM``, and their loader for it leaves out
``lm_head``, as if it were tied to the embedding; Llama 3 has its own.
"""

from typing import Any


def weight_adaptor(model_config: Any) -> Any:
    """For the manifest: MindSpeed-RL's general adaptor, whose parameter names are those of Llama."""
    from mindspeed_rl.workers.resharding.weight_adaptor import MegatronVLLMWeightAdaptor

    return MegatronVLLMWeightAdaptor(model_config)


def load_weights(actor_weights: Any, vllm_model: Any, parallel: Any, hf_config: Any) -> Any:
    """For the manifest: MindSpeed-RL's loader for Qwen 2.5, which loads every parameter that vLLM's model has."""
    from mindspeed_rl.models.rollout.vllm_adapter.megatron_weight_loaders import qwen_megatron_weight_loader

    return qwen_megatron_weight_loader(actor_weights, vllm_model, parallel, hf_config)
