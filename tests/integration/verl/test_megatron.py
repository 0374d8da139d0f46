"""The plugin's loss in verl's Megatron engine: gradient and segment metrics are those of the objective at any layout.

Needs MEGATRON_HOME, a checkout of Megatron-LM.  Whole training on Megatron needs an accelerator and was not run.
"""

import os
import socket
import subprocess
import sys

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from coca_mindspeed.algorithm.advantages import segment_masks
from coca_mindspeed.algorithm.objective import segment_objective
from coca_mindspeed.algorithm.parsing import SEGMENTS
from coca_mindspeed.verl.segment_loss import SEGMENT_ENDS
from tests.integration.verl.loop import ROOT

ROWS, PROMPT, VOCABULARY, WIDTH = 8, 3, 16, 6
HOME = os.environ.get("MEGATRON_HOME")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HOME, reason="MEGATRON_HOME names no Megatron-LM checkout")]


def made_up(seed=0):
    """Weights, and rows of responses of 4 to 9 tokens whose old log-probs make the clip bite."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 10, (ROWS,), generator=draw).tolist()
    prompts = [torch.randint(1, VOCABULARY, (PROMPT,), generator=draw) for _ in lengths]
    responses = [torch.randint(1, VOCABULARY, (length,), generator=draw) for length in lengths]
    rows = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": [torch.cat(pair) for pair in zip(prompts, responses, strict=True)],
        "response_mask": [torch.ones(length, dtype=torch.int64) for length in lengths],
        "loss_mask": [torch.ones(length, dtype=torch.int64) for length in lengths],
        "old_log_probs": [torch.randn(length, generator=draw) * 0.3 - 2.8 for length in lengths],
        "advantages": [torch.randn(length, generator=draw) for length in lengths],
        "rollout_is_weights": [torch.rand(length, generator=draw) * 2 for length in lengths],
        SEGMENT_ENDS: [torch.tensor([int(torch.randint(1, 4, (), generator=draw)), length]) for length in lengths],
    }
    embedding, head = torch.randn(VOCABULARY, WIDTH, generator=draw), torch.randn(WIDTH, VOCABULARY, generator=draw)
    return {"rows": rows, "embedding": embedding, "head": head * 0.3}


def expected(job, aggregation):
    """Gradients and statistics of the whole mini-batch on one device.

    An importance weight of the rollout correction scales the advantage of its own token, of either segment.
    """
    rows = job["rows"]
    embedding, head = (job[name].clone().requires_grad_() for name in ("embedding", "head"))
    log_probs = []
    for ids in rows["input_ids"]:
        whole = (embedding[ids].tanh() @ head).log_softmax(-1)[:-1]
        log_probs.append(whole.gather(1, ids[1:, None])[PROMPT - 1 :, 0])
    lengths = torch.tensor([len(row) for row in rows["responses"]])
    objective = segment_objective(
        pad_sequence(log_probs, batch_first=True),
        pad_sequence(rows["old_log_probs"], batch_first=True),
        pad_sequence(rows["advantages"], batch_first=True) * pad_sequence(rows["rollout_is_weights"], batch_first=True),
        segment_masks(torch.stack(rows[SEGMENT_ENDS]), SEGMENTS["first"], int(lengths.max())),
        clip=0.2,
        aggregation=aggregation,
    )
    objective.loss.backward()
    return {"embedding": embedding.grad, "head": head.grad}, objective


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "micro", "aggregation"),
    [
        (1, 1, 1, 8, "sum"),
        (1, 1, 1, 2, "sum"),
        (2, 1, 1, 4, "sum"),
        (1, 2, 1, 2, "sum"),
        (1, 1, 2, 2, "token_mean"),
        (2, 2, 1, 2, "segment_mean"),
    ],
)
def test_the_gradient_is_that_of_the_objective(tmp_path, tp, pp, dp, micro, aggregation):
    job = {**made_up(), "tp": tp, "pp": pp, "micro": micro, "aggregation": aggregation}
    torch.save(job, tmp_path / "job.pt")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([str(ROOT), str(HOME)])
    environment = {**os.environ, "PYTHONPATH": paths, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    environment |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "tests.support.verl_host"}
    world = tp * pp * dp
    command = [sys.executable, "-W", "ignore", "-m", "tests.integration.verl.megatron_rank", str(tmp_path / "job.pt")]
    ranks = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    said = [rank.communicate(timeout=500)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, said[0][-3000:]
    found = [torch.load(tmp_path / f"job.pt.{rank}", weights_only=False) for rank in range(world)]
    wanted, objective = expected(job, aggregation)
    for tp_rank, _, gradients, _ in found:
        if "embedding" in gradients:
            torch.testing.assert_close(gradients["embedding"], wanted["embedding"], rtol=1e-4, atol=1e-6)
        if "head" in gradients:
            torch.testing.assert_close(gradients["head"], wanted["head"].chunk(tp, 1)[tp_rank], rtol=1e-4, atol=1e-6)
    sums = dict.fromkeys(("confidence/clip_fraction", "answer/clip_fraction", "answer/tokens"), 0.0)
    for tp_rank, pp_rank, _, metrics in found:
        if tp_rank == 0 and pp_rank == pp - 1:
            for name in sums:
                sums[name] += metrics[f"segment_sums/{name}"]
    assert sums["answer/tokens"] == float(objective.segments["answer"].tokens)
    assert sums["answer/clip_fraction"] == pytest.approx(objective.segments["answer"].sums()["clip_fraction"])
    assert sums["answer/clip_fraction"] > 0
    assert sums["confidence/clip_fraction"] == pytest.approx(objective.segments["confidence"].sums()["clip_fraction"])
