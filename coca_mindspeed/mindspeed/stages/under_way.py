"""The iteration that is under way in this process, from 1.

A module of its own, read as ``under_way.iteration``: Ray pickles classes that are made in a function by value, with
the objects that their methods name, and gives a class that it knows already the methods of that copy.  Modules it does
not copy.
"""

iteration = 0
