"""A verl configuration that trains by the method, and reports of its reward manager."""

from dataclasses import asdict
from typing import Any

from coca_mindspeed.data.records import Record
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.grading.verdict import Verdict


def configuration(changes=None):
    """What verl's own defaults need changed, and ``changes`` by dotted keys on top."""
    config: dict[str, Any] = {
        "coca": {"method": {"name": "coca"}},
        "trainer": {"v1": {"trainer_mode": "coca"}, "n_gpus_per_node": 2, "nnodes": 1},
        "data": {"train_batch_size": 16, "max_prompt_length": 64, "max_response_length": 64},
        "algorithm": {"adv_estimator": "coca"},
        "reward": {"reward_manager": {"name": "coca"}},
        "actor_rollout_ref": {
            "actor": {
                "ppo_mini_batch_size": 8,
                "ppo_micro_batch_size_per_gpu": 4,
            },
            "rollout": {
                "n": 4,
                "tensor_model_parallel_size": 1,
                "log_prob_micro_batch_size_per_gpu": 8,
                "val_kwargs": {"do_sample": True, "temperature": 1.0},
            },
        },
    }
    for key, value in (changes or {}).items():
        *path, last = key.split(".")
        section = config
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return config


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
