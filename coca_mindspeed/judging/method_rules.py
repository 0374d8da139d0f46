"""What the section ``method`` of a configuration means for an engine: how responses are judged and given credit."""

from coca_mindspeed.algorithm.boundary import TokenText
from coca_mindspeed.algorithm.credit import CreditRule
from coca_mindspeed.config.schema import MethodConfig
from coca_mindspeed.grading.verdict import Grader
from coca_mindspeed.judging.responses import ResponseJudge


def response_judge(method: MethodConfig, text: TokenText, grader: Grader) -> ResponseJudge:
    """The judge of a method's responses.

    Args:
        method: says where the confidence stands, and its format.
        text: bytes of each token id.
        grader: of the answers.
    """
    return ResponseJudge(text, method.parser(), grader, method.max_confidence_tokens)


def credit_rule(method: MethodConfig, stage: int) -> CreditRule:
    """How the rewards of one of a method's stages become advantages."""
    return CreditRule(method.training_method, stage, method.invalid_reward, method.advantage_ddof, method.advantage_eps)
