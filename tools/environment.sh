#!/usr/bin/env bash
# Create one of the project's virtual environments, unless it is up to date.
#
#   tools/environment.sh full          .venv               all four packages and the tools: training, all tests
#   tools/environment.sh data 3.12     .venvs/data-3.12    neox-data alone with a test runner: its own tests
#   tools/environment.sh docs          .venvs/docs         the builder of the documentation's site
#   tools/environment.sh gate          .venvs/gate         what `make gpu-gate` compiles with: layers, Triton, no DeepSpeed
#   tools/environment.sh oldest        .venvs/oldest       as .venv, with the oldest versions that the packages allow
#   tools/environment.sh newest        .venvs/newest       as .venv, with the newest versions, on the newest Python found
#
# The file `installed` in an environment contains its original folder and a digest of everything that determines it.
# During a change the file is named `begun`: an installation that was interrupted is continued.
# PYTHON=... selects the interpreter; by default an existing environment keeps its own, and a new one uses the first found.
# TORCH=2.15.0 installs that torch into .venv in place of the one in constraints.txt; an existing .venv keeps it.
# Exit code 3: no suitable interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

name=$1
version=${2:-}
python=${PYTHON:-}
folder=.venv
[ "$name" = full ] || folder=.venvs/$name${version:+-$version}
log=.venvs/$(basename "$folder").log
torch=
[ "$name" != full ] || torch=${TORCH:-$(cat "$folder/torch" 2>/dev/null || true)}
# The versions to install; the file is written with the environment, unless it is constraints.txt.
versions=constraints.txt
[ -z "$torch" ] || versions=.venvs/with-torch-$torch.txt
case $name in oldest | newest) versions=.venvs/$name.txt ;; esac

# Succeed if this command is a Python that can create environments, of version $2 (empty: any from 3.11).
suits() {
    "$1" - "$2" <<'END' 2>/dev/null
import ensurepip, sys, venv

wanted = sys.argv[1]
sys.exit(sys.version_info < (3, 11) or (wanted != "" and wanted != "%d.%d" % sys.version_info[:2]))
END
}

# Print the first suitable interpreter: by name on PATH, then those of pyenv.
find_python() {
    local number candidate
    local numbers="3.11 3.12 3.13"
    [ "$name" != newest ] || numbers="3.13 3.12 3.11"
    for number in ${version:-$numbers}; do
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

# Take a lock with these arguments of flock, and report if another installation has it.
lock() {
    flock --nonblock "$@" || {
        echo "waiting for another installation in this folder; its log is in .venvs"
        flock "$@"
    }
}

# Succeed if the environment was created in this folder, with the requested Python.
is_ours() {
    [ "$(cat "$folder/installed" "$folder/begun" 2>/dev/null | head -n 1)" = "$PWD" ] && "$folder/bin/python" -c '' &&
        { [ -z "$python" ] || [ "$("$python" --version)" = "$("$folder/bin/python" --version)" ]; }
}

is_current() {
    is_ours && [ "$(tail -n 1 "$folder/installed" 2>/dev/null)" = "$digest" ]
}

# Run pip; its output goes to the log.
pip_install() {
    "$folder/bin/python" -m pip install --no-input --no-compile --progress-bar off -c "$versions" "$@"
}

# Write the versions that this environment gets.
write_versions() {
    if [ -n "$torch" ]; then
        # Each torch requires its own triton and parts of CUDA.
        { grep -vE '^(torch|triton|nvidia-.*)==' constraints.txt && echo "torch==$torch"; } >"$versions"
        echo "$torch" >"$folder/torch"
    elif [ "$name" = newest ]; then
        : >"$versions"
    elif [ "$name" = oldest ]; then
        # pip has no such resolution. Packages that ours require only through others are the newest.
        "$folder/bin/python" -m pip install --no-input --progress-bar off uv
        "$folder/bin/uv" pip compile --quiet --no-header --no-annotate --resolution lowest-direct --all-extras \
            --python "$folder/bin/python" packages/*/pyproject.toml | grep -v '^-e' >"$versions"
    fi
}

# Run a command as a stage: print its name, every 30 seconds what it does, and its duration at the end. The terminal is
# file descriptor 3.
stage() {
    local name=$1 began=$SECONDS
    shift
    echo "  $name ..." >&3
    # sleep holds neither the terminal nor the locks when the installation has ended.
    while sleep "${STAGE_INTERVAL:-30}" >/dev/null 2>&1 3>&- 8>&- 9>&- && kill -0 $$ 2>/dev/null; do
        echo "    after $((SECONDS - began)) s: $(tail -n 1 "$log" | cut -c 1-90)" >&3
    done &
    ticker=$!
    trap 'kill $ticker 2>/dev/null || true' EXIT
    "$@"
    kill $ticker 2>/dev/null || true
    echo "  $name: took $((SECONDS - began)) s" >&3
}

# Import what the commands use, which compiles it and shows that it can be imported. Compiling all that is installed would
# take seven times as long, mostly for modules that are never imported.
import_once() {
    env -u PYTHONDONTWRITEBYTECODE "$folder/bin/python" -c "import $1"
}

# Remove the records of packages whose installation was interrupted, so that pip installs them again.
forget_incomplete() {
    local record
    for record in "$folder"/lib/python*/site-packages/*.dist-info; do
        [ -e "$record/RECORD" ] || rm -rf "$record"
    done
}

install_all() {
    # torch first: DeepSpeed's setup imports it. DeepSpeed's operators are not compiled: training uses torch's.
    stage "torch and what compiles our extensions" pip_install torch setuptools pybind11 ninja py-cpuinfo
    DS_BUILD_OPS=0 stage "DeepSpeed" pip_install --no-build-isolation deepspeed
    # All four in one command, so that pip uses these folders and does not search an index for their names.
    stage "our four packages with their extensions, transformers and the tools for tests" \
        pip_install --no-build-isolation -e packages/neox-launcher -e 'packages/neox-data[torch,sentencepiece]' \
        -e packages/neox-kernels -e 'packages/neox-model[tensorboard,plot,onnx,peft,eval,serve,packed]' \
        pytest pytest-xdist hypothesis syrupy coverage mypy ruff safetensors transformers accelerate openai rank-bm25 tenacity types-PyYAML
    # Used only to compare data files and sample orders, so its dependencies are not installed.
    stage "megatron-core, for tests" pip_install --no-deps megatron-core
    stage "first import" import_once "deepspeed, pytest, neox_data.preprocess.cli, neox_launcher.cli.launch,\
        neox_model.convert.to_hf, neox_model.scoring.harness, neox_model.serve.run, neox_model.train.open_run"
}

install() {
    if ! is_ours; then
        rm -rf "$folder"
        "${python:-$(find_python)}" -m venv "$folder"
    fi
    echo "$PWD" >"$folder/begun"
    rm -f "$folder/installed"
    forget_incomplete
    write_versions
    if [ "$name" = full ] || [ "$name" = oldest ] || [ "$name" = newest ]; then
        install_all
    elif [ "$name" = docs ]; then
        stage "the builder of the site" pip_install mkdocs mkdocs-material mkdocstrings mkdocstrings-python pymdown-extensions
    elif [ "$name" = gate ]; then
        stage "torch" pip_install torch numpy setuptools click cloup filelock pydantic pyyaml rich
        # Triton compiles for GPUs that are not present. torch's builds for CPUs do not depend on it.
        pip_install --no-deps triton
        stage "the compilers of CUDA" pip_install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl
        pip_install --no-deps --no-build-isolation -e packages/neox-launcher -e packages/neox-kernels -e packages/neox-model
    else
        stage "neox-$name and the tools for tests" pip_install -e "packages/neox-$name" pytest pytest-xdist hypothesis syrupy
    fi
    printf '%s\n' "$PWD" "$digest" >"$folder/installed.new"
    mv "$folder/installed.new" "$folder/installed"
    rm "$folder/begun"
}

# Everything that determines an environment; the C++ sources of neox-data are compiled at installation.
digest=$(find packages \( -name pyproject.toml -o -name setup.py -o -path '*/src/neox_data/csrc/*' \) -type f -not -path '*/build/*' |
    sort | xargs cat constraints.txt tools/environment.sh | sha256sum)$torch
! is_current || exit 0

[ -z "$python" ] || suits "$python" "$version" || {
    echo "PYTHON=$python is not a Python ${version:-3.11 or newer} with its venv module" >&2
    exit 3
}
[ -n "$python" ] || is_ours || python=$(find_python)
mkdir -p .venvs
# Environments of different packages are created in parallel; .venv contains all packages and waits for the others.
exec 8>.venvs/lock 9>".venvs/lock-$name"
if [ "$name" = full ]; then lock 8; else lock --shared 8; fi
lock 9
! is_current || exit 0

echo "installing into $folder (log: $log)"
# A subshell outside a condition, so that `set -e` is in effect inside.
set +e
(
    set -e
    install
) 3>&1 >"$log" 2>&1 </dev/null
code=$?
set -e
if [ $code -ne 0 ]; then
    tail -n 40 "$log" >&2
    echo "cannot create $folder; see $log, then run the same command again to continue" >&2
    exit 1
fi
echo "installed in $SECONDS s"
# The other environments are used by make targets, without being activated.
[ "$name" != full ] || echo "next: source .venv/bin/activate"
