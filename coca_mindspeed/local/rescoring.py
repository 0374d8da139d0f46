"""What the policy says of responses that another engine has sampled."""

from dataclasses import replace

import torch

from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.sampler import Samples
from coca_mindspeed.local.update import microbatches_of, minibatches_of, responses_of


@torch.no_grad()
def rescored(policy: Policy, samples: Samples, config: RunConfig) -> Samples:
    """The same responses with the policy's own log-probs and entropy in the place of what the engine could not know.

    By the update's passes, over the update's microbatches: what the first of them computes is, on a CPU, bit for bit
    what it is compared with.
    """
    log_probs, entropy = torch.zeros_like(samples.log_probs), torch.zeros_like(samples.entropy)
    for minibatch in minibatches_of(len(samples.prompts), config):
        for microbatch in microbatches_of(samples, minibatch, config):
            rows, responses = responses_of(policy, samples, microbatch, config)
            scores = responses.scores()
            mask = samples.inside[rows, : scores.log_probs.shape[1]]
            log_probs[rows, : mask.shape[1]] = scores.log_probs.masked_fill(~mask, 0.0)
            entropy[rows] = scores.entropy.masked_fill(~mask, 0.0).sum(dim=1) / samples.lengths[rows]
    return replace(samples, log_probs=log_probs, entropy=entropy)
