"""Carries out a trial of kvdoctor's worker under the onnxruntime of this environment: JOB.json ROOT."""

import json
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[2])

import onnxruntime

from kvdoctor.decode.messages import read_job
from kvdoctor.runtime.worker.trial import run_trial
from kvdoctor.serialization import to_plain

done = run_trial(read_job(Path(sys.argv[1]).read_text()))
print(json.dumps({"onnxruntime": onnxruntime.__version__, **to_plain(done)}))
