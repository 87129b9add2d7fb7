#!/usr/bin/env bash
# Run the tests of neox-data's extension with it compiled under AddressSanitizer and UndefinedBehaviorSanitizer.
# Usage: tools/sanitize.sh [PYTHON]; the Python must have neox-data's test dependencies and pybind11.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${1:-.venv/bin/python}
source=packages/neox-data/src/neox_data
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

mkdir "$folder/neox_data"
cp -r "$source/." "$folder/neox_data"
rm -f "$folder"/neox_data/_native*.so
# shellcheck disable=SC2046  # The includes are several words.
"${CXX:-g++}" -std=c++17 -O1 -g -fno-omit-frame-pointer -ffp-contract=off -fvisibility=hidden -shared -fPIC \
  -fsanitize=address,undefined -fno-sanitize-recover=all $("$python" -m pybind11 --includes) "$source/csrc/native.cpp" \
  -o "$folder/neox_data/_native$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')"

# libstdc++ is preloaded too: the sanitizer intercepts its exceptions. Python itself leaks at its end.
libraries="$("${CXX:-g++}" -print-file-name=libasan.so):$("${CXX:-g++}" -print-file-name=libstdc++.so)"
cd packages/neox-data
LD_PRELOAD=$libraries ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
  PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}" \
  "$python" -m pytest -q -p no:cacheprovider tests/test_native.py tests/samples tests/test_blend.py tests/test_gpt_dataset.py
