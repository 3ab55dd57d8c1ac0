#!/bin/sh
# Decode steps on the WebGPU kernels, without a GPU, compared with the CPU: for a small export of each architecture.
#
#   sh webgpu.sh exports/tiny
#
# Debian 12 or 13 as root: a software Vulkan is installed. Elsewhere have one, and name its driver in VK_DRIVER_FILES.
#
# KVDOCTOR   what pip installs (default: kvdoctor)
# PYTHON     the Python to begin with, 3.11 or newer (default: python3)
#
# Ends with the exit code of the step-test: 0 healthy, 1 findings, 2 wrong usage, 3 could not be checked.
set -eu

if [ "$#" -eq 0 ]; then
  echo "usage: webgpu.sh MODEL [OPTIONS]" >&2
  exit 2
fi

if [ -z "${VK_DRIVER_FILES:-}" ]; then
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends chromium-common libvulkan1 > /dev/null
  export VK_DRIVER_FILES=/usr/lib/chromium/vk_swiftshader_icd.json
fi

home="$(mktemp -d)"
trap 'rm -rf -- "$home"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

"${PYTHON:-python3}" -m venv "$home/venv"
"$home/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${KVDOCTOR:-kvdoctor}" onnxruntime-ep-webgpu
code=0
"$home/venv/bin/kvdoctor" step-test "$@" --provider webgpu || code=$?
exit "$code"
