"""A rollout of two groups, with invalid confidences and an ungradable answer, and the library's advantages."""

import json

import torch
from torch.nn.utils.rnn import pad_sequence

from coca_mindspeed import coca_advantages, method_settings, training_method
from coca_mindspeed.data.export import slime_row
from coca_mindspeed.data.records import Record
from coca_mindspeed.local.tiny_model import tiny_tokenizer

HOOKS = "coca_mindspeed.integrations.slime"
TOKENIZER = tiny_tokenizer("?")
TOKENIZER.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
GROUP = 4
#: What each sample of both questions says; ``?`` cannot be graded by :data:`GRADER`.
SAID = (
    ("<confidence>0.9</confidence>2", "<confidence>0.30</confidence>5", "12", "<confidence>0.5</confidence>?"),
    (
        "<confidence>0.6</confidence>33",
        "<confidence>0.8</confidence>3",
        "<confidence>9</confidence>3",
        "<confidence>0.1</confidence>",
    ),
)
CORRECT = [True, False, False, None, False, True, False, False]
METHOD = {"max_confidence_tokens": 6, "confidence_decimals": None}
GRADER = """
def grade(record, answer):
    return None if answer.strip() == "?" else answer.strip() == record.answer
"""
#: Options that slime's parser has by name: those of a run with our hooks.
OPTIONS = {
    "custom_rm_path": f"{HOOKS}.reward",
    "custom_reward_post_process_path": f"{HOOKS}.give_credit",
    "custom_advantage_function_path": f"{HOOKS}.token_advantages",
    "custom_pg_loss_reducer_function_path": f"{HOOKS}.sum_over_tokens",
    "custom_rollout_log_function_path": f"{HOOKS}.log_metrics",
}


def rows():
    """The two rows of ``coca-mindspeed data export slime``."""
    questions = (("1 + 1", "2"), ("1 + 2", "3"))
    records = [Record(str(n), "sums", "arithmetic", *question) for n, question in enumerate(questions)]
    prompt = training_method("coca").system_prompt
    return [json.loads(json.dumps(slime_row(record, prompt, n))) for n, record in enumerate(records)]


def tokens_of(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def response(text):
    """Token ids and log-probs of a response."""
    ids = [*tokens_of(text), TOKENIZER.eos_token_id]
    return ids, [-0.1 * (1 + index % 5) for index in range(len(ids))]


def library_advantages(samples, correct, **method):
    """:func:`coca_advantages` of the samples, in groups one after another; a list of float32 ``[T]``."""
    ids = [torch.tensor(one.tokens[len(one.tokens) - one.response_length :]).long() for one in samples]
    sampled = [torch.tensor(one.rollout_log_probs or [], dtype=torch.float64) for one in samples]
    log_probs = pad_sequence(sampled, batch_first=True)
    lengths = torch.tensor(list(map(len, ids)))
    settings = method_settings(**(METHOD | method))
    padded = pad_sequence(ids, batch_first=True)
    found = coca_advantages(padded, lengths, correct, TOKENIZER, GROUP, method=settings, log_probs=log_probs)
    return found, [row[:length] for row, length in zip(found.advantages, lengths.tolist(), strict=True)]
