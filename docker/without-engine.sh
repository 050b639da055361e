#!/usr/bin/env bash
# The steps of Dockerfile.cpu where no container engine is to be had: install into a clean root, then run there as an
# unprivileged user with read-only weights, and ask from outside by the configured host name. Needs root (mount namespaces).
#
#   docker/without-engine.sh            keeps nothing
#   ROOT=/some/dir docker/without-engine.sh   keeps the root for a second, faster run
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(id -u)" = 0 ] || { echo "needs root to make a mount namespace" >&2; exit 1; }

PYTHON=${PYTHON:-$(command -v python3)}
TORCH=${TORCH:-torch==2.13.0}
kept=${ROOT:-}
root=${ROOT:-$(mktemp -d)}
mkdir -p "$root" && chmod 755 "$root" # mktemp makes 0700: user 10001 must be able to walk through its own /
work=$(mktemp -d)
port=$("$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
trap 'status=$?; [ -n "${server:-}" ] && kill "$server" 2>/dev/null; wait 2>/dev/null || true
      rm -rf "$work"; [ -n "$kept" ] || rm -rf "$root"; exit $status' EXIT
step() { printf -- '-- %s\n' "$1"; }

step "build stage: virtual environment and package in a clean tree"
mkdir -p "$root"/{opt,src,tmp,proc,dev,run/secrets,state,weights,etc}
git ls-files -z --cached --others --exclude-standard | tar --null -T - -cf - | tar -xf - -C "$root/src"
[ -x "$root/opt/agentserve/bin/python" ] || "$PYTHON" -m venv --copies "$root/opt/agentserve"
"$root/opt/agentserve/bin/python" -m pip install -q "$TORCH"
"$root/opt/agentserve/bin/python" -m pip install -q "$root/src"

step "run stage: user 10001, token from a secret, weights read-only"
token=$("$PYTHON" -c 'import secrets; print(secrets.token_urlsafe(32))')
printf '%s\n' "$token" >"$root/run/secrets/agentserve_token"
chown 10001 "$root/run/secrets/agentserve_token" "$root/state" && chmod 400 "$root/run/secrets/agentserve_token"
chmod 1777 "$root/tmp"
rm -rf "$root/weights" && cp -r agentserve/demo_model "$root/weights"
prefix=$("$PYTHON" -c 'import sys; print(sys.base_prefix)')

cat >"$work/inside.sh" <<INSIDE
set -e
for d in usr lib lib64 bin; do
  [ -e /\$d ] || continue
  mkdir -p $root/\$d && mount --bind -o ro /\$d $root/\$d
done
case $prefix in /usr|/usr/*) ;; *) mkdir -p $root$prefix && mount --bind $prefix $root$prefix && mount -o remount,bind,ro $root$prefix ;; esac
for p in \$(dirname $prefix) \$(dirname \$(dirname $prefix)); do chmod o+x $root\$p 2>/dev/null || true; done
mount --bind $root/weights $root/weights && mount -o remount,bind,ro $root/weights
mount -t proc proc $root/proc && mount --bind /dev $root/dev
printf 'agentserve:x:10001:10001::/state:/bin/sh\n' >$root/etc/passwd
cp /etc/ld.so.cache $root/etc/ 2>/dev/null || true
exec chroot --userspec=10001:10001 $root /usr/bin/env -i HOME=/state PATH=/opt/agentserve/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 \
  AGENTSERVE_HOST=0.0.0.0 AGENTSERVE_PORT=$port AGENTSERVE_STATE_DIR=/state AGENTSERVE_ALLOWED_HOSTS=agentserve \
  AGENTSERVE_TOKEN_FILE=/run/secrets/agentserve_token \
  /opt/agentserve/bin/python -m agentserve serve --model /weights --model-name demo
INSIDE
unshare --mount --propagation private bash "$work/inside.sh" >"$work/log" 2>&1 &
server=$!

ask() { # ask HOST TOKEN PATH -> status code
  "$root/opt/agentserve/bin/python" - "$port" "$@" <<'PY'
import http.client, sys
port, host, token, path = sys.argv[1:5]
c = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
body = '{"model": "demo", "input": "Hello", "max_output_tokens": 8}' if path == "/v1/responses" else None
headers = {"Host": host, "Content-Type": "application/json"}
if token: headers["Authorization"] = "Bearer " + token
try:
    c.request("POST" if body else "GET", path, body, headers)
    print(c.getresponse().status)
except OSError:
    print("down")
PY
}
expect() { # expect WHAT WANTED GOT
  [ "$2" = "$3" ] && printf '   ok    %s (%s)\n' "$1" "$3" || { printf '   FAIL  %s: wanted %s, got %s\n' "$1" "$2" "$3"; cat "$work/log"; exit 1; }
}
for _ in $(seq 120); do
  [ "$(ask agentserve:$port "$token" /readyz)" = 200 ] && break
  kill -0 "$server" 2>/dev/null || { cat "$work/log"; exit 1; }
  sleep 1
done
expect "answers by its configured name with the token" 200 "$(ask agentserve:$port "$token" /v1/responses)"
expect "refuses another Host" 403 "$(ask evil.example:$port "$token" /v1/responses)"
expect "refuses a missing token" 401 "$(ask agentserve:$port "" /v1/responses)"
pid=$(pgrep -f "^/opt/agentserve/bin/python -m agentserve serve --model /weights" | head -1)
expect "runs as user" 10001 "$(stat -c %u "/proc/$pid")"
expect "weights are read-only" yes "$(nsenter -t "$pid" -m touch "$root/weights/x" 2>/dev/null && echo no || echo yes)"
step "container steps hold"
