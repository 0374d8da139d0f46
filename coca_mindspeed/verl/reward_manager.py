"""The reward manager ``coca``: verl asks it for the score of one response at a time, with its sampled tokens."""

from typing import Any

from omegaconf import OmegaConf
from transformers import AutoConfig
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.experimental.reward_loop.reward_manager.registry import register
from verl.utils.fs import copy_to_local

from coca_mindspeed.data.export import record_of
from coca_mindspeed.errors import TrainingError
from coca_mindspeed.grading.custom import FaultTolerantGrader
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.scoring.responses import training_scorer
from coca_mindspeed.utils.tokenization import token_text
from coca_mindspeed.verl.reward_queue import ScoringQueue
from coca_mindspeed.verl.settings import NAME, verl_settings


@register(NAME)
class SegmentRewardManager(RewardManagerBase):
    """Parses, finds the segment boundary and grades.

    The score is 1 or 0 for the answer alone: the confidence reward needs the whole group, which only the trainer has.
    """

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, **_of_reward_models: Any) -> None:
        super().__init__(config, tokenizer, compute_score)
        section = OmegaConf.select(config, NAME)
        plain = OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
        settings = verl_settings({NAME: plain})
        grader = FaultTolerantGrader(build_grader(settings.grader, settings.grading))
        text = token_text(tokenizer, _vocabulary_size(config, tokenizer))
        scorer = training_scorer(settings, text, grader)
        self._queue = ScoringQueue(scorer, settings.method.label)

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Score one response, a ``DataProto`` of one row; see :meth:`ScoringQueue.score`."""
        if len(data) != 1:
            raise TrainingError(f"expected one turn a response, found {len(data)}")
        row = data[0]
        record = record_of(row.non_tensor_batch["extra_info"], "extra_info of a row of verl's")
        token_ids = row.batch["responses"][: int(row.non_tensor_batch["response_len"])]
        return await self._queue.score(token_ids, record)


def _vocabulary_size(config: Any, tokenizer: Any) -> int:
    """Rows of the output layer; it is often padded, so the model may sample ids that its tokenizer does not know."""
    model = config.actor_rollout_ref.model
    shape = AutoConfig.from_pretrained(
        copy_to_local(model.path), trust_remote_code=model.get("trust_remote_code", False)
    )
    return int(getattr(shape.get_text_config(), "vocab_size", len(tokenizer)))
