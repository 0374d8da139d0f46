"""Small subjects for the baselines' tests."""

import torch

from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.baselines.predictors import TargetModel
from coca_mindspeed.config.schema import ModelConfig, RolloutConfig
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.local.load import load_policy
from coca_mindspeed.local.tiny_model import write_tiny_model
from experiments.miniature import SYMBOLS
from tests.local.models_for_tests import write_random_model


def tiny_policy(directory, seed=0):
    write_tiny_model(directory, seed, SYMBOLS)
    return load_policy(directory, ModelConfig(), torch.device("cpu"))


def random_policy(directory, architecture):
    return load_policy(write_random_model(directory, architecture), ModelConfig(), torch.device("cpu"))


def target_of(policy, seed=0, max_new_tokens=12):
    rollout = RolloutConfig(max_prompt_tokens=512, max_new_tokens=max_new_tokens)
    return TargetModel(policy, build_grader("exact"), method_settings(), rollout, seed)
