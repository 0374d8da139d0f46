"""Prints what the processes of MindSpeed-RL's own GRPO would train by, as `benchmarks/mindspeed_own_grpo.py` has it."""

import importlib
import json
import sys
from typing import Any


def main() -> None:
    from benchmarks.mindspeed_own_grpo import setup_driver

    setup_driver()
    cli = importlib.import_module("cli.train_grpo")
    trainer = importlib.import_module("mindspeed_rl.trainer.grpo_trainer_hybrid")
    worker = importlib.import_module("mindspeed_rl.workers.base_worker")
    dock = importlib.import_module("mindspeed_rl.trainer.utils.transfer_dock")
    launcher = importlib.import_module("mindspeed_rl.workers.scheduler.launcher")
    losses = importlib.import_module("mindspeed_rl.models.loss.loss_func_factory").LossFuncFactory.class_map
    engine = importlib.import_module("mindspeed_rl.models.base.base_training_engine").BaseTrainingEngine
    actor = cli.IntegratedWorker.__ray_actor_class__
    used = {
        "loss": losses["ray_grpo_actor"],
        "trainer": cli.RayGRPOTrainer,
        "fit": cli.RayGRPOTrainer.fit,
        "advantages": trainer.compute_advantage._function,
        "metrics": trainer.metrics_post_processing,
        "reward": cli.RuleReward.__ray_actor_class__,
        "data": cli.build_train_valid_test_datasets,
        "prompts": cli.PromptDataLoader,
        "groups of workers": launcher.RayActorGroup,
        "update": actor.update,
        "reference": actor.compute_ref_log_prob,
        "rows to the actor": actor.dispatch_transfer_dock_data,
        "rows of the actor": actor.collect_transfer_dock_data,
        "microbatches": engine._forward_backward_batch,
        "packing": worker.padding_dict_to_tensor_dict,
        "dock": dock.remove_padding_tensor_dict_to_dict,
        "rollout": actor.generate_sequences,
    }
    facts = {name: [thing.__module__, thing.__qualname__] for name, thing in used.items()}
    ours = sorted(name for name, module in _loaded("coca_mindspeed.mindspeed.stages") if hasattr(module, "__file__"))
    print("FACTS " + json.dumps({"used": facts, "bases": [base.__name__ for base in actor.__mro__], "stages": ours}))


def _loaded(package: str) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in sys.modules.items() if name.startswith(f"{package}.")]


if __name__ == "__main__":
    main()
