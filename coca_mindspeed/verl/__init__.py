"""The engine on verl, for CUDA and Ascend clusters: a plugin of verl's V1 trainer; docs/verl.md.

Nothing of verl is changed.  A reward manager judges each response where verl scores it, a trainer that is a subclass
of verl's synchronous one turns whole groups into advantages of tokens, and everything else is verl's own.  The
mathematics is that of the other engines: nothing here computes a reward, an advantage or a metric by itself.
"""
