#!/usr/bin/env bash
# Make one of the project's virtual environments, or see at once that it is there already.
#
#   tools/environment.sh full          .venv               all four packages and the tools: training, all tests
#   tools/environment.sh data 3.12     .venvs/data-3.12    neox-data alone with a test runner: its own tests
#
# The file `installed` in an environment names the folder it was made in and a digest of everything it was made from.
# It is removed before a change and written after it: an environment without it was interrupted and is made anew.
# PYTHON=... names the interpreter; without it an existing environment keeps its own, and a new one gets the first found.
# Exit code 3: no suitable interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

name=$1
version=${2:-}
python=${PYTHON:-}
folder=.venv
[ "$name" = full ] || folder=.venvs/$name-$version
log=.venvs/$(basename "$folder").log

# Is this command a Python that can make environments, of version $2 (empty: any from 3.11)?
suits() {
    "$1" - "$2" <<'END' 2>/dev/null
import ensurepip, sys, venv

wanted = sys.argv[1]
sys.exit(sys.version_info < (3, 11) or (wanted != "" and wanted != "%d.%d" % sys.version_info[:2]))
END
}

# Print the first suitable interpreter: by name on PATH, then where pyenv keeps its own.
find_python() {
    local number candidate
    for number in ${version:-3.11 3.12 3.13}; do
        for candidate in "python$number" "$HOME"/.pyenv/versions/"$number".*/bin/python python3; do
            if suits "$candidate" "$version"; then
                echo "$candidate"
                return
            fi
        done
    done
    echo "no Python ${version:-3.11 or newer} with its venv module was found" >&2
    [ -n "$version" ] || echo "install one (Debian, Ubuntu: apt-get install python3 python3-venv; pyenv install 3.11)," \
        "or name one: make install PYTHON=/path/to/python3.11" >&2
    exit 3
}

# Was the environment made in this folder by the Python that is asked for, and finished?
is_ours() {
    [ "$(head -n 1 "$folder/installed" 2>/dev/null)" = "$PWD" ] && "$folder/bin/python" -c '' &&
        { [ -z "$python" ] || [ "$("$python" --version)" = "$("$folder/bin/python" --version)" ]; }
}

is_current() {
    is_ours && [ "$(tail -n 1 "$folder/installed")" = "$digest" ]
}

pip_install() {
    "$folder/bin/python" -m pip install --quiet --no-input --no-compile -c constraints.txt "$@"
}

install() {
    if ! is_ours; then
        rm -rf "$folder"
        "${python:-$(find_python)}" -m venv "$folder"
    fi
    rm -f "$folder/installed"
    if [ "$name" = full ]; then
        # torch first: DeepSpeed's set-up imports it. DeepSpeed's operators are never built: training uses torch's.
        pip_install torch setuptools pybind11 ninja py-cpuinfo
        DS_BUILD_OPS=0 pip_install --no-build-isolation deepspeed
        # All four in one command: pip then takes them from these folders and asks no index for their names.
        pip_install --no-build-isolation -e packages/neox-launcher -e 'packages/neox-data[torch]' \
            -e packages/neox-kernels -e 'packages/neox-model[tensorboard,plot,onnx]' \
            pytest hypothesis mypy ruff transformers types-PyYAML
        # Its data files and orders are what ours are compared with; nothing of it trains, so none of its dependencies.
        pip_install --no-deps megatron-core
    else
        pip_install -e "packages/neox-$name" pytest hypothesis
    fi
    # pip would do this on one core, and with what is never imported. Files that are templates, not Python, fail.
    "$folder/bin/python" -m compileall -q -j 0 -x '/(transformers/models|tests)/' "$folder"/lib/python*/site-packages >/dev/null || true
    printf '%s\n' "$PWD" "$digest" >"$folder/installed.new"
    mv "$folder/installed.new" "$folder/installed"
}

# What an environment is made of; the C++ sources of neox-data are compiled when it is installed.
digest=$(find packages \( -name pyproject.toml -o -name setup.py -o -path '*/src/neox_data/csrc/*' \) -type f -not -path '*/build/*' |
    sort | xargs cat constraints.txt tools/environment.sh | sha256sum)
! is_current || exit 0

[ -z "$python" ] || suits "$python" "$version" || {
    echo "PYTHON=$python is not a Python ${version:-3.11 or newer} with its venv module" >&2
    exit 3
}
[ -n "$python" ] || is_ours || python=$(find_python)
mkdir -p .venvs
# Environments of different packages are made side by side; .venv holds all packages and waits for every one.
exec 8>.venvs/lock 9>".venvs/lock-$name"
if [ "$name" = full ]; then flock 8; else flock --shared 8; fi
flock 9
! is_current || exit 0

echo "installing into $folder (log: $log)"
# A subshell that is not part of a condition, so that `set -e` holds inside.
set +e
(
    set -e
    install
) >"$log" 2>&1 </dev/null
code=$?
set -e
if [ $code -ne 0 ]; then
    tail -n 40 "$log" >&2
    echo "$folder could not be made; the whole log is $log; the same command goes on from here" >&2
    exit 1
fi
echo "installed in $SECONDS s"
