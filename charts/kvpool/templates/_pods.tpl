{{- define "kvpool.daemonEnv" -}}
- name: RUST_LOG
  value: {{ .root.Values.logLevel | quote }}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: HOST_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- with .values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The security context of a pod. Files of a claim belong to the group, so that the user may write them. */}}
{{- define "kvpool.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.user | int64 }}
runAsGroup: {{ .Values.user | int64 }}
fsGroup: {{ .Values.user | int64 }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvpool.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/*
A daemon answers HTTP when it serves. Until then the startup probe waits: a store node touches all its memory first,
and a master reads its metadata.
*/}}
{{- define "kvpool.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: http, scheme: {{ include "kvpool.scheme" .root | upper }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: {{ div .startSeconds 2 }}
livenessProbe:
  httpGet: {path: /healthz, port: http, scheme: {{ include "kvpool.scheme" .root | upper }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: http, scheme: {{ include "kvpool.scheme" .root | upper }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end }}

{{/* Where pods may run: {root, component, values}. */}}
{{- define "kvpool.scheduling" -}}
{{- $selector := include "kvpool.selector" . -}}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .values.affinity }}
affinity:
  {{- toYaml .values.affinity | nindent 2 }}
{{- else if eq .values.antiAffinity "preferred" }}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- $selector | nindent 14 }}
{{- else if eq .values.antiAffinity "required" }}
affinity:
  podAntiAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- $selector | nindent 12 }}
{{- end }}
{{- range $i, $constraint := .values.topologySpreadConstraints }}
{{- if eq $i 0 }}
topologySpreadConstraints:
{{- end }}
  -
    {{- toYaml (omit $constraint "labelSelector") | nindent 4 }}
    labelSelector:
      {{- if $constraint.labelSelector }}
      {{- toYaml $constraint.labelSelector | nindent 6 }}
      {{- else }}
      matchLabels:
        {{- $selector | nindent 8 }}
      {{- end }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Labels of a pod have no versions, so that a pod need not restart for a change elsewhere in the chart. */}}
{{- define "kvpool.podMeta" -}}
labels:
  {{- include "kvpool.selector" . | nindent 2 }}
  {{- with .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
The names of a store node's disks, as items. Each is a volume, mounted under its name. The first is named without a
number, so that a second disk changes nothing for it.
*/}}
{{- define "kvpool.disks" -}}
{{- $ssd := .Values.node.ssd -}}
{{- if $ssd.enabled -}}
{{- range $index := until (eq $ssd.volume "claim" | ternary (int $ssd.claim.count) (len $ssd.hostPaths)) }}
- {{ eq $index 0 | ternary "ssd" (printf "ssd-%d" $index) }}
{{- end }}
{{- end -}}
{{- end }}

{{/* A claim template: {name, storage, about}. */}}
{{- define "kvpool.claim" -}}
metadata:
  name: {{ .name }}
  labels:
    {{- include "kvpool.selector" .about | nindent 4 }}
spec:
  accessModes: [ReadWriteOnce]
  {{- with .storage.storageClass }}
  storageClassName: {{ . }}
  {{- end }}
  resources:
    requests:
      storage: {{ .storage.size }}
{{- end }}
