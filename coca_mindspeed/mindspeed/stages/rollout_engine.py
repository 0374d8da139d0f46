"""Fixes to MindSpeed-RL's rollout that take effect only on an NPU."""

from collections.abc import Sequence
from typing import Any

import torch


def onload_training_weights(original: Any) -> Any:
    """Wrap ``MegatronShardingManager.enter_infer_mode``: onload the training weights before they are read.

    MindSpeed-RL offloads them at the end of this method and onloads them only for the forward pass and the update, so
    a second rollout in a row, as in a validation, would read freed weights.
    """

    def enter_infer_mode(self: Any) -> None:
        if self.train_param_offload and not getattr(self, "share_backbone", False):
            self.megatron_offloader.onload_param()  # a no-op if they are there
        original(self)

    return enter_infer_mode


def prompts_as_token_ids(_original: Any) -> Any:
    """Replace ``VLLMInferEngine.generate_sequences`` of MindSpeed-RL's master.

    Upstream decodes prompts to text without special tokens, which removes the chat template: responses would be
    sampled from another prompt than the one they are trained on.
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
