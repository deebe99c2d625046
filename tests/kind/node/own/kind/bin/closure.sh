#!/bin/bash
# Copies programs with all that they load into a folder, under the paths that they have here: an image without anything else.
set -euo pipefail
target=$1
programs="sh bash cat sleep mv head ip nft conntrack ipset curl jq kube-proxy
  iptables iptables-save iptables-restore ip6tables ip6tables-save ip6tables-restore
  iptables-nft iptables-nft-save iptables-nft-restore iptables-legacy iptables-legacy-save"
mkdir -p "$target"/{tmp,run,var/run,etc} "$target"/usr/{bin,sbin,lib,lib64}
for name in bin sbin lib lib64; do
  ln -s "usr/$name" "$target/$name"
done
for program in $programs; do
  link=$(command -v "$program")
  file=$(readlink -f "$link")
  echo "$file"
  mkdir -p "$target$(dirname "$link")"
  test "$file" = "$(readlink -f "$(dirname "$link")")/$(basename "$link")" || ln -sf "$file" "$target$link"
done >/tmp/files
ls /usr/lib/*/xtables/*.so /usr/lib/*/libnss_* >>/tmp/files
xargs -n1 ldd </tmp/files 2>/dev/null | grep -o '/[^ ]*' >>/tmp/files || true  # a static program has nothing to load
sort -u /tmp/files | while read -r file; do
  cp --parents -L "$file" "$target"
done
cp --parents /etc/nsswitch.conf /etc/protocols "$target"
