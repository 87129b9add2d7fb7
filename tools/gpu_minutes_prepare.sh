#!/usr/bin/env bash
# Prepare .gpu-minutes, with which `make gpu-minutes` runs on a machine without a network and without an installation:
# our packages with kernels compiled for its GPU, and the packages that they require.
#
#   VERSION=3.12 ARCHITECTURES=sm_90 PRESENT="torch numpy pyarrow" tools/gpu_minutes_prepare.sh
#
# VERSION is that machine's Python, ARCHITECTURES are its GPUs', and PRESENT names packages that it has, which are left
# out. Copy the whole checkout with .gpu-minutes there.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${VERSION:-3.12} architectures=${ARCHITECTURES:-sm_90}
present="torch triton numpy deepspeed ${PRESENT:-}"
work=.gpu-minutes.new
rm -rf "$work"
trap 'rm -rf "$work"' EXIT
mkdir "$work"

# Before the build, so that a change during it is noticed.
digest=$(python3 tools/gpu_minutes.py --digest)
NEOX_KERNELS_PREBUILD=1 NEOX_KERNELS_ARCHITECTURES="$architectures" PYTHONS="$version" tools/dist.sh "$work/dist"
[ -d "$work/dist/$version" ] || exit 1
python=".venvs/data-$version/bin/python"
requirements=$("$python" tools/gpu_minutes_requirements.py "$work/dist/$version" constraints.txt $present)
echo "packages: our four, ${requirements//$'\n'/, }"
# shellcheck disable=SC2086
"$python" -m pip download --quiet --no-input --no-deps --only-binary :all: --dest "$work/wheels" $requirements
cp "$work/dist/$version"/*.whl "$work/wheels/"
rm -rf "$work/dist"
wheels=$(cd "$work/wheels" && printf '"%s", ' *.whl)
printf '{"digest": "%s", "python": "%s", "architectures": "%s", "wheels": [%s]}\n' \
    "$digest" "$version" "$architectures" "${wheels%, }" >"$work/prepared.json"
rm -rf .gpu-minutes
mv "$work" .gpu-minutes
echo "prepared .gpu-minutes ($(du -sm .gpu-minutes | cut -f 1) MiB) for Python $version, $architectures"
echo "copy this checkout with it, then there: make gpu-minutes PYTHON=python$version"
