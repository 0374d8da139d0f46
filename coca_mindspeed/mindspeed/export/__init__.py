"""Records in the form that MindSpeed-RL's own preprocessing reads."""
