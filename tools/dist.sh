#!/usr/bin/env bash
# Build the wheels of the four packages: OUTPUT/3.11/*.whl for Python 3.11, and so on (OUTPUT: dist).
#
#   tools/dist.sh [OUTPUT]
#
# One folder per Python of PYTHONS ("3.11 3.12 3.13") that is installed, because neox-data contains compiled code, and
# neox-kernels does with NEOX_KERNELS_PREBUILD=1; the other wheels are the same in every folder. With all four in one
# command, pip does not search an index for their names, which there could belong to others:
# pip install -c dist/constraints.txt dist/3.11/*.whl
set -euo pipefail
cd "$(dirname "$0")/.."

output=${1:-dist}
[ "$output" = dist ] || [ ! -e "$output" ] || { echo "$output exists: name a new folder" >&2 && exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Copies, because pip writes into the folders that it builds, and uses what earlier builds left there.
tar -C packages --exclude '__pycache__' --exclude '*.egg-info' --exclude 'neox-*/build' --exclude 'neox-*/tests' -c . |
    tar -C "$work" -x

# Away from the repository, links into it lead nowhere: name the file instead.
sed -E -i -e 's#\[([^]]+)\]\((\.\./)+\1[^)]*\)#\1#g' -e 's#\[([^]]+)\]\((\.\./)+([^)]+)\)#\1 (\3)#g' "$work"/neox-*/README.md

wheels() {
    local version=$1 to=$2 folders=()
    shift 2
    for name in "$@"; do folders+=("$work/neox-$name"); done
    mkdir -p "$to"
    ".venvs/data-$version/bin/python" -m pip wheel --quiet --no-input --no-deps -c constraints.txt --wheel-dir "$to" "${folders[@]}"
}

compiled=(data) pure=(launcher model kernels)
[ "${NEOX_KERNELS_PREBUILD:-}" != 1 ] || compiled=(data kernels) pure=(launcher model)

built=()
for version in ${PYTHONS:-3.11 3.12 3.13}; do
    code=0
    echo "wheels for Python $version, built in .venvs/data-$version; if it is missing, it is created first, in minutes"
    tools/environment.sh data "$version" || code=$?
    # 3: this Python is not installed, which was reported.
    [ "$code" -ne 3 ] || { echo "  no wheels for Python $version" >&2 && continue; }
    [ "$code" -eq 0 ] || exit "$code"
    [ -d "$work/pure" ] || wheels "$version" "$work/pure" "${pure[@]}"
    wheels "$version" "$work/dist/$version" "${compiled[@]}"
    ".venvs/data-$version/bin/python" -m zipfile -l "$work/dist/$version"/neox_data-*.whl | grep 'neox_data/_native.*\.so' >/dev/null || {
        echo "the extension of neox-data was not compiled: install a C++ compiler (Debian, Ubuntu: apt-get install g++)" >&2
        exit 1
    }
    cp "$work/pure"/*.whl "$work/dist/$version/"
    built+=("$version")
done
[ "${#built[@]}" -gt 0 ] || { echo "no Python of ${PYTHONS:-3.11 3.12 3.13} was found" >&2 && exit 1; }

# The versions with which this was tested, for pip install -c.
cp constraints.txt "$work/dist/"

mkdir -p "$(dirname "$output")"
rm -rf "$output"
mv "$work/dist" "$output"
for version in "${built[@]}"; do
    echo "$output/$version: $(cd "$output/$version" && echo *.whl)"
done
echo "install: pip install -c $output/constraints.txt $output/${built[0]}/*.whl"
