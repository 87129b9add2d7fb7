#!/usr/bin/env bash
# Run test suites; the last line has the numbers of passed and failed tests.
#
#   tools/test.sh integration model equalities launcher kernels data
#
# launcher, data and kernels run in separate environments without our other packages, which shows missing
# dependencies; the first two on every Python of PYTHONS ("3.12 3.13") that is installed, by default .venv's.
# Two suites run at a time, in the order given; with the longest first, both cores have work until the end.
# Each suite's output is shown when it ends.
set -euo pipefail
cd "$(dirname "$0")/.."
# Distributed tests start a process per rank; with one thread each they do not compete for the cores.
export OMP_NUM_THREADS=1

results=$(mktemp -d)
# An interrupt also ends the suites in the background.
trap 'jobs -p | xargs -r kill 2>/dev/null || true; rm -rf "$results"' EXIT

# Sum the numbers before words with this prefix in the last lines of the suites.
count() {
    tail -qn 1 "$results"/*.log 2>/dev/null | awk -v word="^($1)" '{ for (i = 2; i <= NF; i++) if ($i ~ word) sum += $(i - 1) }
        END { print sum + 0 }'
}

# A suite failed or did not end if its `.broken` file remains.
run_suite() {
    local title=$1 environment=$2 log
    shift 2
    log=$(mktemp -p "$results" --suffix=.log)
    touch "$log.broken"
    # Background jobs of a shell ignore SIGINT, and nohup ignores SIGHUP, but our tests send both.
    if env --default-signal=INT,QUIT,HUP "$environment/bin/pytest" -q "$@" >"$log" 2>&1; then rm "$log.broken"; fi
    # One writer at a time, so that the output of suites is not mixed.
    flock "$results" bash -c 'printf "\n== %s\n" "$1"; cat "$2"' - "$title" "$log"
}

run_alone() {
    local name=$1 version=$2 code=0
    tools/environment.sh "$name" "$version" || code=$?
    # 3: this Python is not installed, which was reported.
    [ "$code" -ne 3 ] || return 0
    touch "$results/$name.ran"
    [ "$code" -eq 0 ] || { touch "$results/$name.broken" && return; }
    run_suite "neox-$name alone, Python $version" ".venvs/$name-$version" "packages/neox-$name"
}

# Print the version of .venv's Python, or 3.11 if there is no .venv.
own_python() {
    .venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo 3.11
}

# Tests that require packages which the other environments lack (torch, transformers, matplotlib): those that call
# importorskip, or the file if that is not in a test itself.
mapfile -t skipped_alone < <(
    grep -rl --include='test_*.py' importorskip packages/neox-{launcher,data}/tests | sort | xargs awk '
        /^[^ \t#)]/ { name = "" }
        /^def test_/ { split($2, words, "("); name = "::" words[1] }
        /importorskip/ && !seen[FILENAME name]++ { print FILENAME name }'
)

# Trainings that are compared with each other, the part of the integration tests that computes most.
equalities=(tests/integration/test_{copies,layouts,nonfinite,optimizers,precision,verify_faults,verify_kept,verify_layouts}.py)

suite() {
    case $1 in
        launcher | data | kernels) run_alone "$1" "$2" ;;
        model) run_suite neox-model .venv packages/neox-model "${skipped_alone[@]}" ;;
        equalities) run_suite equalities .venv "${equalities[@]}" ;;
        integration) run_suite integration .venv tests "${equalities[@]/#/--ignore=}" ;;
    esac
}

# Each line: a suite and, if it has an environment of its own, the version of Python.
own=$(own_python)
chosen=()
for name in "$@"; do
    case $name in
        launcher | data) for version in ${PYTHONS:-$own}; do chosen+=("$name $version"); done ;;
        # Only with the Python of .venv, because torch is large.
        kernels) chosen+=("$name $own") ;;
        model | equalities | integration) chosen+=("$name") && touch "$results/$name.ran" ;;
        *) echo "unknown suite $name; use model, equalities, integration, launcher, data or kernels" >&2 && exit 2 ;;
    esac
done

for words in "${chosen[@]}"; do
    [ "$(jobs -pr | wc -l)" -lt 2 ] || wait -n || true
    # shellcheck disable=SC2086
    suite $words &
done
wait

for name in "$@"; do
    [ -e "$results/$name.ran" ] || { echo "$name ran on no Python" && touch "$results/$name.broken"; }
done
printf '\n%s passed, %s failed\n' "$(count passed)" "$(count 'failed|error')"
[ -z "$(find "$results" -name '*.broken')" ]
