{{/* Names. Cluster-scoped ones bear the namespace too, so that two releases never share one. */}}
{{- define "surefoot.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "surefoot.fullname" -}}
{{- $name := include "surefoot.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "surefoot.clusterName" -}}
{{- printf "%s.%s" (include "surefoot.fullname" .) .Release.Namespace }}
{{- end }}

{{- define "surefoot.serviceAccount" -}}
{{- $account := .Values.operator.serviceAccount }}
{{- if $account.create }}
{{- default (printf "%s-operator" (include "surefoot.fullname" .)) $account.name }}
{{- else }}
{{- default "default" $account.name }}
{{- end }}
{{- end }}

{{- define "surefoot.tlsSecret" -}}
{{- default (printf "%s-coordinator-tls" (include "surefoot.fullname" .)) .Values.coordinator.tlsSecret }}
{{- end }}

{{- define "surefoot.keysSecret" -}}
{{- default (printf "%s-keys" (include "surefoot.fullname" .)) .Values.coordinator.keysSecret }}
{{- end }}

{{- define "surefoot.adminSecret" -}}
{{- default (printf "%s-memory-admin" (include "surefoot.fullname" .)) .Values.memoryTier.adminSecret }}
{{- end }}

{{- define "surefoot.memoryTlsSecret" -}}
{{- default (printf "%s-memory-tls" (include "surefoot.fullname" .)) .Values.memoryTier.tls.secret }}
{{- end }}

{{/* Labels. `part` is what operator, agents and policies select by. */}}
{{- define "surefoot.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ include "surefoot.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Call with (list $ "operator"). */}}
{{- define "surefoot.selector" -}}
{{- $top := index . 0 -}}
app.kubernetes.io/name: {{ include "surefoot.name" $top }}
app.kubernetes.io/instance: {{ $top.Release.Name }}
surefoot.dev/part: {{ index . 1 }}
{{- end }}

{{/* Of a pod; call as `selector`. No version in it: a new chart alone is no new revision of the memory tier. */}}
{{- define "surefoot.podLabels" -}}
{{- $top := index . 0 -}}
{{ include "surefoot.selector" . }}
{{- with $top.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Call with (list $ image "tag if none is given"). */}}
{{- define "surefoot.image" -}}
{{- $image := index . 1 }}
{{- with (index . 0).Values.imageRegistry }}
{{- printf "%s/" (trimSuffix "/" .) }}
{{- end }}
{{- if $image.digest }}
{{- printf "%s@%s" $image.repository $image.digest }}
{{- else }}
{{- printf "%s:%s" $image.repository (default (index . 2) $image.tag) }}
{{- end }}
{{- end }}

{{- define "surefoot.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Bytes of a quantity. A number without suffix comes as a float, whose text would have an exponent. */}}
{{- define "surefoot.bytes" -}}
{{- $text := kindIs "string" . | ternary (toString .) (int64 . | toString) }}
{{- if not (regexMatch "^[0-9]+(k|M|G|T|Ki|Mi|Gi|Ti)?$" $text) }}
{{- fail (printf "the quantity %s cannot be read: give a whole number of bytes, or one with k, M, G, T, Ki, Mi, Gi or Ti" $text) }}
{{- end }}
{{- $number := regexFind "^[0-9]+" $text | int64 }}
{{- $suffix := regexFind "[a-zA-Z]*$" $text }}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 }}
{{- mul $number (get $units $suffix | int64) }}
{{- end }}

{{/* Whether the API server asks the operator anything: "true", or nothing. */}}
{{- define "surefoot.admission" -}}
{{- if or .Values.operator.admission.jobs.enabled .Values.operator.admission.evictions.enabled }}true{{ end }}
{{- end }}

{{/* What both webhooks say behind their rules. */}}
{{- define "surefoot.webhook" -}}
{{- with .Values.operator.watchNamespace }}
namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: {{ . }}}}
{{- end }}
admissionReviewVersions: [v1]
failurePolicy: Ignore
sideEffects: None
timeoutSeconds: {{ .Values.operator.admission.timeoutSeconds }}
{{- end }}
