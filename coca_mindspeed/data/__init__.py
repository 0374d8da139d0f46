"""Data sets as records (:mod:`coca_mindspeed.data.records`), prompts and chat templates."""
