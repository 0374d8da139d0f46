"""A verl configuration that trains by the method, and reports of its reward manager."""

from copy import deepcopy
from dataclasses import asdict
from functools import cache
from pathlib import Path

from omegaconf import OmegaConf

from coca_mindspeed.data.records import Record
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.grading.verdict import Verdict

VERLS_DEFAULTS = Path(__file__).parents[1] / "support" / "verl_stub" / "verl" / "trainer" / "config"


def verls_defaults(engine="dp"):
    """The configuration that verl starts from, unresolved: the keys that we read."""
    files = ("ppo_trainer.yaml", f"model_engine/{engine}.yaml")
    merged = OmegaConf.merge(*(OmegaConf.load(VERLS_DEFAULTS / file) for file in files))
    merged.pop("defaults")
    return merged


_CHANGED = {
    "coca.method.name": "coca",
    "trainer.v1.trainer_mode": "coca",
    "trainer.n_gpus_per_node": 2,
    "data.train_batch_size": 16,
    "data.max_prompt_length": 64,
    "data.max_response_length": 64,
    "algorithm.adv_estimator": "coca",
    "reward.reward_manager.name": "coca",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
    "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
}


def configuration(changes=None):
    """What verl's own defaults need changed, and ``changes`` by dotted keys on top."""
    config = deepcopy(_defaults())
    for key, value in {**_CHANGED, **(changes or {})}.items():
        *path, last = key.split(".")
        section = config
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return OmegaConf.to_container(OmegaConf.create(config), resolve=True)


@cache
def _defaults():
    return OmegaConf.to_container(verls_defaults())


def record(index=0, **fields):
    values = {"id": f"q{index}", "dataset": "sums", "category": "math", "question": f"{index}+1="}
    return Record(**{**values, "answer": str(index + 1), **fields})


def columns(confidence, outcome, *, confidence_tokens=3, tokens=5, reason=""):
    """The reward manager's report on one response."""
    prediction = Prediction(
        id="q",
        dataset="sums",
        question="1+1=",
        response="<confidence>.5</confidence>2",
        confidence=confidence,
        correct=Verdict(outcome).correct_or_none,
        tokens_to_confidence=None if confidence is None else confidence_tokens,
        tokens=tokens,
        gold="2",
    )
    return {
        "acc": float(bool(prediction.correct)),
        "prediction": asdict(prediction),
        "verdict": outcome.value,
        "reason": reason,
        "stated_confidence": [confidence],
        "correct": [prediction.correct],
        "confidence_length": [confidence_tokens],
        "segment_ends": [confidence_tokens, tokens],
    }
