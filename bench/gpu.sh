#!/usr/bin/env bash
# Build, test and measure on a machine with a GPU in one call: bench/gpu.sh [test|bench|head|small|models|pairs|fuzz|curve|haiprof|all]...
#
# Nothing is downloaded: python3 must have torch, triton, pytest and the build requirements of pyproject.toml. Missing
# wheels of rivals (liger-kernel, quack-kernels) are installed separately, from $WHEELS. Logs and results go to $OUT.
# Every part has its own limit in seconds, so a hanging part leaves time for the others; together 9 minutes. The parts
# models, pairs, fuzz, curve and haiprof take too long for `all`. LIMIT_<part>=seconds in the environment gives a part
# more time if not all are run.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

LIMIT_BUILD=${LIMIT_BUILD:-90} LIMIT_TEST=${LIMIT_TEST:-150} LIMIT_BENCH=${LIMIT_BENCH:-140}
LIMIT_SMALL=${LIMIT_SMALL:-40} LIMIT_HEAD=${LIMIT_HEAD:-120} LIMIT_MODELS=${LIMIT_MODELS:-480}
LIMIT_CURVE=${LIMIT_CURVE:-490} LIMIT_PAIRS=${LIMIT_PAIRS:-400} LIMIT_FUZZ=${LIMIT_FUZZ:-120}
LIMIT_HAIPROF=${LIMIT_HAIPROF:-320}
# quack can only be imported from a folder named "site-packages".
export OUT=${OUT:-out} WHEELS=${WHEELS:-.whl/*.whl} SITE=${SITE:-/tmp/rivals/site-packages} WORKERS=${WORKERS:-12}
export CUDAARCHS=${CUDAARCHS:-90-real} # one architecture builds fast; 90 is Hopper
# Python reads no .pth files there. The second folder is what that of nvidia-cutlass-dsl, needed by quack, would add.
export PYTHONUNBUFFERED=1 PYTHONPATH=$SITE:$SITE/nvidia_cutlass_dsl/dsl_packages${PYTHONPATH:+:$PYTHONPATH}
export PATH=$SITE/bin:$PATH # py-spy
mkdir -p "$OUT" "$SITE"

install_rivals() {
  shopt -s nullglob
  local wheels=($WHEELS)
  ((${#wheels[@]} == 0)) || python3 -m pip install -q --no-index --no-deps --upgrade --target "$SITE" "${wheels[@]}"
}

build() {
  install_rivals || echo "rivals were not installed: ${WHEELS}"
  python3 -m pip install -q --no-build-isolation --no-index --no-deps -e . && python3 -m hfnn.info
}

# TESTS: the tests to run.
tests() {
  # One thread per worker, or the workers compete for the cores. Plugins by name, because foreign ones warn and thereby
  # fail tests. -P, because transformers would take the folder kernels/ for a package of that name.
  # shellcheck disable=SC2086 # words of their own
  OMP_NUM_THREADS=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 python3 -P -m pytest -q -p xdist -p timeout -p hypothesispytest \
    -n "$WORKERS" --dist loadgroup --timeout 120 --maxfail 20 ${TESTS:-tests}
}

bench() {
  python3 bench/run.py --against torch compile liger quack --kernel cuda triton --results "$OUT"
}

small() {
  python3 bench/run.py --small --results "$OUT"
}

# Not named "head", which is a command.
heads() {
  python3 bench/run.py --head --against torch compile liger quack --rounds 3 --seconds 0.2 --results "$OUT"
}

# MODELS: arguments of models.py, such as "--models gpt2 vit --modes eager hfnn".
models() {
  # shellcheck disable=SC2086 # words of their own
  python3 bench/models.py --depth --results "$OUT" && python3 bench/models.py ${MODELS:-} --results "$OUT"
}

# PAIRS: arguments of models.py --pairs, such as "--models gpt2 --batches 4 --modes eager hfnn-captured".
pairs() {
  # shellcheck disable=SC2086 # words of their own
  python3 bench/models.py --pairs ${PAIRS:-} --results "$OUT"
}

# FUZZ: arguments of tests/fuzz/run.py.
fuzz() {
  # shellcheck disable=SC2086 # words of their own
  python3 -P tests/fuzz/run.py ${FUZZ:-capture --programs 1000 --jobs 8}
}

# CURVE: arguments of curve.py, such as "--steps 300".
curve() {
  # shellcheck disable=SC2086 # words of their own
  python3 bench/curve.py ${CURVE:-} --results "$OUT"
}

# HAIPROF_ARGS: arguments of profiler.py, such as "--part overhead --batches 4".
haiprof() {
  local status=0
  # shellcheck disable=SC2086 # words of their own
  python3 bench/profiler.py ${HAIPROF_ARGS:-} --results "$OUT" || status=1
  # Also a step of about 10 ms on an otherwise idle CPU.
  [[ -n ${HAIPROF_ARGS:-} ]] ||
    OMP_NUM_THREADS=1 python3 bench/profiler.py --device cpu --tiny --part overhead --rounds 8 --results "$OUT" || status=1
  return $status
}

export -f install_rivals build tests bench small heads models pairs fuzz curve haiprof
failed=0 summary=

# part <function> <limit> <lines>: runs it with its output in a log, and shows the last lines. SIGINT first: the
# benchmark then prints what it has.
part() {
  local begin=$SECONDS status
  timeout --signal=INT --kill-after=10 "$2" bash -c "$1" >"$OUT/$1.log" 2>&1
  status=$?
  tail -n "$3" "$OUT/$1.log"
  ((status == 0)) || failed=1
  summary+=$(printf '%-7s status %3d (124, 137: over its limit)  %4d s of %d' "$1" $status $((SECONDS - begin)) "$2")$'\n'
}

what=" ${*:-all} "
wants() { [[ $what == *" $1 "* || $what == *" all "* ]]; }

part build $LIMIT_BUILD 20
wants test && part tests $LIMIT_TEST 25
wants small && part small $LIMIT_SMALL 40
wants bench && part bench $LIMIT_BENCH 80
wants head && part heads $LIMIT_HEAD 80
[[ $what == *" models "* ]] && part models $LIMIT_MODELS 80
[[ $what == *" fuzz "* ]] && part fuzz $LIMIT_FUZZ 40
[[ $what == *" pairs "* ]] && part pairs $LIMIT_PAIRS 80
[[ $what == *" curve "* ]] && part curve $LIMIT_CURVE 20
[[ $what == *" haiprof "* ]] && part haiprof $LIMIT_HAIPROF 80
printf '%s' "$summary"
exit $failed
