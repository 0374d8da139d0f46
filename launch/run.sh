#!/usr/bin/env bash
# A YAML file of one's own on MindSpeed-RL; docs/ascend.md is the guide.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
launch "$@"
