"""What the hooks put into MindSpeed-RL's loop: rollout, reward, advantage, update, validation."""
