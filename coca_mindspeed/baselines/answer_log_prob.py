"""Mean log-prob of a model's own answer, a confidence after the answer."""

from collections.abc import Sequence

import torch

from coca_mindspeed.algorithm.parsing import CONFIDENCE_FIRST_PROMPT, ResponseParser
from coca_mindspeed.evaluation.predictions import Prediction
from coca_mindspeed.local.policy import Policy


def mean_answer_log_probs(
    policy: Policy,
    predictions: Sequence[Prediction],
    *,
    system_prompt: str = CONFIDENCE_FIRST_PROMPT,
    instruction: str = "",
) -> list[float]:
    """Mean log-prob (nats) of each prediction's answer tokens, given the prompt and the stated confidence.

    Confidence and answer are tokenized separately.  ``instruction`` is the text that followed each question.  Returns
    -inf for an answer without tokens.
    """
    tokenizer, parser, result = policy.tokenizer, ResponseParser(), []
    with torch.inference_mode(), policy.autocast():
        for prediction in predictions:
            messages = [
                {"role": "system", "content": system_prompt},
                {"role": "user", "content": prediction.question + instruction},
            ]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            answer = parser(prediction.response).answer
            opening = prediction.response[: len(prediction.response) - len(answer)]
            parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt + opening, answer)]
            if not parts[1]:
                result.append(float("-inf"))
                continue
            ids = torch.tensor([parts[0] + parts[1]], device=policy.device)
            logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(parts[0]) - 1 : -1]
            log_probs = policy.logits_of_policy(logits, 1.0).log_softmax(dim=-1)
            result.append(float(log_probs.gather(1, ids[0, len(parts[0]) :, None]).mean()))
    return result
