"""OpenCompass plugin: the paper's data sets and graders, with the confidence removed before grading.

``evaluator.py`` runs inside OpenCompass.  ``config.py`` writes its configuration and ``output.py`` reads its results;
these two do not import OpenCompass at load time.
"""
