"""Stands in for the script that runs an exporter, and needs no PyTorch: does what the config of the checkpoint says.

`copy` names an export that is copied; `fail` is what it says where it cannot, `fail_with` a part of its arguments that
it fails with; `die` its last words; `empty` that it writes nothing; `wait` how many seconds it takes.
"""

import json
import shutil
import sys
import time
from pathlib import Path

asked = json.loads(sys.argv[1])
wanted = json.loads(Path(asked["checkpoint"], "config.json").read_text(encoding="utf-8"))
print(json.dumps({"torch": "0", "transformers": "0"}), flush=True)
print(json.dumps({"doing": "pretending to load"}), flush=True)
print("a warning that fills the log\n" * 50, file=sys.stderr, flush=True)
time.sleep(wanted.get("wait", 0))
if "die" in wanted:
    sys.exit(wanted["die"])
out = Path(asked["out"])
if "fail" in wanted and all(asked[name] == value for name, value in wanted.get("fail_with", {}).items()):
    (out / "half.onnx").write_bytes(b"half")
    print(json.dumps({"failed": wanted["fail"], "stage": wanted.get("stage", "export")}), flush=True)
    sys.exit(0)
if "empty" not in wanted:
    shutil.copytree(wanted["copy"], out, dirs_exist_ok=True)
    (out / "provenance.json").unlink(missing_ok=True)
print(json.dumps({"made": [], "versions": {"torch": "0"}}), flush=True)
