#!/usr/bin/env bash
# Run test suites, the quick ones first, and close with one line: how many tests passed and failed.
#
#   tools/test.sh launcher data kernels model integration
#
# launcher, data and kernels run in an environment of their own that holds nothing else of ours, so a forgotten
# dependency shows; the first two on every Python of PYTHONS that this machine has.
set -euo pipefail
cd "$(dirname "$0")/.."
# Distributed tests start a process per rank: one thread each, or they fight for the cores.
export OMP_NUM_THREADS=1

passed=0
failed=0
broken=0
output=$(mktemp)
trap 'rm -f "$output"' EXIT

# Print how many tests pytest's closing line counts under words that begin so.
count() {
    tail -n 1 "$output" | awk -v word="^($1)" '{ for (i = 2; i <= NF; i++) if ($i ~ word) sum += $(i - 1) }
        END { print sum + 0 }'
}

run_suite() {
    local title=$1 environment=$2
    shift 2
    printf '\n== %s\n' "$title"
    "$environment/bin/pytest" -q "$@" 2>&1 | tee "$output" || broken=1
    passed=$((passed + $(count passed)))
    failed=$((failed + $(count 'failed|error')))
}

run_alone() {
    local name=$1 version code runs=0
    shift
    for version in "$@"; do
        code=0
        tools/environment.sh "$name" "$version" || code=$?
        # 3: this machine has no such Python, which it has said in one line.
        [ "$code" -ne 3 ] || continue
        [ "$code" -eq 0 ] || exit "$code"
        run_suite "neox-$name alone, Python $version" ".venvs/$name-$version" "packages/neox-$name"
        runs=$((runs + 1))
    done
    [ "$runs" -gt 0 ] || broken=1
}

for suite in "$@"; do
    case $suite in
        launcher | data) run_alone "$suite" ${PYTHONS:-3.11 3.12 3.13} ;;
        # On the Python of .venv: torch is large, and need not be there for every version.
        kernels) run_alone "$suite" "$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')" ;;
        # What the leaves' own environments skip for want of torch and DeepSpeed runs here.
        model) run_suite neox-model .venv packages/neox-model packages/neox-data/tests/test_loader.py \
            packages/neox-launcher/tests/config/test_config_engine_json.py \
            packages/neox-launcher/tests/test_supervision.py ;;
        integration) run_suite integration .venv tests ;;
        *) echo "no suite is called $suite" >&2 && exit 2 ;;
    esac
done

printf '\n%s passed, %s failed\n' "$passed" "$failed"
exit "$broken"
