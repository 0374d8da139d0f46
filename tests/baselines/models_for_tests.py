"""Small subjects for the baselines' tests."""

from pathlib import Path

import torch

from coca_mindspeed.baselines.target_model import TargetModel
from coca_mindspeed.config.schema import MethodConfig, ModelConfig, RolloutConfig
from coca_mindspeed.data.embedded.miniature import SYMBOLS
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.policy import Policy, load_policy
from coca_mindspeed.local.tiny_model import write_tiny_model
from tests.local.models_for_tests import write_random_model


def tiny_policy(directory: Path, seed: int = 0) -> Policy:
    write_tiny_model(directory, seed, SYMBOLS)
    return load_policy(directory, ModelConfig(), torch.device("cpu"))


def random_policy(directory: Path, architecture: str) -> Policy:
    return load_policy(write_random_model(directory, architecture), ModelConfig(), torch.device("cpu"))


def target_of(policy: Policy, seed: int = 0, max_new_tokens: int = 12) -> TargetModel:
    rollout = RolloutConfig(max_prompt_tokens=512, max_new_tokens=max_new_tokens)
    return TargetModel(policy, build_grader("exact"), MethodConfig(), rollout, seed)
