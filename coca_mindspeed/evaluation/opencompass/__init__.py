"""OpenCompass plugin: the paper's data sets and graders, with the confidence removed before grading.

``config.py`` writes OpenCompass's configuration, ``evaluator.py`` runs inside OpenCompass, and
:func:`..adapters.read_opencompass` reads the results; only the second imports OpenCompass when it is loaded.
"""
