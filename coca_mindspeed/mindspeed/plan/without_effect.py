"""Keys that MindSpeed-RL's own trainer would honour and that have no effect here, told when a run starts."""

from collections.abc import Iterator, Mapping
from typing import Any

from coca_mindspeed.mindspeed.stages.verifiers import OWN_VERIFIER

_ADVANTAGES = "advantages are CoCA's, of both segments"
_LOSS = "the loss is CoCA's (coca.method.loss_aggregation, rl_config.clip_ratio)"
_GRADER = "this project's grader takes its options from coca.grading"
_KEYS = {
    "adv_estimator": _ADVANTAGES,
    "gamma": _ADVANTAGES,
    "lam": _ADVANTAGES,
    "use_kl_in_reward": "rewards hold no KL term; rl_config.init_kl_coef puts one into the loss",
    "token_level_loss": _LOSS,
    "clip_higher_enable": _LOSS,
    "clip_ratio_low": _LOSS,
    "clip_ratio_high": _LOSS,
    "cliprange_value": "there is no critic",
    "overlong_buffer_enable": "a response that was cut off is graded as it is",
    "overlong_buffer": "a response that was cut off is graded as it is",
    "overlong_buffer_penalty_factor": "a response that was cut off is graded as it is",
}
_OF_THE_REFERENCE = ("kl_penalty", "kl_ctrl_type", "ref_dispatch_size", "ref_max_packing_token_size")
_OF_THE_VERIFIER = ("verifier_parallel", "verifier_timeout", "verifier_weight")


def keys_without_effect(config: Mapping[str, Any], *, reference: bool) -> Iterator[str]:
    """One line for each key that a configuration sets for nothing.

    Args:
        config: MindSpeed-RL's sections.
        reference: whether there is a KL term.
    """
    rl = config.get("rl_config") or {}
    reasons = dict(_KEYS)
    if not reference:
        reasons |= dict.fromkeys(_OF_THE_REFERENCE, "there is no reference model (rl_config.init_kl_coef is 0)")
    if OWN_VERIFIER in (rl.get("verifier_function") or ()):
        reasons |= dict.fromkeys(_OF_THE_VERIFIER, _GRADER)
    for key, reason in reasons.items():
        if key in rl:
            yield f"rl_config.{key}={rl[key]} has no effect: {reason}"
