"""The engine for Ascend clusters, on MindSpeed-RL.  Which process runs what:

- the launcher (``launch``, which a script of ``launch/`` starts) composes, plans, asks the doctor and starts Ray as a
  child, then checks each stage on this machine and starts one task for it (``start.driver``);
- that task applies the ``driver`` hooks and runs MindSpeed-RL's own ``train``, with ``stages.trainer``'s trainer;
- every other Ray process runs ``start.process.setup_worker`` first, which applies the ``worker`` hooks; they are
- the actors on the NPUs: Megatron and vLLM-Ascend with ``stages.actor_worker``, ``actor_loss``, ``rollout_engine``;
- one reward actor a node (``stages.reward_worker``), with the graders and their sandboxes, on CPUs;
- and short tasks for the advantage task (``stages.advantage_task``), on CPUs.

Rows travel between them through MindSpeed-RL's transfer dock (``stages.dock``).  docs/port.md has the whole story.
"""
