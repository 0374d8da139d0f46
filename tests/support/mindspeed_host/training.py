"""Changes of the CPU shim to MindSpeed-RL's training: dtype, initial weights, no offloading."""

from typing import Any

from coca_mindspeed.errors import ConfigError
from coca_mindspeed.mindspeed.start.process import process_settings


def host_training_config(original: Any) -> Any:
    """Wrap ``parse_training_config``: allow float32; MindSpeed-RL accepts bfloat16 only."""

    def parse_training_config(config: Any) -> Any:
        parsed = original(config)
        if process_settings().coca.host.dtype == "float32":
            for role in ("actor_config", "ref_config", "reward_config"):
                parsed[role].bf16 = False
            parsed["generate_config"].dtype = "float32"
        return parsed

    return parse_training_config


def load_initial_weights(original: Any) -> Any:
    """Wrap ``ActorHybridWorkerBase._build_model_optimizer``: start from a Hugging Face directory.

    A checkpoint that is loaded (a resume, the second stage of a method) takes precedence.  A reference model would keep
    random weights, so it needs one.
    """

    def build_model_optimizer(self: Any) -> Any:
        model, optimizer, scheduler = original(self)
        weights = process_settings().coca.host.initial_weights
        if weights is not None and self.megatron_config.load is None:
            if process_settings().reference:
                raise ConfigError("coca.host.initial_weights: a KL term needs actor_config.load in its place")
            from transformers import AutoConfig, AutoModelForCausalLM

            from tests.support.mindspeed_host.weights import Layout, load_shard

            parallel = self.parallel_state
            layout = Layout.of(AutoConfig.from_pretrained(weights), parallel.get_tensor_model_parallel_world_size())
            state = AutoModelForCausalLM.from_pretrained(weights).float().state_dict()
            load_shard(model, state, layout, parallel.get_tensor_model_parallel_rank())
            optimizer.reload_model_params()
        return model, optimizer, scheduler

    return build_model_optimizer


class HostOffLoader:
    """Replaces ``MegatronOffLoader``: on a CPU there is nothing to offload."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        pass

    def offload_param(self) -> None:
        """Do nothing."""

    onload_param = offload_param
    offload_optimizer = offload_param
    onload_optimizer = offload_param
    offload_grad = offload_param
    onload_grad = offload_param
