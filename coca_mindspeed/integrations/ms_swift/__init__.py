"""CoCA in ms-swift: :data:`PLUGIN` is the file for ``--external_plugins``; see docs/frameworks.md.

It has this folder to itself, since ms-swift puts a plugin's folder first on ``sys.path``.
"""

from pathlib import Path

#: The external plugin.
PLUGIN = Path(__file__).with_name("coca_plugin.py")
