"""The engine on verl, for CUDA and Ascend clusters: a plugin of verl's V1 trainer; see docs/verl.md.

verl itself is not modified.  A reward manager scores each response, a subclass of verl's synchronous trainer turns
whole groups into token advantages, and verl's own loss trains on them.
"""
