"""The reward manager ``coca``: verl asks it for the score of one response at a time, with its sampled tokens."""

import asyncio
from typing import Any

from omegaconf import OmegaConf
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.experimental.reward_loop.reward_manager.registry import register
from verl.utils.fs import copy_to_local

from coca_mindspeed.errors import TrainingError
from coca_mindspeed.grading.fault_tolerant import FaultTolerantGrader
from coca_mindspeed.grading.registry import build_grader
from coca_mindspeed.scoring.responses import response_judge
from coca_mindspeed.utils.tokenization import token_text
from coca_mindspeed.verl.records import record_of
from coca_mindspeed.verl.reward_queue import JudgingQueue
from coca_mindspeed.verl.settings import NAME, verl_settings


@register(NAME)
class SegmentRewardManager(RewardManagerBase):
    """Parses, finds the boundary and grades; what it finds travels to the trainer beside the score.

    The score itself is 1 for an answer that training rewards and 0 otherwise: the confidence earns against the
    success rate of its group, which a reward manager never sees.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        compute_score: Any,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        """Build the grader and the tokenizer's table.

        Args:
            config: verl's, whole.
            tokenizer: the model's.
            compute_score: verl's reward function, which is not used.
            reward_router_address: of a reward model; there is none.
            reward_model_tokenizer: likewise.
        """
        super().__init__(config, tokenizer, compute_score)
        settings = verl_settings(_plain(config))
        grader = FaultTolerantGrader(build_grader(settings.grader, settings.grading))
        text = token_text(tokenizer, _rows_of_output_layer(config, tokenizer))
        judge = response_judge(settings.method, text, grader)
        self._queue = JudgingQueue(judge, settings.method.name, settings.require_evaluated)

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Judge one response.

        Args:
            data: a ``DataProto`` of one row: ``responses``, and in ``non_tensor_batch`` its length and
                ``extra_info`` with the record.
        """
        if len(data) != 1:
            raise TrainingError(f"a response has one turn, found {len(data)}")
        row = data[0]
        record = record_of(row.non_tensor_batch["extra_info"], "a row of verl's")
        token_ids = row.batch["responses"][: int(row.non_tensor_batch["response_len"])]
        judged = await asyncio.wrap_future(self._queue.submit(token_ids, record))
        return {"reward_score": float(judged.trained.correct), "reward_extra_info": judged.columns()}


def _plain(config: Any) -> dict[str, Any]:
    section = OmegaConf.select(config, NAME)
    return {NAME: OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section}


def _rows_of_output_layer(config: Any, tokenizer: Any) -> int:
    """The model may sample ids that its tokenizer does not know: its output layer is often padded."""
    from transformers import AutoConfig

    model = config.actor_rollout_ref.model
    shape = AutoConfig.from_pretrained(
        copy_to_local(model.path), trust_remote_code=model.get("trust_remote_code", False)
    )
    return int(getattr(shape.get_text_config(), "vocab_size", len(tokenizer)))
