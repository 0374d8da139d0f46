"""Named in ``VERL_USE_EXTERNAL_MODULES`` by some tests: keeps what a step trains on, or has something fail.

``COCA_TEST_BATCHES=DIR`` saves each step's rows there; ``COCA_TEST_GRADER_FAILS=DIGIT`` has the grader raise at gold
answers that end with it; ``COCA_TEST_SESSION_FAILS=N`` has the rollout engine raise at its Nth request.
``COCA_TEST_TURNS=1`` replaces the sampled responses to a question by ones that state 0.1, 0.2, ..., and grades by
turns: of a question with an even gold answer every other response is right, of the others none is.
"""

import os
from collections import Counter
from pathlib import Path

from coca_mindspeed.utils.packages import after_import


def _keep_batches(module):
    trainer = module.SegmentTrainer
    original = trainer._update_actor  # noqa: SLF001  verl's name of the stage

    def update_actor(self, batch, metrics):
        import torch
        import transfer_queue

        fields = ["prompts", "responses", "old_log_probs", "advantages", "extra_fields"]
        fields += (
            ["rollout_is_weights", "rollout_log_probs"] if self.config.algorithm.rollout_correction.rollout_is else []
        )
        columns = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        extra = [getattr(value, "data", value) for value in columns.pop("extra_fields")]
        rows = [
            {
                "key": key,
                **{name: column[row].clone() for name, column in columns.items()},
                **extra[row].get("reward_extra_info", {}),
                "versions": [extra[row].get(f"{end}_global_steps") for end in ("min", "max")],
            }
            for row, key in enumerate(batch.keys)
        ]
        torch.save(rows, Path(os.environ["COCA_TEST_BATCHES"]) / f"{self.global_steps}.pt")
        return original(self, batch, metrics)

    trainer._update_actor = update_actor  # noqa: SLF001


def _fail_grader(module):
    digit, original = os.environ["COCA_TEST_GRADER_FAILS"], module.ExactGrader.grade

    def grade(self, records, answers):
        if any(record.answer.endswith(digit) for record in records):
            raise ValueError("a grader of the test's")
        return original(self, records, answers)

    module.ExactGrader.grade = grade


def _grade_by_turns(module):
    seen = Counter()

    def grade(self, records, answers):
        verdicts = []
        for record in records:
            seen[record.id] += 1
            right = record.answer[-1] in "02468" and seen[record.id] % 2 == 1
            verdicts.append(module.Verdict(module.Outcome.RIGHT if right else module.Outcome.WRONG))
        return verdicts

    module.ExactGrader.grade = grade


def _script_responses(module):
    asked = Counter()

    def sample(self, prompts, temperature):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model.name_or_path)
        outputs = []
        for prompt in map(tuple, prompts):
            text = f"<confidence>0.{asked[prompt] % 9 + 1}</confidence>1"
            asked[prompt] += 1
            ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            said = {"log_probs": [0.0] * len(ids), "extra_fields": {"global_steps": self.step}}
            outputs.append(module.TokenOutput(token_ids=ids, stop_reason="completed", **said))
        return outputs

    module.HostServer.sample = sample


def _fail_session(module):
    number, original, asked = int(os.environ["COCA_TEST_SESSION_FAILS"]), module.HostServer.generate, []

    async def generate(self, *arguments, **options):
        asked.append(None)
        if len(asked) == number:
            raise RuntimeError("a session of the test's")
        return await original(self, *arguments, **options)

    module.HostServer.generate = generate


if "COCA_TEST_BATCHES" in os.environ:
    after_import("coca_mindspeed.verl.trainer", _keep_batches)
if "COCA_TEST_GRADER_FAILS" in os.environ:
    after_import("coca_mindspeed.grading.verdict", _fail_grader)
if "COCA_TEST_TURNS" in os.environ:
    after_import("coca_mindspeed.grading.verdict", _grade_by_turns)
    after_import("tests.support.verl_host.replica", _script_responses)
if "COCA_TEST_SESSION_FAILS" in os.environ:
    after_import("tests.support.verl_host.replica", _fail_session)
