{{- define "kvpool.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* Names of pods become names of store nodes and of hosts, so their length has a limit. */}}
{{- define "kvpool.fullname" -}}
{{- $name := include "kvpool.name" . -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* Labels that select a component: {root, component}. They never change over upgrades. */}}
{{- define "kvpool.selector" -}}
app.kubernetes.io/name: {{ include "kvpool.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "kvpool.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{ include "kvpool.selector" . }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvpool.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default .Chart.AppVersion $image.tag }}
{{- end -}}
{{- end }}

{{/* The account of a component: {root, component, values}. */}}
{{- define "kvpool.serviceAccount" -}}
{{- $own := printf "%s-%s" (include "kvpool.fullname" .root) .component -}}
{{- if .values.serviceAccount.create -}}
{{- default $own .values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{/*
The addresses of all masters, separated by commas.
Each master has a Service of its own. The address of the Service stays when the pod gets another one, so clients do not
wait for DNS.
*/}}
{{- define "kvpool.masters" -}}
{{- $root := . -}}
{{- $masters := list -}}
{{- range $i := until (int .Values.master.replicas) -}}
{{- $host := printf "%s-master-%d.%s.svc" (include "kvpool.fullname" $root) $i $root.Release.Namespace -}}
{{- $masters = append $masters (printf "%s://%s:7070" (include "kvpool.scheme" $root) $host) -}}
{{- end -}}
{{- join "," $masters -}}
{{- end }}

{{/*
The address that means every interface, as the host of HOST:PORT. A socket at [::] takes IPv4 too.
A release of an earlier chart lacks the value after `helm upgrade --reuse-values`.
*/}}
{{- define "kvpool.everyInterface" -}}
{{- eq (default "IPv4" .Values.ipFamily) "IPv6" | ternary "[::]" "0.0.0.0" -}}
{{- end }}

{{/* By default a Service gets only the first family of the cluster. This requests both, and accepts one. */}}
{{- define "kvpool.serviceFamilies" -}}
{{- if eq (default "IPv4" .Values.ipFamily) "IPv6" -}}
ipFamilyPolicy: PreferDualStack
{{- end }}
{{- end }}

{{- define "kvpool.etcdEndpoints" -}}
{{- if .Values.etcd.trial.enabled -}}
http://{{ include "kvpool.fullname" . }}-etcd.{{ .Release.Namespace }}.svc:2379
{{- else -}}
{{- join "," .Values.etcd.endpoints -}}
{{- end -}}
{{- end }}

{{/* The directory of the hosts that store nodes and workers share. */}}
{{- define "kvpool.socketHostPath" -}}
{{- $own := printf "/run/kvpool/%s/%s" .Release.Namespace (include "kvpool.fullname" .) -}}
{{- default $own .Values.node.sharedMemory.hostPath -}}
{{- end }}
