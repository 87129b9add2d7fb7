#!/usr/bin/env bash
# Run test suites, and close with one line: how many tests passed and failed.
#
#   tools/test.sh launcher data kernels model integration
#
# launcher, data and kernels run in an environment of their own that holds nothing else of ours, so a forgotten
# dependency shows; the first two on every Python of PYTHONS that this machine has. These three are single processes
# and mostly waiting for downloads: they run side by side, each suite shown when it ends. The other two start
# processes of their own and follow one after another.
set -euo pipefail
cd "$(dirname "$0")/.."
# Distributed tests start a process per rank: one thread each, or they fight for the cores.
export OMP_NUM_THREADS=1

results=$(mktemp -d)
# Interrupted, the suites in the background end too.
trap 'jobs -p | xargs -r kill 2>/dev/null || true; rm -rf "$results"' EXIT

# Print how many tests the suites' closing lines count under words that begin so.
count() {
    tail -qn 1 "$results"/*.log | awk -v word="^($1)" '{ for (i = 2; i <= NF; i++) if ($i ~ word) sum += $(i - 1) }
        END { print sum + 0 }'
}

# A suite whose `.broken` file stays was red, or never ended.
run_suite() {
    local title=$1 environment=$2 log
    shift 2
    log=$(mktemp -p "$results" --suffix=.log)
    touch "$log.broken"
    # A shell starts what runs in its background deaf to Ctrl-C, nohup to SIGHUP, and our tests send both.
    if env --default-signal=INT,QUIT,HUP "$environment/bin/pytest" -q "$@" >"$log" 2>&1; then rm "$log.broken"; fi
    # One writer at a time, or two suites' lines would mix.
    flock "$results" bash -c 'printf "\n== %s\n" "$1"; cat "$2"' - "$title" "$log"
}

run_alone() {
    local name=$1 version code runs=0
    shift
    for version in "$@"; do
        code=0
        tools/environment.sh "$name" "$version" || code=$?
        # 3: this machine has no such Python, which it has said in one line.
        [ "$code" -ne 3 ] || continue
        [ "$code" -eq 0 ] || { touch "$results/$name.broken" && return; }
        run_suite "neox-$name alone, Python $version" ".venvs/$name-$version" "packages/neox-$name"
        runs=$((runs + 1))
    done
    [ "$runs" -gt 0 ] || touch "$results/$name.broken"
}

suite() {
    case $1 in
        launcher | data) run_alone "$1" ${PYTHONS:-3.11 3.12 3.13} ;;
        # On the Python of .venv: torch is large, and need not be there for every version.
        kernels) run_alone "$1" "$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')" ;;
        # What the leaves' own environments skip for want of torch and DeepSpeed runs here.
        model) run_suite neox-model .venv packages/neox-model packages/neox-data/tests/test_loader.py \
            packages/neox-data/tests/indexed/test_chart.py \
            packages/neox-launcher/tests/config/test_config_engine_json.py \
            packages/neox-launcher/tests/test_supervision.py ;;
        integration) run_suite integration .venv tests ;;
        *) echo "no suite is called $1" >&2 && exit 2 ;;
    esac
}

for name in "$@"; do
    case $name in
        launcher | data | kernels) suite "$name" & ;;
        # These start processes of their own: they wait for the others.
        *) wait && suite "$name" ;;
    esac
done
wait

printf '\n%s passed, %s failed\n' "$(count passed)" "$(count 'failed|error')"
[ -z "$(find "$results" -name '*.broken')" ]
