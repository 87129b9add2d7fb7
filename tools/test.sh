#!/usr/bin/env bash
# Run the fast tests of packages in environments without our other packages, which shows missing dependencies.
#
#   tools/test.sh launcher data kernels
#
# launcher and data run on every Python of PYTHONS ("3.12 3.13") that is installed, by default that of .venv; kernels on
# that alone, because torch is large. The last line has the numbers of passed and failed tests.
set -euo pipefail
cd "$(dirname "$0")/.."
# Distributed tests start a process per rank; with one thread each they do not compete for the cores.
export OMP_NUM_THREADS=1

# Print the version of .venv's Python, or 3.11 if there is no .venv.
own_python() {
    .venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || echo 3.11
}

passed=0 failed=0 broken=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# Add the numbers before words with this prefix in the last line.
count() {
    tail -n 1 "$log" | awk -v word="^($1)" '{ for (i = 2; i <= NF; i++) if ($i ~ word) sum += $(i - 1) } END { print sum + 0 }'
}

run_alone() {
    local name=$1 version=$2 code=0
    tools/environment.sh "$name" "$version" || code=$?
    # 3: this Python is not installed, which was reported.
    [ "$code" -ne 3 ] || return 0
    [ "$code" -eq 0 ] || { broken=1 && return; }
    ran=1
    printf '\n== neox-%s alone, Python %s\n' "$name" "$version"
    # Background jobs of a shell ignore SIGINT, and nohup ignores SIGHUP, but our tests send both.
    env -u PYTHONDONTWRITEBYTECODE --default-signal=INT,QUIT,HUP ".venvs/$name-$version/bin/pytest" -q \
        -n logical --maxprocesses 8 --dist loadfile -m "not slow and not sweep and not recipe" "packages/neox-$name" 2>&1 | tee "$log" || broken=1
    passed=$((passed + $(count passed))) failed=$((failed + $(count 'failed|error')))
}

own=$(own_python)
for name in "$@"; do
    ran=0
    case $name in
        launcher | data) for version in ${PYTHONS:-$own}; do run_alone "$name" "$version"; done ;;
        kernels) run_alone kernels "$own" ;;
        *) echo "unknown package $name; use launcher, data or kernels" >&2 && exit 2 ;;
    esac
    [ "$ran" -eq 1 ] || { echo "$name ran on no Python" && broken=1; }
done
printf '\n%s passed, %s failed\n' "$passed" "$failed"
exit "$broken"
