{{/* A size such as 8GiB, in MiB. The schema admits MiB, GiB and TiB only. */}}
{{- define "kvpool.mebibytes" -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- if hasSuffix "TiB" . -}}
{{- mul $number 1048576 -}}
{{- else if hasSuffix "GiB" . -}}
{{- mul $number 1024 -}}
{{- else -}}
{{- $number -}}
{{- end -}}
{{- end }}

{{/* All segments of one store node, in MiB. */}}
{{- define "kvpool.segmentsMebibytes" -}}
{{- $sum := int64 0 -}}
{{- range .Values.node.segments -}}
{{- $sum = add $sum (include "kvpool.mebibytes" . | int64) -}}
{{- end -}}
{{- $sum -}}
{{- end }}

{{/*
The resources of a store node. Its memory is that of the segments, which it allocates at start, and the overhead.
Segments in hugepages are a resource of their own. Request and limit are equal, so that Kubernetes never evicts a node
for memory that it requested. A node with disks has 257 MiB of buffers for them all.
*/}}
{{- define "kvpool.nodeResources" -}}
{{- $node := .Values.node -}}
{{- $segments := include "kvpool.segmentsMebibytes" . | int64 -}}
{{- $memory := include "kvpool.mebibytes" $node.memoryOverhead | int64 -}}
{{- if not $node.hugepages -}}
{{- $memory = add $memory $segments -}}
{{- end -}}
{{- if $node.ssd.enabled -}}
{{- $memory = add $memory 257 -}}
{{- end -}}
requests:
  cpu: {{ $node.cpu }}
  memory: {{ $memory }}Mi
  {{- if $node.hugepages }}
  hugepages-2Mi: {{ $segments }}Mi
  {{- end }}
  {{- if $node.rdma.enabled }}
  {{ $node.rdma.resource }}: {{ $node.rdma.count }}
  {{- end }}
limits:
  memory: {{ $memory }}Mi
  {{- if $node.hugepages }}
  hugepages-2Mi: {{ $segments }}Mi
  {{- end }}
  {{- if $node.rdma.enabled }}
  {{ $node.rdma.resource }}: {{ $node.rdma.count }}
  {{- end }}
{{- end }}

{{/* The longest time that a store node drains, in seconds. */}}
{{- define "kvpool.drainSeconds" -}}
{{- $drain := .Values.node.drain -}}
{{- $save := $drain.moveSeconds -}}
{{- if .Values.node.ssd.enabled -}}
{{- $save = max $drain.moveSeconds $drain.ssdSeconds -}}
{{- end -}}
{{- add $drain.workSeconds $save -}}
{{- end }}
