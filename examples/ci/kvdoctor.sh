#!/bin/sh
# The gate in any CI that has a shell and Python 3.10 or newer.
#
#   sh kvdoctor.sh exports/*/
#
# KVDOCTOR       what pip installs (default: kvdoctor)
# KVDOCTOR_OUT   folder for the reports (default: kvdoctor-reports)
# PYTHON         the Python to begin with (default: python3)
#
# Ends with the exit code of the gate: 0 healthy, 1 findings, 2 wrong usage, 3 could not be checked.
set -eu

if [ "$#" -eq 0 ]; then
  echo "usage: kvdoctor.sh PATH..." >&2
  exit 2
fi

out="${KVDOCTOR_OUT:-kvdoctor-reports}"
home="$(mktemp -d)"
trap 'rm -rf -- "$home"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

"${PYTHON:-python3}" -m venv "$home/venv"
"$home/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${KVDOCTOR:-kvdoctor}"

mkdir -p -- "$out"
code=0
"$home/venv/bin/kvdoctor" gate \
  --output "json=$out/kvdoctor.json" \
  --output "junit=$out/kvdoctor.xml" \
  --output "sarif=$out/kvdoctor.sarif" \
  --output "markdown=$out/kvdoctor.md" \
  -- "$@" || code=$?
exit "$code"
