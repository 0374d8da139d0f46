"""The paper's evaluation in OpenCompass: its data sets and graders, with the confidence taken off first.

``evaluator.py`` and ``sandbox.py`` run inside OpenCompass, ``config.py`` writes the configuration that OpenCompass
is started with, and ``output.py`` reads what it leaves behind; the last two need no OpenCompass to be imported.
"""
