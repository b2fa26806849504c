#!/usr/bin/env bash
# The nightly job: every gate on every profile of this device, each with its own report, then the evidence check.
#
# A gate that is not green does not stop the others; the job's exit code is the first one that was not 0.
# PROFILES (space separated) and DEVICE may be set; REPORT is the folder for all reports.
set -uo pipefail
cd "$(dirname "$0")/.."

report=${REPORT:-ci/reports/nightly-$(date -u +%Y%m%d)}
device=${DEVICE:-cpu}
python=${PYTHON:-python}
code=0
first() { [ "$code" -ne 0 ] || code=$1; }

"$python" -m vime.cli doctor --device "$device" || first $?
for profile in ${PROFILES:-dense-tiny smollm2-135m}; do
  REPORT="$report/$profile" PROFILE="$profile" DEVICE="$device" ci/gate.sh rerun batch logprob layerwise weights cost || first $?
  # The gate's own fault must be found: anything but FAIL here means that the gate cannot fail.
  for gate in rerun batch logprob layerwise weights; do
    "$python" -m gates "$gate" --control --profile "$profile" --device "$device" --report "$report/$profile-control-$gate"
    found=$?
    if [ "$found" -ne 1 ]; then
      echo "control of $gate on $profile: expected FAIL (exit code 1), found exit code $found" >&2
      first 1
    fi
  done
done
"$python" -m alignment.evidence ci/evidence || first $?
exit "$code"
