#!/usr/bin/env bash
# Run a sweep: tests that take minutes to an hour. Without a name, list them.
#
#   tools/sweep.sh layouts
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1

integration=tests/integration
layouts="$integration/test_compression.py $integration/test_engines.py $integration/test_layouts.py $integration/test_learning_rate.py $integration/test_nonfinite.py"
# Name -> arguments of pytest.
declare -A tests=(
    [archives]="-q -o log_cli=true --log-cli-level=INFO -m sweep packages/neox-data/tests/preprocess/test_damaged_archives.py"
    [cluster]="-m cluster tests/cluster"
    [config]="-q -m sweep packages/neox-launcher/tests/cli/test_fuzz_check.py"
    [conversion]="-q -m sweep packages/neox-model/tests/convert"
    [experts]="-q -m sweep $integration/test_verified_experts.py"
    [fields]="-q -m sweep $integration/test_verified_fields.py"
    [layouts]="-m sweep $layouts"
    [manifests]="-q -m sweep packages/neox-model/tests/checkpoint/test_hostile_manifests.py"
    [optimizers]="-m sweep $integration/test_optimizers.py $integration/test_one_bit.py"
    [pairs]="-m sweep $integration/test_pairs.py"
    [port]="-s -m sweep packages/neox-launcher/tests/controller/test_listener.py"
    [precision]="-m sweep $integration/test_precision.py"
    [verify]="-q -m sweep $integration/test_verified_layouts.py"
    [services]="-p support.no_skips -q -rs packages/neox-model/tests/checkpoint/test_s3.py $integration/test_object_store.py packages/neox-model/tests/metrics/test_comet.py packages/neox-model/tests/train/test_wandb.py"
)
# All sweeps that have no name here.
tests[chaos]="--hypothesis-profile=random -m sweep packages tests --ignore tests/cluster"
for name in archives config conversion experts fields layouts manifests optimizers pairs port precision verify; do
    for word in ${tests[$name]}; do
        case $word in packages/* | tests/*) tests[chaos]+=" --ignore $word" ;; esac
    done
done

name=${1:-none}
case $name in
    precision) export PRECISION_RESULTS=tools/precision/results.jsonl ;;
    services)
        .venv/bin/python -m pip install --quiet --no-input -c constraints.txt "moto[s3]" flask flask-cors s3fs comet_ml wandb
        export PYTHONPATH=tests
        ;;
    coverage)
        .venv/bin/coverage erase
        # The limit of finds_no_room on file sizes also applies to the files of coverage.
        env --default-signal=INT,QUIT,HUP .venv/bin/coverage run -m pytest -q -k "not finds_no_room" \
            -m "not slow and not sweep and not cluster" packages
        .venv/bin/coverage combine --quiet
        exec .venv/bin/coverage report
        ;;
    sanitizers) exec tools/sanitize.sh ;;
esac
[ -n "${tests[$name]:-}" ] || {
    cat >&2 <<'END'
make sweep NAME=...
  archives    read 3,000 damaged corpus files: every document is counted, or there is an error
  chaos       kill trainings at random moments and resume; read damaged files; all that has no other name
  cluster     simulate several hosts with real cluster tools and injected faults; requires root
  config      10,000 mutations of configs/ and wrong values of every name through neox-config
  conversion  round trips of random models of transformers, and 200 wrong mappings
  coverage    lines and branches that the packages' fast tests reach (20 minutes)
  experts     verify-layout of drawn models with experts, three on each layout (the others: PART=1/4)
  fields      verify-layout of models of today's families, three layouts each (5 minutes; the rest: PART=1/2)
  layouts     compare training of every architecture and compression on every layout with one rank
  manifests   load 3,000 mutated manifests of checkpoints: they load, or are refused and change nothing
  optimizers  every optimizer resumes to the last bit on every layout in every precision
  pairs       train with every pair of options that no rule refuses
  port        100,000 connections with random lines to the launcher's port
  precision   every architecture on every layout in fp32, bf16 and fp16 (an hour); then run make docs
  sanitizers  neox-data's extension under AddressSanitizer and UndefinedBehaviorSanitizer
  verify      verify-layout of configs/ on two layouts each, and of 150 drawn configurations (20 minutes; PART=2/4)
  services    uploads to a real S3 server, Comet and wandb; installs their packages into .venv
END
    exit 2
}
# shellcheck disable=SC2086
exec env --default-signal=INT,QUIT,HUP .venv/bin/pytest ${tests[$name]}
