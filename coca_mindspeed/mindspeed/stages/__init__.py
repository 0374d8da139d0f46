"""The stages of MindSpeed-RL's loop that the hooks add or replace: rollout, reward, advantage, update, validation."""
