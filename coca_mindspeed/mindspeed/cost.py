"""How long a run on NPUs takes, and how much host memory it needs: estimates before it starts.

Neither was measured by us on an NPU.
"""

import math
from dataclasses import dataclass

from coca_mindspeed.config.model_size import BF16, FP32, GIB, model_parameters
from coca_mindspeed.mindspeed.checks import layout_problems
from coca_mindspeed.mindspeed.resolved_config import ResolvedConfig

#: Tokens of prompts and responses that an NPU trains on in a second, all stages together.  MindSpeed-RL 2.3.0 publishes
#: (docs/algorithms/grpo.md) 220 for a card of an Atlas A3, which is two NPUs: Qwen2.5-7B, 32 prompts x 8 responses,
#: 2,048 + 2,048 tokens; the figure for 32B is the same.
TOKENS_PER_SECOND = 110.0
#: Mean tokens of a prompt with its response, where no earlier run says it.
TOKENS_PER_RESPONSE = 750.0
_LARGEST = 64  # nodes that are tried for a budget
_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True)
class RunTime:
    """An estimate of a run's time.

    Attributes:
        iteration_seconds: of one iteration, all stages.
        days: of all iterations of all stages; None where their number is not known.
        tokens_per_response: assumed mean length of a prompt with its response.
        tokens_per_second: assumed rate of one NPU.
    """

    iteration_seconds: float
    days: float | None
    tokens_per_response: float
    tokens_per_second: float


def run_time(
    resolved: ResolvedConfig,
    iterations: int | None,
    tokens_per_response: float = TOKENS_PER_RESPONSE,
    tokens_per_second: float = TOKENS_PER_SECOND,
) -> RunTime:
    """Estimate the time of a run, in proportion to its tokens and against the number of its NPUs.

    Args:
        resolved: the run.
        iterations: of all stages together; None: not known.
        tokens_per_response: mean tokens of a prompt with its response; ``response/length`` of an earlier run plus its
            prompts.
        tokens_per_second: of one NPU; the log of MindSpeed-RL shows it as ``e2e_tps``.
    """
    seconds = resolved.responses * tokens_per_response / (resolved.npus * tokens_per_second)
    days = None if iterations is None else iterations * seconds / _SECONDS_PER_DAY
    return RunTime(seconds, days, tokens_per_response, tokens_per_second)


def nodes_for_budget(resolved: ResolvedConfig, estimate: RunTime, budget_days: float) -> int | None:
    """The smallest number of nodes that runs the same batch within a number of days; None where none does.

    Args:
        resolved: the run, with any number of nodes.
        estimate: of the run as it is, with a known number of days.
        budget_days: what it may take.
    """
    assert estimate.days is not None
    at_least = max(1, math.ceil(estimate.days * resolved.nodes / budget_days))
    return next((n for n in range(at_least, _LARGEST + 1) if not any(layout_problems(resolved.vary("nodes", n)))), None)


def host_gib(resolved: ResolvedConfig) -> float:
    """GiB of one node's host memory that a run fills before Ray's object store and the data.

    While responses are sampled, the weights and the optimizer's state of training wait in host memory; each rank also
    keeps the copy of vLLM's weights that is loaded at every wake-up.
    """
    parameters = model_parameters(resolved)
    shards = resolved.dp * resolved.cp if resolved.distributed_optimizer else 1
    of_a_rank = parameters / (resolved.tp * resolved.pp)
    per_rank = BF16 * parameters / resolved.rollout_tp
    per_rank += BF16 * of_a_rank if resolved.offload_param else 0
    per_rank += 3 * FP32 * of_a_rank / shards if resolved.offload_optimizer else 0
    return per_rank * resolved.npus / resolved.nodes / GIB
