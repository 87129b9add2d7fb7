#!/usr/bin/env bash
# Build DeepSpeed's operators for NVMe offload (async_io, pin_memory) and install them in .venv, unless they are there.
#
# A run never compiles: a build that is killed would leave a lock that blocks later starts. This takes about ten minutes
# of one core, because each of 15 files includes all of PyTorch's headers, and setuptools compiles them one after another.
# Exit code 1: libaio's headers are missing, or the operators cannot be built or loaded.
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
log=.venvs/aio.log
check='from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder import AsyncIOBuilder
assert installed_ops.get("async_io") and installed_ops.get("pin_memory")
AsyncIOBuilder().load()'

if "$python" -c "$check" >/dev/null 2>&1; then
    exit 0
fi
if ! echo '#include <libaio.h>' | ${CC:-cc} -E - >/dev/null 2>&1; then
    echo "libaio.h was not found: install libaio (Debian, Ubuntu: apt-get install libaio-dev)" >&2
    exit 1
fi
mkdir -p .venvs
version=$("$python" -c 'from importlib.metadata import version; print(version("deepspeed"))')
echo "building DeepSpeed $version with async_io: about ten minutes; log: $log"
# On machines without CUDA, DeepSpeed does not link libaio itself.
if ! DS_BUILD_OPS=0 DS_BUILD_AIO=1 DS_BUILD_PIN_MEMORY=1 LDFLAGS="-Wl,--no-as-needed -laio ${LDFLAGS:-}" \
    nice "$python" -m pip install --verbose --no-cache-dir --no-build-isolation --no-deps --force-reinstall --no-binary deepspeed \
    "deepspeed==$version" >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    exit 1
fi
"$python" -c "$check" || { echo "the operators were built, but cannot be loaded" >&2; exit 1; }
