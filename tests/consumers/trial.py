"""Carries out a trial of kvdoctor's worker under the onnxruntime of this environment: JOB.json ROOT."""

import json
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[2])

import onnxruntime

from kvdoctor.decode.messages import read_message
from kvdoctor.records import to_plain
from kvdoctor.runtime.worker.trial import run_trial

done = run_trial(read_message(Path(sys.argv[1]).read_text()))
print(json.dumps({"onnxruntime": onnxruntime.__version__, **to_plain(done)}))
