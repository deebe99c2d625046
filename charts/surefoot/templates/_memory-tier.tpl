{{/* Redis servers of a node. Templates of one server are called with (list $ number), the others with $. */}}

{{/* How many; values kept from a release before there were several have no number. */}}
{{- define "surefoot.servers" -}}
{{- default 1 .Values.memoryTier.servers | int }}
{{- end }}

{{/* What the number is appended to names server 0 alone: with one server everything is called as it always was. */}}
{{- define "surefoot.serverSuffix" -}}
{{- with index . 1 }}-{{ . }}{{ end }}
{{- end }}

{{/* Its maxmemory: an equal part of what the node may take. */}}
{{- define "surefoot.serverBytes" -}}
{{- $tier := (index . 0).Values.memoryTier }}
{{- $servers := include "surefoot.servers" (index . 0) | int }}
{{- $part := div (include "surefoot.bytes" $tier.maxMemory | int64) $servers }}
{{- if lt $part 1048576 }}
{{- fail (printf "memoryTier.maxMemory is %v, of which each of %d servers gets %d bytes, and needs 1Mi at least: raise it" $tier.maxMemory $servers $part) }}
{{- end }}
{{- $part }}
{{- end }}

{{/* Its maxmemory-clients: what its clients may make it hold beside maxmemory, replies to ranks that restore above all. */}}
{{- define "surefoot.clientBytes" -}}
{{- $given := default "256Mi" (index . 0).Values.memoryTier.clientMemory }}
{{- $bytes := include "surefoot.bytes" $given | int64 }}
{{- if lt $bytes 134217728 }}
{{- fail (printf "memoryTier.clientMemory is %v, and the longest value on its way needs 128Mi: raise it" $given) }}
{{- end }}
{{- $bytes }}
{{- end }}

{{/* What its container needs: 17/16 of maxmemory, as the allocator rounds up, what its clients may take, and 128Mi: itself, and the one longest value by which clients may pass their limit before it is enforced. */}}
{{- define "surefoot.serverNeeds" -}}
{{- $maximum := include "surefoot.serverBytes" . | int64 }}
{{- add $maximum (div $maximum 16) (include "surefoot.clientBytes" . | int64) 134217728 }}
{{- end }}

{{/* Its requests and limits: a memory limit below what it needs would have it killed when it fills, or is read by many. */}}
{{- define "surefoot.serverResources" -}}
{{- $tier := (index . 0).Values.memoryTier }}
{{- $maximum := include "surefoot.serverBytes" . | int64 }}
{{- $needed := include "surefoot.serverNeeds" . | int64 }}
{{- $resources := deepCopy $tier.resources }}
{{- $limits := default dict $resources.limits }}
{{- $requests := default dict $resources.requests }}
{{- if not $limits.memory }}
{{- $_ := set $limits "memory" (toString $needed) }}
{{- else if lt (include "surefoot.bytes" $limits.memory | int64) $needed }}
{{- $servers := include "surefoot.servers" (index . 0) | int }}
{{- $each := eq $servers 1 | ternary "" (printf " for each of %d servers" $servers) }}
{{- fail (printf "memoryTier.resources.limits.memory is %v (%s bytes), and maxMemory %v (%d bytes%s) needs %d bytes with what its clients (memoryTier.clientMemory) and Redis take beside it: raise the limit, leave it out, or lower one of the two" $limits.memory (include "surefoot.bytes" $limits.memory) $tier.maxMemory $maximum $each $needed) }}
{{- end }}
{{- if not $requests.memory }}
{{- $_ := set $requests "memory" $limits.memory }}
{{- end }}
{{- toYaml (dict "limits" $limits "requests" $requests) }}
{{- end }}

{{/* Its configuration but for the password. */}}
{{- define "surefoot.redisConf" -}}
{{- $tier := (index . 0).Values.memoryTier }}
{{- $server := index . 1 }}
{{- $port := add 6379 $server }}
{{- if $tier.tls.enabled -}}
port 0
tls-port {{ $port }}
tls-cert-file /var/run/secrets/surefoot-memory-tls/tls.crt
tls-key-file /var/run/secrets/surefoot-memory-tls/tls.key
tls-ca-cert-file /var/run/secrets/surefoot-memory-tls/ca.crt
tls-auth-clients no
tls-protocols "TLSv1.3"
{{- else -}}
port {{ $port }}
{{- end }}
{{- if $tier.localSocket.enabled }}
unixsocket /run/surefoot-memory/redis-{{ $server }}.sock
unixsocketperm 777
{{- end }}
bind * -::*
protected-mode yes
maxmemory {{ include "surefoot.serverBytes" . }}
maxmemory-clients {{ include "surefoot.clientBytes" . }}
dir /data
{{ (index . 0).Files.Get "files/server.conf" | trimSuffix "\n" }}
{{- end }}

{{/* All configurations of a node, of which the pod's annotation has the digest. */}}
{{- define "surefoot.redisConfs" -}}
{{- $top := . }}
{{- range $server := until (include "surefoot.servers" . | int) }}
{{- if $server }}{{ "\n" }}{{ end }}
{{- include "surefoot.redisConf" (list $top $server) }}
{{- end }}
{{- end }}

{{/* Its container; each has its own volumes of the same paths, so that a command need not know which server it starts. */}}
{{- define "surefoot.redisContainer" -}}
{{- $top := index . 0 }}
{{- $tier := $top.Values.memoryTier }}
{{- $server := index . 1 }}
{{- $suffix := include "surefoot.serverSuffix" . }}
- name: redis{{ $suffix }}
  image: {{ include "surefoot.image" (list $top $tier.image "") }}
  imagePullPolicy: {{ $tier.image.pullPolicy }}
  command:
    {{- if $tier.command }}
    {{- toYaml $tier.command | nindent 4 }}
    {{- else }}
    # the password comes from its file: a command line or an environment can be read by more than Redis
    - sh
    - -euc
    - |
      umask 077
      password=$(sed 's/["\\]/\\&/g' /var/run/secrets/surefoot-memory/password)
      test -n "$password" || { echo 'the secret has no password in it' >&2; exit 1; }
      { cat /etc/surefoot-memory/redis.conf
        printf 'requirepass "%s"\n' "$password"
      } > /data/redis.conf
      exec redis-server /data/redis.conf
    {{- end }}
  env:
    # jemalloc never gives pages back: else every save pays for them again. And it takes chunks out of what large
    # dropped saves leave: else the server grows beyond its limit
    - {name: MALLOC_CONF, value: "dirty_decay_ms:-1,muzzy_decay_ms:-1,lg_extent_max_active_fit:20"}
    - {name: JE_MALLOC_CONF, value: "dirty_decay_ms:-1,muzzy_decay_ms:-1,lg_extent_max_active_fit:20"}
    {{- with $tier.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - {name: redis{{ $suffix }}, containerPort: {{ add 6379 $server }}, protocol: TCP}
  securityContext:
    {{- toYaml $tier.securityContext | nindent 4 }}
  startupProbe:
    tcpSocket: {port: redis{{ $suffix }}}
    periodSeconds: 1
    failureThreshold: 60
  livenessProbe:
    tcpSocket: {port: redis{{ $suffix }}}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  resources:
    {{- include "surefoot.serverResources" . | nindent 4 }}
  volumeMounts:
    - {name: data{{ $suffix }}, mountPath: /data}
    - {name: configuration{{ $suffix }}, mountPath: /etc/surefoot-memory, readOnly: true}
    - {name: password, mountPath: /var/run/secrets/surefoot-memory, readOnly: true}
    {{- if $tier.tls.enabled }}
    - {name: tls, mountPath: /var/run/secrets/surefoot-memory-tls, readOnly: true}
    {{- end }}
    {{- if $tier.localSocket.enabled }}
    - {name: socket, mountPath: /run/surefoot-memory}
    {{- end }}
    {{- with $tier.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
