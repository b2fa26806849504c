#!/usr/bin/env bash
# The nightly job: on every profile the gates, their controls and the recipe twice; then one verdict on all of it.
#
# A part that is not green does not stop the others. What was found is judged by ci/nightly.py, which writes JUnit, JSON and
# the HTML page into the report folder and compares with the last green night of the same hardware and versions. The job's
# exit code is the first one that was not 0: nothing but PASS is green, and what did not run is not green either.
#
# May be set: PROFILES, GATES, CONTROLS (space separated), DEVICE, REPORT (folder of this night, a new one), HISTORY (folder
# of the green nights, kept between nights), RECIPE_ARGS (further flags of vime train), COST_MAX, LEDGER_MAX, SECONDS_MAX.
set -uo pipefail
cd "$(dirname "$0")/.."

report=${REPORT:-ci/reports/nightly-$(date -u +%Y%m%dT%H%M%SZ)}
history=${HISTORY:-ci/reports/history}
device=${DEVICE:-cpu}
export PYTHON=${PYTHON:-python}
read -ra profiles <<< "${PROFILES:-dense-tiny smollm2-135m}"
read -ra gates <<< "${GATES:-rerun batch logprob layerwise weights cost}"
read -ra controls <<< "${CONTROLS-rerun batch logprob layerwise weights}"
read -ra recipe <<< "${RECIPE_ARGS:-}"
code=0
first() { [ "$code" -ne 0 ] || code=$1; }

for profile in "${profiles[@]}"; do # it names a folder of the reports as well
  [[ "$profile" != */* ]] || { echo "PROFILES holds '$profile'; the name of a profile is expected, found a path" >&2; exit 2; }
done
mkdir -p "$report" "$history" || exit 2
"$PYTHON" -m vime.cli doctor --device "$device" || first $?
judge=(--report "$report" --history "$history")
for profile in "${profiles[@]}"; do
  judge+=(--profile "$profile")
  # The exit codes of these are in their reports, which are judged below; a report that is missing is not green.
  REPORT="$report/$profile" PROFILE="$profile" DEVICE="$device" ci/gate.sh "${gates[@]}" || first $?
  for gate in "${controls[@]}"; do # the gate's own fault must be found: FAIL is what is expected here
    "$PYTHON" -m gates "$gate" --control --profile "$profile" --device "$device" --report "$report/$profile-control-$gate"
  done
  # Random weights of a few layers move too little at the documented rate; a real recipe on a GPU takes the script as it is.
  extra=()
  # Its steps are so short that some milliseconds of ledger are a large share of them: longer responses.
  [ "$profile" != dense-tiny ] || extra=(--lr 1e-3 --rollout-max-response-len 128)
  checkpoint=$("$PYTHON" -c "import sys; from gates.profiles import find; print(find(sys.argv[1]).checkpoint())" "$profile") || first $?
  MODE=repro DEVICE="$device" HF_CHECKPOINT="$checkpoint" OUTPUT="$report/$profile-repro" \
    scripts/run-qwen2.5-0.5B-reproducibility.sh "${extra[@]}" "${recipe[@]}" || first $?
done
for gate in "${gates[@]}"; do judge+=(--gate "$gate"); done
for gate in "${controls[@]}"; do judge+=(--control "$gate"); done
# Against the unaligned run. A CPU shares its cores with whatever else runs there, so its budget is a loose one.
[ "$device" = cpu ] && cost_max=${COST_MAX:-4} || cost_max=${COST_MAX:-1.5}
judge+=(--cost-max "$cost_max")
[ -z "${LEDGER_MAX:-}" ] || judge+=(--ledger-max "$LEDGER_MAX")
[ -z "${SECONDS_MAX:-}" ] || judge+=(--seconds-max "$SECONDS_MAX")
"$PYTHON" ci/nightly.py "${judge[@]}" || first $?
"$PYTHON" -m alignment.evidence ci/evidence || first $?
exit "$code"
