# preStop of a worker: the routers give it no new request, and this waits until none runs here, and no prompt of it is still
# being read. A worker that does not answer is not drained: its container is restarted under the same name, which would
# stay drained. A router that is away is passed over, and one that comes back meanwhile is told again.
python3 -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)' "$DRAIN_LIVE_URL" || exit 0
if [ -s "$DRAIN_CA_FILE" ]; then
    export SSL_CERT_FILE="$DRAIN_CA_FILE"
fi
for router in $DRAIN_ROUTERS; do
    set -- "$@" --router "$router"
done
kvxfer drain "$DRAIN_AGENT" "$@" --admin-key-file "$DRAIN_ADMIN_KEY_FILE" --wait "$DRAIN_SECONDS" || true
