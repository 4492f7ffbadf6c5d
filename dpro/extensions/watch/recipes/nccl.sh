# NCCL: put a plan of paths into effect, before a job starts, and around a slow cable or switch.
#
#   dpro recipe nccl > nccl.sh
#   PLANNED=RUN sh nccl.sh                 writes nccl-plan/; then start the job with its settings
#   PLANNED=RUN dpro watch RUN2 --policy policy.toml --on-finding 'sh nccl.sh'    with a rule do = "reroute"
#
# PLANNED    a finished run of the same job on the same hosts, with its topology (dpro topology FILE --attach)
# OUT        folder for what is written                                                          [nccl-plan]
# ADDRESSES  file with port, address and device, one port a line: node0:nic0 10.0.0.1 mlx5_0      [names stay]
# LEFT       share of its rate with which a part that a finding names is still planned                    [0]
# INSTALL    command that replaces the rules of a switch: its name is appended, rules are on stdin     [none]
#
# OUT/rules   for switches: at SWITCH, packets from address FROM to address TO leave to NEXT. NCCL offers no
#             choice of the UDP source port or flow label of a queue pair, and all channels of a communicator
#             have one traffic class: switches can give one path to each two addresses.
# OUT/job.env, OUT/HOST.env   settings for all ranks, and for those of a host
# OUT/avoid   parts that findings have named; delete a line once the part is repaired
#
# The plan holds as long as the rings do: the same ranks on the same hosts, and with NCCL_GRAPH_FILE the same
# channels. NCCL_IB_TC, or traffic_class of a process group, may be set as before: the rules take any.
set -eu
[ "${DPRO_ACTION:-reroute}" = reroute ] || { echo "$DPRO_ACTION: this recipe only reroutes"; exit 2; }
: "${PLANNED:?a finished run of the same job}"
out=${OUT:-nccl-plan} new=.new$$ addresses=${ADDRESSES:-/dev/null}
mkdir -p "$out"
trap 'rm -f "$out"/*"$new"' EXIT
[ ! -e "$out/avoid" ] || cp "$out/avoid" "$out/avoid$new"
touch "$out/avoid$new"
if [ "${DPRO_PART:-}" ] && ! cut -d= -f1 "$out/avoid$new" | grep -qxF "$DPRO_PART"; then
    echo "$DPRO_PART=${LEFT:-0}" >>"$out/avoid$new"
fi
set --
while IFS= read -r part; do set -- "$@" --avoid "$part"; done <"$out/avoid$new"
dpro topology "$PLANNED" --plan "$out/plan.json$new" --rules "$out/names$new" "$@" >"$out/summary"
awk -F '\t' -v OFS='\t' '
    FILENAME == ARGV[1] { split($0, word, " "); address[word[1]] = word[2]; next }
    !/^#/ { for (at = 2; at <= 3; at++) if ($at in address) $at = address[$at] }
    { print }' "$addresses" "$out/names$new" >"$out/rules$new"

cat >"$out/job.env" <<SETTINGS
# Ring r leaves by port r of each host, as the plan assumes.
NCCL_CROSS_NIC=0
# More queue pairs between two addresses would take the same path.
NCCL_IB_QPS_PER_CONNECTION=1
# Adaptive routing, on by default on InfiniBand, lets switches ignore the plan.
NCCL_IB_ADAPTIVE_ROUTING=0
SETTINGS
awk -v out="$out" '
    $3 { host = $1; sub(/:.*/, "", host); devices[host] = devices[host] (devices[host] ? "," : "") $3 }
    END { for (host in devices) print "NCCL_IB_HCA==" devices[host] >(out "/" host ".env") }' "$addresses"

if [ "${INSTALL:-}" ]; then
    for switch in $(cat "$out/rules" "$out/rules$new" 2>/dev/null | grep -v '^#' | cut -f1 | sort -u); do
        awk -F '\t' -v name="$switch" '$1 == name' "$out/rules$new" | $INSTALL "$switch"
    done
fi
for file in plan.json rules avoid; do mv "$out/$file$new" "$out/$file"; done
[ -z "${DPRO_RUN:-}" ] || dpro topology "$DPRO_RUN" --paths "$out/plan.json" >"$out/summary"
echo "$(grep -cv '^#' "$out/rules") rules, none over: $(tr '\n' ' ' <"$out/avoid")"
