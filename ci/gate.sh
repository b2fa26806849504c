#!/usr/bin/env bash
# Runs gates and keeps their report: ci/gate.sh [gates...], e.g. ci/gate.sh logprob layerwise.
#
# PROFILE, DEVICE, REPORT and TIMEOUT (seconds) may be set. The exit code is that of the command line:
# 0 PASS, 1 FAIL, 2 wrong usage, 10 INVALID, 11 NOT_RUN. Nothing but PASS is green.
set -euo pipefail
cd "$(dirname "$0")/.."

gates=("$@")
[ ${#gates[@]} -gt 0 ] || gates=(rerun batch logprob layerwise weights)
report=${REPORT:-ci/reports/$(date -u +%Y%m%dT%H%M%SZ)}
mkdir -p "$report" || exit 2

options=(--report "$report")
[ -z "${PROFILE:-}" ] || options+=(--profile "$PROFILE")
[ -z "${DEVICE:-}" ] || options+=(--device "$DEVICE")

"${PYTHON:-python}" -m gates "${gates[@]}" "${options[@]}" --timeout "${TIMEOUT:-3600}" 2>&1 | tee "$report/log.txt"
