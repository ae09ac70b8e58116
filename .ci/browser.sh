#!/usr/bin/env bash
# Installs Chromium for the tests that look at a report in a real browser, where that is possible: as root, with apt.
# Never fails and never takes long; without a browser those tests skip and say so.
set -uo pipefail

command -v chromium chromium-browser google-chrome > /dev/null && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
    echo "no Chromium, and no right to install it: tests in a browser will skip" >&2
    exit 0
fi

install=(timeout --kill-after=10s 240s env DEBIAN_FRONTEND=noninteractive
    apt-get install --yes --quiet --no-install-recommends -o DPkg::Lock::Timeout=60 chromium)
"${install[@]}" > /dev/null 2>&1 ||
    { timeout --kill-after=10s 90s apt-get update --quiet > /dev/null 2>&1 && "${install[@]}" > /dev/null 2>&1; } ||
    echo "Chromium could not be installed: tests in a browser will skip" >&2
exit 0
