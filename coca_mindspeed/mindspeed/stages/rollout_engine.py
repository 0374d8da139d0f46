"""What happens only beside an NPU: the real rollout engine, and the weights that it is given."""

from collections.abc import Sequence
from typing import Any

import torch


def with_training_weights_there(original: Any) -> Any:
    """Wrap ``MegatronShardingManager.enter_infer_mode``: bring offloaded training weights back before they are read.

    MindSpeed-RL offloads them at the end of this very method and brings them back for the forward pass and the update
    alone, so a second rollout in a row, as every validation is, would read weights that are no longer there.
    """

    def enter_infer_mode(self: Any) -> None:
        if self.train_param_offload and not getattr(self, "share_backbone", False):
            self.megatron_offloader.onload_param()  # which leaves alone what is there
        original(self)

    return enter_infer_mode


def prompts_as_token_ids(_original: Any) -> Any:
    """Stand where ``VLLMInferEngine.generate_sequences`` of MindSpeed-RL's master would.

    That one turns prompts back into text and drops their special tokens, and with them the chat template: responses
    would be sampled after another prompt than the one that they are trained under.
    """

    @torch.no_grad()
    def generate_sequences(self: Any, idx_list: Sequence[Sequence[int]], **kwargs: Any) -> Any:
        self.init_cache_engine()
        with self.update_sampling_params(**kwargs):
            prompts = [{"prompt_token_ids": [int(token) for token in ids]} for ids in idx_list]
            answered = self.llm.generate(prompts=prompts, sampling_params=self.sampling_params, use_tqdm=False)
            sampled = self._post_process_outputs(answered)
        self.free_cache_engine()
        return sampled

    return generate_sequences
