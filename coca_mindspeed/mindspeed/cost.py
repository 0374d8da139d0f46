"""How long a run on NPUs takes, and how much host memory it needs: estimates before it starts.

Neither was measured by us on an NPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from coca_mindspeed.config.model_size import BF16, FP32, GIB, model_parameters
from coca_mindspeed.mindspeed.checks import layout_problems
from coca_mindspeed.mindspeed.memory_estimate import estimate_memory
from coca_mindspeed.mindspeed.resolved_config import KEYS, ResolvedConfig

#: Tokens of prompts and responses that an NPU trains on in a second, all stages together.  MindSpeed-RL 2.3.0 publishes
#: (docs/algorithms/grpo.md) 220 for a card of an Atlas A3, which is two NPUs: Qwen2.5-7B, 32 prompts x 8 responses,
#: 2,048 + 2,048 tokens; the figure for 32B is the same.
TOKENS_PER_SECOND = 110.0
#: Mean tokens of a prompt with its response, where no earlier run says it.
TOKENS_PER_RESPONSE = 750.0
MOST_NODES = 64  #: that are tried for a budget
_LAYOUT = ("nodes", "tp", "pp", "rollout_tp")
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


def layouts_for_budget(resolved: ResolvedConfig, iterations: int, budget_days: float) -> Iterator[ResolvedConfig]:
    """Layouts that run the same batch within a number of days: fewest nodes first, then fewest changes.

    Args:
        resolved: the run, with any layout.
        iterations: of all stages together.
        budget_days: upper limit of the estimated time.
    """
    for nodes in range(1, MOST_NODES + 1):
        if (run_time(resolved.vary("nodes", nodes), iterations).days or 0) <= budget_days:
            yield from _layouts(resolved, nodes)


def fastest_layout(resolved: ResolvedConfig) -> ResolvedConfig | None:
    """The layout with most nodes that runs the same batch; None if none does."""
    return next((layout for nodes in range(MOST_NODES, 0, -1) for layout in _layouts(resolved, nodes)), None)


def _layouts(resolved: ResolvedConfig, nodes: int) -> list[ResolvedConfig]:
    """Values of TP, PP and rollout TP that work on a number of nodes."""
    scaled, found = resolved.vary("nodes", nodes), []
    if scaled.prompts % nodes:
        return []
    inside = [size for size in range(1, scaled.npus // nodes + 1) if scaled.npus // nodes % size == 0]
    stages = [pp for pp in inside if scaled.layers % pp == 0]
    follows = resolved.fills_npus and resolved.max_sequences == resolved.responses // resolved.rollout_dp
    for tp, pp, rollout_tp in product(inside, stages, inside):
        layout = replace(scaled, tp=tp, pp=pp, rollout_tp=rollout_tp)
        if follows and layout.fills_npus:  # as the interpolation of max_num_seqs in configs/hardware/ascend.yaml
            layout = replace(layout, max_sequences=layout.responses // layout.rollout_dp)
        if not layout_problems(layout) and estimate_memory(layout).fits:
            found.append(layout)
    return sorted(found, key=lambda layout: (len(layout_overrides(resolved, layout)), layout.model_parallel, layout.tp))


def layout_overrides(resolved: ResolvedConfig, layout: ResolvedConfig) -> list[str]:
    """Overrides ``key=value`` of nodes, TP, PP and rollout TP that turn a run into ``layout``."""
    changed = (name for name in _LAYOUT if getattr(layout, name) != getattr(resolved, name))
    return [f"{KEYS[name]}={getattr(layout, name)}" for name in changed]


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
