"""Carries out a trial of kvdoctor's worker under the onnxruntime of this environment: JOB.json ROOT."""

import json
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[2])

import onnxruntime

from kvdoctor.trials import trial

print(json.dumps({"onnxruntime": onnxruntime.__version__, **trial(json.loads(Path(sys.argv[1]).read_text()))}))
