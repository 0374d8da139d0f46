"""From a configuration to MindSpeed-RL's own training, in every process that Ray starts."""
