"""CoCA: GRPO that trains a language model to state calibrated confidence before it answers.

Importing the package needs neither Ray nor MindSpeed-RL nor an accelerator; see docs/architecture.md.
"""

__version__ = "0.3.0"
