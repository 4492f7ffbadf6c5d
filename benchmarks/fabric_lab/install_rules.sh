# Replaces the rules of a leaf of a lab by those on standard input, as `dpro recipe nccl` gives them.
#
# $1, $2  prefix of the lab's namespaces, and the leaf; table 100 + n of a leaf leads over spine n
leaf=$1$2
old=$(ip -n "$leaf" rule list pref 100 | wc -l)
{
    while [ "$old" -gt 0 ]; do echo "rule del pref 100"; old=$((old - 1)); done
    while read -r _ from to next; do echo "rule add pref 100 from $from to $to lookup $((100 + ${next#s}))"; done
} | ip -n "$leaf" -batch -
