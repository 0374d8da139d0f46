"""One training step of ours, for the benchmarks that set it beside another library's."""

from typing import Any

import torch

from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.data.records import Record
from coca_mindspeed.grading.verdict import ExactGrader, Grader
from coca_mindspeed.local.policy import Policy
from coca_mindspeed.local.respond import respond
from coca_mindspeed.local.schedule import generator, question_order
from coca_mindspeed.local.update import update_policy
from coca_mindspeed.scoring.responses import ResponseScorer


class OurStep:
    """Rollout, grade and update, on the next records."""

    def __init__(
        self, policy: Policy, records: list[Record], config: Any, lr: float = 5e-4, grader: Grader | None = None
    ) -> None:
        self.policy, self.records, self.config, self.lr = policy, records, config, lr
        self.grader: Grader = grader or ExactGrader()
        self.optimizer = torch.optim.AdamW(policy.model.parameters(), lr=lr, betas=(0.9, 0.95), fused=True)
        self.step = 0

    def __call__(self) -> int:
        """Run it; returns the number of response tokens."""
        config = self.config
        asked = question_order(self.records, config.rollout.prompts, 0).of_step(self.step)
        draw, group_size = generator(torch.device("cpu"), 0, "rollout", self.step), config.rollout.group_size
        rollout = respond(self.policy, asked, config.method.system_prompt, config.rollout, draw, group_size)
        graded = ResponseScorer(config.method, self.policy.text, self.grader)(rollout, asked)
        credited = graded.give_credit(CreditRule(config.method), group_size)
        update_policy(self.policy, rollout, credited, self.optimizer, self.lr, config)
        self.step += 1
        return int(rollout.lengths.sum())
